"""Ray as an engine: calls fail, die and end each for itself; two CPUs, and nothing listens but on the loopback."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray_apart

import simckpt
from simckpt.branching.ray_engine import RayFuture


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # one Ray for all that is asserted here: it takes 8 s and 1 GB to start
    return ray_apart.run("engine", tmp_path_factory.mktemp("engine"))


def test_ray_listens_on_the_loopback_alone(answer: dict[str, Any]) -> None:
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert answer["sockets"]
    assert set(answer["sockets"]) <= loopback


def test_results_come_back(answer: dict[str, Any]) -> None:
    assert answer["double"] == ["result", "6"]


def test_a_call_that_dies_or_fails_takes_no_other_with_it(answer: dict[str, Any]) -> None:
    assert answer["die"][0] == "WorkerDiedError"
    assert answer["fail"][0] == "WorkerFailedError"
    assert "ValueError: no 3" in answer["fail"][1]
    assert answer["branches"] == {"dies": ["died", 20], "lives": ["complete", 40]}


def test_a_call_that_waits_for_its_turn_is_not_running_and_is_taken_back(answer: dict[str, Any]) -> None:
    assert answer["running"] == [True, True, False, False]
    assert answer["waiting"][0] == "CancelledError"


def test_a_result_that_does_not_come_in_time_is_a_timeout(answer: dict[str, Any]) -> None:
    assert answer["too long"] == "the call has not ended within 0.2 s"


def test_a_training_that_is_asked_to_end_saves_first(answer: dict[str, Any]) -> None:
    assert answer["saving"][0] == "result"
    assert '"status": "interrupted"' in answer["saving"][1]
    assert answer["saved at"] == [20, 28]


def test_a_call_that_is_deaf_to_sigterm_is_killed(answer: dict[str, Any]) -> None:
    assert answer["deaf"][0] == "CancelledError"


def test_a_ray_that_the_program_started_is_left_to_it(answer: dict[str, Any]) -> None:
    assert answer["still connected"]


class SlowRay:
    """As much of Ray as a future uses; its call begins when the test says so, and never ends by itself."""

    exceptions = SimpleNamespace(RayError=Exception)
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    )

    def __init__(self) -> None:
        self.yielded: list[tuple[str, int]] = []
        self.sent: list[tuple[int, int]] = []

    def wait(self, calls: list[Iterator[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        return ([calls[0]], []) if self.yielded else ([], [calls[0]])

    def calls(self) -> Iterator[Any]:
        while True:
            yield self.yielded.pop()

    def get(self, reference: Any) -> Any:
        return reference

    def cancel(self, call: Any, force: bool) -> None:
        pass  # too late: it is about to begin

    def remote(self, **options: Any) -> Any:
        return lambda fn: SimpleNamespace(remote=lambda pid, number: self.sent.append((pid, number)))


def test_a_call_that_began_as_it_was_taken_back_is_killed_after_the_grace_period() -> None:
    ray = SlowRay()
    future = RayFuture(ray, ray.calls(), grace=0.0)
    future.cancel()
    assert not future.done()
    ray.yielded.append(("node", 123))
    assert not future.done()
    assert not future.done()
    assert ray.sent == [(123, signal.SIGKILL)]


@pytest.mark.slow
def test_a_population_trains_on_ray(tmp_path: Path) -> None:
    done = ray_apart.run("population", tmp_path)
    assert [row["step"] for row in done["table"]] == [20] * 3 + [40] * 3
    assert not any(row["error"] for row in done["table"])
    (copied,) = [row for row in done["table"] if row["copies"] is not None]
    run = simckpt.Store(tmp_path / "store").run(f"pbt-{copied['member']:02d}-g1")
    assert run.branch.run == copied["copies"]
    assert run.name in done["runs"]
    # an engine that started Ray itself stops it
    assert done["stopped"]
    assert not any((tmp_path / "store" / "tmp").iterdir())
