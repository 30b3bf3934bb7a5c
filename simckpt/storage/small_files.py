"""The small files beside a run's commits as bytes, for those who move runs: starts, marks, the log."""

from __future__ import annotations

import contextlib
import re
import stat
from pathlib import Path

from simckpt.storage import durable, marks, reader, records, sealed, starts, work
from simckpt.storage.store_reader import EVENTS_FILE, EVENTS_LIMIT

_START = re.compile(rf"{starts.STARTS}/([0-9a-f]{{32}})\.json")
_MARK = re.compile(rf"{marks.MARKS}/([0-9a-f]{{32}})/((?:tag-)?[A-Za-z0-9][A-Za-z0-9._-]{{0,99}})")
_METRICS = re.compile(r"metrics-([1-9][0-9]{0,7})")


def is_small(file: str) -> bool:
    """Returns whether a name below a run's folder is that of a start, a mark or the log."""
    return file == EVENTS_FILE or bool(_START.fullmatch(file) or _MARK.fullmatch(file))


def listed(folder: Path) -> dict[str, int]:
    """Returns {name below a run's folder: size} of its starts and marks and of its log, in order [bytes]."""
    with durable.translated(folder):
        found = [*folder.glob(f"{starts.STARTS}/*"), *folder.glob(f"{marks.MARKS}/*/*"), *folder.glob(EVENTS_FILE)]
        sizes = {path.relative_to(folder).as_posix(): path.lstat() for path in found}
    return {name: sizes[name].st_size for name in sorted(sizes) if is_small(name) and stat.S_ISREG(sizes[name].st_mode)}


def read(root: Path, run: str, file: str) -> bytes:
    """Returns the bytes of one of them, or of the run's record; raises as `reader.read_small`."""
    limit = EVENTS_LIMIT if file == EVENTS_FILE else max(records.RECORD_LIMIT, starts.START_LIMIT)
    return reader.read_small(root, "runs", run, *file.split("/"), limit=limit, path=root / "runs" / run / file)


def check(file: str, data: bytes, path: Path) -> None:
    """Raises DamagedError or FormatError if these bytes are not what the name of a small file says."""
    if start := _START.fullmatch(file):
        starts.parse_start(data, path, id=start[1])
    elif mark := _MARK.fullmatch(file):
        fields = sealed.unseal(data, "mark", path=path)
        if fields.id("checkpoint") != mark[1]:
            raise fields.wrong("checkpoint", f"the id {mark[1]}")


def take(disk: durable.Disk, works: work.WorkFolders, root: Path, run: str, file: str, data: bytes) -> None:
    """Gives a run a start, a mark or a log that it lacks, durably; what it has stays as it is.

    Later metrics whose number is taken get the next one that is free.

    Raises:
        DamagedError, FormatError: it is not what its name says.
        StorageError: the disk refused.
    """
    check(file, data, root / "runs" / run / file)
    *folders, name = file.split("/")
    folder = durable.make_folders(disk, root, "runs", run, *folders)
    numbered = _METRICS.fullmatch(name)
    if numbered is not None:
        for other in folder.iterdir():
            if _METRICS.fullmatch(other.name) and other.read_bytes() == data:
                return
    with works.made() as made:
        number = int(numbered[1]) if numbered else 0
        while True:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(made / name)
            durable.write_record(disk, made / name, data)
            if durable.publish_file(disk, made / name, folder / name) or numbered is None:
                return
            number += 1
            name = f"metrics-{number}"
