"""A session as a data set of episodes that Minari opens: its HDF5 layout, format version 0.5."""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.errors import ConfigurationError, FormatError
from simckpt.hardware.gaps import gaps
from simckpt.hardware.reset_arguments import UNKNOWN, options_of, seed_of
from simckpt.hardware.session_tables import Array, needed
from simckpt.state.tables import mapped
from simckpt.storage import blocks, durable, exports, layout

if TYPE_CHECKING:
    from simckpt.hardware.session import Session

_COLUMNS = ("action", "observation", "reward", "terminated", "truncated")
VERSION = "0.5.3"  # of Minari, whose files these are: each later one names those that it reads
DATA, METADATA, FOLDER = "main_data.hdf5", "metadata.json", "data"


@dataclass(frozen=True)
class Episode:
    """Some rows from a reset on.

    Attributes:
        start: the first row.
        stop: one behind the last row.
        observation: what came before the first row.
        seed: of the reset, or None.
        options: of the reset, or None.
    """

    start: int
    stop: int
    observation: Any
    seed: int | None = None
    options: Any = None


def export_minari(session: Session, path: str | os.PathLike[str], *, dataset: str | None = None) -> Path:
    """Writes the episodes of a session as a data set of Minari's, and returns its folder; nothing is replaced.

    `minari.MinariDataset(path / "data")` opens it; so does `minari.load_dataset` if the folder lies in Minari's own,
    under the id of the data set. Rows before the first reset begin with the observation of the first snapshot, and are
    left out where there is none; rows after a gap are left out up to the next reset. The last step of an episode that
    was cut off counts as truncated, as with Minari's own collector. Infos are not recorded. Commands and readings are
    no part of such a data set, nor are options of resets that JSON has not, and seeds of 2**63 and more.

    Args:
        session: what was recorded.
        path: of the new folder.
        dataset: id of the data set, such as "cart-pole/expert-v0"; by default "<name>-v0" of the session.

    Raises:
        ConfigurationError: there is no whole episode, or an id or a name that Minari cannot have.
        ConflictError: the path exists.
        DamagedError: something of the session cannot be trusted; there is no folder then.
        StorageError: the disk refused; there is no folder then.
    """
    target = Path(path)
    name = _checked_id(f"{session.name.replace('.', '-')}-v0" if dataset is None else dataset)
    found = _episodes(session)
    if not found:
        raise ConfigurationError(
            f"session {session.name!r} has no row that follows a reset or a snapshot: there is no episode to export"
        )
    disk = durable.Disk()
    with exports.new_file(disk, target) as made:
        folder = durable.make_folders(disk, made.parent, made.name, FOLDER)
        size = _write_data(disk, folder / DATA, session, found)
        metadata = _metadata(session, name, found, size)
        durable.write_record(disk, folder / METADATA, json.dumps(metadata).encode())
        durable.sync_folder(disk, folder)
    return target


def _checked_id(dataset: str) -> str:
    parts = dataset.split("/")
    plain = all(part and part.replace("-", "").replace("_", "").isalnum() for part in parts)
    version = parts[-1].rpartition("-v")
    if not plain or not version[0] or not version[2].isdecimal():
        raise ConfigurationError(
            f"the id of a data set is 'name-v0' or 'group/name-v0', of letters, digits, - and _; got {dataset!r}",
            keys=["dataset"],
        )
    return dataset


def _episodes(session: Session) -> list[Episode]:
    """Returns the episodes of a session, in order; reads no observations but the first ones."""
    rows = session.read(["rows/row", "rows/terminated", "rows/truncated"]).get("rows")
    numbers, terminated, truncated = needed(rows, "row", "terminated", "truncated")
    if not len(numbers):
        return []
    ended = numbers[terminated | truncated] + 1
    # what was lost between two rows may have been a reset
    before_gaps = [*(numbers[:-1][np.diff(numbers) > 1] + 1).tolist(), *(gap.rows.start for gap in gaps(session, ()))]
    begun: dict[int, Episode] = {}
    first = next((each for each in session.snapshots if each.row in numbers[:1]), None)
    if first is not None:
        observation = session.snapshot(first)["observation"]
        if observation is not None:
            begun[int(numbers[0])] = Episode(int(numbers[0]), 0, observation)
    for tables in session.chunks(["resets"]):
        first_seen, *columns = needed(tables.get("resets"), "observation", "row", "seed", "seeded", "options")
        for place, (row, seed, seeded, text) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            # of several resets before one row the last one counts
            options = None if text == UNKNOWN else options_of(text)
            seen = mapped(lambda array, place=place: array[place], first_seen)
            begun[row] = Episode(row, 0, seen, seed_of(text, seed, seeded=seeded), options)
    stops = sorted({*begun, *ended.tolist(), *before_gaps, int(numbers[-1]) + 1})
    known = set(numbers.tolist())
    # a reset at the end has no rows yet
    return [replace(begun[row], stop=stops[bisect.bisect_right(stops, row)]) for row in sorted(begun) if row in known]


def _write_data(disk: durable.Disk, path: Path, session: Session, episodes: list[Episode]) -> int:
    """Writes the HDF5 file, and returns its size [bytes]; one episode is in memory at a time."""
    columns = _Columns(session)
    made: list[blocks.Block] = []
    groups: dict[str, layout.Attributes] = {}
    for number, episode in enumerate(episodes):
        group = f"episode_{number}"
        groups[group] = _attributes(number, episode)
        # none are recorded, but Minari cannot print an episode without the group
        groups[f"{group}/infos"] = ()
        for name, column in columns.of(episodes[0]).items():
            length = episode.stop - episode.start + name.startswith("observations")
            slot = layout.Slot(f"{group}/{name}", column.dtype, (length, *column.shape[1:]))
            made.append(blocks.Block(slot, functools.partial(columns.chunks, episode, name)))
    plan, _ = blocks.write_blocks(disk, path, made, groups=groups)
    return plan.size


def _attributes(number: int, episode: Episode) -> layout.Attributes:
    found: list[tuple[str, str | int]] = [("id", number), ("total_steps", episode.stop - episode.start)]
    if episode.seed is not None and 0 <= episode.seed < 2**63:
        found.append(("seed", episode.seed))
    if episode.options is not None:
        with contextlib.suppress(TypeError, ValueError):
            found.append(("options", json.dumps(episode.options)))
    return tuple(found)


class _Columns:
    """The arrays of an episode by their paths; those of the last one that was asked for are kept."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kept: tuple[Episode | None, dict[str, Array]] = (None, {})

    def of(self, episode: Episode) -> dict[str, Array]:
        if self._kept[0] is not episode:
            self._kept = (episode, _arrays(self._session, episode))
        return self._kept[1]

    def chunks(self, episode: Episode, name: str) -> Iterator[durable.Bytes]:
        return blocks.chunks_of(blocks.flat(self.of(episode)[name]))


def _arrays(session: Session, episode: Episode) -> dict[str, Array]:
    rows = session.read(["rows"], start=episode.start, stop=episode.stop).get("rows")
    actions, seen, rewards, terminated, truncated = needed(rows, *_COLUMNS)
    try:
        observations = mapped(
            lambda first, others: np.concatenate([np.asarray(first)[None].astype(others.dtype), others]),
            episode.observation,
            seen,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigurationError(
            f"session {session.name!r} has no episode from row {episode.start} on that Minari can hold: the first "
            f"observation is another than the next ones ({error})",
            keys=["observation"],
        ) from error
    truncated = truncated.copy()
    truncated[-1] |= not terminated[-1]
    return {
        **_named("observations", observations),
        **_named("actions", actions),
        "rewards": rewards,
        "terminations": terminated,
        "truncations": truncated,
    }


def _named(path: str, tree: Any) -> dict[str, Array]:
    """Returns the arrays of a tree by the paths that Minari gives them."""
    if isinstance(tree, Mapping):
        parts = [(str(key), part) for key, part in tree.items()]
    elif isinstance(tree, tuple):
        parts = [(f"_index_{place}", part) for place, part in enumerate(tree)]
    else:
        return {path: tree}
    for key, _ in parts:
        if not key or "/" in key or key in (".", ".."):
            raise ConfigurationError(f"Minari cannot hold a part of an observation or action that is called {key!r}")
    return {inner: array for key, part in parts for inner, array in _named(f"{path}/{key}", part).items()}


def _metadata(session: Session, dataset: str, episodes: list[Episode], size: int) -> dict[str, Any]:
    start = episodes[0].start
    columns = session.read(["rows/observation", "rows/action"], start=start, stop=start + 1)
    try:
        spaces = {
            f"{kind}_space": json.dumps(_space(session.spaces.get(kind), columns["rows"][kind]))
            for kind in ("observation", "action")
        }
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"session {session.name!r}: its record describes spaces that its rows are not of: {error!r}"
        ) from error
    facts = {
        "total_episodes": len(episodes),
        "total_steps": sum(each.stop - each.start for each in episodes),
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "dataset_id": dataset,
        "minari_version": VERSION,
        "dataset_size": round(size / 1e6, 1),
        "description": f"recorded by simckpt: session {session.name}, id {session.id}",
    }
    origin = session.origin
    return facts | spaces | ({} if origin is None else {"algorithm_name": f"{origin.run}@{origin.step}"})


def _space(declared: Any, column: Any) -> dict[str, Any]:
    """Returns a space as Minari writes it; where it is unknown, the unbounded one of what was recorded."""
    if isinstance(column, Mapping):
        known = (declared or {}).get("subspaces") or {}
        return {"type": "Dict", "subspaces": {key: _space(known.get(key), part) for key, part in column.items()}}
    if isinstance(column, tuple):
        listed = (declared or {}).get("subspaces") or [None] * len(column)
        return {"type": "Tuple", "subspaces": [_space(*each) for each in zip(listed, column, strict=True)]}
    if declared and declared.get("type") in ("Discrete", "MultiDiscrete", "MultiBinary"):
        return dict(declared)
    shape, dtype = column.shape[1:], column.dtype
    if declared and declared.get("type") == "Box":
        low, high = declared["low"], declared["high"]
    elif dtype.kind == "b":
        return {"type": "MultiBinary", "n": list(shape)}
    elif dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        low, high = -math.inf, math.inf
    bounds = {name: np.broadcast_to(np.array(each), shape).tolist() for name, each in (("low", low), ("high", high))}
    return {"type": "Box", "dtype": str(dtype), "shape": list(shape), **bounds}
