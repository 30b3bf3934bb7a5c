"""Checks of what users give to calls that branch, and of what trains the branches."""

from __future__ import annotations

from typing import Any

from simckpt.branching.engines import LocalEngine
from simckpt.branching.functions import check_main_part
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ConfigurationError
from simckpt.policies.arguments import check_duration
from simckpt.storage.run_records import RNG_MODES

HEARTBEAT = 1800.0  # of silence, after which a branch is given up [s]; an evaluation is silent, too
SHORTEST = 1.0  # [s]; what a branch writes is looked at a few times in that time


def check_origin(checkpoint: Any) -> None:
    """Checks for a checkpoint to branch; raises ConfigurationError."""
    if not isinstance(checkpoint, Checkpoint):
        message = f"branches start from a checkpoint, such as `run.latest()`, got {checkpoint!r}"
        raise ConfigurationError(message, keys=["checkpoint"])


def check_rng(rng: Any) -> None:
    """Checks for what is to become of random streams; raises ConfigurationError."""
    if rng not in RNG_MODES:
        raise ConfigurationError(f"rng is one of {', '.join(map(repr, RNG_MODES))}, got {rng!r}", keys=["rng"])


def check_engine(engine: Any) -> None:
    """Checks for an engine, or None, and that processes of this machine do not come to this call again.

    Raises:
        ConfigurationError: it is none, or the script makes this call outside of its main part.
    """
    if engine is not None and (isinstance(engine, type) or not callable(getattr(engine, "submit", None))):
        raise ConfigurationError(f"an engine is such as `simckpt.LocalEngine(4)`, got {engine!r}", keys=["engine"])
    if engine is None or isinstance(engine, LocalEngine):
        check_main_part()


def check_times(deadline: Any, heartbeat: Any) -> None:
    """Checks how long a branch may run and may be silent; raises ConfigurationError."""
    if deadline is not None:
        check_duration(deadline, policy="a deadline", key="deadline", unit="seconds")
    if heartbeat is not None:
        check_duration(heartbeat, policy="a heartbeat", key="heartbeat", unit="seconds", least=SHORTEST)
