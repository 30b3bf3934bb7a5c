"""A session as a data set of episodes that Minari opens: its HDF5 layout, format version 0.5."""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.storage import blocks, durable, exports, layout
from simckpt.storage.sessions import mapped

if TYPE_CHECKING:
    from simckpt.hardware.session import Session

Array = np.ndarray[Any, Any]

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
    no part of such a data set.

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
    tables = session.read(["rows/row", "rows/terminated", "rows/truncated", "resets"])
    rows, resets = tables.get("rows", {}), tables.get("resets", {})
    numbers = np.asarray(rows.get("row", ()), np.int64)
    if not len(numbers):
        return []
    ended = numbers[rows["terminated"] | rows["truncated"]] + 1
    before_gaps = numbers[:-1][np.diff(numbers) > 1] + 1
    begun: dict[int, Episode] = {}
    first = next((each for each in session.snapshots if each.row in numbers[:1]), None)
    if first is not None:
        observation = session.snapshot(first)["observation"]
        if observation is not None:
            begun[int(numbers[0])] = Episode(int(numbers[0]), 0, observation)
    for place, row in enumerate(np.asarray(resets.get("row", ()), np.int64).tolist()):
        # of several resets before one row the last one counts
        seed = int(resets["seed"][place]) if resets["seeded"][place] else None
        text = str(resets["options"][place])
        options = json.loads(text) if text and text != "?" else None
        first_seen = mapped(lambda array, place=place: array[place], resets["observation"])
        begun[row] = Episode(row, 0, first_seen, seed, options)
    stops = sorted({*begun, *ended.tolist(), *before_gaps.tolist(), int(numbers[-1]) + 1})
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
    if episode.seed is not None:
        found.append(("seed", episode.seed))
    if episode.options is not None:
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
    rows = session.read(["rows"], start=episode.start, stop=episode.stop)["rows"]
    observations = mapped(
        lambda first, others: np.concatenate([np.asarray(first)[None].astype(others.dtype), others]),
        episode.observation,
        rows["observation"],
    )
    truncated = rows["truncated"].copy()
    truncated[-1] |= not rows["terminated"][-1]
    return {
        **_named("observations", observations),
        **_named("actions", rows["action"]),
        "rewards": rows["reward"],
        "terminations": rows["terminated"],
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
    columns = session.read(["rows/observation", "rows/action"], start=episodes[0].start, stop=episodes[0].start + 1)
    spaces = {
        f"{kind}_space": json.dumps(_space(session.spaces.get(kind), columns["rows"][kind]))
        for kind in ("observation", "action")
    }
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
