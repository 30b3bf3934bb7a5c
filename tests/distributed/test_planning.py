"""Who writes what: complete, without doubles, balanced, the same for the same lists."""

import itertools
import math
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks import Ranks

from simckpt.distributed.planning import Item, Planner, Share, assign, common, items_of, written
from simckpt.distributed.voting import Ballot
from simckpt.distributed.world import find_world
from simckpt.errors import CoordinationError
from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.tree import Encoded, encode
from simckpt.storage import RunRecord, Shard, StoreFiles
from simckpt.storage.names import decode_part
from simckpt.storage.shards import tiles


def whole(path: str, nbytes: int, **more) -> Item:
    return Item(path, "float32", (nbytes // 4,), nbytes, **more)


def rows(path: str, total: int, start: int, count: int, width: int = 8) -> Item:
    return Item(path, "float32", (total, width), count * width * 4, (start, 0), (count, width))


def loads(lists: list[list[Item]], shares: list[Share]) -> list[int]:
    return [sum(items[place].nbytes for place in share.writes) for items, share in zip(lists, shares, strict=True)]


def realistic(size: int) -> list[Item]:
    """The leaves of a policy network of a few layers, with an optimizer's moments and steps."""
    sizes = [376 * 1024, 1024, 1024 * 1024, 1024, 1024 * 512, 512, 512 * 17, 17]
    items = []
    for number, count in enumerate(sizes):
        items.append(whole(f"agent/{number}", 4 * count))
        items += [whole(f"optimizer/state/{number}/{moment}", 4 * count) for moment in ("exp_avg", "exp_avg_sq")]
        items.append(whole(f"optimizer/state/{number}/step", 4))
    return items


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_replicated_leaves_are_written_once_and_balanced(size: int) -> None:
    lists = [realistic(size)] * size
    shares = assign(lists)
    places = sorted(place for share in shares for place in share.writes)
    assert places == list(range(len(lists[0])))
    found, largest = loads(lists, shares), max(item.nbytes for item in lists[0])
    mean = sum(found) / size
    # within 10 % of the mean, or of one leaf that cannot be cut
    assert max(found) <= max(1.1 * mean, largest)
    assert all(set(share.groups.values()) == {"all"} for share in shares)


def test_what_only_one_rank_holds_counts_before_the_rest_is_dealt() -> None:
    lists = [
        [rows("w", 10, 0, 7), whole("a", 96), whole("b", 64)],
        [rows("w", 10, 7, 3), whole("a", 96), whole("b", 64)],
    ]
    shares = assign(lists)
    # 224 and 96 bytes are given: the rest evens it out
    assert [sorted(share.writes) for share in shares] == [[0], [0, 1, 2]]
    assert loads(lists, shares) == [224, 256]


def test_a_part_on_several_ranks_is_written_by_one_of_them_and_compared_among_them() -> None:
    lists = [[rows("w", 8, 4 * (rank % 2), 4), rows("v", 8, 4 * (rank % 2), 4)] for rank in range(4)]
    shares = assign(lists)
    for place in (0, 1):
        boxes = [(lists[r][place].start, lists[r][place].size) for r in range(4) if place in shares[r].writes]
        assert tiles((8, 8), boxes)
    assert {len(share.writes) for share in shares} == {1}
    assert shares[0].groups == shares[2].groups != shares[1].groups == shares[3].groups


def test_empty_parts_are_not_written_but_an_empty_whole_is() -> None:
    lists = [
        [rows("w", 2, rank, 1) if rank < 2 else rows("w", 2, 2, 0), Item("e", "float32", (0, 3), 0, (0, 0), (0, 3))]
        for rank in range(4)
    ]
    shares = assign(lists)
    assert [sorted(share.writes) for share in shares] == [[0, 1], [0], [], []]


def test_leaves_that_rank_0_sends_to_all_are_its_own_and_not_compared() -> None:
    lists = [[whole("agent/weight", 8), whole("agent/running_mean", 8, led=True)]] * 3
    shares = assign(lists)
    assert [1 in share.writes for share in shares] == [True, False, False]
    assert all(1 not in share.groups for share in shares)


def test_ranks_that_hold_other_leaves_are_refused_with_names() -> None:
    one, other = [whole("agent/a", 8), whole("agent/b", 8)], [whole("agent/a", 8), whole("agent/c", 8)]
    with pytest.raises(CoordinationError, match=r"agent/b: only rank 0 has it; agent/c: only rank 2 has it") as caught:
        assign([one, one, other])
    assert caught.value.ranks == (2,)
    with pytest.raises(CoordinationError, match=r"agent/b: float32 \[2\] on rank 0, float32 \[4\] on rank 1"):
        assign([one, [whole("agent/a", 8), whole("agent/b", 16)]])


def test_parts_that_do_not_make_up_the_whole_are_refused() -> None:
    # two trainings apart, of which each has a tensor over its own ranks
    with pytest.raises(CoordinationError, match="parts of 4"):
        assign([[rows("w", 8, 0, 4, width=1)], [rows("w", 8, 0, 4, width=1)]])


def test_the_plan_is_the_same_for_the_same_lists() -> None:
    lists = [realistic(4)] * 4
    assert assign(lists) == assign([list(items) for items in lists])


def test_any_mixture_is_complete_and_near_the_best() -> None:
    chance = random.Random(5)
    for _ in range(30):
        size = chance.randint(2, 6)
        lists: list[list[Item]] = [[] for _ in range(size)]
        for number in range(chance.randint(1, 30)):
            if chance.random() < 0.5:
                item = whole(f"leaf {number}", 4 * chance.randint(0, 500))
                for items in lists:
                    items.append(item)
                continue
            cuts = sorted([0, *(chance.randint(0, 40) for _ in range(size - 1)), 40])
            for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
                lists[rank].append(rows(f"leaf {number}", 40, start, stop - start))
        shares = assign(lists)
        for place, first in enumerate(lists[0]):
            writers = [rank for rank in range(size) if place in shares[rank].writes]
            if first.start is None:
                assert len(writers) == 1
            else:
                boxes = [(lists[rank][place].start, lists[rank][place].size) for rank in writers]
                assert tiles((40, 8), boxes)
        given = [
            sum(items[place].nbytes for place in share.writes if items[place].start is not None)
            for items, share in zip(lists, shares, strict=True)
        ]
        offered = [item.nbytes for item in lists[0] if item.start is None]
        # a list scheduling never leaves one rank more than one leaf above the mean, or above what it must write
        bound = max(max(given), (sum(given) + sum(offered)) / size + max(offered, default=0))
        assert max(loads(lists, shares)) <= bound


@pytest.mark.slow
def test_a_thousand_ranks_are_planned_in_seconds() -> None:
    size, leaves = 1024, 300
    lists = [[rows(f"agent/{n}", 2 * size, 2 * rank, 2) for n in range(leaves)] for rank in range(size)]
    for items in lists:
        items += [whole(f"optimizer/state/{n}/step", 4) for n in range(leaves)]
    begun = time.process_time()
    shares = assign(lists, alike=True)
    seconds = time.process_time() - begun
    assert all(len(share.writes & set(range(leaves))) == leaves for share in shares)
    assert seconds < 10


def shared_components(rank: int, size: int, *, wrong: bool = False) -> dict[str, Encoded]:
    """Two whole leaves and one in parts; the whole ones differ on the last rank if something is `wrong`."""
    tree = {"bias": np.arange(5.0), "steps": 7, "scale": np.full(300, 2.0)}
    if wrong and rank == size - 1:
        tree["scale"][17] = 3.0
    encoded = encode(tree)
    count = 8 // size
    part = PartLeaf(np.full((count, 3), float(rank)), "float64", (8, 3), "torch", (rank * count, 0))
    return {"agent": Encoded({**encoded.leaves, "weight": part}, encoded.structure)}


class Heard(Ballot):
    """Notes what is reported."""

    reported: list[str] = []  # noqa: RUF012  # of this process

    def hold(self, report: Any, *args: Any, **options: Any) -> dict[str, Any]:
        self.reported.append("plan" if "plan" in report else "list")
        return super().hold(report, *args, **options)


def planned(rank: int, size: int, wrong: bool) -> object:
    world = find_world()
    planner = Planner()
    found = []
    for number in range(3):
        components = shared_components(rank, size, wrong=wrong)
        items = items_of(components)
        Heard.reported.clear()
        share = planner.plan(Heard(world.store, rank, size, f"plan {number}", 10, 5), items)
        mine = written(components, items, share)
        vote = Ballot(world.store, rank, size, f"save {number}", 10, 5)
        try:
            vote.hold({}, lambda reports: {}, common=common(components, items, share))
            problem = None
        except CoordinationError as error:
            problem = (error.leaves, error.ranks)
        sizes = {path: leaf.data.nbytes for each in mine.values() for path, leaf in each.leaves.items()}
        found.append((list(Heard.reported), sizes, any(each.structure for each in mine.values()), problem))
    return found


def test_ranks_plan_together_once_and_write_everything_once(ranks: Ranks) -> None:
    found = ranks.run(4, planned, False)
    for rank in range(4):
        # the second and third save go by the plan of the first
        assert [each[0] for each in found[rank]] == [["list"], ["plan"], ["plan"]]
        assert found[rank][0][1:] == found[rank][1][1:]
        assert all(each[3] is None for each in found[rank])
    together = [path for each in found for path in each[0][1]]
    assert sorted(together) == ["bias", "scale", *["weight"] * 4]
    assert sum(each[0][2] for each in found) == 1


def changed(rank: int, size: int, kind: str) -> object:
    """The second save finds another plan or list on the last rank alone, or on all; the third is as the second."""
    world, planner, found = find_world(), Planner(), []
    for number in range(3):
        components = shared_components(rank, size)
        mine = components["agent"]
        if (number and kind == "all") or (number == 1 and kind == "one" and rank == size - 1):
            mine.leaves["more"] = Leaf(np.zeros(2 + (kind == "all")), "float64", (2 + (kind == "all"),), "numpy")
        if number == 1 and kind == "lost" and rank == size - 1:
            planner = Planner()
        items = items_of(components)
        Heard.reported.clear()
        begun = time.monotonic()
        try:
            share = planner.plan(Heard(world.store, rank, size, f"plan {number}", 60, 30), items)
            outcome: Any = sorted(items[place].path for place in share.writes)
        except CoordinationError as error:
            outcome = (error.ranks, error.leaves)
        found.append((list(Heard.reported), outcome, time.monotonic() - begun))
    return found


@pytest.mark.parametrize("kind", ["lost", "one", "all"])
def test_a_plan_is_made_anew_by_all_ranks_if_one_of_them_needs_it(ranks: Ranks, kind: str) -> None:
    found = ranks.run(2, changed, kind)
    for rank, saves in enumerate(found):
        odd = rank == 1 and kind != "all"
        second = ["list"] if kind == "all" else ["list", "list"] if odd else ["plan", "list"]
        # the list of the last rank is the old one again, and so is its plan
        third = ["plan"]
        assert [each[0] for each in saves] == [["list"], second, third]
        # nobody has waited for a rank that does not vote
        assert all(each[2] < 20 for each in saves)
        if kind == "one":
            assert saves[1][1] == ((1,), ("agent/more",))
            assert saves[2][1] == saves[0][1]
        else:
            assert saves[2][1] == saves[1][1]
    for number in (0, 1, 2) if kind != "one" else (0, 2):
        written_by_all = sorted(path for saves in found for path in saves[number][1])
        more = ["agent/more"] if kind == "all" and number else []
        assert written_by_all == sorted(["agent/_tree", "agent/bias", "agent/scale", *["agent/weight"] * 2, *more])


def test_leaves_that_should_be_equal_and_are_not_are_named(ranks: Ranks) -> None:
    for found in ranks.run(4, planned, True):
        assert [each[3] for each in found] == [(("agent/scale",), (3,))] * 3


def test_items_know_the_parts() -> None:
    leaf = PartLeaf(np.zeros((2, 3), np.uint16), "bfloat16", (8, 3), "torch", (4, 0))
    items = items_of({"my agent/x": Encoded({"a": leaf, "b": Leaf(np.zeros(3), "float64", (3,), "numpy")}, b"{}")})
    assert [item.path for item in items] == ["my%20agent%2Fx/a", "my%20agent%2Fx/b", "my%20agent%2Fx/_tree"]
    assert items[0][1:6] == ("bfloat16", (8, 3), 12, (4, 0), (2, 3))
    assert math.prod(items[1].shape) == 3


@pytest.mark.parametrize("name", ["agent", "my agent", "a:b/c", "agent (old)", ".", "é", "x" * 300])
def test_leaves_are_known_by_their_paths_in_the_checkpoint_whatever_their_component_is_called(name: str) -> None:
    components = {name: encode({"w": np.ones(3)})}
    items = items_of(components)
    assert {decode_part(item.path.partition("/")[0]) for item in items} == {name}
    everything = Share(frozenset(range(len(items))), dict.fromkeys(range(len(items)), "all"))
    kept = written(components, items, everything)
    assert {each: (mine.leaves, mine.structure) for each, mine in kept.items()} == {
        each: (mine.leaves, mine.structure) for each, mine in components.items()
    }
    assert set(common(components, items, everything)["all"]) == {item.path for item in items}


def test_what_a_rank_has_written_is_not_digested_again_and_has_the_digest_that_others_find(tmp_path) -> None:
    """Of each kind of leaf: what one rank tells by its index the other must find in its memory."""
    torch = pytest.importorskip("torch")
    large = np.arange(1 << 18, dtype=np.float64)  # the second time it is unchanged, and lies in a segment
    tree = {
        "numbers": np.arange(12.0).reshape(3, 4), "columns": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "scalar": np.float32(3), "none": np.empty((0, 4)), "words": np.array(["", "été"]), "flags": np.ones(3, bool),
        "waves": np.array([1 + 2j]), "long": np.array([1.5], np.longdouble), "tensor": torch.arange(6).view(2, 3).t(),
        "half": torch.ones(5, dtype=torch.bfloat16), "large": large,
    }  # fmt: skip
    part = PartLeaf(np.ones((2, 3)), "float64", (4, 3), "torch", (0, 0))
    state = encode(tree)
    components = {"agent": Encoded({**state.leaves, "part": part}, state.structure)}
    items = items_of(components)
    everything = Share(frozenset(range(len(items))), dict.fromkeys(range(len(items)), "all"))
    expected = common(components, items, everything)
    store = StoreFiles.create(tmp_path / "store")
    store.write_run("run", RunRecord("0" * 32, "run", 0.0))
    digested: list[Any] = []
    for _ in range(3):
        digested.clear()
        prepared = store.prepare("run", components, shard=Shard(0, 2))
        found = common(components, items, everything, prepared.leaves, digest=lambda data: digested.append(data) or "-")
        store.conclude("run", prepared)
        # structures are padded in files, so theirs is of what is in memory
        assert digested == [state.structure]
        assert found["all"] == expected["all"] | {"agent/_tree": "-"}
    assert prepared.segments
    other = [replace(leaf, digest=f"sha256:{0:064x}") for leaf in prepared.leaves.values()]
    assert common(components, items, everything, {leaf.path: leaf for leaf in other}) == expected
