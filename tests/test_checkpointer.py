import errno
import json
import warnings
from typing import NamedTuple

import numpy as np
import pytest
from examples import Counter, Fragile

import simckpt
from simckpt import policies, provenance, replay
from simckpt.errors import (
    ConfigurationError,
    ConflictError,
    DamagedError,
    HalfRestoredError,
    RestoreError,
    StateMismatchError,
    StorageFullError,
    UnsupportedStateError,
)


def start(store: simckpt.Store, components: dict, **options) -> tuple[simckpt.Run, simckpt.Checkpointer]:
    run = store.start("a")
    options.setdefault("save_when", simckpt.EverySteps(10))
    return run, run.checkpointer(components, **options)


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


def test_a_resumed_loop_equals_the_undisturbed_one(store) -> None:
    undisturbed = Counter()
    for _ in range(50):
        undisturbed.advance()

    interrupted, loop = Counter(), simckpt.LoopState(step=0)
    run, checkpointer = start(store, {"counter": interrupted, "loop": loop})
    for _ in range(33):
        interrupted.advance()
        loop.step += 1
        checkpointer.step(loop.step)
    run.close()

    resumed, loop = Counter(), simckpt.LoopState(step=0)
    run, checkpointer = start(store, {"counter": resumed, "loop": loop})
    assert checkpointer.restore_latest().step == 30
    assert loop.step == 30
    while loop.step < 50:
        resumed.advance()
        loop.step += 1
        checkpointer.step(loop.step)
    checkpointer.wait()
    assert resumed.values.tobytes() == undisturbed.values.tobytes()
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [10, 20, 30, 40, 50]


def test_there_is_nothing_to_restore_on_the_first_start(store) -> None:
    _, checkpointer = start(store, {"counter": Counter()})
    assert checkpointer.restore_latest() is None


def test_a_checkpoint_does_not_follow_later_changes_of_the_live_object(store) -> None:
    counter = Counter()
    run, checkpointer = start(store, {"counter": counter})
    checkpoint = checkpointer.save(1)
    counter.advance()
    assert run.latest()["counter/values"].tolist() == [0.0] * 4
    checkpoint.restore({"counter": counter})
    counter.advance()
    assert run.latest()["counter/values"].tolist() == [0.0] * 4


def test_only_the_kept_checkpoints_stay_and_the_lineage_survives(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()}, keep=simckpt.KeepLast(2))
    ids = [checkpointer.save(step).id for step in range(1, 6)]
    assert [checkpoint.id for checkpoint in run.checkpoints()] == ids[3:]
    assert run.checkpoints()[0].parent == ids[2]


def test_every_decision_is_logged_with_its_reason(store, tmp_path) -> None:
    _, checkpointer = start(store, {"counter": Counter()}, keep=simckpt.KeepLast(1))
    checkpointer.step(10)
    checkpointer.step(20)
    assert checkpointer.restore_latest().step == 20
    lines = [json.loads(line) for line in (tmp_path / "s/runs/a/events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "saved", "saved", "pruned", "restored"]
    assert lines[1]["reason"] == "passed a multiple of 10 steps"
    assert "KeepLast" in lines[3]["reason"]


@pytest.mark.parametrize("missing", ["registered", "saved"])
def test_components_that_differ_in_name_are_refused_and_nothing_is_touched(store, missing: str) -> None:
    first, second = {"counter": Counter()}, {"counter": Counter(), "extra": Counter()}
    if missing == "registered":
        first, second = second, first
    run, checkpointer = start(store, first)
    checkpointer.save(1)
    run.close()
    second["counter"].advance()
    before = second["counter"].values.copy()
    _, checkpointer = start(store, second)
    with pytest.raises(StateMismatchError, match="extra"):
        checkpointer.restore_latest()
    assert second["counter"].values.tobytes() == before.tobytes()


def test_a_component_that_fails_halfway_leaves_all_as_they_were(store) -> None:
    components = {"first": Counter(), "fragile": Fragile(), "last": Counter()}
    _, checkpointer = start(store, components)
    for component in components.values():
        component.advance()
    checkpointer.save(1)
    for component in components.values():
        component.advance()
    before = {name: (component.values.tobytes(), component.count) for name, component in components.items()}
    components["fragile"].broken = True
    with pytest.raises(RestoreError, match=r"'fragile'.*RuntimeError: the light went out.*as they were"):
        checkpointer.restore_latest()
    assert {name: (component.values.tobytes(), component.count) for name, component in components.items()} == before


def test_a_component_that_cannot_be_captured_is_refused_by_name(store) -> None:
    run = store.start("a")
    with pytest.raises(UnsupportedStateError, match="socket"):
        run.checkpointer({"socket": object()}, save_when=simckpt.EverySteps(1))


def test_a_save_that_cannot_capture_fails_loudly_and_training_goes_on(store) -> None:
    loop = simckpt.LoopState(step=0)
    run, checkpointer = start(store, {"loop": loop})
    checkpointer.step(10)
    loop.visitor = (number for number in range(3))
    with pytest.warns(simckpt.SaveFailedWarning, match="visitor"):
        assert checkpointer.step(20) is None
    assert isinstance(checkpointer.last_error, UnsupportedStateError)
    with pytest.raises(UnsupportedStateError):
        checkpointer.save(25)
    del loop.visitor
    assert checkpointer.step(30).wait().step == 30
    assert checkpointer.wait().step == 30
    assert checkpointer.last_error is None
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [10, 30]


def test_a_full_disk_does_not_end_the_training(store, tmp_path) -> None:
    resource = pytest.importorskip("resource")
    big = Counter(1 << 16)
    run, checkpointer = start(store, {"counter": big})
    checkpointer.step(10).wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        checkpointer.step(20)
        with pytest.warns(simckpt.SaveFailedWarning, match="step 20 failed, training goes on"):
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(checkpointer.last_error, StorageFullError)
    assert checkpointer.last_error.errno in (errno.EFBIG, errno.ENOSPC)
    assert checkpointer.step(30).wait().step == 30
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [10, 30]


def test_another_writer_ends_the_training(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()})
    checkpointer.save(1)
    checkpoints = store.path / "runs/a/checkpoints"
    (checkpoints / "00000002").mkdir()
    save = checkpointer.step(10)
    with pytest.raises(ConflictError):
        save.wait()
    with pytest.raises(ConflictError):
        checkpointer.step(11)
    run.close()


@pytest.mark.parametrize("step", [-1, 1.5, True, None, "3", 2**63])
def test_a_senseless_step_is_refused(store, step: object) -> None:
    _, checkpointer = start(store, {"counter": Counter()})
    with pytest.raises(ConfigurationError, match="whole number"):
        checkpointer.step(step)


def test_numpy_numbers_are_steps_and_metrics(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()})
    checkpointer.step(np.int64(10), {"return": np.float32(1.5), "bad": np.nan}).wait()
    assert run.latest().metrics["return"] == 1.5
    assert np.isnan(run.latest().metrics["bad"])


def test_a_metric_that_is_no_number_is_refused_by_name(store) -> None:
    _, checkpointer = start(store, {"counter": Counter()})
    with pytest.raises(ConfigurationError, match="'loss'"):
        checkpointer.step(10, {"loss": "high"})


@pytest.mark.parametrize(
    "options",
    [{"save_when": 50_000}, {"save_when": simckpt.EverySteps(1), "keep": 3}],
    ids=["save_when", "keep"],
)
def test_something_else_than_a_policy_is_refused(store, options: dict) -> None:
    with pytest.raises(ConfigurationError, match="policy"):
        store.start("a").checkpointer({"c": Counter()}, **options)


def test_the_name_of_the_decisions_is_taken(store) -> None:
    with pytest.raises(ConfigurationError, match="'checkpointer'"):
        store.start("a").checkpointer({"checkpointer": Counter()}, save_when=simckpt.EverySteps(1))


def test_a_checkpoint_restores_single_components(store) -> None:
    one, two = Counter(), Counter()
    _, checkpointer = start(store, {"one": one, "two": two})
    checkpoint = checkpointer.save(1)
    one.advance()
    two.advance()
    checkpoint.restore({"one": one})
    assert (one.count, two.count) == (0, 1)


def test_other_versions_are_said_loudly(store, monkeypatch) -> None:
    counter = Counter()
    _, checkpointer = start(store, {"counter": counter})
    checkpoint = checkpointer.save(1)
    other = dict(provenance.versions()) | {"mujoco": "3.8.1"}
    monkeypatch.setattr(provenance, "versions", lambda: other)
    with pytest.warns(simckpt.VersionWarning, match=r"mujoco: saved with .*, now 3\.8\.1"):
        checkpoint.restore({"counter": counter})


def test_a_restart_that_forgets_to_restore_cannot_bury_the_run(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()}, keep=simckpt.KeepLast(2))
    checkpointer.save(1000)
    run.close()
    run, checkpointer = start(store, {"counter": Counter()}, keep=simckpt.KeepLast(2))
    with pytest.raises(ConfigurationError, match=r"restore_latest\(\)"):
        checkpointer.step(10)
    with pytest.raises(ConfigurationError, match=r"restore_latest\(\)"):
        checkpointer.save(10)
    checkpointer.restore_latest()
    with pytest.raises(ConfigurationError, match="must not go back"):
        checkpointer.step(10)
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1000]


def test_what_cannot_be_saved_is_refused_at_registration(store) -> None:
    loop = simckpt.LoopState(visitor=(number for number in range(3)))
    with pytest.raises(UnsupportedStateError, match="visitor"):
        store.start("a").checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))


def test_a_component_that_would_not_take_back_its_state_is_refused_at_registration(store) -> None:
    class OneWay(Counter):
        def validate_state_dict(self, state: dict) -> None:
            raise StateMismatchError("not this one")

    with pytest.raises(UnsupportedStateError, match="'one_way' can be captured, but would not take back"):
        store.start("a").checkpointer({"one_way": OneWay()}, save_when=simckpt.EverySteps(1))


def test_a_log_that_cannot_be_written_stops_neither_saves_nor_restores(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()}, keep=simckpt.KeepLast(1))
    log = store.path / "runs/a/events.jsonl"
    log.unlink()
    log.mkdir()
    assert checkpointer.step(10).wait().step == 10
    with pytest.warns(simckpt.UpkeepWarning, match="log"):
        assert checkpointer.step(20).wait().step == 20
    with pytest.warns(simckpt.UpkeepWarning):
        assert checkpointer.restore_latest().step == 20
    assert checkpointer.last_error is None
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [20]


def test_an_old_damaged_record_is_told_and_stops_nothing(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()})
    for step in (10, 20, 30):
        checkpointer.step(step)
    run.close()
    record = store.path / "runs/a/checkpoints/00000002/commit.json"
    record.write_bytes(record.read_bytes().replace(b'"step": 20', b'"step": 21'))
    run = store.start("a")
    with pytest.warns(simckpt.UpkeepWarning, match="number 2"):
        checkpointer = run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(10))
    assert checkpointer.restore_latest().step == 30
    assert checkpointer.step(40).wait().step == 40


def test_a_damaged_head_is_not_passed_over_in_silence(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()})
    checkpointer.step(10)
    checkpointer.step(20)
    run.close()
    record = store.path / "runs/a/checkpoints/00000002/commit.json"
    record.write_bytes(record.read_bytes()[:-10])
    run = store.start("a")
    with pytest.warns(simckpt.UpkeepWarning, match="number 2"):
        checkpointer = run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(10))
    with pytest.raises(DamagedError):
        checkpointer.restore_latest(damaged="raise")
    with pytest.raises(ConfigurationError, match="restore_latest"):
        checkpointer.step(30)
    with pytest.warns(simckpt.DamageWarning, match="number 2"):
        assert checkpointer.restore_latest().step == 10


def test_metrics_beyond_their_room_are_refused_at_the_first_step(store) -> None:
    _, checkpointer = start(store, {"counter": Counter()})
    with pytest.raises(ConfigurationError, match="give fewer"):
        checkpointer.step(1, {f"a rather long name of a metric {number}": 0.5 for number in range(80)})


@pytest.mark.parametrize("more", ["saved", "live"])
def test_a_failed_restore_puts_back_loops_with_other_variables(store, more: str) -> None:
    saved = simckpt.LoopState(step=1, **({"extra": 1} if more == "saved" else {}))
    fragile = Fragile()
    _, checkpointer = start(store, {"loop": saved, "fragile": fragile})
    checkpoint = checkpointer.save(1)
    live = simckpt.LoopState(step=5, **({"extra": 2} if more == "live" else {}))
    fragile.broken = True
    before = repr(live)
    with pytest.raises((RestoreError, StateMismatchError)):
        checkpoint.restore({"loop": live, "fragile": fragile})
    assert repr(live) == before


def test_a_version_warning_that_is_an_error_changes_nothing(store, monkeypatch) -> None:
    counter = Counter()
    _, checkpointer = start(store, {"counter": counter})
    checkpoint = checkpointer.save(1)
    counter.advance()
    monkeypatch.setattr(provenance, "versions", lambda: {"python": "9"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(simckpt.VersionWarning):
            checkpoint.restore({"counter": counter})
    assert counter.count == 1


def test_nothing_is_written_after_the_run_was_closed(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()})
    checkpointer.save(1)
    run.close()
    for call in (checkpointer.step, checkpointer.save):
        with pytest.raises(ConfigurationError, match="closed"):
            call(20)


def test_the_checkpointer_made_last_writes(store) -> None:
    run, first = start(store, {"counter": Counter()})
    first.save(1)
    second = run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(10))
    second.restore_latest()
    with pytest.raises(ConfigurationError, match="another checkpointer"):
        first.save(2)
    second.save(2)
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]


def test_a_run_folder_that_vanishes_ends_no_training(store) -> None:
    _, checkpointer = start(store, {"counter": Counter()})
    checkpointer.step(10).wait()
    (store.path / "runs/a").rename(store.path / "elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer.step(20)
        checkpointer.wait()
    assert checkpointer.last_error is not None


@pytest.mark.parametrize("metrics", [[1.0], {"x": 10**400}, {"x": "high"}], ids=["list", "huge", "text"])
def test_senseless_metrics_are_refused_at_any_step(store, metrics: object) -> None:
    _, checkpointer = start(store, {"counter": Counter()})
    with pytest.raises(ConfigurationError):
        checkpointer.step(1, metrics)


def test_a_metric_without_a_value_yet_is_left_out(store) -> None:
    _, checkpointer = start(store, {"counter": Counter()})
    assert checkpointer.step(10, {"return": None, "loss": 1.0}).wait().metrics == {"loss": 1.0}


def test_an_interrupt_right_after_the_commit_leaves_the_commit_as_the_head(store, monkeypatch) -> None:
    run, checkpointer = start(store, {"counter": Counter()}, background=None)
    checkpointer.save(1)
    files = checkpointer._saver._files
    publish = files.publish

    def interrupted(*arguments: object, **options: object) -> None:
        publish(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(2)
    monkeypatch.undo()
    checkpointer.save(3)
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2, 3]


class Space(NamedTuple):
    """What a replay buffer asks of a space."""

    shape: tuple[int, ...]
    dtype: np.dtype


def new_buffer(capacity: int = 50) -> replay.ReplayBuffer:
    space = Space((3,), np.dtype("float32"))
    return replay.ReplayBuffer(capacity, space, space, num_envs=2, seed=1)


def add_rows(buffer: replay.ReplayBuffer, first: int, last: int) -> None:
    for number in range(first, last):
        row = np.full((2, 3), number, "float32")
        flags = np.array([number % 3 == 0, False])
        buffer.add(row, -row, row[:, 0], flags, ~flags, row + 1)


def rows_written(checkpoint: simckpt.Checkpoint) -> int:
    """Returns how many rows of observations were written by the save of this checkpoint itself."""
    (own,) = {piece.rows for piece in checkpoint.leaves()["replay/observations"].pieces[-1:]}
    return own


def test_a_replay_buffer_is_saved_by_its_new_rows_and_comes_back_whole(store) -> None:
    buffer, loop = new_buffer(), simckpt.LoopState(step=0)
    run, checkpointer = start(store, {"replay": buffer, "loop": loop})
    for step in range(10, 80, 10):
        add_rows(buffer, step - 10, step)
        assert rows_written(checkpointer.step(step).wait()) == 10
    expected = buffer.sample(64)
    run.close()

    fresh = new_buffer()
    run, checkpointer = start(store, {"replay": fresh, "loop": loop})
    assert checkpointer.restore_latest().step == 70
    assert len(fresh) == len(buffer) == 50
    found = fresh.sample(64)
    for one, two in zip(expected, found, strict=True):
        assert one.tobytes() == two.tobytes()
    # the restored rows are known to lie in the store
    add_rows(fresh, 70, 75)
    assert rows_written(checkpointer.step(80).wait()) == 5
    run.close()


def test_rows_of_a_save_that_failed_are_written_by_the_next_one(store, monkeypatch) -> None:
    buffer = new_buffer()
    _, checkpointer = start(store, {"replay": buffer})
    add_rows(buffer, 0, 10)
    checkpointer.save(10)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._saver._files, "publish", lambda *_: (_ for _ in ()).throw(StorageFullError("full")))
        add_rows(buffer, 10, 20)
        checkpointer.step(20)
        with pytest.warns(simckpt.SaveFailedWarning, match="step 20"):
            checkpointer.wait()
    add_rows(buffer, 20, 25)
    assert rows_written(checkpointer.step(30).wait()) == 15


def test_rows_whose_segment_is_lost_are_written_again(store) -> None:
    buffer = new_buffer()
    _, checkpointer = start(store, {"replay": buffer})
    for step in (10, 20):
        add_rows(buffer, step - 10, step)
        checkpointer.save(step)
    (first, second) = sorted((store.path / "segments").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    second.unlink()
    checkpoint = checkpointer.save(21)
    assert rows_written(checkpoint) == 10
    fresh = new_buffer()
    checkpoint.restore({"replay": fresh})
    assert len(fresh) == 20
    first.unlink()
    assert rows_written(checkpointer.save(22)) == 20


def test_a_restore_that_fails_after_a_log_was_filled_says_so(store) -> None:
    buffer, streams = new_buffer(), simckpt.RNGStreams()
    _, checkpointer = start(store, {"replay": buffer, "rng": streams, "fragile": Fragile()})
    add_rows(buffer, 0, 5)
    checkpointer.save(1)

    def broken(state: dict) -> None:
        raise RuntimeError("the light went out")

    streams.load_state_dict = broken
    with pytest.raises(HalfRestoredError) as error:
        checkpointer.restore_latest()
    assert "replay" in error.value.components


def test_what_people_and_branches_need_is_not_pruned(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()}, keep=simckpt.KeepLast(1))
    checkpointer.save(1).pin()
    checkpointer.save(2)
    checkpointer.save(3)
    run.close()
    run, checkpointer = start(store, {"counter": Counter()}, keep=simckpt.KeepLast(1))
    checkpointer.restore_latest()
    for step in (4, 5, 6):
        checkpointer.save(step)
    # pinned; restored from; the newest
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 3, 6]


def test_metrics_and_tags_that_came_later_count_for_what_is_kept(store) -> None:
    keep = policies.KeepBest(1, "score") | policies.KeepTagged("paper")
    run, checkpointer = start(store, {"counter": Counter()}, keep=keep)
    checkpointer.save(1).add_metrics({"score": 2.0})
    checkpointer.save(2, {"score": 1.0}).tag("paper")
    checkpointer.save(3, {"score": 1.5})
    checkpointer.save(4)
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2, 4]


def test_each_checkpoint_knows_its_start_its_duration_and_its_size(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()})
    record = checkpointer.step(10).wait()._record
    assert record.start == run.start_id()
    assert 0 < record.duration < 60
    assert record.size > 0


def test_a_store_without_memory_of_policies_still_restores(store) -> None:
    run = store.start("a")
    old = {"previous_step": 7}
    decisions = checkpointer_of(run)._decisions
    decisions.validate_state_dict(old)
    decisions.load_state_dict(old)
    assert (decisions.previous_step, decisions.memory) == (7, {})
    for wrong in ({}, {"previous_step": "7"}, [], {"previous_step": 7, "memory": 3}):
        with pytest.raises(StateMismatchError):
            decisions.validate_state_dict(wrong)


def checkpointer_of(run: simckpt.Run) -> simckpt.Checkpointer:
    return run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(1))


def test_steps_write_at_once_without_a_background(store) -> None:
    run, checkpointer = start(store, {"counter": Counter()}, background=None)
    assert checkpointer.step(10).done
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [10]
