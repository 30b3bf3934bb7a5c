"""Commands on the tree of runs: `log`, `branch`; and on what passes between stores: `export`, `import`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from simckpt import presentation
from simckpt.branching import drawing
from simckpt.checkpoint import Checkpoint
from simckpt.cli.application import Address, AsJson, StorePath, app, readable_errors, resolve
from simckpt.cli.printing import checkpoint_as_json, print_json, print_sessions
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, ExportNotFoundError
from simckpt.storage import exports
from simckpt.store import Store


@app.command("log")
def log(
    store: StorePath,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Only the runs that lead to this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the tree of the runs of STORE: branches with their overrides, steps, metrics, bytes added, rollbacks.

    The metrics are the newest of each name on the line of the run's head. What is damaged is told and hides no others.
    """
    with readable_errors():
        opened = Store(store)
        graph = opened.graph() if run is None else opened.run(run).lineage()
    if as_json:
        print_json(graph.as_json())
    else:
        print(graph)
        print_sessions(opened, run=run)


@app.command("branch")
def branch(
    store: StorePath,
    checkpoint: Address,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the new run.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another hyperparameter; may be repeated.")
    ] = None,
    rng: Annotated[
        str, typer.Option(help="continue: the random streams go on as saved; reseed: independent ones.")
    ] = "continue",
    experiment: Annotated[str | None, typer.Option(help="An id that groups runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Start a new run from CHECKPOINT; copies nothing.

    OTHERSTORE:RUN for a checkpoint of another store, or the path of an exported file, is imported first. Any
    checkpoint will do, abandoned ones too. A VALUE is JSON, such as 1e-4, true, null or [64, 64]; anything else is
    text, and so is any VALUE of a hyperparameter that is text in the origin. Start the branch with the origin's
    command line and this run's name.
    """
    with readable_errors():
        here = Store(store)
        source = _source(here, checkpoint)
        origin = source if isinstance(source, Checkpoint) else here.import_checkpoint(source)
        values = _overrides(overrides or [], origin.hyperparameters)
        made = origin.branch(name, values, rng=rng, store=here, experiment=experiment)
        lineage = made.lineage().run(name)
    if as_json:
        print_json(lineage.as_json())
        return
    print(f"{made.name}: from {origin!r}, {drawing.overrides(lineage) or 'no overrides'}")


@app.command("export")
def export(
    store: StorePath,
    checkpoint: Address,
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A new file; by default RUN-STEP in the working folder.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="FORM", help="h5, pt or safetensors; by default what FILE ends in, or h5.")
    ] = None,
) -> None:
    """Write CHECKPOINT as one self-contained file, which `import` and `branch` take; nothing is replaced.

    h5 opens in any HDF5 viewer; pt by torch.load(FILE, weights_only=True)["state"]; safetensors by what reads these.
    """
    with readable_errors():
        found = Store(store).checkpoint(checkpoint)
        target = Path(f"{found.run}-{found.step}.{exports.form_of(Path(), to)}") if path is None else path
        written = found.export(target, to=to)
        nbytes = written.stat().st_size
    print(f"{written}: {found!r}, {presentation.size(nbytes)}")


@app.command("import")
def import_(
    store: StorePath,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An exported file, or OTHERSTORE:RUN@<step>.")],
    run: Annotated[str | None, typer.Option(help="Name of the new run; by default that of SOURCE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Copy SOURCE into STORE, as the first checkpoint of a run of its own; every leaf is verified.

    If the same checkpoint is in STORE already, that one is told; --run with another name is an error then.
    """
    with readable_errors():
        here = Store(store)
        if ":" not in source and not Path(source).is_file():
            message = f"there is no file {source}: `import` takes an exported file, or OTHERSTORE:RUN@<step>"
            raise ExportNotFoundError(message)
        found = here.import_checkpoint(_source(here, source), run=run)
    if as_json:
        print_json(checkpoint_as_json(found))
    else:
        print(f"{found!r}: {found.id}")


def _source(here: Store, address: str) -> Checkpoint | Path:
    """Returns the checkpoint that an address means, or the exported file that it names."""
    path = Path(address)
    if path.is_file():
        return path
    try:
        return resolve(here, address)
    except CheckpointNotFoundError as error:
        if path.suffix:
            raise CheckpointNotFoundError(f"{error}; nor is there a file {address}") from error
        raise


def _overrides(settings: list[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {key: value} of texts such as "clip=0.2"; raises ConfigurationError."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"--set takes KEY=VALUE, got {setting!r}", keys=[setting])
        if key in values:
            raise ConfigurationError(f"--set gives {key!r} twice", keys=[key])
        values[key] = text if isinstance(known.get(key), str) else _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
