"""Training scripts killed by SIGKILL and started again, compared bit by bit with twins that never were."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from reliability import Line, Progress

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_and_resume.py"


def killed(script: str, kills: int, *flags: str) -> Line:
    """Runs a training script with kills, and reads what it and its twin ended with."""
    command = [sys.executable, str(SCRIPT), "--script", script, "--kills", str(kills), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) checkpoints compared with the twin's, (\d+) differ", done.stdout)
    hits = ", ".join(
        f"{name.strip()} {count}" for name, count in re.findall(r"^  (\D+?)\s+(\d+)\s+#*$", done.stdout, re.M)
    )
    name = f"kills of {script}, resumed bit for bit"
    if done.returncode or found is None:
        return Line(name, kills, 1, hits, examples=((done.stdout + done.stderr)[-800:],))
    return Line(name, kills, int(found[2]), f"{found[1]} checkpoints equal to the twin's; {hits}")


def run(scale: float, progress: Progress) -> list[Line]:
    progress("kills of training scripts")
    if scale < 0.5:
        brief = [
            "--inside-save",
            "2",
            "--before-commit",
            "1",
            "--in-evaluation",
            "0",
            "--env-id",
            "InvertedPendulum-v5",
        ]
        brief += ["--num-envs", "2", "--vectorization", "sync", "--total-steps", "20000"]
        return [killed("train_ppo.py", 4, *brief)]
    kills = round(20 * scale)
    return [
        killed("train_ppo.py", kills),
        killed("train_sac.py", kills, "--total-steps", "6000", "--buffer-size", "2000", "--background", "process"),
    ]
