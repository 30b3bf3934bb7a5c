"""Sessions on disk: what is written comes back, what is damaged is named, merging changes nothing for a reader."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from session_helpers import (
    MODEL,
    SECOND,
    assert_equal,
    new_session,
    record,
    rows_of,
    snapshot_of,
    tables,
    write_part,
    write_snapshot,
)
from storage_helpers import new_store, save

from simckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    ConflictError,
    DamagedError,
    FormatError,
    InvalidNameError,
    RunLockedError,
    SessionNotFoundError,
    StorageError,
    StorageFullError,
    UnsupportedFormatError,
)
from simckpt.storage import StoreFiles, sealed
from simckpt.storage.session_ending import close_session, remove_session
from simckpt.storage.session_merging import merges
from simckpt.storage.session_records import OriginRecord, parse_session
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import SessionFiles, covering, session_names
from simckpt.testing.faults import FaultyDisk, Operation, fail, interrupt
from simckpt.testing.faults import kill as die
from simckpt.testing.power_loss import RecordingDisk


def parts_of(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "sessions/pole/parts").iterdir())


def test_parts_come_back_bit_for_bit(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        write_part(writer, 4, 4)
        write_part(writer, 4, 9)
    assert parts_of(tmp_path) == ["00000001-00000001", "00000002-00000002", "00000003-00000003"]
    assert rows_of(tmp_path) == list(range(9))


def test_a_session_says_what_it_was_recorded_of(tmp_path) -> None:
    with new_session(tmp_path):
        pass
    assert session_names(tmp_path) == ["pole"]
    assert SessionFiles(tmp_path, "pole").record == record()


def test_a_snapshot_comes_back_with_its_models(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_snapshot(writer, 3)
        write_snapshot(writer, 8)
    files = SessionFiles(tmp_path, "pole")
    first, second = files.snapshots()
    assert (first.row, second.row, second.order, second.monotonic, second.reason) == (3, 8, 24, 8 * SECOND, "interval")
    expected = snapshot_of(8)
    expected["env"]["models"] = {MODEL: {"mass": np.arange(4.0)}}
    assert_equal(files.read_snapshot(second), expected)
    assert [model.digest for model in files.models()] == [MODEL]


def test_some_columns_are_read_alone(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 3)
    files = SessionFiles(tmp_path, "pole")
    (part,) = files.parts()
    found = files.read_part(part, lambda path: path.startswith("rows/observation"))
    assert_equal(found, {"rows": {"observation": tables(0, 3)["rows"]["observation"]}})


def test_merging_changes_nothing_for_a_reader(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        for row in range(0, 20, 4):
            write_part(writer, row, row + 4)
        writer.merge_rest()
        assert parts_of(tmp_path) == ["00000001-00000005"]
        write_part(writer, 20, 22)
        assert writer.close().parts == 6
    assert parts_of(tmp_path) == ["00000001-00000006"]
    assert rows_of(tmp_path) == list(range(22))
    (part,) = SessionFiles(tmp_path, "pole").parts()
    assert part.tables == {"rows": (0, 22), "commands/motor": (0, 44), "events": (0, 0)}
    assert (part.rows, part.started, part.stopped) == ((0, 22), 0, 22 * SECOND)


def test_a_merged_part_is_no_larger_than_allowed_and_skips_what_was_lost(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        for start in (0, 4, 8, 20, 24):
            write_part(writer, start, start + 4)
        parts = writer.files.parts()
        size = max(part.size for part in parts)
        assert [[part.rows[0] for part in group] for group in merges(parts, limit=2 * size)] == [[0, 4], [20, 24]]
        writer.merge_rest()
    assert parts_of(tmp_path) == ["00000001-00000003", "00000004-00000005"]
    assert rows_of(tmp_path) == [*range(12), *range(20, 28)]


def test_parts_with_other_columns_are_not_merged(tmp_path) -> None:
    from simckpt import state

    with new_session(tmp_path) as writer:
        write_part(writer, 0, 2)
        write_part(writer, 2, 4)
        other = tables(4, 6)
        other["rows"]["reward"] = other["rows"]["reward"].astype(np.float32)
        spans = {"rows": (4, 6), "commands/motor": (8, 12), "events": (0, 0)}
        writer.write_part(state.encode(other), rows=(4, 6), spans=spans, started=4 * SECOND, stopped=6 * SECOND)
        writer.merge_rest()
    assert parts_of(tmp_path) == ["00000001-00000002", "00000003-00000003"]


def test_a_reader_finds_its_part_in_the_merged_one(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        for start in (0, 4, 8):
            write_part(writer, start, start + 4)
        files = SessionFiles(tmp_path, "pole")
        before = files.parts()
        writer.merge_rest()
        assert_equal(files.read_part(before[1]), tables(4, 8))
        only = files.read_part(before[2], lambda path: path == "rows/reward")
        assert_equal(only, {"rows": {"reward": tables(8, 12)["rows"]["reward"]}})


def test_numbers_of_folders_cover_each_other_or_do_not_touch() -> None:
    assert covering([(1, 1), (2, 2), (1, 3), (3, 3), (4, 4)]) == ([(1, 3), (4, 4)], [(1, 1), (2, 2), (3, 3)])
    with pytest.raises(FormatError, match="overlap"):
        covering([(1, 3), (3, 5)])


def test_a_closed_session_says_how_it_ended_and_stays_as_it_is(tmp_path) -> None:
    writer = new_session(tmp_path)
    write_part(writer, 0, 4)
    write_snapshot(writer, 0)
    closed = writer.close("error", "the arm fell off", rows=(0, 6))
    assert (closed.how, closed.text, closed.rows, closed.parts, closed.snapshots) == (
        "error",
        "the arm fell off",
        (0, 6),
        1,
        1,
    )
    assert closed.seconds == 4.0
    files = SessionFiles(tmp_path, "pole")
    assert files.closed() == closed
    assert not files.is_written()
    with pytest.raises(ConflictError, match="closed"):
        SessionWriter(tmp_path, "pole")


def test_a_session_has_one_writer(tmp_path) -> None:
    with new_session(tmp_path):
        assert SessionFiles(tmp_path, "pole").is_written()
        with pytest.raises(RunLockedError, match="session 'pole' is being recorded by process"):
            SessionWriter(tmp_path, "pole")
    with SessionWriter(tmp_path, "pole") as writer:
        write_part(writer, 0, 1)
    assert rows_of(tmp_path) == [0]


def test_a_second_session_of_a_name_is_refused(tmp_path) -> None:
    new_session(tmp_path).release()
    with pytest.raises(ConflictError, match="exists already"):
        create_session(StoreFiles.open(tmp_path), replace(record(), id="77" * 16))
    with pytest.raises(InvalidNameError):
        create_session(StoreFiles.open(tmp_path), record("../pole"))
    with pytest.raises(ConfigurationError):
        create_session(StoreFiles.open(tmp_path), record("other", env={"id": object()}))
    assert session_names(tmp_path) == ["pole"]


def test_a_missing_session_is_named_with_those_that_are_near(tmp_path) -> None:
    new_session(tmp_path).release()
    with pytest.raises(SessionNotFoundError, match="did you mean pole"):
        SessionFiles(tmp_path, "pol")
    assert session_names(tmp_path / "nowhere") == []


def test_a_part_that_is_gone_is_damage_not_a_gap(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        for start in (0, 4, 8):
            write_part(writer, start, start + 4)
    shutil.rmtree(tmp_path / "sessions/pole/parts/00000002-00000002")
    with pytest.raises(DamagedError, match="parts 2 to 2 are missing"):
        SessionFiles(tmp_path, "pole").parts()


def test_the_last_part_of_a_closed_session_is_missed(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        write_part(writer, 6, 8)
        writer.close()
    shutil.rmtree(tmp_path / "sessions/pole/parts/00000002-00000002")
    with pytest.raises(DamagedError, match="parts 2 to 2 are missing"):
        SessionFiles(tmp_path, "pole").parts()


@pytest.mark.parametrize(
    "file",
    [
        "session.json",
        "parts/00000001-00000001/part.json",
        "parts/00000001-00000001/leaves.json",
        "parts/00000001-00000001/state.h5",
        "snapshots/00000001/snapshot.json",
        "snapshots/00000001/leaves.json",
        "snapshots/00000001/state.h5",
        f"models/{MODEL}/model.json",
        f"models/{MODEL}/state.h5",
        "closed.json",
    ],
)
@pytest.mark.parametrize("how", ["byte", "cut", "gone", "link"])
def test_damage_anywhere_is_noticed(tmp_path, file, how) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        write_snapshot(writer, 0)
        writer.close()
    path = tmp_path / "sessions/pole" / file
    data = bytearray(path.read_bytes())
    if how == "gone" and file == "closed.json":
        pytest.skip("a session without it is one that nobody has closed")
    if how == "byte":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[:-9])
    elif how == "gone":
        path.unlink()
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")

    def look() -> None:
        files = SessionFiles(tmp_path, "pole")
        files.closed()
        for part in files.parts():
            files.verify(f"parts/{part.folder}", part)
        for snapshot in files.snapshots():
            files.verify(f"snapshots/{snapshot.number:08d}", snapshot)
        for model in files.models():
            files.verify(f"models/{model.digest}", model)

    with pytest.raises((DamagedError, FormatError, SessionNotFoundError)):
        look()


def test_a_damaged_column_is_named_and_the_others_can_be_read(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
    files = SessionFiles(tmp_path, "pole")
    (part,) = files.parts()
    path = files.path / "parts" / part.folder / "state.h5"
    index = json.loads((path.parent / "leaves.json").read_text())
    (leaf,) = [each for each in index["leaves"] if each["path"] == "record/rows/reward"]
    data = bytearray(path.read_bytes())
    data[leaf["offset"] + 3] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        files.read_part(part)
    assert caught.value.leaves == ("record/rows/reward",)
    assert_equal(files.read_part(part, lambda path: path == "rows/row"), {"rows": {"row": np.arange(4)}})


def test_merging_leaves_damaged_parts_alone(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        for row in range(5):
            write_part(writer, row, row + 1)
        path = tmp_path / "sessions/pole/parts/00000003-00000003/state.h5"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        for place in range(len(data)):
            data[place] ^= 1
        path.write_bytes(data)
        writer.close()
    assert parts_of(tmp_path) == ["00000001-00000002", "00000003-00000003", "00000004-00000005"]


def test_parts_of_another_session_are_refused(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 2)
    store = StoreFiles.open(tmp_path)
    create_session(store, replace(record("other"), id="77" * 16))
    shutil.copytree(tmp_path / "sessions/pole/parts", tmp_path / "sessions/other/parts", dirs_exist_ok=True)
    with pytest.raises(FormatError, match="copied"):
        SessionFiles(tmp_path, "other").parts()


def test_a_record_with_a_wrong_field_is_refused(tmp_path) -> None:
    data = record().to_bytes()
    fields = {key: value for key, value in json.loads(data).items() if key not in ("format", "version", "digest")}
    for changes in ({"mode": "now and then"}, {"monotonic": -1}, {"name": "a/b"}, {"links": [{"name": 3}]}, {"id": 7}):
        with pytest.raises(FormatError):
            parse_session(sealed.seal("session", {**fields, **changes}), "here")


def test_the_format_tells_the_keys_of_the_records(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 1)
        write_snapshot(writer, 0)
        writer.close()
    document = (Path(sealed.__file__).parent / "FORMAT.md").read_text()
    told = {
        line.split()[0]: re.findall(r'"([a-z_]+)"(?=[,:}])', line)
        for line in document.splitlines()
        if re.match(r'[a-z]+\.json +\{"format": "simckpt ', line)
    }
    for name in ("session.json", "part.json", "snapshot.json", "model.json", "closed.json"):
        (path,) = (tmp_path / "sessions").rglob(name)
        assert told[name] == list(json.loads(path.read_text())), name


# origins


def with_origin(path: Path) -> tuple[StoreFiles, OriginRecord]:
    store = new_store(path)
    commit = save(store, 1)
    save(store, 2)
    return store, OriginRecord(commit.id, "ant-ppo", commit.seq, commit.step)


def test_the_checkpoint_that_was_driving_is_not_pruned(tmp_path) -> None:
    store, origin = with_origin(tmp_path)
    create_session(store, record(origin=origin))
    with pytest.raises(ConflictError, match="driving in session 'pole'"):
        store.prune("ant-ppo", 1, "test")
    assert store.origins() == {"session 'pole'": origin.checkpoint}
    remove_session(tmp_path, "pole")
    store.prune("ant-ppo", 1, "test")


def test_a_session_does_not_begin_from_what_was_pruned(tmp_path) -> None:
    store, origin = with_origin(tmp_path)
    store.prune("ant-ppo", 1, "test")
    with pytest.raises(CheckpointNotFoundError, match="pruned"):
        create_session(store, record(origin=origin))
    assert session_names(tmp_path) == []


def test_a_session_and_a_pruner_that_meet_do_not_miss_each_other(tmp_path) -> None:
    # the pruner looks at the moment at which the session's record lies in tmp/ and has not got its name
    store, origin = with_origin(tmp_path)
    met: list[str] = []

    class Meeting(FaultyDisk):
        def make_folder(self, path: Path) -> None:
            super().make_folder(path)
            if path.name == "parts":
                with pytest.raises(ConflictError, match="begins from it"):
                    store.prune("ant-ppo", 1, "test")
                met.append("refused")

    create_session(store, record(origin=origin), disk=Meeting())
    assert met == ["refused"]
    assert SessionFiles(tmp_path, "pole").record.origin == origin


def test_older_versions_must_refuse_a_store_once_a_session_has_an_origin(tmp_path) -> None:
    store, origin = with_origin(tmp_path)
    create_session(store, record("free"))
    before = json.loads((tmp_path / "store.json").read_text())
    assert before["requires"] == []
    create_session(store, record(origin=origin))
    after = json.loads((tmp_path / "store.json").read_text())
    assert after["requires"] == ["sessions"]
    assert (after["id"], after["created"]) == (before["id"], before["created"])
    StoreFiles.open(tmp_path)
    with (
        mock.patch.object(sealed, "FEATURES", frozenset({"shards"})),
        pytest.raises(UnsupportedFormatError, match="sessions"),
    ):
        StoreFiles.open(tmp_path)


def test_a_record_of_the_store_that_is_written_again_requires_sessions_as_well(tmp_path) -> None:
    store, origin = with_origin(tmp_path)
    create_session(store, record(origin=origin))
    (tmp_path / "store.json").write_bytes(b"garbage")
    StoreFiles.without_record(tmp_path).rewrite_store()
    assert json.loads((tmp_path / "store.json").read_text())["requires"] == ["sessions"]
    assert StoreFiles.open(tmp_path).origins() == {"session 'pole'": origin.checkpoint}


# closing and removing what nobody records any more


def test_a_session_that_was_killed_is_closed_later_and_says_that_its_end_is_not_known(tmp_path) -> None:
    def killed() -> None:
        write_part(new_session(tmp_path), 0, 4)
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(killed)
    closed = close_session(tmp_path, "pole")
    assert (closed.how, closed.rows, closed.parts) == ("killed", None, 1)
    assert "not known" in closed.text
    assert close_session(tmp_path, "pole") == closed
    assert rows_of(tmp_path) == [0, 1, 2, 3]


def test_a_session_that_was_given_back_without_an_end_was_not_killed(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
    assert close_session(tmp_path, "pole").how == "refused"


def test_a_session_that_is_being_recorded_is_neither_closed_nor_removed(tmp_path) -> None:
    with new_session(tmp_path):
        for refused in (close_session, remove_session):
            with pytest.raises(RunLockedError, match="session 'pole' is being recorded by process"):
                refused(tmp_path, "pole")
    assert session_names(tmp_path) == ["pole"]


@pytest.mark.parametrize("inside", ["sessions/evil", "sessions"])
def test_nothing_is_written_or_removed_behind_a_symbolic_link(tmp_path, inside) -> None:
    new_session(tmp_path / "store").release()
    outside = tmp_path / "outside"
    path = tmp_path / "store" / inside
    if inside == "sessions":
        path.rename(outside)
    else:
        shutil.copytree(tmp_path / "store/sessions/pole", outside)
    path.symlink_to(outside)
    before = sorted(each.name for each in outside.rglob("*"))
    name = "evil" if inside != "sessions" else "pole"
    with pytest.raises((FormatError, StorageError, SessionNotFoundError)):
        SessionWriter(tmp_path / "store", name)
    with pytest.raises((FormatError, StorageError, SessionNotFoundError)):
        close_session(tmp_path / "store", name)
    with pytest.raises((ConflictError, StorageError)):
        create_session(StoreFiles.open(tmp_path / "store"), record(name))
    if inside == "sessions":
        with pytest.raises((FormatError, StorageError, SessionNotFoundError)):
            remove_session(tmp_path / "store", name)
        assert path.is_symlink()
    else:
        remove_session(tmp_path / "store", name)
        assert not path.is_symlink()
        assert session_names(tmp_path / "store") == ["pole"]
    assert sorted(each.name for each in outside.rglob("*")) == before


@pytest.mark.parametrize("inner", ["parts", "snapshots", "models"])
def test_nobody_writes_into_a_folder_that_is_a_symbolic_link(tmp_path, inner) -> None:
    new_session(tmp_path / "store").release()
    folder = tmp_path / "store/sessions/pole" / inner
    (tmp_path / "outside").mkdir()
    folder.rmdir()
    folder.symlink_to(tmp_path / "outside")
    with pytest.raises(FormatError):
        SessionWriter(tmp_path / "store", "pole")
    remove_session(tmp_path / "store", "pole")
    assert list((tmp_path / "outside").iterdir()) == []
    assert session_names(tmp_path / "store") == []


def test_on_a_full_disk_a_session_that_holds_nothing_can_be_removed_and_others_stay(tmp_path) -> None:
    disk = FaultyDisk()
    new_session(tmp_path).release()
    create_session(StoreFiles.open(tmp_path), record("other"))
    with SessionWriter(tmp_path, "other") as writer:
        write_part(writer, 0, 4)

    def full(operation: Operation) -> object:
        if operation.name in ("allocate", "pwrite"):
            raise OSError(errno.ENOSPC, "no room")
        return operation.perform()

    disk.arm(full, at=1, sticky=True)
    with pytest.raises(StorageFullError):
        remove_session(tmp_path, "other", disk=disk)
    remove_session(tmp_path, "pole", disk=disk)
    assert session_names(tmp_path) == ["other"]
    assert not (tmp_path / "sessions/pole").exists()
    disk.arm()
    create_session(StoreFiles.open(tmp_path), record(), disk=disk)


@pytest.mark.parametrize("sticky", [False, True])
def test_a_session_that_could_not_be_made_can_be_made_again_whatever_the_disk_refused(tmp_path, sticky) -> None:
    counting = FaultyDisk()
    StoreFiles.create(tmp_path / "count", disk=counting)
    counting.arm()
    create_session(StoreFiles.open(tmp_path / "count"), record(), disk=counting)
    for at in range(1, len(counting.calls) + 1):
        path = tmp_path / str(at)
        StoreFiles.create(path, disk=(disk := FaultyDisk()))
        disk.arm(fail(errno.EIO), at=at, sticky=sticky)
        with contextlib.suppress(StorageError):
            create_session(StoreFiles.open(path), record(), disk=disk)
        disk.arm()
        create_session(StoreFiles.open(path), record(), disk=disk)
        with pytest.raises(ConflictError, match="exists already"):
            create_session(StoreFiles.open(path), replace(record(), id="77" * 16), disk=disk)
        with SessionWriter(path, "pole", disk=disk) as writer:
            write_part(writer, 0, 2)
            assert writer.close(rows=(0, 2)).how == "closed"
        assert rows_of(path) == [0, 1]


@pytest.mark.parametrize("sticky", [False, True])
def test_an_end_that_the_disk_has_refused_can_be_written_again(tmp_path, sticky) -> None:
    with new_session(tmp_path / "template") as writer:
        write_part(writer, 0, 4)
    at = 0
    while True:
        at += 1
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "template", path)
        with SessionWriter(path, "pole", disk=(disk := FaultyDisk())) as writer:
            disk.arm(fail(errno.EIO), at=at, sticky=sticky)
            try:
                writer.close("error", "the arm fell off", rows=(0, 9))
                hit = disk.hit
            except StorageError:
                hit = disk.hit
                disk.arm()
                writer.close("error", "the arm fell off", rows=(0, 9))
            disk.arm()
        closed = SessionFiles(path, "pole").closed()
        assert (closed.how, closed.rows, closed.text) == ("error", (0, 9), "the arm fell off")
        if hit is None:
            break
    assert at > 10


# errors, kills and power failures


def opened(path: Path, disk: FaultyDisk) -> None:
    """Makes a session with two parts and a snapshot on a disk, without faults."""
    with new_session(path, disk=disk) as writer:
        write_part(writer, 0, 4)
        write_part(writer, 4, 8)
        write_snapshot(writer, 4)


def go_on(path: Path, disk: FaultyDisk) -> None:
    """Does all that a recording process does, from the claim to the end."""
    with SessionWriter(path, "pole", disk=disk) as writer:
        write_part(writer, 8, 12)
        write_snapshot(writer, 12)
        write_part(writer, 12, 16)
        writer.merge_rest()
        write_part(writer, 16, 20)
        writer.close(rows=(0, 20))


def assert_readable(path: Path) -> int:
    """Returns how many rows there are, after all was read: each once, none missing, all as written."""
    rows = rows_of(path)
    assert rows == list(range(len(rows)))
    assert len(rows) >= 8
    files = SessionFiles(path, "pole")
    for snapshot in files.snapshots():
        assert files.read_snapshot(snapshot)["env"]["python"]["count"] == snapshot.row
    closed = files.closed()
    if closed is not None:
        assert closed.rows in ((0, len(rows)), None)
    return len(rows)


FAULTS = [fail(errno.ENOSPC), fail(errno.EIO), interrupt]


def moments(path: Path) -> list[int]:
    """Returns the operations to fail at: all but the writes inside of files, of which one for each file is enough."""
    disk = FaultyDisk()
    opened(path, disk)
    disk.arm()
    go_on(path, disk)
    return [at for at, name in enumerate(disk.calls, 1) if name != "pwrite" or disk.calls[at - 2] != "pwrite"]


def fail_at(template: Path, path: Path, at: int) -> None:
    shutil.copytree(template, path)
    disk = FaultyDisk()
    disk.arm(FAULTS[at % 3], at=at)
    with contextlib.suppress(OSError, KeyboardInterrupt):
        go_on(path, disk)
    disk.arm()
    assert_readable(path)
    if SessionFiles(path, "pole").closed() is None:
        with SessionWriter(path, "pole", disk=disk) as writer:
            start = assert_readable(path)
            write_part(writer, start, start + 2)
            writer.close()
        assert assert_readable(path) == start + 2


def kill_at(template: Path, path: Path, at: int) -> None:
    shutil.copytree(template, path)
    disk = FaultyDisk()
    disk.arm(die, at=at)
    in_child(lambda: go_on(path, disk))
    rows = assert_readable(path)
    if SessionFiles(path, "pole").closed() is None:
        with SessionWriter(path, "pole") as writer:
            writer.close("killed")
    assert assert_readable(path) == rows
    assert len(parts_of(path)) == 1


def in_child(action) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


CASES = [
    pytest.param(fail_at, 7, id="error"),
    pytest.param(kill_at, 11, id="kill"),
    pytest.param(fail_at, 1, id="error-everywhere", marks=pytest.mark.slow),
    pytest.param(kill_at, 1, id="kill-everywhere", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("case", "every"), CASES)
def test_what_ends_anywhere_leaves_each_row_once_and_can_be_gone_on_with(tmp_path, case, every) -> None:
    found = moments(tmp_path / "count")
    opened(tmp_path / "template", FaultyDisk())
    for at in found[::every]:
        case(tmp_path / "template", tmp_path / f"store-{at}", at)
        shutil.rmtree(tmp_path / f"store-{at}")


def test_a_power_failure_at_any_moment_leaves_what_was_promised(tmp_path) -> None:
    base = tmp_path / "recorded"
    base.mkdir()
    opened(base / "store", FaultyDisk())
    disk = RecordingDisk(base)
    with SessionWriter(base / "store", "pole", disk=disk) as writer:
        for start in (8, 12):
            write_part(writer, start, start + 4)
            disk.note(start + 4)
        write_snapshot(writer, 16)
        writer.merge_rest()
        disk.note(16)
        writer.close(rows=(0, 16))
        disk.note(17)
    looked = 0
    for number, crashed in enumerate(disk.recording.states(relaxed=False, samples=2, seed=3)):
        if number % 37:
            continue
        target = tmp_path / f"state-{number}"
        crashed.write(target)
        promised = max([8, *(note for note in crashed.notes if note <= 16)])
        assert assert_readable(target / "store") >= promised
        assert (SessionFiles(target / "store", "pole").closed() is not None) or 17 not in crashed.notes
        shutil.rmtree(target)
        looked += 1
    assert looked > 10


def test_a_full_disk_says_so_and_what_was_written_before_stays(tmp_path) -> None:
    disk = FaultyDisk()
    writer = new_session(tmp_path, disk=disk)
    write_part(writer, 0, 4)
    disk.arm(fail(errno.ENOSPC), at=1, sticky=True)
    with pytest.raises(StorageFullError):
        write_part(writer, 4, 8)
    disk.arm()
    write_part(writer, 4, 8)
    writer.close()
    assert rows_of(tmp_path) == list(range(8))
    assert list((tmp_path / "tmp").iterdir()) == []
