import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from examples import Counter
from typer.testing import CliRunner

import simckpt
from simckpt.cli import app

LONG = "observation_" * 15  # 180 characters; three of them do not fit any line of a terminal


@dataclasses.dataclass
class Args:
    seed: int = 1


def fill(path: Path, run: str, steps: list[int], *, start: float = 0.0, **others: object) -> None:
    """Saves a counter at each of the steps; what it holds depends on `start` and the step alone."""
    with simckpt.Store(path).start(run) as writer:
        writer.configure(Args())
        counter = Counter()
        checkpointer = writer.checkpointer({"counter": counter, **others}, save_when=simckpt.EverySteps(1))
        for step in steps:
            counter.values[...] = start + step
            counter.count = step
            checkpointer.save(step, {"eval/return": step / 8})


def call(*arguments: object) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error of a command, all of it as through a pipe."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def folder_of(path: Path, run: str, seq: int) -> Path:
    return path / "runs" / run / "checkpoints" / f"{seq:08d}"


def damage(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("template") / "s"
    fill(path, "ant", [1_000, 2_000])
    fill(path, "bee", [1_000, 2_000])
    fill(path, "cow", [2_000], start=0.5)
    return path


@pytest.fixture
def path(template, tmp_path) -> Path:
    return shutil.copytree(template, tmp_path / "s")


def ids(path: Path, run: str) -> list[str]:
    return [checkpoint.id for checkpoint in simckpt.Store(path).run(run).checkpoints()]


def test_ls_shows_every_checkpoint_of_every_run_with_its_full_id(path) -> None:
    code, output, errors = call("ls", path)
    assert (code, errors) == (0, "")
    lines = [line.split() for line in output.splitlines()]
    assert lines[0][:3] == ["run", "step", "checkpoint"]
    assert [line[0] for line in lines[1:]] == ["ant", "ant", "bee", "bee", "cow"]
    assert [line[1] for line in lines[1:]] == ["1,000", "2,000", "1,000", "2,000", "2,000"]
    assert [line[2] for line in lines[1:]] == ids(path, "ant") + ids(path, "bee") + ids(path, "cow")
    assert lines[2][-2:] == ["eval/return", "250"]


def test_ls_as_json_holds_what_the_table_shows_and_more(path) -> None:
    code, output, _ = call("ls", path, "--json")
    assert code == 0
    runs = json.loads(output)
    assert [run["run"] for run in runs] == ["ant", "bee", "cow"]
    assert runs[0]["hyperparameters"] == {"seed": 1}
    assert runs[0]["id"] == simckpt.Store(path).run("ant").id
    assert runs[0]["damaged"] == []
    first, second = runs[0]["checkpoints"]
    assert [first["id"], second["id"]] == ids(path, "ant")
    assert (first["step"], first["parent"], second["parent"]) == (1_000, None, first["id"])
    assert first["metrics"] == {"eval/return": 125.0}
    files = folder_of(path, "ant", 1)
    assert first["nbytes"] == sum((files / name).stat().st_size for name in ("state.h5", "leaves.json"))


def test_ls_shows_a_run_without_checkpoints(path) -> None:
    simckpt.Store(path).start("dog").close()
    assert call("ls", path)[1].splitlines()[-1].split() == ["dog", "no", "checkpoint", "yet"]
    assert json.loads(call("ls", path, "--json")[1])[-1]["checkpoints"] == []


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"]], ids=["text", "json"])
def test_ls_of_an_empty_store_is_empty(tmp_path, command: list[str]) -> None:
    simckpt.Store(tmp_path / "s").start("a").close()
    (tmp_path / "s/runs/a/run.json").unlink()
    code, output, _ = call(*command, tmp_path / "s")
    assert code == 0
    assert "a" not in output.split()


def test_ls_shows_damaged_checkpoints_as_such_among_the_others(path) -> None:
    damage(folder_of(path, "ant", 1) / "commit.json")
    code, output, _ = call("ls", path)
    assert code == 0
    rows = [line.split() for line in output.splitlines()[1:]]
    assert [row[:2] for row in rows[:2]] == [["ant", "2,000"], ["ant", "damaged"]]
    assert rows[1][2:4] == ["number", "1"]
    assert "commit.json is damaged" in output
    assert [row[0] for row in rows[2:]] == ["bee", "bee", "cow"]

    ant = json.loads(call("ls", path, "--json")[1])[0]
    assert [checkpoint["step"] for checkpoint in ant["checkpoints"]] == [2_000]
    assert [entry["seq"] for entry in ant["damaged"]] == [1]
    assert "commit.json is damaged" in ant["damaged"][0]["error"]


def test_ls_shows_a_run_whose_record_is_damaged_among_the_others(path) -> None:
    damage(path / "runs/bee/run.json")
    code, output, _ = call("ls", path)
    assert code == 0
    rows = [line.split() for line in output.splitlines()[1:]]
    assert [row[0] for row in rows] == ["ant", "ant", "cow", "bee", "bee", "bee"]
    assert rows[-1][1] == "damaged"
    bee = json.loads(call("ls", path, "--json")[1])[-1]
    assert (bee["run"], bee["id"], len(bee["checkpoints"])) == ("bee", None, 2)
    assert "run.json" in bee["damaged"][0]["error"]


def test_a_damaged_checkpoint_does_not_hide_the_others_from_their_ids(path) -> None:
    second = ids(path, "ant")[1]
    damage(folder_of(path, "ant", 1) / "commit.json")
    assert call("show", path, second)[0] == 0


def test_the_help_says_what_the_exit_codes_of_damaged_checkpoints_are() -> None:
    output = " ".join(call("ls", "--help")[1].split())
    assert "Damaged checkpoints" in output
    assert "Exit code 0" in output


def test_show_prints_what_a_checkpoint_knows_of_itself_and_its_leaves(path) -> None:
    code, output, errors = call("show", path, "ant@1000")
    assert (code, errors) == (0, "")
    assert output.splitlines()[0] == f"checkpoint {ids(path, 'ant')[0]}"
    facts = dict(line.split(maxsplit=1) for line in output.splitlines()[1:] if line.startswith("  "))
    assert facts["step"] == "1,000"
    assert facts["parent"] == "none"
    assert facts["metrics"] == "eval/return 125"
    assert facts["hyperparameters"] == "seed=1"
    assert f"numpy {np.__version__}" in facts["versions"]
    assert "values  (4,)  float64  32 B" in output


def test_show_as_json_has_every_leaf(path) -> None:
    code, output, _ = call("show", path, "ant@latest", "--json")
    assert code == 0
    shown = json.loads(output)
    assert (shown["id"], shown["run"], shown["step"]) == (ids(path, "ant")[1], "ant", 2_000)
    leaves = {leaf["path"]: leaf for leaf in shown["leaves"]}
    assert leaves["counter/values"] == {
        "path": "counter/values",
        "dtype": "float64",
        "shape": [4],
        "kind": "numpy",
        "size": 32,
    }
    assert set(leaves) == set(simckpt.Store(path).checkpoint("ant").leaves())


@pytest.mark.parametrize("address", ["ant", "ant@latest", "ant@2000", "ant@2,000", "id", "short id"])
def test_every_address_leads_to_its_checkpoint(path, address: str) -> None:
    newest = ids(path, "ant")[1]
    address = {"id": newest, "short id": newest[:8]}.get(address, address)
    code, output, _ = call("show", path, address, "--json")
    assert code == 0
    assert json.loads(output)["id"] == newest


@pytest.mark.parametrize("address", ["cat", "ant@7", "ant@x", "cat@latest", "0" * 32])
@pytest.mark.parametrize("command", ["show", "diff"])
def test_an_unknown_address_is_exit_code_2_and_a_message(path, command: str, address: str) -> None:
    code, output, errors = call(command, path, address, *(["bee"] if command == "diff" else []))
    assert (code, output) == (2, "")
    assert errors.startswith("simckpt: ")
    assert errors.count("\n") == 1


def test_an_unknown_run_names_the_near_ones(path) -> None:
    assert "ant" in call("show", path, "an@latest")[2]


@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["diff", "a", "b"]], ids=lambda command: command[0])
@pytest.mark.parametrize("kind", ["missing", "folder", "file"])
def test_what_is_no_store_is_exit_code_2_and_a_message(tmp_path, kind: str, command: list[str]) -> None:
    place = tmp_path / "thesis"
    if kind == "folder":
        place.mkdir()
        (place / "chapter.tex").touch()
    elif kind == "file":
        place.write_text("chapter 1")
    code, output, errors = call(command[0], place, *command[1:])
    assert (code, output) == (2, "")
    assert errors.startswith("simckpt: ")
    assert str(place) in errors


@pytest.mark.parametrize("arguments", [["diff", "s", "a"], ["show", "s"], ["ls"], ["list", "s"], ["ls", "s", "--xml"]])
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str]) -> None:
    assert call(*arguments)[0] == 2


def test_diff_of_identical_checkpoints_is_exit_code_0(path) -> None:
    code, output, errors = call("diff", path, "ant", "bee@2000")
    assert (code, errors) == (0, "")
    assert output.startswith("identical: ")
    code, output, _ = call("diff", path, "ant@1000", "bee@1_000", "--json")
    assert code == 0
    result = json.loads(output)
    assert (result["identical"], result["differences"]) == (True, [])
    assert result["a"] == {"run": "ant", "id": ids(path, "ant")[0], "step": 1_000}
    assert result["b"] == {"run": "bee", "id": ids(path, "bee")[0], "step": 1_000}


def test_diff_of_different_checkpoints_is_exit_code_1_and_says_how_far_apart(path) -> None:
    code, output, errors = call("diff", path, "ant", "cow")
    assert (code, errors) == (1, "")
    (row,) = [line for line in output.splitlines() if line.startswith("counter/values")]
    assert "4 of 4 elements differ, at most 0.5 apart" in row
    assert "different in 1 place" in output
    assert "1 places" not in output
    code, output, _ = call("diff", path, "ant", "cow", "--json")
    assert code == 1
    result = json.loads(output)
    assert result["identical"] is False
    assert [(each["path"], each["max_abs"]) for each in result["differences"]] == [("counter/values", 0.5)]


def test_diff_compares_checkpoints_of_two_stores(path, tmp_path) -> None:
    fill(tmp_path / "other:store", "ant", [2_000])
    other = f"{tmp_path / 'other:store'}"
    assert call("diff", path, "ant", f"{other}:ant")[0] == 0
    assert call("diff", path, f"{other}:ant@latest", "cow")[0] == 1
    assert call("diff", path, "ant@1000", f"{other}:ant@2000")[0] == 1
    assert call("diff", path, "ant", f"{other}:bee")[0] == 2
    assert call("diff", path, "ant", f"{tmp_path / 'nowhere'}:ant")[0] == 2


def test_diff_of_a_damaged_checkpoint_is_neither_identical_nor_different(path) -> None:
    leaf = simckpt.Store(path).checkpoint("cow").leaves()["counter/values"]
    state = folder_of(path, "cow", 1) / "state.h5"
    data = bytearray(state.read_bytes())
    data[leaf.offset] ^= 1
    state.write_bytes(bytes(data))
    code, output, errors = call("diff", path, "ant", "cow")
    assert (code, output) == (2, "")
    assert "counter/values" in errors


def test_nothing_is_cut_when_the_output_is_piped(tmp_path) -> None:
    values = {LONG: np.zeros(3), "deep": {LONG: {LONG: np.zeros(3)}}}
    fill(tmp_path / "s", "a" * 100, [1], loop=simckpt.LoopState(values=values))
    values["deep"][LONG][LONG] += 1
    fill(tmp_path / "s", "b" * 100, [1], loop=simckpt.LoopState(values=values))
    listing = call("ls", tmp_path / "s")[1]
    showing = call("show", tmp_path / "s", "a" * 100)[1]
    differing = call("diff", tmp_path / "s", "a" * 100, "b" * 100)[1]
    assert "…" not in listing + showing + differing
    assert len(listing.splitlines()) == 3
    assert sum(LONG in line for line in showing.splitlines()) == 3
    (row,) = [line for line in differing.splitlines() if line.startswith("loop/")]
    assert row.startswith(f"loop/values/deep/{LONG}/{LONG}  3 of 3 elements differ, at most 1 apart")


def test_names_are_shown_as_they_are(tmp_path) -> None:
    with simckpt.Store(tmp_path / "s").start("a") as run:
        loop = simckpt.LoopState(values={"[red]": np.zeros(1), ":smile:": np.zeros(1)})
        checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))
        checkpointer.save(1, {"[bold]x[/bold]": 1.0, ":warning:": 2.0, "\x1b[31mred": 3.0})
    listing = call("ls", tmp_path / "s")[1]
    assert "[bold]x[/bold] 1  :warning: 2  \\x1b[31mred 3" in listing
    assert "\x1b" not in listing
    showing = call("show", tmp_path / "s", "a")[1]
    assert "[bold]x[/bold] 1" in showing
    assert "[red]  (1,)" in showing
    assert ":smile:  (1,)" in showing


def test_json_is_strict_json_even_for_metrics_that_are_not_finite(tmp_path) -> None:
    with simckpt.Store(tmp_path / "s").start("a") as run:
        checkpointer = run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(1))
        checkpointer.save(1, {"loss": np.nan, "best": -np.inf, "return": 0.1})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for command in (["ls", tmp_path / "s"], ["show", tmp_path / "s", "a"]):
        shown = json.loads(call(*command, "--json")[1], parse_constant=refuse)
        metrics = shown["metrics"] if command[0] == "show" else shown[0]["checkpoints"][0]["metrics"]
        assert metrics == {"loss": "nan", "best": "-inf", "return": 0.1}


def test_reading_changes_nothing(path) -> None:
    def listing() -> list[tuple[str, bytes]]:
        return [(str(file), file.read_bytes() if file.is_file() else b"") for file in sorted(path.rglob("*"))]

    before = listing()
    for arguments in (["ls", path], ["find", path], ["show", path, "ant"], ["diff", path, "ant", "cow"]):
        call(*arguments)
    assert listing() == before


@pytest.mark.parametrize(
    "command", [[], *([name] for name in ("ls", "show", "diff", "find", "pin", "unpin", "tag", "prune", "compact"))]
)
def test_every_command_has_help(command: list[str]) -> None:
    code, output, _ = call(*command, "--help")
    assert code == 0
    assert ("ls" in output and "show" in output and "diff" in output) if not command else "--json" in output


def test_the_module_and_its_exit_codes_work_from_a_shell(path, tmp_path) -> None:
    def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "simckpt", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "40"}
        )

    same = shell("diff", path, "ant", "bee")
    assert (same.returncode, same.stderr) == (0, "")
    other = shell("diff", "s", "ant", "cow")
    assert (other.returncode, other.stderr) == (1, "")
    assert "at most 0.5 apart" in other.stdout
    listing = shell("ls", path).stdout
    assert all(checkpoint in listing for checkpoint in ids(path, "ant"))
    assert shell("show", path, "nothing").returncode == 2


def rows_of(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()[1:]]


def test_find_lists_what_meets_the_condition(path) -> None:
    code, output, _ = call("find", path, "--where", "eval/return > 125 and run != 'cow'")
    assert code == 0
    assert [row[:3] for row in rows_of(output)] == [
        ["ant", "2,000", ids(path, "ant")[1]],
        ["bee", "2,000", ids(path, "bee")[1]],
    ]
    found = json.loads(call("find", path, "--where", "seed = 1 and step = 1000", "--json")[1])
    assert [each["id"] for each in found] == [ids(path, "ant")[0], ids(path, "bee")[0]]
    assert [each["metrics"] for each in found] == [{"eval/return": 125.0}] * 2
    assert len(rows_of(call("find", path)[1])) == 5


def test_find_shows_where_a_condition_has_no_meaning(path) -> None:
    code, output, error = call("find", path, "--where", "step > 1 or evl/return > 1")
    assert (code, output) == (2, "")
    assert error.splitlines()[-2:] == ["  step > 1 or evl/return > 1", "              ^"]
    assert "did you mean 'eval/return'" in error


def test_find_tells_what_it_could_not_look_at(path) -> None:
    damage(folder_of(path, "ant", 1) / "commit.json")
    code, output, error = call("find", path, "--where", "step > 0")
    assert code == 0
    assert len(rows_of(output)) == 4
    assert "not looked at" in error
    assert "commit.json is damaged" in error


def test_pin_and_tag_mark_a_checkpoint_and_ls_shows_it(path) -> None:
    assert "marks" not in call("ls", path)[1]
    assert call("pin", path, "ant@1000")[0] == 0
    assert call("tag", path, "ant@1000", "good", "paper-3")[0] == 0
    code, output, _ = call("ls", path)
    assert code == 0
    assert rows_of(output)[0][-3:] == ["pinned", "good", "paper-3"]
    shown = json.loads(call("show", path, "ant@1000", "--json")[1])
    assert (shown["pinned"], shown["tags"]) == (True, ["good", "paper-3"])
    assert "pinned  good  paper-3" in call("show", path, "ant@1000")[1]
    assert call("unpin", path, "ant@1000")[0] == 0
    code, output, _ = call("tag", path, "ant@1000", "good", "--remove", "--json")
    assert (json.loads(output)["pinned"], json.loads(output)["tags"]) == (False, ["paper-3"])
    code, _, error = call("tag", path, "ant@1000", "a b")
    assert code == 2
    assert "cannot be a tag" in error


def test_prune_shows_its_reasons_first_and_then_does_it(path) -> None:
    code, output, _ = call("prune", path, "ant", "--keep-last", "1", "--dry-run")
    assert code == 0
    first, second = rows_of(output)
    assert first[:4] == ["1,000", ids(path, "ant")[0], "would", "drop"]
    assert "KeepLast(1)" in " ".join(first)
    assert second[:3] == ["2,000", ids(path, "ant")[1], "keep"]
    assert len(json.loads(call("ls", path, "--json")[1])[0]["checkpoints"]) == 2
    code, output, _ = call("prune", path, "ant", "--keep-last", "1", "--json")
    assert [(each["step"], each["keep"]) for each in json.loads(output)] == [(1000, False), (2000, True)]
    assert len(json.loads(call("ls", path, "--json")[1])[0]["checkpoints"]) == 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-best", "1", "eval/return", "--mode", "min"], [1_000, 2_000]),
        (["--keep-best", "1", "eval/return"], [2_000]),
        (["--keep-every-steps", "1000"], [1_000, 2_000]),
        (["--keep-every-minutes", "1000000"], [1_000, 2_000]),
        (["--keep-tagged"], [2_000]),
        (["--max-bytes", "1"], [2_000]),
        (["--max-bytes", "1", "--keep-last", "2"], [1_000, 2_000]),
    ],
)
def test_every_policy_is_an_option_of_prune(path, options: list[str], kept: list[int]) -> None:
    code, output, error = call("prune", path, "ant", *options, "--dry-run", "--json")
    assert (code, error) == (0, "")
    assert [each["step"] for each in json.loads(output) if each["keep"]] == kept


def test_compact_shows_what_it_would_free_and_then_frees_it(path) -> None:
    orphan = path / "segments" / f"{'5' * 32}.h5"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"12345")
    code, output, _ = call("compact", path, "--dry-run", "--unknown")
    assert code == 0
    assert "5" * 32 in output
    assert "would free 5 B" in output
    nothing = {
        "work": [],
        "segments": [],
        "checkpoints": [],
        "nbytes": 0,
        "unknown": [],
        "unknown_nbytes": 0,
        "parts": [],
    }
    code, output, _ = call("compact", path, "--json")
    assert (code, json.loads(output)) == (0, {**nothing, "unknown": ["5" * 32], "unknown_nbytes": 5})
    code, output, _ = call("compact", path)
    assert (code, "freed 0 B" in output, "1 segment, 5 B, stays" in output) == (0, True, True)
    assert orphan.exists()
    code, output, _ = call("compact", path, "--json", "--unknown")
    assert (code, json.loads(output)) == (0, {**nothing, "segments": ["5" * 32], "nbytes": 5})
    assert not orphan.exists()
    assert call("compact", path)[:2] == (0, "freed 0 B\n")


def test_prune_needs_to_know_what_to_keep(path) -> None:
    code, _, error = call("prune", path, "ant")
    assert code == 2
    assert "say what to keep" in error
    assert call("prune", path, "ant", "--keep-last", "0")[0] == 2


def test_show_prints_where_a_checkpoint_comes_from(path) -> None:
    output = call("show", path, "ant@latest")[1]
    for label in ("experiment", "hyperparameters", "git", "host", "device", "versions", "marks"):
        assert any(line.split()[:1] == [label] for line in output.splitlines()), label
    shown = json.loads(call("show", path, "ant@latest", "--json")[1])
    assert shown["hyperparameters"] == {"seed": 1}
    assert set(shown) >= {"git", "device", "host", "experiment", "duration", "size", "versions"}
