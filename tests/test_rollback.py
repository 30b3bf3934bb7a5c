"""Rollbacks of a training loop: what they restore, change, commit and protect; what a failure or a kill leaves."""

# ruff: noqa: PT012 - what is tested is the body of a context

import gc
import json
import logging
import os
import signal
import sys
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from background_helpers import GatedDisk
from rollback_loops import ARGS, HOT, POLICY, Objects, train

import simckpt
from simckpt import decisions, replay
from simckpt.comparison import compare
from simckpt.errors import (
    ConfigurationError,
    HalfRestoredError,
    OverrideNotAppliedError,
    RollbackLimitError,
    RolledBack,
    StorageError,
    UnsupportedStateError,
)
from simckpt.policies import Evaluation, OnException, OnSignal
from simckpt.storage import durable

EACH = simckpt.EverySteps(20)
POLICY_RESEED = replace(POLICY, changes=simckpt.Reseed())


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


@pytest.fixture
def handler():
    """Puts the handler back that an exit by a signal leaves ignored."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def events(store: simckpt.Store, run: str = "a") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (store.path / "runs" / run / "events.jsonl").read_text().splitlines()]


def kinds(run: simckpt.Run) -> list[tuple[str, int]]:
    return [(each.kind, each.step) for each in run.checkpoints()]


def same_line(one: simckpt.Run, two: simckpt.Run) -> bool:
    """Returns whether two runs have the same checkpoints on the lines of their heads, bit for bit."""
    assert kinds(one) == kinds(two)
    return all(compare(*pair).identical for pair in zip(one.checkpoints(), two.checkpoints(), strict=True))


def test_the_loop_is_left_and_the_rollback_is_the_head(store) -> None:
    with pytest.raises(RolledBack, match=r"went back from step 1\d0 to step 1\d0 \(level 1.*eval/return") as caught:
        train(store)
    run = store.run("a")
    head = run.latest()
    error, target = caught.value, run.at(step=caught.value.target_step)
    assert (error.run, error.level, head.kind, head.step) == ("a", 1, "rollback", error.target_step)
    assert target.id == head.id
    (origin,) = [each for each in run.checkpoints() if each.id == head.parent]
    assert (origin.kind, origin.step) == ("save", head.step)
    (abandoned,) = [each for each in run.checkpoints(abandoned=True) if each.id == head.rollback["abandoned"]]
    assert abandoned.step > head.step
    assert abandoned.id not in {each.id for each in run.checkpoints()}
    assert head.rollback["level"] == 1
    assert head.rollback["changes"]["hyperparameters"] == {"learning_rate": HOT / 2}
    assert head.rollback["reason"] == error.reason
    assert head.hyperparameters == {**ARGS, "learning_rate": HOT / 2}
    # the claim was given back: anybody may go on
    store.start("a").close()


def test_all_components_return_together_and_only_the_changes_differ(store) -> None:
    with pytest.raises(RolledBack):
        train(store, policy=replace(POLICY, changes=simckpt.Scale(learning_rate=0.5)))
    head = store.run("a").latest()
    (target,) = [each for each in store.run("a").checkpoints() if each.id == head.parent]
    paths = {each.path for each in compare(target, head).differences}
    assert {path for path in paths if not path.startswith("checkpointer/")} == {"optimizer/param_groups/0/lr"}


def test_supervise_enters_training_again_and_returns_its_result(store, caplog) -> None:
    with caplog.at_level(logging.WARNING, "simckpt"):
        objects = simckpt.supervise(train, store)
    assert objects.loop.step == 200
    assert objects.optimizer.param_groups[0]["lr"] == HOT / 2
    assert objects.args["learning_rate"] == HOT / 2
    (record,) = caplog.records
    assert "run 'a' went back from step" in record.message
    assert [each.kind for each in store.run("a").checkpoints()].count("rollback") == 1


def test_supervise_lets_go_of_what_the_call_before_held(caplog) -> None:
    class Large:
        pass

    alive: list[weakref.ref[Large]] = []

    def hold() -> str:
        assert [each() for each in alive] == [None] * len(alive)
        large = Large()
        large.itself = large  # type: ignore[attr-defined]
        alive.append(weakref.ref(large))
        if len(alive) < 3:
            try:
                raise KeyError("in the way")
            except KeyError:
                raise RolledBack("back", run="a", step=2, target_step=1, level=1, reason="x") from None
        return "done"

    gc.disable()
    try:
        assert simckpt.supervise(hold) == "done"
    finally:
        gc.enable()
    assert len(alive) == 3


def test_other_errors_pass_through_supervise(store) -> None:
    with pytest.raises(ConfigurationError):
        simckpt.supervise(train, store, args={**ARGS, "learning_rate": object()})


def test_a_rollback_in_place_equals_one_that_enters_again(store) -> None:
    saves = []

    def in_place() -> Objects:
        with store.start("b") as run:
            objects = Objects(run.configure(ARGS, defaults=ARGS))
            checkpointer = run.checkpointer(
                objects.components,
                save_when=EACH,
                hyperparameters=objects.hyperparameters,
                rollback=POLICY,
                in_place=True,
            )
            with checkpointer:
                while objects.loop.step < 200:
                    objects.advance()
                    saves.append(checkpointer.step(objects.loop.step, objects.metrics()))
                    if saves[-1] is not None and saves[-1].kind == "rollback":
                        assert saves[-1].wait().id == run.latest().id
                        assert objects.loop.step == saves[-1].step
                        assert checkpointer.hyperparameters["learning_rate"] == HOT / 2
        return objects

    entered_again, stayed = simckpt.supervise(train, store), in_place()
    assert stayed.bits() == entered_again.bits()
    assert [save.kind for save in saves if save is not None].count("rollback") == 1
    assert same_line(store.run("a"), store.run("b"))


def test_the_history_after_a_rollback_is_the_targets_and_the_rollback_is_remembered(store) -> None:
    with pytest.raises(RolledBack) as caught:
        train(store)
    state = store.run("a").latest()["checkpointer"]
    history = decisions.evaluations_of(state)["eval/return"]
    # the evaluation of a step is part of the checkpoint of this step
    assert [each.step for each in history] == list(range(10, caught.value.target_step + 1, 10))
    assert all(len(each.returns) == 20 for each in history)
    (past,) = state["rollbacks"]
    assert (past["step"], past["target_step"], past["level"]) == (caught.value.step, caught.value.target_step, 1)
    assert past["evaluations"] == caught.value.step // 10
    assert past["saw"][-1] == [caught.value.step, pytest.approx(0, abs=1), 20]
    assert len(past["saw"]) == 10


def test_every_rollback_is_logged_with_what_the_policy_saw(store) -> None:
    with pytest.raises(RolledBack) as caught:
        train(store)
    (event,) = [event for event in events(store) if event["event"] == "rolled back"]
    assert (event["step"], event["target_step"]) == (caught.value.step, caught.value.target_step)
    assert event["reason"] == caught.value.reason
    assert event["changes"]["hyperparameters"] == {"learning_rate": HOT / 2}
    assert event["saw"][-1][0] == caught.value.step


@pytest.mark.parametrize("until", [40, 70, 130, 140, 170])
def test_a_run_that_was_stopped_anywhere_equals_the_undisturbed_one(store, until: int) -> None:
    undisturbed = simckpt.supervise(train, store, "undisturbed")
    # as after a kill: nothing of this process's objects is used again
    simckpt.supervise(train, store, "stopped", until=until)
    assert simckpt.supervise(train, store, "stopped").bits() == undisturbed.bits()
    assert same_line(store.run("stopped"), store.run("undisturbed"))


def test_runs_of_other_seeds_draw_other_numbers_after_a_rollback(store) -> None:
    heads = []
    for seed in (1, 2):
        with pytest.raises(RolledBack):
            train(store, f"seed-{seed}", args={**ARGS, "seed": seed})
        heads.append(store.run(f"seed-{seed}").latest())
    assert heads[0].rollback["changes"]["seed"] != heads[1].rollback["changes"]["seed"]


def test_a_second_rollback_escalates_and_draws_other_numbers(store) -> None:
    policy = replace(POLICY, changes=[simckpt.Reseed(), simckpt.Reseed() & simckpt.Scale(learning_rate=0.5)])
    objects = simckpt.supervise(train, store, policy=policy)
    commits = [each for each in store.run("a").checkpoints(abandoned=True) if each.kind == "rollback"]
    assert [each.rollback["level"] for each in commits] == [1, 2]
    assert [each.rollback["changes"]["hyperparameters"] for each in commits] == [{}, {"learning_rate": HOT / 2}]
    assert len({each.rollback["changes"]["seed"] for each in commits}) == 2
    assert objects.args["learning_rate"] == HOT / 2


def test_the_policy_stops_after_its_last_rollback(store) -> None:
    with pytest.raises(RollbackLimitError) as caught:
        simckpt.supervise(train, store, policy=replace(POLICY, changes=simckpt.Reseed(), max_rollbacks=2))
    assert (caught.value.run, caught.value.rollbacks) == ("a", 2)
    assert events(store)[-1]["event"] == "stopped"
    store.start("a").close()


def test_the_state_at_the_limit_is_kept_for_a_post_mortem(store) -> None:
    policy = replace(POLICY_RESEED, max_rollbacks=1)
    with pytest.raises(RollbackLimitError) as caught:
        simckpt.supervise(train, store, policy=policy, save_when=EACH | OnException())
    (kept,) = [each for each in store.run("a").checkpoints(abandoned=True) if each.kind == "exception"]
    assert kept.step == caught.value.step
    assert kept["loop"]["step"] == kept.step
    # the evaluation that it stopped at is there, too
    assert kept.metrics["eval/return"] == pytest.approx(0, abs=1)
    assert store.run("a").latest().id != kept.id


def test_the_policy_may_go_on_after_its_last_rollback(store) -> None:
    policy = replace(POLICY, changes=simckpt.Reseed(), max_rollbacks=1, then="continue")
    with pytest.warns(simckpt.UpkeepWarning, match="it would once more: eval/return fell .* training goes on") as told:
        assert simckpt.supervise(train, store, policy=policy).loop.step == 200
    assert [each.kind for each in store.run("a").checkpoints(abandoned=True)].count("rollback") == 1
    # all evaluations after it have fallen, and it is said once
    assert len(told) == 1
    (event,) = [event for event in events(store) if event["event"] == "no rollback"]
    assert event["reason"].endswith("max_rollbacks=1 is reached, and training goes on")


@pytest.mark.parametrize("what", ["loss", "parameter", "moment", "return"])
def test_what_is_not_finite_goes_back_at_once(store, what: str) -> None:
    run = store.start("a")
    objects = Objects(run.configure(ARGS))
    checkpointer = run.checkpointer(
        objects.components, save_when=EACH, hyperparameters=objects.hyperparameters, rollback=POLICY
    )
    metrics: dict[str, Any] = {}
    with pytest.raises(RolledBack) as caught, checkpointer:
        while objects.loop.step < 127:
            objects.advance()
            checkpointer.step(objects.loop.step, objects.metrics())
        objects.advance()
        if what == "parameter":
            with torch.no_grad():
                objects.model.bias[0] = torch.nan
        elif what == "moment":
            next(iter(objects.optimizer.state.values()))["exp_avg"][0] = torch.nan
        else:
            metrics = {"policy_loss": np.inf} if what == "loss" else {"eval/return": [1.0, np.nan]}
        checkpointer.step(objects.loop.step, metrics)
    said = {
        "moment": "'exp_avg' of parameter 0 of 'optimizer'",
        "loss": "policy_loss is inf",
        "parameter": "'bias' of 'model'",
        "return": "eval/return is nan",
    }
    assert said[what] in caught.value.reason
    assert caught.value.step == 128
    assert torch.isfinite(store.run("a").latest()["model/bias"]).all()


def test_parameters_are_looked_at_before_they_are_saved(store) -> None:
    model = torch.nn.Linear(2, 2)
    run, policy = store.start("a"), replace(POLICY, changes=simckpt.Reseed())
    checkpointer = run.checkpointer({"model": model}, save_when=simckpt.EverySteps(10), rollback=policy)
    checkpointer.step(10, {"eval/return": [1.0, 2.0] * 5}).wait()
    with torch.no_grad():
        model.weight[0, 0] = torch.inf
    assert checkpointer.step(11) is None
    with pytest.raises(RolledBack):
        checkpointer.step(20)
    assert [each.step for each in run.checkpoints(abandoned=True)] == [10, 10]


class Space:
    shape, dtype = (3,), np.dtype("float32")


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_rows_collected_since_the_target_are_kept_or_dropped(store, keep: bool) -> None:
    buffer, loop = replay.ReplayBuffer(200, Space(), Space(), num_envs=1, seed=1), simckpt.LoopState(step=0)
    changes = simckpt.Reseed() & simckpt.KeepRows("replay") if keep else simckpt.Reseed()
    run = store.start("a")
    checkpointer = run.checkpointer(
        {"replay": buffer, "loop": loop},
        save_when=simckpt.EverySteps(10),
        rollback=replace(POLICY, changes=changes),
        in_place=True,
    )
    for _ in range(25):
        loop.step += 1
        row = np.full((1, 3), loop.step, "float32")
        buffer.add(row, row, row[:, 0], np.array([False]), np.array([False]), row)
        metrics = {"eval/return": [1.0, 2.0] * 5} if loop.step == 10 else {}
        checkpointer.step(loop.step, {"loss": np.nan} if loop.step == 25 else metrics)
    # nothing is confirmed yet: the newest checkpoint is the target
    assert loop.step == 20
    assert len(buffer) == (25 if keep else 20)
    # what the next checkpoint has is what the buffer has, whatever was written before
    saved, fresh = checkpointer.save(21), replay.ReplayBuffer(200, Space(), Space(), num_envs=1, seed=1)
    saved.restore({"replay": fresh})
    assert len(fresh) == len(buffer)
    for one, two in zip(fresh.sample(50), buffer.sample(50), strict=True):
        assert one.tobytes() == two.tobytes()
    run.close()


def test_a_function_changes_what_it_likes_and_that_is_part_of_the_commit(store) -> None:
    def clear(components: dict[str, Any], level: int) -> None:
        components["loop"].clip = -level

    with pytest.raises(RolledBack):
        train(store, policy=replace(POLICY, changes=simckpt.Call(clear), max_rollbacks=1))
    assert store.run("a").latest()["loop"]["clip"] == -1


def test_a_function_that_raises_leaves_all_as_it_was(store) -> None:
    seen: list[Objects] = []

    def fail(components: dict[str, Any], level: int) -> None:
        components["loop"].clip = -1
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError, match="no") as caught:
        train(
            store,
            policy=replace(POLICY, changes=simckpt.Scale(learning_rate=0.5) & simckpt.Call(fail)),
            seen=lambda checkpointer, objects: seen.append(objects),
        )
    assert "was going back from step" in caught.value.__notes__[0]
    assert seen[0].loop.clip == 0.2
    assert seen[0].loop.step > 120
    assert seen[0].optimizer.param_groups[0]["lr"] == HOT
    assert "rollback" not in [each.kind for each in store.run("a").checkpoints(abandoned=True)]
    assert store.run("a").latest().step == 120
    assert "rollback failed" in [event["event"] for event in events(store)]


def clear_moments(components, level: int) -> None:
    components["optimizer"].state.clear()


def add_variable(components, level: int) -> None:
    components["loop"].bonus = np.ones(level)


@pytest.mark.parametrize("function", [clear_moments, add_variable])
def test_a_function_may_change_what_a_later_start_takes_back(store, function) -> None:
    policy = replace(POLICY, changes=simckpt.Scale(learning_rate=0.5) & simckpt.Call(function))
    entered_again = simckpt.supervise(train, store, policy=policy)
    assert entered_again.bits() == train(store, "b", policy=policy, in_place=True).bits()
    assert same_line(store.run("a"), store.run("b"))
    if function is add_variable:
        assert entered_again.loop.bonus.tolist() == [1.0]


def undo(components, level: int) -> None:
    components["optimizer"].param_groups[0]["lr"] = HOT


def delete_variable(components, level: int) -> None:
    del components["loop"].clip


def rename_variable(components, level: int) -> None:
    components["loop"].clipping = components["loop"].clip
    del components["loop"].clip


def add_what_no_file_holds(components, level: int) -> None:
    components["loop"].clip = open


def exchange_the_object(components, level: int) -> None:
    components["loop"] = simckpt.LoopState(step=0)


@pytest.mark.parametrize(
    ("in_place", "function", "error", "message"),
    [
        (
            False,
            undo,
            OverrideNotAppliedError,
            r"'learning_rate' was set to 0\.05, but after .*Call\(undo\).* has 0\.1",
        ),
        (True, undo, OverrideNotAppliedError, r"'learning_rate' was set to 0\.05, but after .*Call\(undo\).* has 0\.1"),
        (False, delete_variable, UnsupportedStateError, r"no later start of run 'a'.*Call\(delete_variable\).*clip"),
        (True, rename_variable, UnsupportedStateError, r"Call\(rename_variable\).*clip"),
        (False, add_what_no_file_holds, UnsupportedStateError, "clip"),
        (True, exchange_the_object, TypeError, "does not support item assignment"),
    ],
)
def test_a_function_that_no_later_start_could_follow_changes_nothing(
    store, in_place: bool, function, error: type[Exception], message: str
) -> None:
    seen: list[tuple[Objects, dict[str, Any]]] = []
    policy = replace(POLICY, changes=simckpt.Scale(learning_rate=0.5) & simckpt.Call(function))
    with pytest.raises(error, match=message) as caught:
        train(store, policy=policy, in_place=in_place, seen=lambda _, objects: seen.append((objects, objects.bits())))
    assert "was going back from step" in caught.value.__notes__[-1]
    objects, bits = seen[-1]
    assert objects.bits() == bits
    assert objects.loop.clip == 0.2
    assert {each.kind for each in store.run("a").checkpoints(abandoned=True)} == {"save"}
    # a repaired program goes on, and back
    if not in_place:
        assert simckpt.supervise(train, store, until=130).loop.step == 130


def test_a_function_that_gives_a_module_other_shapes_is_told_even_if_it_cannot_be_undone(store) -> None:
    def widen(components, level: int) -> None:
        components["model"].bias = torch.nn.Parameter(torch.zeros(3))

    policy = replace(POLICY, changes=simckpt.Scale(learning_rate=0.5) & simckpt.Call(widen))
    with pytest.raises(HalfRestoredError, match=r"no later start of run 'a' could restore.*widen") as caught:
        train(store, policy=policy)
    assert caught.value.components == ("model",)
    assert {each.kind for each in store.run("a").checkpoints(abandoned=True)} == {"save"}


def test_a_disk_that_refuses_the_commit_leaves_the_head_and_the_next_start_goes_back(store, monkeypatch) -> None:
    undisturbed = simckpt.supervise(train, store, "undisturbed")
    disk = GatedDisk()
    monkeypatch.setattr(durable, "Disk", lambda: disk)
    broken = simckpt.Store(store.path)
    began: list[simckpt.Checkpointer] = []

    def seen(checkpointer: simckpt.Checkpointer, objects: Objects) -> None:
        began.append(checkpointer)
        if objects.loop.step == 130:
            checkpointer.wait()
            disk.failure = OSError(28, "full")

    with pytest.raises((StorageError, simckpt.SimckptError)) as caught:
        train(broken, seen=seen, save_when=simckpt.EverySteps(20))
    assert not isinstance(caught.value, RolledBack)
    disk.failure = None
    # whoever went on with the target in the objects and the old head on disk would bury one of them
    assert store.run("a").latest().step == 120
    assert store.run("a").latest().kind == "save"
    assert simckpt.supervise(train, store).bits() == undisturbed.bits()
    assert same_line(store.run("a"), store.run("undisturbed"))


def trained_in_place(
    store: simckpt.Store, policy: simckpt.RollbackPolicy, run: str = "a"
) -> tuple[simckpt.Checkpointer, Objects]:
    """Returns a checkpointer that rolls back in place, and its objects, at step 130."""
    started = store.start(run)
    objects = Objects(started.configure(ARGS, defaults=ARGS))
    checkpointer = started.checkpointer(
        objects.components, save_when=EACH, hyperparameters=objects.hyperparameters, rollback=policy, in_place=True
    )
    while objects.loop.step < 130:
        objects.advance()
        checkpointer.step(objects.loop.step, objects.metrics())
    checkpointer.wait()
    return checkpointer, objects


def test_where_the_commit_fails_all_is_put_back_and_the_loop_goes_on(store, monkeypatch) -> None:
    checkpointer, objects = trained_in_place(store, POLICY)
    undisturbed, bits = trained_in_place(store, POLICY, "undisturbed"), objects.bits()
    publish = checkpointer._saver._files.publish
    monkeypatch.setattr(
        checkpointer._saver._files, "publish", lambda *_: (_ for _ in ()).throw(StorageError("the disk refused"))
    )
    with pytest.raises(StorageError, match="the disk refused") as caught:
        checkpointer.step(130, {"loss": np.nan})
    assert "was going back from step 130: loss is nan" in caught.value.__notes__[0]
    assert objects.bits() == bits
    assert checkpointer.hyperparameters["learning_rate"] == HOT
    assert store.run("a").latest().step == 120
    monkeypatch.setattr(checkpointer._saver._files, "publish", publish)
    # nothing came of it: the loop may go on, and go back at another time
    for each, its in ((checkpointer, objects), undisturbed):
        its.advance()
        assert each.step(131, {"loss": np.nan}).kind == "rollback"
    assert objects.bits() == undisturbed[1].bits()
    store.run("a").latest()
    assert same_line(store.run("a"), store.run("undisturbed"))
    checkpointer._run.close()
    undisturbed[0]._run.close()


def test_rows_that_cannot_be_put_back_are_told_and_have_to_be_restored(store, monkeypatch) -> None:
    buffer, loop = replay.ReplayBuffer(200, Space(), Space(), num_envs=1, seed=1), simckpt.LoopState(step=0)
    run = store.start("a")
    checkpointer = run.checkpointer(
        {"replay": buffer, "loop": loop}, save_when=simckpt.EverySteps(10), rollback=POLICY_RESEED, in_place=True
    )
    for loop.step in range(1, 26):
        row = np.full((1, 3), loop.step, "float32")
        buffer.add(row, row, row[:, 0], np.array([False]), np.array([False]), row)
        checkpointer.step(loop.step, {"eval/return": [1.0, 2.0] * 5} if loop.step == 10 else {})
    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpointer._saver._files, "publish", lambda *_: (_ for _ in ()).throw(StorageError("the disk refused"))
        )
        with pytest.raises(HalfRestoredError, match=r"the disk refused.*start the same command again") as caught:
            checkpointer.step(25, {"loss": np.nan})
    assert caught.value.components == ("replay",)
    with pytest.raises(ConfigurationError, match="restore_latest"):
        checkpointer.step(26)
    assert checkpointer.restore_latest().step == 20
    assert (len(buffer), loop.step) == (20, 20)
    assert checkpointer.step(21, {"loss": np.nan}).kind == "rollback"
    run.close()


def test_the_possible_target_is_not_pruned(store) -> None:
    objects = simckpt.supervise(train, store, keep=simckpt.KeepLast(1))
    unpruned = simckpt.supervise(train, store, "b")
    assert objects.bits() == unpruned.bits()
    (head,) = [each for each in store.run("a").checkpoints(abandoned=True) if each.kind == "rollback"]
    assert head.step >= 90


def test_a_rollback_is_no_exception_for_a_post_mortem(store) -> None:
    with pytest.raises(RolledBack):
        train(store, save_when=EACH | OnException())
    assert "exception" not in [each.kind for each in store.run("a").checkpoints(abandoned=True)]


def test_a_signal_during_a_rollback_ends_the_process_after_the_commit(store, handler) -> None:
    def interrupt(components: dict[str, Any], level: int) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(SystemExit) as exit_:
        train(
            store,
            policy=replace(POLICY, changes=simckpt.Scale(learning_rate=0.5) & simckpt.Call(interrupt)),
            save_when=EACH | OnSignal("SIGUSR1", grace=60),
        )
    assert exit_.value.code == simckpt.EXIT_REQUEUE
    assert store.run("a").latest().kind == "rollback"


def test_a_signal_at_the_step_of_a_rollback_goes_back_first(store, handler) -> None:
    undisturbed = simckpt.supervise(train, store, "undisturbed")
    asked = []

    def seen(checkpointer: simckpt.Checkpointer, objects: Objects) -> None:
        if objects.loop.step == 140 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGUSR1))
            while checkpointer.stop_requested is None:
                os.sched_yield()

    save_when = EACH | OnSignal("SIGUSR1", grace=60)
    with pytest.raises(SystemExit):
        train(store, seen=seen, save_when=save_when)
    assert asked
    assert store.run("a").latest().kind == "rollback"
    assert simckpt.supervise(train, store, save_when=save_when).bits() == undisturbed.bits()


def test_a_loop_that_takes_the_changed_value_away_after_a_rollback_is_told(store) -> None:
    with pytest.raises(RolledBack):
        train(store)

    def seen(checkpointer: simckpt.Checkpointer, objects: Objects) -> None:
        objects.optimizer.param_groups[0]["lr"] = HOT

    with pytest.raises(OverrideNotAppliedError, match="'learning_rate'"):
        train(store, seen=seen)


def test_a_branch_goes_back_to_its_origin_with_its_overrides(store) -> None:
    train(store, "origin", until=100, policy=None)
    store.run("origin").latest().branch("b", {"gamma": 0.5})
    objects = simckpt.supervise(train, store, "b", save_when=simckpt.EverySteps(50))
    head = next(each for each in store.run("b").checkpoints() if each.kind == "rollback")
    assert head.parent == store.run("origin").at(step=100).id
    # nothing of its own was committed before the fall
    assert head.rollback["abandoned"] is None
    assert head.hyperparameters == {**ARGS, "gamma": 0.5, "learning_rate": HOT / 2}
    assert (objects.args["gamma"], objects.args["learning_rate"]) == (0.5, HOT / 2)


def drawn(objects: Objects) -> list[Any]:
    """Returns what one step of training has drawn, whatever the learning rate was."""
    bits = objects.bits()
    return [bits["sampler"], bits["torch"], bits["numpy"], objects.loop.observations.tobytes()]


@pytest.mark.filterwarnings("ignore::simckpt.BranchWarning")
@pytest.mark.parametrize(
    ("overrides", "rng", "in_place"),
    [
        ({}, "reseed", False),
        ({}, "reseed", True),
        ({"num_envs": 4}, "continue", True),
        ({"gamma": 0.5, "num_envs": 3}, "reseed", False),
    ],
    ids=str,
)
def test_a_branch_at_its_origin_again_has_what_it_began_with(store, overrides, rng: str, in_place: bool) -> None:
    train(store, "origin", until=100, policy=None)
    store.run("origin").latest().branch("b", overrides, rng=rng)
    first: list[list[Any]] = []

    def seen(checkpointer: simckpt.Checkpointer, objects: Objects) -> None:
        if objects.loop.step == 101:
            first.append(drawn(objects))

    policy = replace(POLICY, changes=simckpt.Scale(learning_rate=0.5))
    options = {"save_when": simckpt.EverySteps(50), "in_place": in_place}
    objects = simckpt.supervise(train, store, "b", until=150, policy=policy, seen=seen, **options)
    assert len(first) == 2
    assert first[0] == first[1]
    assert objects.loop.observations.shape == (overrides.get("num_envs", 2), 3)
    head = next(each for each in store.run("b").checkpoints() if each.kind == "rollback")
    assert head.parent == store.run("origin").at(step=100).id
    assert (head.rollback["changes"]["seed"] is None) == (rng == "continue")


@pytest.mark.filterwarnings("ignore::simckpt.BranchWarning")
def test_components_of_another_shape_than_the_origins_return_to_the_branchs_beginning(store) -> None:
    def run(name: str, num_envs: int, until: int) -> list[float]:
        with store.start(name) as started:
            args = started.configure({"num_envs": num_envs}, defaults={"num_envs": 2})
            sums, loop = torch.nn.Linear(args["num_envs"], 1), simckpt.LoopState(step=0)
            with torch.no_grad():
                sums.weight[:] = 7
            checkpointer = started.checkpointer(
                {"sums": sums, "loop": loop},
                save_when=simckpt.AtSteps(10),
                hyperparameters=simckpt.Hyperparameters(from_args={"num_envs"}, fresh={"num_envs": {"sums"}}),
                rollback=POLICY_RESEED,
            )
            with checkpointer:
                checkpointer.restore_latest()
                begun.append(sums.weight.flatten().tolist())
                while loop.step < until:
                    loop.step += 1
                    with torch.no_grad():
                        sums.weight += 1
                    falls = name == "b" and len(begun) == 2 and loop.step == 15
                    checkpointer.step(loop.step, {"loss": np.nan if falls else 0.5})
        return sums.weight.flatten().tolist()

    begun: list[list[float]] = []
    run("origin", 2, 10)
    store.run("origin").latest().branch("b", {"num_envs": 4})
    assert simckpt.supervise(run, "b", 2, 20) == [17.0] * 4
    assert begun == [[7.0] * 2, [7.0] * 4, [7.0] * 4]


def test_branches_that_draw_their_own_numbers_do_so_after_going_back_to_their_origin(store) -> None:
    train(store, "origin", until=100, policy=None)
    seeds = []
    for name in ("b", "c"):
        store.run("origin").latest().branch(name, {}, rng="reseed")
        with pytest.raises(RolledBack):
            train(store, name, save_when=simckpt.EverySteps(50))
        seeds.append(store.run(name).latest().rollback["changes"]["seed"])
    assert len(set(seeds)) == 2


def test_a_free_key_given_to_a_branch_is_in_force_again_at_its_origin(store) -> None:
    train(store, "origin", until=100, policy=None)
    store.run("origin").latest().branch("b", {"learning_rate": 0.2})
    with store.start("b") as run:
        objects = Objects(run.configure({**ARGS, "learning_rate": 0.3}, defaults=ARGS, free={"learning_rate"}))
        checkpointer = run.checkpointer(
            objects.components,
            save_when=simckpt.AtSteps(200),
            hyperparameters=objects.hyperparameters,
            rollback=POLICY_RESEED,
            in_place=True,
        )
        checkpointer.restore_latest()
        assert objects.optimizer.param_groups[0]["lr"] == 0.3
        for _ in range(2):
            objects.advance()
            checkpointer.step(objects.loop.step, {"loss": 1.0})
        assert checkpointer.step(objects.loop.step, {"loss": np.nan}).kind == "rollback"
        assert objects.optimizer.param_groups[0]["lr"] == 0.3


def test_what_was_abandoned_can_be_read_and_branched_from(store) -> None:
    simckpt.supervise(train, store)
    run = store.run("a")
    (rollback,) = [each for each in run.checkpoints() if each.kind == "rollback"]
    lost = store.checkpoint(rollback.rollback["abandoned"])
    assert lost["loop"]["step"] == lost.step
    lost.branch("lost", {"learning_rate": 0.01})
    assert train(store, "lost", until=lost.step + 20, policy=None).args["learning_rate"] == 0.01


def test_what_would_fail_at_night_is_refused_at_the_start(store, monkeypatch) -> None:
    run, objects = store.start("a"), Objects(ARGS)
    run.configure(ARGS)

    def make(changes, *, hyperparameters=objects.hyperparameters, **options) -> None:
        policy = replace(POLICY, changes=changes)
        run.checkpointer(
            objects.components, save_when=EACH, hyperparameters=hyperparameters, rollback=policy, **options
        )

    with monkeypatch.context() as patch, pytest.raises(ConfigurationError, match=r"simckpt\[rollback\]"):
        patch.setitem(sys.modules, "scipy", None)
        make(simckpt.Reseed())
    with pytest.raises(ConfigurationError, match="'lerning_rate'"):
        make(simckpt.Scale(lerning_rate=0.5))
    with pytest.raises(ConfigurationError, match="'replay'"):
        make(simckpt.KeepRows("replay"))
    with pytest.raises(OverrideNotAppliedError, match="'learning_rate'"):
        make(simckpt.Scale(learning_rate=0.5), hyperparameters=None)
    with pytest.raises(ConfigurationError, match="in place cannot change 'gamma'"):
        make(simckpt.Scale(gamma=0.5), in_place=True)
    make(simckpt.Scale(gamma=0.5))
    run.configure({**ARGS, "layers": [4]})
    with pytest.raises(ConfigurationError, match="room for 1792: layers"):
        make(simckpt.SetTo(layers=list(range(400))))
    with pytest.raises(ConfigurationError, match="cannot change 'num_envs'"):
        make(simckpt.SetTo(num_envs=4))
    with pytest.raises(ConfigurationError, match="rollback is a policy"):
        run.checkpointer(objects.components, save_when=EACH, rollback="eval/return")
    with pytest.raises(ConfigurationError, match="in_place"):
        run.checkpointer(objects.components, save_when=EACH, in_place=True)
    run.close()


@pytest.mark.parametrize("text", ["x", "\u044f", "\U0001f600"], ids=["ascii", "cyrillic", "beyond"])
def test_what_is_not_refused_at_the_start_has_room_in_the_record(store, text: str) -> None:
    loops = {"loop": simckpt.LoopState(step=0, prompt=""), text * 20: simckpt.LoopState(v=1)}

    run = store.start("a" * 100)
    run.configure({"prompt": ""}, defaults={"prompt": ""})

    def begin(length: int) -> simckpt.Checkpointer:
        changes = simckpt.SetTo(prompt=text * length) & simckpt.KeepRows(text * 20) & simckpt.Reseed()
        return run.checkpointer(
            loops,
            save_when=EACH,
            hyperparameters=simckpt.Hyperparameters({"prompt": (loops["loop"], "prompt")}),
            rollback=simckpt.RollbackPolicy("eval/return", changes=changes),
            in_place=True,
        )

    fits, too_long = 1, 2000
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        try:
            begin(length)
            fits = length
        except ConfigurationError:
            too_long = length
    with pytest.raises(ConfigurationError, match="has room for"):
        begin(too_long)
    checkpointer = begin(fits)
    checkpointer.save(10)
    # the reason is told as far as there is room
    save = checkpointer.step(20, {f"loss {text * 150}": np.nan})
    assert save.kind == "rollback"
    assert loops["loop"].prompt == text * fits
    assert save.wait().rollback["reason"].startswith(f"loss {text * 30}")
    run.close()


def explode(components, level: int) -> None:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize("change", [simckpt.Scale(learning_rate=0.5), simckpt.Reseed()], ids=repr)
def test_a_rollback_that_fails_leaves_what_the_branch_has_set_and_its_watch(store, change) -> None:
    def begin(name: str, policy: simckpt.RollbackPolicy | None):
        run, settings = store.start(name), {"clip": 1.0}
        args = run.configure({"learning_rate": HOT, "clip": 1.0}, defaults={"learning_rate": HOT, "clip": 1.0})
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=args["learning_rate"])
        hyperparameters = simckpt.Hyperparameters({"learning_rate": optimizer, "clip": (settings, "clip")})
        checkpointer = run.checkpointer(
            {"optimizer": optimizer, "loop": simckpt.LoopState(v=1)},
            save_when=simckpt.AtSteps(10),
            hyperparameters=hyperparameters,
            rollback=policy,
            in_place=policy is not None,
        )
        return run, checkpointer, optimizer, settings

    run, checkpointer, *_ = begin("a", None)
    checkpointer.save(10).branch("b", {"learning_rate": 0.5, "clip": 0.25})
    run.close()
    run, checkpointer, optimizer, settings = begin("b", replace(POLICY, changes=change & simckpt.Call(explode)))
    checkpointer.restore_latest()
    with pytest.raises(ZeroDivisionError):
        checkpointer.step(20, {"loss": np.nan})
    # no component holds it: nobody else would put it back
    assert (optimizer.param_groups[0]["lr"], settings) == (0.5, {"clip": 0.25})
    checkpointer.step(21)
    optimizer.param_groups[0]["lr"] = HOT
    optimizer.step()
    with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate' was set to 0\.5"):
        checkpointer.step(22)
    run.close()


@pytest.mark.filterwarnings("ignore::simckpt.BranchWarning", "ignore:.* replay one another:simckpt.UpkeepWarning")
@pytest.mark.parametrize("rng", ["continue", "reseed"])
@pytest.mark.parametrize("change", [simckpt.Reseed(), simckpt.SetTo(bonus=2.0)], ids=repr)
def test_what_began_afresh_is_reseeded_by_a_rollback_to_the_origin_if_that_says_so(store, rng: str, change) -> None:
    """What a branch has built itself returns to its beginning bit for bit, or draws other numbers at each try."""

    def begin(name: str):
        run = store.start(name)
        args = run.configure({"num_envs": 2, "bonus": 1.0}, defaults={"num_envs": 2, "bonus": 1.0})
        fresh, loop = (
            np.random.default_rng([7, args["num_envs"]]),
            simckpt.LoopState(bonus=1.0, rng=np.random.default_rng(8)),
        )
        hyperparameters = simckpt.Hyperparameters({"bonus": (loop, "bonus")}, fresh={"num_envs": {"fresh", "loop/rng"}})
        checkpointer = run.checkpointer(
            {"fresh": fresh, "loop": loop},
            save_when=simckpt.AtSteps(10),
            hyperparameters=hyperparameters,
            rollback=replace(POLICY, changes=change),
            in_place=True,
        )
        return run, checkpointer, fresh, loop

    def streams() -> list[int]:
        return [each.bit_generator.state["state"]["state"] for each in (fresh, loop.rng)]

    run, checkpointer, fresh, loop = begin("a")
    checkpointer.save(10).branch("b", {"num_envs": 3}, rng=rng)
    run.close()
    run, checkpointer, fresh, loop = begin("b")
    made = streams()
    checkpointer.restore_latest()
    seen = [streams()]
    assert seen == [made]
    for step in (20, 30):
        fresh.random(5), loop.rng.random(5)
        assert checkpointer.step(step, {"loss": np.nan}).wait().kind == "rollback"
        seen.append(streams())
    if isinstance(change, simckpt.Reseed):
        assert all(len(set(each)) == 3 for each in zip(*seen, strict=True))
    else:
        assert seen == [made] * 3
    run.close()


def test_the_history_of_evaluations_is_part_of_every_checkpoint(store) -> None:
    run, loop = store.start("a"), simckpt.LoopState(step=0)
    checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))
    checkpointer.step(1, {"eval/return": np.array([1.0, 2.0, 6.0]), "loss": 0.5, "none": []})
    checkpointer.step(1, {"eval/return": torch.tensor([2.0, 4.0])})
    checkpointer.step(2)
    checkpoint = checkpointer.step(3, {"eval/return": (5, 7), "eval/length": [3]}).wait()
    assert checkpoint.metrics == {"eval/return": 6.0, "eval/length": 3.0}
    found = [each.metrics for each in run.checkpoints() if each.step == 1]
    assert found == [{"eval/return": 3.0, "loss": 0.5}]
    run.close()
    run = store.start("a")
    checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))
    checkpointer.restore_latest()
    checkpoint = checkpointer.step(4, {"eval/return": [1.0]}).wait()
    assert decisions.evaluations_of(checkpoint["checkpointer"]) == {
        "eval/return": (
            Evaluation(1, (2.0, 4.0)),
            Evaluation(3, (5.0, 7.0)),
            Evaluation(4, (1.0,)),
        ),
        "eval/length": (Evaluation(3, (3.0,)),),
    }
    run.close()


SENSELESS = [
    *(np.zeros((2, 2)), np.zeros((1, 2)), torch.zeros(2, 2), [[1.0]], {1.0}, range(3), {"a": 1.0}, object()),
    *("high", np.array("high"), np.array(["high"]), ["high"], (None,), [[]], [{}]),
    *(1j, np.complex128(1), np.complex64(1), [1j], np.array([1 + 2j]), np.array(1j), np.zeros(2, "complex64")),
    *(torch.tensor(1j), torch.tensor([1 + 2j]), [torch.tensor(1j)], torch.tensor(1 + 0j)),
    *(np.array([3], "m8[s]"), np.timedelta64(3, "s"), np.array([3], "M8[s]"), np.datetime64(3, "s")),
    *(np.array([1, None], object), np.array(["high"], object), np.array([1j], object)),
]


@pytest.mark.parametrize("values", SENSELESS, ids=lambda value: type(value).__name__)
def test_what_is_no_real_number_is_refused_as_a_metric_by_name(values: Any) -> None:
    with pytest.raises(ConfigurationError, match="'eval/return'") as caught:
        decisions.checked_metrics({"loss": 1.0, "eval/return": values})
    assert caught.value.keys == ("eval/return",)


@pytest.mark.parametrize(
    ("value", "mean", "episodes"),
    [
        (np.float32(0.5), 0.5, None),
        (np.int64(3), 3.0, None),
        (np.array(2.5), 2.5, None),
        (torch.tensor(2.5), 2.5, None),
        (True, 1.0, None),
        ([np.float32(0.5), 1, np.float64(1.5)], 1.0, (0.5, 1.0, 1.5)),
        (np.array([1, 3], "uint8"), 2.0, (1.0, 3.0)),
        (np.array([1, 3.0], object), 2.0, (1.0, 3.0)),
        (torch.tensor([1.0, 3.0], dtype=torch.bfloat16), 2.0, (1.0, 3.0)),
        ([torch.tensor(1.0), torch.tensor(3)], 2.0, (1.0, 3.0)),
    ],
    ids=repr,
)
def test_numbers_of_any_library_are_metrics(value: Any, mean: float, episodes: tuple[float, ...] | None) -> None:
    metrics, returns = decisions.checked_metrics({"eval/return": value})
    assert metrics == {"eval/return": mean}
    assert returns == ({} if episodes is None else {"eval/return": episodes})
    assert all(type(each) is float for each in (*metrics.values(), *returns.get("eval/return", ())))


def test_a_file_is_laid_out_anew_only_when_the_history_outgrows_its_room() -> None:
    shapes = set()
    memory = decisions.Decisions()
    for step in range(1000):
        memory.note(step, {"eval/return": [0.5] * 10})
        tree = memory.state_dict()["evaluations"]["eval/return"]
        shapes.add((tree["steps"].shape, tree["returns"].shape))
    # 16 to 1,024 evaluations and 128 to 16,384 returns in powers of two, the two growing at different steps
    assert len(shapes) <= 7 + 8
