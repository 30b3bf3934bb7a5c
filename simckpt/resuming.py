"""What a start of a run restores: its head, or what it was branched from; and what is to differ from that."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from simckpt.errors import BranchWarning, CheckpointNotFoundError
from simckpt.restore import Adjustment
from simckpt.rollback import require_declared

if TYPE_CHECKING:
    from simckpt.branching.hyperparameters import Hyperparameters
    from simckpt.checkpoint import Checkpoint
    from simckpt.run import Run


def place_to_resume(run: Run, hyperparameters: Hyperparameters | None) -> tuple[Checkpoint, Adjustment] | None:
    """Returns the checkpoint to restore and what is to differ, or None if there is nothing to restore.

    Args:
        run: that is started.
        hyperparameters: what holds them, if the program says so.

    Raises:
        OverrideNotAppliedError: nothing declares what holds a hyperparameter that the branch overrides.
        CheckpointNotFoundError: the origin of a branch is gone.
        DamagedError, FormatError: the newest record cannot be trusted.
    """
    try:
        head = run.latest()
    except CheckpointNotFoundError:
        origin = run.origin()
        return None if origin is None else (origin, _branching(run, origin, hyperparameters))
    changed = (head.rollback or {}).get("changes", {}).get("hyperparameters", {})
    if not changed or hyperparameters is None:
        return head, Adjustment()
    # they are part of the state already: set once more, they are watched until it is seen that they stay
    return head, Adjustment(then=lambda: hyperparameters.apply(changed))


def _branching(run: Run, origin: Checkpoint, hyperparameters: Hyperparameters | None) -> Adjustment:
    # a free key may have been given another value since
    overrides = {key: run.hyperparameters_in_force.get(key, value) for key, value in run.overrides.items()}
    require_declared(hyperparameters, overrides.keys())
    reseeds = run.branch is not None and run.branch.rng == "reseed"
    seed = f"{origin.id} {run.name}" if reseeds else None
    if hyperparameters is None or not overrides:
        return Adjustment(seed)
    untouched = hyperparameters.untouched(overrides)
    if untouched:
        keys = ", ".join(repr(key) for key in sorted(overrides) if hyperparameters.untouched({key}))
        dropped = ", ".join(map(repr, sorted(untouched)))
        warnings.warn(
            f"run {run.name!r} overrides {keys}: {dropped} begin as the program made them, and what checkpoint "
            f"{origin.id} has of them is dropped",
            BranchWarning,
            stacklevel=4,
        )
    return Adjustment(seed, untouched, lambda: hyperparameters.apply(overrides))
