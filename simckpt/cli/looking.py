"""Commands that look at checkpoints: `ls`, `find`, `show`, `diff`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.tree import Tree

from simckpt import presentation
from simckpt.branching import drawing
from simckpt.checkpoint import Checkpoint
from simckpt.cli.application import DIFFERENT, Address, AsJson, StorePath, app, readable_errors, resolve
from simckpt.cli.printing import (
    checkpoint_as_json,
    checkpoint_row,
    console,
    marks,
    print_checkpoints,
    print_json,
    print_sessions,
    table,
)
from simckpt.comparison import Comparison, compare
from simckpt.errors import StoreError
from simckpt.listing import RunContents
from simckpt.presentation import printable
from simckpt.store import Store


@app.command("ls")
def list_store(store: StorePath, as_json: AsJson = False) -> None:
    """List the runs of STORE and their checkpoints.

    Abandoned ones are marked as such. Damaged checkpoints and runs are listed as such and hide no others. Exit code 0:
    listed, damaged ones or not; 2: STORE cannot be read.
    """
    with readable_errors():
        opened = Store(store)
        contents = opened.contents()
    if as_json:
        print_json([_contents_as_json(content) for content in contents])
        return
    rows = []
    for content in contents:
        rows += [
            checkpoint_row(checkpoint, abandoned=checkpoint.id in content.abandoned)
            for checkpoint in content.checkpoints
        ]
        rows += [
            [content.name, "damaged", "" if seq is None else f"number {seq}", "", "", printable(str(error)), "", ""]
            for seq, error in content.damaged
        ]
        if not content.checkpoints and not content.damaged:
            branch = None if content.run is None else content.run.branch
            origin = "" if branch is None else f": branched from {branch.run}@{branch.step}"
            rows.append([content.name, f"no checkpoint yet{origin}", "", "", "", "", "", ""])
    print_checkpoints(rows)
    print_sessions(opened)


@app.command("find")
def find(
    store: StorePath,
    where: Annotated[str | None, typer.Option(help="Such as: eval/return > 3000 and git.commit = '4f2c9a1'")] = None,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Also those off the line of their run's head.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of STORE that meet a condition.

    A condition compares a name with a value by = != < <= > >= like; `and`, `or`, `not` and brackets join conditions.
    Names: metrics and hyperparameters, id, run, step, kind, parent, created, duration, size, tier, host, device,
    experiment, git.commit, git.dirty, tag, pinned, versions.PACKAGE. Text stands in quotes; % in a `like` is any text.
    Exit code 0: listed, be it none; 2: the condition has no meaning, or STORE cannot be read.
    """
    damaged: dict[tuple[str, int | None], StoreError] = {}
    with readable_errors():
        found = Store(store).checkpoints(where, abandoned=abandoned, damaged=damaged)
    for error in damaged.values():
        print(f"simckpt: not looked at: {printable(str(error))}", file=sys.stderr)
    if as_json:
        print_json([checkpoint_as_json(checkpoint) for checkpoint in found])
        return
    print_checkpoints([checkpoint_row(checkpoint) for checkpoint in found])


@app.command("show")
def show(store: StorePath, checkpoint: Address, as_json: AsJson = False) -> None:
    """Show one CHECKPOINT of STORE: what it knows of itself, and its tree of leaves."""
    with readable_errors():
        found = Store(store).checkpoint(checkpoint)
        facts, known = _facts(found), _facts_as_json(found)
        leaves = found.leaves()
    if as_json:
        print_json(
            known
            | {
                "leaves": [
                    {
                        "path": leaf.path,
                        "dtype": leaf.dtype,
                        "shape": list(leaf.shape),
                        "kind": leaf.kind,
                        "size": leaf.size,
                    }
                    for leaf in leaves.values()
                ],
            }
        )
        return
    screen = console()
    screen.print(f"checkpoint {found.id}")
    for label, value in facts.items():
        screen.print(f"  {label:<16} {printable(value)}", soft_wrap=True)
    screen.print(_leaf_tree(found))


@app.command("diff")
def diff(
    store: StorePath,
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: an id, RUN, RUN@latest, RUN@<step>.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one; OTHERSTORE:RUN for one of another store.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: their hyperparameters, and their state leaf by leaf.

    The state alone decides the exit code: 0: identical, 1: different, 2: could not compare.
    """
    with readable_errors():
        here = Store(store)
        result = compare(resolve(here, a), resolve(here, b))
    if as_json:
        print_json(result.as_json())
    else:
        _print_comparison(result)
    raise typer.Exit(0 if result.identical else DIFFERENT)


def _contents_as_json(contents: RunContents) -> dict[str, Any]:
    run = contents.run
    return {
        "run": contents.name,
        "id": None if run is None else run.id,
        "created": None if run is None else run.created,
        "hyperparameters": {} if run is None else dict(run.hyperparameters),
        "branch": None if run is None else _branch_as_json(run.branch),
        "checkpoints": [
            checkpoint_as_json(checkpoint) | {"abandoned": checkpoint.id in contents.abandoned}
            for checkpoint in contents.checkpoints
        ],
        "damaged": [{"seq": seq, "error": str(error)} for seq, error in contents.damaged],
    }


def _branch_as_json(branch: Any) -> dict[str, Any] | None:
    return None if branch is None else {**vars(branch), "overrides": dict(branch.overrides)}


def _facts_as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return checkpoint_as_json(checkpoint) | {
        "rollback": None if checkpoint.rollback is None else dict(checkpoint.rollback),
        "hyperparameters": dict(checkpoint.hyperparameters),
        "experiment": checkpoint.experiment,
        "git": None if checkpoint.git is None else dict(checkpoint.git),
        "device": checkpoint.device,
        "versions": dict(checkpoint.versions),
    }


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    git = checkpoint.git
    saved = datetime.fromtimestamp(checkpoint.created, UTC).isoformat(sep=" ", timespec="milliseconds")
    nbytes, added = presentation.size(checkpoint.nbytes), presentation.size(checkpoint.size)
    rollback = {} if checkpoint.rollback is None else {"rollback": drawing.rollback_facts(checkpoint.rollback)}
    return {
        "run": checkpoint.run,
        "step": f"{checkpoint.step:,}",
        "kind": checkpoint.kind,
        "parent": checkpoint.parent or "none",
        **rollback,
        "saved (UTC)": f"{saved}, took {checkpoint.duration:.3g} s" if checkpoint.duration else saved,
        "size": f"{nbytes}, added {added} to the store",
        **({"tier": "in the archive alone; it comes back when it is read"} if checkpoint.tier == "archive" else {}),
        "metrics": presentation.metrics(checkpoint.metrics) or "none",
        "marks": marks(checkpoint) or "none",
        "experiment": checkpoint.experiment or "none",
        "hyperparameters": presentation.hyperparameters(checkpoint.hyperparameters) or "none",
        "git": "none" if git is None else _commit(git),
        "host": checkpoint.host,
        "device": checkpoint.device or "unknown",
        "versions": "  ".join(f"{name} {version}" for name, version in checkpoint.versions.items()),
    }


def _commit(git: Mapping[str, Any]) -> str:
    if git.get("dirty") is None:
        changes = ", with changes or without: git did not say"
    else:
        lines = len(str(git.get("diff", "")).splitlines())
        changes = f", with changes: {lines} lines of diff (--json)" if git["dirty"] else ""
    return f"{git.get('commit')}{changes}"


def _leaf_tree(checkpoint: Checkpoint) -> Tree:
    tree = Tree("/")
    groups = {"": tree}
    for leaf in checkpoint.leaves().values():
        parts = leaf.path.split("/")
        for depth in range(1, len(parts)):
            path = "/".join(parts[:depth])
            if path not in groups:
                groups[path] = groups["/".join(parts[: depth - 1])].add(printable(parts[depth - 1]))
        shape = str(tuple(leaf.shape)) if leaf.shape else "scalar"
        text = f"{parts[-1]}  {shape}  {leaf.dtype}  {presentation.size(leaf.size)}"
        groups["/".join(parts[:-1])].add(printable(text))
    return tree


def _print_comparison(result: Comparison) -> None:
    screen = console()
    try:
        changed = result.hyperparameters
    except StoreError as error:
        changed = ()
        print(f"simckpt: hyperparameters not compared: {printable(str(error))}", file=sys.stderr)
    if changed:
        shown = table("hyperparameter", "A", "B")
        for each in changed:
            shown.add_row(*map(printable, (each.name, each.text("a"), each.text("b"))))
        screen.print(shown)
    if result.differences:
        shown = table("leaf", "how it differs")
        for difference in result.differences:
            apart = "" if difference.max_abs is None else f", at most {difference.max_abs:.6g} apart"
            shown.add_row(printable(difference.path), printable(difference.what + apart))
        screen.print(shown)
    places = presentation.count(len(result.differences), "place")
    verdict = "identical" if result.identical else f"different in {places}"
    screen.print(f"{verdict}: A {result.a!r}, B {result.b!r}, {result.compared} leaves compared", soft_wrap=True)
    if result.exempt:
        screen.print(
            f"{len(result.exempt)} places not compared: elapsed time and random streams that nobody seeded or used"
        )
