"""Lists what nobody needs any longer, what is on its way out, and what a repair has put aside. None of it is damage."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

from simckpt.errors import StoreError
from simckpt.maintenance.findings import DAMAGE, FOREIGN, LEFTOVER, QUARANTINED, UNCHECKED, Notes, problem
from simckpt.maintenance.recording import listed
from simckpt.storage import StoreFiles, names, processes, quarantine, reader, segments, usage, work

_FREE = "`simckpt compact` frees it, if what it was made for was pruned or has failed; `--unknown` in any case"


def examine_work(store: StoreFiles, notes: Notes) -> None:
    """Lists the folders in `tmp/` whose makers are dead."""
    for name in listed(store, ("tmp",), notes) or []:
        path = store.path / "tmp" / name
        maker = processes.Process.from_token(path.name)
        alive = maker.is_alive() if maker is not None else False
        if alive is None:
            with contextlib.suppress(OSError):
                alive = time.time() - path.lstat().st_mtime < work.UNKNOWN_AGE
        if alive is False and os.path.lexists(path):
            size = reader.size_of(path)
            notes.add(LEFTOVER, "work", f"tmp/{path.name}", "was left by a process that is gone", size=size)


def examine_segment_files(store: StoreFiles, there: Collection[str], used: Collection[str], notes: Notes) -> None:
    """Lists what lies in `segments/` and in `trash/` and is not needed.

    Args:
        store: the files.
        there: names in `segments/`, listed before the indexes were read.
        used: ids of the segments that checkpoints use, as far as they are known.
        notes: receive what is found.
    """
    unused = set()
    for name in sorted(there):
        identity, _, ending = name.partition(".")
        if not names.ID.fullmatch(identity) or ending != "h5":
            notes.add(FOREIGN, "foreign", f"segments/{name}", "is no segment")
        elif identity not in used:
            unused.add(identity)
    # while a folder cannot be looked at it is not known what it uses, and that is told
    if any(each.kind == "folder" for each in notes.findings):
        unused.clear()
    if unused:
        try:
            # in this order: what was announced may have become a commit meanwhile
            announced, homeless = usage.by_saves(store.path), unused & usage.homeless(store.path)
            committed = usage.SegmentUse(store).by_checkpoints()
        except StoreError as error:
            notes.add(UNCHECKED, "unused segment", segments.FOLDER, problem(error, store.path))
            return
        if homeless and not listed(store, ("runs",), Notes()):
            notes.add(
                DAMAGE,
                "folder",
                "runs",
                f"has no run, though {segments.FOLDER}/ has {len(homeless)} segments",
                meaning="what was saved in this store is not found; its segments are here",
                advice="put the folder itself back in its place, or free them by `simckpt compact --unknown`",
            )
        # while a record cannot be read it is not known what it uses
        unused = set() if announced is None or committed is None else unused - announced - committed
    for identity in sorted(unused):
        path = store.path / segments.FOLDER / segments.file_name(identity)
        if path.exists():
            where = f"{segments.FOLDER}/{path.name}"
            size = reader.size_of(path)
            notes.add(LEFTOVER, "unused segment", where, "no checkpoint refers to it", size=size, advice=_FREE)
    for name in listed(store, (segments.TRASH,), notes) or []:
        where = f"{segments.TRASH}/{name}"
        notes.add(LEFTOVER, "trash", where, "is on its way out", size=reader.size_of(store.path / where))


def examine_quarantine(store: StoreFiles, notes: Notes) -> None:
    """Lists what repairs have put aside."""
    for where in quarantine.entries(store.path):
        advice = (
            f"copy what you want to look at, and remove it when you want its room (`simckpt compact --unknown` then "
            f"frees its segments); put back, it belongs at {where}"
        )
        path = f"{quarantine.FOLDER}/{where}"
        text = "was damaged and put aside by a repair"
        notes.add(QUARANTINED, "quarantine", path, text, size=reader.size_of(store.path / path), advice=advice)
