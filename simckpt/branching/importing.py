"""Copies of checkpoints of other stores, each in a run of its own, from which branches can start."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from collections.abc import Collection
from pathlib import Path

from simckpt import provenance
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ConfigurationError, ConflictError, StoreError
from simckpt.storage import CommitDraft, CommitRecord, ImportRecord, RunRecord, StoreFiles, exports
from simckpt.storage.copying import Source, source_of
from simckpt.storage.names import check_run_name


def import_checkpoint(
    files: StoreFiles, source: Checkpoint | str | os.PathLike[str], *, run: str | None, besides: Collection[str] = ()
) -> Checkpoint:
    """Returns the copy of a checkpoint in a store, which is made unless it is there; see `Store.import_checkpoint`.

    Args:
        files: the store to copy into.
        source: a checkpoint, or the path of an exported one.
        run: name of the new run, or None.
        besides: names that the new run shall not have.
    """
    if run is not None:
        check_run_name(run)
    if isinstance(source, Checkpoint):
        if _is_same(source.files, files):
            return _under(source, run)
        found = source_of(source.files, source.run, source.seq, metrics=source.metrics)
        return _imported(files, found, _identity(found), run, besides)
    if not isinstance(source, str | os.PathLike):
        message = f"an import takes a Checkpoint, or the path of an exported one, got {source!r}"
        raise ConfigurationError(message, keys=["source"])
    found = exports.open_export(Path(source))
    identity = _identity(found)
    if (known := _copy_of(files, identity)) is not None:
        # it is not needed, but whoever gives a damaged file should hear of it
        found.verify()
        return _under(known, run)
    return _imported(files, found, identity, run, besides)


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


def _under(found: Checkpoint, run: str | None) -> Checkpoint:
    if run is not None and found.run != run:
        raise ConflictError(
            f"{found!r} is what is to be imported, and in the store already: it cannot be imported as {run!r} as well. "
            f"Leave the name out, or branch from it: Checkpoint.branch({run!r})"
        )
    return found


def _imported(
    files: StoreFiles, source: Source, identity: ImportRecord, run: str | None, besides: Collection[str]
) -> Checkpoint:
    name = _begun(files, identity)
    if name is not None and (found := _import_in(files, name)):
        return _under(found, run)
    wanted = _free_name(files, source, run, besides) if name is None else name
    prepared = files.prepare_copy(wanted, source)
    try:
        if name is None:
            name = _new_run(files, source, identity, wanted)
        with files.claim(name):
            # somebody else may have imported the same one meanwhile
            if found := _import_in(files, name):
                files.discard(prepared)
                return _under(found, run)
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


def _copy_of(files: StoreFiles, identity: ImportRecord) -> Checkpoint | None:
    name = _begun(files, identity)
    return None if name is None else _import_in(files, name)


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


def _free_name(files: StoreFiles, source: Source, wanted: str | None, besides: Collection[str]) -> str:
    taken = {*files.runs(), *besides}
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
