"""Training many branches: each for itself, whatever happens to the others or to the fan-out."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fan_out_loops as loops
import numpy as np
import pytest
from fan_out_loops import alive, until

import simckpt
from simckpt.branching.engines import LocalEngine
from simckpt.branching.fan_out import FanOut, fan_out
from simckpt.branching.tracking import BranchResult
from simckpt.comparison import compare
from simckpt.errors import ConfigurationError, ConflictError, InvalidNameError

NUMBERS = np.array([3])
RATES: dict[str, dict[str, Any]] = {"slow": {"rate": 0.5}, "same": {}, "cubic": {"power": 3}}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def origin(store: Path) -> simckpt.Checkpoint:
    return loops.make_origin(store)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> simckpt.Checkpoint:
    return loops.make_origin(tmp_path_factory.mktemp("untouched") / "store")


class HereEngine:
    """Runs each call at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Answer":
        return Answer(fn(*args))


class Answer:
    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, timeout: float | None = None) -> Any:
        return self.value

    def running(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


def here(origin: simckpt.Checkpoint, variants: Mapping[str, Any], train: Any = loops.train, **options: Any) -> FanOut:
    return fan_out(origin, variants, train, engine=HereEngine(), progress=False, **options)


def trouble(store: Path, **troubles: str) -> None:
    for name, kind in troubles.items():
        (store.parent / f"{name}.trouble").write_text(kind)


def statuses(result: FanOut) -> dict[str, str]:
    return {name: each.status for name, each in result.items()}


def test_each_variant_becomes_a_branch_that_is_trained_to_its_end(origin: simckpt.Checkpoint, store: Path) -> None:
    result = fan_out(origin, RATES, loops.train, engine=LocalEngine(2), progress=False)
    assert result.complete
    assert list(result) == list(RATES)
    for name, overrides in RATES.items():
        run = simckpt.Store(store).run(name)
        assert run.origin() == origin
        assert dict(run.overrides) == overrides
        head = run.latest()
        assert (head.step, head.tags) == (40, {"complete"})
        each = result[name]
        assert (each.step, each.metrics, each.overrides) == (40, head.metrics, overrides)
        assert each.seconds is not None
        assert each.seconds > 0
    # all of them began at the origin
    assert sorted(loops.trained(store)) == sorted((name, 10) for name in RATES)


def test_a_branch_equals_the_one_that_was_trained_by_hand(origin: simckpt.Checkpoint, store: Path) -> None:
    here(origin, {"fanned": {"rate": 0.5}})
    origin.branch("by-hand", overrides={"rate": 0.5})
    loops.train(str(store), "by-hand")
    by_hand, fanned = (simckpt.Store(store).run(name).latest() for name in ("by-hand", "fanned"))
    assert compare(by_hand, fanned).identical


def test_branches_that_fail_or_die_sink_no_others(origin: simckpt.Checkpoint, store: Path) -> None:
    trouble(store, slow="raises", cubic="dies", exits="exits")
    variants = {**RATES, "exits": {}}
    result = fan_out(origin, variants, loops.train, engine=LocalEngine(2), progress=False)
    assert statuses(result) == {"slow": "failed", "same": "complete", "cubic": "died", "exits": "failed"}
    assert not result.complete
    assert "ValueError: the gradient is gone" in result["slow"].error
    assert "in happen" in result["slow"].error
    assert "killed by SIGKILL" in result["cubic"].error
    assert "out of luck" in result["exits"].error
    assert [result[name].step for name in variants] == [20, 40, 20, 20]

    # the trouble is over: what is missing goes on where it was, what is complete is left alone
    for name in ("slow", "cubic", "exits"):
        (store.parent / f"{name}.trouble").unlink()
    before = len(loops.trained(store))
    again = here(origin, variants)
    assert again.complete
    assert loops.trained(store)[before:] == [("slow", 20), ("cubic", 20), ("exits", 20)]
    assert again["same"].seconds is None


DRIVER = """
import sys
sys.path[:0] = sys.argv[2:]
import fan_out_loops as loops
import simckpt
from test_fan_out import RATES, LocalEngine, fan_out
if __name__ == "__main__":
    origin = simckpt.Store(sys.argv[1]).run("origin").at(step=10)
    fan_out(origin, {**RATES, "last": {"rate": 2.0}}, loops.train, engine=LocalEngine(2), progress=False)
"""


@pytest.mark.parametrize(
    ("number", "kind", "mark", "stopped_at"),
    [(signal.SIGKILL, "hangs", "at-25", 20), (signal.SIGINT, "waits", "waits", 28)],
    ids=["a kill", "Ctrl-C"],
)
def test_an_interrupted_fan_out_started_again_runs_only_what_is_missing(
    origin: simckpt.Checkpoint,
    store: Path,
    number: signal.Signals,
    kind: str,
    mark: str,
    stopped_at: int,
    request: pytest.FixtureRequest,
) -> None:
    # the second and the last never end: the first and the third are complete when both of them run
    trouble(store, same=kind, last=kind)
    script = store.parent / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), str(store), *sys.path], stderr=subprocess.PIPE, text=True)
    request.addfinalizer(driver.kill)  # what a failed test leaves running would disturb others
    opened = simckpt.Store(store)

    def both_are_in_trouble() -> bool:
        assert driver.poll() is None
        return all((store.parent / f"{name}.{mark}").exists() for name in ("same", "last"))

    until(both_are_in_trouble, seconds=240)  # five interpreters start until then, on a loaded machine perhaps
    driver.send_signal(number)
    _, errors = driver.communicate()
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    for name in ("same", "last"):
        (store.parent / f"{name}.trouble").unlink()
        pid = loops.processes(store)[name]
        until(lambda pid=pid: not alive(pid))

    before = len(loops.trained(store))
    result = here(origin, {**RATES, "last": {"rate": 2.0}})
    assert result.complete
    # Ctrl-C lets the branches save first, on the way to that step or at it; a kill takes them along
    again = loops.trained(store)[before:]
    assert [name for name, _ in again] == ["same", "last"]
    assert all(20 <= step <= stopped_at for _, step in again)
    # and it ends where the origin would have ended
    with simckpt.Store(store).start("origin") as run:
        loops.train_run(run, until=40)
    assert compare(opened.run("origin").latest(), opened.run("same").latest()).identical


def test_a_branch_past_its_deadline_is_stopped(origin: simckpt.Checkpoint, store: Path) -> None:
    trouble(store, slow="hangs", same="waits")
    engine = LocalEngine(2, grace=60.0)
    variants = {name: RATES[name] for name in ("slow", "same")}
    result = fan_out(origin, variants, loops.train, engine=engine, deadline=4.0, progress=False)
    assert statuses(result) == {"slow": "stopped", "same": "stopped"}
    assert result["slow"].error == "not at its end after the deadline of 4 s"


@pytest.mark.parametrize(
    ("overrides", "rng", "problem"),
    [
        ({"rate": 3.0}, "continue", "has the overrides {'rate': 2.0}"),
        ({"rate": 2}, "reseed", "rng='continue'"),
    ],
    ids=["overrides", "rng"],
)
def test_a_run_that_is_another_branch_is_refused(
    origin: simckpt.Checkpoint, overrides: dict[str, Any], rng: str, problem: str
) -> None:
    origin.branch("mine", overrides={"rate": 2.0})
    with pytest.raises(ConflictError, match=problem):
        here(origin, {"mine": overrides}, rng=rng)


def test_a_branch_whose_override_is_no_number_is_the_same_one_again(tmp_path: Path) -> None:
    with simckpt.Store(tmp_path).start("a") as run:
        run.configure({"limit": None})
        origin = run.checkpointer({"loop": simckpt.LoopState(v=1)}, save_when=simckpt.EverySteps(1)).save(10)
    for _ in range(2):
        # it trains nothing, and is known again
        result = here(origin, {"v": {"limit": float("nan")}}, loops.train_without_checkpoints)
        assert statuses(result) == {"v": "failed"}


def test_a_run_of_another_origin_is_refused(origin: simckpt.Checkpoint, store: Path) -> None:
    simckpt.Store(store).run("origin").at(step=20).branch("later")
    for name in ("origin", "later"):
        with pytest.raises(ConflictError, match=f"run '{name}' exists and does not come from"):
            here(origin, {name: {}})


def test_a_branch_that_trains_further_is_no_longer_complete(origin: simckpt.Checkpoint, store: Path) -> None:
    here(origin, {"more": {}})
    loops.train(str(store), "more", until=50)
    here(origin, {"more": {}}, functools.partial(loops.train, until=60))
    assert simckpt.Store(store).run("more").latest().step == 60
    assert loops.trained(store) == [("more", 10), ("more", 40), ("more", 50)]


def test_arguments_of_a_partial_reach_the_training(origin: simckpt.Checkpoint) -> None:
    result = here(origin, {"short": {}}, functools.partial(loops.train, until=30))
    assert result["short"].step == 30


def test_a_training_that_saves_nothing_is_not_complete(origin: simckpt.Checkpoint) -> None:
    # an end that the origin has passed already, too
    for train in (loops.train_without_checkpoints, functools.partial(loops.train, until=10)):
        result = here(origin, {"empty": {}}, train)
        assert (result["empty"].status, result["empty"].step) == ("failed", None)
        assert result["empty"].error.startswith("returned without a checkpoint")
        assert not result.complete


def test_logs_take_what_each_branch_prints(origin: simckpt.Checkpoint, store: Path, tmp_path: Path) -> None:
    trouble(store, slow="raises")
    logs = tmp_path / "logs" / "today"
    variants = {name: RATES[name] for name in ("slow", "same")}
    fan_out(origin, variants, loops.train, engine=LocalEngine(2), logs=logs, progress=False)
    assert (logs / "same.log").read_text() == "training same\n"
    assert (logs / "slow.log").read_text().startswith("training slow\nTraceback")


def test_a_script_that_refuses_its_flags_says_so_in_the_log(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    with LocalEngine(1) as engine:
        result = fan_out(origin, {"one": {}}, [str(script), "--no"], engine=engine, logs=logs, progress=False)
    assert result["one"].status == "failed"
    assert result.table()[0]["error"] == f"SystemExit: 2; see the log {logs / 'one.log'}"
    assert "unrecognized arguments: --no" in (logs / "one.log").read_text()


def nested() -> Any:
    def train(store: str, run: str) -> None:
        pass

    return train


SOUND: dict[str, Any] = {"variants": {"one": {"rate": 2.0}}, "train": loops.train}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"variants": ["one"]}, "variants are"),
        ({"variants": "one"}, "variants are"),
        ({"variants": None}, "variants are"),
        ({"variants": {"one": ["rate"]}}, "overrides of variant 'one'"),
        ({"variants": {"one": None}}, "overrides of variant 'one'"),
        ({"variants": {5: {}}}, "5 cannot be the name of a run: up to 100 letters, digits and"),
        ({"variants": {"good": {}, "not/good": {}}}, "'not/good' cannot be the name of a run: up to 100 letters"),
        ({"variants": {"\x1b[2Jlong": {}}}, r"'\\x1b\[2Jlong' cannot be the name of a run"),
        ({"variants": {"good": {"rate": 2.0}, "bad": {"ratte": 2.0}}}, "did you mean 'rate'"),
        ({"train": lambda store, run: None}, "top level of a module"),
        ({"train": nested()}, "top level of a module"),
        ({"train": print}, "top level of a module"),
        ({"train": loops.double}, "cannot be called with"),
        ({"train": "train"}, "command line of a Python script"),
        ({"train": ["missing.py"]}, "command line of a Python script"),
        ({"train": []}, "command line of a Python script"),
        ({"train": {"train.py"}}, "command line of a Python script"),
        ({"train": [3]}, "command line of a Python script"),
        ({"train": Path("train.py")}, "command line of a Python script"),
        ({"train": None}, "command line of a Python script"),
        ({"engine": "ray"}, "an engine is such as"),
        ({"engine": LocalEngine}, "an engine is such as"),
        ({"rng": "again"}, "rng is one of"),
        ({"rng": None}, "rng is one of"),
        ({"rng": ["continue"]}, "rng is one of"),
        *(({"deadline": value}, "deadline") for value in (0, -1, float("nan"), float("inf"), "x", True, [1])),
        *(({"heartbeat": value}, "heartbeat") for value in (0, 0.5, -1, float("nan"), float("inf"), "x", True)),
        ({"logs": 5}, "logs"),
        *(({"checkpoint": value}, "branches start from a checkpoint") for value in (None, "origin@10", 10)),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_made(
    untouched: simckpt.Checkpoint, wrong: dict[str, Any], problem: str
) -> None:
    with pytest.raises((ConfigurationError, InvalidNameError), match=problem):
        fan_out(**{"checkpoint": untouched, "engine": HereEngine(), "progress": False, **SOUND, **wrong})
    folder = untouched.files.path
    assert simckpt.Store(folder).files.runs() == ["origin"]
    assert {entry.name for entry in folder.parent.iterdir()} == {folder.name, "trained"}


def test_a_sweep_may_be_drawn_by_numpy(origin: simckpt.Checkpoint, store: Path) -> None:
    rates = {
        f"rate-{rate:g}": {"rate": rate, "power": power} for rate in np.geomspace(0.5, 2.0, 3) for power in NUMBERS
    }
    train = functools.partial(loops.train, until=np.int64(20))
    for _ in range(2):  # the second time they are found to be the same
        assert here(origin, rates, train).complete
    for name, overrides in rates.items():
        held = simckpt.Store(store).run(name).overrides
        assert held == {"rate": float(overrides["rate"]), "power": int(overrides["power"])}
        assert {type(value) for value in held.values()} == {float, int}


def test_a_beat_is_asked_for_that_suits_the_heartbeat(origin: simckpt.Checkpoint) -> None:
    # the training ends with an error if it is not heard of within 20 s; by default it is every 30 s
    result = here(origin, {"one": {}}, loops.train_until_heard_of, heartbeat=1.0)
    assert result.complete, result


def test_progress_bars_tell_how_the_branches_ended(
    origin: simckpt.Checkpoint, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trouble(store, slow="raises")
    fan_out(origin, {"slow": {}, "same": {}}, loops.train, engine=HereEngine())
    shown = capsys.readouterr().out
    assert "failed, step 20" in shown
    assert "complete, step 40" in shown
    assert "2 of 2" in shown


RESULT = FanOut(
    {
        "a": BranchResult("a", {"rate": 0.5}, "complete", "", 1500, {"eval/return": 12.5}, 3.25),
        "b": BranchResult("b", {"rate": 2.0, "clip": 1}, "died", "Traceback\n  <x>\nkilled by SIGKILL"),
    }
)


def test_results_are_rows_of_a_table() -> None:
    assert [list(row.items()) for row in RESULT.table()] == [
        [
            ("run", "a"),
            ("rate", 0.5),
            ("clip", None),
            ("status", "complete"),
            ("step", 1500),
            ("eval/return", 12.5),
            ("seconds", 3.25),
            ("error", ""),
        ],
        [
            ("run", "b"),
            ("rate", 2.0),
            ("clip", 1),
            ("status", "died"),
            ("step", None),
            ("eval/return", None),
            ("seconds", None),
            ("error", "killed by SIGKILL"),
        ],
    ]


def test_a_row_of_the_table_keeps_names_apart() -> None:
    overrides, metrics = {"step": 3, "rate": 0.5}, {"rate": 0.25, "status": 1.0}
    (row,) = FanOut({"a": BranchResult("a", overrides, "complete", "", 10, metrics)}).table()
    assert (row["step"], row["hyperparameters.step"]) == (10, 3)
    assert (row["rate"], row["metrics.rate"]) == (0.5, 0.25)
    assert (row["status"], row["metrics.status"]) == ("complete", 1.0)


def test_results_print_as_a_table() -> None:
    assert repr(RESULT).splitlines() == [
        "run  rate  clip  status    step   eval/return  seconds  error",
        "a    0.5   -     complete  1,500  12.5         3.25",
        "b    2     1     died      -      -            -        killed by SIGKILL",
    ]


def test_results_show_as_html_in_a_notebook() -> None:
    shown = FanOut({"a": BranchResult("a", {}, "failed", "<b>")})._repr_html_()
    assert "<td>&lt;b&gt;</td>" in shown
    assert shown.count("<tr>") == 2


def test_control_characters_do_not_reach_a_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\x9b\u202e"
    overrides, metrics = {"kind": evil, f"key{evil}": [evil]}, {f"metric{evil}": 1.0}
    result = FanOut({"a": BranchResult("a", overrides, "failed", f"Traceback\n{evil}", 10, metrics)})
    for shown in (repr(result), result._repr_html_(), result.table()[0]["error"]):
        assert not [each for each in shown if not each.isprintable() and each != "\n"]
        assert "\\x1b]0;owned" in shown


SCRIPT = """
import argparse
from dataclasses import dataclass
import simckpt
from simckpt.branching.fan_out import fan_out

@dataclass
class Point:
    x: int = 0

def train(store, run):
    loop = simckpt.LoopState(step=0, point=Point())
    with simckpt.Store(store).start(run) as started:
        started.configure({"rate": 1.0})
        declared = simckpt.Hyperparameters(from_args={"rate"})
        checkpointer = started.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1), hyperparameters=declared)
        with checkpointer:
            checkpointer.restore_latest()
            while loop.step < 4:
                loop.step, loop.point = loop.step + 1, Point(loop.point.x + 2)
                checkpointer.step(loop.step, {"x": float(loop.point.x), "is a point": type(loop.point) is Point})

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--run")
    parser.add_argument("--fan-out", action="store_true")
    args = parser.parse_args()
    if args.fan_out:
        print(fan_out(simckpt.Store(args.store).run(args.run).at(step=2), {"one": {}}, train, progress=False))
    else:
        train(args.store, args.run)
"""


def run_script(script: Path, store: Path, *flags: str) -> str:
    command = [sys.executable, str(script), "--store", str(store), "--run", "origin", *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


# classes of a script are saved as `__main__.Point`, and must be found again
def test_a_script_may_fan_out_its_own_training(script: Path, store: Path) -> None:
    run_script(script, store)
    assert "complete" in run_script(script, store, "--fan-out")
    head = simckpt.Store(store).run("one").latest()
    assert (head.step, dict(head.metrics)) == (4, {"x": 8.0, "is a point": 1.0})


def test_the_script_of_the_origin_trains_its_branches(script: Path, store: Path) -> None:
    run_script(script, store)
    origin = simckpt.Store(store).run("origin").at(step=2)
    result = fan_out(origin, {"one": {"rate": 2.0}}, [str(script)], engine=LocalEngine(1), progress=False)
    assert (result["one"].status, result["one"].error) == ("complete", "")
    assert (result["one"].step, dict(result["one"].metrics)) == (4, {"x": 8.0, "is a point": 1.0})


MAIN_PART = """
import simckpt
if __name__ == "__main__":
    def train(store, run): pass
    simckpt.fan_out(simckpt.Store("store").run("origin").at(step=10), {"one": {}, "two": {}}, train)
"""


TOP_LEVEL = """
import sys
import simckpt
from simckpt.branching.engines import LocalEngine

def train(store, run): pass

class Engine:
    def submit(self, fn, *args):
        raise AssertionError("nothing is to be submitted")

print("the script runs")
trainings = {"own": train, "another": ["script.py"]}
engines = {"default": None, "local": LocalEngine(1), "another": Engine()}
simckpt.fan_out(
    simckpt.Store("store").run("origin").at(step=10),
    {"one": {}, "two": {}},
    trainings[sys.argv[1]],
    engine=engines[sys.argv[2]],
)
"""


@pytest.mark.parametrize("words", ["own default", "own another", "another local"])
def test_a_script_without_a_main_part_makes_no_branch(origin: simckpt.Checkpoint, store: Path, words: str) -> None:
    (store.parent / "script.py").write_text(TOP_LEVEL)
    command = [sys.executable, "script.py", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=store.parent)
    line = TOP_LEVEL.splitlines().index("simckpt.fan_out(") + 1
    assert f"would come to line {line} again: put `if __name__ == '__main__':` around" in done.stderr.splitlines()[-1]
    assert done.stdout == "the script runs\n"
    assert simckpt.Store(store).files.runs() == ["origin"]


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_a_training_below_the_main_guard_makes_no_branch(origin: simckpt.Checkpoint, store: Path, how: str) -> None:
    (store.parent / "script.py").write_text(MAIN_PART)
    done = subprocess.run(
        [sys.executable, "script.py" if how == "script" else "-"],
        input=MAIN_PART,
        capture_output=True,
        text=True,
        cwd=store.parent,
    )
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert ("move it above" if how == "script" else "put it into a module, and import it") in told
    assert simckpt.Store(store).files.runs() == ["origin"]
