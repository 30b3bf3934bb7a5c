"""Marks: what people add to a checkpoint after its commit. Tags, a pin, metrics that came later; one small file each.

`runs/<run>/marks/<checkpoint id>/` holds `tag-<tag>`, `pin` and `metrics-<n>`. A tag or a pin is there if its file is:
damage to the content of a pin cannot unpin. Marks need no claim, so that they can be made while the run is training.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from simckpt.errors import ConfigurationError, FormatError, InvalidNameError, StorageError, StoreError
from simckpt.storage import durable, names, reader, records, sealed, work

MARKS = "marks"
PIN = "pin"
MARK_LIMIT = records.COMMIT_LIMIT  # [bytes]
_TAG_FILE = "tag-"
_METRICS_FILE = re.compile(r"metrics-([1-9][0-9]{0,7})")


@dataclass(frozen=True)
class Marks:
    """The marks of one checkpoint.

    Attributes:
        tags: in no order.
        pinned: whether it is protected from pruning.
        metrics: {name: value} that came after the save; of two of one name the later one.
    """

    tags: frozenset[str] = frozenset()
    pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


UNMARKED = Marks()


def check_tag(tag: str) -> str:
    """Returns `tag`, if it can be a tag: the rules are those of a run's name.

    Raises:
        InvalidNameError: it cannot.
    """
    if isinstance(tag, str) and names.is_run_name(tag):
        return tag
    raise InvalidNameError(
        f"{tag!r} cannot be a tag: up to 100 letters, digits and . _ - are allowed, starting with a letter or a digit, "
        "without '..' and without a dot at the end"
    )


def mark(disk: durable.Disk, works: work.WorkFolders, root: Path, run: str, checkpoint: str, name: str) -> None:
    """Makes the mark `name` of a checkpoint, durably; one that exists stays as it is."""
    folder = durable.make_folders(disk, root, "runs", run, MARKS, checkpoint)
    if not os.path.lexists(folder / name):
        with works.made() as made:
            durable.write_record(disk, made / name, sealed.seal("mark", {"checkpoint": checkpoint, "mark": name}))
            durable.publish_file(disk, made / name, folder / name)


def unmark(disk: durable.Disk, root: Path, run: str, checkpoint: str, name: str) -> None:
    """Removes a mark, durably; a missing one is fine."""
    path = root / "runs" / run / MARKS / checkpoint / name
    with durable.translated(path):
        try:
            # a store removes nothing behind a symbolic link
            with reader.opened_folder(root, "runs", run, MARKS, checkpoint):
                disk.unlink(path)
        except FileNotFoundError:
            return
    durable.sync_folder(disk, path.parent)


def add_metrics(
    disk: durable.Disk, works: work.WorkFolders, root: Path, run: str, checkpoint: str, metrics: Mapping[str, float]
) -> None:
    """Writes metrics that came later, under the next number.

    Raises:
        ConfigurationError: they do not fit into 4 KB.
    """
    fields = {"checkpoint": checkpoint, "metrics": {name: sealed.to_json(value) for name, value in metrics.items()}}
    data = sealed.seal("mark", fields)
    if len(data) > MARK_LIMIT:
        message = f"{len(metrics)} metrics take {len(data)} bytes and may take {MARK_LIMIT}: add them in several calls"
        raise ConfigurationError(message, keys=list(metrics))
    folder = durable.make_folders(disk, root, "runs", run, MARKS, checkpoint)
    with works.made() as made:
        with durable.translated(folder):
            files = [path.name for path in folder.iterdir()]
        number = 1 + max((number for number, _ in _metrics_files(files)), default=0)
        # another process may take the number first: then the next one is tried
        while True:
            name = f"metrics-{number}"
            durable.write_record(disk, made / name, data)
            if durable.publish_file(disk, made / name, folder / name):
                return
            number += 1


def tag_file(tag: str) -> str:
    """Returns the name of the mark of a tag."""
    return _TAG_FILE + check_tag(tag)


def is_mark(name: str) -> bool:
    """Returns whether a file of this name beside the marks of a checkpoint is one."""
    tag = name.removeprefix(_TAG_FILE)
    return name == PIN or (tag != name and names.is_run_name(tag)) or _METRICS_FILE.fullmatch(name) is not None


def has_content(name: str) -> bool:
    """Returns whether a mark of this name says more than that it is there."""
    return _METRICS_FILE.fullmatch(name) is not None


def parse_mark(data: bytes, path: object, *, checkpoint: str, name: str) -> dict[str, float]:
    """Returns the metrics in a mark, none of a tag or a pin.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: as in `sealed.unseal`; also the mark of another checkpoint.
    """
    fields = sealed.unseal(data, "mark", path=path)
    if fields.id("checkpoint") != checkpoint:
        raise FormatError(f"{path} is a mark of checkpoint {fields.id('checkpoint')}: a file was renamed or copied")
    if _METRICS_FILE.fullmatch(name):
        return fields.floats("metrics")
    if fields.text("mark") != name:
        raise FormatError(f"{path} is the mark {fields.text('mark')!r}: a file was renamed or copied")
    return {}


def read_marks(root: Path, run: str, *, damaged: dict[str, StoreError] | None = None) -> dict[str, Marks]:
    """Returns {checkpoint id: its marks} of the checkpoints that have any.

    Args:
        root: the store's folder.
        run: the run's name.
        damaged: receives {checkpoint id: error} where later metrics cannot be read; tags and pin are returned all the
            same. Without it the first error is raised.
    """
    names.check_run_name(run)
    found: dict[str, Marks] = {}
    with contextlib.suppress(FileNotFoundError), reader.opened_folder(root, "runs", run, MARKS) as folder:
        for checkpoint in sorted(filter(names.ID.fullmatch, _listed(folder))):
            marks = _read_folder(root, run, folder, checkpoint, damaged)
            if marks != UNMARKED:
                found[checkpoint] = marks
    return found


def read_marks_of(root: Path, run: str, checkpoint: str, *, damaged: dict[str, StoreError] | None = None) -> Marks:
    """Returns the marks of one checkpoint; see `read_marks`."""
    names.check_run_name(run)
    with contextlib.suppress(FileNotFoundError), reader.opened_folder(root, "runs", run, MARKS) as folder:
        return _read_folder(root, run, folder, checkpoint, damaged)
    return UNMARKED


def _read_folder(root: Path, run: str, folder: int, checkpoint: str, damaged: dict[str, StoreError] | None) -> Marks:
    try:
        with reader.opened_folder(folder, checkpoint) as marks:
            files = _listed(marks)
            tags = frozenset(
                tag for name in files if names.is_run_name(tag := name.removeprefix(_TAG_FILE)) and tag != name
            )
            metrics: dict[str, float] = {}
            for _, name in _metrics_files(files):
                path = root / "runs" / run / MARKS / checkpoint / name
                try:
                    metrics |= _read_metrics(marks, name, checkpoint, path)
                except StoreError as error:
                    if damaged is None:
                        raise
                    damaged[checkpoint] = error
    except FileNotFoundError:
        return UNMARKED
    return Marks(tags, PIN in files, metrics)


def _read_metrics(marks: int, name: str, checkpoint: str, path: Path) -> dict[str, float]:
    data = reader.read_small(marks, name, limit=MARK_LIMIT, path=path)
    return parse_mark(data, path, checkpoint=checkpoint, name=name)


def _metrics_files(files: list[str]) -> list[tuple[int, str]]:
    """Returns [(number, name)] of the files that hold later metrics, in the order in which they were made."""
    return sorted((int(match[1]), name) for name in files if (match := _METRICS_FILE.fullmatch(name)))


def _listed(folder: int) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise StorageError(f"the marks of a run cannot be listed: {error.strerror}") from error
