"""Which sessions of a store stay, and why: policies for checkpoints, applied to recordings."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from simckpt.errors import (
    ConfigurationError,
    ConflictError,
    DamagedError,
    FormatError,
    RunLockedError,
    SessionNotFoundError,
    StoreError,
)
from simckpt.policies import KeepBest, KeepEvery, KeepPolicy, KeepTagged, retain
from simckpt.policies.keeping import KeptByAny
from simckpt.policies.records import CheckpointFacts
from simckpt.storage import StoreFiles, archived_sessions


@dataclass(frozen=True)
class SessionVerdict:
    """Whether one session stays.

    Attributes:
        name: of the session.
        id: its id; empty where its record cannot be read.
        keep: whether it stays.
        reason: every reason to keep it, or why there is none.
    """

    name: str
    id: str
    keep: bool
    reason: str


def check_policy(policy: object) -> KeepPolicy:
    """Returns a policy that can choose among sessions: they have neither steps nor metrics nor tags.

    Raises:
        ConfigurationError: it cannot, or is none.
    """
    if not isinstance(policy, KeepPolicy):
        raise ConfigurationError(f"keep= is a policy such as simckpt.KeepLast(3), got {policy!r}", keys=["keep"])
    for each in policy.policies if isinstance(policy, KeptByAny) else (policy,):
        by_steps = isinstance(each, KeepEvery) and each.steps is not None
        if isinstance(each, KeepBest | KeepTagged) or by_steps:
            raise ConfigurationError(
                f"{each!r} cannot choose among sessions, which have neither steps nor metrics nor tags: keep the last "
                f"ones, some by the clock or by size, and pin those that matter",
                keys=["keep"],
            )
    return policy


def retained(files: StoreFiles, policy: KeepPolicy, *, pins: bool = False) -> list[SessionVerdict]:
    """Returns a verdict on each session, oldest first; no policy can drop one that was not closed, nor the newest.

    Args:
        files: of the store.
        policy: asked about the closed ones alone.
        pins: whether pinned sessions stay whatever the policy says.
    """
    facts: list[CheckpointFacts] = []
    names: dict[str, str] = {}
    stay: list[tuple[float, SessionVerdict]] = []
    protected: dict[str, str] = {}
    for name in files.sessions():
        identity, created = "", 0.0
        with contextlib.suppress(SessionNotFoundError):  # removed since it was listed
            try:
                session = files.session(name)
                identity, created = session.record.id, session.record.created
                if session.closed() is None:
                    reason = "is being recorded" if session.is_written() else "was not closed: `simckpt session close`"
                    stay.append((created, SessionVerdict(name, identity, True, reason)))
                    continue
                facts.append(CheckpointFacts(identity, 0, {}, created, archived_sessions.size_of(session)))
                names[identity] = name
                if pins and archived_sessions.is_pinned(session.path):
                    protected[identity] = "pinned"
            except SessionNotFoundError:
                raise
            except StoreError as error:
                stay.append((created, SessionVerdict(name, identity, True, f"cannot be read: {error}")))
    facts.sort(key=lambda each: (each.created, names[each.id]))
    moments = {each.id: each.created for each in facts}
    for verdict in retain(facts, policy, protected):
        told = SessionVerdict(names[verdict.id], verdict.id, verdict.keep, verdict.reason)
        stay.append((moments[verdict.id], told))
    return [verdict for _, verdict in sorted(stay, key=lambda each: (each[0], each[1].name))]


def prune_sessions(files: StoreFiles, policy: KeepPolicy, *, dry_run: bool = False) -> list[SessionVerdict]:
    """Removes the closed sessions that a policy does not keep; see `Store.prune_sessions`."""
    verdicts = retained(files, check_policy(policy), pins=True)
    return verdicts if dry_run else [verdict if verdict.keep else _removed(files, verdict) for verdict in verdicts]


def _removed(files: StoreFiles, verdict: SessionVerdict) -> SessionVerdict:
    """Returns what became of a session that no policy keeps: removed, unless it was pinned or claimed meanwhile."""
    try:
        with contextlib.suppress(SessionNotFoundError):  # by somebody else, meanwhile
            files.remove_session(verdict.name, id=verdict.id, unless_pinned=True)
    except ConflictError:
        return dataclasses.replace(verdict, keep=True, reason="pinned")
    except RunLockedError as error:
        return dataclasses.replace(verdict, keep=True, reason=f"somebody is at work with it: {error}")
    return verdict


def sessions_of(files: StoreFiles, run: str, *, closed: bool = False) -> list[str]:
    """Returns the names of the sessions that checkpoints of a run were driving; damaged ones are left out.

    Args:
        files: of the store.
        run: the run's name.
        closed: those alone that were closed.
    """
    found = []
    for name in files.sessions():
        with contextlib.suppress(DamagedError, FormatError, SessionNotFoundError):
            session = files.session(name)
            origin = session.record.origin
            if origin is not None and origin.run == run and not (closed and session.closed() is None):
                found.append(name)
    return found
