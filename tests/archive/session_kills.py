"""Kills, server faults and disks that refuse while sessions move to an archive, and what is lost by them.

`kill_at_every_request(folder)` returns (kills tried, losses). A loss is a session that is whole neither on the disk nor
in the archive, or one whose end is in the archive without all that belongs to it.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path

from archive_helpers import QuickDisk
from fake_s3 import FakeS3
from session_archives import archive, filled, kept, of

from simckpt.storage import StoreFiles

PLACE = "archive"
URL = f"s3://bucket/{PLACE}"
NAMES = ("a", "b", "c")
REMOVED = "a"


def act(path: Path, url: str | Path, disk=None) -> None:
    """Everything in a row that changes sessions of a store and its archive."""
    files = StoreFiles.open(path, disk=disk or QuickDisk())
    mover = archive(files, url, 1)
    mover.move()
    mover.fetch_session("b")
    if REMOVED in files.sessions():
        files.remove_session(REMOVED)
    mover.move()


def losses(here: dict[str, bytes], there: dict[str, bytes], originals: dict[str, bytes]) -> list[str]:
    """What is lost, given files and objects by their names; one that is gone from both sides was removed."""
    found = []
    for name in NAMES:
        wanted = of(originals, name)
        is_here = all(here.get(each) == data for each, data in wanted.items())
        is_there = all(there.get(each) == data for each, data in wanted.items())
        records = {each: data for each, data in wanted.items() if not each.endswith("state.h5")}
        evicted = is_there and all(here.get(each) == data for each, data in records.items())
        if not (is_here or evicted or (name == REMOVED and not of(here, name))):
            found.append(f"{name} is lost")
        if f"sessions/{name}/closed.json" in there and not is_there:
            found.append(f"{name} is half in the archive")
    return found


def unfinished(files: StoreFiles, here: dict[str, bytes], there: dict[str, bytes], originals) -> list[str]:
    """What a whole pass has left undone."""
    found = [f"{name} is not in the archive" for name in files.sessions() if of(there, name) != of(originals, name)]
    if REMOVED not in files.sessions():
        found += [f"{name} was left in the archive" for name in of(there, REMOVED)]
    # of what is here as well: should it be lost one day, that was no removal
    found += [f"the note {path.name} was left" for path in (files.path / "archive").glob("removed/*")]
    return found


def unnoted(files: StoreFiles, here: dict[str, bytes], there: dict[str, bytes]) -> list[str]:
    """What was removed here without a note, so that no pass would remove it there."""
    is_noted = any((files.path / "archive").glob("removed/*"))
    return (
        [f"the removal of {REMOVED} is not noted"] if of(there, REMOVED) and not (of(here, REMOVED) or is_noted) else []
    )


def objects(server: FakeS3) -> dict[str, bytes]:
    names = {key.removeprefix(f"{PLACE}/"): data for key, data in server.objects.items()}
    return {name: data for name, data in names.items() if not name.endswith(("archived.json", "pin"))}


def _move(path: Path, environment: dict[str, str], commit_first: bool) -> None:
    os.environ.update(environment)
    if commit_first:
        _end_first()
    act(path, URL)


def _end_first() -> None:
    """A mover that is broken on purpose, which must be caught."""
    from simckpt.archive.session_objects import SessionUploads

    upload = SessionUploads.upload

    def hasty(self, name):
        record = self._described(self._files.session(name))
        self._settle(record, "closed.json", (self._files.session_folder(name) / "closed.json").read_bytes())
        return upload(self, name)

    SessionUploads.upload = hasty


def kill_at_every_request(folder: Path, *, every: int = 1, end_first: bool = False) -> tuple[int, list[str]]:
    """Returns how many kills were tried, and what was lost by them.

    Args:
        folder: for the stores.
        every: kills at each request whose number is a multiple of this.
        end_first: the mover writes a session's end before the rest.
    """
    originals = kept(filled(folder / "original", *NAMES).path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["session_kills", "simckpt.archive.archive", "obstore"])
    tried, found, number = 0, list[str](), every
    with FakeS3() as server:
        while True:
            shutil.rmtree(folder / "store", ignore_errors=True)
            shutil.copytree(folder / "original", folder / "store", symlinks=True)
            server.objects.clear()
            server.reset()
            process = context.Process(target=_move, args=(folder / "store", server.environment(), end_first))
            armed = threading.Event()

            def kill(at: int, before: bool, number=number, process=process, armed=armed) -> bool:
                # before one that is odd, after one that is even
                if at != number or before != bool(number % 2):
                    return False
                armed.wait(10)
                os.kill(process.pid, signal.SIGKILL)
                return True

            server.hook = kill
            process.start()
            armed.set()
            process.join(120)
            assert process.exitcode in (0, -signal.SIGKILL), f"the mover failed by itself, up to request {number}"
            files = StoreFiles.open(folder / "store")
            here, there = kept(files.path), objects(server)
            lost = losses(here, there, originals) + unnoted(files, here, there)
            found += [f"request {number}: {loss}" for loss in lost]
            if process.exitcode == 0:
                return tried, found
            tried += 1
            server.reset()
            again = context.Process(target=_move, args=(folder / "store", server.environment(), False))
            again.start()
            again.join(120)
            assert again.exitcode == 0, f"after request {number} the next mover fails"
            here, there = kept(files.path), objects(server)
            after = losses(here, there, originals) + unfinished(files, here, there, originals)
            found += [f"after request {number}: {each}" for each in after]
            number += every
