import argparse
import dataclasses
from pathlib import Path
from types import MappingProxyType

import pytest
from examples import Counter

import simckpt
from simckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    InvalidNameError,
    LeafNotFoundError,
    NotAStoreError,
    RunLockedError,
    RunNotFoundError,
)


@dataclasses.dataclass
class Args:
    seed: int = 1
    learning_rate: float = 3e-4


def saved_run(store: simckpt.Store, name: str, steps: list[int], metrics: list[float] | None = None) -> None:
    """Fills a run with checkpoints at the given steps."""
    with store.start(name) as run, run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(1)) as keeper:
        for place, step in enumerate(steps):
            keeper.save(step, {"return": metrics[place]} if metrics else None)


def test_opening_a_store_to_read_writes_nothing(tmp_path) -> None:
    with pytest.raises(NotAStoreError):
        simckpt.Store(tmp_path / "absent").runs()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_not_taken_for_a_store(tmp_path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(NotAStoreError):
        simckpt.Store(tmp_path)


def test_a_store_opened_before_it_was_made_is_read_once_it_is_there(tmp_path) -> None:
    early = simckpt.Store(tmp_path / "s")
    with pytest.raises(NotAStoreError):
        early.runs()
    simckpt.Store(tmp_path / "s").start("a").close()
    assert [run.name for run in early.runs()] == ["a"]


def test_a_run_is_read_by_another_store_object(tmp_path) -> None:
    saved_run(simckpt.Store(tmp_path / "s"), "a", [10, 20])
    run = simckpt.Store(tmp_path / "s").run("a")
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [10, 20]
    assert run.latest() == run.at(step=20)
    assert run.latest().parent == run.at(step=10).id


def test_an_unknown_run_names_the_near_ones(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    saved_run(store, "ant-ppo", [1])
    with pytest.raises(RunNotFoundError, match="ant-ppo") as caught:
        store.run("ant-pp")
    assert isinstance(caught.value, KeyError)


def test_an_unknown_step_names_the_near_ones(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    saved_run(store, "a", [100, 200, 300])
    with pytest.raises(CheckpointNotFoundError, match="100, 200, 300"):
        store.run("a").at(step=210)


def test_a_run_without_checkpoints_says_so(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    store.start("a").close()
    assert store.run("a").checkpoints() == []
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint yet"):
        store.run("a").latest()


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "x" * 101])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, name: str) -> None:
    with pytest.raises(InvalidNameError):
        simckpt.Store(tmp_path / "s").start(name)


def test_a_run_has_one_writer(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    with store.start("a"), pytest.raises(RunLockedError):
        simckpt.Store(tmp_path / "s").start("a")
    store.start("a").close()


def test_a_run_opened_to_read_cannot_be_written(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    saved_run(store, "a", [1])
    with pytest.raises(ConfigurationError, match="to read"):
        store.run("a").checkpointer({"c": Counter()}, save_when=simckpt.EverySteps(1))


def test_best_ignores_nan_and_checkpoints_without_the_metric(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    saved_run(store, "a", [1, 2, 3, 4], [5.0, float("nan"), 7.0, -1.0])
    assert store.run("a").best("return").step == 3
    assert store.run("a").best("return", mode="min").step == 4
    with pytest.raises(CheckpointNotFoundError, match="loss"):
        store.run("a").best("loss")


def test_configuration_is_kept_with_the_run(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    with store.start("a") as run:
        assert run.configure(Args(seed=7)) == Args(seed=7)
        run.checkpointer({"c": Counter()}, save_when=simckpt.EverySteps(1)).save(1)
    with store.start("a") as run:
        assert run.configure(Args()) == Args(seed=7)
        with pytest.raises(ConfigurationError, match=r"(?s)seed.*free"):
            run.configure(Args(seed=8))
        assert run.configure(Args(seed=8), free={"seed"}) == Args(seed=8)
    assert store.run("a").hyperparameters == {"seed": 7, "learning_rate": 3e-4}


def test_a_wish_counts_until_there_is_a_checkpoint(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    with store.start("a") as run:
        run.configure(Args(seed=7))
    with store.start("a") as run:
        assert run.configure(Args(learning_rate=1.0)) == Args(seed=7, learning_rate=1.0)
    assert store.run("a").hyperparameters == {"seed": 7, "learning_rate": 1.0}


def test_configuration_of_a_namespace_takes_its_defaults_from_the_caller(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    defaults = {"seed": 1}
    with store.start("a") as run:
        run.configure(argparse.Namespace(seed=7), defaults=defaults)
        run.checkpointer({"c": Counter()}, save_when=simckpt.EverySteps(1)).save(1)
    with store.start("a") as run:
        assert run.configure(argparse.Namespace(seed=1), defaults=defaults) == argparse.Namespace(seed=7)
        with pytest.raises(ConfigurationError):
            run.configure(argparse.Namespace(seed=1))


def test_addresses_find_checkpoints(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    saved_run(store, "a", [1000, 2000])
    first, second = store.run("a").checkpoints()
    for address in ("a", "a@latest", "a@2000", "a@2_000", second.id, second.id[:8]):
        assert store.checkpoint(address) == second
    assert store.checkpoint("a@1000") == first
    for address in ("b", "a@", "a@x", "a@7", "0" * 32, "abc"):
        with pytest.raises(CheckpointNotFoundError):
            store.checkpoint(address)


def test_a_store_whose_making_was_killed_can_be_started(tmp_path) -> None:
    (tmp_path / "s/tmp").mkdir(parents=True)
    simckpt.Store(tmp_path / "s").start("a").close()
    assert [run.name for run in simckpt.Store(tmp_path / "s").runs()] == ["a"]


def test_a_damaged_run_record_does_not_leave_the_run_locked(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    saved_run(store, "a", [1])
    record = tmp_path / "s/runs/a/run.json"
    good = record.read_bytes()
    record.write_bytes(good[:-5])
    with pytest.raises(DamagedError):
        store.start("a")
    record.write_bytes(good)
    store.start("a").close()


@pytest.mark.parametrize("place", ["²", "1__0x", "-1", ""])
def test_a_place_that_is_no_step_is_refused(tmp_path, place: str) -> None:
    store = simckpt.Store(tmp_path / "s")
    saved_run(store, "a", [1])
    with pytest.raises(CheckpointNotFoundError):
        store.checkpoint(f"a@{place}")


def test_every_start_is_logged_with_what_was_in_force(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    for total in (1, 2):
        with store.start("a") as run:
            run.configure({"total": total}, free={"total"})
            checkpointer = run.checkpointer({"c": Counter()}, save_when=simckpt.EverySteps(1))
            checkpointer.restore_latest()
            checkpointer.save(total)
    events = store.files.events("a")
    assert [event["hyperparameters"] for event in events if event["event"] == "configured"] == [
        {"total": 1},
        {"total": 2},
    ]
    assert sum(event["event"] == "started" for event in events) == 2


def test_free_keys_come_as_a_set_and_not_as_a_string(tmp_path) -> None:
    with simckpt.Store(tmp_path / "s").start("a") as run, pytest.raises(ConfigurationError, match="string"):
        run.configure({"total": 1}, free="total")


def test_a_mapping_that_is_no_dict_can_be_configured(tmp_path) -> None:
    with simckpt.Store(tmp_path / "s").start("a") as run:
        assert run.configure(MappingProxyType({"total": 1})) == {"total": 1}


def test_leaves_and_components_are_read_by_path(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    counter = Counter(3)
    counter.advance()
    with store.start("a") as run:
        run.checkpointer({"counter": counter}, save_when=simckpt.EverySteps(1)).save(1)
    checkpoint = store.run("a").latest()
    assert checkpoint["counter/values"].tolist() == [1.0, 1.0, 1.0]
    assert checkpoint["counter"]["count"] == 1
    assert set(checkpoint.components()) == {"counter", "checkpointer"}
    with pytest.raises(LeafNotFoundError, match="counter/values"):
        checkpoint["counter/value"]


def test_a_store_is_the_path_of_itself(tmp_path) -> None:
    with simckpt.Store(tmp_path / "s").start("a"):
        pass
    store = simckpt.Store(tmp_path / "s")
    assert simckpt.Store(store).files.id == store.files.id
    assert Path(store) == tmp_path / "s"
