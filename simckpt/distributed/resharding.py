"""What becomes of the components that each rank has of its own when a checkpoint of n ranks is restored on m others.

Pure functions of values. With the same n none of this is asked: each rank gets back what it saved, bit for bit. Else

- **vector envs** are redistributed whole, in the order of the ranks, with their random generators, where the ranks have
  as many envs together as before. Arrays of wrappers with a place for each env go along; what a wrapper keeps for all
  of its envs (running means) comes from the rank on which a new rank's first env was; samplers of spaces are derived
  anew.
- **replay buffers** keep all rows and slots where the envs are redistributed: a row's transitions go with their envs.
  Where each rank has as many envs as before and the order of rows means nothing, rows are dealt out one by one.
- **random streams** are derived anew from the checkpoint's id and the new rank, in any component: none is drawn from
  twice. Keys of JAX and states as `torch.get_rng_state()` returns them cannot be, and do not go to several ranks.
- **variables of a LoopState** that are equal on all ranks are kept; arrays with a place for each of the rank's envs go
  along with the envs; generators are derived anew; others are refused by name.

Everything is told in a line, and what fits none of this is refused before anything changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.errors import StateMismatchError
from simckpt.state import LoopState, ObjectState, RNGStreams
from simckpt.state.compare import encoded_differences
from simckpt.state.components import GeneratorHandle, Handle
from simckpt.state.leaf import Leaf
from simckpt.state.reseeding import reseed
from simckpt.state.tree import Encoded, copy_tree, decode, encode

_SHOWN = 5  # names that a line lists
_TORCH_STATE = (5056,)  # shape of what torch.get_rng_state() returns
_FIXED = "a key of JAX or a state from torch.get_rng_state() cannot be derived anew for each rank"


@dataclass(frozen=True, slots=True)
class Move:
    """Envs of one old rank that go to one new rank: those from `start` up to `stop`."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Deal:
    """How the envs of a component go from the old ranks to the new ones.

    Attributes:
        before: how many each old rank had.
        after: how many each new rank has.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether there are as many places as envs."""
        return sum(self.before) == sum(self.after)

    def moves(self, rank: int) -> list[Move]:
        """Returns which envs a new rank gets, in its own order; ranks are counted through one after the other."""
        first = sum(self.after[:rank])
        last, found, passed = first + self.after[rank], [], 0
        for source, count in enumerate(self.before):
            start, stop = max(first - passed, 0), min(last - passed, count)
            if start < stop:
                found.append(Move(source, start, stop))
            passed += count
        return found


@dataclass(frozen=True, slots=True)
class Change:
    """Of a restore on another number of ranks: where this process stands in it.

    Attributes:
        origin: id of the checkpoint, from which streams are derived.
        rank: of this process.
        before: how many ranks there were.
        after: how many there are.
        deals: {component of vector envs: how its envs are dealt out}.
    """

    origin: str
    rank: int
    before: int
    after: int
    deals: Mapping[str, Deal]

    def seed(self, component: str) -> str:
        """Returns the text that streams of a component are derived from; no two ranks have the same."""
        return f"{self.origin} {component} rank {self.rank} of {self.after}"

    def told(self, component: str, what: str) -> str:
        """Returns a line of the report."""
        return f"{component}: from {self.before} to {self.after} ranks: {what}"


@dataclass(frozen=True, slots=True)
class Resharded:
    """The state of a component for this rank, and what happened to it, a line each."""

    tree: Any
    lines: tuple[str, ...]


def num_envs(tree: Any) -> int | None:
    """Returns how many envs a captured state is of; None if it is none of a vector env whose envs can be told apart."""
    vector = tree.get("vector") if isinstance(tree, Mapping) else None
    if not isinstance(vector, Mapping) or "autoreset" not in vector:
        return None
    return len(vector["autoreset"])


def reshard(component: str, handle: Handle, saved: Mapping[int, Any], live: Any, change: Change) -> Resharded:
    """Returns the state of one component for this rank.

    Args:
        component: its name.
        handle: of the live object.
        saved: {old rank: its decoded state}; of all old ranks. It is asked only for those that are needed: of vector
            envs and replay buffers those of `Deal.moves`, unless rows are dealt out one by one. Trees may be changed.
        live: what the live object's handle captures.
        change: from which ranks to which.

    Raises:
        StateMismatchError: it does not fit the policy; it names what, and what can be done.
    """
    obj = getattr(handle, "obj", None)
    if component in change.deals:
        return reshard_envs(component, saved, live, change)
    if isinstance(obj, RNGStreams) or isinstance(handle, GeneratorHandle):
        return reshard_streams(component, saved, change)
    if isinstance(obj, LoopState):
        return reshard_loop(component, saved, live, change)
    if hasattr(handle, "adapter") and hasattr(handle, "buffer"):
        from simckpt.distributed.replay_rows import reshard_replay

        return reshard_replay(component, handle, saved, change)
    return reshard_other(component, saved, change)


def reshard_streams(component: str, saved: Mapping[int, Any], change: Change) -> Resharded:
    """Returns random streams of the kinds that were saved, all of them derived anew."""
    tree = copy_tree(saved[min(change.rank, change.before - 1)])
    refuse_fixed_streams(component, fixed_streams(encode(tree)), change)
    reseed(tree, change.seed(component))
    return Resharded(tree, (change.told(component, "all random streams are derived anew from the checkpoint's id"),))


def reshard_other(component: str, saved: Mapping[int, Any], change: Change) -> Resharded:
    """Returns a state that was the same on all ranks but for its streams; any other is refused."""
    encoded = [_without_streams(saved[rank]) for rank in range(change.before)]
    differing = [rank for rank in range(1, change.before) if encoded_differences(encoded[0], encoded[rank])]
    if differing:
        problem = (
            f"{component}: it differed between ranks 0 and {differing[0]}, and nothing is known of how it goes from "
            f"{change.before} to {change.after} ranks: restore it on {change.before}, or {leave(component)}"
        )
        raise StateMismatchError(problem, problems=[problem])
    refuse_fixed_streams(component, fixed_streams(encoded[0]), change)
    tree = copy_tree(saved[0])
    reseed(tree, change.seed(component))
    has_streams = encoded_differences(encode(saved[0]), encode(tree))
    kept = "it was equal on all ranks and is kept" + ("; its random streams are derived anew" if has_streams else "")
    return Resharded(tree, (change.told(component, kept),))


def leave(*places: str) -> str:
    """Returns how a restore is told to leave something as it is, for messages."""
    listing = ", ".join(map(repr, places))
    return f"leave it as the program has it, by restore_latest(untouched={{{listing}}})"


def fixed_streams(encoded: Encoded, *, besides: Collection[str] = ()) -> list[str]:
    """Returns the paths of random streams that cannot be derived anew, as far as they can be told from numbers."""
    return [
        path
        for path, leaf in encoded.leaves.items()
        if path not in besides
        and (leaf.kind == "jax.key" or (leaf.kind, leaf.dtype, tuple(leaf.shape)) == ("torch", "uint8", _TORCH_STATE))
    ]


def refuse_fixed_streams(component: str, paths: Sequence[str], change: Change) -> None:
    """Raises StateMismatchError for streams that several ranks would draw from alike."""
    if paths and change.after > 1:
        problem = f"{component}/{paths[0]}: {_FIXED}: make it from the rank, and {leave(component)}"
        raise StateMismatchError(problem, problems=[problem])


def reshard_loop(component: str, saved: Mapping[int, Any], live: Mapping[str, Any], change: Change) -> Resharded:
    """Returns the variables of a loop.

    Raises:
        StateMismatchError: variables differ between the ranks and belong to no envs; all are named.
    """
    kept: list[str] = []
    moved: list[str] = []
    everywhere = [set(saved[rank]) for rank in range(change.before)]
    problems = [f"{component}/{name}: not all ranks have it" for name in sorted(set.union(*everywhere) - set(saved[0]))]
    found: dict[str, Any] = {}
    for name in saved[0]:
        values = [saved[rank].get(name) for rank in range(change.before)]
        merged = None
        deals: list[Deal | None] = [deal for deal in change.deals.values() if deal.fits]
        for deal in deals or [None]:
            merged = Merging(values, live.get(name), deal, change.rank)
            if not merged.left:
                break
        assert merged is not None
        found[name] = merged.tree
        (moved if merged.moved else kept).append(name)
        problems += [f"{component}/{name}: {left}" for left in merged.left[:1]]
        if merged.fixed and not merged.left and change.after > 1:
            problems.append(f"{component}/{name}: {_FIXED}")
    if problems:
        names = [problem.partition(":")[0] for problem in problems]
        remedy = (
            "before it is saved, make it an array with a place for each env, or give it the same value on all ranks; "
            f"or {leave(*names)}"
        )
        raise StateMismatchError(
            f"variables of the loop do not go from {change.before} to {change.after} ranks: "
            f"{'; '.join(problems)}: {remedy}",
            problems=[f"{problem}: {remedy}" for problem in problems],
        )
    reseed(found, change.seed(component))
    lines = []
    if moved:
        lines.append(change.told(component, f"{_names(moved)} went along with the envs"))
    lines.append(change.told(component, f"{_names(kept)} kept, equal on all ranks; generators derived anew"))
    return Resharded(found, tuple(lines))


def reshard_envs(component: str, saved: Mapping[int, Any], live: Any, change: Change) -> Resharded:
    """Returns the joined state of this rank's envs; see `sim.sub_envs` for its form.

    Raises:
        StateMismatchError: there are more or fewer places than envs, or the old ranks' vector envs are of two kinds.
    """
    from simckpt.sim.sub_envs import join, part

    deal = change.deals[component]
    if not deal.fits:
        problem = (
            f"{component}: the checkpoint has {sum(deal.before)} envs on {change.before} ranks, the {change.after} "
            f"ranks here have {sum(deal.after)}: make as many, or {leave(component)}"
        )
        raise StateMismatchError(problem, problems=[problem])
    moves = deal.moves(change.rank)
    if not moves:
        problem = f"{component}: rank {change.rank} has no envs"
        raise StateMismatchError(problem, problems=[problem])
    taken, models, vectors = [], {}, []
    for move in moves:
        state = saved[move.source]
        vectors.append(state["vector"])
        models.update(state.get("models", {}))
        taken += part(state)[move.start : move.stop]
    tree = join(taken, models)
    tree["models"] = models
    if not models:
        del tree["models"]
    first = vectors[0]
    for name in ("rewards", "terminations", "truncations"):
        if all(name in vector for vector in vectors):
            tree["vector"][name] = _rows([vector[name] for vector in vectors], moves)
    tree["vector"]["observations"] = _batched([vector["observations"] for vector in vectors], moves, deal)
    merged = Merging([vector["around"] for vector in vectors], live["vector"]["around"], deal, change.rank, moves=moves)
    refuse_fixed_streams(component, merged.fixed, change)
    around = _with_live_spaces(merged.tree, live["vector"]["around"], {})
    reseed(around, change.seed(component))
    tree["vector"] = {
        "num_envs": deal.after[change.rank],
        "autoreset_mode": first["autoreset_mode"],
        **tree["vector"],
        "around": around,
        "returned": [
            None if any(one is None for one in each) else _batched(list(each), moves, deal)
            for each in zip(*(vector["returned"] for vector in vectors), strict=True)
        ],
    }
    sources = ", ".join(f"{move.start} to {move.stop - 1} of rank {move.source}" for move in moves)
    lines = [change.told(component, f"rank {change.rank} has envs {sources}, with their generators")]
    left = [text for text in merged.left if "_space/" not in text.partition(":")[0]]
    if left:
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        what = f"what wrappers keep for all their envs is that of rank {moves[0].source} here ({left[0]}{more})"
        lines.append(change.told(component, what))
    lines.append(change.told(component, "generators of the vector env's spaces are derived anew"))
    return Resharded(tree, tuple(lines))


def _with_live_spaces(saved: Any, live: Any, seen: dict[int, Any]) -> Any:
    """Returns a tree in which spaces have the sizes of the live ones, and the generators that were saved."""
    if id(saved) in seen:
        return seen[id(saved)]
    if type(saved) is not type(live):
        return saved
    if isinstance(saved, ObjectState):
        seen[id(saved)] = saved
        is_space = saved.type_name == live.type_name and saved.type_name.startswith("gymnasium.spaces.")
        for name, value in saved.attributes.items():
            here = live.attributes.get(name)
            if is_space and name != "_np_random" and not _leads_on(value):
                saved.attributes[name] = here
            elif here is not None:
                saved.attributes[name] = _with_live_spaces(value, here, seen)
    elif isinstance(saved, dict):
        seen[id(saved)] = saved
        for key, value in saved.items():
            if key in live:
                saved[key] = _with_live_spaces(value, live[key], seen)
    elif isinstance(saved, (list, tuple)) and len(saved) == len(live) and any(map(_leads_on, saved)):
        parts = [_with_live_spaces(value, here, seen) for value, here in zip(saved, live, strict=True)]
        if isinstance(saved, tuple):
            return tuple(parts)
        saved[:] = parts
    return saved


def _leads_on(value: Any) -> bool:
    """Whether there may be spaces in a value."""
    if isinstance(value, (list, tuple)):
        return any(map(_leads_on, value))
    return isinstance(value, (ObjectState, dict))


class Merging:
    """One tree made of those of several ranks.

    Attributes:
        tree: the first one's, with rows of all in arrays that have a place for each env.
        moved: whether there was such an array.
        left: what differs between the ranks and is no such array, a text each.
        fixed: paths of random streams that cannot be derived anew, besides those in such arrays.

    Args:
        trees: of all old ranks, or, if `moves` is given, of the rank of each move.
        live: the tree of the live object, or None if it has none yet; where an array has the same shape there as it was
            saved with, and is equal on all ranks, it belongs to no envs.
        deal: of the envs; None if no array can belong to envs.
        rank: of this process.
        moves: see above.
    """

    def __init__(
        self, trees: Sequence[Any], live: Any, deal: Deal | None, rank: int, *, moves: Sequence[Move] | None = None
    ) -> None:
        encoded = [_without_streams(tree) for tree in trees]
        if moves is None:
            ranks, moves = list(range(len(trees))), deal.moves(rank) if deal is not None else []
            places = [move.source for move in moves]
        else:
            ranks, places = [move.source for move in moves], list(range(len(moves)))
        counts = [deal.before[source] if deal is not None else -1 for source in ranks]
        # what an env's new rank lacks comes from the old rank of its first env
        first = encoded[places[0] if places else 0]
        shapes = _shapes(live)
        leaves, gathered = {}, set()
        for path, leaf in first.leaves.items():
            each = [one.leaves.get(path) for one in encoded]
            if deal is not None and _belongs_to_envs(each, counts, shapes.get(path)):
                parts = [encoded[place].leaves[path].data for place in places]
                data = _rows(parts, moves)
                leaf = Leaf(data, leaf.dtype, (len(data), *leaf.shape[1:]), leaf.kind)
                gathered.add(path)
            leaves[path] = leaf
        self.moved = bool(gathered)
        self.fixed = fixed_streams(first, besides=gathered)
        self.left = []
        for one in encoded:
            if one is not first:
                self.left += [str(d) for d in encoded_differences(_without(first, gathered), _without(one, gathered))]
        self.left = list(dict.fromkeys(self.left))
        self.tree = decode(leaves, first.structure, template=live)


def _belongs_to_envs(leaves: Sequence[Leaf | None], counts: Sequence[int], live: tuple[int, ...] | None) -> bool:
    first = leaves[0]
    if first is None or not first.shape:
        return False
    for leaf, count in zip(leaves, counts, strict=True):
        if leaf is None or not leaf.shape or leaf.shape[0] != count:
            return False
        if (leaf.dtype, leaf.kind, leaf.shape[1:]) != (first.dtype, first.kind, first.shape[1:]):
            return False
    if live is not None and live == tuple(first.shape):
        # a constant that happens to be as long as there were envs
        return not all(leaf is not None and leaf.data.tobytes() == first.data.tobytes() for leaf in leaves)
    return True


def _shapes(live: Any) -> dict[str, tuple[int, ...]]:
    return {} if live is None else {path: tuple(leaf.shape) for path, leaf in encode(live).leaves.items()}


_NOTHING = Leaf(np.zeros(0), "float64", (0,), "numpy")


def _without(encoded: Encoded, paths: set[str]) -> Encoded:
    return Encoded(
        {path: _NOTHING if path in paths else leaf for path, leaf in encoded.leaves.items()}, encoded.structure
    )


def _without_streams(tree: Any) -> Encoded:
    """Returns a tree encoded with all its random streams made the same, for they are derived anew afterwards."""
    copied = copy_tree(tree)
    reseed(copied, "compared")
    return encode(copied)


def _rows(arrays: Sequence[Any], moves: Sequence[Move]) -> Any:
    return np.concatenate([array[move.start : move.stop] for array, move in zip(arrays, moves, strict=True)])


def _batched(values: Sequence[Any], moves: Sequence[Move], deal: Deal) -> Any:
    """Returns batched observations of the envs that were dealt, nested as those of each old rank are."""
    first = values[0]
    if isinstance(first, np.ndarray):
        return _rows(values, moves)
    if isinstance(first, Mapping):
        batched = ((key, _batched([value[key] for value in values], moves, deal)) for key in first)
        return OrderedDict(batched) if isinstance(first, OrderedDict) else dict(batched)
    if isinstance(first, tuple):
        if all(_is_batch(part, deal.before[moves[0].source]) for part in first):
            return tuple(_batched(list(parts), moves, deal) for parts in zip(*values, strict=True))
        # of a space of its own kind: a tuple of what the envs returned
        return tuple(one for value, move in zip(values, moves, strict=True) for one in value[move.start : move.stop])
    problem = f"observations of type {type(first).__name__} cannot be dealt out"
    raise StateMismatchError(problem, problems=[problem])


def _is_batch(value: Any, count: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == count
    if isinstance(value, Mapping):
        return all(_is_batch(part, count) for part in value.values())
    return isinstance(value, tuple) and bool(value) and all(_is_batch(part, count) for part in value)


def _names(names: Sequence[str]) -> str:
    if not names:
        return "no variables"
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
