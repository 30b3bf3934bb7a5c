"""What is tried inside the Slurm of `slurm_lab.sh`; each case is a test that calls this file there.

python slurm_cases.py CASE FOLDER
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import fan_out_loops as loops
import pytest
from fan_out_loops import until

import simckpt
from simckpt.branching.fan_out import FanOut, fan_out
from simckpt.branching.slurm import SlurmEngine
from simckpt.errors import WorkerDiedError

VARIANTS = {"slow": {"rate": 0.5}, "same": {}, "cubic": {"power": 3}}


def jobs(*fields: str) -> list[str]:
    done = subprocess.run(["squeue", "-h", "-o", "|".join(fields)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def fan(folder: Path) -> FanOut:
    origin = simckpt.Store(folder / "store").run("origin").at(step=10)
    return fan_out(origin, VARIANTS, loops.train, engine=SlurmEngine(folder / "jobs", time=10), progress=False)


def statuses(result: FanOut) -> dict[str, str]:
    return {name: each.status for name, each in result.items()}


def started(folder: Path) -> subprocess.Popen[bytes]:
    """Returns a process that fans out by itself."""
    return subprocess.Popen([sys.executable, __file__, "fan", str(folder)])


def fails_and_dies(folder: Path) -> None:
    """A branch that fails, one that is killed, one that is complete: and then the two that are missing."""
    loops.make_origin(folder / "store")
    (folder / "slow.trouble").write_text("raises")
    (folder / "cubic.trouble").write_text("dies")
    result = fan(folder)
    assert statuses(result) == {"slow": "failed", "same": "complete", "cubic": "died"}, result
    assert "ValueError: the gradient is gone" in result["slow"].error
    assert "ended without a result (state FAILED)" in result["cubic"].error
    for name in ("slow", "cubic"):
        (folder / f"{name}.trouble").unlink()
    assert fan(folder).complete
    assert sorted(loops.trained(folder / "store")[3:]) == [("cubic", 20), ("slow", 20)]


def requeues(folder: Path) -> None:
    """A job that is warned saves, goes back into the queue, and on from there; in the same fan-out."""
    store = folder / "store"
    loops.make_origin(store)
    (folder / "same.trouble").write_text("waits")
    process = started(folder)
    until((folder / "same.waits").exists, seconds=240)
    run = simckpt.Store(store).run("same")
    until(lambda: len(jobs("%i")) == 1, seconds=240)
    (folder / "same.trouble").unlink()
    (job,) = jobs("%i")
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    until(lambda: jobs("%T") == ["PENDING"], seconds=120)
    assert run.latest().step == 28
    assert process.poll() is None
    # Slurm holds what was requeued for two minutes; within a second the node would still refuse it
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now+3"], check=True)
    assert process.wait(240) == 0
    assert loops.trained(store)[3:] == [("same", 28)]
    assert run.latest().tags == {"complete"}


def killed(folder: Path) -> None:
    """A fan-out is killed, its jobs are not: started again, it waits for them and trains nothing twice."""
    store = folder / "store"
    loops.make_origin(store)
    (folder / "same.trouble").write_text("waits")
    process = started(folder)
    until((folder / "same.waits").exists, seconds=240)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert jobs("%i")
    again = started(folder)
    until(lambda: any("Dependency" in line for line in jobs("%r")), seconds=120)
    # the first job is ended after a save, and its successor goes on
    (folder / "same.trouble").unlink()
    os.kill(loops.processes(store)["same"], signal.SIGKILL)
    assert again.wait(240) == 0
    names = [name for name, _ in loops.trained(store)]
    assert sorted(names) == ["cubic", "same", "same", "slow"]
    assert loops.trained(store)[-1] == ("same", 20)


def deadline(folder: Path) -> None:
    """A branch that hangs is cancelled at its deadline."""
    origin = loops.make_origin(folder / "store")
    (folder / "same.trouble").write_text("hangs")
    engine = SlurmEngine(folder / "jobs", time=10)
    result = fan_out(origin, {"same": {}}, loops.train, engine=engine, deadline=10, progress=False)
    assert statuses(result) == {"same": "stopped"}
    assert not jobs("%i")


def calls(folder: Path) -> None:
    """The engine by itself: results, a killed job, a folder whose name needs quotes."""
    engine = SlurmEngine(folder / "a b$c'd", time=10)
    good, died = engine.submit(loops.double, 21), engine.submit(loops.die, 1)
    assert good.result(120) == 42
    with pytest.raises(WorkerDiedError, match="state FAILED"):
        died.result(120)
    # no pickles
    assert not list(folder.rglob("*.pkl"))


if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    globals()[case](folder)
