"""Sessions on disk, for reading: their records, parts, snapshots and models, every byte that is used verified.

A part covers those whose numbers lie in the range that its folder's name gives: what was merged counts once, whenever
the merge was interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from simckpt import state
from simckpt.errors import DamagedError, FormatError, RunLockedError, SessionNotFoundError, StorageError
from simckpt.state.leaf import Leaf
from simckpt.state.tables import mapped
from simckpt.storage import claims, indexes, names, parts, reader, records, session_records, state_file
from simckpt.storage import index as leaf_index
from simckpt.storage.index import INDEX_FILE, LeafRecord
from simckpt.storage.records import FileRecord
from simckpt.storage.session_records import ClosedRecord, ModelRecord, PartRecord, SessionRecord, SnapshotRecord

SESSIONS = "sessions"
PARTS, SNAPSHOTS, MODELS = "parts", "snapshots", "models"
SESSION_FILE, CLOSED_FILE = "session.json", "closed.json"
ARCHIVED_FILE = "archived.json"  # written once it is closed, and there is a copy in an archive
PART_FILE, SNAPSHOT_FILE, MODEL_FILE = "part.json", "snapshot.json", "model.json"
RECORD = "record"  # the component of a part
FEATURE = "sessions"  # what a store requires of its readers once a session of it has an origin

T = TypeVar("T")
Fallback = Callable[[str, DamagedError], bool]


class Bundle(Protocol):
    """A record that vouches for a state file and its index."""

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The two files."""
        ...


def session_names(root: Path) -> list[str]:
    """Returns the names of a store's sessions, sorted; also of one that has lost its record and holds anything else."""
    try:
        with reader.opened_folder(root, SESSIONS) as folder:
            found = _listed(folder, root / SESSIONS)
            return sorted(name for name in found if names.is_run_name(name) and _is_session(folder, name))
    except FileNotFoundError:
        return []


class SessionFiles:
    """One session of a store, for reading; it may be written by another process meanwhile.

    Attributes:
        path: of its folder.
        record: of `session.json`.

    Args:
        root: the store's folder.
        name: of the session.
        fallback: told the name and what is damaged or evicted, brings it back from an archive; returns whether it did.

    Raises:
        InvalidNameError: no session can have that name.
        SessionNotFoundError: there is none of that name; the message lists the near ones.
        DamagedError, FormatError: its record cannot be trusted.
    """

    def __init__(self, root: Path, name: str, *, fallback: Fallback | None = None) -> None:
        self.root = root
        self.path = root / SESSIONS / names.check_run_name(name)
        self._fallback = fallback
        self.record = self._brought_back(lambda: read_session(root, name))

    def _brought_back(self, read: Callable[[], T]) -> T:
        """Returns what `read` does, if need be after an archive has brought back what is damaged or evicted."""
        try:
            return read()
        except DamagedError as error:
            if self._fallback is None:
                raise
            came, told = self._fallback(self.path.name, error), error
        try:
            return read()  # also if nothing came: another reader may have been quicker
        except DamagedError:
            if came:
                raise
            raise told from None

    def closed(self) -> ClosedRecord | None:
        """Returns how it ended; None if it goes on, or was killed."""
        path = self.path / CLOSED_FILE
        try:
            return self._brought_back(lambda: self._closed(path))
        except FileNotFoundError:
            return None

    def _closed(self, path: Path) -> ClosedRecord:
        try:
            data = reader.read_small(self.path, CLOSED_FILE, limit=session_records.RECORD_LIMIT, path=path)
        except FileNotFoundError as error:
            if not os.path.lexists(self.path / ARCHIVED_FILE):
                raise
            message = f"{path} is gone: the session is in an archive, and was closed: `simckpt session fetch` brings it"
            raise DamagedError(message, path=path) from error
        return session_records.parse_closed(data, path, session=self.record.id)

    def is_written(self) -> bool:
        """Returns whether a process of this machine is writing it, as far as that shows without writing."""
        try:
            claims.check_free(self.path)
        except RunLockedError:
            return True
        return claims.held_claim(self.path) is not None

    def parts(self) -> list[PartRecord]:
        """Returns the records of its parts, in order, but for those that merged ones cover.

        Raises:
            DamagedError: a part is missing, or its record is damaged.
            FormatError: parts that overlap, or a record that breaks a rule.
        """
        return self._stable(lambda: [self.part(numbers) for numbers in self.part_numbers()])

    def part_numbers(self) -> list[tuple[int, int]]:
        """Returns (first, last) of the parts that are not covered by others, in order; raises as `parts`."""
        return self._brought_back(self._part_numbers)

    def _part_numbers(self) -> list[tuple[int, int]]:
        found, _ = covering(part_folders(self.path))
        expected = 1
        for first, last in found:
            if first != expected:
                where = self.path / PARTS
                raise DamagedError(f"parts {expected} to {first - 1} are missing from {where}", path=where)
            expected = last + 1
        closed = self.closed()
        if closed is not None and closed.parts >= expected:
            where = self.path / PARTS
            raise DamagedError(f"parts {expected} to {closed.parts} are missing from {where}", path=where)
        return found

    def part(self, numbers: tuple[int, int]) -> PartRecord:
        """Returns the record of one part."""
        folder = f"{numbers[0]:08d}-{numbers[1]:08d}"
        parse = session_records.parse_part
        record = self._bundle(PARTS, folder, PART_FILE, lambda data, path: parse(data, path, session=self.record.id))
        if record.numbers != numbers:
            raise FormatError(f"{self.path / PARTS / folder} has the record of parts {record.numbers}: it was renamed")
        return record

    def snapshots(self) -> list[SnapshotRecord]:
        """Returns the records of the snapshots that are there, in order; raises DamagedError or FormatError."""
        return [self.snapshot(number) for number in self.snapshot_numbers()]

    def snapshot_numbers(self) -> list[int]:
        """Returns the numbers of the snapshots that are there, in order."""
        return sorted(int(name) for name in _names_in(self.path, SNAPSHOTS) if names.SEQUENCE.fullmatch(name))

    def snapshot(self, number: int) -> SnapshotRecord:
        """Returns the record of one snapshot; raises DamagedError or FormatError."""
        name = f"{number:08d}"
        parse = session_records.parse_snapshot
        record = self._bundle(
            SNAPSHOTS, name, SNAPSHOT_FILE, lambda data, path: parse(data, path, session=self.record.id)
        )
        if record.number != number:
            raise FormatError(f"{self.path / SNAPSHOTS / name} has another record: it was renamed")
        return record

    def absent(self, snapshots: Iterable[SnapshotRecord]) -> list[tuple[str, str]]:
        """Returns (place, what is missing there) of the snapshots and models that its records speak of.

        Args:
            snapshots: the records of those that are there.

        Raises:
            DamagedError, FormatError: of the last record.
        """
        closed = self.closed()
        there = [0, *self.snapshot_numbers(), 1 + (0 if closed is None else closed.snapshots)]
        found = []
        for before, after in itertools.pairwise(there):
            if after - before > 1:
                one = f"snapshot {before + 1} is missing"
                found.append(
                    (SNAPSHOTS, one if after - before == 2 else f"snapshots {before + 1} to {after - 1} are missing")
                )
        wanted = {digest for each in snapshots for digest in each.models}
        missing = sorted(wanted - set(_names_in(self.path, MODELS)))
        return found + [(f"{MODELS}/{digest}", "a model that snapshots refer to is missing") for digest in missing]

    def models(self) -> list[ModelRecord]:
        """Returns the records of the models that its snapshots refer to; raises DamagedError or FormatError."""
        return [self.model(name) for name in _names_in(self.path, MODELS) if names.ID.fullmatch(name)]

    def model(self, digest: str) -> ModelRecord:
        """Returns the record of one model; raises DamagedError or FormatError."""
        parse = session_records.parse_model
        record = self._bundle(MODELS, digest, MODEL_FILE, lambda data, path: parse(data, path, session=self.record.id))
        if record.digest != digest:
            raise FormatError(f"{self.path / MODELS / digest} has another record: it was renamed")
        return record

    def read_part(self, part: PartRecord, wanted: Callable[[str], bool] | None = None) -> dict[str, Any]:
        """Returns the tables of a part, nested dicts of arrays; those that are not wanted are left out.

        If it was merged with others meanwhile, its entries are read from there.

        Args:
            part: of `parts`.
            wanted: told the path of a column, such as "rows/reward".

        Raises:
            DamagedError: naming the damaged columns, or a file that is missing.
            FormatError: what breaks a rule.
            StorageError: not enough memory, or the permissions refuse.
        """
        try:
            return self._tables(part, wanted)
        except DamagedError:
            first, last = part.numbers
            kept, _ = covering(part_folders(self.path))
            cover = next((each for each in kept if each[0] <= first and last <= each[1] and each != part.numbers), None)
            if cover is None:
                raise
        merged = self.part(cover)
        tables = self._tables(merged, wanted)
        for name, (start, stop) in part.tables.items():
            offset = merged.tables[name][0]
            _cut(tables, name.split("/"), start - offset, stop - offset)
        return tables

    def _tables(self, part: PartRecord, wanted: Callable[[str], bool] | None) -> dict[str, Any]:
        tree = self.read_bundle(f"{PARTS}/{part.folder}", part, RECORD, wanted)
        _check_tables(tree, part, self.path / PARTS / part.folder)
        return tree  # type: ignore[no-any-return]

    def read_snapshot(self, snapshot: SnapshotRecord) -> dict[str, Any]:
        """Returns {"env": state with its models, "observation": the last one, or None}; raises as `read_part`."""
        folder = f"{SNAPSHOTS}/{snapshot.number:08d}"
        tree = self.read_bundle(folder, snapshot, "snapshot")
        if not isinstance(tree, dict) or not isinstance(tree.get("env"), dict) or "observation" not in tree:
            raise FormatError(f"{self.path / folder} holds no state of an env")
        if snapshot.models:
            tree["env"]["models"] = {digest: self.read_model(self.model(digest)) for digest in snapshot.models}
        return tree

    def read_model(self, model: ModelRecord) -> dict[str, Any]:
        """Returns the fields of a model; raises as `read_part`."""
        tree = self.read_bundle(f"{MODELS}/{model.digest}", model, "model")
        if not isinstance(tree, dict):
            raise FormatError(f"{self.path / MODELS / model.digest} holds no fields of a model")
        return tree

    def read_bundle(
        self, folder: str, record: Bundle, component: str, wanted: Callable[[str], bool] | None = None
    ) -> Any:
        """Returns the tree of the one component of a state file; raises as `read_part`."""
        return self._brought_back(lambda: self._read_bundle(folder, record, component, wanted))

    def _read_bundle(
        self, folder: str, record: Bundle, component: str, wanted: Callable[[str], bool] | None = None
    ) -> Any:
        path = self.path / folder
        with self._opened(folder) as descriptor:
            leaves = _index_of(descriptor, record, path)
            structure = f"{component}/{names.STRUCTURE}"
            if structure not in leaves:
                raise FormatError(f"{path} has no component {component!r}")
            chosen = [leaf for leaf in leaves.values() if wanted is None or leaf.path == structure or wanted(leaf.key)]
            sizes = {file.name: file.size for file in record.files if file.covers == "metadata"}
            reader.check_memory(sum(leaf.size for leaf in chosen))
            found = parts.read_leaves(self.root, descriptor, chosen, slabs={}, sizes=sizes, path=path)
        text = found.pop(structure).data.tobytes()
        own = {leaf.key: found.get(leaf.path, _LEFT_OUT) for leaf in leaves.values() if leaf.path != structure}
        tree = state.decode(own, text)
        if wanted is None:
            return tree
        if not isinstance(tree, dict):
            raise FormatError(f"{path} holds no tables")
        kept = _without(tree, wanted)
        # an array that stands in two columns is one leaf, which may lie under the path that was not asked for
        if any(isinstance(each, np.ndarray) and each.shape == _LEFT_OUT.shape for each in _columns(kept)):
            return _without(self._read_bundle(folder, record, component), wanted)
        return kept

    def verify(self, folder: str, record: Bundle) -> None:
        """Compares every byte of a folder of the session with its digest.

        Args:
            folder: "parts/00000001-00000001", "snapshots/00000001" or "models/<digest>".
            record: of it.

        Raises:
            DamagedError: bytes differ or are missing.
            FormatError: what breaks a rule.
        """
        self.verify_leaves(folder, record)
        self.verify_rest(folder, record)

    def verify_leaves(self, folder: str, record: Bundle) -> None:
        """Compares the bytes of all arrays of a folder of the session with their digests; as `verify`."""
        path = self.path / folder
        with self._opened(folder) as descriptor:
            leaves = list(_index_of(descriptor, record, path).values())
            sizes = {file.name: file.size for file in record.files if file.covers == "metadata"}
            reader.read_lines(descriptor, reader.by_file(leaves), sizes=sizes, path=path, take=lambda leaf, array: None)

    def verify_rest(self, folder: str, record: Bundle) -> None:
        """Compares what lies outside of the arrays, which viewers alone need; as `verify`."""
        path = self.path / folder
        with self._opened(folder) as descriptor:
            leaves = list(_index_of(descriptor, record, path).values())
            for file in record.files:
                if file.covers == "metadata":
                    reader.check_rest(descriptor, file, leaves, path=path)

    @contextlib.contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        try:
            with reader.opened_folder(self.path, *folder.split("/")) as descriptor:
                yield descriptor
        except FileNotFoundError as error:
            path = self.path / folder
            raise DamagedError(f"{path} is missing: it was removed or merged while it was read", path=path) from error

    def _bundle(self, kind: str, folder: str, file: str, parse: Callable[[bytes, Path], T]) -> T:
        return self._brought_back(lambda: self._parsed(kind, folder, file, parse))

    def _parsed(self, kind: str, folder: str, file: str, parse: Callable[[bytes, Path], T]) -> T:
        path = self.path / kind / folder / file
        limit = session_records.RECORD_LIMIT
        try:
            return parse(reader.read_small(self.path, kind, folder, file, limit=limit, path=path), path)
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing", path=path) from error

    def _stable(self, read: Callable[[], T]) -> T:
        """Returns what `read` does, once more if parts were merged meanwhile."""
        before = set(part_folders(self.path))
        try:
            return read()
        except DamagedError:
            if set(part_folders(self.path)) == before:
                raise
        return read()


# of a shape that no column has
_LEFT_OUT = Leaf(np.empty((0, 0, 0, 0, 7), np.uint8), "uint8", (0, 0, 0, 0, 7), "numpy")


def _check_tables(tree: Any, part: PartRecord, path: Path) -> None:
    """Raises FormatError unless all columns have as many entries as the part's record says."""
    seen = 0
    for name, (start, stop) in part.tables.items():
        table = tree
        for each in name.split("/"):
            table = table.get(names.decode_part(each), {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise FormatError(f"{path} has no table {name!r}")
        for column in _columns(table):
            if not isinstance(column, np.ndarray) or column.ndim == 0 or len(column) != stop - start:
                raise FormatError(f"{path}: the table {name!r} has not {stop - start} entries, as its record says")
            seen += 1
    if seen != sum(1 for _ in _columns(tree)):
        raise FormatError(f"{path} has columns that belong to no table of its record")


def _columns(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _columns(each)
    else:
        yield tree


def _cut(tree: dict[str, Any], path: Sequence[str], start: int, stop: int) -> None:
    """Cuts the arrays of one table of some, in place; one that was not read is none."""
    for part in path[:-1]:
        tree = tree.get(part, {})
    if path[-1] in tree:
        tree[path[-1]] = mapped(lambda array: array[start:stop], tree[path[-1]])


def _without(tree: Any, wanted: Callable[[str], bool], path: str = "") -> Any:
    """Returns nested dicts without the columns that are not wanted, and without what is empty then."""
    kept = {}
    for key, value in tree.items():
        inner = f"{path}/{names.encode_part(str(key))}" if path else names.encode_part(str(key))
        if isinstance(value, dict):
            if found := _without(value, wanted, inner):
                kept[key] = found
        elif wanted(inner):
            kept[key] = value
    return kept


def _index_of(folder: int, record: Bundle, path: Path) -> dict[str, LeafRecord]:
    """Returns {path: leaf} of a folder of a session, all of which lie in its one state file."""
    files = {file.name: file for file in record.files}
    if set(files) != {INDEX_FILE, state_file.STATE_FILE} or files[state_file.STATE_FILE].covers != "metadata":
        raise FormatError(f"the record of {path} must name {INDEX_FILE} and {state_file.STATE_FILE}")
    data = indexes.read_file(folder, files[INDEX_FILE], path, limit=leaf_index.INDEX_LIMIT)
    leaves, segments = leaf_index.parse_index(data, path / INDEX_FILE, file=state_file.STATE_FILE)
    if segments:
        raise FormatError(f"{path / INDEX_FILE} refers to segments, which sessions do not use")
    if any(leaf.part is not None for leaf in leaves.values()):
        raise FormatError(f"{path / INDEX_FILE} has parts of leaves, which sessions do not use")
    reader.check_bounds(leaves.values(), files[state_file.STATE_FILE].size, path / state_file.STATE_FILE)
    return leaves


def read_session(root: Path, name: str) -> SessionRecord:
    """Returns the record of a session; raises SessionNotFoundError, DamagedError or FormatError."""
    path = root / SESSIONS / name / SESSION_FILE
    try:
        data = reader.read_small(root, SESSIONS, name, SESSION_FILE, limit=records.RECORD_LIMIT, path=path)
    except FileNotFoundError as error:
        known = session_names(root)
        if name in known and not os.path.lexists(path):
            message = f"{path} is gone; what else there is of the session is still there"
            raise DamagedError(message, path=path) from error
        near = difflib.get_close_matches(name, known, 3) or known[:3]
        hint = f"did you mean {', '.join(near)}?" if near else "it has none yet"
        raise SessionNotFoundError(f"the store {root} has no session {name!r}; {hint}") from error
    record = session_records.parse_session(data, path)
    if record.name != name:
        raise FormatError(f"{path} is the record of session {record.name!r}: a folder was renamed or copied")
    return record


def part_folders(session: Path) -> list[tuple[int, int]]:
    """Returns (first, last) of all folders of parts, covered ones included, sorted."""
    found = []
    for name in _names_in(session, PARTS):
        match = session_records.PART_NAME.fullmatch(name)
        if match and 1 <= int(match[1]) <= int(match[2]):
            found.append((int(match[1]), int(match[2])))
    return sorted(found)


def covering(folders: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the parts that are not covered by others, and those that are; both in order.

    Raises:
        FormatError: two of which neither covers the other have numbers in common.
    """
    kept: list[tuple[int, int]] = []
    covered: list[tuple[int, int]] = []
    # the longest first of those that begin at one number
    for first, last in sorted(folders, key=lambda each: (each[0], -each[1])):
        if not kept or first > kept[-1][1]:
            kept.append((first, last))
        elif last <= kept[-1][1]:
            covered.append((first, last))
        else:
            raise FormatError(f"parts {kept[-1]} and {(first, last)} of a session overlap")
    return kept, covered


def _names_in(folder: Path, *inner: str) -> Sequence[str]:
    try:
        with reader.opened_folder(folder, *inner) as descriptor:
            return sorted(_listed(descriptor, folder.joinpath(*inner)))
    except FileNotFoundError:
        return []


def _listed(folder: int, path: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise StorageError(f"{path} cannot be listed: {error.strerror}") from error


def _is_session(sessions: int, name: str) -> bool:
    for inner in (SESSION_FILE, CLOSED_FILE, ARCHIVED_FILE, PARTS, SNAPSHOTS, MODELS):
        try:
            os.stat(f"{name}/{inner}", dir_fd=sessions, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except (NotADirectoryError, PermissionError):
            return False
        except OSError as error:
            raise StorageError(f"{SESSIONS}/{name} cannot be looked at: {error.strerror}") from error
        return True
    return False
