"""One commit of what several ranks have prepared: each reports its files, rank 0 publishes them, all hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simckpt.distributed.several import error_from_json, error_to_json
from simckpt.distributed.voting import Ballot, Common
from simckpt.errors import CoordinationError, OutcomeUnknownError
from simckpt.storage import Commit, CommitRecord, StoreFiles, records
from simckpt.storage.preparing import Prepared

Publish = Callable[[list[Prepared], Sequence[Any]], Commit]


def commit_together(
    files: StoreFiles,
    run: str,
    prepared: Prepared,
    ballot: Ballot,
    publish: Publish,
    *,
    same: Mapping[str, Any] | None = None,
    facts: Any = None,
    common: Common | None = None,
) -> Commit:
    """Returns the commit, once rank 0 has told of it; what this rank has prepared is gone if there will be none.

    Args:
        files: of the store.
        run: the run's name.
        prepared: by this rank.
        ballot: of all ranks.
        publish: makes the checkpoint, on rank 0; gets what all ranks have prepared, and their facts, in their order.
        same: what must be equal on all ranks, such as the step.
        facts: of this rank, for `publish`.
        common: see `Ballot.hold`.

    Raises:
        CoordinationError: nothing was committed; it names the ranks that are missing or failed, or what differs.
        SupersededError: nothing was committed, which is no failure.
        OutcomeUnknownError: rank 0 or the store was lost while it may have been committing.
        SimckptError: what rank 0 has met in committing.
    """
    done: list[Commit] = []
    failed: list[Exception] = []

    def commit(reports: list[Any]) -> dict[str, Any]:
        try:
            _check_same([report["same"] for report in reports])
            others = [Prepared.from_json(files.path, report["prepared"]) for report in reports[1:]]
            done.append(publish([prepared, *others], [report["facts"] for report in reports]))
        except Exception as error:
            # told as an outcome, so that the same error is raised by all
            failed.append(error)
            return {"failed": error_to_json(error)}
        return {"seq": done[0].record.seq, "record": done[0].record.to_bytes().decode()}

    report = {"prepared": prepared.to_json(), "same": dict(same or {}), "facts": facts}
    try:
        told = ballot.hold(report, commit, common=common)
    except OutcomeUnknownError:
        # what was prepared may be part of a checkpoint; the next claim sweeps it if it is not
        raise
    except BaseException:
        files.discard(prepared)
        raise
    if "failed" in told:
        files.discard(prepared)
        raise failed[0] if failed else error_from_json(told["failed"])
    files.conclude(run, prepared)
    if done:
        return done[0]
    record = records.parse_commit(told["record"].encode(), "what rank 0 has told", seq=told["seq"])
    assert isinstance(record, CommitRecord)
    return Commit(record, prepared.leaves)


def _check_same(of_ranks: Sequence[Mapping[str, Any]]) -> None:
    for rank, facts in enumerate(of_ranks):
        differing = sorted(key for key in {*facts, *of_ranks[0]} if facts.get(key) != of_ranks[0].get(key))
        if differing:
            listing = "; ".join(f"{key}: {of_ranks[0].get(key)} and {facts.get(key)}" for key in differing)
            message = f"ranks 0 and {rank} save different things, nothing was committed: {listing}"
            raise CoordinationError(message, ranks=[rank])
