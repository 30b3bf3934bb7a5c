"""The training script of the origin runs a branch, and a run after a rollback, with an unchanged command line."""

import argparse
import dataclasses

import pytest
from branch_helpers import save

import simckpt
from simckpt.errors import ConfigurationError, ConflictError, RunLockedError


@dataclasses.dataclass(frozen=True)
class Args:
    learning_rate: float = 3e-4
    gamma: float = 0.99
    layers: tuple[int, ...] = (64, 64)
    total_steps: int = 1000


COMMAND_LINE = Args(learning_rate=1e-3, total_steps=5000)  # what the origin was started with
FREE = {"total_steps"}


def origin_of(store: simckpt.Store, args: Args = COMMAND_LINE) -> simckpt.Checkpoint:
    with store.start("a") as run:
        run.configure(args, free=FREE)
        return save(run, 10)


def configured(store: simckpt.Store, name: str, args: Args = COMMAND_LINE, free=FREE) -> Args:
    with store.start(name) as run:
        return run.configure(args, free=free)


def rolled_back(store: simckpt.Store, name: str, **values: float) -> simckpt.Checkpoint:
    """Commits a rollback of a run to its head, with other hyperparameters."""
    with store.start(name) as run:
        run.configure(COMMAND_LINE, free=FREE)
        run.change_hyperparameters(values)
        head = run.latest()
        told = {"abandoned": head.id, "level": 1, "changes": {"hyperparameters": dict(values)}}
        return save(run, head.step, parent=head, kind="rollback", rollback=told)


@pytest.mark.parametrize("args", [COMMAND_LINE, Args(), Args(learning_rate=1e-4)], ids=["same", "none", "override"])
def test_an_override_wins_over_the_command_line_of_the_origin(tmp_path, args: Args) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store).branch("b", {"learning_rate": 1e-4})
    for _ in range(2):
        found = configured(store, "b", args)
        assert (found.learning_rate, found.gamma, found.total_steps) == (1e-4, 0.99, args.total_steps)


def test_another_wish_contradicts_a_branch_before_its_first_commit(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store).branch("b", {"learning_rate": 1e-4})
    with pytest.raises(ConfigurationError, match=r"(?s)learning_rate: .*by its branch.*gamma") as caught:
        configured(store, "b", Args(learning_rate=5e-4, gamma=0.9))
    assert caught.value.keys == ("learning_rate", "gamma")


def test_an_override_of_a_free_key_wins_unless_another_value_is_wished_for(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store).branch("b", {"total_steps": 2000})
    assert configured(store, "b").total_steps == 2000
    assert configured(store, "b", Args()).total_steps == 2000
    assert configured(store, "b", Args(total_steps=2000)).total_steps == 2000
    assert configured(store, "b", Args(total_steps=9000)).total_steps == 9000


def test_a_key_that_holds_the_name_of_the_run_may_differ_in_a_branch(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")

    def configure(name: str, **others) -> dict:
        with store.start(name) as run:
            args = run.configure({"name": name, "env": "Ant", **others})
            save(run, 10)
            return args

    configure("a")
    store.run("a").latest().branch("b")
    assert configure("b") == {"name": "b", "env": "Ant"}
    store.run("b").latest().branch("c")
    assert configure("c") == {"name": "c", "env": "Ant"}
    with pytest.raises(ConfigurationError, match="env"):
        configure("c", env="c")


@pytest.mark.parametrize("renamed", [False, True])
def test_a_key_that_holds_the_name_of_the_run_may_differ_in_an_import_and_its_branches(tmp_path, renamed: bool) -> None:
    store, other = simckpt.Store(tmp_path / "s"), simckpt.Store(tmp_path / "t")
    with store.start("a") as run:
        run.configure({"name": "a", "env": "Ant"})
        origin = save(run, 10)
    if renamed:
        other.start("a").close()
    copy = other.import_checkpoint(origin)
    copy.branch("b")
    for name in ("b", copy.run):
        with other.start(name) as run:
            assert run.configure({"name": name, "env": "Ant"}) == {"name": name, "env": "Ant"}
            save(run, 20, parent=origin)
        with other.start(name) as run:
            assert run.configure({"name": name, "env": "Ant"}) == {"name": name, "env": "Ant"}
            with pytest.raises(ConfigurationError, match="name: the run has"):
                run.configure({"name": "c", "env": "Ant"})


def test_a_key_may_hold_a_list_beside_the_name(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    with store.start("a") as run:
        run.configure({"layers": [1, 2]})
        save(run, 10).branch("b")
    with store.start("b") as run, pytest.raises(ConfigurationError, match="layers"):
        run.configure({"layers": "b"})


def test_a_free_key_that_was_given_at_a_start_which_rolled_back_before_it_saved_is_no_wish(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    first = origin_of(store)
    free, given = {*FREE, "learning_rate"}, dataclasses.replace(COMMAND_LINE, learning_rate=2e-3)
    with store.start("a") as run:
        run.configure(given, free=free)
        start = run.start_id()
        run.change_hyperparameters({"learning_rate": 1e-4})
        told = {"abandoned": first.id, "level": 1, "changes": {"hyperparameters": {"learning_rate": 1e-4}}}
        save(run, 10, parent=first, kind="rollback", rollback={**told, "start": start})
    assert configured(store, "a", given, free=free).learning_rate == 1e-4
    assert configured(store, "a", Args(learning_rate=5e-3), free=free).learning_rate == 5e-3


def test_what_fails_before_the_checkpointer_is_made_locks_no_run(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    run = store.start("a")
    for bad in (Args(gamma=0.5), Args(learning_rate="fast"), 5):
        with pytest.raises(ConfigurationError):
            run.configure(bad)
        # the same object with better arguments
        assert run.configure(Args()).learning_rate == 1e-3
    # or the cell of a notebook once more, while its traceback keeps the first object alive
    with store.start("a") as again:
        assert again.configure(Args()).learning_rate == 1e-3
        with pytest.raises(ConflictError, match="started once more"):
            run.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1))
        run.close()
        with pytest.raises(RunLockedError, match=r"run\.close\(\).*with store\.start\('a'\) as run"):
            store.start("a")
    with pytest.raises(ConfigurationError, match="to read"):
        run.configure(Args())
    # nor one that nobody can close any more
    store.start("a")
    writing = store.start("a")
    writing.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1))
    with pytest.raises(RunLockedError):
        store.start("a")
    writing.close()
    store.start("a").close()


def test_a_failed_configure_beside_a_checkpointer_keeps_the_claim(tmp_path) -> None:
    with simckpt.Store(tmp_path / "s").start("a") as run:
        run.configure(Args())
        checkpointer = run.checkpointer(
            {"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1), background=None
        )
        checkpointer.save(1)
        with pytest.raises(ConfigurationError):
            run.configure(Args(gamma=0.5))
        checkpointer.save(2)


def test_an_override_keeps_the_type_of_the_arguments(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store).branch("b", {"layers": [32]})
    assert configured(store, "b").layers == (32,)


def test_a_namespace_without_defaults_is_configured_by_an_unchanged_command_line(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    values = {"learning_rate": 1e-3, "gamma": 0.99}
    with store.start("a") as run:
        run.configure(argparse.Namespace(**values))
        origin = save(run, 10)
    origin.branch("b", {"gamma": 0.9})
    with store.start("b") as run:
        assert run.configure(argparse.Namespace(**values)) == argparse.Namespace(learning_rate=1e-3, gamma=0.9)
        with pytest.raises(ConfigurationError, match="gamma"):
            run.configure(argparse.Namespace(learning_rate=1e-3, gamma=0.5))


def test_the_values_of_a_branch_go_on_in_its_own_branches(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store).branch("b", {"learning_rate": 1e-4})
    with store.start("b") as run:
        run.configure(COMMAND_LINE, free=FREE)
        own = save(run, 20)
    assert own.hyperparameters["learning_rate"] == 1e-4
    own.branch("c", {"gamma": 0.9})
    # by the command line of the very first run, and by that of the one between
    assert configured(store, "c") == dataclasses.replace(COMMAND_LINE, learning_rate=1e-4, gamma=0.9)
    assert configured(store, "c", Args(learning_rate=1e-4)).learning_rate == 1e-4
    with pytest.raises(ConfigurationError, match="learning_rate"):
        configured(store, "c", Args(learning_rate=2e-4))


def test_what_a_rollback_changed_is_in_force_from_then_on(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    back = rolled_back(store, "a", learning_rate=5e-4)
    assert back.hyperparameters["learning_rate"] == 5e-4
    for args in (COMMAND_LINE, Args(), Args(learning_rate=5e-4)):
        assert configured(store, "a", args).learning_rate == 5e-4
    with store.start("a") as run:
        assert run.hyperparameters_in_force["learning_rate"] == 5e-4
        later = save(run, 20, parent=back)  # a script that does not configure
    assert later.hyperparameters["learning_rate"] == 5e-4
    assert store.run("a").hyperparameters["learning_rate"] == 1e-3
    with pytest.raises(ConfigurationError, match="rollback"):
        configured(store, "a", Args(learning_rate=2e-4))


def test_changes_of_several_rollbacks_add_up_and_those_that_were_abandoned_do_not_count(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    first = origin_of(store)
    rolled_back(store, "a", learning_rate=5e-4)
    rolled_back(store, "a", gamma=0.9)
    found = configured(store, "a")
    assert (found.learning_rate, found.gamma) == (5e-4, 0.9)
    with store.start("a") as run:
        # back to before both, with a change of its own
        run.change_hyperparameters({"learning_rate": 2.5e-4, "gamma": 0.99})
        told = {"level": 2, "changes": {"hyperparameters": {"learning_rate": 2.5e-4}}}
        save(run, 10, parent=first, kind="rollback", rollback=told)
    found = configured(store, "a")
    assert (found.learning_rate, found.gamma) == (2.5e-4, 0.99)


def test_a_free_key_that_a_rollback_changed_can_still_be_given(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    rolled_back(store, "a", learning_rate=5e-4)
    free = {*FREE, "learning_rate"}
    assert configured(store, "a", free=free).learning_rate == 5e-4
    assert configured(store, "a", Args(), free=free).learning_rate == 5e-4
    wished = dataclasses.replace(COMMAND_LINE, learning_rate=2e-4)
    with store.start("a") as run:
        assert run.configure(wished, free=free).learning_rate == 2e-4
        save(run, 20, parent=run.latest())
    # and goes on to be in force
    assert configured(store, "a", free=free).learning_rate == 2e-4


def test_a_free_key_that_was_given_before_a_rollback_is_no_wish_after_it(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    first = origin_of(store)
    free = {*FREE, "learning_rate"}
    given = dataclasses.replace(COMMAND_LINE, learning_rate=2e-3)
    with store.start("a") as run:
        run.configure(given, free=free)
        head = save(run, 20, parent=first)
        run.change_hyperparameters({"learning_rate": 1e-4})
        told = {"abandoned": head.id, "level": 1, "changes": {"hyperparameters": {"learning_rate": 1e-4}}}
        save(run, 10, parent=first, kind="rollback", rollback=told)
    assert configured(store, "a", given, free=free).learning_rate == 1e-4


def test_what_the_runs_before_a_branch_have_changed_of_a_free_key_stays(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    free = {*FREE, "learning_rate"}
    rolled_back(store, "a", gamma=0.9).branch("b", {"learning_rate": 1e-4})
    with store.start("b") as run:
        run.configure(COMMAND_LINE, free={*free, "gamma"})
        own = save(run, 20)
    own.branch("c", {"layers": [32]})
    found = configured(store, "c", free={*free, "gamma"})
    assert found == dataclasses.replace(COMMAND_LINE, learning_rate=1e-4, gamma=0.9, layers=(32,))


def test_a_rollback_whose_record_is_damaged_is_still_in_force(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    back = rolled_back(store, "a", learning_rate=5e-4)
    with store.start("a") as run:
        run.configure(COMMAND_LINE, free=FREE)
        save(run, 20, parent=back)
    record = store.path / "runs" / "a" / "checkpoints" / f"{back.seq:08d}" / "commit.json"
    record.write_bytes(record.read_bytes()[:-40])
    assert configured(store, "a").learning_rate == 5e-4


def test_a_rollback_that_was_pruned_still_says_what_it_changed(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    back = rolled_back(store, "a", learning_rate=5e-4)
    with store.start("a") as run:
        run.configure(COMMAND_LINE, free=FREE)
        save(run, 20, parent=back)
    store.files.prune("a", back.seq, "test")
    assert configured(store, "a").learning_rate == 5e-4


def test_a_run_that_goes_on_unchanged_reads_its_values_as_before(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    assert configured(store, "a", Args()).total_steps == 1000
    assert configured(store, "a", Args()).learning_rate == 1e-3
    with store.start("new") as run:
        assert run.configure(COMMAND_LINE) == COMMAND_LINE
        assert run.configure(dataclasses.replace(COMMAND_LINE, gamma=0.5)).gamma == 0.5


def test_a_branch_can_be_configured_although_its_ancestors_are_gone(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store).branch("b", {"learning_rate": 1e-4})
    (store.path / "runs" / "a").rename(tmp_path / "elsewhere")
    assert configured(store, "b", Args()).learning_rate == 1e-4
    with pytest.raises(ConfigurationError):  # nobody knows any more that this is the origin's command line
        configured(store, "b")


def test_changing_hyperparameters_makes_another_start_and_needs_the_claim(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    origin_of(store)
    with store.start("a") as run:
        run.configure(COMMAND_LINE, free=FREE)
        before = run.start_id()
        run.change_hyperparameters({"learning_rate": 5e-4})
        after = run.start_id()
        assert before != after
        assert store.files.read_start("a", after).hyperparameters["learning_rate"] == 5e-4
        assert run.hyperparameters_in_force["gamma"] == 0.99
        run.change_hyperparameters({"learning_rate": 1e-3})
        assert run.start_id() == before
        with pytest.raises(ConfigurationError, match="JSON"):
            run.change_hyperparameters({"gamma": object()})
    with pytest.raises(ConfigurationError, match="to read"):
        store.run("a").change_hyperparameters({"learning_rate": 5e-4})
