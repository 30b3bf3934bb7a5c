import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
INTERVAL = re.compile(r"[\d.]+ \[[\d.]+, [\d.]+\]")


@pytest.fixture(scope="module")
def harness():
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))  # the bench's modules import each other by their plain names
    import bench_harness

    yield bench_harness
    sys.path[:] = before


def compare(harness, kinds, home):
    from bench_states import Networks

    subject = Networks("small", torch.nn.Linear(3, 2), {"positions": np.arange(6.0).reshape(2, 3)})
    return harness.compare(subject, kinds, home, warmup=True, rounds=2, restores=2)


def test_all_that_is_counted_was_measured_and_the_warm_up_was_not_counted(harness, tmp_path):
    from bench_contenders import Safetensors, SimckptForeground, TorchSave

    kinds = [SimckptForeground, TorchSave, Safetensors]
    limits, shown = compare(harness, kinds, tmp_path)
    assert list(shown) == ["simckpt, foreground", "torch.save", "safetensors"]
    assert len(limits.copies) == len(limits.writes) == 2
    for found in shown.values():
        assert [len(found.stall), len(found.durable), len(found.written)] == [2, 2, 2]
        assert [len(found.cold), len(found.warm)] == [2, 2]
        assert len(found.peaks) == 3
        assert all(durable >= stall > 0 for stall, durable in zip(found.stall, found.durable, strict=True))
    # a peer keeps its newest save alone
    (file,) = (tmp_path / "02").rglob("*.safetensors")
    assert shown["safetensors"].written == [file.stat().st_size] * 2


def test_a_contender_that_restores_other_bits_is_found(harness, tmp_path):
    from bench_contenders import TorchSave

    class Wrong(TorchSave):
        name = "wrong"

        def restore(self):
            super().restore()
            self.tensors()["envs/positions"].view(-1)[4] += 1e-9

    with pytest.raises(SystemExit, match="wrong did not restore what was saved: envs/positions"):
        compare(harness, [TorchSave, Wrong], tmp_path)


def test_a_contender_that_restores_nothing_is_found(harness, tmp_path):
    from bench_contenders import TorchSave

    class Idle(TorchSave):
        name = "idle"

        def restore(self):
            pass

    with pytest.raises(SystemExit, match="idle did not restore what was saved: agent/weight"):
        compare(harness, [Idle], tmp_path)


def test_changes_that_leak_into_a_save_in_flight_are_found(harness, tmp_path):
    from bench_contenders import TorchSave

    class Late(TorchSave):
        name = "late"

        def save(self, number):
            self.number = number

        def finish(self):
            super().save(self.number)
            super().finish()

    with pytest.raises(SystemExit, match="late did not restore what was saved"):
        compare(harness, [Late], tmp_path)


def test_flipping_twice_changes_nothing_and_once_changes_both_ends(harness):
    from bench_contenders import flip

    arrays = {"long": np.arange(5.0), "one": np.array(3, dtype=np.uint8), "flags": np.zeros((2, 2), dtype=bool)}
    before = {name: array.copy() for name, array in arrays.items()}
    flip(arrays)
    assert arrays["one"] == 2
    assert arrays["long"][0] != 0
    assert arrays["long"][-1] != 4
    np.testing.assert_array_equal(arrays["flags"], [[True, False], [False, True]])
    flip(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


def test_grown_counts_new_files_whole_and_others_by_their_growth(harness, tmp_path):
    (tmp_path / "log").write_bytes(b"12345")
    (tmp_path / "gone").write_bytes(b"123")
    before = harness.sizes(tmp_path)
    (tmp_path / "log").write_bytes(b"1234567")
    (tmp_path / "gone").unlink()
    (tmp_path / "new").write_bytes(b"1234")
    assert harness.grown(before, harness.sizes(tmp_path)) == 2 + 4


def test_memory_sees_a_peak_that_is_gone_at_the_end(harness):
    with harness.Memory() as memory:
        block = np.ones(40_000_000, dtype=np.uint8)
        del block
    assert 38_000_000 < memory.peak < 60_000_000


@pytest.mark.parametrize(
    ("value", "at_least", "text"),
    [
        (1.2, False, "MISS  stall: 1.2 (at most 1, missed by 20.0%)"),
        (1.0, False, "PASS  stall: 1 (at most 1)"),
        (1.2, True, "PASS  stall: 1.2 (at least 1)"),
        (0.9, True, "MISS  stall: 0.9 (at least 1, missed by 10.0%)"),
    ],
)
def test_bars_say_by_how_much_they_are_missed(harness, value, at_least, text):
    assert str(harness.Bar("stall", value, 1.0, at_least=at_least)) == text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_prints_all_rows_and_all_bars(tmp_path):
    command = [sys.executable, SCRIPTS / "bench_save.py", "--quick", "--folder", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580)
    assert done.returncode == 0, done.stderr
    # a table is printed only after every contender has restored equal bits
    general = {"torch.save", "safetensors", "h5py", "DCP save", "torchrl.checkpoint"}
    asynchronous = {"DCP async, thread", "DCP async, process"}
    own = {"simckpt, thread", "simckpt, process", "simckpt, foreground"}
    expected = {
        "(a)": general | asynchronous | own,
        "(b)": general | asynchronous | own,
        "(c)": own | {"simckpt, own buffer", "SB3 save", "torchrl.checkpoint", "torch.save", "DCP async, thread"},
    }
    shown = {part: {"saves": set(), "restores": set()} for part in expected}
    part = table = ""
    for line in done.stdout.splitlines():
        part = line[:3] if line[:3] in expected else part
        table = line.split()[0].rstrip(",") if line.startswith(("  saves ", "  restores")) else table
        if line.startswith("  ") and len(INTERVAL.findall(line)) == 2:
            shown[part][table].add(line[2:28].strip())
    for part, names in expected.items():
        assert shown[part]["saves"] - {"Orbax"} == names
        assert shown[part]["restores"] - {"Orbax"} == names
    assert "PASS  (c) rows written for 50 new rows: 50" in done.stdout
    for part in ("(a)", "(b)", "(c)", "(loop, thread)", "(saves)"):
        assert re.search(rf"^(PASS|MISS)  {re.escape(part)}", done.stdout, re.MULTILINE), part
    assert not list(tmp_path.iterdir())
