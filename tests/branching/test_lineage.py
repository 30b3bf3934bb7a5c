"""The tree of runs, from records that are written here one by one."""

import math
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import simckpt
from simckpt.branching.lineage import Graph
from simckpt.errors import RunNotFoundError
from simckpt.state import encode
from simckpt.storage import BranchRecord, CommitDraft, ImportRecord, RunRecord, StoreFiles

CHANGES = {"description": "Reseed() & Scale(learning_rate=0.5)", "hyperparameters": {"learning_rate": 5e-4}}


def new_run(files: StoreFiles, name: str, *, created: float = 1.8e9, **others: object) -> None:
    files.write_run(name, RunRecord(f"{len(files.runs()):032x}", name, created, {"learning_rate": 1e-3}, **others))


def commit(files: StoreFiles, run: str, step: int, parent: str | None = None, **others: object) -> str:
    """Commits one number; the metrics tell the step."""
    draft = CommitDraft(parent, step, {"eval/return": step / 8}, **others)
    return files.commit(run, draft, {"a": encode({"x": np.float64(step)})}).record.id


def branched(files: StoreFiles, name: str, origin: str, run: str, seq: int, step: int, **others: object) -> None:
    created, experiment = others.pop("created", 1.9e9), others.pop("experiment", None)
    record = BranchRecord(run, seq, step, **others)
    new_run(files, name, created=created, experiment=experiment, origin=origin, branch=record)


def rewrite(files: StoreFiles, name: str, **changes: object) -> None:
    """Changes a run's record behind the store's back."""
    record = RunRecord(**{**vars(files.read_run(name)), **changes})
    (files.path / "runs" / name / "run.json").write_bytes(record.to_bytes())


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A run that went back once, two branches, one of them from what was abandoned, a branch of a branch."""
    files = StoreFiles.create(tmp_path_factory.mktemp("template") / "s")
    new_run(files, "ant")
    ids = {"1": commit(files, "ant", 1_000)}
    ids["2"] = commit(files, "ant", 2_000, ids["1"])
    ids["3"] = commit(files, "ant", 3_000, ids["2"])
    ids["4"] = commit(files, "ant", 4_000, ids["3"])
    facts = {"abandoned": ids["4"], "level": 1, "changes": CHANGES, "reason": "the return fell from 250 to 12"}
    ids["back"] = commit(files, "ant", 2_000, ids["2"], kind="rollback", rollback=facts)
    ids["5"] = commit(files, "ant", 3_000, ids["back"])
    commit(files, "ant", 3_500, ids["5"], kind="exception")
    branched(files, "low", ids["2"], "ant", 2, 2_000, overrides={"learning_rate": 1e-4}, rng="reseed")
    ids["low"] = commit(files, "low", 2_500, ids["2"])
    branched(files, "lost", ids["3"], "ant", 3, 3_000)
    branched(
        files, "lower", commit(files, "low", 3_000, ids["low"]), "low", 2, 3_000, overrides={"learning_rate": 1e-5}
    )
    return files.path, ids


@pytest.fixture
def path(template: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    return shutil.copytree(template[0], tmp_path / "s")


@pytest.fixture
def ids(template: tuple[Path, dict[str, str]]) -> dict[str, str]:
    return template[1]


def graph_of(path: Path) -> Graph:
    return simckpt.Store(path).graph()


def test_each_run_stands_before_its_branches_and_branches_by_where_they_leave(path: Path) -> None:
    graph = graph_of(path)
    assert [run.name for run in graph.runs] == ["ant", "low", "lower", "lost"]
    assert [run.origin_run for run in graph.runs] == [None, "ant", "low", "ant"]
    assert [run.origin_step for run in graph.runs] == [None, 2_000, 3_000, 3_000]
    assert [run.name for run in graph.branches("ant")] == ["low", "lost"]
    assert [run.name for run in graph.branches(None)] == ["ant"]
    with pytest.raises(KeyError):
        graph.run("cow")


def test_a_branch_knows_its_overrides_and_its_streams(path: Path) -> None:
    low, lost = graph_of(path).run("low"), graph_of(path).run("lost")
    assert (low.overrides, low.rng) == ({"learning_rate": 1e-4}, "reseed")
    assert (lost.overrides, lost.rng) == ({}, "continue")
    assert lost.steps is None


def test_what_a_rollback_left_behind_is_abandoned_and_off_the_line(path: Path, ids: dict[str, str]) -> None:
    ant = graph_of(path).run("ant")
    assert [commit.id for commit in ant.commits if commit.abandoned] == [ids["3"], ids["4"]]
    assert [commit.id for commit in ant.line] == [ids[name] for name in ("1", "2", "back", "5")]
    assert ant.steps == (1_000, 3_000)
    assert ant.metrics == {"eval/return": 375.0}
    (part,) = ant.rollbacks
    assert (part.checkpoint, part.left, part.target) == (ids["back"], ids["4"], ids["2"])
    assert (part.left_step, part.target_step, part.level) == (4_000, 2_000, 1)
    assert part.abandoned == (ids["3"], ids["4"])
    assert part.reason == "the return fell from 250 to 12"
    assert dict(part.changes) == CHANGES


def test_a_post_mortem_is_neither_on_the_line_nor_abandoned(path: Path) -> None:
    (found,) = [commit for commit in graph_of(path).run("ant").commits if commit.kind == "exception"]
    assert not found.abandoned
    assert found not in graph_of(path).run("ant").line


def test_a_second_rollback_past_the_first_leaves_both_behind(path: Path, ids: dict[str, str]) -> None:
    files = StoreFiles.open(path)
    facts = {"abandoned": ids["5"], "level": 2, "changes": {"learning_rate": 1e-5}, "reason": ""}
    again = commit(files, "ant", 1_000, ids["1"], kind="rollback", rollback=facts)
    ant = graph_of(path).run("ant")
    assert ant.rollbacks[1].abandoned == (ids["2"], ids["back"], ids["5"])
    assert [commit.id for commit in ant.line] == [ids["1"], again]
    assert {commit.id for commit in ant.commits if commit.abandoned} == {
        ids[each] for each in ("2", "3", "4", "back", "5")
    }


def test_the_graph_agrees_with_the_runs_on_what_is_abandoned(path: Path) -> None:
    store = simckpt.Store(path)
    for run in store.graph().runs:
        line = [checkpoint.id for checkpoint in store.run(run.name).checkpoints()]
        assert [commit.id for commit in run.line if not commit.pruned] == line
    listed = {each.name: each.abandoned for each in store.contents()}
    assert listed["ant"] == {commit.id for commit in store.graph().run("ant").commits if commit.abandoned}


def test_bytes_added_are_those_of_the_checkpoints_that_are_there(path: Path, ids: dict[str, str]) -> None:
    store = simckpt.Store(path)
    sizes = {each.id: each.size for each in store.run("ant").checkpoints(abandoned=True)}
    assert store.graph().run("ant").bytes_added == sum(sizes.values())
    StoreFiles.open(path).prune("ant", 1, "a test")
    ant = store.graph().run("ant")
    assert ant.bytes_added == sum(sizes.values()) - sizes[ids["1"]]
    assert (len(ant.commits), len(ant.checkpoints)) == (7, 6)


def test_metrics_that_were_added_later_count(path: Path, ids: dict[str, str]) -> None:
    simckpt.Store(path).checkpoint(ids["5"]).add_metrics({"eval/return": 7.0, "long/return": 8.0})
    assert graph_of(path).run("ant").metrics == {"eval/return": 7.0, "long/return": 8.0}


def test_the_lineage_of_a_run_is_the_chain_from_its_first_ancestor(path: Path) -> None:
    store = simckpt.Store(path)
    assert [run.name for run in store.run("lower").lineage().runs] == ["ant", "low", "lower"]
    assert [run.name for run in store.run("ant").lineage().runs] == ["ant"]
    assert [run.origin_run for run in store.run("lower").lineage().runs] == [None, "ant", "low"]
    with pytest.raises(RunNotFoundError):
        store.run("cow")


def test_an_origin_is_found_by_its_id_where_the_record_of_the_branch_is_wrong_or_missing(
    path: Path, ids: dict[str, str]
) -> None:
    files = StoreFiles.open(path)
    new_run(files, "wrong", created=2e9)
    rewrite(files, "wrong", origin=ids["3"], branch=BranchRecord("low", 1, 9))
    new_run(files, "old", created=2e9)
    rewrite(files, "old", origin=ids["1"])
    for name, step in (("wrong", 3_000), ("old", 1_000)):
        assert (graph_of(path).run(name).origin_run, graph_of(path).run(name).origin_step) == ("ant", step)
        assert [run.name for run in simckpt.Store(path).run(name).lineage().runs] == ["ant", name]


def test_a_branch_whose_origin_is_not_here_is_shown_as_a_first_run(path: Path) -> None:
    files = StoreFiles.open(path)
    new_run(files, "far", created=2e9)
    rewrite(files, "far", origin="f" * 32, branch=BranchRecord("gone", 3, 9_000))
    graph = graph_of(path)
    assert graph.run("far").origin_run is None
    (line,) = [line for line in str(graph).splitlines() if line.startswith("far")]
    assert "9,000 of ffffffffffff, which is not here" in line
    assert [run.name for run in simckpt.Store(path).run("far").lineage().runs] == ["far"]


def test_an_import_says_where_it_comes_from(path: Path) -> None:
    files = StoreFiles.open(path)
    new_run(files, "copy", imported=ImportRecord("e" * 32, "ant-ppo", "d" * 32))
    commit(files, "copy", 10, kind="import")
    assert "imported from ant-ppo of store eeeeeeeeeeee" in str(graph_of(path))


def test_records_that_name_each_other_as_origins_end(path: Path) -> None:
    files = StoreFiles.open(path)
    new_run(files, "x")
    branched(files, "y", commit(files, "x", 1), "x", 1, 1)
    rewrite(files, "x", origin=commit(files, "y", 1), branch=BranchRecord("y", 1, 1))
    assert {run.name for run in graph_of(path).runs} == {"ant", "low", "lower", "lost", "x", "y"}
    lineage = simckpt.Store(path).run("x").lineage()
    assert {run.name for run in lineage.runs} == {"x", "y"}
    for graph in (lineage, graph_of(path)):
        assert re.search(r"^x .*\ny ", str(graph), re.MULTILINE) or re.search(r"^y .*\nx ", str(graph), re.MULTILINE)


def test_what_is_damaged_is_told_and_hides_no_others(path: Path, ids: dict[str, str]) -> None:
    record = path / "runs/ant/checkpoints/00000002/commit.json"
    record.write_bytes(record.read_bytes().replace(b"2000", b"2001"))
    (path / "runs/low/run.json").write_bytes(b"nonsense")
    graph = graph_of(path)
    ant = graph.run("ant")
    assert "00000002" in " ".join(ant.damaged)
    # nobody knows whether the head descends from what lies before the damaged record
    assert not any(commit.abandoned for commit in ant.commits)
    assert ant.rollbacks[0].abandoned == (ids["3"], ids["4"])
    assert "run.json" in graph.run("low").damaged[0]
    assert "damaged: " in str(graph)


def test_the_text_is_a_tree_with_all_that_the_records_say(path: Path) -> None:
    lines = str(graph_of(path)).splitlines()
    assert re.fullmatch(r"store .*/s: 4 runs, 9 checkpoints, [\d.]+ KB added", lines[0])
    assert lines[1].split() == ["run", "from", "overrides", "steps", "checkpoints", "added", "metrics"]
    assert re.match(r"ant +1,000 to 3,000 +7, 2 abandoned +[\d.]+ KB +eval/return 375$", lines[2])
    assert lines[3] == (
        "│  rolled back at 4,000 to 2,000; 2 checkpoints abandoned; level 1; "
        "Reseed() & Scale(learning_rate=0.5): learning_rate=0.0005; the return fell from 250 to 12"
    )
    assert re.match(r"├─ low +2,000 +learning_rate=0.0001  reseed +2,500 to 3,000 +2 ", lines[4])
    assert re.match(r"│  └─ lower +3,000 +learning_rate=1e-05 +0 +0 B$", lines[5])
    assert re.match(r"└─ lost +3,000 +0 +0 B$", lines[6])
    assert len(lines) == 7
    assert repr(graph_of(path)) == str(graph_of(path))


def test_texts_of_strangers_reach_neither_the_terminal_nor_the_notebook(tmp_path: Path) -> None:
    files = StoreFiles.create(tmp_path / "s")
    new_run(files, "a")
    first = commit(files, "a", 1)
    facts = {"abandoned": first, "level": 1, "changes": {"\x1b[2J": "<b>"}, "reason": "<script>\x1b]0;"}
    commit(files, "a", 1, first, kind="rollback", rollback=facts)
    branched(files, "b", first, "a", 1, 1, overrides={"<i>": "\x1b[31m"})
    graph = graph_of(tmp_path / "s")
    assert "\x1b" not in str(graph) + graph._repr_html_()
    for text in ("<script>", "=<b>", "<i>"):
        assert text not in graph._repr_html_()
        assert text.replace("<", "&lt;").replace(">", "&gt;") in graph._repr_html_()


def test_as_json_holds_plain_values(path: Path, ids: dict[str, str]) -> None:
    document = graph_of(path).as_json()
    ant, low, *_ = document["runs"]
    assert ant["head"] == ids["5"]
    assert (ant["checkpoints"], ant["abandoned"], ant["pruned"]) == (7, 2, 0)
    assert ant["rollbacks"] == [
        {
            "checkpoint": ids["back"],
            "from": {"checkpoint": ids["4"], "step": 4_000},
            "to": {"checkpoint": ids["2"], "step": 2_000},
            "level": 1,
            "reason": "the return fell from 250 to 12",
            "changes": CHANGES,
            "abandoned": [ids["3"], ids["4"]],
        }
    ]
    assert low["origin"] == {"checkpoint": ids["2"], "run": "ant", "step": 2_000}
    assert (low["overrides"], low["rng"]) == ({"learning_rate": 1e-4}, "reseed")


def test_an_empty_store_has_an_empty_tree(tmp_path: Path) -> None:
    graph = graph_of(StoreFiles.create(tmp_path / "s").path)
    assert graph.runs == ()
    assert "0 runs" in str(graph)
    assert "0 runs" in graph._repr_html_()


def test_a_rollback_without_facts_is_shown_as_far_as_it_is_known(tmp_path: Path) -> None:
    files = StoreFiles.create(tmp_path / "s")
    new_run(files, "a")
    first = commit(files, "a", 1)
    commit(files, "a", 1, first, kind="rollback", rollback={})
    (part,) = graph_of(files.path).run("a").rollbacks
    assert (part.left, part.abandoned, part.level, part.changes) == ("", (), 0, {})


def test_ten_thousand_commits_are_drawn_in_seconds(tmp_path: Path) -> None:
    from simckpt.branching.lineage import of_run
    from simckpt.catalog import Contents
    from simckpt.storage import CommitRecord

    metrics = {"eval/return": math.pi, "train/return": math.e}
    records = [
        CommitRecord(f"{n:032x}", "0" * 32, n, f"{n - 1:032x}" if n > 1 else None, "save", n * 1_000, 1.8e9, metrics)
        for n in range(1, 10_001)
    ]
    before = time.process_time()
    run = of_run(RunRecord("0" * 32, "a", 1.8e9), Contents(records, {}, {}, {}))
    text = str(Graph("s", (run,)))
    # of this process alone, whatever else runs: it takes 0.1 s, and a second would be seen by who asks for it
    assert time.process_time() - before < 2.0
    assert "1,000 to 10,000,000" in text
