"""What all commands share: their arguments, their exit codes, how an error becomes one of these."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from simckpt import presentation
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ArchiveDamagedError, DamagedError, SimckptError
from simckpt.store import Store

DIFFERENT, FAILED = 1, 2  # exit codes; 0: done, or identical

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs; NaN and infinities as strings.")]
StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.")]
Address = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="An id, RUN, RUN@latest or RUN@<step>.")]


@app.callback()
def main() -> None:
    """Look at checkpoint stores: runs, checkpoints, leaves, how two differ; branch from, mark, prune, verify them."""


def resolve(here: Store, address: str) -> Checkpoint:
    """Returns a checkpoint of a store; `OTHERSTORE:` before its address means another one."""
    # a colon is in no run name, so what lies before it is another store
    folder, colon, rest = address.rpartition(":")
    # another spelling of the same folder is the same store
    is_here = not colon or (here.path.exists() and Path(folder).exists() and here.path.samefile(folder))
    return (here if is_here else Store(folder)).checkpoint(rest)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turns every error inside into its message and exit code 2; warnings are their message alone."""
    before = warnings.formatwarning
    warnings.formatwarning = _warning
    try:
        yield
    except (SimckptError, OSError) as error:
        text = str(error)
        if isinstance(error, DamagedError) and not isinstance(error, ArchiveDamagedError) and "`simckpt" not in text:
            text += "; `simckpt check STORE` says what is damaged, `simckpt check STORE --repair` does what can be done"
        print(f"simckpt: {presentation.printable(text, keep=chr(10))}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except Exception as error:
        # Python's own exit code for these is 1, which means `different` here
        print(presentation.printable(traceback.format_exc(), keep=chr(10)), file=sys.stderr)
        raise typer.Exit(FAILED) from error
    finally:
        warnings.formatwarning = before


def _warning(message: Warning | str, *place: object, **more: object) -> str:
    return f"simckpt: warning: {presentation.printable(str(message), keep=chr(10))}\n"
