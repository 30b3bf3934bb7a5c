"""`simckpt log` and `simckpt branch`, and what the other commands say of branches and rollbacks."""

import json
import shutil
from pathlib import Path

import pytest
from lineage_helpers import make_store
from typer.testing import CliRunner

import simckpt
from simckpt.cli import app


def call(*arguments: object) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error of a command, all of it as through a pipe."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("template") / "s").path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "s")


def test_log_draws_the_tree_of_runs(path: Path) -> None:
    code, output, errors = call("log", path)
    assert (code, errors) == (0, "")
    assert output == f"{simckpt.Store(path).graph()}\n"
    trees = [line.partition("  ")[0] for line in output.splitlines()[2:] if "rolled back" not in line]
    assert [tree.split()[-1] for tree in trees] == ["ant-ppo", "low", "│", "high", "reseeded"]
    assert output.count("rolled back at") == 2


def test_log_of_a_run_draws_what_leads_to_it(path: Path) -> None:
    code, output, _ = call("log", path, "lower", "--json")
    assert code == 0
    assert [run["run"] for run in json.loads(output)["runs"]] == ["ant-ppo", "low", "lower"]


def test_log_as_json_is_the_graph(path: Path) -> None:
    code, output, _ = call("log", path, "--json")
    assert code == 0
    assert json.loads(output) == json.loads(json.dumps(simckpt.Store(path).graph().as_json()))


@pytest.mark.parametrize("arguments", [["nowhere"], ["s", "cow"]], ids=["no store", "no run"])
def test_log_of_what_is_not_there_is_exit_code_2(path: Path, arguments: list[str]) -> None:
    code, output, errors = call("log", path.parent / arguments[0], *arguments[1:])
    assert (code, output) == (2, "")
    assert errors.startswith("simckpt: ")


def test_branch_starts_a_run_with_overrides(path: Path) -> None:
    code, output, errors = call(
        "branch", path, "ant-ppo@300000", "trial", "--set", "learning_rate=1e-4", "--rng", "reseed"
    )
    assert (code, errors) == (0, "")
    origin = simckpt.Store(path).run("ant-ppo").at(step=300_000)
    assert output == f"trial: from {origin!r}, learning_rate=0.0001  reseed\n"
    made = simckpt.Store(path).run("trial")
    assert made.branch is not None
    assert (made.record.origin, made.branch.rng) == (origin.id, "reseed")
    assert (dict(made.overrides), made.hyperparameters["learning_rate"]) == ({"learning_rate": 1e-4}, 1e-4)


def test_branch_from_what_a_rollback_abandoned(path: Path) -> None:
    abandoned = next(each for each in simckpt.Store(path).graph().run("ant-ppo").commits if each.abandoned)
    code, output, _ = call("branch", path, abandoned.id, "what-if", "--json")
    assert code == 0
    assert json.loads(output)["origin"] == {"checkpoint": abandoned.id, "run": "ant-ppo", "step": abandoned.step}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ant-ppo", "x", "--set", "learning_rat=1"], "learning_rate"),
        (["ant-ppo", "x", "--set", "learning_rate=fast"], "learning_rate"),
        (["ant-ppo", "x", "--set", "learning_rate"], "KEY=VALUE"),
        (["ant-ppo", "x", "--set", "learning_rate=1.0", "--set", "learning_rate=2.0"], "twice"),
        (["ant-ppo", "x", "--rng", "other"], "rng"),
        (["ant-ppo", "low"], "exists"),
        (["ant-ppo@7", "x"], "no checkpoint"),
    ],
    ids=["unknown key", "wrong type", "no value", "twice", "rng", "name taken", "no checkpoint"],
)
def test_a_branch_that_cannot_be_is_exit_code_2_and_leaves_nothing(
    path: Path, arguments: list[str], message: str
) -> None:
    before = sorted(path.rglob("*"))
    code, output, errors = call("branch", path, *arguments)
    assert (code, output) == (2, "")
    assert message in errors
    assert [each for each in sorted(path.rglob("*")) if "tmp" not in each.parts] == [
        each for each in before if "tmp" not in each.parts
    ]


def test_a_value_is_json_unless_the_origin_has_text_there(tmp_path: Path) -> None:
    with simckpt.Store(tmp_path / "s").start("a") as run:
        run.configure({"clip": True, "layers": [64, 64], "name": "x", "decay": None, "steps": 5, "rate": 0.5})
        run.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1)).save(1)
    settings = {"clip": "false", "layers": "[32, 32, 32]", "name": "7", "decay": "0.1", "steps": "6", "rate": "1"}
    options = [option for key, text in settings.items() for option in ("--set", f"{key}={text}")]
    code, _, errors = call("branch", tmp_path / "s", "a", "b", *options)
    assert (code, errors) == (0, "")
    expected = {"clip": False, "layers": [32, 32, 32], "name": "7", "decay": 0.1, "steps": 6, "rate": 1.0}
    found = dict(simckpt.Store(tmp_path / "s").run("b").hyperparameters)
    assert found == expected
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in expected.items()}


def test_branch_from_another_store_imports_the_checkpoint(path: Path, tmp_path: Path) -> None:
    simckpt.Store(tmp_path / "mine").start("own").close()
    code, _, errors = call("branch", tmp_path / "mine", f"{path}:low@200000", "trial")
    assert (code, errors) == (0, "")
    graph = simckpt.Store(tmp_path / "mine").graph()
    assert [run.name for run in graph.runs] == ["own", "low", "trial"]
    assert graph.run("trial").origin_run == "low"
    assert "imported from low of store" in str(graph)


def test_a_branch_of_another_stores_checkpoint_that_cannot_be_imports_nothing(path: Path, tmp_path: Path) -> None:
    simckpt.Store(tmp_path / "mine").start("own").close()
    code, _, errors = call("branch", tmp_path / "mine", f"{path}:low", "trial", "--set", "learning_rat=1")
    assert code == 2
    assert "learning_rate" in errors
    assert [run.name for run in simckpt.Store(tmp_path / "mine").runs()] == ["own"]


def test_the_same_store_by_another_path_is_not_imported_from(path: Path) -> None:
    code, _, errors = call("branch", path, f"{path.parent}/./s:low@200000", "trial")
    assert (code, errors) == (0, "")
    assert len(simckpt.Store(path).runs()) == 6


def test_a_checkpoint_goes_through_a_file_into_another_store(path: Path, tmp_path: Path) -> None:
    code, output, errors = call("export", path, "low@200000", tmp_path / "low.h5")
    assert (code, errors) == (0, "")
    assert output.startswith(f"{tmp_path / 'low.h5'}: <Checkpoint ")
    assert call("export", path, "low@200000", tmp_path / "low.h5")[0] == 2
    code, output, errors = call("import", tmp_path / "mine", tmp_path / "low.h5", "--run", "theirs", "--json")
    assert (code, errors) == (0, "")
    assert (json.loads(output)["run"], json.loads(output)["step"]) == ("theirs", 200_000)
    assert call("diff", path, "low@200000", f"{tmp_path / 'mine'}:theirs")[0] == 0
    code, _, errors = call("branch", tmp_path / "mine", tmp_path / "low.h5", "trial", "--set", "learning_rate=0.5")
    assert (code, errors) == (0, "")
    assert simckpt.Store(tmp_path / "mine").graph().run("trial").origin_run == "theirs"
    code, output, _ = call("import", tmp_path / "mine", f"{path}:high")
    assert code == 0
    assert output.startswith("<Checkpoint ")


@pytest.mark.parametrize("form", ["h5", "pt", "safetensors"])
def test_export_takes_every_form_and_names_the_file_itself(path: Path, tmp_path: Path, monkeypatch, form: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, errors = call("export", path, "low@200000", "--to", form)
    assert (code, errors) == (0, "")
    assert output.startswith(f"low-200000.{form}: <Checkpoint ")
    assert call("import", tmp_path / "mine", f"low-200000.{form}", "--json")[0] == 0
    assert call("diff", path, "low@200000", f"{tmp_path / 'mine'}:low")[0] == 0
    code, _, errors = call("import", tmp_path / "mine", f"low-200000.{form}", "--run", "other")
    assert code == 2
    assert "in the store already" in errors


def test_export_to_another_form_is_refused(path: Path, tmp_path: Path) -> None:
    code, _, errors = call("export", path, "low@200000", tmp_path / "x", "--to", "zip")
    assert code == 2
    assert "'safetensors'" in errors


def test_a_file_that_is_not_there_is_told_as_one(path: Path, tmp_path: Path) -> None:
    code, output, errors = call("import", tmp_path / "mine", "nope.h5")
    assert (code, output) == (2, "")
    assert errors == "simckpt: there is no file nope.h5: `import` takes an exported file, or OTHERSTORE:RUN@<step>\n"
    assert not (tmp_path / "mine").exists()
    code, _, errors = call("branch", path, "nope.pt", "x")
    assert code == 2
    assert errors.endswith("nor is there a file nope.pt\n")


def test_ls_says_what_is_abandoned_and_what_is_no_ordinary_save(path: Path) -> None:
    lines = call("ls", path)[1].splitlines()
    assert lines[0].split()[-1] == "kind"
    ends = [line.rsplit("  ", 1)[-1].strip() for line in lines[1:]]
    assert set(ends) >= {"abandoned", "rollback", "exception"}
    assert sum(end == "abandoned" for end in ends) == 3
    assert lines[-1].split()[:5] == ["lower", "no", "checkpoint", "yet:", "branched"]
    runs = {run["run"]: run for run in json.loads(call("ls", path, "--json")[1])}
    assert sum(checkpoint["abandoned"] for checkpoint in runs["ant-ppo"]["checkpoints"]) == 3
    assert (runs["ant-ppo"]["branch"], runs["lower"]["branch"]["overrides"]) == (None, {"learning_rate": 1e-4})


def test_show_says_what_a_rollback_did(path: Path) -> None:
    found = next(each for each in simckpt.Store(path).run("ant-ppo").checkpoints() if each.kind == "rollback")
    output = call("show", path, found.id)[1]
    assert "kind             rollback" in output
    (line,) = [line for line in output.splitlines() if line.split()[0] == "rollback"]
    assert "level 1; Reseed(); eval/return fell" in line
    shown = json.loads(call("show", path, found.id, "--json")[1])
    assert shown["rollback"]["level"] == 1
    assert json.loads(call("show", path, "low", "--json")[1])["rollback"] is None


def test_diff_shows_hyperparameters_and_its_exit_code_goes_by_the_state_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for name, rate in (("a", 1e-3), ("b", 1e-4), ("c", 1e-3)):
        with simckpt.Store(path).start(name) as run:
            run.configure({"optimizer": {"lr": rate, "eps": 1e-8}, **({} if name == "a" else {"clip": 0.2})})
            loop = simckpt.LoopState(x=0 if name == "c" else 1)
            run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1)).save(1)
    code, output, errors = call("diff", path, "a", "b")
    assert (code, errors) == (0, "")
    rows = [line.split() for line in output.splitlines()]
    assert rows[:2] == [["hyperparameter", "A", "B"], ["optimizer.lr", "0.001", "0.0001"]]
    assert rows[2] == ["clip", "none", "of", "that", "name", "0.2"]
    assert output.splitlines()[3].startswith("identical: ")
    document = json.loads(call("diff", path, "a", "b", "--json")[1])
    assert document["hyperparameters"] == [{"name": "optimizer.lr", "a": 1e-3, "b": 1e-4}, {"name": "clip", "b": 0.2}]
    code, output, _ = call("diff", path, "b", "c")
    assert code == 1
    assert output.index("optimizer.lr") < output.index("loop/x")


def test_diff_compares_the_state_where_the_hyperparameters_are_damaged(path: Path) -> None:
    with simckpt.Store(path).start("x") as run:
        checkpointer = run.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1))
        checkpointer.save(1)
        checkpointer.save(2)
    (start,) = (path / "runs/x/starts").iterdir()
    start.write_bytes(b"nonsense")
    code, output, errors = call("diff", path, "x@1", "x@2")
    assert code == 1 if "different" in output else code == 0
    assert "hyperparameters not compared" in errors
    assert json.loads(call("diff", path, "x@1", "x@2", "--json")[1])["hyperparameters"] is None


@pytest.mark.parametrize("command", ["log", "branch", "import"])
def test_the_commands_on_the_tree_have_help(command: str) -> None:
    code, output, _ = call(command, "--help")
    assert code == 0
    assert "--json" in output
