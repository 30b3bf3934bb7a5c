"""Stores with sessions and archives for the tests; what must hold afterwards is compared with bytes kept aside."""

from pathlib import Path

from archive_helpers import HASTY, QuickDisk
from session_helpers import record, rows_of, write_part, write_snapshot

from simckpt.archive import Archive
from simckpt.policies import KeepLast
from simckpt.storage import StoreFiles
from simckpt.storage.session_records import OriginRecord
from simckpt.storage.session_writing import SessionWriter, create_session

ROWS = list(range(12))
BESIDE = ("archived.json", "pin")


def add_session(files: StoreFiles, name: str, number: int, *, origin: OriginRecord | None = None) -> SessionWriter:
    """Records a session of three parts, which its end merges, two snapshots and a model, and leaves it open."""
    create_session(files, record(name, id=f"{number:032x}", created=1.8e9 + number, origin=origin), disk=files._disk)
    writer = SessionWriter(files.path, name, disk=files._disk)
    for start in (0, 4, 8):
        if start:
            write_snapshot(writer, start)
        write_part(writer, start, start + 4)
    return writer


def filled(path: Path, *names: str) -> StoreFiles:
    """A store with closed sessions of these names, the first one the oldest."""
    files = StoreFiles.create(path, disk=QuickDisk())
    for number, name in enumerate(names, start=1):
        with add_session(files, name, number) as writer:
            writer.close()
    return files


def kept(root: Path) -> dict[str, bytes]:
    """{name: bytes} of every file that sessions consist of, in a store or a folder that is an archive."""
    found = [path for path in (root / "sessions").rglob("*") if path.is_file()]
    names = {path.relative_to(root).as_posix(): path for path in found}
    return {
        name: path.read_bytes()
        for name, path in sorted(names.items())
        if path.name not in BESIDE and "/writer/" not in name
    }


def of(found: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {each: data for each, data in found.items() if each.startswith(f"sessions/{name}/")}


def archive(files: StoreFiles, url: str | Path, count: int | None = None, **more) -> Archive:
    """The archive of a store; the last `count` sessions stay on the disk, all by default."""
    keep = None if count is None else KeepLast(count)
    return Archive(files, str(url), keep_sessions=keep, patience=HASTY, **more)


def states(root: Path, name: str) -> list[Path]:
    return sorted((root / "sessions" / name).rglob("state.h5"))


def assert_reads(path: Path, name: str) -> None:
    """Every row of a session comes back, by the door that users take, and every snapshot."""
    import simckpt

    session = simckpt.Store(path).session(name)
    assert session.read(["rows/row"])["rows"]["row"].tolist() == ROWS
    for snapshot in session.snapshots:
        assert session.snapshot(snapshot)["env"]["python"] == {"count": snapshot.row}
    assert rows_of(path, name) == ROWS
