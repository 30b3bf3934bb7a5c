import os
import re
import select
import tempfile
import warnings

import loops
import pytest

import simckpt
from simckpt.errors import ConfigurationError
from simckpt.testing import InexactResumeError, UncoveredStateWarning, assert_exact_resume


def has_ended(pid: int, timeout: float) -> bool:
    # a killed process ends a little after the kill, and stays a zombie until whoever adopted it waits for it
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout)[0])
    finally:
        os.close(descriptor)


# that a sound loop with torch and envs passes is seen in test_train_sac.py, too; each takes four processes with torch
@pytest.mark.slow
def test_a_sound_loop_passes_without_warnings() -> None:
    report = assert_exact_resume(loops.sound, at_steps=[30])
    assert report.steps == (10, 20, 30, 40, 50, 60)
    assert report.uncovered == ()
    # the twins and the resumed run, six checkpoints each, which have four leaves of the agent and eight of Adam
    assert report.compared > 2 * 6 * (4 + 8)


def test_every_step_is_recorded_whatever_the_policies_say(tmp_path) -> None:
    # the last step is one to be killed at, and so is one between two saves
    report = assert_exact_resume(loops.seeds_before_the_loop, at_steps=(40, 11), folder=tmp_path / "new")
    assert report.uncovered == ()
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["killed_at_11", "killed_at_40", "twin_a", "twin_b"]
    store = simckpt.Store(tmp_path / "new/killed_at_11")
    assert [checkpoint.step for checkpoint in store.run("run").checkpoints()] == [10, 20, 30, 40]
    events = [event["event"] for event in store.files.events("run")]
    assert [event for event in events if event != "started"] == ["saved", "saved", "restored", "saved", "saved"]


def test_stores_from_before_are_not_taken_for_new_ones(tmp_path) -> None:
    (tmp_path / "twin_b").mkdir()
    with pytest.raises(ConfigurationError, match="twin_b"):
        assert_exact_resume(loops.sound, at_steps=[20], folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["twin_b"]


def test_temporary_stores_are_removed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert_exact_resume(loops.seeds_before_the_loop, at_steps=[10])
    with pytest.raises(ConfigurationError):
        assert_exact_resume(loops.saves_nothing, at_steps=[10])
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_ends_its_process_well_passes() -> None:
    assert_exact_resume(loops.sound_script, at_steps=[30])


@pytest.mark.parametrize(
    ("train", "leaf", "warning"),
    [
        # what was forgotten is in no checkpoint, so that it shows in what depends on it
        (
            loops.forgets_optimizer,
            "agent/weight",
            r"a torch\.optim\.\S*Adam \(`optimizer` in forgets_optimizer\) is alive",
        ),
        (loops.forgets_rng, "loop/noise", "numpy's global `numpy.random` was drawn from"),
        (loops.forgets_envs, "loop/observations", "a numpy Generator .* is alive"),
        (loops.forgets_counter, "loop/weights", None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_something_forgotten_is_caught_and_the_first_difference_named(train, leaf: str, warning: str | None) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(InexactResumeError) as caught:
            assert_exact_resume(train, at_steps=[20])
    # the first step after the kill is the first that can differ
    assert caught.value.step == 30
    assert leaf in [difference.path for difference in caught.value.differences]
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("the run killed and resumed at step 20 differs from the undisturbed one, first at step 30")
    (line,) = [line for line in lines if line.startswith(f"  {leaf}: ")]
    assert re.search(r"elements differ, at most [0-9.e-]+ apart$", line)
    assert "not deterministic" not in str(caught.value)
    # a number in a local variable is nothing that anybody could know to be state
    found = [str(each.message) for each in warned if each.category is UncoveredStateWarning]
    assert any(re.match(warning, line) for line in found) if warning else not found


def test_a_loop_that_saves_at_other_steps_is_told_which() -> None:
    with pytest.raises(
        InexactResumeError, match=r"run 'run' saved step 20 where step 30 was due; was the checkpoint"
    ) as caught:
        assert_exact_resume(loops.forgets_stride, at_steps=[10])
    assert caught.value.step == 20


def test_a_loop_that_starts_another_run_is_told_so() -> None:
    with pytest.raises(
        InexactResumeError, match=r"the runs \['run-0', 'run-1'\] where the undisturbed one has \['run-0'\]"
    ):
        assert_exact_resume(loops.renames_itself, at_steps=[20])


def test_a_loop_that_is_not_deterministic_is_told_so_before_anything_is_killed(tmp_path) -> None:
    with pytest.raises(
        InexactResumeError, match=r"(?s)two undisturbed runs differ, first at step 10.*seeded"
    ) as caught:
        assert_exact_resume(loops.unseeded, at_steps=[30], folder=tmp_path)
    assert caught.value.step == 10
    assert {difference.path.partition("/")[0] for difference in caught.value.differences} == {"loop", "rng"}
    assert not (tmp_path / "killed_at_30").exists()


def test_unseeded_global_streams_are_named_with_the_call_that_seeds_them() -> None:
    with pytest.raises(InexactResumeError) as caught:
        assert_exact_resume(loops.draws_from_unseeded_streams, at_steps=[30])
    message = str(caught.value)
    assert message.startswith("two undisturbed runs differ, first at step 10, in rng/")
    assert "Call random.seed(...) and numpy.random.seed(...) at the start" in message
    assert {difference.path.partition("/")[0] for difference in caught.value.differences} == {"rng"}


def test_a_difference_before_the_kill_is_not_blamed_on_the_resume() -> None:
    with pytest.raises(InexactResumeError, match=r"(?s)differs before it was killed.*not deterministic") as caught:
        assert_exact_resume(loops.differs_before_the_kill, at_steps=[30])
    assert caught.value.step == 10


def test_what_no_component_covers_is_warned_of() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        # the look around is over before the steps are found to be too few
        with pytest.raises(ConfigurationError, match="before step 50"):
            assert_exact_resume(loops.covers_nothing, at_steps=[50])
    assert {(each.category, each.filename) for each in warned} == {(UncoveredStateWarning, __file__)}
    lines = [str(each.message) for each in warned]
    for start in (
        "a numpy Generator (PCG64) (`own_rng` in covers_nothing) is alive",
        "a torch.nn.modules.container.Sequential with 24 parameters",
        "a torch.optim.sgd.SGD (`momentum` in covers_nothing) is alive",
        "Python's `random` was drawn from",
        "numpy's global `numpy.random` was drawn from",
        "torch's default generator was drawn from",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start
    assert len(lines) == 6


@pytest.mark.parametrize("train", [loops.raises, loops.raises_when_resumed], ids=lambda train: train.__name__)
def test_a_training_that_raises_gives_its_traceback(train) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s)failed:.*in {train.__name__}.*ZeroDivisionError: the"):
        assert_exact_resume(train, at_steps=[10])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (loops.exits_with_an_error, "SystemExit: no such environment"),
        (loops.dies, r"died by itself \(exit code 7\)"),
        (loops.dies_beside_a_child, r"died by itself \(exit code 7\)"),
        (loops.saves_nothing, "saved nothing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_training_that_ends_otherwise_is_told_how(train, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        assert_exact_resume(train, at_steps=[10])


def test_a_step_beyond_the_end_is_refused_before_anything_is_killed(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=r"ends at step 40, before step 41"):
        assert_exact_resume(loops.seeds_before_the_loop, at_steps=[20, 41], folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["twin_a"]


@pytest.mark.parametrize("at_steps", [[], [-1]])
def test_senseless_steps_are_refused(at_steps: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="at_steps"):
        assert_exact_resume(loops.sound, at_steps=at_steps)


def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a lambda"):
        assert_exact_resume(lambda store: loops.sound(store), at_steps=[10])


def test_a_training_that_takes_too_long_is_ended_with_all_its_processes(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="more than 5 s"):
        assert_exact_resume(loops.never_ends, at_steps=[10], folder=tmp_path, timeout=5)
    pids = [int(pid) for pid in (tmp_path / "twin_a/children").read_text().split()]
    assert len(pids) == 3
    assert [pid for pid in pids if not has_ended(pid, timeout=60)] == []


def test_a_large_state_passes() -> None:
    assert assert_exact_resume(loops.keeps_a_large_state, at_steps=[20]).steps == (10, 20, 30, 40)
