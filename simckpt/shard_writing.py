"""A save of several ranks: each writes its shard and reports, rank 0 commits what all have written.

No rank waits for another before its shard is durable, and nothing here is a collective: the thread that saves talks to
the others by the store of keys alone, so that training goes on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simckpt.background import OwnPublisher, Preparer, Publisher, Snapshot, Writer, preparer
from simckpt.checkpoint import Checkpoint
from simckpt.decisions import DECISIONS, INDEPENDENT
from simckpt.errors import CoordinationError, OutcomeUnknownError
from simckpt.ranks import Alone, owner_of
from simckpt.storage import Commit, CommitDraft, CommitRecord, Shard, records
from simckpt.storage.preparing import Prepared

if TYPE_CHECKING:
    from simckpt.distributed.several import Several
    from simckpt.distributed.voting import Ballot
    from simckpt.policies import KeepPolicy
    from simckpt.restore import BoundComponent
    from simckpt.run import Run
    from simckpt.state import Encoded
    from simckpt.storage import StoreFiles
    from simckpt.storage.writer_process import WriterProcess


def writer_of(
    run: Run,
    files: StoreFiles,
    keep: KeepPolicy,
    process: WriterProcess | None,
    bound: Mapping[str, BoundComponent],
    *,
    coordination: str,
) -> tuple[Publisher, Writer]:
    """Returns what makes the checkpoints of a run in this process, and what keeps its line.

    Args:
        run: to write.
        files: of its store.
        keep: which checkpoints stay.
        process: that writes, or None.
        bound: the components, by their names in a checkpoint.
        coordination: of several ranks: see `Run.checkpointer`.
    """
    ranks = run.ranks
    if isinstance(ranks, Alone):
        publisher: Publisher = OwnPublisher(files, run.name, preparer(files, run.name, process))
        return publisher, Writer(files, run.name, keep, publisher, run.protected, run_id=run.id)
    from simckpt.distributed.several import Several

    assert isinstance(ranks, Several)
    prepare = preparer(files, run.name, process, Shard(ranks.rank, ranks.size))
    if coordination == INDEPENDENT:
        from simckpt.independent_writing import independent_writer

        return independent_writer(ranks, files, run, keep, prepare, bound)
    publisher = ShardPublisher(ranks, files, run.name, prepare, bound)
    kind = Writer if ranks.leads else FollowingWriter
    return publisher, kind(files, run.name, keep, publisher, run.protected, run_id=run.id)


class FollowingWriter(Writer):
    """The writer of a rank that follows: rank 0 keeps the line, prunes and logs; this one hears what was committed."""

    def read_line(self) -> dict[int, Any]:
        """Reads nothing."""
        return {}

    def go_on_from(self, id: str | None) -> None:
        """Forgets what it heard of: rank 0 knows the line."""
        self.line = [record for record in self.line if record.id == id]

    def note_restored(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint for the head."""
        self.head = checkpoint.id

    def _prune(self, snapshot: Snapshot) -> None:
        pass

    def _log(self, snapshot: Snapshot, event: str, **facts: Any) -> None:
        pass


class ShardPublisher:
    """Makes checkpoints together with the other ranks.

    Args:
        ranks: of the run.
        files: of the store.
        run: the run's name.
        prepare: writes the shard of this rank.
        bound: the components, by their names in a checkpoint.
    """

    def __init__(
        self,
        ranks: Several,
        files: StoreFiles,
        run: str,
        prepare: Preparer,
        bound: Mapping[str, BoundComponent],
    ) -> None:
        from simckpt.distributed.planning import Planner

        self._ranks = ranks
        self._files = files
        self._run = run
        self._prepare = prepare
        self._bound = bound
        # a connection of its own: the training thread may wait on the other one
        self._store = ranks.world.own_store()
        self._planner = Planner()
        self._name = self._previous = ""
        self._led: list[str] = []

    def announce(self) -> None:
        """Gives the save its name, which is the same on all ranks."""
        from simckpt.distributed.tensors import led_by_rank_0

        # now, for the thread that saves touches no live object
        self._led = [path for name, each in self._bound.items() for path in led_by_rank_0(name, each.handle)]
        self._ranks.saves += 1
        # until all have agreed that none is in flight
        self._ranks.busy = True
        self._name, self._previous = f"save {self._ranks.saves}", self._name

    def withdraw(self, error: BaseException) -> None:
        """Tells the others that this rank has no snapshot for them."""
        reason = f"{type(error).__name__}: {error}"
        for name in (f"{self._name} plan", self._name):
            self._ballot(name).withdraw(reason)
        self._planner.forget()

    def __call__(self, snapshot: Snapshot) -> Commit:
        """Returns the commit once rank 0 has told of it.

        Raises:
            CoordinationError: nothing was committed; it names the ranks that are missing or failed, or what differs.
            OutcomeUnknownError: rank 0 was lost while it may have been committing.
            ...: what this rank, or rank 0 in committing, has met; the others are told.
        """
        try:
            try:
                components, common = self._share(snapshot)
                prepared = self._prepare(components, texts_of(snapshot.texts, components))
            except BaseException as error:
                self._ballot(self._name).withdraw(f"{type(error).__name__}: {error}")
                raise
            return self._vote(snapshot, prepared, common, self._ballot(self._name, self._previous))
        except BaseException:
            self._planner.forget()
            raise

    def _share(self, snapshot: Snapshot) -> tuple[dict[str, Encoded], Mapping[str, Mapping[str, str]]]:
        """Returns what this rank writes, and what it should have in common with others."""
        from simckpt.distributed import planning

        encoded = snapshot.encode()
        own = {name: each for name, each in encoded.items() if owner_of(name)[1] is not None}
        shared = {name: each for name, each in encoded.items() if name not in own and name != DECISIONS}
        items = planning.items_of(shared, led=self._led)
        share = self._planner.plan(self._ballot(f"{self._name} plan"), items)
        if self._ranks.leads:
            own[DECISIONS] = encoded[DECISIONS]
        mine = {**planning.written(shared, items, share), **own}
        return mine, planning.common(shared, items, share)

    def _vote(
        self, snapshot: Snapshot, prepared: Prepared, common: Mapping[str, Mapping[str, str]], ballot: Ballot
    ) -> Commit:
        from simckpt.distributed.several import error_from_json, error_to_json

        done: list[Commit] = []
        failed: list[Exception] = []

        def commit(reports: list[Any]) -> dict[str, Any]:
            draft = replace(snapshot.draft, duration=time.monotonic() - snapshot.due)
            root = self._files.path
            try:
                told_steps = {(report["step"], report["kind"]) for report in reports}
                if len(told_steps) > 1:
                    message = f"the ranks save different things, nothing was committed: {sorted(told_steps)}"
                    raise CoordinationError(message)
                others = [Prepared.from_json(root, report["prepared"]) for report in reports[1:]]
                done.append(self._published(snapshot, draft, [prepared, *others]))
            except Exception as error:
                # told as an outcome, so that the same error is raised by all
                failed.append(error)
                return {"failed": error_to_json(error)}
            return {"seq": done[0].record.seq, "record": done[0].record.to_bytes().decode()}

        try:
            report = {"prepared": prepared.to_json(), "step": snapshot.draft.step, "kind": snapshot.draft.kind}
            told = ballot.hold(report, commit, common=common)
        except OutcomeUnknownError:
            # what was prepared may be part of a checkpoint; the next claim sweeps it if it is not
            raise
        except BaseException:
            self._files.discard(prepared)
            raise
        if "failed" in told:
            self._files.discard(prepared)
            raise failed[0] if failed else error_from_json(told["failed"])
        self._files.conclude(self._run, prepared)
        if done:
            return done[0]
        record = records.parse_commit(told["record"].encode(), "what rank 0 has told", seq=told["seq"])
        assert isinstance(record, CommitRecord)
        return Commit(record, prepared.leaves)

    def _published(self, snapshot: Snapshot, draft: CommitDraft, prepared: list[Prepared]) -> Commit:
        """Commits what all ranks have prepared; on rank 0."""
        return self._files.publish_shards(self._run, draft, prepared)

    def give_up(self) -> None:
        """Ends what waits for other ranks: nothing that could do so for long."""

    def _ballot(self, name: str, previous: str = "") -> Ballot:
        from simckpt.distributed.voting import Ballot

        return Ballot(
            self._store, self._ranks.rank, self._ranks.size, name, patience=self._ranks.patience, previous=previous
        )


def texts_of(texts: Mapping[str, Mapping[str, str]], components: Mapping[str, Encoded]) -> dict[str, Any]:
    """Returns the explanations of what is written here."""
    from simckpt.storage.names import encode_part

    return {path: text for path, text in texts.items() if path.partition("/")[0] in map(encode_part, components)}
