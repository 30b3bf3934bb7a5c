"""Kills the process that moves checkpoints to an archive at every request that it makes, and looks what is lost.

For `make reliability`: `kill_at_every_request(folder)` returns (kills tried, losses). A loss is a checkpoint that is
whole neither on the disk nor in the archive, or a commit in the archive without all that belongs to it. Known by bytes
that were kept aside, and by looking at the objects of the server, which is in this process. `VARIANTS` are movers that
are broken on purpose: each of them must be caught.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from archive_helpers import RUN, QuickDisk, archive, filled, is_whole, kept_aside, needs
from fake_s3 import FakeS3

from simckpt.storage import StoreFiles

PLACE = "archive"
URL = f"s3://bucket/{PLACE}"


def _move(path: Path, environment: dict[str, str], variant: str | None) -> None:
    """What the killed process does: two passes, with a checkpoint pruned between them."""
    os.environ.update(environment)
    if variant is not None:
        VARIANTS[variant]()
    files = StoreFiles.open(path, disk=QuickDisk())
    archive(files, URL).move()
    with files.claim(RUN):
        files.prune(RUN, 2, "to see what becomes of its copy")
    archive(files, URL).move()


def _evict_before_read_back() -> None:
    from simckpt.archive.uploading import Uploads

    def trusting(self, name, source, copied):
        self.objects.put(name, source)
        self.listing.sizes[name] = copied.size

    Uploads.bring = trusting


def _commit_first() -> None:
    from simckpt.archive.uploading import Uploads

    upload = Uploads.upload

    def hasty(self, run, seq):
        self.commit(run, seq)
        return upload(self, run, seq)

    Uploads.upload = hasty


def _remove_content_before_tombstone() -> None:
    from simckpt.archive.passes import Pass

    remove = Pass._remove

    def hasty(self, run, record, known):
        from simckpt.archive import contents

        for file in ("state.h5", "leaves.json"):
            self._objects.delete(contents.file_object(run, record.seq, file))
        return remove(self, run, record, known)

    Pass._remove = hasty


VARIANTS: dict[str, Callable[[], None]] = {
    "evict before read back": _evict_before_read_back,
    "commit object first": _commit_first,
    "remove content before the tombstone": _remove_content_before_tombstone,
}
# killing a mover cannot show that it trusts what it has not read back; a server that damages what it is given can
SHOWN_BY = {"evict before read back": "flip"}


def _losses(files: StoreFiles, server: FakeS3, originals: dict[str, bytes]) -> list[str]:
    there = {key.removeprefix(f"{PLACE}/"): data for key, data in server.objects.items() if key.startswith(f"{PLACE}/")}
    here = kept_aside(files)
    trash = {f"segments/{path.name.partition('.')[0]}.h5": path.read_bytes() for path in files.path.glob("trash/*")}
    here = trash | here
    found = []
    for name in sorted(originals):
        if not name.endswith("/commit.json"):
            continue
        folder = name.rpartition("/")[0]
        pruned = b"simckpt tombstone" in here.get(name, b"")
        in_archive = is_whole(there, folder, originals) and here.get(name) == originals[name]
        if not (pruned or in_archive or is_whole(here, folder, originals)):
            found.append(f"{folder} is lost")
        if there.get(name) == originals[name] and not is_whole(there, folder, originals):
            found.append(f"{folder} is half in the archive")
    return found


def kill_at_every_request(
    folder: Path, *, variant: str | None = None, fault: str | None = None, every: int = 1
) -> tuple[int, list[str]]:
    """Returns how many kills were tried, and what was lost by them.

    Args:
        folder: for the stores.
        variant: one of `VARIANTS`, or None for the mover as it is.
        fault: what the server does wrong with each upload of a state in turn, in place of the kill; one of FAULTS. That
            which shows the variant if None.
        every: kills at each request whose number is a multiple of this.
    """
    fault = fault or SHOWN_BY.get(variant or "")
    filled(folder / "original", 3)
    originals = kept_aside(StoreFiles.open(folder / "original"))
    # forks of a small process that has imported everything: it takes no threads along
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kills", "simckpt.archive.archive", "obstore"])
    tried, losses = 0, []
    with FakeS3() as server:

        def attempt(number: int, before: bool | None) -> bool:
            """Returns whether the process ended by itself: there are no more requests to kill it at."""
            shutil.rmtree(folder / "store", ignore_errors=True)
            shutil.copytree(folder / "original", folder / "store", symlinks=True)
            server.objects.clear()
            server.reset()
            process = context.Process(target=_move, args=(folder / "store", server.environment(), variant))
            armed = threading.Event()

            def kill(at: int, is_before: bool) -> bool:
                if at != number or is_before != before:
                    return False
                armed.wait(10)
                os.kill(process.pid, signal.SIGKILL)
                return True

            if before is not None:
                server.hook = kill
            elif fault is not None:
                seen = []
                server.fault = lambda at, name: (
                    fault if _is_upload(name) and (seen.append(at) or len(seen)) == number else None
                )
            process.start()
            armed.set()
            process.join(120)
            files = StoreFiles.open(folder / "store")
            losses.extend(f"request {number}: {loss}" for loss in _losses(files, server, originals))
            if before is None:
                return number > sum(_is_upload(f"{method} {key}") for method, key in server.requests)
            assert process.exitcode in (0, -signal.SIGKILL), f"the mover failed by itself, up to request {number}"
            if process.exitcode == -signal.SIGKILL:
                # the next mover goes on from there, and ends with everything in its place
                server.reset()
                again = context.Process(target=_move_again, args=(folder / "store", server.environment()))
                again.start()
                again.join(120)
                assert again.exitcode == 0, f"after request {number} the next mover fails"
                losses.extend(f"after request {number}: {loss}" for loss in _losses(files, server, originals))
                losses.extend(f"after request {number}: {each}" for each in _unfinished(files, server, originals))
            return process.exitcode == 0

        number = every
        while True:
            ended = [attempt(number, before) for before in ((None,) if fault else (True, False))]
            if all(ended):
                return tried, losses
            tried += ended.count(False)
            number += every


def _is_upload(name: str) -> bool:
    return name.startswith("PUT ") and name.endswith("/state.h5")


def _move_again(path: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    files = StoreFiles.open(path, disk=QuickDisk())
    moved = archive(files, URL).move()
    assert moved.problems == [], moved.problems


def _unfinished(files: StoreFiles, server: FakeS3, originals: dict[str, bytes]) -> list[str]:
    """What a whole pass has left undone."""
    there = {key.removeprefix(f"{PLACE}/"): data for key, data in server.objects.items()}
    here = kept_aside(files)
    found = []
    for name in originals:
        if not name.endswith("/commit.json"):
            continue
        folder = name.rpartition("/")[0]
        if name not in here:
            found.append(f"{name} is gone here")
        elif b"simckpt tombstone" in here[name]:
            left = [key for key in there if key.startswith(folder) and key != name]
            found += [f"{key} was left in the archive" for key in left]
            found += [] if there.get(name) == here[name] else [f"{name} is no tombstone in the archive"]
        elif not is_whole(there, folder, originals):
            found.append(f"{folder} is not in the archive")
    used = {
        segment
        for name in originals
        if name.endswith("/leaves.json") and name in there
        for segment in needs(originals[name])
    }
    found += [f"{name} was left in the archive" for name in there if name.startswith("segments/") and name not in used]
    return found
