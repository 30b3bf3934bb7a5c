"""A branch in the training loop: it begins where its origin was, and writes what is new alone."""

import pytest
from replay.buffers import Uncounted

import simckpt
from simckpt.errors import ConfigurationError


def start(store: simckpt.Store, name: str, buffer: Uncounted):
    run = store.start(name)
    components = {"replay": buffer, "loop": simckpt.LoopState(step=0)}
    return run, run.checkpointer(components, save_when=simckpt.EverySteps(10))


def trained(store: simckpt.Store) -> simckpt.Checkpoint:
    """A run whose buffer holds 800 rows of 8 KB."""
    buffer = Uncounted(1000, width=1024)
    run, checkpointer = start(store, "a", buffer)
    with run, checkpointer:
        buffer.add(range(800))
        return checkpointer.save(100)


def test_the_first_save_of_a_branch_writes_the_rows_that_its_origin_lacks(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin = trained(store)
    origin.branch("b")
    buffer = Uncounted(1000, width=1024)
    run, checkpointer = start(store, "b", buffer)
    with run, checkpointer:
        assert checkpointer.restore_latest() == origin
        assert buffer.contents() == list(range(800))
        buffer.add(range(800, 803))
        first = checkpointer.save(110)
    assert first.parent == origin.id
    assert first.size <= 3 * 8192 + 20_000
    assert {piece.segment for leaf in origin.leaves().values() for piece in leaf.pieces} < {
        piece.segment for leaf in first.leaves().values() for piece in leaf.pieces
    }


def test_a_branch_of_an_import_shares_the_rows_that_were_imported(tmp_path) -> None:
    origin = trained(simckpt.Store(tmp_path / "s"))
    other = simckpt.Store(tmp_path / "other")
    other.import_checkpoint(origin.export(tmp_path / "one.h5")).branch("b")
    buffer = Uncounted(1000, width=1024)
    run, checkpointer = start(other, "b", buffer)
    with run, checkpointer:
        checkpointer.restore_latest()
        assert buffer.contents() == list(range(800))
        buffer.add([800])
        assert checkpointer.save(110).size <= 8192 + 20_000


def test_rows_that_a_branch_shares_survive_the_pruning_of_its_ancestors_other_checkpoints(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin = trained(store)
    origin.branch("b")
    buffer = Uncounted(1000, width=1024)
    run, checkpointer = start(store, "a", buffer)
    with run, checkpointer:
        checkpointer.restore_latest()
        buffer.add(range(800, 900))
        checkpointer.save(200)
        checkpointer.save(300)
        run.prune(simckpt.KeepLast(1))
    assert [each.step for each in store.run("a").checkpoints()] == [100, 300]
    buffer = Uncounted(1000, width=1024)
    run, checkpointer = start(store, "b", buffer)
    with run, checkpointer:
        checkpointer.restore_latest()
    assert buffer.contents() == list(range(800))


def test_a_branch_must_be_restored_before_it_is_trained(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    trained(store).branch("b")
    run, checkpointer = start(store, "b", Uncounted(1000, width=1024))
    with run, checkpointer, pytest.raises(ConfigurationError, match="restore_latest"):
        checkpointer.step(110)
