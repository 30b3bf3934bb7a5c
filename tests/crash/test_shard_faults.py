"""Errors, Ctrl-C and kills at every operation of a save of three ranks, each with segments of its own, in one process.

All ranks use one disk, so that a fault meets each of their operations in turn: of the work of a rank, of the commit,
and of what comes after the verdict. What a kill of one rank alone leaves is the subject of the last tests.
"""

import contextlib
import copy
import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crash_helpers import FaultyDisk, fail_with, in_child, interrupt, kill, tear_and_kill
from shard_helpers import RUN, Ranks, part_of, ranks, replay_states, rows_cut
from storage_helpers import leaf

from simckpt.errors import SegmentMissingError, StorageError, StorageFullError
from simckpt.state.leaf import LogLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, CommitRecord, Shard, StoreFiles, processes
from simckpt.storage.preparing import write_prepared

COUNT = 3
ROWS = 4  # that each rank adds in a step
TABLE = np.arange(3 << 18, dtype=np.float32).reshape(-1, 4)  # 3 MB, so that each rank's part is a large leaf


def table(step: int) -> np.ndarray:
    """Changes until the third save, so that the fourth finds it unchanged twice."""
    return TABLE if step >= 2 else TABLE + step + 1


def observations(rank: int, step: int) -> np.ndarray:
    return np.arange(ROWS * step * 6, dtype=np.float32).reshape(-1, 2, 3) + 1000 * rank


class Trainer:
    """Three ranks with a log each; what a rank takes note of is what it prepared itself."""

    def __init__(self) -> None:
        self.pieces, self.rows = [()] * COUNT, [0] * COUNT

    def states(self, step: int) -> list[dict[str, Encoded]]:
        states = [
            {"agent": Encoded({}, b"{}" if rank == 0 else b""), f"envs@{rank}": Encoded({}, b"%d" % step)}
            for rank in range(COUNT)
        ]
        for rank, state in enumerate(states):
            everything = observations(rank, step)
            new = everything[self.rows[rank] :]
            column = LogLeaf(new, "float32", everything.shape, "numpy", self.pieces[rank])
            state[f"replay@{rank}"] = Encoded({"observations": column}, b"{}")
            state["agent"].leaves["table"] = part_of(leaf(table(step)), rows_cut(TABLE.shape, COUNT)[rank])
        return states

    def save(self, world: Ranks, step: int) -> None:
        for rank, store in enumerate(world.stores):
            if store.missing_segments({piece.segment for piece in self.pieces[rank]}):
                self.pieces[rank], self.rows[rank] = (), 0
        _, prepared = world.save(self.states(step), step=step)
        for rank, each in enumerate(prepared):
            self.pieces[rank] = each.leaves[f"replay%40{rank}/observations"].pieces
            self.rows[rank] = ROWS * step


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> tuple[Path, Trainer]:
    world, trainer = ranks(tmp_path_factory.mktemp("template") / "store", COUNT), Trainer()
    with world.stores[0].claim(RUN):
        for step in (1, 2):
            trainer.save(world, step)
    return world.stores[0].path, trainer


def fresh(template, path: Path) -> tuple[Ranks, Trainer, FaultyDisk]:
    source, trainer = template
    shutil.copytree(source, path, copy_function=os.link)  # no file of a store is ever changed in place
    disk = FaultyDisk()
    return Ranks([StoreFiles.open(path, disk=disk) for _ in range(COUNT)]), copy.deepcopy(trainer), disk


def check(store: StoreFiles) -> list[int]:
    """Returns the steps on offer, after the last two of them were read and compared, and the first one's index."""
    steps = []
    for record in store.records(RUN):
        assert isinstance(record, CommitRecord)
        steps.append(record.step)
        if record.seq == 1:
            assert store.missing_segments(store.index(RUN, 1).segments) == set()
            continue
        found = store.read(RUN, record.seq)
        assert found["agent"].leaves["table"].data.tobytes() == table(record.step).tobytes()
        for rank in range(COUNT):
            rows = found[f"replay@{rank}"].leaves["observations"].data
            assert found[f"envs@{rank}"].structure == b"%d" % record.step
            assert rows.tobytes() == observations(rank, record.step).tobytes()
    return steps


def check_files(store: StoreFiles) -> None:
    """Nothing lies in the store's shared folders but what its checkpoints refer to."""
    used = {each for seq in store.sequence(RUN) for each in store.index(RUN, seq).segments}
    assert {path.stem for path in (store.path / "segments").iterdir()} == used
    assert list((store.path / "trash").iterdir()) == []
    assert list((store.path / "tmp").iterdir()) == []


def operations(template, path: Path) -> list[str]:
    world, trainer, disk = fresh(template, path)
    with world.stores[0].claim(RUN):
        disk.arm()
        trainer.save(world, 3)
        return list(disk.calls)


def test_the_save_that_is_tried_writes_segments_of_all_ranks_and_shares_others(template, tmp_path):
    world, trainer, _ = fresh(template, tmp_path / "store")
    store = world.stores[0]
    with store.claim(RUN):
        trainer.save(world, 3)
    index = store.index(RUN, 3)
    assert check(store) == [1, 2, 3]
    check_files(store)
    made = index.segments.keys() - store.index(RUN, 2).segments.keys()
    assert len(made) == 2 * COUNT, "new rows of each rank, and its part of the table"
    assert [len(part.pieces) for part in index.leaves["agent/table"].parts] == [1] * COUNT
    trainer.save(world, 4)
    assert store.index(RUN, 4).leaves["agent/table"].parts == index.leaves["agent/table"].parts
    store.verify(RUN, 4)


EVERY = pytest.param(1, marks=pytest.mark.slow, id="every")
SOME = pytest.param(6, id="some")


def numbers(names: list[str], step: int) -> list[int]:
    """Every so manieth of the operations that change something, and all around the commit."""
    found = [number for number, name in enumerate(names, 1) if name not in ("close", "allocate", "start_writeback")]
    last = max(number for number, name in enumerate(names, 1) if name == "rename")
    return [number for place, number in enumerate(found) if place % step == 0 or abs(number - last) < 6]


@pytest.mark.parametrize("step", [SOME, EVERY])
@pytest.mark.parametrize("fault", [fail_with(errno.EIO), interrupt], ids=["EIO", "Ctrl-C"])
def test_an_error_at_any_operation_leaves_the_old_or_the_new_checkpoint_and_nothing_else(
    template, tmp_path, fault, step
):
    outcomes = set()
    for number in numbers(operations(template, tmp_path / "counted"), step):
        world, trainer, disk = fresh(template, tmp_path / f"store{number}")
        store, begun = world.stores[0], copy.deepcopy(trainer)
        with store.claim(RUN):
            disk.arm(fault, at=number)
            try:
                trainer.save(world, 3)
                failed = False
            except (StorageError, KeyboardInterrupt):
                failed = True
            disk.arm()
            steps = check(store)
            assert steps in ([1, 2], [1, 2, 3]), (number, disk.hit)
            assert failed or steps == [1, 2, 3], (number, disk.hit)
            outcomes.add((failed, len(steps)))
            # training goes on; a rank that was not told writes its rows anew
            if failed:
                begun.save(world, 4)
                assert check(store) == [*steps, 4], (number, disk.hit)
        for path in (tmp_path / f"store{number}" / "tmp").iterdir():
            # what this process, being alive, could not remove
            path.rename(path.with_name(DEAD.token("00000000")))
            store.sweep()
        check_files(store)
        shutil.rmtree(store.path)
    # an error behind the commit is nobody's concern any longer, Ctrl-C is told all the same
    assert outcomes - {(False, 3), (True, 3)} == {(True, 2)}
    assert outcomes != {(True, 2)}


DEAD = replace(processes.this_process(), pid=2**22 - 1, started=1)


def test_a_disk_that_stays_full_from_any_operation_on_loses_nothing(template, tmp_path):
    for number in numbers(operations(template, tmp_path / "counted"), 12):
        world, trainer, disk = fresh(template, tmp_path / f"store{number}")
        store = world.stores[0]
        with store.claim(RUN):
            disk.arm(fail_with(errno.ENOSPC), at=number, sticky=True)
            with contextlib.suppress(StorageFullError, StorageError):
                trainer.save(world, 3)
            disk.arm()
            steps = check(store)
            assert steps in ([1, 2], [1, 2, 3])
        shutil.rmtree(store.path)


@pytest.mark.parametrize("step", [SOME, EVERY])
@pytest.mark.parametrize("fault", [kill, pytest.param(tear_and_kill, marks=pytest.mark.slow)], ids=["kill", "tear"])
def test_a_kill_of_all_ranks_at_any_operation_leaves_the_old_or_the_new_checkpoint(template, tmp_path, fault, step):
    found = set()
    for number in numbers(operations(template, tmp_path / "counted"), step):
        world, trainer, disk = fresh(template, tmp_path / f"store{number}")
        path = world.stores[0].path

        def action(world=world, trainer=trainer, disk=disk, number=number) -> None:
            with world.stores[0].claim(RUN):
                disk.arm(fault, at=number)
                trainer.save(world, 3)

        assert in_child(action) == -signal.SIGKILL
        store = StoreFiles.open(path)
        steps = check(store)
        assert steps in ([1, 2], [1, 2, 3]), number
        found.add(len(steps))
        with store.claim(RUN):
            assert check(store) == steps
            check_files(store)
        shutil.rmtree(path)
    assert found == {2, 3}


def prepared_by(world: Ranks, states, owners) -> list:
    return [
        write_prepared(
            store._disk, replace(store.prepare_job(RUN, shard=Shard(rank, COUNT)), owner=owner), states[rank]
        )
        for rank, (store, owner) in enumerate(zip(world.stores, owners, strict=True))
    ]


@pytest.mark.parametrize("rank", range(COUNT))
def test_a_rank_that_dies_after_its_report_and_is_swept_ends_the_save(template, tmp_path, rank):
    world, trainer, _ = fresh(template, tmp_path / "store")
    here = processes.this_process()
    prepared = prepared_by(world, trainer.states(3), [DEAD if each == rank else here for each in range(COUNT)])
    other = StoreFiles.open(world.stores[0].path)
    with world.stores[0].claim(RUN):  # sweeps
        assert not prepared[rank].folder.exists()
        with pytest.raises((StorageError, SegmentMissingError)):
            world.stores[0].publish_shards(RUN, CommitDraft(None, 3), prepared)
        for store, each in zip(world.stores, prepared, strict=True):
            store.discard(each)
        assert check(other) == [1, 2]
        check_files(other)


@pytest.mark.parametrize("rank", range(COUNT))
def test_a_rank_that_dies_between_its_report_and_the_verdict_does_not_take_its_segments_along(template, tmp_path, rank):
    world, trainer, _ = fresh(template, tmp_path / "store")
    store, here = world.stores[0], processes.this_process()
    with store.claim(RUN):
        prepared = prepared_by(world, trainer.states(3), [DEAD if each == rank else here for each in range(COUNT)])
        store.publish_shards(RUN, CommitDraft(None, 3), prepared)
        assert prepared[rank].folder.exists()
        StoreFiles.open(store.path).sweep()
        assert not prepared[rank].folder.exists()
        assert check(store) == [1, 2, 3]
        # the others give up, for the one that committed told nobody
        for each in range(COUNT):
            if each != rank:
                world.stores[each].discard(prepared[each])
        assert check(store) == [1, 2, 3]
        check_files(store)


def test_a_sweep_at_any_operation_of_the_commit_is_seen_by_it_or_sees_it(template, tmp_path):
    """Rank 1 is dead; another process sweeps while rank 0 gathers."""
    world, trainer, disk = fresh(template, tmp_path / "counted")
    here, owners = processes.this_process(), []
    owners = [here, DEAD, here]
    with world.stores[0].claim(RUN):
        prepared = prepared_by(world, trainer.states(3), owners)
        disk.arm()
        world.stores[0].publish_shards(RUN, CommitDraft(None, 3), prepared)
        count = len(disk.calls)
    seen = set()
    for number in range(1, count + 1):
        world, trainer, disk = fresh(template, tmp_path / f"store{number}")
        store = world.stores[0]

        def swept(operation, path=store.path):
            StoreFiles.open(path).sweep()
            return operation.perform()

        with store.claim(RUN):
            prepared = prepared_by(world, copy.deepcopy(trainer).states(3), owners)
            disk.arm(swept, at=number)
            try:
                store.publish_shards(RUN, CommitDraft(None, 3), prepared)
            except (StorageError, SegmentMissingError):
                expected = [1, 2]
            else:
                expected = [1, 2, 3]
            disk.arm()
            seen.add(len(expected))
            for each, one in zip(world.stores, prepared, strict=True):
                each.conclude(RUN, one) if len(expected) == 3 else each.discard(one)
            store.sweep()
            assert check(store) == expected, number
            check_files(store)
        shutil.rmtree(store.path)
    assert seen == {2, 3}


def test_logs_of_several_ranks_are_shared_between_checkpoints_and_freed_with_them(tmp_path):
    from log_helpers import Log

    world, logs = ranks(tmp_path / "store", 2), [Log(), Log(capacity=6)]
    store = world.stores[0]
    with store.claim(RUN):
        for step in (1, 2, 3):
            for rank, log in enumerate(logs):
                log.add(3 + rank)
            _, prepared = world.save(replay_states(2, logs), step=step)
            for rank, (log, each) in enumerate(zip(logs, prepared, strict=True)):
                log.committed(each, f"replay%40{rank}")
        for rank, log in enumerate(logs):
            found = store.read(RUN, 3)[f"replay@{rank}"].leaves
            for name, wanted in log.expected().items():
                assert found[name].data.tobytes() == wanted.tobytes()
        before = {path.stem for path in (store.path / "segments").iterdir()}
        store.prune(RUN, 1, "test")
        store.prune(RUN, 2, "test")
        after = {path.stem for path in (store.path / "segments").iterdir()}
        assert after == set(store.index(RUN, 3).segments) == set(store.segment_ids(RUN, 3))
        assert after < before, "rows that a ring has overwritten are freed"
        store.prune(RUN, 3, "test")
        assert not list((store.path / "segments").iterdir())
