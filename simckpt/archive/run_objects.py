"""What belongs to a run beside its commits: its record, its starts, its marks, its log; into an archive and back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simckpt.archive.contents import Listing
from simckpt.archive.objects import Objects, lost
from simckpt.errors import ConflictError, DamagedError, FormatError, StoreError, UnsupportedFormatError
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


def check_same_here(files: StoreFiles, there: RunRecord) -> None:
    """Raises ConflictError if a store has another run of that name, as far as its record can be read."""
    with contextlib.suppress(DamagedError):
        check_same_run(files.read_run(there.name), there)


def check_run_there(objects: Objects, files: StoreFiles, run: str) -> None:
    """Raises ConflictError if an archive has another run of that name, as far as its record can be read."""
    with contextlib.suppress(DamagedError):  # what is damaged there is replaced by what is good here
        check_same_run(files.read_run(run), read_run(objects, run))


def upload_run(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Brings what is beside a run's commits into an archive, as far as the archive lacks it; removes nothing.

    What is damaged here stays here, so that it does not take the place of what is good there.

    Raises:
        ConflictError: the archive has another run of that name.
        ArchiveUnavailableError: the archive cannot be reached.
    """
    name, data = f"runs/{run}/{RUN_FILE}", files.good_small(run, RUN_FILE)
    if data is not None:
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
        there = listing.sizes.get(name)
        if not chosen(file) or there == size or (file == EVENTS_FILE and there is not None and there > size):
            continue
        data = files.good_small(run, file)
        if data is not None:
            _put(objects, name, data)
            listing.sizes[name] = len(data)


def mirror_metrics(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Brings later metrics into the archive of this store, which nobody else writes."""
    _bring(objects, files, run, listing, _METRICS.fullmatch)


def merge_metrics(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Brings later metrics to a place that others write, too: where a number is taken, under the next one."""
    for file in filter(_METRICS.fullmatch, files.small_files(run)):
        data = files.good_small(run, file)
        if data is not None:
            listing.sizes[_put_metrics(objects, files, run, file, data, listing)] = len(data)


def _put(objects: Objects, name: str, data: bytes) -> None:
    """Writes a small object and reads it back."""
    for _ in range(2):
        objects.put(name, data)
        if objects.read(name) == data:
            return
    raise lost(objects.place, name, "is not what was written there, twice")


def _put_metrics(objects: Objects, files: StoreFiles, run: str, file: str, data: bytes, listing: Listing) -> str:
    """Returns the name under which the archive has later metrics: another number if somebody else took this one."""
    match = _METRICS.fullmatch(file)
    assert match is not None
    number = int(match[2])
    while True:
        name = f"runs/{run}/{match[1]}{number}"
        if name not in listing.sizes:
            if objects.create(name, data):
                return name
        else:
            there = objects.read(name)
            if there == data:
                return name
            try:
                files.check_small(run, f"{match[1]}{number}", there or b"")
            except UnsupportedFormatError:
                pass
            except (DamagedError, FormatError):
                _put(objects, name, data)
                return name
        number += 1


def verify_run(objects: Objects, files: StoreFiles, run: str, *, besides_metrics: bool = False) -> list[str]:
    """Returns the names of what was not in an archive as it is here, and was written again.

    The log is left out, and what is damaged here.

    Args:
        objects: of the archive.
        files: of the store.
        run: the run's name.
        besides_metrics: whether later metrics are left out, which others may have written under the same names.
    """
    again = []
    for file in [RUN_FILE, *files.small_files(run)]:
        if file == EVENTS_FILE or (besides_metrics and _METRICS.fullmatch(file)):
            continue
        name, data = f"runs/{run}/{file}", files.good_small(run, file)
        if data is not None and objects.read(name) != data:
            _put(objects, name, data)
            again.append(name)
    return again


def remove_marks(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Removes marks from an archive that were removed from the store; not those whose whole folder is gone."""
    here = {f"runs/{run}/{file}" for file in files.small_files(run)}
    for name in [each for each in listing.sizes if each.startswith(f"runs/{run}/marks/") and each not in here]:
        # a mark that is taken away leaves the folder of its checkpoint
        if (files.path / name).parent.is_dir():
            objects.delete(name)
            del listing.sizes[name]


@dataclass
class Troubles:
    """What is damaged in a place that is pulled from, while the rest is brought.

    Attributes:
        told: in words.
    """

    told: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Ends a block that meets damage, and keeps it in mind; other errors pass."""
        try:
            yield
        except UnsupportedFormatError:
            raise
        except (DamagedError, FormatError) as error:
            self.tell(error)

    def tell(self, error: StoreError) -> None:
        """Keeps damage in mind, once."""
        if str(error) not in self.told:
            self.told.append(str(error))


def download_run(objects: Objects, files: StoreFiles, run: str, listing: Listing, troubles: Troubles) -> None:
    """Takes starts and marks of a run, and its log if the store has none, from an archive.

    Nothing good is replaced: one that is damaged here goes into quarantine.

    Raises:
        ArchiveUnavailableError, StorageError: the archive or the disk refused.
    """
    here = set(files.small_files(run))
    prefix = f"runs/{run}/"
    for name in sorted(each for each in listing.sizes if each.startswith(prefix)):
        file = name.removeprefix(prefix)
        is_damaged = file in here and file != EVENTS_FILE and files.good_small(run, file) is None
        if (file in here and not is_damaged and _METRICS.fullmatch(file) is None) or not files.is_small(file):
            continue
        data = objects.read(name)
        with troubles.noted():
            try:
                if data is not None and is_damaged:
                    files.check_small(run, file, data)
                    files.put_aside(f"{prefix}{file}")
                if data is not None:
                    files.take_small(run, file, data)
            except DamagedError:
                raise lost(objects.place, name, "is damaged") from None
