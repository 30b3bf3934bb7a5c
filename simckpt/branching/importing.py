"""Copies of checkpoints of other stores, each in a run of its own, from which branches can start."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from simckpt import provenance
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ConfigurationError, ConflictError, RunLockedError, StoreError
from simckpt.storage import CommitDraft, CommitRecord, ImportRecord, RunRecord, StoreFiles, exports
from simckpt.storage.copying import Source, source_of
from simckpt.storage.names import check_run_name

PATIENCE = 30.0  # [s] for another import, which holds the claim on a run for an instant
POLL = 0.05  # [s]


def opened(source: Checkpoint | str | os.PathLike[str], *, run: str | None) -> Checkpoint | Source:
    """Returns what is to be imported: the checkpoint that is given, or what the exported file holds.

    Needs no store, so that none is made for what cannot be imported.

    Args:
        source: a checkpoint, or the path of an exported one.
        run: name of the new run, or None.

    Raises:
        as `Store.import_checkpoint`.
    """
    if run is not None:
        check_run_name(run)
    if isinstance(source, Checkpoint):
        return source
    if not isinstance(source, str | os.PathLike):
        message = f"an import takes a Checkpoint, or the path of an exported one, got {source!r}"
        raise ConfigurationError(message, keys=["source"])
    return exports.open_export(Path(source))


def import_checkpoint(
    files: StoreFiles, source: Checkpoint | Source, *, run: str | None, besides: Collection[str] = ()
) -> Checkpoint:
    """Returns the copy of a checkpoint in a store, which is made unless it is there; see `Store.import_checkpoint`.

    Args:
        files: the store to copy into.
        source: from `opened`.
        run: name of the new run, or None.
        besides: names that the new run shall not have.
    """
    if isinstance(source, Checkpoint):
        if _is_same(source.files, files):
            _check_name(source.run, run)
            return source
        found = source_of(source.files, source.run, source.seq, metrics=source.metrics)
        return _imported(files, found, _identity(found), run, besides)
    identity = _identity(source)
    begun = _begun(files, identity)
    if begun is not None and _import_in(files, begun) is not None:
        # it is not needed, but whoever gives a damaged file should hear of it
        source.verify()
    return _imported(files, source, identity, run, besides)


def _is_same(one: StoreFiles, other: StoreFiles) -> bool:
    """Returns whether two stores are one; a copy of a store, which has the same id, is another."""
    try:
        return one.id == other.id and one.path.samefile(other.path)
    except OSError:
        return one.path == other.path


def _identity(source: Source) -> ImportRecord:
    """Returns which checkpoint a copy of this one is a copy of: of a copy the original, however often it was copied."""
    if source.commit.kind == "import" and source.run.imported is not None:
        return source.run.imported
    return ImportRecord(source.store, source.run.name, source.commit.id)


def _check_name(found: str, wanted: str | None) -> None:
    if wanted is not None and found != wanted:
        raise ConflictError(
            f"what is to be imported is in the store already, or its import was begun, as run {found!r}: it cannot be "
            f"imported as {wanted!r} as well. Leave the name out, and branch from it: Checkpoint.branch({wanted!r})"
        )


def _imported(
    files: StoreFiles, source: Source, identity: ImportRecord, run: str | None, besides: Collection[str]
) -> Checkpoint:
    # before the copy, so that a name that will not do is refused at once
    name, begun = _place(files, source, identity, run, besides)
    if begun and (found := _import_in(files, name)):
        return found
    prepared = files.prepare_copy(name, source)
    try:
        name = _made(files, source, identity, run, besides)
        with _claimed(files, name):
            # somebody else may have imported the same one meanwhile
            if found := _import_in(files, name):
                files.discard(prepared)
                return found
            draft = CommitDraft(
                parent=None,
                step=source.commit.step,
                metrics=source.commit.metrics,
                kind="import",
                versions=source.commit.versions,
                host=source.commit.host,
                start=files.write_start(name, source.start),
            )
            return Checkpoint(files, name, files.publish(name, draft, prepared).record)
    except BaseException:
        files.discard(prepared)
        raise


def _place(
    files: StoreFiles, source: Source, identity: ImportRecord, run: str | None, besides: Collection[str]
) -> tuple[str, bool]:
    """Returns the run for a copy, and whether an import of the same checkpoint has begun there or is to make it."""
    # listed before it is looked what they hold: one that another import makes meanwhile is not taken for a stranger's
    taken = {*files.runs(), *besides}
    begun = _begun(files, identity)
    if begun is not None:
        _check_name(begun, run)
        return begun, True
    return _free_name(source, run, taken), False


def _made(files: StoreFiles, source: Source, identity: ImportRecord, run: str | None, besides: Collection[str]) -> str:
    """Returns the run for a copy, which is there now."""
    refused = {*besides}
    while True:
        # anew: others had time enough while the bytes were copied
        name, begun = _place(files, source, identity, run, refused)
        if begun:
            return name
        try:
            return _new_run(files, source, identity, name)
        except ConflictError:
            # made by somebody else at this moment, perhaps for the same checkpoint; else by another name
            refused.add(name)


@contextlib.contextmanager
def _claimed(files: StoreFiles, run: str) -> Iterator[None]:
    """Holds the claim on a run for the block, or none once somebody else has imported into it.

    Raises:
        RunLockedError: it has been held for `PATIENCE`, and not for an import.
    """
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        while _import_in(files, run) is None:
            try:
                stack.enter_context(files.claim(run))
                break
            except RunLockedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL)
        yield


def _begun(files: StoreFiles, identity: ImportRecord) -> str | None:
    """Returns the run that holds a copy of a checkpoint, or was made for one before a kill; None if there is none."""
    for name in files.runs():
        imported = None
        with contextlib.suppress(StoreError):  # a damaged run is not what is looked for
            imported = files.read_run(name).imported
        is_copy = imported is not None and imported.checkpoint == identity.checkpoint
        # one whose copy was pruned has a life of its own by now
        if is_copy and (not files.sequence(name) or _import_in(files, name)):
            return name
    return None


def _import_in(files: StoreFiles, run: str) -> Checkpoint | None:
    for record in files.records(run, damaged={}):
        if isinstance(record, CommitRecord) and record.kind == "import":
            return Checkpoint(files, run, record)
    return None


def _free_name(source: Source, wanted: str | None, taken: Collection[str]) -> str:
    if wanted is not None and wanted in taken:
        raise ConflictError(f"run {wanted!r} exists already: choose another name for the imported checkpoint")
    name, number = wanted or source.run.name, 1
    while name in taken:
        number += 1
        name = f"{source.run.name[: 99 - len(str(number))]}-{number}"
    return name


def _new_run(files: StoreFiles, source: Source, identity: ImportRecord, name: str) -> str:
    record = RunRecord(
        id=uuid.uuid4().hex,
        name=name,
        created=time.time(),
        hyperparameters=source.run.hyperparameters,
        experiment=source.run.experiment,
        git=source.run.git,
        versions=provenance.versions(),
        host=platform.node(),
        imported=identity,
    )
    files.write_run(name, record)
    return name
