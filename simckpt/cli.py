"""The command line: thin; everything it shows can be had from the library, and `--json` prints it for programs."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from simckpt.checkpoint import Checkpoint
from simckpt.comparison import Comparison, compare
from simckpt.errors import SimckptError, StoreError
from simckpt.run import Run
from simckpt.store import Store

DIFFERENT, FAILED = 1, 2  # exit codes; 0: done, or identical
SHORT_ID = 12  # hex digits of an id shown on a terminal
ENDLESS = 1 << 20  # width of a line that nobody's terminal has to hold [characters]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs; NaN and infinities as strings.")]
StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.")]
Address = typer.Argument(metavar="CHECKPOINT", help="An id, RUN, RUN@latest or RUN@<step>.")


@app.callback()
def main() -> None:
    """Look at checkpoint stores: runs, checkpoints, leaves, and how two checkpoints differ."""


@app.command("ls")
def list_store(store: StorePath, as_json: AsJson = False) -> None:
    """List the runs of STORE and their checkpoints.

    Damaged checkpoints and runs are listed as such and hide no others. Exit code 0: listed, damaged ones or not;
    2: STORE cannot be read.
    """
    with _readable_errors():
        contents = _contents(Store(store))
    if as_json:
        _print_json([content.as_json() for content in contents])
        return
    table = _table("run", "step", "checkpoint", "saved (UTC)", "size", "metrics")
    for content in contents:
        for checkpoint in content.checkpoints:
            table.add_row(content.name, *_checkpoint_row(checkpoint))
        for seq, error in content.damaged:
            table.add_row(
                content.name, "damaged", "" if seq is None else f"number {seq}", "", "", _printable(str(error))
            )
        if not content.checkpoints and not content.damaged:
            table.add_row(content.name, "no checkpoint yet")
    _console().print(table)


@dataclass(frozen=True)
class _Content:
    """What is known of one run: its record and checkpoints, and (commit number, or None for the record, error)."""

    name: str
    run: Run | None
    checkpoints: list[Checkpoint]
    damaged: tuple[tuple[int | None, StoreError], ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "id": None if self.run is None else self.run.id,
            "created": None if self.run is None else self.run.created,
            "hyperparameters": {} if self.run is None else dict(self.run.hyperparameters),
            "checkpoints": [_checkpoint_as_json(checkpoint) for checkpoint in self.checkpoints],
            "damaged": [{"seq": seq, "error": str(error)} for seq, error in self.damaged],
        }


def _contents(store: Store) -> list[_Content]:
    """Returns what each run holds, in the order of creation; runs whose record is damaged come last."""
    contents = []
    for name in store.files.runs():
        try:
            run = store.run(name)
        except StoreError as error:
            contents.append(_Content(name, None, [], ((None, error),)))
            continue
        damaged: dict[int, StoreError] = {}
        checkpoints = run.checkpoints(abandoned=True, damaged=damaged)
        contents.append(_Content(name, run, checkpoints, tuple(damaged.items())))
    return sorted(contents, key=lambda content: math.inf if content.run is None else content.run.created)


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
    console.print(f"checkpoint {found.id}")
    for label, value in _facts(found, run).items():
        console.print(f"  {label:<16} {_printable(value)}", soft_wrap=True)
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
    except (SimckptError, OSError) as error:
        print(f"simckpt: {_printable(str(error), keep=chr(10))}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except Exception as error:
        # Python's own exit code for these is 1, which means `different` here
        traceback.print_exc()
        raise typer.Exit(FAILED) from error


def _console() -> Console:
    # what goes through a pipe is read by programs and by grep: nothing is cut or broken there
    width = None if sys.stdout.isatty() else ENDLESS
    return Console(width=width, markup=False, emoji=False, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _printable(text: str, *, keep: str = "") -> str:
    """Returns a text without control characters, for names in a store may come from strangers."""
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


def _print_json(value: Any) -> None:
    print(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    """Returns the value without the floats that JSON lacks: they become "nan", "inf" and "-inf", as in the records."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list) else value


def _checkpoint_row(checkpoint: Checkpoint) -> list[str]:
    saved = datetime.fromtimestamp(checkpoint.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
    # whoever reads a pipe may want to keep the id
    shown = checkpoint.id[:SHORT_ID] if sys.stdout.isatty() else checkpoint.id
    return [f"{checkpoint.step:,}", shown, saved, _size(checkpoint.nbytes), _metrics(checkpoint)]


def _metrics(checkpoint: Checkpoint) -> str:
    return _printable("  ".join(f"{name} {value:.6g}" for name, value in checkpoint.metrics.items()))


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


def _facts(checkpoint: Checkpoint, run: Run) -> dict[str, str]:
    git = run.record.git
    return {
        "run": f"{run.name} ({run.id})",
        "step": f"{checkpoint.step:,}",
        "parent": checkpoint.parent or "none",
        "saved (UTC)": datetime.fromtimestamp(checkpoint.created, UTC).isoformat(sep=" ", timespec="milliseconds"),
        "size": _size(checkpoint.nbytes),
        "metrics": _metrics(checkpoint) or "none",
        "hyperparameters": "  ".join(f"{key}={value}" for key, value in run.hyperparameters.items()) or "none",
        "git": f"{git['commit']}{' (with changes)' if git['dirty'] else ''}" if git else "none",
        "versions": "  ".join(f"{name} {version}" for name, version in checkpoint.versions.items()),
    }


def _leaf_tree(checkpoint: Checkpoint) -> Tree:
    tree = Tree("/")
    groups = {"": tree}
    for leaf in checkpoint.leaves().values():
        parts = leaf.path.split("/")
        for depth in range(1, len(parts)):
            path = "/".join(parts[:depth])
            if path not in groups:
                groups[path] = groups["/".join(parts[: depth - 1])].add(_printable(parts[depth - 1]))
        shape = str(tuple(leaf.shape)) if leaf.shape else "scalar"
        groups["/".join(parts[:-1])].add(_printable(f"{parts[-1]}  {shape}  {leaf.dtype}  {_size(leaf.size)}"))
    return tree


def _print_comparison(result: Comparison) -> None:
    console = _console()
    if result.differences:
        table = _table("leaf", "how it differs")
        for difference in result.differences:
            apart = "" if difference.max_abs is None else f", at most {difference.max_abs:.6g} apart"
            table.add_row(_printable(difference.path), _printable(difference.what + apart))
        console.print(table)
    verdict = "identical" if result.identical else f"different in {len(result.differences)} places"
    console.print(f"{verdict}: A {result.a!r}, B {result.b!r}, {result.compared} leaves compared", soft_wrap=True)
    if result.exempt:
        console.print(
            f"{len(result.exempt)} places not compared: elapsed time and random streams that nobody seeded or used"
        )
