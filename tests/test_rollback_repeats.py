"""Evaluations that are handed in more than once."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

import simckpt
from simckpt.decisions import evaluations_of

RETURNS = [100.0 + each for each in range(10)]


def handed_in(tmp_path, metrics: list[dict[str, Any]], **options: Any) -> list[tuple[int, tuple[float, ...]]]:
    """Returns the evaluations that a run remembers, as (step, returns), after a step of 10 for each of the metrics."""
    with simckpt.Store(tmp_path / "s").start("a") as run:
        loop = simckpt.LoopState(step=0)
        with run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(10), **options) as checkpointer:
            for each in metrics:
                loop.step += 10
                checkpointer.step(loop.step, each)
        history = evaluations_of(run.latest()["checkpointer"])["eval/return"]
    return [(each.step, each.returns) for each in history]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, deque])
@pytest.mark.parametrize("rollback", [None, simckpt.RollbackPolicy("eval/return")])
def test_the_same_list_at_later_steps_is_one_evaluation(tmp_path, kind: Any, rollback: Any) -> None:
    kept = {"eval/return": kind(RETURNS)}
    # the dict may be another one, with the loss of the step
    found = handed_in(tmp_path, [kept, kept, {**kept, "loss": 0.5}, kept], rollback=rollback)
    assert found == [(10, tuple(RETURNS))]


def test_other_values_in_the_same_list_are_another_evaluation(tmp_path) -> None:
    rolling: deque[float] = deque(RETURNS, maxlen=10)

    def moved() -> dict[str, Any]:
        rolling.append(7.0)
        return {"eval/return": rolling}

    with simckpt.Store(tmp_path / "s").start("a") as run:
        loop = simckpt.LoopState(step=0)
        with run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(10)) as checkpointer:
            for _ in range(3):
                loop.step += 10
                checkpointer.step(loop.step, moved())
        history = evaluations_of(run.latest()["checkpointer"])["eval/return"]
    assert [each.returns[-1] for each in history] == [7.0] * 3
    assert [each.returns[0] for each in history] == [101.0, 102.0, 103.0]


def test_equal_returns_of_a_new_evaluation_count(tmp_path) -> None:
    # a dead policy, evaluated from the same starts each time
    found = handed_in(tmp_path, [{"eval/return": list(RETURNS)} for _ in range(3)])
    assert found == [(step, tuple(RETURNS)) for step in (10, 20, 30)]


def test_a_loop_that_keeps_its_metrics_is_not_rolled_back_for_one_bad_evaluation(tmp_path) -> None:
    """Ten good evaluations and a bad one, each handed in ten times: patience is two evaluations."""
    draw = np.random.default_rng(0)
    metrics: list[dict[str, Any]] = []
    for level in [100.0] * 10 + [40.0]:
        metrics += [{"eval/return": draw.normal(level, 3.0, 10)}] * 10
    found = handed_in(tmp_path, metrics, rollback=simckpt.RollbackPolicy("eval/return"))
    assert len(found) == 11
