"""Branches in the training loop: what the first start restores, and that overrides are in force."""

# ruff: noqa: PT012 - what is tested is the body of a context

import warnings

import numpy as np
import pytest
import torch
from rollback_loops import ARGS, HOT, Objects, train

import simckpt
from simckpt.comparison import compare
from simckpt.errors import ConfigurationError, OverrideNotAppliedError, StateMismatchError


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


@pytest.fixture
def origin(store) -> simckpt.Run:
    """A run of 60 steps with checkpoints at 20, 40 and 60."""
    train(store, "origin", until=60, policy=None)
    return store.run("origin")


def begin(store: simckpt.Store, run: str, **options) -> tuple[simckpt.Run, simckpt.Checkpointer, Objects]:
    started = store.start(run)
    objects = Objects(started.configure(ARGS, defaults=ARGS))
    options.setdefault("hyperparameters", objects.hyperparameters)
    return started, started.checkpointer(objects.components, save_when=simckpt.EverySteps(20), **options), objects


def test_a_branch_without_overrides_equals_the_origin_that_goes_on(store, origin) -> None:
    origin.at(step=40).branch("twin", rng="continue")
    went_on, branched = train(store, "origin", until=120, policy=None), train(store, "twin", until=120, policy=None)
    assert branched.bits() == went_on.bits()
    pairs = [(store.run("twin").at(step=step), store.run("origin").at(step=step)) for step in (60, 80, 100, 120)]
    assert [one.step for one, two in pairs if not compare(one, two).identical] == []
    assert [each.step for each in store.run("twin").checkpoints()] == [60, 80, 100, 120]


def test_the_first_commit_of_a_branch_has_the_origin_as_its_parent(store, origin) -> None:
    origin.at(step=40).branch("b", {"learning_rate": 0.01})
    train(store, "b", until=80, policy=None)
    first, second = store.run("b").checkpoints()
    assert (first.parent, second.parent) == (origin.at(step=40).id, first.id)
    assert first.hyperparameters["learning_rate"] == 0.01


def test_an_override_acts_and_the_rest_is_the_origins(store, origin) -> None:
    origin.at(step=40).branch("b", {"learning_rate": 0.01})
    run, checkpointer, objects = begin(store, "b")
    restored = checkpointer.restore_latest()
    assert (restored.id, objects.loop.step) == (origin.at(step=40).id, 40)
    assert objects.optimizer.param_groups[0]["lr"] == 0.01
    assert objects.optimizer.state_dict()["state"][0]["step"] == 40
    assert checkpointer.hyperparameters["learning_rate"] == 0.01
    run.close()


def test_a_branch_of_a_branch_starts_from_the_branch(store, origin) -> None:
    origin.at(step=40).branch("b", {"learning_rate": 0.01})
    train(store, "b", until=60, policy=None)
    store.run("b").latest().branch("c", {"gamma": 0.5})
    objects = train(store, "c", until=80, policy=None)
    assert (objects.args["gamma"], objects.args["learning_rate"]) == (0.5, 0.01)
    assert objects.optimizer.param_groups[0]["lr"] == 0.01
    assert store.run("c").latest().parent == store.run("b").at(step=60).id


def test_a_branch_that_forgets_to_restore_cannot_start_anew(store, origin) -> None:
    origin.latest().branch("b")
    run, checkpointer, _ = begin(store, "b")
    with pytest.raises(ConfigurationError, match=r"restore_latest\(\)"):
        checkpointer.step(1)
    run.close()


def test_a_branch_that_died_before_its_first_commit_starts_from_the_origin_again(store, origin) -> None:
    origin.at(step=40).branch("b", {"learning_rate": 0.01})
    run, checkpointer, objects = begin(store, "b")
    checkpointer.restore_latest()
    for _ in range(10):
        objects.advance()
        checkpointer.step(objects.loop.step)
    run.close()
    again = train(store, "b", until=100, policy=None)
    origin.at(step=40).branch("undisturbed", {"learning_rate": 0.01})
    assert again.bits() == train(store, "undisturbed", until=100, policy=None).bits()


def test_a_resumed_branch_equals_the_undisturbed_one(store, origin) -> None:
    for name in ("killed", "undisturbed"):
        origin.at(step=40).branch(name, {"learning_rate": 0.01, "num_envs": 3})
    with pytest.warns(simckpt.BranchWarning):
        train(store, "killed", until=73, policy=None)
    with pytest.warns(simckpt.BranchWarning):
        undisturbed = train(store, "undisturbed", until=120, policy=None)
    # its own checkpoints have the new shapes: nothing is dropped and nothing warned of
    assert train(store, "killed", until=120, policy=None).bits() == undisturbed.bits()


def test_reseeding_gives_streams_of_their_own_and_the_same_each_time(store, origin) -> None:
    checkpoint = origin.at(step=40)
    ends = {}
    for name in ("one", "two"):
        checkpoint.branch(name, rng="reseed")
        run, checkpointer, objects = begin(store, name)
        checkpointer.restore_latest()
        ends[name] = objects.bits()
        run.close()
        run, checkpointer, objects = begin(store, name)
        checkpointer.restore_latest()
        assert objects.bits() == ends[name]
        run.close()
    checkpoint.restore(objects.components)
    ends["origin"] = objects.bits()
    for stream in ("sampler", "torch", "numpy"):
        assert len({str(each[stream]) for each in ends.values()}) == 3
    for rest in ("model", "momenta", "learning rate", "loop"):
        assert ends["one"][rest] == ends["two"][rest] == ends["origin"][rest]


def test_an_override_that_nothing_declares_is_refused_by_name_and_nothing_is_touched(store, origin) -> None:
    origin.latest().branch("b", {"learning_rate": 0.01})
    for hyperparameters in (None, simckpt.Hyperparameters(from_args={"gamma"})):
        run, checkpointer, objects = begin(store, "b", hyperparameters=hyperparameters)
        before = objects.bits()
        with pytest.raises(OverrideNotAppliedError, match="'learning_rate'") as caught:
            checkpointer.restore_latest()
        assert caught.value.key == "learning_rate"
        assert objects.bits() == before
        run.close()


def test_an_override_that_the_loop_takes_away_is_told_by_name(store, origin) -> None:
    origin.latest().branch("b", {"learning_rate": 0.01})
    run, checkpointer, objects = begin(store, "b")
    checkpointer.restore_latest()
    objects.optimizer.param_groups[0]["lr"] = HOT
    objects.advance()
    with pytest.raises(OverrideNotAppliedError) as caught:
        checkpointer.step(objects.loop.step)
    assert (caught.value.key, caught.value.wanted, caught.value.found) == ("learning_rate", 0.01, HOT)
    run.close()


def test_an_override_survives_the_scheduler_that_is_bound(store) -> None:
    def objects_of(args):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=args["learning_rate"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        components = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return components, simckpt.Hyperparameters({"learning_rate": [optimizer, scheduler]})

    def go_on(run: simckpt.Run, until: int) -> list[float]:
        components, hyperparameters = objects_of(run.configure({"learning_rate": 0.8}, defaults={"learning_rate": 0.8}))
        checkpointer = run.checkpointer(components, save_when=simckpt.EverySteps(1), hyperparameters=hyperparameters)
        restored = checkpointer.restore_latest()
        rates = []
        for step in range(restored.step + 1 if restored else 1, until + 1):
            components["model"](torch.ones(1, 2)).sum().backward()
            rates.append(components["optimizer"].param_groups[0]["lr"])
            components["optimizer"].step()
            components["scheduler"].step()
            checkpointer.step(step)
        run.close()
        return rates

    assert go_on(store.start("a"), 2) == [0.8, 0.4]
    store.run("a").latest().branch("b", {"learning_rate": 8.0})
    # the schedule goes on from the new base: 8 * 0.5**2
    assert go_on(store.start("b"), 5) == [2.0, 1.0, 0.5]


def test_another_number_of_envs_is_refused_unless_the_program_says_what_begins_anew(store) -> None:
    def started(name: str, hyperparameters: simckpt.Hyperparameters, num_envs: int):
        run, running = store.start(name), np.zeros((num_envs, 3))
        run.configure({"num_envs": 2}, defaults={"num_envs": 2})
        options = {"save_when": simckpt.EverySteps(1), "hyperparameters": hyperparameters}
        return run, run.checkpointer({"running": running}, **options), running

    run, checkpointer, running = started("a", simckpt.Hyperparameters(), 2)
    checkpointer.save(1).branch("b", {"num_envs": 5})
    run.close()
    run, checkpointer, running = started("b", simckpt.Hyperparameters(from_args={"num_envs"}), 5)
    running[:] = 7
    with pytest.raises(StateMismatchError, match=r"running: saved as float64 \(2, 3\), live is float64 \(5, 3\)"):
        checkpointer.restore_latest()
    assert (running == 7).all()
    run.close()
    run, checkpointer, running = started("b", simckpt.Hyperparameters(fresh={"num_envs": {"running"}}), 5)
    running[:] = 7
    with pytest.warns(simckpt.BranchWarning, match=r"'num_envs'.*'running'"):
        assert checkpointer.restore_latest().step == 1
    assert (running == 7).all()
    assert checkpointer.step(2).wait()["running"].shape == (5, 3)
    run.close()


def test_what_is_dropped_for_another_number_of_envs_is_named(store, origin) -> None:
    origin.latest().branch("b", {"num_envs": 5})
    run, checkpointer, objects = begin(store, "b")
    with pytest.warns(simckpt.BranchWarning, match=r"'num_envs'.*'loop/observations'") as told:
        checkpointer.restore_latest()
    assert told[0].filename == __file__
    assert objects.loop.step == 60
    np.testing.assert_array_equal(objects.loop.observations, np.zeros((5, 3)))
    run.close()


def test_a_warning_that_is_an_error_leaves_a_branch_untouched(store, origin) -> None:
    origin.latest().branch("b", {"num_envs": 5})
    run, checkpointer, objects = begin(store, "b")
    before = objects.bits()
    with pytest.raises(simckpt.BranchWarning):
        checkpointer.restore_latest()
    assert objects.bits() == before
    run.close()


def test_a_branch_starts_from_a_post_mortem(store, origin) -> None:
    run, checkpointer, objects = begin(store, "origin")
    run.close()
    run = store.start("origin")
    objects = Objects(run.configure(ARGS))
    checkpointer = run.checkpointer(objects.components, save_when=simckpt.policies.OnException())
    with pytest.raises(ZeroDivisionError), checkpointer:
        checkpointer.restore_latest()
        objects.advance()
        checkpointer.step(objects.loop.step)
        raise ZeroDivisionError
    run.close()
    (found,) = [each for each in store.run("origin").checkpoints(abandoned=True) if each.kind == "exception"]
    found.branch("b")
    assert train(store, "b", until=80, policy=None).bits() == train(store, "origin", until=80, policy=None).bits()


def test_an_override_that_equals_the_origins_value_drops_nothing(store, origin) -> None:
    origin.at(step=40).branch("b", {"num_envs": 2, "learning_rate": 0.01})
    run, checkpointer, objects = begin(store, "b")
    saved = origin.at(step=40)["loop"]["observations"]
    checkpointer.restore_latest()
    np.testing.assert_array_equal(objects.loop.observations, saved)
    assert objects.optimizer.param_groups[0]["lr"] == 0.01
    run.close()


def shaped(store: simckpt.Store, name: str, args: dict, fresh: dict, make, **controls):
    """Starts a run whose components follow from its arguments; returns it, its checkpointer and the components."""
    run = store.start(name)
    components = make(run.configure(args, defaults=args))
    others = set(args) - set(fresh) - set(controls)
    hyperparameters = simckpt.Hyperparameters(
        {key: (components[place], key) for key, place in controls.items()}, from_args=others, fresh=fresh
    )
    options = {"save_when": simckpt.EverySteps(1), "hyperparameters": hyperparameters}
    return run, run.checkpointer(components, **options), components


def many(args: dict) -> dict:
    envs, hidden = args["num_envs"], args["hidden"]
    return {
        "model": torch.nn.Linear(3, hidden),
        "loop": simckpt.LoopState(
            step=0,
            observations=np.zeros((envs, 3), np.float32),
            memory={"hidden": torch.zeros(1, envs, hidden)},
            rollout=np.zeros((16 * envs, 3)),
            returns=[0.0] * envs,
            history=np.zeros(0),
            last=None,
            clip=args["clip"],
        ),
        "statistics": Statistics(envs),
    }


class Statistics:
    """Somebody's own class, which takes whatever it is given."""

    def __init__(self, envs: int) -> None:
        self.means = np.zeros(envs)

    def state_dict(self) -> dict:
        return {"means": self.means}

    def load_state_dict(self, state: dict) -> None:
        self.means = state["means"]


SHAPED = {"num_envs": 2, "hidden": 4, "clip": 0.2}
OF_ENVS = {"loop/observations", "loop/memory", "loop/rollout", "loop/returns", "statistics"}


def trained(store: simckpt.Store, make=many, args=SHAPED) -> simckpt.Checkpoint:
    run, checkpointer, components = shaped(store, "a", args, {}, make)
    if "loop" in components:
        components["loop"].history = np.arange(7.0)
    with run, checkpointer:
        return checkpointer.save(1)


@pytest.mark.parametrize("forgotten", sorted(OF_ENVS))
def test_what_fresh_forgets_is_named_with_the_override_and_what_would_declare_it(store, forgotten: str) -> None:
    trained(store).branch("b", {"num_envs": 5, "clip": 0.1})
    run, checkpointer, components = shaped(store, "b", SHAPED, {"num_envs": OF_ENVS - {forgotten}}, many, clip="loop")
    with pytest.raises(StateMismatchError) as caught:
        checkpointer.restore_latest()
    (problem,) = caught.value.problems
    assert problem.startswith(forgotten)
    assert "The run changes 'num_envs' (2 -> 5). Where other shapes follow" in str(caught.value)
    assert (
        f"add what begins anew to the fresh of simckpt.Hyperparameters, as in fresh={{'num_envs': {{{forgotten!r}}}}}"
        in str(caught.value)
    )
    # nothing was touched
    assert (components["loop"].observations.shape, components["loop"].clip) == ((5, 3), 0.1)
    run.close()


def test_all_that_a_number_of_envs_shapes_is_carried_over_once_it_is_declared(store) -> None:
    trained(store).branch("b", {"num_envs": 5})
    run, checkpointer, components = shaped(store, "b", SHAPED, {"num_envs": OF_ENVS}, many)
    with pytest.warns(simckpt.BranchWarning, match="'num_envs'.*" + ".*".join(sorted(OF_ENVS))):
        checkpointer.restore_latest()
    loop = components["loop"]
    assert (loop.observations.shape, loop.rollout.shape, len(loop.returns)) == ((5, 3), (80, 3), 5)
    # what only grows is no matter of shapes
    assert loop.history.tolist() == np.arange(7.0).tolist()
    run.close()


def test_a_key_that_changes_shapes_and_is_declared_as_read_alone_is_refused_with_the_way_out(store) -> None:
    trained(store).branch("b", {"num_envs": 5})
    run, checkpointer, components = shaped(store, "b", SHAPED, {}, many)
    with pytest.raises(StateMismatchError, match=r"'num_envs' \(2 -> 5\).*fresh=\{'num_envs': ") as caught:
        checkpointer.restore_latest()
    named = {problem.split(":")[0] for problem in caught.value.problems}
    assert named == {"loop/observations", "loop/memory/hidden", "loop/rollout", "loop/returns", "statistics/means"}
    assert components["loop"].observations.shape == (5, 3)
    run.close()


def test_a_hidden_size_is_refused_with_the_way_out(store) -> None:
    trained(store).branch("b", {"hidden": 8})
    run, checkpointer, _ = shaped(store, "b", SHAPED, {}, many)
    with pytest.raises(
        StateMismatchError, match=r"'hidden' \(4 -> 8\).*fresh=\{'hidden': \{'loop/memory', 'model'\}\}"
    ):
        checkpointer.restore_latest()
    run.close()
    run, checkpointer, components = shaped(store, "b", SHAPED, {"hidden": {"loop/memory", "model"}}, many)
    with pytest.warns(simckpt.BranchWarning, match="'hidden'.*'loop/memory', 'model'"):
        assert checkpointer.restore_latest().step == 1
    assert components["loop"].history.tolist() == np.arange(7.0).tolist()
    run.close()


def test_a_component_that_only_an_override_makes_is_refused_with_the_way_out(store) -> None:
    def make(args: dict) -> dict:
        extra = {"curiosity": np.zeros(3)} if args["curious"] else {}
        return {"running": np.zeros(3), **extra}

    trained(store, make, {"curious": False}).branch("b", {"curious": True})
    args = {"curious": False}
    run, checkpointer, _ = shaped(store, "b", args, {}, make)
    with pytest.raises(StateMismatchError, match=r"(?s)'curiosity' is not in.*fresh=\{'curious': \{'curiosity'\}\}"):
        checkpointer.restore_latest()
    run.close()
    run, checkpointer, _ = shaped(store, "b", args, {"curious": {"curiosity"}}, make)
    with pytest.warns(simckpt.BranchWarning, match="'curiosity' begin"):
        checkpointer.restore_latest()
    run.close()


def test_another_env_is_refused_where_the_loop_keeps_an_observation_of_the_old_one(store) -> None:
    def make(args: dict) -> dict:
        size = {"Ant-v5": 105, "Hopper-v5": 11}[args["env"]]
        return {"loop": simckpt.LoopState(observations=np.zeros((2, size)), history=np.zeros(0))}

    args = {"env": "Ant-v5"}
    trained(store, make, args).branch("b", {"env": "Hopper-v5"})
    run, checkpointer, _ = shaped(store, "b", args, {}, make)
    with pytest.raises(StateMismatchError, match=r"'env' \('Ant-v5' -> 'Hopper-v5'\).*\{'loop/observations'\}"):
        checkpointer.restore_latest()
    run.close()


def test_a_state_that_does_not_fit_for_another_reason_is_not_blamed_on_a_rate(store) -> None:
    trained(store).branch("b", {"clip": 0.1})
    run, checkpointer, _ = shaped(store, "b", SHAPED, {}, lambda args: many({**args, "hidden": 6}), clip="loop")
    with pytest.raises(StateMismatchError, match="model") as caught:
        checkpointer.restore_latest()
    assert "fresh" not in str(caught.value)
    run.close()


def test_a_free_number_of_envs_that_is_given_later_is_carried_over_as_declared(store) -> None:
    trained(store)
    run = store.start("a")
    components = many(run.configure({**SHAPED, "num_envs": 5}, defaults=SHAPED, free={"num_envs"}))
    hyperparameters = simckpt.Hyperparameters(fresh={"num_envs": OF_ENVS})
    checkpointer = run.checkpointer(
        components, save_when=simckpt.EverySteps(1), hyperparameters=hyperparameters, background=None
    )
    with pytest.warns(simckpt.BranchWarning, match="'num_envs'"):
        checkpointer.restore_latest()
    assert components["loop"].observations.shape == (5, 3)
    assert components["loop"].history.tolist() == np.arange(7.0).tolist()
    checkpointer.save(2)
    # from now on the state has that number
    assert checkpointer.restore_latest().step == 2
    run.close()


def test_a_free_key_that_is_given_after_a_rollback_wins_over_what_the_rollback_set(store) -> None:
    with pytest.raises(simckpt.RolledBack):
        train(store, "a")
    head = store.run("a").latest()
    assert (head.kind, head.hyperparameters["learning_rate"]) == ("rollback", HOT / 2)
    for given, expected in ((ARGS["learning_rate"], HOT / 2), (0.02, 0.02)):
        run = store.start("a")
        objects = Objects(run.configure({**ARGS, "learning_rate": given}, defaults=ARGS, free={"learning_rate"}))
        checkpointer = run.checkpointer(
            objects.components, save_when=simckpt.EverySteps(20), hyperparameters=objects.hyperparameters
        )
        assert checkpointer.restore_latest() == head
        assert objects.optimizer.param_groups[0]["lr"] == expected
        assert checkpointer.hyperparameters["learning_rate"] == expected
        objects.advance()
        checkpointer.step(objects.loop.step)
        run.close()


def test_what_a_rollback_changed_is_watched_by_later_starts(store) -> None:
    with pytest.raises(simckpt.RolledBack):
        train(store, "a")
    train(store, "a", until=140, policy=None)
    assert store.run("a").latest().kind == "save"
    run, checkpointer, objects = begin(store, "a")
    checkpointer.restore_latest()
    objects.optimizer.param_groups[0]["lr"] = HOT
    objects.advance()
    with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate' was restored as 0\.05, but .* has 0\.1"):
        checkpointer.step(objects.loop.step)
    run.close()


def history_of(store: simckpt.Store, name: str, *, device: str, until: int) -> list[float]:
    """Trains a run whose loop keeps a list that grows, and whose arguments hold its name; returns that list."""
    with store.start(name) as run:
        args = {"gamma": 0.9, "env": "Ant-v5"}
        run.configure({**args, "device": device, "run": name}, defaults=args, free={"device"})
        loop = simckpt.LoopState(step=0, history=[0.0])
        hyperparameters = simckpt.Hyperparameters(from_args={"gamma", "env"})
        with run.checkpointer(
            {"loop": loop}, save_when=simckpt.EverySteps(1), hyperparameters=hyperparameters, background=None
        ) as checkpointer:
            checkpointer.restore_latest()
            while loop.step < until:
                loop.step += 1
                loop.history.append(float(loop.step))
                checkpointer.step(loop.step)
    return loop.history


@pytest.mark.parametrize("device", ["cpu", "cuda"], ids=["same-device", "free-key-given"])
@pytest.mark.parametrize("overrides", [{}, {"gamma": 0.5}, {"env": "Hopper-v5"}], ids=str)
def test_a_list_that_has_grown_is_restored_whatever_else_is_called_otherwise(
    store, overrides: dict, device: str
) -> None:
    history_of(store, "a", device="cpu", until=4)
    store.run("a").latest().branch("b", overrides)
    assert history_of(store, "b", device=device, until=6) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_overrides_that_change_sizes_together_are_refused_and_each_is_named(store) -> None:
    def make(args: dict) -> dict:
        shape = args["num_steps"], args["num_envs"], 3
        loop = simckpt.LoopState(step=0, buffer=np.zeros(shape), flat=np.zeros(shape[0] * shape[1]))
        return {"loop": loop, "running": np.zeros(shape[1])}

    args = {"gamma": 0.9, "num_envs": 2, "num_steps": 128}
    trained(store, make, args).branch("b", {"gamma": 0.5, "num_envs": 4, "num_steps": 192})
    run, checkpointer, _ = shaped(store, "b", args, {}, make)
    with pytest.raises(StateMismatchError) as caught:
        checkpointer.restore_latest()
    named = {problem.split(":")[0] for problem in caught.value.problems}
    assert named == {"loop/buffer", "loop/flat", "running"}
    both = {"loop/buffer", "loop/flat"}
    fresh = "{'num_envs': {'loop/buffer', 'loop/flat', 'running'}, 'num_steps': {'loop/buffer', 'loop/flat'}}"
    assert f"as in fresh={fresh}: " in str(caught.value)
    run.close()
    # what the advice says works
    run, checkpointer, components = shaped(store, "b", args, {"num_envs": {*both, "running"}, "num_steps": both}, make)
    with pytest.warns(simckpt.BranchWarning, match="'num_envs', 'num_steps'"):
        assert checkpointer.restore_latest().step == 1
    assert components["loop"].buffer.shape == (192, 4, 3)
    run.close()


def test_a_value_that_is_no_number_inside_of_a_dict_has_not_changed(store) -> None:
    args = {"options": {"limit": float("nan")}}

    def make(args: dict) -> dict:
        return {"loop": simckpt.LoopState(step=0, observations=1)}

    def observations(name: str) -> int:
        run, checkpointer, components = shaped(store, name, args, {"options": {"loop/observations"}}, make)
        with run, checkpointer:
            checkpointer.restore_latest()
            found, components["loop"].observations = components["loop"].observations, 99
            checkpointer.save(1)
        return found

    assert observations("a") == 1
    store.run("a").latest().branch("b")
    assert (observations("a"), observations("b")) == (99, 99)


@pytest.mark.parametrize("how", ["step", "save", "end"])
def test_what_no_step_has_used_yet_is_told_of_the_line_of_the_program(store, origin, how: str) -> None:
    origin.latest().branch("b", {"learning_rate": 0.01})
    run, checkpointer, _ = begin(store, "b", background=None)
    with warnings.catch_warnings(record=True) as told, checkpointer:
        warnings.simplefilter("always")
        checkpointer.restore_latest()
        if how == "step":
            checkpointer.step(80)
        elif how == "save":
            checkpointer.save(80)
        else:
            checkpointer.step(61)
    assert {each.filename for each in told} == {__file__}
    # at the save, which the end is no second time, and at the end
    assert [" saves step " in str(each.message) for each in told] == ([False] if how == "end" else [True, False])
    run.close()
