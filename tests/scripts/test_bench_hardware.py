"""The bench of recordings runs, and its table has a line for each loop."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_hardware.py"


def test_three_loops_are_timed_and_two_are_recorded(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--block", "0.3", "--rounds", "1", "--rate", "100"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("100 steps/s")
    table = {line[:36].strip(): line[36:].split() for line in lines[2:5]}
    assert list(table) == ["without a recorder", "recorded", "recorded, a snapshot every second"]
    for name, cells in table.items():
        processor, median, most, nearly_all, longest = map(float, cells[:5])
        assert processor > 0
        assert 0 < median <= most <= nearly_all <= longest
        assert cells[-1] == "kB/s" or name == "without a recorder"
