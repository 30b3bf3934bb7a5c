"""What the ranks of a start try to restore, one checkpoint after the other: rank 0 looks for it, all hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from simckpt.checkpoint import Checkpoint
from simckpt.errors import StoreError
from simckpt.maintenance.fallback import Search
from simckpt.ranks import Alone
from simckpt.storage import CommitRecord, StoreFiles

if TYPE_CHECKING:
    from simckpt.run import Run


class Candidates(Protocol):
    """What a start tries; see `maintenance.fallback.Search`."""

    def next(self) -> Checkpoint | None:
        """Returns the next one to try, or None if there is nothing to restore."""
        ...

    def pass_over(self, checkpoint: Checkpoint, error: StoreError) -> None:
        """Takes note that a checkpoint is damaged; raises its error unless the next one is to be tried."""
        ...

    def tell(self, checkpoint: Checkpoint) -> None:
        """Says what was passed over, if anything was."""
        ...


def candidates(run: Run, files: StoreFiles, *, damaged: str) -> Candidates:
    """Returns the checkpoints that a start may go on from, best first.

    Args:
        run: that is started, to write.
        files: of its store.
        damaged: see `Search`.
    """
    if isinstance(run.ranks, Alone):
        return Search(run, files, damaged=damaged)
    return CommonSearch(run, files, damaged=damaged)


class CommonSearch:
    """The search of rank 0, which all ranks follow, so that they restore the same checkpoint.

    Args:
        run: that is started.
        files: of its store.
        damaged: see `Search`.
    """

    def __init__(self, run: Run, files: StoreFiles, *, damaged: str) -> None:
        self._run = run
        self._files = files
        self._damaged = damaged
        self._search: Search | None = None
        self._failed: tuple[Checkpoint, StoreError] | None = None

    def next(self) -> Checkpoint | None:
        """Returns the next one to try on all ranks, or None; raises on all what the search of rank 0 raises."""
        found = self._run.ranks.first(self._propose)
        if found is None:
            return None
        (record,) = self._files.records(found["run"], only={found["seq"]})
        assert isinstance(record, CommitRecord)
        if not self._run.ranks.leads and found["in_force"] != dict(self._run.hyperparameters_in_force):
            # where a rollback is passed over that had changed some of them
            self._run.change_hyperparameters(found["in_force"])
        return Checkpoint(self._files, found["run"], record)

    def _propose(self) -> dict[str, Any] | None:
        if self._search is None:
            self._search = Search(self._run, self._files, damaged=self._damaged)
        if self._failed is not None:
            checkpoint, error = self._failed
            self._failed = None
            self._search.pass_over(checkpoint, error)
        found = self._search.next()
        if found is None:
            return None
        return {"run": found.run, "seq": found.seq, "in_force": dict(self._run.hyperparameters_in_force)}

    def pass_over(self, checkpoint: Checkpoint, error: StoreError) -> None:
        """Takes note that a checkpoint is damaged, for some rank at least; what follows shows in `next`."""
        self._failed = (checkpoint, error)

    def tell(self, checkpoint: Checkpoint) -> None:
        """Has rank 0 say what was passed over."""
        if self._search is not None:
            self._search.tell(checkpoint)
