"""Modules and optimizers saved on n ranks and restored on m, by every kind of parallelism."""

from pathlib import Path

import numpy as np
import pytest
from parallel_training import LAYOUTS, OPTIMIZERS, Saved, Training, merged, resumed, trained
from ranks import Ranks
from storage_helpers import new_store

from simckpt.distributed.committing import commit_together
from simckpt.distributed.planning import Planner, common, items_of, written
from simckpt.distributed.voting import Ballot
from simckpt.distributed.world import find_world
from simckpt.storage import CommitDraft, Shard, StoreFiles

SIZES = (1, 2, 4)
RUN = "ant-ppo"
ALL = [(layout, name) for layout in LAYOUTS for name in OPTIMIZERS]
# one optimizer for each parallelism; the other one in the slow suite
SOME = [("ddp", "momentum"), ("fsdp", "adam"), ("tp", "momentum"), ("2d", "adam")]
REST = [each for each in ALL if each not in SOME]


def train_all(rank: int, size: int, cases: list) -> dict:
    return {(layout, name): trained(layout, name, rank, size) for layout, name in cases}


def resume_all(rank: int, size: int, cases: list) -> list:
    return [resumed(layout, name, rank, size, saved) for layout, name, saved in cases]


@pytest.fixture(scope="module", params=[SOME, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"])
def saved(request: pytest.FixtureRequest, ranks: Ranks) -> dict[int, list[dict]]:
    """{number of ranks: what each rank has saved}."""
    return {size: ranks.run(size, train_all, request.param) for size in SIZES}


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert list(a) == list(b)
    for path in a:
        assert (a[path].dtype, a[path].shape) == (b[path].dtype, b[path].shape), path
        assert a[path].tobytes() == b[path].tobytes(), path


@pytest.mark.parametrize("size", SIZES)
def test_what_the_ranks_capture_is_the_whole(saved: dict, size: int) -> None:
    for case in saved[size][0]:
        of_ranks: list[Saved] = [each[case] for each in saved[size]]
        whole = merged([each.encoded for each in of_ranks])
        found = {f"{c}/{path}": leaf for c, encoded in whole.items() for path, leaf in encoded.leaves.items()}
        assert_equal({path: found[path].data for path in of_ranks[0].whole}, of_ranks[0].whole)


def test_how_a_module_is_spread_over_ranks_is_no_state_of_it(saved: dict) -> None:
    structures = [saved[size][0][case].encoded["agent"].structure for size in SIZES for case in saved[size][0]]
    assert len(set(structures)) == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_of_any_number_of_ranks_is_restored_bit_for_bit(ranks: Ranks, saved: dict, size: int) -> None:
    cases, expected = [], []
    for before in SIZES:
        for layout, name in saved[before][0]:
            of_ranks = [each[layout, name] for each in saved[before]]
            cases.append((layout, name, merged([each.encoded for each in of_ranks])))
            expected.append((before, of_ranks[0]))
    found = ranks.run(size, resume_all, cases)
    for number, ((layout, name, whole), (before, original)) in enumerate(zip(cases, expected, strict=True)):
        again: list[Saved] = [each[number] for each in found]
        assert_equal(again[0].whole, original.whole)
        second = merged([each.encoded for each in again])
        for component in whole:
            assert second[component].structure == whole[component].structure, (layout, name, before)
        if before == size:
            assert_equal(again[0].later, original.later)


def save_in_store(rank: int, size: int, path: str, layout: str, name: str) -> dict[str, np.ndarray]:
    """Saves as several ranks do: planned together, each its own file, one vote, one commit by rank 0."""
    training = Training(layout, name, rank, size)
    training.step(0)
    files, store = StoreFiles.open(path), find_world().store
    encoded = training.encoded()
    items = items_of(encoded)
    share = Planner().plan(Ballot(store, rank, size, "plan"), items)
    prepared = files.prepare(RUN, written(encoded, items, share), shard=Shard(rank, size))
    same = common(encoded, items, share)
    ballot = Ballot(store, rank, size, "save")
    draft = CommitDraft(None, 1)
    commit = commit_together(
        files, RUN, prepared, ballot, lambda all, _: files.publish_shards(RUN, draft, all), common=same
    )
    assert commit.record.seq == 1
    return training.whole()


def restore_from_store(rank: int, size: int, path: str, layout: str, name: str) -> dict[str, np.ndarray]:
    training = Training(layout, name, rank, size, seed=1)
    files = StoreFiles.open(path)
    shapes = {leaf.path: leaf.shape for leaf in files.index(RUN, 1)}
    training.restore_from(shapes, lambda slabs: files.read(RUN, 1, slabs=slabs))
    return training.whole()


def test_a_checkpoint_in_a_store_goes_from_one_parallelism_to_another(ranks: Ranks, tmp_path: Path) -> None:
    path = str(new_store(tmp_path / "store").path)
    expected = ranks.run(4, save_in_store, path, "2d", "adam")[0]
    for size, layout in ((1, "ddp"), (2, "fsdp"), (4, "tp")):
        for found in ranks.run(size, restore_from_store, path, layout, "adam"):
            assert_equal(found, expected)
    # and one process sees whole arrays, as of any checkpoint
    whole = StoreFiles.open(path).read(RUN, 1)
    agent = {f"agent/{path}": leaf.data for path, leaf in whole["agent"].leaves.items()}
    assert_equal(agent, {path: expected[path] for path in agent})
