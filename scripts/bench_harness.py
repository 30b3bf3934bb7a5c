"""How bench_save.py measures: saves in turn, then restores in turn, memory, and what the machine itself can do."""

import ctypes
import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import bench_contenders as contenders
import numpy as np
import xxhash
from bench_contenders import Contender
from bench_states import Subject

BLOCK = 1 << 20  # [bytes] in one write
COPY_BUFFER = 1 << 29  # [bytes]; larger states are copied into it in turns, for a second state may not fit into memory


@dataclass(frozen=True)
class Bar:
    """A bar of DESIGN section 8 and what was measured.

    Attributes:
        at_least: whether `limit` is the smallest value that passes, not the largest.
    """

    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether it is kept."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        missed = f", missed by {abs(self.value - self.limit) / (self.limit or 1):.1%}" if not self.passed else ""
        return f"{'PASS' if self.passed else 'MISS'}  {self.text}: {self.value:.4g} ({side} {self.limit:g}{missed})"


@dataclass
class Measured:
    """What one contender showed with one subject.

    Attributes:
        stall, durable, cold, warm: of each save and restore [s].
        written: of each save [bytes].
        peaks: memory of each save; the first one's includes what is kept from then on [bytes].
        restore_peak: memory of the first restore [bytes].
        new_rows: how many rows of a replay buffer the last save wrote, for those who can say.
    """

    stall: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    restore_peak: int = 0
    new_rows: int = 0

    def forget_first(self) -> None:
        """Drops the first save, which was there to warm up; its memory stays."""
        for values in (self.stall, self.durable, self.written):
            del values[0]


class Limits:
    """What the machine itself needs to copy and to write a subject [s]."""

    def __init__(self, subject: Subject, home: Path) -> None:
        self.subject = subject
        self.home = home
        size = min(sum(array.nbytes for array in subject.fresh()), COPY_BUFFER)
        self.target = np.ones(max(size, 1), dtype=np.uint8)
        self.copies: list[float] = []
        self.writes: list[float] = []

    def measure(self) -> None:
        """Copies what is new and writes everything."""
        sources = [octets(array) for array in self.subject.fresh()]
        start = time.perf_counter()
        place = 0
        for source in sources:
            for first in range(0, source.size, self.target.size):
                part = source[first : first + self.target.size]
                place = place if place + part.size <= self.target.size else 0
                np.copyto(self.target[place : place + part.size], part)
                place += part.size
        self.copies.append(time.perf_counter() - start)

        self.home.mkdir(exist_ok=True)
        path = self.home / "plain"
        sources = [octets(tensor.numpy()) for tensor in self.subject.tensors().values()]
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for source in sources:
                for first in range(0, source.size, BLOCK):
                    file.write(source[first : first + BLOCK].data)
            os.fsync(file.fileno())
        contenders.sync(self.home)
        self.writes.append(time.perf_counter() - start)
        path.unlink()

    def forget_first(self) -> None:
        """Drops the first measurement."""
        del self.copies[0], self.writes[0]


def octets(array: np.ndarray) -> np.ndarray:
    """Returns an array's bytes, as a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digests(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """Returns a digest of each array's bytes."""
    return {name: xxhash.xxh3_128_intdigest(octets(array)) for name, array in arrays.items()}


def sizes(folder: Path) -> dict[Path, int]:
    """Returns the sizes of the files below a folder [bytes]."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def grown(before: dict[Path, int], after: dict[Path, int]) -> int:
    """Returns how much was written: new files whole, others by what they have grown [bytes]."""
    return sum(max(size - before.get(path, 0), 0) for path, size in after.items())


def drop_from_cache(files: Sequence[Path]) -> None:
    """Makes the kernel forget the pages of files; they must be durable already."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class Memory:
    """Measures the peak of resident memory in a `with`, child processes that were started in it included.

    Attributes:
        peak: beyond what was there at its start [bytes].
    """

    def __enter__(self) -> "Memory":
        self._before, self._children = resident(), set(_children())
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: proc(5)
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = _status("self")["VmHWM"] - self._before
        for child in set(_children()) - self._children:
            status = _status(child)
            # shared buffers are counted once, with this process
            self.peak += status.get("VmHWM", 0) - status.get("RssShmem", 0) - status.get("RssFile", 0)


def resident() -> int:
    """Returns this process's resident memory, what malloc keeps in reserve left out [bytes]."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("self")["VmRSS"]


def _status(pid: str) -> dict[str, int]:
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}


def _children() -> list[str]:
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def compare(
    subject: Subject, kinds: Sequence[type[Contender]], home: Path, *, warmup: bool, rounds: int, restores: int
) -> tuple[Limits, dict[str, Measured]]:
    """Returns what the machine and the contenders showed.

    Args:
        subject: what is saved.
        kinds: the contenders.
        home: an empty folder.
        warmup: whether a first round is not counted.
        rounds: saves of each that are counted.
        restores: restores of each, cold and warm.
    """
    limits = Limits(subject, home / "limits")
    made = [kind(subject, home / f"{number:02d}") for number, kind in enumerate(kinds)]
    shown = {each.name: Measured() for each in made}
    for each in made:
        each.load()
        each.prepare()
    with ExitStack() as stack:
        for number in range(warmup + rounds):
            rows = subject.advance()
            for turn in range(len(made) + 1):
                place = (turn + number) % (len(made) + 1)
                if place == len(made):
                    limits.measure()
                    continue
                contender, found = made[place], shown[made[place].name]
                contender.add(rows)
                with Memory() as memory:
                    if not number:
                        contender.open()
                        stack.callback(contender.close)
                    _save(contender, number, found, check=number == warmup + rounds - 1)
                found.peaks.append(memory.peak)
                found.new_rows = contender.count_new_rows()
    limits.target = np.empty(0)
    if warmup:
        limits.forget_first()
        for found in shown.values():
            found.forget_first()
    _restore(made, restores, shown)
    return limits, shown


def _save(contender: Contender, number: int, found: Measured, *, check: bool) -> None:
    """Measures one save; with `check`, notes what it saves and then changes the networks while it is in flight."""
    before = sizes(contender.home)
    settled = contender.subject.settled()
    networks = {name: tensor.numpy() for name, tensor in contender.subject.tensors().items() if name not in settled}
    if check:
        contender.wanted = digests(contender.arrays())
    start = time.perf_counter()
    contender.save(number)
    found.stall.append(time.perf_counter() - start)
    if check:
        contenders.flip(networks)
    contender.finish()
    found.durable.append(time.perf_counter() - start)
    if check:
        contenders.flip(networks)
    found.written.append(grown(before, sizes(contender.home)))


def _restore(made: Sequence[Contender], restores: int, shown: dict[str, Measured]) -> None:
    """Measures the restores of what was saved last, the first of them into spoiled objects, and compares the bits."""
    for number in range(restores):
        for turn in range(len(made)):
            contender = made[(turn + number) % len(made)]
            found = shown[contender.name]
            if not number:
                contender.spoil()
            drop_from_cache(contender.files())
            with Memory() as memory:
                found.cold.append(_seconds(contender.restore))
            if not number:
                found.restore_peak = memory.peak
                restored = digests(contender.arrays())
                different = [name for name, digest in contender.wanted.items() if restored[name] != digest]
                if different:
                    raise SystemExit(f"{contender.name} did not restore what was saved: {', '.join(different)}")
            found.warm.append(_seconds(contender.restore))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
