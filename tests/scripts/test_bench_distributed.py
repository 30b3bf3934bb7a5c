import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
INTERVAL = r"[\d.]+ \[[\d.]+, [\d.]+\]"


@pytest.fixture(scope="module")
def bench():
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))  # the bench's modules import each other by their plain names
    import bench_distributed

    yield bench_distributed
    sys.path[:] = before


def test_costs_of_ranks_are_measured_and_the_line_goes_on_from_them(bench, capsys):
    bench.show_simulation([64], [2, 3], parameters=2, own=1)
    title, _, *rows, _ = capsys.readouterr().out.splitlines()
    assert title.startswith("7 leaves of each rank, 6 of them parts")
    found = [row.replace("(m)", "").split() for row in rows]
    # a state file and an index for each rank, and two of all
    assert [[int(row[0]), int(row[1])] for row in found] == [[2, 6], [3, 8], [64, 130]]
    assert [row.startswith("(m)") for row in rows] == [True, True, False]
    assert all(float(row[2]) > 0 and float(row[4]) > 0 for row in found)
    # a commit syncs files
    assert all(float(value) > 0 for row in found[:2] for value in row[6:8])


def test_sizes_of_metadata_without_the_files_are_those_of_the_files(bench):
    made = bench.bench_metadata(12, parameters=4, own=2)
    listing, indexes = bench._metadata_sizes(12, parameters=4, own=2)
    # but for digits of sizes and offsets
    assert listing == pytest.approx(made["shards_json_bytes"], rel=0.02)
    assert indexes == pytest.approx(made["indexes_bytes"], rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_prints_all_rows_and_all_bars(tmp_path):
    command = [sys.executable, str(SCRIPTS / "bench_distributed.py"), "saves", "--megabytes", "1", "--counts", "1", "2"]
    command += ["--own-megabytes", "0.1", "--rounds", "2", "--restores", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    # a table is printed only after every contender has restored equal bits
    parts = re.findall(r"^(ddp|fsdp), (\d) ranks", done.stdout, re.MULTILINE)
    assert parts == [("ddp", "1"), ("ddp", "2"), ("fsdp", "1"), ("fsdp", "2")]
    for name in ("simckpt", "DCP, simckpt's files", "DCP, its own files"):
        rows = re.findall(
            rf"^  {name} +{INTERVAL} +(-|{INTERVAL}) +{INTERVAL} +(\S+)  (.+)$", done.stdout, re.MULTILINE
        )
        assert [len(row[2].split()) for row in rows] == [1, 2, 1, 2], done.stdout
        assert all(1 <= float(row[1]) < 1.5 for row in rows)
    assert len(re.findall(r"^(PASS|MISS)  \(", done.stdout, re.MULTILINE)) == 8
    assert not list(tmp_path.iterdir())
