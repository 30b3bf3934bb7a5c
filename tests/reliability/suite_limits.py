"""The operating system itself refuses: full disks, limits on files, failing system calls. And nothing passes unseen."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from reliability import Line, Progress, Tally, folder, in_child, stride
from store_operations import World, build
from store_states import RUN, BrokenError, States, small_leaves_count

from simckpt.errors import SimckptError, StorageFullError
from simckpt.storage import CommitRecord
from simckpt.storage.durable import Disk

DONE, REFUSED = 0, 1
# the system calls that change files, and the operation that each of them is
SYSTEM_CALLS = {
    "pwrite64": "pwrite",
    "write": "append",
    "fsync": "fsync",
    "fallocate": "allocate",
    "rename": "rename",
    "link": "link",
    "linkat": "link",
    "unlink": "unlink",
    "mkdir": "make_folder",
    "rmdir": "remove_folder",
    "utimensat": "touch",
    "fadvise64": "start_writeback",
}
# others of this kind, which nothing may call
UNWANTED = (
    "writev,pwritev,pwritev2,pwrite,renameat,renameat2,unlinkat,mkdirat,ftruncate,truncate,symlink,symlinkat,fdatasync"
)
UNWANTED += (
    ",msync,sync_file_range,syncfs,chmod,fchmod,fchmodat,chown,fchown,mknod,mknodat,setxattr,fsetxattr,copy_file_range"
)


def limited(base: Path, states: States, limit: Callable[[], object], unlimit: Callable[[], object]) -> int:
    """Saves under a limit, in a child; what it had is whole afterwards, and without the limit it goes on.

    Raises:
        BrokenError: a promise was broken.
    """
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    world = build(base / "world", states)
    before = world.look()

    def save() -> int:
        code = DONE
        world.opened(Disk())
        with world.claimed((RUN,)):
            limit()
            try:
                world.save(4)
            except SimckptError:
                code = REFUSED
            finally:
                unlimit()
            if code == REFUSED:
                world.save(4)
        return code

    report = base / "report.txt"
    code = in_child(save, report)
    if code not in (DONE, REFUSED):
        raise BrokenError(f"it ended with {code}: {report.read_text()[-600:] if report.exists() else ''}")
    found = world.look()
    line = found[RUN][1]
    if line[:-1] != before[RUN][1] or line[-1][1] != 4:
        raise BrokenError(f"neither as before nor as after: {found}")
    return code


def _limiting(name: int, value: int) -> tuple[Callable[[], object], Callable[[], object]]:
    soft, hard = resource.getrlimit(name)
    return (
        lambda: resource.setrlimit(name, (value, hard)),
        lambda: resource.setrlimit(name, (soft, hard)),
    )


def file_sizes(tally: Tally, scale: float) -> None:
    with folder() as base, small_leaves_count():
        for size in range(0, 12_000, round(12_000 / max(8, 120 * scale))):
            tally.attempt(
                f"files of at most {size} bytes",
                lambda size=size: limited(base / "limited", States(), *_limiting(resource.RLIMIT_FSIZE, size)),
            )


def open_files(tally: Tally) -> None:
    refused = 0
    with folder() as base, small_leaves_count():
        free = os.dup(0)
        os.close(free)
        for more in range(12):
            limits = _limiting(resource.RLIMIT_NOFILE, free + more)

            def attempt(limits=limits) -> None:
                nonlocal refused
                refused += limited(base / "limited", States(), *limits) == REFUSED

            tally.attempt(f"{more} more open files", attempt)
    if not refused:
        tally.attempt("open files", lambda: _fail("the limit on open files was never met"))


def _fail(message: str) -> None:
    raise BrokenError(message)


@contextlib.contextmanager
def tiny_disk(base: Path, kilobytes: int) -> Iterator[Path | None]:
    """Gives a file system of a size in memory, or None where none can be mounted."""
    path = base / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def full_disk(tally: Tally, kilobytes: int) -> bool:
    """Saves until the disk is full, prunes and saves; returns whether one could be mounted."""
    with folder() as base, tiny_disk(base, kilobytes) as disk:
        if disk is None:
            return False

        def attempt() -> None:
            world = build(disk / "world", States())
            world.opened(Disk())
            step, full = 4, 0
            with world.claimed((RUN,)):
                for _ in range(60):
                    before = world.look()
                    try:
                        world.save(step)
                    except StorageFullError:
                        if world.look() != before:
                            raise BrokenError("a save that failed changed something") from None
                        full += 1
                        oldest = _oldest(world)
                        if oldest is None:
                            break  # all is gone that may go, and the disk is too small for more
                        world.store.prune(RUN, oldest, "full")
                    else:
                        step = 3 + step % 4
            if not full:
                raise BrokenError("the disk was never full")

        with small_leaves_count():
            tally.attempt(f"a disk of {kilobytes} KB", attempt)
        return True


def _oldest(world: World) -> int | None:
    """Returns the number of the oldest checkpoint that may go, if any: the second is the origin of a branch."""
    living = (each.seq for each in world.store.records(RUN) if isinstance(each, CommitRecord) and each.seq != 2)
    return next(living, None)


TRACED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from store_operations import World, case
from store_states import RUN, Saver, States, small_leaves_count
from simckpt.errors import SimckptError
from simckpt.testing.faults import FaultyDisk
with small_leaves_count():
    world = World(Path(sys.argv[1]), States(), None, {{RUN: Saver(States())}})
    disk = FaultyDisk(syncs=True)
    world.opened(disk)
    Path("/begin").exists()
    try:
        with world.claimed((RUN,)):
            world.save(4)
            world.store.prune(RUN, 3, "test")
            world.store.tag(RUN, 4, "good")
            case("branch").operate(world)
        print("done")
    except SimckptError as error:
        print("refused", type(error).__name__)
    Path("/end").exists()
    print(" ".join(disk.calls))
"""


def strace(base: Path, *options: str) -> tuple[list[str], list[str]] | None:
    """Runs a save, a prune, a mark and a branch under strace.

    Returns:
        the lines that it printed, and those of strace for it; None where there is no strace, or it may not trace.
    """
    if shutil.which("strace") is None:
        return None
    with small_leaves_count():
        build(base / "world", States())
    log, code = base / "strace.log", TRACED.format(path=[path for path in sys.path if path])
    done = subprocess.run(
        ["strace", "-f", "-y", "-o", str(log), *options, sys.executable, "-c", code, str(base / "world")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if not done.stdout:
        return None
    return done.stdout.splitlines(), log.read_text(errors="replace").splitlines() if log.exists() else []


def unseen(base: Path) -> tuple[Counter[str], Counter[str]] | None:
    """Returns {operation: how often} as a `FaultyDisk` counted, and as the kernel saw; None without strace."""
    wanted = ",".join([*SYSTEM_CALLS, UNWANTED, "openat,stat,newfstatat,access,open"])
    known = wanted.replace("pwrite,", "")
    found = strace(base, "-e", f"trace=?{known.replace(',', ',?')}")
    if found is None:
        return None
    printed, log = found
    begin = next(place for place, line in enumerate(log) if '"/begin"' in line)
    end = next(place for place, line in enumerate(log) if '"/end"' in line)
    seen: Counter[str] = Counter()
    for line in log[begin:end]:
        match = re.search(r"\b(\w+)\((.*)", line)
        if match is None or str(base) not in match[2]:
            continue
        name, arguments = match[1], match[2]
        if name in ("openat", "open"):
            if "O_CREAT" in arguments:
                seen["create"] += 1
            elif "O_RDWR" in arguments or "O_WRONLY" in arguments:
                seen["open_lock"] += 1
        elif name not in ("stat", "newfstatat", "access"):
            seen[SYSTEM_CALLS.get(name, f"unwanted {name}")] += 1
    counted = Counter(printed[-1].split())
    counted["create"] += counted.pop("open_log", 0)
    del counted["close"]
    return counted, seen


def injected(tally: Tally, calls: Counter[str], wanted: float) -> int:
    """Has the kernel fail one system call in each run, about `wanted` of each kind; returns how many were met."""
    met = 0
    for call, error in (("fsync", "EIO"), ("pwrite64", "ENOSPC"), ("rename", "EIO"), ("mkdir", "EDQUOT")):
        for place in stride(calls[SYSTEM_CALLS[call]], wanted):

            def attempt(call=call, error=error, place=place) -> None:
                nonlocal met
                with folder() as base:
                    found = strace(base, "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={place}")
                    if found is None or found[0][0].split()[0] not in ("done", "refused"):
                        raise BrokenError(f"the process ended with {found}")
                    met += any("INJECTED" in line for line in found[1])
                    World(base / "world", States()).look()

            tally.attempt(f"{error} of {call} number {place}", attempt)
    return met


def run(scale: float, progress: Progress) -> list[Line]:
    lines = []
    progress("limits: sizes of files, open files, full disks")
    tally = Tally()
    file_sizes(tally, scale)
    open_files(tally)
    sizes = [size for size in range(224, 224 + round(512 * scale) + 65, 32) if full_disk(tally, size)]
    detail = "ulimit -f, ulimit -n, " + (f"{len(sizes)} full tmpfs" if sizes else "no tmpfs could be mounted")
    lines.append(tally.line("limits of the operating system met", detail))
    progress("limits: strace")
    with folder() as base, small_leaves_count():
        found = unseen(base)
    if found is None:
        lines.append(Line("system calls that no fault could reach", 0, 0, "skipped: no strace, or it may not trace"))
        return lines
    counted, seen = found
    different = sum(((counted - seen) + (seen - counted)).values())
    detail = f"by strace and by FaultyDisk: {', '.join(f'{name} {count}' for name, count in sorted(seen.items()))}"
    lines.append(Line("system calls that no fault could reach", sum(seen.values()), different, detail))
    tally = Tally()
    met = injected(tally, seen, max(2, 30 * scale))
    lines.append(tally.line("system calls failed by the kernel (strace)", f"{met} met"))
    return lines
