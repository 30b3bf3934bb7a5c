"""How the commands print: lists of checkpoints, tables, JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from simckpt import presentation
from simckpt.checkpoint import Checkpoint
from simckpt.errors import StoreError
from simckpt.session_pruning import sessions_of
from simckpt.store import Store

ENDLESS = 1 << 20  # width of a line that nobody's terminal has to hold [characters]


def console() -> Console:
    """Returns a console that prints texts as they are."""
    # what goes through a pipe is read by programs and by grep: nothing is cut or broken there
    width = None if sys.stdout.isatty() else ENDLESS
    return Console(width=width, markup=False, emoji=False, highlight=False)


def print_checkpoints(rows: list[list[str]]) -> None:
    """Prints lines of `checkpoint_row`; the last columns are left out where no line has anything in them."""
    # by hand: rich takes milliseconds for a row, and there may be ten thousand
    shown = [["run", "step", "checkpoint", "saved (UTC)", "size", "metrics", "marks", "kind"], *rows]
    while not any(row[-1] for row in shown[1:]) and len(shown[0]) > 6:
        shown = [row[:-1] for row in shown]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*shown, fillvalue="")]
    lines = ["  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)]).rstrip() for row in shown]
    print("\n".join(lines))


def table(*columns: str) -> Table:
    """Returns an empty table without lines."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_json(value: Any) -> None:
    """Prints strict JSON: floats that JSON lacks become "nan", "inf" and "-inf", as in the records."""
    print(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value


def checkpoint_row(checkpoint: Checkpoint, *, abandoned: bool = False) -> list[str]:
    """Returns a line of `print_checkpoints`."""
    facts = [
        f"{checkpoint.step:,}",
        short(checkpoint.id),
        presentation.moment(checkpoint.created),
        presentation.size(checkpoint.size),
        presentation.metrics(checkpoint.metrics),
        marks(checkpoint),
    ]
    kind = [*([] if checkpoint.kind == "save" else [checkpoint.kind]), *(["abandoned"] if abandoned else [])]
    kind += ["in the archive"] if checkpoint.tier == "archive" else []
    return [checkpoint.run, *facts, ", ".join(kind)]


def print_sessions(store: Store, *, run: str | None = None) -> None:
    """Prints where to look for recordings, if a store has any; of one run those that its checkpoints were driving."""
    with contextlib.suppress(StoreError):  # `session list` and `check` tell of it
        names = store.files.sessions() if run is None else sessions_of(store.files, run)
        if names:
            count = presentation.count(len(names), "session")
            print(f"{count} of hardware in the loop: `simckpt session list {presentation.printable(str(store.path))}`")


def short(id: str) -> str:
    """Returns the beginning of an id on a terminal, all of it elsewhere."""
    # whoever reads a pipe may want to keep the id
    return id[: presentation.SHORT_ID] if sys.stdout.isatty() else id


def marks(checkpoint: Checkpoint) -> str:
    """Returns whether a checkpoint is pinned, and its tags."""
    return "  ".join([*(["pinned"] if checkpoint.pinned else []), *sorted(checkpoint.tags)])


def checkpoint_as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what listings say of a checkpoint."""
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
        "tier": checkpoint.tier,
        "metrics": dict(checkpoint.metrics),
        "tags": sorted(checkpoint.tags),
        "pinned": checkpoint.pinned,
        "host": checkpoint.host,
    }
