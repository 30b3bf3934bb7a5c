"""What of a save needs no claim: preparing a checkpoint, and ending what was prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from simckpt.errors import CheckpointNotFoundError, DamagedError, StorageError, StoreError
from simckpt.state.leaf import LogLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import durable, processes, segments, unchanged
from simckpt.storage.copying import Source
from simckpt.storage.index import LeafRecord
from simckpt.storage.preparing import Attributes, Prepared, PrepareJob, discard, write_items, write_prepared
from simckpt.storage.records import Shard, StoreRecord
from simckpt.storage.store_compacting import StoreCompacting
from simckpt.storage.store_repairing import StoreRepairing

Elsewhere = Callable[[PrepareJob, Mapping[str, Encoded], Attributes | None], Prepared]


class StorePreparing(StoreCompacting, StoreRepairing):
    """A store in which checkpoints can be prepared, all but their commit."""

    def __init__(
        self,
        path: Path,
        record: StoreRecord,
        *,
        disk: durable.Disk,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(path, record, disk=disk, clock=clock)
        self._new_id = new_id
        self._large: dict[tuple[str, Shard | None], Mapping[str, unchanged.Large]] = {}
        self._damaged: set[str] = set()

    def prepare_job(self, run: str, *, shard: Shard | None = None) -> PrepareJob:
        """Returns what `write_prepared` must know to do the heavy part of a save, in whatever process.

        Raises:
            RunNotFoundError: no run of that name was written.
        """
        self.read_run(run)
        if (run, shard) not in self._large:
            self._large[run, shard] = unchanged.large_leaves(self._newest_leaves(run, shard))
        return PrepareJob(
            self.path,
            run,
            processes.this_process(),
            self._new_id,
            segments=dict(self._segments),
            large=self._large[run, shard],
            shard=shard,
        )

    def compare_next_with(self, run: str, seq: int, *, shard: Shard | None = None) -> None:
        """Has the next save look for unchanged leaves in this checkpoint, where the newest one is damaged.

        Raises:
            CheckpointNotFoundError, DamagedError, FormatError: as `index`.
        """
        self._large[run, shard] = unchanged.large_leaves(self._leaves_of(run, seq, shard))

    def _leaves_of(self, run: str, seq: int, shard: Shard | None) -> Iterable[LeafRecord]:
        # a rank's large leaves are compared with what the same of as many ranks has written
        return self.index(run, seq) if shard is None else self.shard_index(run, seq, shard) or ()

    def _newest_leaves(self, run: str, shard: Shard | None) -> Iterable[LeafRecord]:
        for seq in reversed(self.sequence(run)):
            try:
                return self._leaves_of(run, seq, shard)
            except CheckpointNotFoundError:
                continue  # pruned
            except StoreError:
                return ()  # with what is damaged nothing is compared
        branch = self.read_run(run).branch
        if branch is not None:
            with contextlib.suppress(StoreError):
                return self._leaves_of(branch.run, branch.seq, shard)
        return ()

    def missing_segments(self, ids: Iterable[str]) -> set[str]:
        """Returns those of some segments that a save cannot refer to: gone, cut short or found damaged.

        Costs one `stat` each. A log must write their rows anew.

        Raises:
            StorageError: the folder cannot be looked at for the moment.
        """
        ids = set(ids)
        self._learn(ids)
        unusable = (ids & self._damaged) | (ids - self._segments.keys())
        return unusable | segments.missing(self.path, ids, self._segments)

    def _learn(self, ids: set[str]) -> None:
        """Looks for what is not known of some segments: a branch refers to those of another run."""
        if unknown := ids - self._segments.keys():
            self._note_segments(self._usage.find(unknown))

    def _note_damage(self, error: DamagedError) -> None:
        """Keeps in mind which segment was found to be damaged."""
        path = Path(error.path)
        if path.parent == self.path / segments.FOLDER:
            self._damaged.add(path.stem)

    def prepare(
        self,
        run: str,
        components: Mapping[str, Encoded],
        *,
        attributes: Attributes | None = None,
        elsewhere: Elsewhere | None = None,
        shard: Shard | None = None,
        lent: bool = False,
    ) -> Prepared:
        """Returns a checkpoint that is durable, all but its commit; see `write_prepared`. It needs no claim.

        Give it to `publish` or `discard`; after a crash the next claim in the store sweeps it. What one of several
        ranks has prepared goes to `publish_shards` of one of them, then to `conclude` or `discard` of the rank itself.

        Args:
            run: the run's name.
            components: {name: encoded state}; nobody may change its arrays meanwhile.
            attributes: {path of a group or leaf: {name: text}}, for people who open `state.h5`.
            elsewhere: does what `write_prepared` does, in another process, which may die at it. When it raises, nobody
                may be at work in `job.folder` any longer.
            shard: which of several ranks this is.
            lent: whether other threads may change the arrays after all, for they are the program's own: then each leaf
                is whole by its digest, if perhaps half changed.
        """
        self._learn({piece.segment for leaf in _logs(components) for piece in leaf.pieces})
        try:
            job = replace(self.prepare_job(run, shard=shard), lent=lent)
            if elsewhere is None:
                return write_prepared(self._disk, job, components, attributes)
            return self._prepare_elsewhere(elsewhere, job, components, attributes)
        except DamagedError as error:
            # else the next save would meet the same damaged segment
            self._note_damage(error)
            raise

    def _prepare_elsewhere(
        self, elsewhere: Elsewhere, job: PrepareJob, components: Mapping[str, Encoded], attributes: Attributes | None
    ) -> Prepared:
        folder = self._works.make()
        try:
            return elsewhere(replace(job, folder=folder), components, attributes)
        except BaseException:
            # this process may live for weeks, and its folders are swept after its death
            with contextlib.suppress(StorageError):
                self._works.take_away(folder, self._finish)
            raise

    def discard(self, prepared: Prepared) -> None:
        """Removes what was prepared and not published; raises nothing, for what cannot be removed is swept later.

        The segments of one of several ranks stay where a checkpoint uses them: nobody may have heard that it was
        committed.
        """
        if prepared.shard is None:
            discard(self._disk, self.path, prepared.folder, prepared.made)
        else:
            with contextlib.suppress(StorageError):
                self._works.take_away(prepared.folder, self._finish)

    def conclude(self, run: str, prepared: Prepared) -> None:
        """Ends what one of several ranks has prepared, now that it was committed; raises nothing, as `discard`."""
        self._large[run, prepared.shard] = prepared.large
        self._note_segments(prepared.segments)
        self._works.remove(prepared.folder)

    def prepare_copy(self, run: str, source: Source) -> Prepared:
        """Returns a copy of a checkpoint that is durable, all but its commit; see `prepare`.

        Args:
            run: name of the run that it is for, which need not be there yet.
            source: the checkpoint, whose bytes go through memory in portions.

        Raises:
            DamagedError, SegmentMissingError, FormatError: the source cannot be trusted; all damaged leaves are named.
            StorageFullError, StorageError: the disk refused.
        """
        job = PrepareJob(self.path, run, processes.this_process(), self._new_id)
        prepared = source.attempt(lambda: write_items(self._disk, job, source.components, source.items()))
        return replace(prepared, large=unchanged.large_leaves(prepared.leaves.values()))


def _logs(components: Mapping[str, Encoded]) -> Iterator[LogLeaf]:
    for encoded in components.values():
        yield from (leaf for leaf in encoded.leaves.values() if isinstance(leaf, LogLeaf))
