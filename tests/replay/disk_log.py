"""A run of one component in a store on disk, saved and restored as a checkpointer does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from simckpt import state
from simckpt.storage import CommitDraft, RunRecord, StoreFiles


@dataclass(frozen=True)
class DiskCheckpoint:
    """A checkpoint: its number, and {path: how many rows the save handed over as new}."""

    seq: int
    written: Mapping[str, int]


class DiskLog:
    """Has the methods of `simckpt.testing.log_store.LogStore`."""

    def __init__(self, path) -> None:
        self.files = StoreFiles.create(path)
        self.files.write_run("run", RunRecord(id="0" * 32, name="run", created=1.8e9, hyperparameters={}, host="here"))
        self.claim = self.files.claim("run")
        self.parent: str | None = None
        self.steps = 0

    def save(self, handle, *, fail: bool = False) -> DiskCheckpoint | None:
        handle.forget(self.files.missing_segments(handle.segments()))
        encoded = state.encode(handle.capture())
        texts = handle.attributes(encoded.leaves)
        attributes = {f"replay/{path}".rstrip("/"): text for path, text in texts.items()}
        if fail:
            self.files.discard(self.files.prepare("run", {"replay": encoded}, attributes=attributes))
            return None
        self.steps += 1
        draft = CommitDraft(self.parent, step=self.steps)
        commit = self.files.commit("run", draft, {"replay": encoded}, attributes=attributes)
        handle.committed(pieces_of(commit.leaves.values()))
        self.parent = commit.record.id
        logs = {path: leaf for path, leaf in encoded.leaves.items() if isinstance(leaf, state.LogLeaf)}
        return DiskCheckpoint(commit.record.seq, {path: len(leaf.data) for path, leaf in logs.items()})

    def read(self, checkpoint: DiskCheckpoint):
        encoded = self.files.read("run", checkpoint.seq)["replay"]
        return state.decode(encoded.leaves, encoded.structure)

    def restore(self, handle, checkpoint: DiskCheckpoint) -> None:
        saved = self.read(checkpoint)
        handle.validate(saved)
        handle.apply(saved)
        handle.restored(pieces_of(self.files.index("run", checkpoint.seq)))

    def prune(self, checkpoint: DiskCheckpoint) -> None:
        self.files.prune("run", checkpoint.seq, reason="test")

    def close(self) -> None:
        self.claim.release()


def pieces_of(records: Iterable) -> dict[str, tuple[state.Piece, ...]]:
    return {
        record.path.removeprefix("replay/"): record.pieces for record in records if record.path.startswith("replay/")
    }
