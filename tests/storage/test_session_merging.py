"""Merging the parts of a session: how much is written again, how many folders stay, whatever the rate; what is read."""

import shutil
from pathlib import Path

import pytest
from session_helpers import ID, new_session, rows_of, write_part

from simckpt.storage.records import FileRecord
from simckpt.storage.session_merging import MERGED, MOST, Tiers, merges, waiting_numbers
from simckpt.storage.session_records import PartRecord
from simckpt.storage.session_writing import SessionWriter
from simckpt.testing.faults import FaultyDisk

MB = 1e6


def part(first: int, last: int, size: int, *, rows: tuple[int, int] | None = None) -> PartRecord:
    rows = (first - 1, last) if rows is None else rows
    files = (FileRecord("state.h5", size, "0" * 32, "metadata"),)
    return PartRecord(ID, (first, last), rows, {"rows": (first - 1, last)}, first, last, files)


def joined(group: list[PartRecord]) -> PartRecord:
    return part(group[0].numbers[0], group[-1].numbers[1], sum(each.size for each in group))


def recorded(count: int, size: int) -> tuple[list[PartRecord], float, Tiers]:
    """Returns the parts that are left of so many, how many bytes of each were written again, and what waits."""
    tiers = Tiers()
    there: dict[int, PartRecord] = {}
    again = 0
    for number in range(1, count + 1):
        there[number] = part(number, number, size)
        tiers.add(there[number])
        while (group := tiers.due()) is not None:
            assert [there.pop(each.numbers[0]) for each in group] == group
            made = joined(group)
            there[made.numbers[0]] = made
            again += made.size
            tiers.merged(group, [made])
            assert made.size <= MERGED
    return sorted(there.values(), key=lambda each: each.numbers), again / (count * size), tiers


@pytest.mark.parametrize(
    ("count", "size"),
    [
        pytest.param(86_400, 2e3, id="a-day-at-2-kB-a-second", marks=pytest.mark.slow),
        pytest.param(86_400, 20e3, id="a-day-at-20-kB-a-second", marks=pytest.mark.slow),
        (3_700, 2e3),
        (2_000, 20e3),
        (2_000, 150e3),
        (2_000, 1 * MB),
        (2_000, 1.2 * MB),
        (2_000, 5 * MB),
        (1_000, 40 * MB),
        (1_000, 200 * MB),
    ],
)
def test_each_byte_is_written_again_at_most_twice_and_folders_stay_few(count, size) -> None:
    parts, again, tiers = recorded(count, int(size))
    assert again <= 2
    covered = [number for each in parts for number in range(each.numbers[0], each.numbers[1] + 1)]
    assert covered == list(range(1, count + 1))
    # one for each 8 MB or 60 x 60 parts, what waits, and parts that are too large to be merged
    bound = count * size / 8e6 + count / 3600 + 2 * MOST
    assert len(parts) <= max(bound, count * size / (MERGED / 2))
    # and what the end has to write is about two merged parts, however long the session was
    assert sum(each.size for each in tiers.rest) <= 3 * MERGED + size


def test_what_was_lost_between_parts_is_not_passed_over() -> None:
    parts = [part(1, 1, 10), part(2, 2, 10), part(3, 3, 10, rows=(5, 6)), part(4, 4, 10, rows=(6, 7))]
    assert merges(parts) == [parts[:2], parts[2:]]
    tiers = Tiers(parts)
    assert tiers.due() == parts[:2]
    tiers.merged(parts[:2], [joined(parts[:2])])
    assert tiers.due() is None
    assert tiers.rest == [joined(parts[:2]), *parts[2:]]


def test_gaps_everywhere_let_nothing_pile_up() -> None:
    tiers = Tiers()
    for number in range(1, 1000):
        tiers.add(part(number, number, 10, rows=(2 * number, 2 * number + 1)))
        assert tiers.due() is None
        assert len(tiers.rest) <= 3


def test_a_writer_that_goes_on_knows_what_waits() -> None:
    folders = [(1, 3600), (3601, 3660), (3661, 3720), (3721, 3721), (3722, 3722)]
    assert waiting_numbers(folders) == folders[1:]
    assert waiting_numbers([]) == []
    assert waiting_numbers([(1, 1)]) == [(1, 1)]
    assert waiting_numbers([(1, 60), (61, 4000)]) == []


class Counting(FaultyDisk):
    """Counts the bytes that are written."""

    written = 0

    def pwrite(self, descriptor, data, offset: int) -> int:
        done = super().pwrite(descriptor, data, offset)
        self.written += done
        return done


def test_a_merge_reads_no_records_of_parts_that_were_merged_and_writes_each_byte_once(tmp_path: Path) -> None:
    with new_session(tmp_path, disk=(disk := Counting())) as writer:
        for row in range(MOST):
            write_part(writer, row, row + 1)
        writer.merge()
        # from here on nothing of it is needed
        aside = tmp_path / "sessions/pole/parts/00000001-00000060"
        shutil.move(aside, tmp_path / "aside")
        for row in range(MOST, 2 * MOST - 1):
            write_part(writer, row, row + 1)
            writer.merge()
        write_part(writer, 2 * MOST - 1, 2 * MOST)
        before = disk.written
        writer.merge()
        again = disk.written - before
        shutil.move(tmp_path / "aside", aside)
    folders = sorted(each.name for each in (tmp_path / "sessions/pole/parts").iterdir())
    assert folders == ["00000001-00000060", "00000061-00000120"]
    assert rows_of(tmp_path) == list(range(2 * MOST))
    size = sum(each.stat().st_size for each in (tmp_path / "sessions/pole/parts" / folders[1]).iterdir())
    # the file's gaps are not written
    assert again <= size


def test_the_end_of_a_long_session_writes_again_what_has_come_since_the_last_merge(tmp_path: Path) -> None:
    with new_session(tmp_path) as writer:
        for row in range(3):
            write_part(writer, row, row + 1)
        writer.merge_rest()
    # another writer goes on, to which the first parts are worth more than one part has room for
    with SessionWriter(tmp_path, "pole") as writer:
        writer._bytes = MERGED + 1
        writer._tiers = Tiers()
        for row in range(3, 6):
            write_part(writer, row, row + 1)
        writer.close(rows=(0, 6))
    folders = sorted(each.name for each in (tmp_path / "sessions/pole/parts").iterdir())
    assert folders == ["00000001-00000003", "00000004-00000006"]
    assert rows_of(tmp_path) == list(range(6))
