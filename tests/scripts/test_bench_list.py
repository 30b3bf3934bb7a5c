"""The bench of listings runs and finds what it made."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_list.py"


def test_every_listing_finds_all_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--checkpoints", "40", "--runs", "2", "--repeats", "1", "--marked", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "40 checkpoints in 2 runs, medians of 1"
    found = {line[:38].strip(): int(line[38:].split(")")[1].split()[1]) for line in lines[2:]}
    assert found == {
        "plain loop over all records": 40,
        "listing, cold: no catalog yet": 40,
        "listing, warm": 40,
        "listing after one more commit": 41,
        "search by metric and hyperparameter": 0,
        "`simckpt ls`, start to end": 41,
    }
