import functools

import numpy as np
import pytest
import rollback_loops
import torch

import simckpt
from simckpt.errors import ConfigurationError
from simckpt.policies import KeepRows, Reseed, RollbackPolicy, Scale, SetTo
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


# rows that stay, and a generator: it goes on from where it is
keeps_some = functools.partial(
    rollback_loops.train,
    until=12,
    policy=RollbackPolicy("eval/return", changes=KeepRows("sampler") & Reseed()),
    args=ARGS,
)
changes_arguments = functools.partial(
    rollback_loops.train,
    until=12,
    policy=RollbackPolicy("eval/return", changes=Reseed() & SetTo(gamma=0.5)),
    args=ARGS,
)


class Space:
    shape, dtype = (3,), np.dtype("float32")


def keeps_rows(store: simckpt.Store, *, in_place: bool = False, forgets: bool = False) -> None:
    """Fills a replay buffer, from which it learns, and keeps its rows when it goes back."""
    buffer = simckpt.ReplayBuffer(20, Space(), Space(), num_envs=1, seed=1)
    loop, counted = simckpt.LoopState(step=0, total=0.0), 0
    with store.start("run") as run:
        checkpointer = run.checkpointer(
            {"replay": buffer, "loop": loop},
            save_when=simckpt.EverySteps(9),
            rollback=RollbackPolicy("eval/return", changes=KeepRows("replay")),
            in_place=in_place,
        )
        with checkpointer:
            checkpointer.restore_latest()
            while loop.step < 12:
                loop.step += 1
                counted += 1
                row = np.full((1, 3), counted if forgets else loop.step, "float32")
                buffer.add(row, row, row[:, 0], np.array([False]), np.array([False]), row)
                loop.total += float(buffer.sample(8)[0].sum())
                checkpointer.step(loop.step)


keeps_rows_in_place = functools.partial(keeps_rows, in_place=True)
forgets_a_count = functools.partial(keeps_rows, in_place=True, forgets=True)


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
    # the record of a start has the working tree's state, too, which may change in between
    told = [{key: value for key, value in head.rollback.items() if key != "start"} for head in heads]
    assert told[0] == told[1]
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


@pytest.mark.parametrize("train", [keeps_some, keeps_rows, keeps_rows_in_place], ids=["some", "rows", "in place"])
def test_what_stays_as_it_is_is_given_to_the_fresh_process_too(train, tmp_path) -> None:
    report = assert_exact_rollback(train, at_step=8, to_step=3, folder=tmp_path / "new")
    assert report.steps == (3, *range(4, 13))
    if train is not keeps_some:
        live = simckpt.Store(tmp_path / "new" / "live").run("run")
        head = next(each for each in live.checkpoints() if each.kind == "rollback")
        fresh = simckpt.ReplayBuffer(20, Space(), Space(), num_envs=1, seed=1)
        head.restore({"replay": fresh})
        assert len(fresh) == 8


def test_state_outside_of_the_components_is_found_where_rows_stay_too() -> None:
    with pytest.raises(InexactRollbackError, match=r"step 4.*(.|\n)*replay"):
        assert_exact_rollback(forgets_a_count, at_step=6, to_step=3)


def test_a_rollback_that_changes_what_the_loop_reads_from_its_arguments_passes(tmp_path) -> None:
    report = assert_exact_rollback(changes_arguments, at_step=8, to_step=3, folder=tmp_path / "new")
    assert report.steps == (3, *range(4, 13))
    for name in ("live", "fresh"):
        head = simckpt.Store(tmp_path / "new" / name).run("a").latest()
        assert (head.step, head.hyperparameters["gamma"]) == (12, 0.5)


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
