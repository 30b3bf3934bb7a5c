"""The catalog: what the records and marks of a store say, kept in the user's cache folder, so that listings are quick.

Derived and never needed: each listing compares the names, times and inodes of the store's files with what was kept,
reads what is new, and forgets what is gone. A catalog that is missing, damaged or of another version is built anew; one
that is locked for long, or in a folder that cannot be written, is done without. Nothing is decided from it: restores
and pruning read the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from simckpt.errors import StoreError
from simckpt.storage import CommitRecord, Marks, StoreFiles, TombstoneRecord, sealed
from simckpt.storage.records import FileRecord
from simckpt.storage.store_reader import Stamp

WAIT = 2.0  # [s] for another process that writes the catalog; then this listing goes without
# the time of a file system advances in steps: what changed this short a time ago may change again unnoticed [ns]
UNSETTLED = 2_000_000_000
_TOMBSTONE, _COMMIT = 0, 1
_FIELDS: Mapping[int, tuple[str, ...]] = {
    kind: tuple(each.name for each in dataclasses.fields(record))
    for kind, record in ((_TOMBSTONE, TombstoneRecord), (_COMMIT, CommitRecord))
}
_FILES = _FIELDS[_COMMIT].index("files")
_LEVELS = sealed.LEVELS + 1  # a rollback is a dict of typed values
_ROLLBACK = {kind: names.index("rollback") for kind, names in _FIELDS.items()}
# another version of simckpt, whose records have other fields, builds its catalog anew
_SCHEMA = json.dumps([*_FIELDS.values(), *(each.name for each in dataclasses.fields(FileRecord))])
_TABLES = """
CREATE TABLE schema (fields TEXT NOT NULL);
CREATE TABLE records (run TEXT, seq INTEGER, stamp TEXT, kind INTEGER, body TEXT, PRIMARY KEY (run, seq)) WITHOUT ROWID;
CREATE TABLE marks (run TEXT, checkpoint TEXT, stamp TEXT, body TEXT, PRIMARY KEY (run, checkpoint)) WITHOUT ROWID;
"""

Record = CommitRecord | TombstoneRecord


@dataclass(frozen=True)
class Contents:
    """What a run holds.

    Attributes:
        records: of its checkpoints and of those that were pruned, in the order of commits.
        marks: {checkpoint id: marks}.
        damaged: {commit number: error} of records that cannot be read.
        damaged_marks: {checkpoint id: error} of marks that cannot be read.
    """

    records: list[Record]
    marks: dict[str, Marks]
    damaged: dict[int, StoreError]
    damaged_marks: dict[str, StoreError]


def default_folder() -> Path | None:
    """Returns the folder of catalogs, `$XDG_CACHE_HOME/simckpt` or `~/.cache/simckpt`; None if there is no home."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, below_home: str) -> Path | None:
    """Returns simckpt's own part of one of the user's folders; None if there is no home.

    Args:
        variable: of the environment, which may name the folder; a relative path does not count, says its standard.
        below_home: where it is by default.
    """
    configured = Path(os.environ.get(variable, ""))
    if configured.is_absolute():
        return configured / "simckpt"
    try:
        return Path.home() / below_home / "simckpt"
    except RuntimeError:
        return None


class Catalog:
    """The catalog of one store, open for one listing; a context manager.

    Args:
        files: the store.
        folder: of the catalogs; the user's cache folder by default.
    """

    def __init__(self, files: StoreFiles, *, folder: Path | None = None) -> None:
        self._files = files
        folder = folder or default_folder()
        self._path = None if folder is None else folder / f"{files.id}.sqlite"
        self._connection = self._opened()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self._connection.close()

    def contents(self, run: str) -> Contents:
        """Returns what a run holds now.

        Raises:
            StoreError: the run's folder cannot be read at all.
        """
        damaged: dict[int, StoreError] = {}
        damaged_marks: dict[str, StoreError] = {}
        return Contents(
            self._records(run, damaged), self._marks(run, damaged_marks), dict(sorted(damaged.items())), damaged_marks
        )

    def _records(self, run: str, damaged: dict[int, StoreError]) -> list[Record]:
        stamps = {seq: _text(stamp) for seq, stamp in self._files.stamps(run).items()}
        known = self._kept("SELECT seq, stamp, kind, body FROM records WHERE run = ?", run)
        found = {
            seq: (kind, body) for seq, stamp, kind, body in known if stamps.get(seq) == stamp and stamp != _text((0, 0))
        }
        records = dict(zip(found, self._parsed(list(found.values())), strict=False))
        if new := [seq for seq in stamps if seq not in records]:
            read = self._files.records(run, damaged=damaged, only=new)
            records |= {record.seq: record for record in read}
            rows = [(run, record.seq, stamps[record.seq], *_body(record)) for record in read]
            self._keep("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", rows)
        gone = [(run, seq) for seq, *_ in known if seq not in stamps]
        self._keep("DELETE FROM records WHERE run = ? AND seq = ?", gone)
        return [records[seq] for seq in stamps if seq in records]

    def _marks(self, run: str, damaged: dict[str, StoreError]) -> dict[str, Marks]:
        stamps = self._files.mark_stamps(run)
        known = self._kept("SELECT checkpoint, stamp, body FROM marks WHERE run = ?", run)
        marks: dict[str, Marks] = {}
        with self._trusting():
            for checkpoint, stamp, body in known:
                if checkpoint in stamps and stamp == _text(stamps[checkpoint]):
                    tags, pinned, metrics = json.loads(body)
                    marks[checkpoint] = Marks(frozenset(tags), pinned, metrics)
        rows = []
        for checkpoint in stamps.keys() - marks.keys():
            marks[checkpoint] = read = self._files.marks_of(run, checkpoint, damaged=damaged)
            if checkpoint not in damaged and abs(time.time_ns() - stamps[checkpoint][0]) > UNSETTLED:
                body = json.dumps([sorted(read.tags), read.pinned, read.metrics])
                rows.append((run, checkpoint, _text(stamps[checkpoint]), body))
        self._keep("INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?)", rows)
        self._keep(
            "DELETE FROM marks WHERE run = ? AND checkpoint = ?", [(run, c) for c, *_ in known if c not in stamps]
        )
        return dict(sorted(marks.items()))

    def _parsed(self, rows: list[tuple[int, str]]) -> list[Record]:
        """Returns the records of rows, or none of them if the catalog holds anything but what it was given."""
        with self._trusting():
            # one call for all of them: a call for each takes longer than what it does
            bodies = json.loads(f"[{','.join(body for _, body in rows)}]")
            return [_record(kind, body) for (kind, _), body in zip(rows, bodies, strict=True)]
        return []

    def forget_other_runs(self, runs: Sequence[str]) -> None:
        """Removes what is kept of runs that the store has no longer."""
        kept = self._kept("SELECT run FROM records UNION SELECT run FROM marks")
        gone = [(run,) for (run,) in kept if run not in runs]
        self._keep("DELETE FROM records WHERE run = ?", gone)
        self._keep("DELETE FROM marks WHERE run = ?", gone)

    def _kept(self, statement: str, *values: Any) -> list[Any]:
        with self._trusting():
            return self._connection.execute(statement, values).fetchall()
        return []

    def _keep(self, statement: str, rows: list[Any]) -> None:
        if rows:
            with self._trusting(), self._connection:
                self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def _trusting(self) -> Iterator[None]:
        """Goes on after an error of the catalog: built anew if it is damaged, done without if it is locked or full."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _OUTSIDE:
                self._start_anew()
        except (ValueError, TypeError, LookupError):
            self._start_anew()

    def _start_anew(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._connection = self._opened()

    def _opened(self) -> sqlite3.Connection:
        for _ in range(2):
            if self._path is None:
                break
            try:
                # what people call their hyperparameters is nobody else's business
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                return _connect(str(self._path))
            except OSError:
                break
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _OUTSIDE:
                    break
                # damaged, or of another version
                with contextlib.suppress(OSError):
                    self._path.unlink()
        self._path = None
        return _connect(":memory:")


# not the catalog's own fault: it stays as it is
_OUTSIDE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
}


def _connect(path: str) -> sqlite3.Connection:
    """Returns a connection to a catalog of this version; raises sqlite3.Error for anything else but an empty one."""
    connection = sqlite3.connect(path, timeout=WAIT)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchall():
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                # another process may have made the tables in the meantime
                if not connection.execute("SELECT 1 FROM sqlite_master").fetchall():
                    for statement in filter(None, map(str.strip, _TABLES.split(";"))):
                        connection.execute(statement)
                    connection.execute("INSERT INTO schema VALUES (?)", (_SCHEMA,))
        if connection.execute("SELECT fields FROM schema").fetchall() != [(_SCHEMA,)]:
            raise sqlite3.DatabaseError("a catalog of another version")
    except BaseException:
        connection.close()
        raise
    return connection


def _text(stamp: Stamp) -> str:
    # inodes may need all of 64 bits, of which sqlite has 63
    return f"{stamp[0]}.{stamp[1]}"


def _body(record: Record) -> tuple[int, str]:
    kind = _COMMIT if isinstance(record, CommitRecord) else _TOMBSTONE
    values: list[Any] = [getattr(record, name) for name in _FIELDS[kind]]
    if kind == _COMMIT:
        values[_FILES] = [dataclasses.astuple(file) for file in values[_FILES]]
    values[_ROLLBACK[kind]] = sealed.to_json(values[_ROLLBACK[kind]], levels=_LEVELS)
    return kind, json.dumps(values)


def _record(kind: int, values: list[Any]) -> Record:
    values[_ROLLBACK[kind]] = sealed.from_json(values[_ROLLBACK[kind]], levels=_LEVELS)
    if kind == _TOMBSTONE:
        return TombstoneRecord(*values)
    values[_FILES] = tuple([FileRecord(*file) for file in values[_FILES]])
    return CommitRecord(*values)
