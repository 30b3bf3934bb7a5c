"""Starting a run from a checkpoint under other hyperparameters: one small record, whatever the checkpoint weighs."""

from __future__ import annotations

import platform
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simckpt import configuration, provenance
from simckpt.branching.arguments import check_rng
from simckpt.branching.importing import import_checkpoint
from simckpt.checkpoint import Checkpoint
from simckpt.errors import BranchWarning, ConfigurationError, ConflictError
from simckpt.policies.arguments import in_kind_of
from simckpt.run import Run
from simckpt.storage import BranchRecord, RunRecord, StoreFiles
from simckpt.storage.names import check_run_name
from simckpt.suggest import nearest


def branch(
    origin: Checkpoint,
    name: str,
    overrides: Mapping[str, Any],
    *,
    rng: str,
    files: StoreFiles,
    experiment: str | None,
) -> Run:
    """Returns a new run, to read, that starts from a checkpoint; `Checkpoint.branch` tells more.

    Args:
        origin: the checkpoint.
        name: of the new run.
        overrides: {hyperparameter: value}.
        rng: "continue" or "reseed".
        files: the store in which the run begins; the origin is imported unless it lies there.
        experiment: an id that groups runs; the origin's by default.

    Raises:
        as `Checkpoint.branch`.
    """
    check_rng(rng)
    values = origin.hyperparameters
    changed = checked_overrides(values, overrides, source=repr(origin))
    check_run_name(name)
    if name in files.runs():
        raise ConflictError(f"run {name!r} exists already: choose another name for the branch")
    _warn_of_names(origin, name, changed)
    origin = import_checkpoint(files, origin, run=None, besides={name})
    record = RunRecord(
        id=uuid.uuid4().hex,
        name=name,
        created=time.time(),
        hyperparameters={**values, **changed},
        origin=origin.id,
        experiment=origin.experiment if experiment is None else experiment,
        git=provenance.git_commit(Path.cwd()),
        versions=provenance.versions(),
        host=platform.node(),
        branch=BranchRecord(origin.run, origin.seq, origin.step, changed, rng),
    )
    files.write_run(name, record)
    made = Run(files, name)
    made.log("branched", origin=origin.id, run=origin.run, step=origin.step, overrides=changed, rng=rng)
    return made


def checked_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Returns the overrides as a record keeps them: an integer for a float becomes one.

    Args:
        values: the origin's hyperparameters.
        overrides: {key: value}.
        source: the origin, for messages.

    Raises:
        ConfigurationError: keys that the origin lacks, with the near ones, values of another type, or such that are
            not finite where the origin's are; all are told.
    """
    if not isinstance(overrides, Mapping):
        raise ConfigurationError(f"overrides are {{hyperparameter: value}}, got {type(overrides).__name__}")
    changed: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for key, given in overrides.items():
        if key not in values:
            problems[str(key)] = f"{key!r} is no hyperparameter of it{nearest(str(key), values)}"
            continue
        try:
            changed[key] = in_kind_of(values[key], configuration.plain(key, given))
        except ConfigurationError as error:
            problems[key] = str(error)
        except (TypeError, OverflowError) as error:
            problems[key] = f"{key!r}: {error}"
    if problems:
        listing = "\n  ".join(problems.values())
        raise ConfigurationError(f"{source} cannot be branched with these overrides:\n  {listing}", keys=list(problems))
    return changed


def _warn_of_names(origin: Checkpoint, name: str, changed: Mapping[str, Any]) -> None:
    """Warns of overrides of keys that hold the name of the origin's run, which a script gives for itself."""
    for key, value in changed.items():
        if origin.hyperparameters[key] == origin.run and value != name:
            warnings.warn(
                f"{key!r} holds the name of run {origin.run!r}, and the branch {name!r} gets {value!r} there: a script "
                f"that gives it {name!r} contradicts that. The name of the branch is `name` alone; leave {key!r} out",
                BranchWarning,
                stacklevel=4,
            )
