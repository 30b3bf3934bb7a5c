import errno
import os
from pathlib import Path

import pytest

from simckpt.errors import ConflictError, StorageError, StorageFullError
from simckpt.storage import durable


class ShortDisk(durable.Disk):
    """Writes at most three bytes at a time."""

    def pwrite(self, descriptor, data, offset):
        return super().pwrite(descriptor, memoryview(data)[:3], offset)


class FailingDisk(durable.Disk):
    """Fails one operation with an errno, every time."""

    def __init__(self, operation: str, number: int) -> None:
        self.calls = 0

        def fail(*_: object) -> None:
            self.calls += 1
            raise OSError(number, os.strerror(number))

        setattr(self, operation, fail)


def test_short_writes_are_continued(tmp_path):
    durable.write_file(ShortDisk(), tmp_path / "file", [(0, b"0123456789"), (12, b"abcdefg")], size=20)
    assert (tmp_path / "file").read_bytes() == b"0123456789\0\0abcdefg\0"


def test_a_file_is_written_where_nothing_can_be_reserved(tmp_path):
    durable.write_file(FailingDisk("allocate", errno.EOPNOTSUPP), tmp_path / "file", [(2, b"abc")], size=8)
    assert (tmp_path / "file").read_bytes() == b"\0\0abc\0\0\0"


def test_a_file_is_never_overwritten(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(StorageError):
        durable.write_record(durable.Disk(), tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("operation", ["allocate", "pwrite", "fsync"])
def test_a_full_disk_says_how_much_was_needed_and_free(tmp_path, operation, number):
    with pytest.raises(StorageFullError) as caught:
        durable.write_record(FailingDisk(operation, number), tmp_path / "file", bytes(1234))
    assert caught.value.needed == 1234
    assert caught.value.free > 0
    assert caught.value.errno == number
    assert isinstance(caught.value, OSError)


def test_a_failed_fsync_is_not_tried_again(tmp_path):
    disk = FailingDisk("fsync", errno.EIO)
    with pytest.raises(StorageError, match=r"Input/output error"):
        durable.write_record(disk, tmp_path / "file", b"data")
    assert disk.calls == 1


def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(tmp_path):
    disk = durable.Disk()
    disk.pwrite = lambda *_: 0
    with pytest.raises(StorageError):
        durable.write_record(disk, tmp_path / "file", b"data")


@pytest.mark.parametrize("kind", ["full", "empty", "file", "link"])
def test_publishing_replaces_nothing(tmp_path, kind):
    target, source = tmp_path / "target", tmp_path / "source"
    source.mkdir()
    (source / "new").touch()
    if kind in ("full", "empty"):
        target.mkdir()
    if kind == "full":
        (target / "old").touch()
    if kind == "file":
        target.touch()
    if kind == "link":
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConflictError):
        durable.publish_folder(durable.Disk(), source, target)
    assert (source / "new").exists()
    assert not (target / "new").exists()


def test_publishing_believes_the_result_not_the_error(tmp_path):
    """Over NFS a repeated rename may report failure after it has succeeded."""

    class LyingDisk(durable.Disk):
        def rename(self, source, target):
            super().rename(source, target)
            raise FileNotFoundError(errno.ENOENT, "resent")

    (tmp_path / "source").mkdir()
    durable.publish_folder(LyingDisk(), tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").is_dir()


def test_a_folder_that_cannot_be_made_durable_loses_its_final_name(tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(StorageError):
        durable.publish_folder(FailingDisk("fsync", errno.EIO), tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "source").is_dir()
    assert not (tmp_path / "target").exists()


def test_publishing_a_file_leaves_the_first_one(tmp_path):
    for content in (b"first", b"second"):
        path = tmp_path / content.decode()
        durable.write_record(durable.Disk(), path, content)
        assert durable.publish_file(durable.Disk(), path, tmp_path / "target") == (content == b"first")
    assert (tmp_path / "target").read_bytes() == b"first"


def test_publishing_a_file_without_hard_links(tmp_path):
    disk = FailingDisk("link", errno.EPERM)
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "b").write_bytes(b"second")
    assert durable.publish_file(disk, tmp_path / "a", tmp_path / "target")
    assert not durable.publish_file(disk, tmp_path / "b", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"first"


def test_a_line_is_appended_after_a_torn_one(tmp_path):
    log = tmp_path / "log"
    durable.append_line(durable.Disk(), log, b"one")
    with log.open("ab") as file:
        file.write(b"tor")
    durable.append_line(durable.Disk(), log, b"two")
    assert log.read_bytes() == b"one\ntor\ntwo\n"


def test_folders_are_not_made_through_a_symbolic_link(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "runs").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError):
        durable.make_folders(durable.Disk(), tmp_path / "store", "runs", "a")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_folder_is_made_with_its_parents_and_may_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert durable.made_folder(durable.Disk(), Path("logs/today")) == tmp_path / "logs" / "today"
        assert (tmp_path / "logs" / "today").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        durable.made_folder(durable.Disk(), tmp_path / "file" / "logs")


def test_removing_a_tree_follows_no_symbolic_link(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "file").touch()
    (tree / "link").symlink_to(tmp_path / "outside")
    durable.remove_tree(durable.Disk(), tree)
    assert not tree.exists()
    assert (tmp_path / "outside" / "kept").exists()
    durable.remove_tree(durable.Disk(), Path(tree))
