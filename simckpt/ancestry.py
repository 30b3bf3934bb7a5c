"""The line that leads to the head of a run: which commits it descends from, and which a rollback left behind."""

from __future__ import annotations

from collections.abc import Sequence

from simckpt.storage import CommitRecord, TombstoneRecord


def may_be_head(record: CommitRecord | TombstoneRecord) -> bool:
    """Returns whether training goes on from this commit; not from a post-mortem, perhaps half a step, or a lost one."""
    return record.kind not in ("exception", "lost")


def ancestry(
    records: Sequence[CommitRecord | TombstoneRecord], *, to: str | None = None
) -> list[CommitRecord | TombstoneRecord]:
    """Returns the head and all it descends from, oldest first; pruned ones still carry the line.

    Args:
        records: of one run, in the order of commits.
        to: id of the commit that stands in for the head.
    """
    by_id = {record.id: record for record in records}
    line: list[CommitRecord | TombstoneRecord] = []
    newest = next((record for record in reversed(records) if may_be_head(record)), None)
    current = newest if to is None else by_id.get(to)
    while current is not None:
        line.append(current)
        above = by_id.get(current.parent) if current.parent is not None else None
        # a parent was committed before its children, whatever a record says
        current = above if above is not None and above.seq < current.seq else None
    return line[::-1]


def abandoned_ids(records: Sequence[CommitRecord | TombstoneRecord], *, origin: str | None) -> frozenset[str]:
    """Returns the ids of what a rollback left behind: off the line of the head, and no post-mortem.

    A line that ends at a damaged record says nothing of what was committed before its own first commit.

    Args:
        records: of one run, in the order of commits.
        origin: id of the checkpoint that the run started from, or None.
    """
    line = ancestry(records)
    on_line = {record.id for record in line}
    is_open = bool(line) and (line[0].kind == "lost" or line[0].parent not in (None, origin))
    known_from = line[0].seq if is_open else 0
    return frozenset(
        record.id for record in records if record.id not in on_line and may_be_head(record) and record.seq > known_from
    )


def on_line(
    records: Sequence[CommitRecord | TombstoneRecord], *, origin: str | None, damaged: bool
) -> list[CommitRecord | TombstoneRecord]:
    """Returns the head and all it descends from, oldest first, and what it may descend from if others are damaged.

    Args:
        records: those of one run that can be read, in the order of commits.
        origin: id of the checkpoint that the run started from, or None.
        damaged: whether the run has others, one of which may be where the line ends.
    """
    line = ancestry(records)
    if not damaged:
        return line
    known, left = {record.id for record in line}, abandoned_ids(records, origin=origin)
    return [record for record in records if record.id in known or (may_be_head(record) and record.id not in left)]
