"""When a branch counts as silent or late, by a clock that the tests move."""

from pathlib import Path
from typing import Any

import fan_out_loops as loops
import pytest

import simckpt
from simckpt.branching import jobs
from simckpt.branching.tracking import GIVE_UP, START, Tracked
from simckpt.storage import claims


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Call:
    """A future whose state the test sets."""

    def __init__(self) -> None:
        self.state = "waiting"
        self.answer: dict[str, Any] | Exception = TimeoutError("not yet")

    def result(self, timeout: float | None = None) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def running(self) -> bool:
        return self.state in ("running", "cancelled")

    def done(self) -> bool:
        return self.state == "done"

    def cancel(self) -> bool:
        self.state = "cancelled"
        return True


@pytest.fixture
def store(tmp_path: Path) -> simckpt.Store:
    loops.make_origin(tmp_path / "store").branch("branch")
    return simckpt.Store(tmp_path / "store")


def tracked(store: simckpt.Store, **limits: float | None) -> tuple[Tracked, Call, Clock]:
    clock, call = Clock(), Call()
    each = Tracked(store.run("branch"), **{"deadline": None, "heartbeat": None, **limits}, clock=clock)
    each.future = call
    assert not each.look()
    return each, call, clock


def later(clock: Clock, each: Tracked, seconds: float) -> bool:
    clock.now += seconds
    return each.look()


def test_waiting_for_a_turn_counts_neither_as_silence_nor_as_time(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, deadline=10.0, heartbeat=10.0)
    assert not later(clock, each, 100)
    call.state = "running"
    assert not later(clock, each, 100)
    assert not later(clock, each, 10)
    assert call.state == "running"


def test_a_deadline_counts_from_the_begin(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, deadline=10.0)
    call.state = "running"
    later(clock, each, 5)
    later(clock, each, 10)
    assert call.state == "running"
    later(clock, each, 0.5)
    assert call.state == "cancelled"
    call.state, call.answer = "done", {"status": "interrupted", "error": "a signal", "seconds": 10.25}
    assert each.look()
    result = each.result()
    assert (result.status, result.error) == ("stopped", "not at its end after the deadline of 10 s")
    assert result.seconds == 10.25


def test_a_heartbeat_or_a_commit_is_a_sign_of_life(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, heartbeat=10.0)
    call.state = "running"
    later(clock, each, 1)
    with store.start("branch") as run:  # the claim is a sign, too
        later(clock, each, 9)
        later(clock, each, 9)
        loops.train_run(run, until=20)
        later(clock, each, 9)
        assert each.step == 20
        later(clock, each, 9)
        assert call.state == "running"
        # silent from here on
        later(clock, each, 1.5)
    assert call.state == "cancelled"
    assert each.result().error == "no sign of life for 10 s"


def test_a_short_heartbeat_counts_from_the_first_sign_of_the_loop(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, heartbeat=2.0)
    call.state = "running"
    later(clock, each, 1)
    # imports and envs come first, and a claim is no sign that the loop runs
    later(clock, each, START)
    assert call.state == "running"
    with store.start("branch") as run:
        later(clock, each, 0)
        later(clock, each, START)
        assert call.state == "running"
        # looked at often enough for three heartbeats in that time
        for _ in range(10):
            run._claim.beat(now=True)
            later(clock, each, 2 / 3 + 1e-6)
            assert call.state == "running"
        later(clock, each, 2.5)
    assert call.state == "cancelled"
    assert each.result().error == "no sign of life for 2 s"


def test_a_branch_that_never_comes_to_its_loop_is_stopped(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, heartbeat=2.0)
    call.state = "running"
    later(clock, each, 1)
    later(clock, each, START + 1)
    assert call.state == "cancelled"
    assert each.result().error == f"no sign of life for {START:g} s"


def test_a_job_that_was_requeued_may_wait_until_the_claim_of_its_dead_machine_is_stale(store: simckpt.Store) -> None:
    with store.start("branch"):
        each, call, clock = tracked(store, heartbeat=2.0)
        call.state = "running"
        later(clock, each, 1)
        # nobody beats this claim: for so long a job waits at most
        later(clock, each, claims.STALE_AFTER + jobs._PATIENCE)
        assert call.state == "running"
    with store.start("branch") as run:
        later(clock, each, 1)
        run._claim.beat(now=True)
        later(clock, each, 1)
        later(clock, each, 2.5)
    assert call.state == "cancelled"
    assert each.result().error == "no sign of life for 2 s"


def test_a_branch_that_hangs_with_a_claim_is_stopped_at_last(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, heartbeat=2.0)
    call.state = "running"
    with store.start("branch"):
        later(clock, each, 1)
        later(clock, each, START + claims.STALE_AFTER + 1)
    assert call.state == "cancelled"


def test_a_job_that_went_back_into_the_queue_begins_anew(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, deadline=10.0, heartbeat=10.0)
    for _ in range(3):
        call.state = "running"
        later(clock, each, 1)
        later(clock, each, 9)
        assert call.state == "running"
        call.state = "waiting"
        later(clock, each, 100)


def test_a_branch_that_does_not_end_when_told_to_is_left_to_itself(store: simckpt.Store) -> None:
    each, call, clock = tracked(store, deadline=10.0)
    call.state = "running"
    later(clock, each, 0)
    later(clock, each, 11)
    assert not later(clock, each, GIVE_UP)
    assert later(clock, each, 1)
    assert each.result().status == "stopped"


def test_an_engine_may_fail_in_its_own_way(store: simckpt.Store) -> None:
    each, call, _ = tracked(store)
    call.state, call.answer = "done", MemoryError("the node is gone")
    assert each.look()
    result = each.result()
    assert (result.status, result.error) == ("died", "the node is gone")


def test_a_branch_that_reached_its_end_as_its_process_died_is_complete(store: simckpt.Store) -> None:
    each, call, _ = tracked(store)
    with store.start("branch") as run:
        loops.train_run(run, until=20)
    store.run("branch").latest().tag("complete")
    call.state, call.answer = "done", MemoryError("the node is gone")
    assert each.look()
    assert (each.result().status, each.result().error) == ("complete", "")
