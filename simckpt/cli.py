"""The command line: thin; everything it shows can be had from the library, and `--json` prints it for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from simckpt.checkpoint import Checkpoint
from simckpt.comparison import Comparison, compare
from simckpt.errors import SimckptError
from simckpt.run import Run
from simckpt.store import Store

DIFFERENT, USAGE = 1, 2  # exit codes; 0: done, or identical

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.")]
Address = typer.Argument(metavar="CHECKPOINT", help="An id, RUN, RUN@latest or RUN@<step>.")


@app.callback()
def main() -> None:
    """Look at checkpoint stores: runs, checkpoints, leaves, and how two checkpoints differ."""


@app.command("ls")
def list_store(store: StorePath, as_json: AsJson = False) -> None:
    """List the runs of STORE and their checkpoints."""
    with _readable_errors():
        opened = Store(store)
        runs = [(run, run.checkpoints(abandoned=True)) for run in opened.runs()]
    if as_json:
        _print_json([_run_as_json(run, checkpoints) for run, checkpoints in runs])
        return
    table = Table("run", "step", "checkpoint", "saved (UTC)", "size", "metrics", box=None, pad_edge=False)
    for run, checkpoints in runs:
        for checkpoint in checkpoints:
            table.add_row(run.name, *_checkpoint_row(checkpoint))
        if not checkpoints:
            table.add_row(run.name, "no checkpoint yet")
    _console().print(table)


@app.command("show")
def show(store: StorePath, checkpoint: Annotated[str, Address], as_json: AsJson = False) -> None:
    """Show one CHECKPOINT of STORE: what it knows of itself, and its tree of leaves."""
    with _readable_errors():
        found = Store(store).checkpoint(checkpoint)
        run = Store(store).run(found.run)
        leaves = found.leaves()
    if as_json:
        _print_json(
            _checkpoint_as_json(found)
            | {
                "hyperparameters": dict(run.hyperparameters),
                "versions": dict(found.versions),
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
    console = _console()
    console.print(f"checkpoint {found.id}", highlight=False)
    for label, value in _facts(found, run).items():
        console.print(f"  {label:<16} {value}", highlight=False, soft_wrap=True)
    console.print(_leaf_tree(found))


@app.command("diff")
def diff(
    store: StorePath,
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: an id, RUN, RUN@latest, RUN@<step>.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one; OTHERSTORE:RUN for one of another store.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints leaf by leaf. Exit code 0: identical, 1: different, 2: could not compare."""
    with _readable_errors():
        result = compare(_resolve(store, a), _resolve(store, b))
    if as_json:
        _print_json(result.as_json())
    else:
        _print_comparison(result)
    raise typer.Exit(0 if result.identical else DIFFERENT)


def _resolve(store: Path, address: str) -> Checkpoint:
    # a colon is in no run name, so what lies before it is another store
    folder, colon, rest = address.rpartition(":")
    return Store(folder if colon else store).checkpoint(rest)


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except SimckptError as error:
        print(f"simckpt: {error}", file=sys.stderr)
        raise typer.Exit(USAGE) from error


def _console() -> Console:
    # a pipe has no width; cutting ids there would make the output useless to other programs
    return Console() if sys.stdout.isatty() else Console(width=200)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=True))


def _checkpoint_row(checkpoint: Checkpoint) -> list[str]:
    saved = datetime.fromtimestamp(checkpoint.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
    metrics = "  ".join(f"{name} {value:.6g}" for name, value in checkpoint.metrics.items())
    return [f"{checkpoint.step:,}", checkpoint.id[:12], saved, _size(checkpoint.nbytes), metrics]


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _checkpoint_as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "id": checkpoint.id,
        "run": checkpoint.run,
        "step": checkpoint.step,
        "parent": checkpoint.parent,
        "kind": checkpoint.kind,
        "created": checkpoint.created,
        "nbytes": checkpoint.nbytes,
        "metrics": dict(checkpoint.metrics),
    }


def _run_as_json(run: Run, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    return {
        "run": run.name,
        "id": run.id,
        "created": run.created,
        "hyperparameters": dict(run.hyperparameters),
        "checkpoints": [_checkpoint_as_json(checkpoint) for checkpoint in checkpoints],
    }


def _facts(checkpoint: Checkpoint, run: Run) -> dict[str, str]:
    git = run.record.git
    return {
        "run": f"{run.name} ({run.id})",
        "step": f"{checkpoint.step:,}",
        "parent": checkpoint.parent or "none",
        "saved (UTC)": datetime.fromtimestamp(checkpoint.created, UTC).isoformat(sep=" ", timespec="milliseconds"),
        "size": _size(checkpoint.nbytes),
        "metrics": "  ".join(f"{name} {value:.6g}" for name, value in checkpoint.metrics.items()) or "none",
        "hyperparameters": "  ".join(f"{key}={value}" for key, value in run.hyperparameters.items()) or "none",
        "git": f"{git['commit']}{' (with changes)' if git['dirty'] else ''}" if git else "none",
        "versions": "  ".join(f"{name} {version}" for name, version in checkpoint.versions.items()),
    }


def _leaf_tree(checkpoint: Checkpoint) -> Tree:
    tree = Tree("/", highlight=False)
    groups = {"": tree}
    for leaf in checkpoint.leaves().values():
        parts = leaf.path.split("/")
        for depth in range(1, len(parts)):
            path = "/".join(parts[:depth])
            if path not in groups:
                groups[path] = groups["/".join(parts[: depth - 1])].add(parts[depth - 1], highlight=False)
        shape = str(tuple(leaf.shape)) if leaf.shape else "scalar"
        groups["/".join(parts[:-1])].add(f"{parts[-1]}  {shape}  {leaf.dtype}  {_size(leaf.size)}", highlight=False)
    return tree


def _print_comparison(result: Comparison) -> None:
    console = _console()
    if result.differences:
        table = Table("leaf", "how it differs", box=None, pad_edge=False)
        for difference in result.differences:
            apart = "" if difference.max_abs is None else f", at most {difference.max_abs:.6g} apart"
            table.add_row(difference.path, difference.description + apart)
        console.print(table)
    verdict = "identical" if result.identical else f"different in {len(result.differences)} places"
    console.print(
        f"{verdict}: A {result.a!r}, B {result.b!r}, {result.compared} leaves compared", soft_wrap=True, markup=False
    )
    if result.exempt:
        console.print(f"wall-clock leaves, not compared: {', '.join(result.exempt)}", soft_wrap=True)
