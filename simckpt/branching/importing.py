"""Copies of checkpoints of other stores, each in a run of its own, from which branches can start."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from simckpt import provenance
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ConflictError, StoreError
from simckpt.state import Encoded
from simckpt.state.leaf import LogLeaf
from simckpt.storage import CommitDraft, CommitRecord, ImportRecord, RunRecord, StartRecord, StoreFiles, exports
from simckpt.storage.names import encode_part


@dataclass(frozen=True)
class Source:
    """A checkpoint to be copied into another store.

    Attributes:
        store: id of its store.
        run: the record of its run.
        commit: its own record, later metrics included.
        start: the record of the start that saved it.
        shared: paths of the leaves that lie in segments, and shall do so again.
        read: returns {component: encoded state}, every byte verified.
    """

    store: str
    run: RunRecord
    commit: CommitRecord
    start: StartRecord
    shared: Collection[str]
    read: Callable[[], Mapping[str, Encoded]]


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
    if not isinstance(source, Checkpoint):
        return _imported(files, _source_in(Path(source)), run, besides)
    if source.files.path == files.path:
        return source
    return _imported(files, _source_of(source), run, besides)


def _source_of(checkpoint: Checkpoint) -> Source:
    """Returns a checkpoint of a store as something to be copied; raises what reading its records raises."""
    files = checkpoint.files
    index = files.index(checkpoint.run, checkpoint.seq)
    return Source(
        store=files.id,
        run=files.read_run(checkpoint.run),
        commit=replace(index.commit, metrics=dict(checkpoint.metrics)),
        start=files.read_start(checkpoint.run, index.commit.start),
        shared=frozenset(leaf.path for leaf in index if leaf.pieces),
        read=checkpoint.read,
    )


def _source_in(path: Path) -> Source:
    found = exports.open_export(path)
    return Source(found.store, found.run, found.commit, found.start, found.shared, found.read)


def _imported(files: StoreFiles, source: Source, run: str | None, besides: Collection[str]) -> Checkpoint:
    name = _begun(files, source.commit.id)
    if name is not None and (found := _import_in(files, name)):
        return found
    components = _as_logs(source.read(), source.shared)
    if name is None:
        name = _new_run(files, source, run, besides)
    with files.claim(name):
        # somebody else may have imported the same one meanwhile
        if found := _import_in(files, name):
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
        return Checkpoint(files, name, files.commit(name, draft, components).record)


def _begun(files: StoreFiles, checkpoint: str) -> str | None:
    """Returns the run that holds a copy of a checkpoint, or was made for one before a kill; None if there is none."""
    for name in files.runs():
        imported = None
        with contextlib.suppress(StoreError):  # a damaged run is not what is looked for
            imported = files.read_run(name).imported
        is_copy = imported is not None and imported.checkpoint == checkpoint
        # one whose copy was pruned has a life of its own by now
        if is_copy and (not files.sequence(name) or _import_in(files, name)):
            return name
    return None


def _import_in(files: StoreFiles, run: str) -> Checkpoint | None:
    for record in files.records(run, damaged={}):
        if isinstance(record, CommitRecord) and record.kind == "import":
            return Checkpoint(files, run, record)
    return None


def _new_run(files: StoreFiles, source: Source, wanted: str | None, besides: Collection[str]) -> str:
    taken = {*files.runs(), *besides}
    if wanted is not None and wanted in taken:
        raise ConflictError(f"run {wanted!r} exists already: choose another name for the imported checkpoint")
    name, number = wanted or source.run.name, 1
    while name in taken:
        number += 1
        name = f"{source.run.name[: 99 - len(str(number))]}-{number}"
    record = RunRecord(
        id=uuid.uuid4().hex,
        name=name,
        created=time.time(),
        hyperparameters=source.run.hyperparameters,
        experiment=source.run.experiment,
        git=source.run.git,
        versions=provenance.versions(),
        host=platform.node(),
        imported=ImportRecord(source.store, source.run.name, source.commit.id),
    )
    files.write_run(name, record)
    return name


def _as_logs(components: Mapping[str, Encoded], shared: Collection[str]) -> dict[str, Encoded]:
    """Returns the components, the leaves at some paths as logs all of whose rows are new: they go into segments."""
    found = {}
    for name, encoded in components.items():
        leaves = {
            key: LogLeaf(leaf.data, leaf.dtype, leaf.shape, leaf.kind)
            if f"{encode_part(name)}/{key}" in shared
            else leaf
            for key, leaf in encoded.leaves.items()
        }
        found[name] = Encoded(leaves, encoded.structure)
    return found
