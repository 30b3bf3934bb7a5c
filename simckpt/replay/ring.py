"""`ReplayBuffer`: a ring of transitions from vector envs, sampled uniformly, that saves its new rows alone."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from simckpt.errors import ConfigurationError, StateMismatchError
from simckpt.replay.adapter import (
    Column,
    ColumnTree,
    Path,
    Ring,
    RowTree,
    nest_columns,
    place_rows,
    register_replay_adapter,
)
from simckpt.replay.mapped import map_columns
from simckpt.state import generator_state, set_generator_state
from simckpt.state.rng import check_generator_state

Array: TypeAlias = np.ndarray[Any, Any]
# arrays, or dicts of them where the space is a Dict
Nested: TypeAlias = Any

# below this share of valid transitions they are listed, rather than drawn until one is valid
_LISTED = 1 / 4


class Batch(NamedTuple):
    """Transitions that were sampled, `(batch_size, ...)` each, in memory of their own."""

    observations: Nested
    actions: Nested
    rewards: Array
    terminated: Array
    truncated: Array
    next_observations: Nested


class ReplayBuffer:
    """A ring of transitions from vector envs; a save of a run that has it as a component writes its new rows alone.

    ```python
    buffer = simckpt.ReplayBuffer(125_000, envs.single_observation_space, envs.single_action_space, num_envs=8, seed=1)
    buffer.add(observations, actions, rewards, terminated, truncated, next_observations, valid=~previous_done)
    batch = buffer.sample(256)
    ```

    A row is one vector step, `num_envs` transitions; a full ring drops its oldest row for each new one. Vector envs in
    NEXT_STEP mode, Gymnasium's default, ignore the action of the step after an episode's end and return the first
    observation of the next: such a transition means nothing (14 % of Hopper's, at first), so say `valid=False` for it.

    Not safe for use by several threads at once.

    Attributes:
        capacity: how many rows there is room for [rows].
        num_envs: how many transitions make a row.
    """

    def __init__(
        self,
        capacity: int,
        observation_space: Any,
        action_space: Any,
        *,
        num_envs: int = 1,
        seed: int | np.random.SeedSequence,
        memory_map: str | os.PathLike[str] | None = None,
    ) -> None:
        """Makes an empty buffer.

        Args:
            capacity: how many rows there are room for [rows]; `capacity * num_envs` transitions.
            observation_space: of one env: anything with `shape` and `dtype`, or a Dict space of such.
            action_space: of one env, alike.
            num_envs: how many transitions make a row.
            seed: of the buffer's own generator, which decides the samples.
            memory_map: a folder for the columns, one `.npy` file each, if they are not to be in memory. It must not
                exist yet, be empty, or be one that a ReplayBuffer has made: its content is **discarded**, for what
                counts is in the checkpoints. The files are the buffer's, not the store's; delete them when you like.
                A restore holds all rows of the checkpoint in memory once.

        Raises:
            ConfigurationError: sizes below 1, a space without shape and dtype, or a folder that is not the buffer's.
            StorageError: there is no room for the files.
        """
        self.capacity = _positive("capacity", capacity)
        self.num_envs = _positive("num_envs", num_envs)
        shapes: dict[Path, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for name, space in (
            ("observations", observation_space),
            ("next_observations", observation_space),
            ("actions", action_space),
        ):
            shapes |= {(name, *path): leaf for path, leaf in _space_leaves(space, name).items()}
        shapes["rewards",] = ((), np.dtype(np.float32))
        for name in ("terminated", "truncated", "valid"):
            shapes[name,] = ((), np.dtype(bool))
        whole = {path: ((self.capacity, self.num_envs, *shape), dtype) for path, (shape, dtype) in shapes.items()}
        self._columns: dict[Path, Array]
        if memory_map is None:
            try:
                self._columns = {path: np.zeros(shape, dtype) for path, (shape, dtype) in whole.items()}
            except (MemoryError, ValueError) as error:
                raise ConfigurationError(f"{capacity} rows need too much memory: {error}", keys=["capacity"]) from error
        else:
            self._columns = map_columns(memory_map, whole)
        self._mapped = memory_map is not None
        self._rng = _generator(seed)
        self._added = 0
        self._filled = 0
        self._cursor = 0
        self._num_valid = 0
        self._look_up()

    def _look_up(self) -> None:
        """Notes what `add` and `sample` need of each column: views and facts that follow from the columns."""
        # (capacity * num_envs, ...): one index finds a transition, which is several times faster than two
        total = self.capacity * self.num_envs
        self._flat = {path: array.reshape(total, *array.shape[2:]) for path, array in self._columns.items()}
        self._valid = self._columns["valid",]
        self._all_valid = np.ones(self.num_envs, bool)
        self._rows = [(path, array, array.shape[1:], array.dtype) for path, array in self._columns.items()]

    def __getstate__(self) -> dict[str, Any]:
        if self._mapped:
            raise TypeError("a memory-mapped ReplayBuffer cannot be copied or pickled: its files are its own")
        # without the views, which would come back as arrays of their own
        looked_up = ("_flat", "_valid", "_all_valid", "_rows")
        return {name: value for name, value in vars(self).items() if name not in looked_up}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._look_up()

    def __copy__(self) -> ReplayBuffer:
        # a shallow copy would share the rows and count them apart
        return copy.deepcopy(self)

    def __len__(self) -> int:
        """Returns how many rows there are [rows]."""
        return self._filled

    def __repr__(self) -> str:
        return f"<ReplayBuffer of {self._filled} of {self.capacity} rows, num_envs={self.num_envs}>"

    @property
    def added(self) -> int:
        """Returns how many rows were ever added, those that were dropped since included [rows]."""
        return self._added

    @property
    def observations(self) -> Nested:
        """Returns the column `(capacity, num_envs, ...)`, read-only, by slot: the filled slots are the first ones."""
        return self._view("observations")

    @property
    def next_observations(self) -> Nested:
        """Returns the column, like `observations`."""
        return self._view("next_observations")

    @property
    def actions(self) -> Nested:
        """Returns the column, like `observations`."""
        return self._view("actions")

    @property
    def rewards(self) -> Array:
        """Returns the column `(capacity, num_envs)`, float32, like `observations`."""
        return _read_only(self._columns["rewards",])

    @property
    def terminated(self) -> Array:
        """Returns the column `(capacity, num_envs)`, bool, like `observations`."""
        return _read_only(self._columns["terminated",])

    @property
    def truncated(self) -> Array:
        """Returns the column `(capacity, num_envs)`, bool, like `observations`."""
        return _read_only(self._columns["truncated",])

    @property
    def valid(self) -> Array:
        """Returns the column `(capacity, num_envs)`, bool, like `observations`: which transitions may be sampled."""
        return _read_only(self._valid)

    def add(
        self,
        observations: Nested,
        actions: Nested,
        rewards: Any,
        terminated: Any,
        truncated: Any,
        next_observations: Nested,
        *,
        valid: Any = None,
    ) -> None:
        """Adds one row, in the place of the oldest if the ring is full.

        Args:
            observations: `(num_envs, ...)`, before the actions; nested like the space.
            actions: `(num_envs, ...)`.
            rewards: `(num_envs,)`.
            terminated: `(num_envs,)`.
            truncated: `(num_envs,)`.
            next_observations: `(num_envs, ...)`, after the actions; the last one of an episode where it ended.
            valid: `(num_envs,)`, False for transitions that mean nothing; None if all mean something.

        Raises:
            ConfigurationError: another shape or structure, or a dtype that does not go into the column's; nothing was
                added.
        """
        row = {
            "observations": observations,
            "actions": actions,
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "next_observations": next_observations,
            "valid": self._all_valid if valid is None else valid,
        }
        # all are checked before the first is written: a row in a full ring is in the place of one that counts
        parts = [(column, _part(row, path, shape, dtype)) for path, column, shape, dtype in self._rows]
        slot = self._cursor
        self._num_valid -= int(np.count_nonzero(self._valid[slot]))
        for column, part in parts:
            column[slot] = part
        self._num_valid += self.num_envs if valid is None else int(np.count_nonzero(self._valid[slot]))
        self._added += 1
        self._cursor = (slot + 1) % self.capacity
        self._filled = min(self._filled + 1, self.capacity)

    def sample(self, batch_size: int) -> Batch:
        """Returns transitions drawn uniformly, with replacement, from the valid ones; a function of the buffer's state.

        Raises:
            ConfigurationError: there is no valid transition yet, or the batch size is below 1.
        """
        index = self._draw(_positive("batch_size", batch_size))
        taken: dict[Path, Array] = {
            path: column.take(index, axis=0) for path, column in self._flat.items() if path[0] != "valid"
        }
        return Batch(**nest_columns(taken))

    def _draw(self, batch_size: int) -> Array:
        """Returns positions `slot * num_envs + env`, `(batch_size,)`."""
        total = self._filled * self.num_envs
        if self._num_valid == 0:
            raise ConfigurationError(f"the replay buffer holds no valid transition to sample ({self._filled} rows)")
        valid = self._flat["valid",]
        if self._num_valid < total * _LISTED:
            return np.flatnonzero(valid[:total])[self._rng.integers(0, self._num_valid, batch_size)]
        index = self._rng.integers(0, total, batch_size)
        if self._num_valid < total:
            while (wrong := np.flatnonzero(~valid[index])).size:
                index[wrong] = self._rng.integers(0, total, wrong.size)
        return index

    def _view(self, name: str) -> Nested:
        views = {path: _read_only(column) for path, column in self._columns.items() if path[0] == name}
        return nest_columns(views)[name]


class _Adapter:
    """The adapter of `ReplayBuffer`."""

    def columns(self, buffer: ReplayBuffer) -> ColumnTree:
        return nest_columns({path: Column(array, sealed=True) for path, array in buffer._columns.items()})

    def ring(self, buffer: ReplayBuffer) -> Ring:
        return Ring(buffer.capacity, buffer._filled, buffer._cursor, buffer._added)

    def extra(self, buffer: ReplayBuffer) -> Any:
        return {"rng": generator_state(buffer._rng)}

    def find_problems(self, buffer: ReplayBuffer, columns: RowTree, ring: Ring, extra: Any) -> list[str]:
        if not isinstance(extra, dict) or set(extra) != {"rng"}:
            return ["it is not the state of a simckpt.ReplayBuffer"]
        if ring.added is None or ring.added < ring.filled:
            return [f"{ring.filled} rows, but {ring.added} were added"]
        # `sample` relies on it
        if ring.filled < ring.capacity and ring.cursor != ring.filled:
            return [f"its {ring.filled} rows do not begin at slot 0: the next slot is {ring.cursor}"]
        try:
            check_generator_state(buffer._rng, extra["rng"])
        except StateMismatchError as error:
            return [f"rng: {problem}" for problem in error.problems]
        return []

    def load(self, buffer: ReplayBuffer, columns: RowTree, ring: Ring, extra: Any) -> None:
        place_rows(self.columns(buffer), columns, ring)
        # slots behind the filled ones count as nothing when they are overwritten
        buffer._valid[ring.filled :] = False
        buffer._filled, buffer._cursor, buffer._added = ring.filled, ring.cursor, ring.added or 0
        buffer._num_valid = int(np.count_nonzero(buffer._valid))
        set_generator_state(buffer._rng, extra["rng"])


register_replay_adapter(ReplayBuffer, _Adapter())


def _generator(seed: Any) -> np.random.Generator:
    if isinstance(seed, np.random.SeedSequence):
        return np.random.default_rng(seed)
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        message = f"seed is a whole number of at least 0 or a numpy SeedSequence, got {seed!r}"
        raise ConfigurationError(message, keys=["seed"])
    return np.random.default_rng(number)


def _positive(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigurationError(f"{name} is a number of at least 1, got {value!r}", keys=[name])
    return number


def _space_leaves(space: Any, name: str) -> dict[Path, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns {path: (shape, dtype)} of a space; ducks will do, so that gymnasium need not be imported."""
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        if not spaces or not all(isinstance(key, str) for key in spaces):
            raise ConfigurationError(f"{name}: a Dict space needs keys, and strings for keys: {space!r}", keys=[name])
        return {
            (key, *path): leaf
            for key, part in spaces.items()
            for path, leaf in _space_leaves(part, f"{name}/{key}").items()
        }
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None or spaces is not None:
        raise ConfigurationError(
            f"{name}: a replay buffer takes spaces with a shape and a dtype (Box, Discrete, MultiDiscrete) "
            f"and Dict spaces of them, got {space!r}",
            keys=[name],
        )
    return {(): (tuple(shape), np.dtype(dtype))}


def _part(row: Mapping[str, Any], path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Returns what goes into one slot of a column, checked."""
    value: Any = row[path[0]]
    for name in path[1:]:
        try:
            value = value[name]
        except (KeyError, TypeError, IndexError, ValueError):
            raise ConfigurationError(f"a row without {'/'.join(path)}", keys=["/".join(path)]) from None
    try:
        array = value if type(value) is np.ndarray else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _wrong_part(path, shape, dtype, f"what makes no array: {error}") from error
    given = array.dtype
    if array.shape != shape or not (given is dtype or np.can_cast(given, dtype, "same_kind")):
        raise _wrong_part(path, shape, dtype, f"{given} {array.shape}")
    return array


def _wrong_part(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], given: str) -> ConfigurationError:
    where = "/".join(path)
    return ConfigurationError(f"{where} of a row is {dtype} {shape}, got {given}", keys=[where])


def _read_only(array: Array) -> Array:
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
