"""Every error and warning that simckpt raises on purpose, grouped by what a handler would do about it.

    SimckptError
    ├── CaptureError               the live state cannot be captured: change the program
    │   └── UnsupportedStateError    (TypeError)   an object that is neither state nor a known resource
    ├── RestoreError               the live objects did not take the state and are as they were
    │   └── StateMismatchError       (ValueError)  other keys, shapes, dtypes, classes or models than the checkpoint's
    ├── HalfRestoredError          a restore failed and could not be undone: build these components anew
    ├── ConfigurationError         (ValueError)    hyperparameters or arguments that contradict the run
    ├── OverrideNotAppliedError    (ValueError)    a hyperparameter of a branch or a rollback is not in force
    ├── RolledBack                 the run went back: leave the loop and enter training again
    ├── RollbackLimitError         the policy wants to go back once more often than it may
    ├── WorkerFailedError          a call that ran in another process raised there
    ├── WorkerDiedError            the process of such a call ended without a result
    ├── QueryError                 (ValueError)    a text of `find --where` that has no meaning
    ├── RecorderBusyError          another thread is in a step of the recorded env
    ├── LinkError                  the connection to a device: nothing was sent to it
    │   ├── LinkDisarmedError                      a state was restored: the link waits for arm()
    │   ├── LinkUnavailableError     (ConnectionError)  the device cannot be reached
    │   └── LinkBusyError                          another thread is using the link
    └── StoreError                 the files
        ├── InvalidNameError         (ValueError)  a run name that cannot be a folder
        ├── NotAStoreError           (FileNotFoundError)
        ├── RunNotFoundError         (KeyError)
        ├── SessionNotFoundError     (KeyError)
        ├── CheckpointNotFoundError  (KeyError)
        ├── LeafNotFoundError        (KeyError)
        ├── ExportNotFoundError      (FileNotFoundError)
        ├── FormatError              (ValueError)  a record that does not follow FORMAT.md
        │   └── UnsupportedFormatError             written by a newer simckpt, or with a feature this one lacks
        ├── DamagedError             (ValueError)  bytes differ from their digest, or are missing
        │   ├── SegmentMissingError                files of shared rows are gone
        │   └── ArchiveDamagedError                the copy in the archive is damaged or gone
        ├── ArchiveNotNamedError  (PermissionError)  a store names an archive, and its user has not named it
        ├── ArchiveUnavailableError  (ConnectionError)  the archive cannot be reached, or refuses; nothing was lost
        ├── ConflictError                          another writer committed first, or has the name
        ├── RunLockedError                         another process is writing this run
        ├── CoordinationError                      ranks are missing, or disagree: nothing was committed
        │   ├── SupersededError                        a newer step is a checkpoint of ranks that do not wait
        │   └── LostError                              the store of keys that the ranks talk over does not answer
        ├── OutcomeUnknownError                    a rank was lost that may have committed: the run's folder shows it
        └── StorageError             (OSError)     the disk refused
            ├── StorageFullError
            └── SegmentsKeptError                  pruned, but what it shared cannot be freed yet

    SimckptWarning                 (UserWarning)
    ├── SaveFailedWarning          a due save failed, training goes on
    ├── UpkeepWarning              the save is in the store; pruning, the log or a rollback fails
    ├── ReplayWarning              a replay buffer was saved whole again, or restored without its oldest rows
    ├── DamageWarning              newer checkpoints are damaged, training goes on from an older one
    ├── BranchWarning              a branch leaves parts of its origin's state, or has an override that looks wrong
    ├── RecordingWarning           parts of a session are lost or late; the loop goes on
    └── VersionWarning             the checkpoint is from another machine or other versions

`simckpt.testing` adds InexactResumeError, InexactRollbackError, TrainingFailedError and UncoveredStateWarning.
A message says what failed, where (a path or an id), and what to do next; the fields carry the same for programs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class SimckptError(Exception):
    """Base of every error that simckpt raises on purpose."""

    def __str__(self) -> str:
        # KeyError would show its message quoted; every error here shows plain text
        return str(self.args[0]) if self.args else type(self).__name__

    def __reduce__(self) -> tuple[object, ...]:
        # the default protocol calls the class with the message alone; errors cross the pipes of workers and executors
        system = {name: getattr(self, name) for name in _OS_FIELDS if getattr(self, name, None) is not None}
        return _rebuild, (type(self), self.args, dict(vars(self)), system)


_OS_FIELDS = ("errno", "strerror", "filename")


def _rebuild(
    cls: type[SimckptError], args: tuple[object, ...], fields: dict[str, object], system: dict[str, object]
) -> SimckptError:
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(fields)
    for name, value in system.items():
        setattr(error, name, value)
    return error


class CaptureError(SimckptError):
    """The live state cannot be captured exactly; nothing was written and training may go on."""


class UnsupportedStateError(CaptureError, TypeError):
    """An object in the state is neither state nor a known resource.

    Attributes:
        path: where the object was found, such as `envs/env_0/unwrapped/_socket`.
        type_name: the qualified name of its class.
    """

    def __init__(self, message: str, *, path: str, type_name: str) -> None:
        super().__init__(message)
        self.path = path
        self.type_name = type_name


class RestoreError(SimckptError):
    """The live objects did not take the state; they are as they were before the restore."""


class StateMismatchError(RestoreError, ValueError):
    """The checkpoint does not fit the live objects.

    Attributes:
        problems: one line for each difference found, all of them collected before anything is changed.
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class HalfRestoredError(SimckptError):
    """A restore failed, and so did putting things back.

    Attributes:
        components: those that are in an undefined state; build them anew before going on.
    """

    def __init__(self, message: str, *, components: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.components = tuple(components)


class ConfigurationError(SimckptError, ValueError):
    """Hyperparameters or arguments contradict the run.

    Attributes:
        keys: the hyperparameters or arguments concerned.
    """

    def __init__(self, message: str, *, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class OverrideNotAppliedError(SimckptError, ValueError):
    """A hyperparameter that a branch or a rollback changes is not in force, although the state was restored.

    Attributes:
        key: the hyperparameter.
        wanted: the value that should be in force.
        found: what is, or None where nothing is known to hold it.
    """

    def __init__(self, message: str, *, key: str, wanted: object = None, found: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.wanted = wanted
        self.found = found


class RolledBack(SimckptError):
    """The run has gone back to an earlier checkpoint; whatever the loop holds in its own variables is stale.

    The commit of the rollback is in the store and the run is closed: entering training again restores it.
    `simckpt.supervise` does that.

    Attributes:
        run: the run's name.
        step: where it was decided [env steps].
        target_step: where the run goes on from [env steps].
        level: of escalation, from 1 on.
        reason: why.
    """

    def __init__(self, message: str, *, run: str, step: int, target_step: int, level: int, reason: str) -> None:
        super().__init__(message)
        self.run = run
        self.step = step
        self.target_step = target_step
        self.level = level
        self.reason = reason


class RollbackLimitError(SimckptError):
    """Training has gone wrong again, and the policy allows no further rollback; the run was closed.

    The head is the newest checkpoint from before. Where `save_when` has an `OnException`, the state that training had
    come to was kept for a post-mortem.

    Attributes:
        run: the run's name.
        step: where it was decided [env steps].
        rollbacks: how many there were.
        reason: why the run would have gone back.
    """

    def __init__(self, message: str, *, run: str, step: int, rollbacks: int, reason: str) -> None:
        super().__init__(message)
        self.run = run
        self.step = step
        self.rollbacks = rollbacks
        self.reason = reason


class WorkerFailedError(SimckptError):
    """A function that an engine ran in another process raised there; the message is its traceback."""


class WorkerDiedError(SimckptError):
    """The process in which an engine ran a function ended without a result.

    Attributes:
        exit_code: of the process, negative for the signal that killed it, or None where unknown.
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class QueryError(SimckptError, ValueError):
    """A query for checkpoints cannot be understood; the message shows the place.

    Attributes:
        query: the text.
        position: where in it the trouble is [characters from 0].
    """

    def __init__(self, message: str, *, query: str, position: int) -> None:
        super().__init__(message)
        self.query = query
        self.position = position


class LinkError(SimckptError):
    """A link to a device cannot do what it was asked for; nothing was sent.

    Attributes:
        link: the link's name.
    """

    def __init__(self, message: str, *, link: str) -> None:
        super().__init__(message)
        self.link = link


class LinkDisarmedError(LinkError):
    """A link sends and receives nothing since a state was restored, or since it was disarmed, until `link.arm()`."""


class LinkUnavailableError(LinkError, ConnectionError):
    """The device cannot be reached, or the local port is taken; `link.arm()` tries again."""


class LinkBusyError(LinkError):
    """Another thread is using the link at this moment; give each thread a link of its own, or take turns."""


class RecorderBusyError(SimckptError):
    """Another thread is in a step or reset of the env that a recorder records: one thread at a time steps it."""


class StoreError(SimckptError):
    """Something about the files of a store."""


class InvalidNameError(StoreError, ValueError):
    """A name that cannot be the name of a run."""


class NotAStoreError(StoreError, FileNotFoundError):
    """The path does not hold a store."""


class RunNotFoundError(StoreError, KeyError):
    """The store has no run of that name; the message lists the near ones."""


class SessionNotFoundError(StoreError, KeyError):
    """The store has no session of that name; the message lists the near ones."""


class CheckpointNotFoundError(StoreError, KeyError):
    """No checkpoint has that id, step or place in the run."""


class LeafNotFoundError(StoreError, KeyError):
    """The checkpoint has no leaf or component of that path."""


class ExportNotFoundError(StoreError, FileNotFoundError):
    """There is no file of an exported checkpoint at that path."""


class FormatError(StoreError, ValueError):
    """A record does not follow FORMAT.md."""


class UnsupportedFormatError(FormatError):
    """The store was written by a newer simckpt, or needs a feature that this one lacks."""


class DamagedError(StoreError, ValueError):
    """Bytes on disk differ from their digest, or are missing.

    Attributes:
        path: the damaged file.
        leaves: the paths of the damaged leaves, empty if the damage is in a record.
        intact: id of the newest checkpoint of the run that comes back whole, where a restore has looked for it.
    """

    intact: str | None = None

    def __init__(self, message: str, *, path: str | os.PathLike[str], leaves: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.path = os.fspath(path)
        self.leaves = tuple(leaves)


class SegmentMissingError(DamagedError):
    """Segments that a checkpoint or a save refers to are gone.

    Attributes:
        ids: of the segments; a save after this one writes their rows anew, a restore needs another checkpoint.
    """

    def __init__(
        self,
        message: str,
        *,
        ids: Sequence[str],
        path: str | os.PathLike[str] = "segments",
        leaves: Sequence[str] = (),
    ) -> None:
        super().__init__(message, path=path, leaves=leaves)
        self.ids = tuple(ids)


class ArchiveDamagedError(DamagedError):
    """What an archive holds of a checkpoint is damaged or gone; files of the store are as they were."""


class ArchiveNotNamedError(StoreError, PermissionError):
    """A store says where its archive is, and nobody has named that place to simckpt here: it is not reached for."""


class ArchiveUnavailableError(StoreError, ConnectionError):
    """An archive cannot be reached, or refuses: try again. Nothing was lost, and nothing is half restored."""


class ConflictError(StoreError):
    """Another writer was first, or has the name: nothing of theirs was changed, nothing of this call is kept."""


class RunLockedError(StoreError):
    """Another process is writing this run.

    Attributes:
        host: the machine it runs on.
        pid: its process id there.
    """

    def __init__(self, message: str, *, host: str, pid: int) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid


class CoordinationError(StoreError):
    """The ranks of a run did not come to a common end; nothing was committed, and training may go on.

    Attributes:
        ranks: those that were missing, have failed, or differ from the others.
        leaves: paths of the leaves on which they differ.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), leaves: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.leaves = tuple(leaves)


class SupersededError(CoordinationError):
    """Ranks that save at their own time have left a step behind: a newer one is a checkpoint, or some rank had no part.

    That is no failure; the newest step that all ranks have saved is a checkpoint.
    """


class LostError(CoordinationError):
    """The store of keys does not answer; nobody knows whether it has done what it was asked."""


class OutcomeUnknownError(StoreError):
    """A rank was lost while it may have been committing; what this rank has written must stay.

    Attributes:
        ranks: those that were lost, as far as that is known.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StorageError(StoreError, OSError):
    """The disk refused an operation; the newest checkpoint before it is untouched."""


class StorageFullError(StorageError):
    """The disk, the quota or the file-size limit is exhausted.

    Attributes:
        needed: bytes that were to be written, or None where unknown.
        free: bytes the file system had left, or None where unknown.
    """

    def __init__(self, message: str, *, needed: int | None = None, free: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


class SegmentsKeptError(StorageError):
    """A checkpoint was pruned, but its segments stay, as it is not known whether others use them; tried again later."""


class SimckptWarning(UserWarning):
    """Base of the warnings of simckpt."""


class SaveFailedWarning(SimckptWarning):
    """A due save failed; the newest checkpoint before it is whole, and training goes on."""


class UpkeepWarning(SimckptWarning):
    """The checkpoint is in the store, but pruning, the run's log or a rollback was not possible, or will not be."""


class ReplayWarning(SimckptWarning):
    """Saved rows of a replay buffer have changed, so all were saved again; or a restore had to drop the oldest rows."""


class DamageWarning(SimckptWarning):
    """What is damaged was passed over and is named: by a run that goes on from an older checkpoint, or by a look."""


class BranchWarning(SimckptWarning):
    """A branch does not take over some parts of its origin's state, or an override looks lost or like a mistake."""


class RecordingWarning(SimckptWarning):
    """A recorder cannot write for the moment, or has lost something, which the session tells; the loop goes on."""


class VersionWarning(SimckptWarning):
    """A checkpoint was saved with other library versions or on another machine; exactness is not promised."""
