"""Saves that are written while training goes on."""

# ruff: noqa: PT012, PT031 - what is tested is the body of a context

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from background_helpers import GatedDisk, Weights, saved_values
from examples import Counter

import simckpt
from simckpt.errors import ConfigurationError, ConflictError, SimckptError, StorageError
from simckpt.policies import OnBest
from simckpt.storage import durable

EACH = simckpt.EverySteps(1)


@pytest.fixture
def disk(monkeypatch) -> Iterator[GatedDisk]:
    disk = GatedDisk()
    monkeypatch.setattr(durable, "Disk", lambda: disk)
    yield disk
    disk.gate.set()


@pytest.fixture
def store(tmp_path, disk) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


def begin(store: simckpt.Store, components: dict, **options) -> tuple[simckpt.Run, simckpt.Checkpointer]:
    run = store.start("a")
    options.setdefault("save_when", EACH)
    return run, run.checkpointer(components, **options)


def events(run: simckpt.Run, store: simckpt.Store) -> str:
    return (store.path / "runs" / run.name / "events.jsonl").read_text()


@pytest.mark.parametrize("kind", ["arrays", "tensors", "small"])
def test_parameters_that_change_during_a_save_never_leak_into_it(store, disk, kind: str) -> None:
    if kind == "tensors":
        agent = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
        with torch.no_grad():
            [parameter.fill_(1.0) for parameter in agent.parameters()]
    else:
        agent = Weights(size=50_000 if kind == "arrays" else 50)
        agent.train(1)
    run, checkpointer = begin(store, {"weights": agent})
    disk.hold()
    save = checkpointer.step(1)
    disk.wait_until_writing()
    assert not save.done
    for step in (2, 3):
        if kind == "tensors":
            with torch.no_grad():
                [parameter.fill_(step) for parameter in agent.parameters()]
        else:
            agent.train(step)
    disk.gate.set()
    found = save.wait()
    values = (
        saved_values(found) if kind != "tensors" else {float(each.unique()) for each in found["weights"].items.values()}
    )
    assert values == {1.0}
    run.close()


def test_the_next_snapshot_waits_for_the_buffers_of_the_one_in_flight(store, disk) -> None:
    weights = Weights()
    _, checkpointer = begin(store, {"weights": weights})
    saves = []
    for step in range(1, 8):
        weights.train(step)
        saves.append(checkpointer.step(step))
    assert [saved_values(save.wait()) for save in saves] == [{float(step)} for step in range(1, 8)]


def test_training_does_not_wait_for_the_disk(store, disk) -> None:
    counter = Counter()
    run, checkpointer = begin(store, {"counter": counter}, save_when=simckpt.AtSteps(1))
    disk.hold()
    save = checkpointer.step(1)
    for step in range(2, 50):
        counter.advance()
        assert checkpointer.step(step) is None
    assert not save.done
    assert run.checkpoints() == []
    disk.gate.set()
    assert save.wait().step == 1


def test_waiting_for_a_save_has_a_limit(store, disk) -> None:
    _, checkpointer = begin(store, {"counter": Counter()})
    disk.hold()
    save = checkpointer.step(1)
    with pytest.raises(TimeoutError, match="step 1 is still in flight"):
        save.wait(0.01)
    disk.gate.set()
    assert save.wait(60).step == 1


def test_a_busy_checkpointer_waits(store, disk) -> None:
    _, checkpointer = begin(store, {"counter": Counter()})
    disk.hold()
    first = checkpointer.step(1)
    disk.wait_until_writing()
    opener = threading.Timer(0.2, disk.gate.set)
    opener.start()
    second = checkpointer.step(2)
    opener.join()
    assert first.done
    assert second.wait().parent == first.wait().id


def test_a_busy_checkpointer_skips(store, disk) -> None:
    run, checkpointer = begin(
        store, {"counter": Counter()}, save_when=simckpt.EverySteps(10) | OnBest("score"), when_busy="skip"
    )
    disk.hold()
    checkpointer.step(10, {"score": 1.0})
    assert checkpointer.step(20, {"score": 5.0}) is None
    assert checkpointer.step(21) is None
    disk.gate.set()
    checkpointer.wait()
    # dropped for good, and what was not saved is not the best of the saves
    assert checkpointer.step(25) is None
    assert checkpointer.step(26, {"score": 3.0}).wait().metrics == {"score": 3.0}
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [10, 26]
    assert '"save skipped", "step": 20' in events(run, store)


def test_a_busy_checkpointer_makes_one_save_of_several(store, disk) -> None:
    run, checkpointer = begin(store, {"counter": Counter()}, save_when=simckpt.EverySteps(10), when_busy="coalesce")
    disk.hold()
    checkpointer.step(10)
    assert checkpointer.step(20) is None
    assert checkpointer.step(30) is None
    disk.gate.set()
    checkpointer.wait()
    late = checkpointer.step(33)
    assert late.wait().step == 33
    assert late.reason == "passed a multiple of 10 steps"
    assert checkpointer.step(34) is None
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [10, 33]
    assert events(run, store).count("save put off") == 1


def test_a_save_that_was_put_off_and_never_made_is_told_at_the_end(store, disk) -> None:
    _, checkpointer = begin(store, {"counter": Counter()}, when_busy="coalesce")
    with pytest.warns(simckpt.SaveFailedWarning, match="no step came after it"), checkpointer:
        disk.hold()
        checkpointer.step(1)
        checkpointer.step(2)
        disk.gate.set()


@pytest.mark.parametrize(
    "failure",
    [errno.ENOSPC, errno.EROFS],
    ids=["full", "read-only"],
)
@pytest.mark.parametrize("through", ["step", "save", "wait", "exit", "restore"])
def test_an_error_surfaces_at_the_next_call_and_training_goes_on(store, disk, failure: int, through: str) -> None:
    counter = Counter()
    run, checkpointer = begin(store, {"counter": counter})
    first = checkpointer.save(1)
    disk.hold()
    save = checkpointer.step(2)
    disk.failure = OSError(failure, os.strerror(failure))
    disk.gate.set()
    save.join()
    disk.failure = None
    with pytest.warns(simckpt.SaveFailedWarning, match=r"at step 2 failed, training goes on"):
        if through == "exit":
            checkpointer.__exit__(None, None, None)
        elif through == "restore":
            assert checkpointer.restore_latest().id == first.id
        else:
            getattr(checkpointer, through)(*(() if through == "wait" else (3,)))
    if through in ("exit", "wait", "restore"):
        assert isinstance(checkpointer.last_error, StorageError)
        assert checkpointer.last_error.errno == failure
    assert checkpointer.save(4).parent in {each.id for each in run.checkpoints()}
    assert checkpointer.last_error is None
    assert run.checkpoints()[0].id == first.id


def test_an_error_that_was_raised_is_not_told_again(store, disk) -> None:
    _, checkpointer = begin(store, {"counter": Counter()})
    checkpointer.save(0)
    disk.failure = OSError(errno.EIO, "broken")
    save = checkpointer.step(1)
    with pytest.raises(StorageError):
        save.wait()
    disk.failure = None
    assert checkpointer.step(2).wait().step == 2


def test_a_failed_save_is_due_again(store, disk) -> None:
    _, checkpointer = begin(store, {"counter": Counter()}, save_when=OnBest("score"))
    checkpointer.step(1, {"score": 1.0}).wait()
    disk.failure = OSError(errno.ENOSPC, "full")
    checkpointer.step(2, {"score": 5.0})
    with pytest.warns(simckpt.SaveFailedWarning):
        checkpointer.wait()
    disk.failure = None
    assert checkpointer.step(3, {"score": 4.0}).wait().metrics == {"score": 4.0}
    assert checkpointer.step(4, {"score": 4.0}) is None


def test_the_best_so_far_comes_back_with_a_restore(store, disk) -> None:
    run, checkpointer = begin(store, {"counter": Counter()}, save_when=OnBest("score"))
    checkpointer.step(1, {"score": 5.0})
    run.close()
    _, checkpointer = begin(store, {"counter": Counter()}, save_when=OnBest("score"))
    checkpointer.restore_latest()
    assert checkpointer.step(2, {"score": 4.0}) is None
    assert checkpointer.step(3, {"score": float("nan")}) is None
    assert checkpointer.step(4, {"score": 6.0}) is not None
    checkpointer.wait()


def test_another_run_of_the_name_in_the_place_of_a_moved_store_is_not_written_to(store, tmp_path) -> None:
    with store.start("a") as run:
        checkpointer = run.checkpointer({"weights": Weights()}, save_when=simckpt.EverySteps(1))
        checkpointer.save(1)
        store.path.rename(tmp_path / "moved")
        with simckpt.Store(store.path).start("a") as other:
            other.checkpointer({"weights": Weights()}, save_when=simckpt.EverySteps(1)).save(5)
        with pytest.raises(ConflictError, match="was its store moved"):
            checkpointer.save(2)
        assert [each.step for each in simckpt.Store(store.path).run("a").checkpoints(abandoned=True)] == [5]
        assert [each.step for each in simckpt.Store(tmp_path / "moved").run("a").checkpoints()] == [1]


NAMES = ["a/b", "a%b", "%b", "50%%", "é", "x y", "..", ".", "", "a:b", "日本", "%2F"]


def test_any_name_of_a_leaf_is_saved_shared_and_shown(store) -> None:
    """Large leaves that do not change and columns of a log become virtual datasets, whose names HDF5 takes apart."""
    frozen = simckpt.LoopState(arrays={name: np.full(1 << 18, place, np.float32) for place, name in enumerate(NAMES)})
    space = gym.spaces.Dict({name: gym.spaces.Box(-1, 1, (2,)) for name in NAMES})
    buffer = simckpt.ReplayBuffer(9, space, gym.spaces.Discrete(3), seed=0)
    components = {"my %b/thing é": frozen, "a/b %d": buffer}
    with store.start("a") as run:
        checkpointer = run.checkpointer(components, save_when=simckpt.EverySteps(1))
        for step in range(1, 5):
            row = {name: np.full((1, 2), step + place / 100, np.float32) for place, name in enumerate(NAMES)}
            buffer.add(row, [0], [step], [False], [False], row)
            checkpoint = checkpointer.save(step)
    shared = [leaf for leaf in checkpoint.leaves().values() if leaf.pieces and "arrays" in leaf.path]
    assert len(shared) == len(NAMES)
    with h5py.File(store.path / "runs/a/checkpoints/00000004/state.h5") as file:
        for path, leaf in checkpoint.leaves().items():
            if leaf.pieces:
                assert file[path][...].tobytes() == checkpoint.leaf(path).data.tobytes()
    other = simckpt.ReplayBuffer(9, space, gym.spaces.Discrete(3), seed=1)
    checkpoint.restore({"a/b %d": other})
    for name in NAMES:
        assert other.observations[name].tobytes() == buffer.observations[name].tobytes()


def test_what_the_run_pruned_by_itself_ranks_no_more(store) -> None:
    weights = Weights()
    with store.start("a") as run:
        keep = simckpt.KeepBest(1, "score")
        with run.checkpointer({"weights": weights}, save_when=simckpt.EverySteps(1), keep=keep) as checkpointer:
            for step, score in [(1, 9.0), (2, 8.0)]:
                checkpointer.save(step, {"score": score})
            run.prune(simckpt.KeepLast(1))
            for step, score in [(3, 1.0), (4, 2.0)]:
                checkpointer.save(step, {"score": score})
        # the best of those that were left, and the newest
        assert [each.step for each in run.checkpoints()] == [2, 4]


def test_a_policy_that_raises_does_not_make_a_failure_of_a_save_that_is_in_the_store(store) -> None:
    class Broken(simckpt.KeepLast):
        def keep(self, checkpoints):
            raise RuntimeError("this policy is broken")

    with store.start("a") as run:
        checkpointer = run.checkpointer({"weights": Weights()}, save_when=simckpt.EverySteps(1), keep=Broken(1))
        with pytest.warns(simckpt.UpkeepWarning, match="this policy is broken"):
            first = checkpointer.save(1)
        with pytest.warns(simckpt.UpkeepWarning, match="this policy is broken"):
            second = checkpointer.save(2)
        assert [each.id for each in run.checkpoints()] == [first.id, second.id]


def test_ctrl_c_stays_ctrl_c_when_the_disk_is_in_trouble_too(store, disk, monkeypatch) -> None:
    with store.start("a") as run:
        checkpointer = run.checkpointer({"weights": Weights()}, save_when=simckpt.EverySteps(1), background=None)
        checkpointer.save(1)

        def refused(*_, **__):
            raise StorageError("the folder cannot be listed")

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(disk, "pwrite", interrupted)
            patch.setattr(run._files, "records", refused)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.step(2)
        assert checkpointer.save(3).step == 3


def test_another_writer_ends_the_training_at_the_next_call(store, disk) -> None:
    run, checkpointer = begin(store, {"counter": Counter()})
    checkpointer.save(1)
    (store.path / "runs/a/checkpoints/00000002").mkdir()
    checkpointer.step(2)
    with pytest.raises(ConflictError):
        checkpointer.wait()
    run.close()


def test_leaving_the_context_waits_whatever_comes(store, disk) -> None:
    run, checkpointer = begin(store, {"counter": Counter()})
    with pytest.raises(KeyboardInterrupt), checkpointer:
        disk.hold()
        checkpointer.step(1)
        disk.wait_until_writing()
        threading.Timer(0.1, disk.gate.set).start()
        raise KeyboardInterrupt
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1]


def test_an_exception_on_its_way_is_not_hidden_by_a_failed_save(store, disk) -> None:
    _, checkpointer = begin(store, {"counter": Counter()})
    with pytest.warns(simckpt.SaveFailedWarning), pytest.raises(ZeroDivisionError), checkpointer:
        disk.failure = OSError(errno.EIO, "broken")
        checkpointer.step(1)
        raise ZeroDivisionError


def test_closing_the_run_waits(store, disk) -> None:
    run, checkpointer = begin(store, {"counter": Counter()})
    disk.hold()
    checkpointer.step(1)
    threading.Timer(0.1, disk.gate.set).start()
    run.close()
    assert [checkpoint.step for checkpoint in store.run("a").checkpoints()] == [1]


def test_a_new_checkpointer_goes_on_from_the_save_in_flight(store, disk) -> None:
    run, first = begin(store, {"counter": Counter()})
    disk.hold()
    first.step(1)
    threading.Timer(0.1, disk.gate.set).start()
    second = run.checkpointer({"counter": Counter()}, save_when=EACH)
    assert second.restore_latest().step == 1


def test_what_cannot_be_captured_is_told_at_once(store, disk) -> None:
    loop = simckpt.LoopState(step=0)
    _, checkpointer = begin(store, {"loop": loop, "weights": Weights()})
    checkpointer.step(1)
    loop.visitor = (number for number in range(3))
    with pytest.warns(simckpt.SaveFailedWarning, match="visitor"):
        assert checkpointer.step(2) is None
    del loop.visitor
    assert checkpointer.step(3).wait().step == 3


@pytest.mark.parametrize(
    ("option", "value"), [("background", "fork"), ("background", True), ("when_busy", "drop"), ("when_busy", None)]
)
def test_senseless_options_are_refused(store, option: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=option):
        begin(store, {"counter": Counter()}, **{option: value})


def test_the_texts_for_people_follow_the_leaves(store) -> None:
    agent = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(agent.parameters())
    _, checkpointer = begin(store, {"agent": agent, "optimizer": optimizer})
    checkpointer.step(1).wait()
    agent(torch.ones(3)).sum().backward()
    optimizer.step()
    for step in (2, 3):
        checkpointer.step(step).wait()
    with h5py.File(store.path / "runs/a/checkpoints/00000003/state.h5") as file:
        names: list[str] = []
        file["optimizer"].visititems(lambda name, each: names.append(name) if "description" in each.attrs else None)
    assert any("exp_avg" in name for name in names)


def test_the_writing_thread_ends_with_its_save(store) -> None:
    _, checkpointer = begin(store, {"counter": Counter()})
    before = set(threading.enumerate())
    for step in range(1, 4):
        checkpointer.step(step)
        (thread,) = set(threading.enumerate()) - before or {None}
        assert thread is None or not thread.daemon
    checkpointer.wait()
    assert set(threading.enumerate()) == before


class TestProcess:
    """The same with a process that writes."""

    pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous shared files (Linux)")

    @pytest.fixture
    def training(self, tmp_path) -> Iterator[tuple[simckpt.Run, simckpt.Checkpointer, Weights]]:
        weights = Weights()
        run = simckpt.Store(tmp_path / "s").start("a")
        yield run, run.checkpointer({"weights": weights}, save_when=EACH, background="process"), weights
        run.close()

    def test_saves_are_those_of_their_moments(self, training) -> None:
        _, checkpointer, weights = training
        saves = []
        for step in range(1, 6):
            weights.train(step)
            saves.append(checkpointer.step(step))
        weights.train(99)
        assert [saved_values(save.wait()) for save in saves] == [{float(step)} for step in range(1, 6)]
        weights.train(0)
        checkpointer.restore_latest()
        assert weights.arrays["layer_0"][0] == 5

    def test_the_process_has_no_torch_and_maps_the_weights(self, training) -> None:
        _, checkpointer, _ = training
        checkpointer.step(1).wait()
        maps = Path(f"/proc/{checkpointer._saver.process.pid}/maps").read_text()
        assert "simckpt staging" in maps
        assert "torch" not in maps

    def test_a_process_that_dies_costs_one_save(self, training) -> None:
        run, checkpointer, weights = training
        checkpointer.step(1).wait()
        child = checkpointer._saver.process.pid
        os.kill(child, signal.SIGSTOP)
        save = checkpointer.step(2)
        os.kill(child, signal.SIGKILL)
        with pytest.raises(StorageError, match=r"exit code -9.*starts another one"):
            save.wait()
        weights.train(3)
        assert saved_values(checkpointer.step(3).wait()) == {3.0}
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 3]

    def test_signals_that_end_the_training_do_not_end_the_process(self, training) -> None:
        _, checkpointer, _ = training
        checkpointer.step(1).wait()
        child = checkpointer._saver.process.pid
        assert os.getpgid(child) != os.getpgid(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, number)
        checkpointer.step(2).wait()
        assert checkpointer._saver.process.pid == child

    def test_errors_of_the_disk_cross(self, training, tmp_path) -> None:
        _, checkpointer, _ = training
        checkpointer.step(1).wait()
        (tmp_path / "s/tmp").rmdir()
        (tmp_path / "s/tmp").write_text("in the way")
        with pytest.raises(SimckptError, match="tmp"):
            checkpointer.step(2).wait()
        (tmp_path / "s/tmp").unlink()
        assert checkpointer.step(3).wait().step == 3

    def test_it_ends_with_the_run(self, training) -> None:
        run, checkpointer, _ = training
        checkpointer.step(1).wait()
        child = checkpointer._saver.process.pid
        run.close()
        assert not Path(f"/proc/{child}").exists()

    def test_it_ends_with_a_program_that_was_killed(self, tmp_path) -> None:
        code = PROGRAM + "save.wait(); print(checkpointer._saver.process.pid, flush=True); os.kill(os.getpid(), 9)"
        done = run_program(code, tmp_path, "process")
        assert done.returncode == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while is_running(done.stdout.split()[-1]) and time.monotonic() < deadline:
            os.sched_yield()
        assert not is_running(done.stdout.split()[-1])


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


PROGRAM = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
import simckpt
from background_helpers import GatedDisk, Weights, saved_values
from simckpt.storage import durable
if __name__ == "__main__":
    disk = GatedDisk()
    if sys.argv[3] != "process":
        durable.Disk = lambda: disk
    weights = Weights()
    run = simckpt.Store(sys.argv[2]).start("a")
    checkpointer = run.checkpointer({"weights": weights}, save_when=simckpt.EverySteps(1), background=sys.argv[3])
    checkpointer.restore_latest()
    weights.train(1)
    save = checkpointer.step(1)
    """


def run_program(code: str, folder: Path, background: str = "thread") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(folder / "s"), background]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("background", ["thread", "process"])
def test_the_end_of_the_interpreter_waits_for_the_save(tmp_path, background: str) -> None:
    done = run_program(PROGRAM + "sys.exit(3)", tmp_path, background)
    assert (done.returncode, done.stderr) == (3, "")
    (checkpoint,) = simckpt.Store(tmp_path / "s").run("a").checkpoints()
    assert saved_values(checkpoint) == {1.0}


def test_a_kill_in_flight_leaves_the_checkpoint_before(tmp_path) -> None:
    code = (
        PROGRAM
        + """save.wait()
    weights.train(2)
    disk.hold()
    checkpointer.step(2)
    disk.wait_until_writing()
    os.kill(os.getpid(), signal.SIGKILL)"""
    )
    assert run_program(code, tmp_path).returncode == -signal.SIGKILL
    store, weights = simckpt.Store(tmp_path / "s"), Weights()
    with store.start("a") as run:
        assert list((store.path / "tmp").iterdir()) == []
        assert run.checkpointer({"weights": weights}, save_when=EACH).restore_latest().step == 1
    assert weights.arrays["layer_0"][0] == 1


GROWTH = """
import collections, gc, os, sys, threading
import numpy as np, torch
sys.path.insert(0, sys.argv[1])
import simckpt, simckpt.replay
Space = collections.namedtuple("Space", "shape dtype")
from simckpt.storage import durable
durable.Disk.fsync = lambda disk, descriptor: None  # 500 saves in seconds; what is looked at is this process
agent = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 5_000))
optimizer = torch.optim.Adam(agent.parameters())
space = Space((6,), np.dtype("float32"))
buffer = simckpt.replay.ReplayBuffer(8, space, space, num_envs=4, seed=1)
run = simckpt.Store(sys.argv[2]).start("a")
checkpointer = run.checkpointer(
    {"agent": agent, "optimizer": optimizer, "rng": simckpt.RNGStreams(), "replay": buffer},
    save_when=simckpt.EverySteps(1), keep=simckpt.KeepLast(2), background=sys.argv[3],
)
def look():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), len(os.listdir("/proc/self/fd"))
seen = []
for step in range(1, 501):
    agent(torch.ones(60)).sum().backward()
    optimizer.step()
    row = np.full((4, 6), step, "float32")
    buffer.add(row, row, row[:, 0], row[:, 0] > step, row[:, 0] > step, row)
    checkpointer.step(step)
    if step in (250, 500):
        checkpointer.wait()
        gc.collect()
        seen.append(look())
print(*seen[0], *seen[1], sum(each.nbytes for each in agent.parameters()))
run.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("background", ["thread", "process"])
def test_500_saves_cost_no_memory_no_threads_no_files(tmp_path, background: str) -> None:
    done = run_program(GROWTH, tmp_path, background)
    assert done.returncode == 0, done.stderr
    memory, threads, files, memory_after, threads_after, files_after, state = map(int, done.stdout.split())
    assert (threads_after, files_after) == (threads, files)
    # the store keeps a few KB about each of the last segments; a forgotten copy of the state would be 1.2 MB each time
    assert memory_after - memory < 8 << 20
    assert state > 1 << 20
    assert len(simckpt.Store(tmp_path / "s").run("a").checkpoints()) == 2
