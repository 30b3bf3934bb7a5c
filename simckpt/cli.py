"""The command line: thin; everything it shows can be had from the library, and `--json` prints it for programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import sys
import traceback
from collections.abc import Iterator, Mapping
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
from simckpt.errors import ConfigurationError, SimckptError, StoreError
from simckpt.policies import KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged, MaxBytes
from simckpt.store import RunContents, Store

DIFFERENT, FAILED = 1, 2  # exit codes; 0: done, or identical
SHORT_ID = 12  # hex digits of an id shown on a terminal
ENDLESS = 1 << 20  # width of a line that nobody's terminal has to hold [characters]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs; NaN and infinities as strings.")]
StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.")]
Address = typer.Argument(metavar="CHECKPOINT", help="An id, RUN, RUN@latest or RUN@<step>.")


@app.callback()
def main() -> None:
    """Look at checkpoint stores: runs, checkpoints, leaves, how two checkpoints differ; mark and prune checkpoints."""


@app.command("ls")
def list_store(store: StorePath, as_json: AsJson = False) -> None:
    """List the runs of STORE and their checkpoints.

    Damaged checkpoints and runs are listed as such and hide no others. Exit code 0: listed, damaged ones or not;
    2: STORE cannot be read.
    """
    with _readable_errors():
        contents = Store(store).contents()
    if as_json:
        _print_json([_contents_as_json(content) for content in contents])
        return
    rows = []
    for content in contents:
        rows += [_checkpoint_row(checkpoint) for checkpoint in content.checkpoints]
        rows += [
            [content.name, "damaged", "" if seq is None else f"number {seq}", "", "", _printable(str(error)), ""]
            for seq, error in content.damaged
        ]
        if not content.checkpoints and not content.damaged:
            rows.append([content.name, "no checkpoint yet", "", "", "", "", ""])
    _print_checkpoints(rows)


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
    Names: metrics and hyperparameters, id, run, step, kind, parent, created, duration, size, host, device, experiment,
    git.commit, git.dirty, tag, pinned, versions.PACKAGE. Text stands in quotes; % in a `like` is any text.
    Exit code 0: listed, be it none; 2: the condition has no meaning, or STORE cannot be read.
    """
    damaged: dict[tuple[str, int | None], StoreError] = {}
    with _readable_errors():
        found = Store(store).checkpoints(where, abandoned=abandoned, damaged=damaged)
    for error in damaged.values():
        print(f"simckpt: not looked at: {_printable(str(error))}", file=sys.stderr)
    if as_json:
        _print_json([_checkpoint_as_json(checkpoint) for checkpoint in found])
        return
    _print_checkpoints([_checkpoint_row(checkpoint) for checkpoint in found])


@app.command("pin")
def pin(store: StorePath, checkpoint: Annotated[str, Address], as_json: AsJson = False) -> None:
    """Protect CHECKPOINT from pruning."""
    with _readable_errors():
        found = Store(store).checkpoint(checkpoint)
        found.pin()
    _print_marks(found, as_json=as_json)


@app.command("unpin")
def unpin(store: StorePath, checkpoint: Annotated[str, Address], as_json: AsJson = False) -> None:
    """End the protection of CHECKPOINT from pruning."""
    with _readable_errors():
        found = Store(store).checkpoint(checkpoint)
        found.unpin()
    _print_marks(found, as_json=as_json)


@app.command("tag")
def tag(
    store: StorePath,
    checkpoint: Annotated[str, Address],
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Letters, digits, dots, underscores, hyphens.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tags instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tag CHECKPOINT; also while its run is training."""
    with _readable_errors():
        found = Store(store).checkpoint(checkpoint)
        if remove:
            found.untag(*tags)
        else:
            found.tag(*tags)
    _print_marks(found, as_json=as_json)


@app.command("prune")
def prune(
    store: StorePath,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the last N.")] = None,
    keep_best: Annotated[
        tuple[int, str] | None, typer.Option(metavar="N METRIC", help="Keep the N best by a metric.")
    ] = None,
    mode: Annotated[str, typer.Option(help="What is best: max or min.")] = "max",
    keep_every_steps: Annotated[int | None, typer.Option(metavar="N", help="Keep one for each N steps.")] = None,
    keep_every_minutes: Annotated[float | None, typer.Option(metavar="M", help="Keep one for each M minutes.")] = None,
    keep_tagged: Annotated[bool, typer.Option("--keep-tagged", help="Keep those with any tag.")] = False,
    max_bytes: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest that fit into N bytes.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be dropped, and why.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop the checkpoints of RUN that no option keeps, and show the reasons.

    Never dropped: the newest, pinned ones, the origins of other runs and the targets of rollbacks.
    """
    policies: list[KeepPolicy] = []
    with _readable_errors():
        policies += [] if keep_last is None else [KeepLast(keep_last)]
        policies += [] if keep_best is None else [KeepBest(*keep_best, mode=mode)]
        policies += [] if keep_every_steps is None else [KeepEvery(steps=keep_every_steps)]
        policies += [] if keep_every_minutes is None else [KeepEvery(minutes=keep_every_minutes)]
        policies += [KeepTagged()] if keep_tagged else []
        policies += [] if max_bytes is None else [MaxBytes(max_bytes)]
        if not policies:
            raise ConfigurationError("say what to keep, such as --keep-last 3: without that all but one would go")
        opened = Store(store).run(run)
        steps = {checkpoint.id: checkpoint.step for checkpoint in opened.checkpoints()}
        verdicts = opened.prune(functools.reduce(operator.or_, policies), dry_run=dry_run)
    if as_json:
        _print_json([{"step": steps[verdict.id], **dataclasses.asdict(verdict)} for verdict in verdicts])
        return
    table = _table("step", "checkpoint", "", "reason")
    for verdict in verdicts:
        done = "keep" if verdict.keep else "would drop" if dry_run else "dropped"
        table.add_row(f"{steps[verdict.id]:,}", _short(verdict.id), done, _printable(verdict.reason))
    _console().print(table)


def _contents_as_json(contents: RunContents) -> dict[str, Any]:
    run = contents.run
    return {
        "run": contents.name,
        "id": None if run is None else run.id,
        "created": None if run is None else run.created,
        "hyperparameters": {} if run is None else dict(run.hyperparameters),
        "checkpoints": [_checkpoint_as_json(checkpoint) for checkpoint in contents.checkpoints],
        "damaged": [{"seq": seq, "error": str(error)} for seq, error in contents.damaged],
    }


@app.command("show")
def show(store: StorePath, checkpoint: Annotated[str, Address], as_json: AsJson = False) -> None:
    """Show one CHECKPOINT of STORE: what it knows of itself, and its tree of leaves."""
    with _readable_errors():
        found = Store(store).checkpoint(checkpoint)
        facts, known = _facts(found), _facts_as_json(found)
        leaves = found.leaves()
    if as_json:
        _print_json(
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
    console = _console()
    console.print(f"checkpoint {found.id}")
    for label, value in facts.items():
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


def _print_checkpoints(rows: list[list[str]]) -> None:
    # by hand: rich takes milliseconds for a row, and there may be ten thousand
    header = ["run", "step", "checkpoint", "saved (UTC)", "size", "metrics", "marks"]
    shown = [header[:-1] if not any(row[-1] for row in rows) else header, *rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*shown, fillvalue="")]
    lines = ["  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)]).rstrip() for row in shown]
    print("\n".join(lines))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _printable(text: str, *, keep: str = "") -> str:
    """Returns a text without control characters, for names in a store may come from strangers."""
    if text.isprintable():
        return text
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
    facts = [f"{checkpoint.step:,}", _short(checkpoint.id), saved, _size(checkpoint.size), _metrics(checkpoint)]
    return [checkpoint.run, *facts, _marks(checkpoint)]


def _short(id: str) -> str:
    # whoever reads a pipe may want to keep the id
    return id[:SHORT_ID] if sys.stdout.isatty() else id


def _marks(checkpoint: Checkpoint) -> str:
    return "  ".join([*(["pinned"] if checkpoint.pinned else []), *sorted(checkpoint.tags)])


def _print_marks(checkpoint: Checkpoint, *, as_json: bool) -> None:
    if as_json:
        _print_json(_checkpoint_as_json(checkpoint))
    else:
        _console().print(f"{checkpoint!r}: {_marks(checkpoint) or 'no tags, not pinned'}", soft_wrap=True)


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
        "duration": checkpoint.duration,
        "nbytes": checkpoint.nbytes,
        "size": checkpoint.size,
        "metrics": dict(checkpoint.metrics),
        "tags": sorted(checkpoint.tags),
        "pinned": checkpoint.pinned,
        "host": checkpoint.host,
    }


def _facts_as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return _checkpoint_as_json(checkpoint) | {
        "hyperparameters": dict(checkpoint.hyperparameters),
        "experiment": checkpoint.experiment,
        "git": None if checkpoint.git is None else dict(checkpoint.git),
        "device": checkpoint.device,
        "versions": dict(checkpoint.versions),
    }


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    git = checkpoint.git
    saved = datetime.fromtimestamp(checkpoint.created, UTC).isoformat(sep=" ", timespec="milliseconds")
    return {
        "run": checkpoint.run,
        "step": f"{checkpoint.step:,}",
        "parent": checkpoint.parent or "none",
        "saved (UTC)": f"{saved}, took {checkpoint.duration:.3g} s" if checkpoint.duration else saved,
        "size": f"{_size(checkpoint.nbytes)}, added {_size(checkpoint.size)} to the store",
        "metrics": _metrics(checkpoint) or "none",
        "marks": _marks(checkpoint) or "none",
        "experiment": checkpoint.experiment or "none",
        "hyperparameters": "  ".join(f"{key}={value}" for key, value in checkpoint.hyperparameters.items()) or "none",
        "git": "none" if git is None else _commit(git),
        "host": checkpoint.host,
        "device": checkpoint.device or "unknown",
        "versions": "  ".join(f"{name} {version}" for name, version in checkpoint.versions.items()),
    }


def _commit(git: Mapping[str, Any]) -> str:
    if git["dirty"] is None:
        changes = ", with changes or without: git did not say"
    else:
        lines = len(git.get("diff", "").splitlines())
        changes = f", with changes: {lines} lines of diff (--json)" if git["dirty"] else ""
    return f"{git['commit']}{changes}"


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
