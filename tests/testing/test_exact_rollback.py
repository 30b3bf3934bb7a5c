import functools

import numpy as np
import pytest
import rollback_loops
import torch

import simckpt
from simckpt.errors import ConfigurationError
from simckpt.policies import KeepRows, Reseed, RollbackPolicy, Scale
from simckpt.testing import InexactRollbackError, assert_exact_rollback

CALM = RollbackPolicy("eval/return", changes=[Reseed() & Scale(learning_rate=0.5), Reseed()])
# at this learning rate nothing collapses: the only rollback is the one asked for
ARGS = {**rollback_loops.ARGS, "learning_rate": 0.05}
sound = functools.partial(rollback_loops.train, until=40, policy=CALM, args=ARGS)
collapses = functools.partial(
    rollback_loops.train,
    until=150,
    policy=RollbackPolicy("eval/return", changes=[Reseed(), Reseed() & Scale(learning_rate=0.5)], cool_down=0),
)
without_policy = functools.partial(rollback_loops.train, until=40, policy=None)


def in_place(store: simckpt.Store) -> None:
    """Keeps everything in components, and goes on after a rollback with the objects that it has."""
    rollback_loops.train(store, until=40, policy=CALM, args=ARGS, in_place=True)


def counts_in_a_variable(store: simckpt.Store) -> None:
    """Rolls back in place, and forgets that a variable of its own is state."""
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 1)
    loop = simckpt.LoopState(step=0)
    policy = RollbackPolicy("eval/return")
    with store.start("run") as run:
        checkpointer = run.checkpointer(
            {"model": model, "loop": loop}, save_when=simckpt.EverySteps(9), rollback=policy, in_place=True
        )
        with checkpointer:
            checkpointer.restore_latest()
            seen = loop.step
            while loop.step < 12:
                loop.step += 1
                seen += 1
                with torch.no_grad():
                    model.bias += seen
                checkpointer.step(loop.step, {"eval/return": 0.0})


def draws_unseeded(store: simckpt.Store) -> None:
    loop = simckpt.LoopState(step=0, noise=0.0)
    rng = np.random.default_rng()
    with store.start("run") as run:
        checkpointer = run.checkpointer(
            {"loop": loop}, save_when=simckpt.EverySteps(9), rollback=RollbackPolicy("eval/return")
        )
        with checkpointer:
            checkpointer.restore_latest()
            while loop.step < 8:
                loop.step += 1
                loop.noise = float(rng.random())
                checkpointer.step(loop.step)


def keeps_rows(store: simckpt.Store) -> None:
    """Rows that stay are part of the rollback, and nothing that a fresh process has."""
    rollback_loops.train(store, until=12, policy=RollbackPolicy("eval/return", changes=KeepRows("sampler")), args=ARGS)


def test_a_sound_loop_that_is_entered_again_passes() -> None:
    report = assert_exact_rollback(sound, at_step=25, to_step=11)
    assert (report.step, report.target_step) == (25, 11)
    assert report.steps == (11, *range(12, 41))
    # the model's two leaves and Adam's six at least, of 30 checkpoints
    assert report.compared > 30 * 8


def test_a_sound_loop_that_rolls_back_in_place_passes(tmp_path) -> None:
    report = assert_exact_rollback(in_place, at_step=20, to_step=15, folder=tmp_path / "new")
    assert report.steps == (15, *range(16, 41))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["fresh", "live"]
    runs = [simckpt.Store(tmp_path / "new" / name).run("a") for name in ("live", "fresh")]
    heads = [next(each for each in run.checkpoints() if each.kind == "rollback") for run in runs]
    # the same rollback of the same run, done twice: parent and abandoned head are the very same checkpoints
    assert heads[0].parent == heads[1].parent
    assert heads[0].rollback == heads[1].rollback
    assert heads[0].id != heads[1].id


def test_rollbacks_that_the_training_does_by_itself_are_done_and_compared_too() -> None:
    report = assert_exact_rollback(collapses, at_step=25, to_step=20)
    # it collapses after step 120, which new seeds do not change, but half of the learning rate does: it goes back by
    # itself, twice, to a step that the line then has three times
    assert max(report.steps) == 150
    assert len(set(report.steps)) == len(report.steps) - 2


def test_state_outside_of_the_components_is_found_by_name() -> None:
    with pytest.raises(InexactRollbackError, match="model/bias") as caught:
        assert_exact_rollback(counts_in_a_variable, at_step=6, to_step=3)
    assert caught.value.step == 4
    assert "deterministic" not in str(caught.value)


def test_a_training_that_is_not_deterministic_is_told_so() -> None:
    with pytest.raises(InexactRollbackError, match=r"loop/noise(.|\n)*not deterministic"):
        assert_exact_rollback(draws_unseeded, at_step=6, to_step=3)


def test_components_that_stay_as_they_are_differ_from_those_of_a_fresh_process() -> None:
    with pytest.raises(InexactRollbackError, match="sampler"):
        assert_exact_rollback(keeps_rows, at_step=8, to_step=3)


@pytest.mark.parametrize(("at_step", "to_step"), [(50, 3), (20, 0)])
def test_a_training_that_cannot_roll_back_there_is_refused(at_step: int, to_step: int) -> None:
    with pytest.raises(ConfigurationError, match="ends before step"):
        assert_exact_rollback(sound, at_step=at_step, to_step=to_step)


def test_a_training_without_a_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no RollbackPolicy"):
        assert_exact_rollback(without_policy, at_step=20, to_step=10)


def test_a_target_after_the_rollback_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="to_step lies before at_step"):
        assert_exact_rollback(sound, at_step=20, to_step=20)


def test_stores_from_before_are_not_taken_for_new_ones(tmp_path) -> None:
    (tmp_path / "fresh").mkdir()
    with pytest.raises(ConfigurationError, match="fresh"):
        assert_exact_rollback(sound, at_step=20, to_step=10, folder=tmp_path)
