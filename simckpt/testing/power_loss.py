"""What a power failure may leave of a store: records every change to the disk, then makes the states that are legal.

SIGKILL cannot show a missing fsync, because the kernel keeps what was written. So the changes are recorded, and for
every moment the states are enumerated that a file system may be in after a power failure at that moment (the idea of
ALICE, Pillai et al., OSDI 2014):

- what was synced is there: the bytes of a file after a sync of the file, names in a folder after a sync of the folder;
- the bytes written to a file since may be missing, zero, there in part, or there;
- names that were created, renamed or removed since may be as before or as after. `ordered`: in each folder the later
  change only with the earlier ones, as with a journal. `relaxed`: each for itself, and a renamed file may bear both
  names.

A rename is never half lost: the file or folder has its old name, its new one, or both. A sync of a file says nothing of
its name. No file system that is in use is as bad as all that.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from simckpt.storage.durable import Bytes, Disk

LOST, KEPT, ZERO, PART = "lost", "kept", "zero", "part"
_EVERY = 64  # combinations of name changes at one moment up to which all of them are tried


class Name(NamedTuple):
    """One name in a folder: given to a file or folder, or taken away (`node` is None)."""

    folder: int
    name: str
    node: int | None


@dataclass(frozen=True)
class Renaming:
    """Names that change at once.

    Attributes:
        names: those given, then those taken away.
        parts: whether the later ones can be lost without the first.
    """

    names: tuple[Name, ...]
    parts: bool = False


@dataclass(frozen=True)
class Writing:
    """Bytes written to a file; None if only its size was set, to `offset`."""

    node: int
    offset: int
    data: bytes | None


@dataclass(frozen=True)
class Syncing:
    """A sync of a file or folder, `path` when it happened."""

    node: int
    path: str


@dataclass(frozen=True)
class Note:
    """Something that was promised to the caller from here on, a save that returned say."""

    value: Any


Event = Renaming | Writing | Syncing | Note


@dataclass(frozen=True)
class CrashState:
    """What a folder may hold after a power failure.

    Attributes:
        moment: how many events had happened.
        notes: that had been made by then.
        folders: paths of the folders, parents first.
        files: {path: content}.
    """

    moment: int
    notes: tuple[Any, ...]
    folders: tuple[str, ...]
    files: Mapping[str, bytes]

    def key(self) -> int:
        """Returns a number that is the same for equal content and notes."""
        return hash((self.notes, self.folders, tuple(sorted((path, hash(data)) for path, data in self.files.items()))))

    def write(self, root: Path) -> None:
        """Makes these folders and files below a new folder."""
        disk = Disk()
        disk.make_folder(root)
        for folder in self.folders:
            disk.make_folder(root / folder)
        for path, data in self.files.items():
            descriptor = disk.create(root / path)
            try:
                if data:
                    disk.pwrite(descriptor, data, 0)
            finally:
                disk.close(descriptor)


class RecordingDisk(Disk):
    """Does what a disk does, all but syncs, and keeps what a power failure could undo.

    Attributes:
        root: of the folder that is watched; nothing outside of it may be changed.
        events: what happened, in order.
    """

    def __init__(self, root: Path) -> None:
        """Looks at what is in the folder already, which counts as durable."""
        self.root = root.resolve()
        self.events: list[Event] = []
        self._count = itertools.count(1)
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._data: dict[int, bytes] = {}
        self._folders: dict[tuple[int, int], int] = {_identity(self.root): 0}
        self._open: dict[int, tuple[int, str]] = {}
        self._look(self.root, 0)
        self.before = {node: dict(names) for node, names in self._names.items()}, dict(self._data)

    def note(self, value: Any) -> None:
        """Takes note that something is promised from here on."""
        self.events.append(Note(value))

    def without(self, unwanted: Callable[[Event], bool]) -> Recording:
        """Returns the recording without some of its events: what would have happened without these syncs, say."""
        names, data = self.before
        return Recording(names, data, set(self._names), tuple(event for event in self.events if not unwanted(event)))

    @property
    def recording(self) -> Recording:
        """What was recorded until now."""
        return self.without(lambda event: False)

    def _look(self, path: Path, node: int) -> None:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                child = next(self._count)
                self._names[node][entry.name] = child
                if entry.is_dir(follow_symlinks=False):
                    self._names[child] = {}
                    self._folders[_identity(Path(entry.path))] = child
                    self._look(Path(entry.path), child)
                else:
                    self._data[child] = Path(entry.path).read_bytes()

    def _place(self, path: Path) -> tuple[int, str]:
        node = 0
        *above, name = path.relative_to(self.root).parts
        for part in above:
            node = self._names[node][part]
        return node, name

    def _rename(self, *names: Name, parts: bool = False) -> None:
        self.events.append(Renaming(names, parts))
        for folder, name, node in names:
            if node is None:
                self._names[folder].pop(name, None)
            else:
                self._names[folder][name] = node

    def create(self, path: Path) -> int:
        """Records a new name, of a file without content."""
        descriptor = super().create(path)
        folder, name = self._place(path)
        node = next(self._count)
        self._data[node] = b""
        self._open[descriptor] = node, str(path.relative_to(self.root))
        self._rename(Name(folder, name, node))
        return descriptor

    def open_log(self, path: Path) -> int:
        """Records a new name, if there was none."""
        folder, name = self._place(path)
        known = self._names[folder].get(name)
        descriptor = super().open_log(path)
        node = next(self._count) if known is None else known
        self._open[descriptor] = node, str(path.relative_to(self.root))
        if known is None:
            self._data[node] = b""
            self._rename(Name(folder, name, node))
        return descriptor

    def close(self, descriptor: int) -> None:
        """Forgets the descriptor."""
        self._open.pop(descriptor, None)
        super().close(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        """Records the size."""
        super().allocate(descriptor, size)
        self._write(descriptor, size, None)

    def pwrite(self, descriptor: int, data: Bytes, offset: int) -> int:
        """Records the bytes."""
        written = super().pwrite(descriptor, data, offset)
        self._write(descriptor, offset, bytes(data[:written]))
        return written

    def append(self, descriptor: int, data: bytes) -> int:
        """Records the bytes, at the end of the file."""
        offset = os.fstat(descriptor).st_size
        written = super().append(descriptor, data)
        self._write(descriptor, offset, data[:written])
        return written

    def _write(self, descriptor: int, offset: int, data: bytes | None) -> None:
        node, _ = self._open[descriptor]
        event = Writing(node, offset, data)
        self.events.append(event)
        self._data[node] = _written(self._data[node], event)

    def fsync(self, descriptor: int) -> None:
        """Records the sync, and does nothing."""
        if descriptor in self._open:
            node, path = self._open[descriptor]
        else:
            status = os.fstat(descriptor)
            node = self._folders[status.st_dev, status.st_ino]
            path = self._path_of(node)
        self.events.append(Syncing(node, path))

    def _path_of(self, wanted: int) -> str:
        if wanted == 0:
            return "."
        for node, names in self._names.items():
            for name, child in names.items():
                if child == wanted:
                    return f"{self._path_of(node)}/{name}".removeprefix("./")
        raise KeyError(wanted)

    def make_folder(self, path: Path) -> None:
        """Records a new name, of an empty folder."""
        super().make_folder(path)
        folder, name = self._place(path)
        node = next(self._count)
        self._names[node] = {}
        self._folders[_identity(path)] = node
        self._rename(Name(folder, name, node))

    def rename(self, source: Path, target: Path) -> None:
        """Records a name given and one taken away."""
        super().rename(source, target)
        (old, name), (new, given) = self._place(source), self._place(target)
        node = self._names[old][name]
        # a file may bear both names after a crash, a folder cannot
        self._rename(Name(new, given, node), Name(old, name, None), parts=node in self._data)

    def link(self, source: Path, target: Path) -> None:
        """Records a second name."""
        super().link(source, target)
        (old, name), (new, given) = self._place(source), self._place(target)
        self._rename(Name(new, given, self._names[old][name]))

    def unlink(self, path: Path) -> None:
        """Records a name taken away."""
        super().unlink(path)
        self._rename(Name(*self._place(path), None))

    def remove_folder(self, path: Path) -> None:
        """Records a name taken away."""
        identity = _identity(path)
        super().remove_folder(path)
        self._folders.pop(identity)  # the inode may be used again
        self._rename(Name(*self._place(path), None))


@dataclass(frozen=True)
class Recording:
    """Changes to a folder.

    Attributes:
        names: {folder: {name: file or folder}} before; folder 0 is the root.
        data: {file: content} before.
        folders: which of the numbers are folders, those made since included.
        events: what happened.
    """

    names: Mapping[int, Mapping[str, int]]
    data: Mapping[int, bytes]
    folders: Collection[int]
    events: Sequence[Event]

    def states(self, *, relaxed: bool, samples: int, seed: int = 0, every: int = _EVERY) -> Iterator[CrashState]:
        """Yields states that are legal after a power failure, at every moment; many are equal to each other.

        Args:
            relaxed: whether later changes may survive where earlier ones of the same folder do not.
            samples: how many random states at each moment, beside those that are always tried: nothing or everything
                of what is not durable; and all combinations of names, where there are no more than `every`.
            seed: of the random ones.
            every: see `samples`.
        """
        rng = random.Random(seed)
        for moment in range(len(self.events) + 1):
            yield from _Moment(self, moment, relaxed=relaxed).states(rng, samples, every)


class _Moment:
    """What is durable, and what may be, after the first events of a recording."""

    def __init__(self, recording: Recording, moment: int, *, relaxed: bool) -> None:
        self._recording, self._moment = recording, moment
        self._units: list[tuple[Name, ...]] = []  # that survive or not, each as a whole
        self._needs: dict[int, int] = {}  # what was taken away with a name goes only where the new name is there
        self._whole: set[int] = set()
        self._durable: set[int] = set()
        self._synced = dict(recording.data)
        self._writes: dict[int, list[Writing]] = defaultdict(list)
        notes: list[Any] = []
        for event in recording.events[:moment]:
            if isinstance(event, Renaming):
                self._rename(event, relaxed=relaxed)
            elif isinstance(event, Writing):
                self._writes[event.node].append(event)
            elif isinstance(event, Syncing):
                self._sync(event.node)
            else:
                notes.append(event.value)
        self._notes = tuple(notes)
        self._pending = [unit for unit in range(len(self._units)) if unit not in self._durable]
        self._relaxed = relaxed

    def _rename(self, event: Renaming, *, relaxed: bool) -> None:
        if not (relaxed and event.parts):
            if not event.parts:
                self._whole.add(len(self._units))
            self._units.append(event.names)
            return
        first, *others = event.names
        self._units.append((first,))
        given = len(self._units) - 1
        for name in others:
            self._units.append((name,))
            self._needs[len(self._units) - 1] = given

    def _sync(self, node: int) -> None:
        if node in self._recording.folders:
            # by the folder of the first name: that of a rename's target. A folder that is known to have left its old
            # place is in the new one, for it is never lost
            self._durable.update(
                unit
                for unit, names in enumerate(self._units)
                if names[0].folder == node or (unit in self._whole and names[-1].folder == node)
            )
        for write in self._writes.pop(node, ()):
            self._synced[node] = _written(self._synced.get(node, b""), write)

    def states(self, rng: random.Random, samples: int, every: int) -> Iterator[CrashState]:
        uniform = (LOST, ZERO, KEPT) if self._writes else (KEPT,)
        for kept in self._choices(every):
            for mode in uniform:
                yield self._state(kept, (mode,), rng)
        if self._pending or self._writes:
            for _ in range(samples):
                yield self._state(self._random_choice(rng), (LOST, KEPT, ZERO, PART), rng)

    def _choices(self, every: int) -> Iterator[set[int]]:
        if self._relaxed:
            if 2 ** len(self._pending) <= every:
                for chosen in itertools.product((False, True), repeat=len(self._pending)):
                    yield {unit for unit, keep in zip(self._pending, chosen, strict=True) if keep}
                return
        else:
            folders = self._by_folder()
            counts = [range(len(units) + 1) for units in folders]
            total = 1
            for count in counts:
                total *= len(count)
            if total <= every:
                for lengths in itertools.product(*counts):
                    yield {unit for units, length in zip(folders, lengths, strict=True) for unit in units[:length]}
                return
        yield set()
        yield set(self._pending)
        for unit in self._pending:  # each alone, and each alone missing
            yield self._prefix({unit})
            yield set(self._pending) - self._suffix(unit)

    def _by_folder(self) -> list[list[int]]:
        folders: dict[int, list[int]] = defaultdict(list)
        for unit in self._pending:
            folders[self._units[unit][0].folder].append(unit)
        return list(folders.values())

    def _prefix(self, units: Collection[int]) -> set[int]:
        if self._relaxed:
            return set(units)
        return {unit for found in self._by_folder() for unit in found if any(unit <= last in found for last in units)}

    def _suffix(self, unit: int) -> set[int]:
        if self._relaxed:
            return {unit}
        return {other for found in self._by_folder() if unit in found for other in found if other >= unit}

    def _random_choice(self, rng: random.Random) -> set[int]:
        if self._relaxed:
            return {unit for unit in self._pending if rng.random() < 0.5}
        return {unit for units in self._by_folder() for unit in units[: rng.randrange(len(units) + 1)]}

    def _state(self, kept: Collection[int], modes: Sequence[str], rng: random.Random) -> CrashState:
        names = {folder: dict(entries) for folder, entries in self._recording.names.items()}
        alive = self._durable | set(kept)
        for unit, changed in enumerate(self._units):
            if unit not in alive or self._needs.get(unit, unit) not in alive:
                continue
            for folder, name, node in changed:
                entries = names.setdefault(folder, {})
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
        folders: list[str] = []
        files: dict[str, bytes] = {}
        contents: dict[int, bytes] = {}  # of a file with two names there is one

        def walk(node: int, path: str) -> None:
            for name, child in names.get(node, {}).items():
                below = f"{path}{name}"
                if child in self._recording.folders:
                    folders.append(below)
                    walk(child, f"{below}/")
                    continue
                if child not in contents:
                    contents[child] = self._content(child, rng.choice(modes), rng)
                files[below] = contents[child]

        walk(0, "")
        return CrashState(self._moment, self._notes, tuple(folders), files)

    def _content(self, node: int, mode: str, rng: random.Random) -> bytes:
        content, writes = self._synced.get(node, b""), self._writes.get(node, [])
        if mode == LOST or not writes:
            return content
        full = content
        for write in writes:
            full = _written(full, write)
        if mode == KEPT:
            return full
        if mode == ZERO:
            return content + bytes(max(0, len(full) - len(content)))
        # some of the writes, one of them perhaps in part, in a file of its full size or not
        partial = content + (bytes(max(0, len(full) - len(content))) if rng.random() < 0.5 else b"")
        for write in writes:
            if write.data is not None and rng.random() < 0.5:
                cut = len(write.data) if rng.random() < 0.5 else rng.randrange(len(write.data) + 1)
                partial = _written(partial, Writing(node, write.offset, write.data[:cut]))
        return partial


def _written(content: bytes, write: Writing) -> bytes:
    if write.data is None:
        return content + bytes(max(0, write.offset - len(content)))
    content += bytes(max(0, write.offset - len(content)))
    return content[: write.offset] + write.data + content[write.offset + len(write.data) :]


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
