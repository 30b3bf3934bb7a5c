"""The vote on a save: ranks that die, hang, come late or disagree, at every point of it."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, Ranks

from simckpt.distributed import voting
from simckpt.distributed.voting import Ballot
from simckpt.distributed.world import World, find_world
from simckpt.errors import CoordinationError, OutcomeUnknownError

PATIENCE, GRACE = 1.5, 1.0
SLACK = 10.0  # [s] a loaded machine may take on top


def started() -> World:
    world = find_world()
    assert world is not None
    return world


def ballot(world: World, name: str = "save 1", *, patience: float = PATIENCE, previous: tuple[str, ...] = ()) -> Ballot:
    return Ballot(world.store, world.rank, world.size, name, patience, GRACE, previous)


def until(world: World, key: str) -> None:
    """Waits for a key."""
    limit = time.monotonic() + 60
    while not world.store.check([key]):
        assert time.monotonic() < limit, key
        time.sleep(0.005)


def vote(world: World, name: str = "save 1", commit=None, **options) -> object:
    """Returns what the vote gave: the content, or the name of the error, its ranks and text; and how long it took."""
    begun = time.monotonic()
    try:
        found = ballot(world, name, **options).hold({"wrote": world.rank}, commit or (lambda reports: {"all": reports}))
    except (CoordinationError, OutcomeUnknownError) as error:
        found = (type(error).__name__, error.ranks, str(error))
    return found, time.monotonic() - begun


def trained() -> float:
    """Returns a sum over all ranks, by training's own group."""
    total = torch.ones(3)
    dist.all_reduce(total)
    return total[0].item()


def all_ranks_report(rank: int, size: int) -> object:
    world = started()
    first = vote(world)
    second = vote(world, "save 2", previous=("save 1",))
    return first[0], second[0], [int(world.store.check([f"save {n}/verdict"])) for n in (1, 2)], trained()


def test_what_all_have_reported_is_committed_and_told_to_all(ranks: Ranks) -> None:
    wrote = {"all": [{"wrote": 0}, {"wrote": 1}, {"wrote": 2}]}
    for first, second, _, total in ranks.run(3, all_ranks_report):
        assert first == second == wrote
        assert total == 3


def test_two_ranks_and_the_store_on_rank_0(ranks: Ranks) -> None:
    found = ranks.run(2, all_ranks_report, host="rank0", destroy=False)
    # the keys of the first vote are gone once the second was decided
    assert found[0][2] == [0, 1]


def dies(rank: int, size: int, victim: int, when: str, how: int) -> object:
    """The victim is killed or stopped at a point of the vote; the others tell what they saw."""
    world = started()
    world.exchange("all are here")
    # and have heard of it, and of each other: the store may end with the victim
    world.store.set(f"rank {rank} is ready", "")
    if rank == victim:
        for other in range(size):
            until(world, f"rank {other} is ready")

    def commit(reports: list) -> dict:
        if when == "committing":
            os.kill(os.getpid(), how)
        return {"all": reports}

    if rank == victim:
        if when == "before its report":
            os.kill(os.getpid(), how)
        if when == "after its report":
            mine = ballot(world)
            mine._set(f"report/{rank}", {"report": {"wrote": rank}, "common": {}})
            os.kill(os.getpid(), how)
    return vote(world, commit=commit)


def survivors(outcomes: list[Outcome], victim: int, how: int) -> list:
    """Returns what the others saw, after making sure that the victim is what it should be."""
    assert outcomes[victim].kind == ("killed" if how == signal.SIGKILL else "stopped")
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [outcome.kind for outcome in others] == ["returned"] * len(others), others
    return [outcome.value for outcome in others]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_lost_before_its_report_is_named_within_the_patience(ranks: Ranks, victim: int, how: int) -> None:
    outcomes = ranks.outcomes(3, dies, victim, "before its report", how, destroy=False)
    for (kind, missing, text), seconds in survivors(outcomes, victim, how):
        assert (kind, missing) == ("CoordinationError", (victim,))
        assert f"rank {victim} did not report within {PATIENCE:g} s" in text
        assert PATIENCE * 0.9 < seconds < PATIENCE + SLACK


def test_a_rank_lost_after_its_report_does_not_keep_the_others_from_committing(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(3, dies, 1, "after its report", signal.SIGKILL, destroy=False)
    for found, seconds in survivors(outcomes, 1, signal.SIGKILL):
        assert found == {"all": [{"wrote": 0}, {"wrote": 1}, {"wrote": 2}]}
        assert seconds < SLACK


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_lost_before_its_verdict_is_named_and_nothing_is_committed(ranks: Ranks, how: int) -> None:
    outcomes = ranks.outcomes(3, dies, 0, "after its report", how, destroy=False)
    for (kind, missing, text), seconds in survivors(outcomes, 0, how):
        assert (kind, missing) == ("CoordinationError", (0,))
        assert "decided nothing" in text
        assert seconds < PATIENCE + GRACE + SLACK


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_lost_while_it_commits_leaves_the_outcome_to_the_files(ranks: Ranks, how: int) -> None:
    outcomes = ranks.outcomes(3, dies, 0, "committing", how, destroy=False)
    for (kind, missing, _), seconds in survivors(outcomes, 0, how):
        assert (kind, missing) == ("OutcomeUnknownError", (0,))
        assert seconds < PATIENCE + 2 * GRACE + SLACK


def test_a_store_that_dies_with_rank_0_ends_the_waiting_at_once(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(3, dies, 0, "after its report", signal.SIGKILL, host="rank0", destroy=False)
    for (kind, _, text), seconds in survivors(outcomes, 0, signal.SIGKILL):
        assert kind == "OutcomeUnknownError"
        assert "store of the ranks is lost" in text
        assert seconds < PATIENCE + GRACE + SLACK


def late(rank: int, size: int) -> object:
    """Rank 1 comes to the first vote after it was given up, and all go on to a second one."""
    world = started()
    world.exchange("all are here")
    if rank == 1:
        # it knows by the second vote's first report that the others have left
        until(world, "save 2/report/0")
    return vote(world, patience=PATIENCE), vote(world, "save 2", patience=20.0, previous=("save 1",)), trained()


def test_a_late_rank_learns_that_it_was_given_up_and_the_next_save_is_committed(ranks: Ranks) -> None:
    for (first, _), (second, _), total in ranks.run(3, late):
        assert first[:2] == ("CoordinationError", (1,))
        assert second == {"all": [{"wrote": 0}, {"wrote": 1}, {"wrote": 2}]}
        assert total == 3


def race(rank: int, size: int) -> list:
    """All ranks but 0 lose patience in the moment in which rank 0 decides, many times over."""
    world = started()
    seen = []
    for round in range(8):
        mine = ballot(world, f"race {round}")
        mine._set(f"report/{rank}", {"report": rank, "common": {}})
        mine._wait([f"report/{other}" for other in range(size)], time.monotonic() + 20, alone=True)
        seen.append(mine._decide("committing" if rank == 0 else f"given up by {rank}"))
    return seen


def test_a_race_for_the_verdict_has_one_winner(ranks: Ranks) -> None:
    found = ranks.run(3, race)
    assert found[0] == found[1] == found[2]


def given_up_in_time(rank: int, size: int) -> object:
    """Rank 1 gives up while rank 0 is committing: it must hear of the commit."""
    world = started()
    committing = "rank 0 commits/verdict"

    def commit(reports: list) -> dict:
        until(world, "rank 1 gave up")
        return {"all": reports}

    if rank == 0:
        return vote(world, "rank 0 commits", commit, patience=20.0)[0]
    mine = ballot(world, "rank 0 commits")
    mine._set("report/1", {"report": {"wrote": 1}, "common": {}})
    until(world, committing)
    threading.Timer(0.2, world.store.set, ("rank 1 gave up", "")).start()
    return mine._give_up("rank 0 is slow", {})


def test_a_rank_that_gives_up_during_the_commit_hears_of_it(ranks: Ranks) -> None:
    assert ranks.run(2, given_up_in_time) == [{"all": [{"wrote": 0}, {"wrote": 1}]}] * 2


def withdraws(rank: int, size: int) -> object:
    world = started()
    world.exchange("all are here")
    if rank == 1:
        ballot(world).withdraw("the disk is full")
        return None
    return vote(world, patience=20.0)


def test_a_rank_that_cannot_write_ends_the_vote_at_once(ranks: Ranks) -> None:
    found = ranks.run(3, withdraws)
    for (kind, failed, text), seconds in (found[0], found[2]):
        assert (kind, failed) == ("CoordinationError", (1,))
        assert "rank 1: the disk is full" in text
        assert seconds < SLACK


def commit_fails(rank: int, size: int) -> object:
    world = started()

    def commit(reports: list) -> dict:
        raise OSError(28, "No space left on device")

    try:
        return vote(world, commit=commit)[0]
    except OSError as error:
        return error.errno


def test_a_commit_that_fails_is_told_to_all(ranks: Ranks) -> None:
    first, (kind, failed, text) = ranks.run(2, commit_fails)
    assert first == 28
    assert (kind, failed) == ("CoordinationError", (0,))
    assert "No space left on device" in text


def common(rank: int, size: int, digests: list) -> object:
    world = started()
    begun = time.monotonic()
    try:
        return ballot(world, patience=20.0).hold({}, lambda reports: {}, common=digests[rank])
    except CoordinationError as error:
        return error.ranks, error.leaves, str(error), time.monotonic() - begun


def test_leaves_that_differ_are_named_with_their_ranks(ranks: Ranks) -> None:
    same = {"all": {"agent/weight": "a", "agent/bias": "b"}}
    other = {"all": {"agent/weight": "a", "agent/bias": "c"}}
    for odd, leaves, text, seconds in ranks.run(3, common, [same, same, other]):
        assert (odd, leaves) == ((2,), ("agent/bias",))
        assert "agent/bias: ranks 0, 1 and rank 2 differ" in text
        assert seconds < SLACK


def slow_to_explain(rank: int, size: int, digests: list) -> object:
    """The last rank tells its leaves once rank 0 has explained without it, or has waited for it for a while."""

    class Slow(Ballot):
        def _set(self, name: str, value: object) -> None:
            if name == f"leaves/{size - 1}":
                self._wait(["explanation"], time.monotonic() + 0.5, alone=True)
            super()._set(name, value)

    world = started()
    mine = (Slow if rank == size - 1 else Ballot)(world.store, rank, size, "save 1", 20.0, 20.0)
    try:
        return mine.hold({}, lambda reports: {}, common=digests[rank])
    except CoordinationError as error:
        return error.ranks, error.leaves, str(error)


def test_leaves_are_named_however_long_a_rank_takes_to_tell_its_own(ranks: Ranks) -> None:
    same, other = {"all": {"a": "1", "b": "2"}}, {"all": {"a": "1", "b": "3"}}
    for odd, leaves, text in ranks.run(3, slow_to_explain, [same, same, other]):
        assert (odd, leaves) == ((2,), ("b",))
        assert "b: ranks 0, 1 and rank 2 differ" in text


def test_groups_of_ranks_are_compared_among_themselves(ranks: Ranks) -> None:
    left, right = {"0,2": {"weight@0": "a"}}, {"1,3": {"weight@4": "b"}}
    assert ranks.run(4, common, [left, right, left, right]) == [{}] * 4
    found = ranks.run(4, common, [left, right, left, {"1,3": {"weight@4": "c"}}])
    assert {each[1] for each in found} == {("weight@4",)}
    assert "rank 1 and rank 3 differ" in found[0][2]


def test_leaves_that_one_rank_lacks_are_named() -> None:
    found = voting._compare({0: {"all": {"a": "1", "b": "2"}}, 1: {"all": {"a": "1"}}})
    assert found == {"b": [[0], [1]]}


def votes_in_a_thread(rank: int, size: int) -> object:
    """A thread waits for a rank that is late, while the main thread's collectives and store go on."""
    world = started()
    world.exchange("all are here")
    found: list = []
    thread = threading.Thread(target=lambda: found.append(vote(world, patience=20.0)))
    begun = time.monotonic()
    if rank != 1:
        thread.start()
    totals = 0.0
    for step in range(100):
        totals += trained()
        if step % 20 == 0:
            world.store.set(f"step {rank}", str(step))
            totals += world.largest(rank, step)[0]
    trained_for = time.monotonic() - begun
    waiting = rank != 1 and thread.is_alive()
    if rank == 1:
        # everybody is through with training by now, and the others' threads are still waiting
        thread.start()
    thread.join()
    return totals, waiting, found[0][0], trained_for


def test_a_thread_that_waits_does_not_hold_up_training(ranks: Ranks) -> None:
    found = ranks.run(3, votes_in_a_thread)
    for rank, (totals, waiting, content, trained_for) in enumerate(found):
        assert totals == 100 * 3 + 5 * 2
        assert waiting == (rank != 1)
        assert content == {"all": [{"wrote": 0}, {"wrote": 1}, {"wrote": 2}]}
        # a wait that held the store or the GIL would last its patience
        assert trained_for < 20
