import functools

import loops
import pytest
import rollback_loops

import simckpt
from simckpt.errors import ConfigurationError
from simckpt.policies import KeepRows, Reseed, RollbackPolicy, Scale, SetTo
from simckpt.testing import InexactRollbackError, assert_exact_rollback

CALM = RollbackPolicy("eval/return", changes=[Reseed() & Scale(learning_rate=0.5), Reseed()])
# at this learning rate nothing collapses: the only rollback is the one asked for
ARGS = {**rollback_loops.ARGS, "learning_rate": 0.05}
# torch and its optimizer, which a fresh process takes 4 s to import; the loops below do without
sound = functools.partial(rollback_loops.train, until=30, policy=CALM, args=ARGS)
# keeps everything in components, and goes on after a rollback with the objects that it has
in_place = functools.partial(rollback_loops.train, until=24, policy=CALM, args=ARGS, in_place=True)
quick = functools.partial(loops.goes_back, until=40, policy=CALM)
collapses = functools.partial(
    loops.goes_back,
    until=150,
    policy=RollbackPolicy("eval/return", changes=[Reseed(), Reseed() & Scale(learning_rate=0.5)], cool_down=0),
    learning_rate=0.1,
)
without_policy = functools.partial(loops.goes_back, until=40, policy=None)
# rows that stay, and a generator: it goes on from where it is
keeps_some = functools.partial(
    loops.goes_back, until=12, policy=RollbackPolicy("eval/return", changes=KeepRows("sampler") & Reseed())
)
changes_arguments = functools.partial(
    loops.goes_back, until=12, policy=RollbackPolicy("eval/return", changes=Reseed() & SetTo(gamma=0.5))
)
keeps_rows_in_place = functools.partial(loops.keeps_rows, in_place=True)
forgets_a_count = functools.partial(loops.keeps_rows, in_place=True, forgets=True)


def test_a_sound_loop_that_is_entered_again_passes() -> None:
    report = assert_exact_rollback(sound, at_step=25, to_step=11)
    assert (report.step, report.target_step) == (25, 11)
    assert report.steps == (11, *range(12, 31))
    # the model's two leaves and Adam's six at least, of 20 checkpoints
    assert report.compared > 20 * 8


def test_a_sound_loop_that_rolls_back_in_place_passes(tmp_path) -> None:
    report = assert_exact_rollback(in_place, at_step=20, to_step=15, folder=tmp_path / "new")
    assert report.steps == (15, *range(16, 25))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["fresh", "live"]
    runs = [simckpt.Store(tmp_path / "new" / name).run("a") for name in ("live", "fresh")]
    heads = [next(each for each in run.checkpoints() if each.kind == "rollback") for run in runs]
    # the same rollback of the same run, done twice: parent and abandoned head are the very same checkpoints
    assert heads[0].parent == heads[1].parent
    # the record of a start has the working tree's state, too, which may change in between
    told = [{key: value for key, value in head.rollback.items() if key != "start"} for head in heads]
    assert told[0] == told[1]
    assert heads[0].id != heads[1].id


@pytest.mark.slow
def test_rollbacks_that_the_training_does_by_itself_are_done_and_compared_too() -> None:
    report = assert_exact_rollback(collapses, at_step=25, to_step=20)
    # it collapses after step 120, which new seeds do not change, but half of the learning rate does: it goes back by
    # itself, twice, to a step that the line then has three times
    assert max(report.steps) == 150
    assert len(set(report.steps)) == len(report.steps) - 2


def test_state_outside_of_the_components_is_found_by_name() -> None:
    with pytest.raises(InexactRollbackError, match="in bias:") as caught:
        assert_exact_rollback(loops.counts_in_a_variable, at_step=6, to_step=3)
    assert caught.value.step == 4
    assert "deterministic" not in str(caught.value)


def test_a_training_that_is_not_deterministic_is_told_so() -> None:
    with pytest.raises(InexactRollbackError, match=r"loop/noise(.|\n)*not deterministic"):
        assert_exact_rollback(loops.draws_unseeded, at_step=6, to_step=3)


@pytest.mark.parametrize("train", [keeps_some, loops.keeps_rows, keeps_rows_in_place], ids=["some", "rows", "in place"])
def test_what_stays_as_it_is_is_given_to_the_fresh_process_too(train, tmp_path) -> None:
    report = assert_exact_rollback(train, at_step=8, to_step=3, folder=tmp_path / "new")
    assert report.steps == (3, *range(4, 13))
    if train is not keeps_some:
        live = simckpt.Store(tmp_path / "new" / "live").run("run")
        head = next(each for each in live.checkpoints() if each.kind == "rollback")
        fresh = simckpt.ReplayBuffer(20, loops.Space(), loops.Space(), num_envs=1, seed=1)
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
        assert_exact_rollback(quick, at_step=at_step, to_step=to_step)


def test_a_training_without_a_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no RollbackPolicy"):
        assert_exact_rollback(without_policy, at_step=20, to_step=10)


def test_a_target_after_the_rollback_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="to_step lies before at_step"):
        assert_exact_rollback(quick, at_step=20, to_step=20)


def test_stores_from_before_are_not_taken_for_new_ones(tmp_path) -> None:
    (tmp_path / "fresh").mkdir()
    with pytest.raises(ConfigurationError, match="fresh"):
        assert_exact_rollback(quick, at_step=20, to_step=10, folder=tmp_path)
