"""When to save because the loop ends: a signal that asks for it, an exception that does it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar

from simckpt.errors import ConfigurationError
from simckpt.policies.arguments import check_duration, written
from simckpt.policies.records import Decision, Moment
from simckpt.policies.saving import SavePolicy

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")
DEFAULT_GRACE = 30.0  # [s] KillWait of Slurm and terminationGracePeriodSeconds of Kubernetes, where nobody set them

# never handed to a handler, or raised by a fault of the program, which runs into it again as soon as a handler returns
_UNANSWERABLE = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"}


@dataclass(frozen=True, init=False, repr=False)
class OnSignal(SavePolicy):
    """Due when a scheduler's signal asks the process to end: saved at the next call, then the process exits with 75.

    SIGTERM is what Slurm (preemption, time limit, scancel), Kubernetes, Docker and systemd send before SIGKILL; SIGUSR1
    is the usual choice for an early warning, `sbatch --signal=USR1@120`. Both leave a grace period: the next call of
    `Checkpointer.step` must come and the save must end within it. Handlers are installed while the checkpointer is
    entered, for these signals alone, and put back afterwards.

    Args:
        *names: such as "SIGTERM"; SIGTERM and SIGUSR1 if none are given.
        grace: from the signal until the process is killed [s]: what your scheduler grants. 30 is the default of Slurm's
            KillWait (all there is at a preemption, as long as GraceTime has its default of 0) and of Kubernetes'
            terminationGracePeriodSeconds.
    """

    names: tuple[str, ...]
    grace: float
    ends_the_loop: ClassVar[bool] = True

    def __init__(self, *names: str, grace: float = DEFAULT_GRACE) -> None:
        check_duration(grace, policy="OnSignal", key="grace", unit="seconds")
        for name in names:
            _check_signal(name)
        object.__setattr__(self, "names", tuple(dict.fromkeys(names)) or DEFAULT_SIGNALS)
        object.__setattr__(self, "grace", grace)

    def decide(self, moment: Moment) -> Decision:
        """Returns whether one of the signals has come."""
        if moment.exception is None and moment.signal in self.names:
            return Decision(True, f"{moment.signal} asks the process to end")
        return Decision(False)

    def __repr__(self) -> str:
        names = () if self.names == DEFAULT_SIGNALS else self.names
        return written("OnSignal", *names, grace=None if self.grace == DEFAULT_GRACE else self.grace)


@dataclass(frozen=True)
class OnException(SavePolicy):
    """Due when an exception leaves the checkpointer's context: keeps the state for a post-mortem.

    That is so for a `RollbackLimitError` too, and never for a `RolledBack`, whose abandoned checkpoints stay anyway.
    The state may be half a step, so such a checkpoint is never the head, and nothing resumes from it by itself.
    """

    ends_the_loop: ClassVar[bool] = True

    def decide(self, moment: Moment) -> Decision:
        """Returns whether an exception ends the loop."""
        if moment.exception is None:
            return Decision(False)
        return Decision(True, f"the loop ended with {moment.exception}")


def signals_of(policy: SavePolicy) -> tuple[str, ...]:
    """Returns the names of the signals that a policy answers."""
    answering = [part for part in policy.parts() if isinstance(part, OnSignal)]
    return tuple(dict.fromkeys(name for part in answering for name in part.names))


def grace_of(policy: SavePolicy, name: str) -> float:
    """Returns the grace period of one of these signals [s]: the shortest, where several policies answer it."""
    return min(part.grace for part in policy.parts() if isinstance(part, OnSignal) and name in part.names)


def _check_signal(name: object) -> None:
    known = signal.Signals.__members__
    if not isinstance(name, str) or name not in known:
        hint = f": write 'SIG{name}'" if f"SIG{name}" in known else ""
        raise ConfigurationError(f"OnSignal needs names such as 'SIGTERM', got {name!r}{hint}", keys=["names"])
    if name in _UNANSWERABLE:
        raise ConfigurationError(f"no process can answer {name} by a save: use SIGTERM or SIGUSR1", keys=["names"])
