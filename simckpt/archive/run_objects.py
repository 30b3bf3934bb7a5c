"""What belongs to a run beside its commits: its record, its starts, its marks, its log; into an archive and back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from simckpt.archive.contents import Listing
from simckpt.archive.objects import Objects, lost
from simckpt.errors import ConflictError, DamagedError
from simckpt.storage import StoreFiles
from simckpt.storage.run_records import RunRecord, parse_run
from simckpt.storage.store_reader import EVENTS_FILE, RUN_FILE

_METRICS = re.compile(r"(marks/[0-9a-f]{32}/metrics-)([0-9]{1,8})")


def read_run(objects: Objects, run: str) -> RunRecord | None:
    """Returns the record of a run in an archive, or None; raises ArchiveDamagedError or FormatError."""
    name = f"runs/{run}/{RUN_FILE}"
    data = objects.read(name)
    try:
        return None if data is None else parse_run(data, f"{objects.place}/{name}")
    except DamagedError:
        raise lost(objects.place, name, "is damaged") from None


def check_same_run(here: RunRecord, there: RunRecord | None) -> None:
    """Raises ConflictError if the archive has another run of the same name."""
    if there is not None and there.id != here.id:
        raise ConflictError(
            f"run {here.name!r} is another one in the archive (id {there.id}) than here (id {here.id}): nothing was "
            f"changed; give a place, or a store, of its own"
        )


def check_run_there(objects: Objects, files: StoreFiles, run: str) -> None:
    """Raises ConflictError if an archive has another run of that name, as far as its record can be read."""
    with contextlib.suppress(DamagedError):  # what is damaged there is replaced by what is good here
        check_same_run(files.read_run(run), read_run(objects, run))


def upload_run(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Brings what is beside a run's commits into an archive, as far as the archive lacks it; removes nothing.

    Raises:
        ConflictError: the archive has another run of that name.
        ArchiveUnavailableError: the archive cannot be reached.
    """
    name, data = f"runs/{run}/{RUN_FILE}", files.small_file(run, RUN_FILE)
    if objects.read(name) != data:
        if not objects.create(name, data):
            check_run_there(objects, files, run)
        if objects.read(name) != data:
            _put(objects, name, data)
    listing.sizes[name] = len(data)
    _bring(objects, files, run, listing, lambda file: _METRICS.fullmatch(file) is None)


def _bring(objects: Objects, files: StoreFiles, run: str, listing: Listing, chosen: Callable[[str], object]) -> None:
    """Brings those of the small files that an archive lacks, or has in another size: the log grows, marks do not."""
    for file, size in files.small_files(run).items():
        name = f"runs/{run}/{file}"
        if chosen(file) and listing.sizes.get(name) != size:
            data = files.small_file(run, file)
            _put(objects, name, data)
            listing.sizes[name] = len(data)


def mirror_metrics(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Brings later metrics into the archive of this store, which nobody else writes."""
    _bring(objects, files, run, listing, _METRICS.fullmatch)


def merge_metrics(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Brings later metrics to a place that others write, too: where a number is taken, under the next one."""
    for file in filter(_METRICS.fullmatch, files.small_files(run)):
        data = files.small_file(run, file)
        listing.sizes[_put_metrics(objects, run, file, data, listing)] = len(data)


def _put(objects: Objects, name: str, data: bytes) -> None:
    """Writes a small object and reads it back."""
    for _ in range(2):
        objects.put(name, data)
        if objects.read(name) == data:
            return
    raise lost(objects.place, name, "is not what was written there, twice")


def _put_metrics(objects: Objects, run: str, file: str, data: bytes, listing: Listing) -> str:
    """Returns the name under which the archive has later metrics: another number if somebody else took this one."""
    match = _METRICS.fullmatch(file)
    assert match is not None
    number = int(match[2])
    while True:
        name = f"runs/{run}/{match[1]}{number}"
        if name not in listing.sizes:
            if objects.create(name, data):
                return name
        elif listing.sizes[name] == len(data) and objects.read(name) == data:
            return name
        number += 1


def verify_run(objects: Objects, files: StoreFiles, run: str) -> list[str]:
    """Returns the names of what was not in an archive as it is here, and was written again; the log is left out."""
    again = []
    for file in [RUN_FILE, *files.small_files(run)]:
        name, data = f"runs/{run}/{file}", files.small_file(run, file)
        if file != EVENTS_FILE and objects.read(name) != data:
            _put(objects, name, data)
            again.append(name)
    return again


def remove_marks(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Removes marks from an archive that were removed from the store."""
    here = {f"runs/{run}/{file}" for file in files.small_files(run)}
    for name in [each for each in listing.sizes if each.startswith(f"runs/{run}/marks/") and each not in here]:
        objects.delete(name)
        del listing.sizes[name]


def download_run(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Takes starts and marks of a run, and its log if the store has none, from an archive; replaces nothing.

    Raises:
        ArchiveDamagedError: one of them is damaged there.
        ArchiveUnavailableError, StorageError: the archive or the disk refused.
    """
    here = set(files.small_files(run))
    prefix = f"runs/{run}/"
    for name in sorted(each for each in listing.sizes if each.startswith(prefix)):
        file = name.removeprefix(prefix)
        if (file in here and _METRICS.fullmatch(file) is None) or not files.is_small(file):
            continue
        data = objects.read(name)
        try:
            if data is not None:
                files.take_small(run, file, data)
        except DamagedError:
            raise lost(objects.place, name, "is damaged") from None
