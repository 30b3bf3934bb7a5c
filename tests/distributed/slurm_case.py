"""What is tried inside the Slurm of `slurm_lab.sh`: python slurm_case.py FOLDER SCRIPT ARGUMENTS...

A job of two ranks is preempted by one of higher priority, goes back into the queue, and on to its end.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SEEN = 300.0  # [s] a loaded machine may take for each of the things that are waited for


def job(number: str) -> dict[str, str]:
    """Returns what Slurm knows of a job."""
    shown = subprocess.run(["scontrol", "-o", "show", "job", number], capture_output=True, text=True, check=True)
    return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)


def until(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SEEN
    while not happened():
        assert time.monotonic() < end, f"not seen: {what}"
        time.sleep(0.05)


def submit(*arguments: str) -> str:
    done = subprocess.run(["sbatch", "--parsable", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nexport OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo\nexec {' '.join(command)}\n")
    output = folder / "output"
    training = submit("--requeue", "--open-mode=append", f"--output={output}", "-p", "low", "-c", "2", str(script))
    until(lambda: output.exists() and "eval step=256" in output.read_text(), "the second evaluation")
    first = submit("-p", "main", "-c", "2", f"--output={folder / 'first'}", "--wrap", "echo before you")
    until(lambda: (folder / "first").exists() and "before you" in (folder / "first").read_text(), "the first job's end")
    until(lambda: job(first)["JobState"] == "COMPLETED", "its end")
    assert job(training)["JobState"] == "PENDING", job(training)
    assert job(training)["Restarts"] == "1"
    # Slurm holds what was requeued for two minutes
    subprocess.run(["scontrol", "update", f"jobid={training}", "starttime=now+3"], check=True)
    until(lambda: job(training)["JobState"] == "COMPLETED", "the end of the training")


if __name__ == "__main__":
    main()
