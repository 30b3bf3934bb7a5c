"""Reading around what is lost of a session: the parts that hold some rows, whatever became of the others."""

from __future__ import annotations

from collections.abc import Iterator

from simckpt.errors import DamagedError, StoreError
from simckpt.storage.session_records import PartRecord
from simckpt.storage.sessions import PARTS, SessionFiles, covering, part_folders


def parts_between(files: SessionFiles, start: int | None, stop: int | None) -> Iterator[PartRecord]:
    """Yields the records of the parts that can be read, up to one that cannot be and may hold what is wanted.

    A part that is missing, or whose record is damaged, holds rows between those of its neighbours. What comes before a
    row may lie in the part before that row's.

    Args:
        files: of the session.
        start: the first row that is wanted.
        stop: one behind the last.

    Raises:
        DamagedError: a part that may hold what is wanted is missing, or its record is damaged.
        FormatError: parts that overlap, or a record that breaks a rule.
    """
    try:
        whole = files.parts()
    except DamagedError:
        if not _is_closed(files):
            raise  # parts come, and are merged
    else:
        yield from whole
        return
    kept, _ = covering(part_folders(files.path))
    trouble: DamagedError | None = None
    expected, end = 1, 0
    for numbers in kept:
        if numbers[0] != expected:
            trouble = _missing(files, expected, numbers[0] - 1)
        expected = numbers[1] + 1
        try:
            part = files.part(numbers)
        except DamagedError as error:
            trouble = error
            continue
        if trouble is not None and (start is None or start <= part.rows[0]) and (stop is None or stop > end):
            raise trouble
        trouble, end = None, part.rows[1]
        yield part
    last = _last(files)
    if last is None or last >= expected:
        trouble = _missing(files, expected, last)
    if trouble is not None and (stop is None or stop > end):
        raise trouble


def _missing(files: SessionFiles, first: int, last: int | None) -> DamagedError:
    where = files.path / PARTS
    return DamagedError(f"parts {first} to {last or 'the end'} are missing from {where}", path=where)


def _is_closed(files: SessionFiles) -> bool:
    try:
        return files.closed() is not None
    except DamagedError:
        return True


def _last(files: SessionFiles) -> int | None:
    """Returns the number of the last part that there was; None if that is not known."""
    try:
        closed = files.closed()
    except StoreError:
        return None
    return None if closed is None else closed.parts
