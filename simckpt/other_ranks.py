"""A checkpoint of so many ranks, restored on another number: what each rank gets of what the old ones had of their own.

What all ranks share needs nothing of this: leaves are whole to a reader, and of those in parts each rank reads its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simckpt import state
from simckpt.errors import ConfigurationError, LeafNotFoundError, StateMismatchError
from simckpt.ranks import owner_of, stored_name
from simckpt.restore import ENVS, LOGS, Adjustment
from simckpt.storage.names import encode_part

if TYPE_CHECKING:
    from simckpt.checkpoint import Checkpoint
    from simckpt.distributed.resharding import Deal
    from simckpt.saver import Saver
    from simckpt.storage import LeafRecord

Counts = list[dict[str, int]]  # of each rank: {component: how many envs it has}


def ranks_of(checkpoint: Checkpoint, names: Collection[str], saver: Saver) -> int:
    """Returns how many ranks saved a checkpoint, with its components; 1 of a process that trained alone."""
    if checkpoint.shards or checkpoint.kind != "import":
        return max(checkpoint.shards, 1)
    # in a copy there is one file of all, and a process that trained alone may have given any name to its components
    owners = [owner_of(name)[1] for name in names if saver.ranks.size > 1 or name not in saver.bound]
    return 1 + max((rank for rank in owners if rank is not None), default=0)


def counts_of(saver: Saver) -> Counts:
    """Returns how many envs each rank has; every rank calls it."""
    given = {stored: name for name, stored in saver.names.items()}
    counts = {}
    for stored, component in saver.bound.items():
        count = getattr(saver.components.get(given[stored]), "num_envs", None)
        if component.order == ENVS and isinstance(count, int):
            counts[given[stored]] = count
    return saver.ranks.gather(counts)


def resharded(
    checkpoint: Checkpoint, saver: Saver, adjustment: Adjustment, counts: Counts
) -> tuple[Adjustment, list[str]]:
    """Returns an adjustment that puts other ranks' states into the components of this one, and lines that tell of it.

    Args:
        checkpoint: of another number of ranks.
        saver: of the checkpointer.
        adjustment: of the restore, by names in a checkpoint.
        counts: from `counts_of`.

    Raises:
        ConfigurationError: what is to stay as it is is not there; nothing was touched.
        StateMismatchError: what cannot go to other ranks; nothing was touched.
        DamagedError, FormatError: the checkpoint cannot be read.
    """
    from simckpt.distributed.resharding import Change, reshard

    ranks, names, leaves = saver.ranks, checkpoint.components(), checkpoint.leaves()
    before = ranks_of(checkpoint, names, saver)
    own = {name: stored for name, stored in saver.names.items() if _is_own(name, stored, names, saver)}
    deals = {name: _deal(name, leaves, before, counts) for name in own if name in counts[0]}
    change = Change(checkpoint.id, ranks.rank, before, ranks.size, {name: deal for name, deal in deals.items() if deal})
    trees, lines, problems = dict(adjustment.beginnings), list[str](), list[str]()
    for name, stored in own.items():
        if stored in adjustment.untouched:
            continue
        component = saver.bound[stored]
        live = None if component.order == LOGS else component.handle.capture()
        try:
            deal = change.deals.get(name)
            sources = range(before) if deal is None else [move.source for move in deal.moves(ranks.rank)]
            prefix = f"{stored}/"
            kept = {each.removeprefix(prefix) for each in adjustment.untouched if each.startswith(prefix)}
            saved = _Saved(name, checkpoint, before, live, sources, without=kept)
            found = reshard(name, component.handle, saved, live, change)
        except StateMismatchError as error:
            problems += error.problems or [str(error)]
            continue
        tree = found.tree
        if adjustment.seed is not None:
            state.reseed(tree, f"{adjustment.seed} {stored}")
        for variable in sorted(kept):
            if isinstance(live, Mapping) and variable in live:
                tree[variable] = live[variable]
            elif variable not in saved.left_out:
                message = f"'{name}/{variable}' cannot be left as it is: {name!r} has no such variable"
                raise ConfigurationError(message, keys=[f"{name}/{variable}"])
        trees[stored] = tree
        lines += found.lines
    if problems:
        message = (
            f"checkpoint {checkpoint.id} of {before} ranks does not go to the {ranks.size} here, which are untouched:"
        )
        raise StateMismatchError("\n  ".join([message, *problems]), problems=problems)
    untouched = adjustment.untouched | (trees.keys() - adjustment.beginnings.keys())
    return replace(adjustment, untouched=untouched, beginnings=trees), lines


def _is_own(name: str, stored: str, names: Collection[str], saver: Saver) -> bool:
    """Returns whether a component belongs to a rank, here or in a checkpoint with these components."""
    if stored != name or saver.ranks.size > 1:
        return stored != name
    first = stored_name(name, 0)
    # a program of one process may give such a name to another component
    return first in names and first not in saver.bound


def _deal(name: str, leaves: Mapping[str, LeafRecord], before: int, counts: Counts) -> Deal | None:
    from simckpt.distributed.resharding import Deal

    had = []
    for rank in range(before):
        leaf = leaves.get(f"{encode_part(_saved_name(name, rank, before))}/vector/autoreset")
        if leaf is None or not leaf.shape:
            return None
        had.append(leaf.shape[0])
    return Deal(tuple(had), tuple(each.get(name, 0) for each in counts))


def _saved_name(name: str, rank: int, before: int) -> str:
    return name if before == 1 else stored_name(name, rank)


class _Saved(Mapping[int, Any]):
    """{old rank: its state of a component}, read when it is asked for.

    Args:
        name: of the component.
        checkpoint: that has it.
        before: how many ranks there were.
        live: its state here, whose classes are taken.
        sources: the ranks that are needed, which are read at once: each reading parses the whole index.
        without: variables of a loop that are left out.

    Attributes:
        left_out: those of them that were there.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        before: int,
        live: Any,
        sources: Collection[int],
        *,
        without: Collection[str] = (),
    ) -> None:
        self.left_out: set[str] = set()
        self._without = without
        self._name = name
        self._checkpoint = checkpoint
        self._before = before
        self._live = live
        self._sources = frozenset(sources)
        self._read: dict[int, Any] = {}

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._read:
            wanted = self._sources if rank in self._sources else {rank}
            names = {each: _saved_name(self._name, each, self._before) for each in sorted(wanted)}
            try:
                saved = self._checkpoint.read(list(names.values()))
            except LeafNotFoundError as error:
                problem = f"component {self._name!r} is not in the checkpoint for all ranks: {error}"
                raise StateMismatchError(problem, problems=[problem]) from error
            for each, stored in names.items():
                tree = state.decode(saved[stored].leaves, saved[stored].structure, template=self._live)
                if self._without and isinstance(tree, dict):
                    self.left_out.update(tree.keys() & set(self._without))
                    tree = {key: value for key, value in tree.items() if key not in self._without}
                self._read[each] = tree
        return self._read[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._before))

    def __len__(self) -> int:
        return self._before


def needs_resharding(checkpoint: Checkpoint, names: Collection[str], saver: Saver) -> bool:
    """Returns whether a checkpoint, with its components, is of another number of ranks than there are."""
    before = ranks_of(checkpoint, names, saver)
    if saver.ranks.size > 1:
        return before != saver.ranks.size and any(stored != name for name, stored in saver.names.items())
    if not (checkpoint.shards or checkpoint.kind == "import"):
        return False
    return before > 1 or any(_is_own(name, stored, names, saver) for name, stored in saver.names.items())


def unknown_components(names: Collection[str], saver: Saver) -> list[str]:
    """Returns the components of a checkpoint that are not registered, whichever rank's they are."""
    return [name for name in names if name not in saver.bound and owner_of(name)[0] not in saver.known]
