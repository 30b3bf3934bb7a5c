"""Which sessions a policy keeps, what no policy can drop, and what is free once a session is gone."""

import sys
from pathlib import Path

import pytest

import simckpt
from simckpt.errors import ConfigurationError, ConflictError
from simckpt.policies import KeepBest, KeepEvery, KeepLast, KeepTagged, MaxBytes
from simckpt.storage import StoreFiles
from simckpt.storage.session_records import OriginRecord
from simckpt.storage.session_writing import SessionWriter, create_session

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
from session_helpers import record, write_part, write_snapshot

HOUR = 3600.0


def session(store: Path, name: str, created: float, *, rows: int = 4, origin=None) -> SessionWriter:
    files = StoreFiles.create(store)
    id = f"{abs(hash(name)) % 16**32:032x}"
    create_session(files, record(name, id=id, created=created, origin=origin))
    writer = SessionWriter(files.path, name)
    write_part(writer, 0, rows)
    return writer


@pytest.fixture
def store(tmp_path: Path) -> simckpt.Store:
    # the names say nothing of the order
    for hour, name in enumerate(["d", "a", "c", "b"]):
        with session(tmp_path, name, 1.8e9 + hour * HOUR) as writer:
            writer.close()
    return simckpt.Store(tmp_path)


def names(store: simckpt.Store) -> list[str]:
    return [each.name for each in store.sessions()]


def test_the_last_ones_stay(store) -> None:
    verdicts = store.prune_sessions(KeepLast(2))
    assert [(each.name, each.keep) for each in verdicts] == [("d", False), ("a", False), ("c", True), ("b", True)]
    assert verdicts[-1].reason == "the newest; among the last 2"
    assert verdicts[0].reason == "not kept by KeepLast(2)"
    assert names(store) == ["c", "b"]
    assert store.prune_sessions(KeepLast(2))[0].keep, "what was kept is kept again"


def test_a_dry_run_removes_nothing(store) -> None:
    assert [each.keep for each in store.prune_sessions(KeepLast(1), dry_run=True)] == [False, False, False, True]
    assert names(store) == ["d", "a", "c", "b"]


def test_by_the_clock_and_by_size(store) -> None:
    # each hour of UTC has one
    assert all(each.keep for each in store.prune_sessions(KeepEvery(minutes=60)))
    size = sum(path.stat().st_size for path in (store.path / "sessions/b").rglob("*") if path.suffix == ".h5")
    size += sum(path.stat().st_size for path in (store.path / "sessions/b").rglob("leaves.json"))
    assert store.session("b").nbytes == size
    kept = [each.name for each in store.prune_sessions(MaxBytes(2 * size), dry_run=True) if each.keep]
    assert kept == ["c", "b"]
    assert [each.name for each in store.prune_sessions(MaxBytes(2 * size - 1)) if each.keep] == ["b"]


def test_a_pinned_session_stays_until_it_is_unpinned(store) -> None:
    store.session("d").pin()
    assert store.session("d").pinned
    assert [each.reason for each in store.prune_sessions(KeepLast(1)) if each.keep] == [
        "pinned",
        "the newest; among the last 1",
    ]
    (store.path / "sessions/d/pin").write_bytes(b"")
    assert names(store) == ["d", "b"]
    store.prune_sessions(KeepLast(1))
    assert names(store) == ["d", "b"], "damage cannot unpin"
    store.session("d").unpin()
    store.session("d").unpin()
    store.prune_sessions(KeepLast(1))
    assert names(store) == ["b"]


def test_what_was_not_closed_is_never_removed_and_does_not_count(store) -> None:
    with session(store.path, "recording", 1.8e9 + 9 * HOUR):
        session(store.path, "left", 1.8e9 - HOUR).release()
        verdicts = store.prune_sessions(KeepLast(1))
        assert [(each.name, each.reason) for each in verdicts if each.keep] == [
            ("left", "was not closed: `simckpt session close`"),
            ("b", "the newest; among the last 1"),
            ("recording", "is being recorded"),
        ]
        assert names(store) == ["left", "b", "recording"]


def test_a_damaged_session_is_never_removed(store) -> None:
    path = store.path / "sessions/d/closed.json"
    path.write_bytes(path.read_bytes().replace(b"rows", b"cols"))
    (verdict,) = [each for each in store.prune_sessions(KeepLast(1)) if each.name == "d"]
    assert verdict.keep
    assert "cannot be read" in verdict.reason
    assert names(store) == ["d", "b"]


@pytest.mark.parametrize(
    "policy", [KeepBest(1, "loss"), KeepTagged(), KeepEvery(steps=9), KeepLast(1) | KeepTagged("good")]
)
def test_policies_by_what_sessions_lack_are_refused(store, policy) -> None:
    with pytest.raises(ConfigurationError, match="pin those that matter"):
        store.prune_sessions(policy)
    with pytest.raises(ConfigurationError, match="is a policy"):
        store.prune_sessions(3)
    assert len(names(store)) == 4


def test_a_removed_session_frees_its_origin(tmp_path) -> None:
    from log_helpers import RUN, Log
    from session_helpers import SECOND
    from storage_helpers import new_store

    sys.path.insert(0, str(Path(__file__).parent.parent / "archive"))
    from archive_helpers import add

    files, log = new_store(tmp_path), Log(columns=("rewards", "half"))
    with files.claim(RUN):
        first = add(files, log, 1)
        add(files, log, 2)
    with session(tmp_path, "old", 1.8e9, origin=OriginRecord(first, RUN, 1, 10)) as writer:
        write_snapshot(writer, 4)
        writer.close()
    with session(tmp_path, "new", 1.8e9 + SECOND / 1e9) as writer:
        writer.close()
    store = simckpt.Store(tmp_path)
    assert [each.keep for each in store.run(RUN).prune(KeepLast(1), dry_run=True)] == [True, True]
    with files.claim(RUN), pytest.raises(ConflictError, match="session 'old'"):
        files.prune(RUN, 1, "test")
    store.prune_sessions(KeepLast(1))
    assert [each.keep for each in store.run(RUN).prune(KeepLast(1))] == [False, True]
