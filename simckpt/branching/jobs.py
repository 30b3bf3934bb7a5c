"""One branch to train somewhere else, as a job that JSON can hold; and the command that runs such a job from a file.

    python -m simckpt.branching.jobs JOB.json RESULT.json

A job names its functions by module, or by file where a script defines them: nothing is pickled, and the machine that
runs it needs the same files and the same Python environment, at the same paths.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simckpt.branching.functions import check_call, described, function_of
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, RunLockedError, StoreError
from simckpt.rollback import supervise
from simckpt.run import Run
from simckpt.signals import EXIT_REQUEUE
from simckpt.storage import claims, durable
from simckpt.store import Store

Train = Callable[[str, str], object] | Sequence[str]

COMPLETE = "complete"  # tag of the head of a branch whose training has returned
_PATIENCE = 30.0  # for a process of this machine that still writes the branch but is about to end [s]


def train_branch(job: Mapping[str, Any]) -> dict[str, Any]:
    """Trains one branch to its end in this process, and returns {"status", "error", "seconds"}.

    The status is "complete" (the head is tagged so), "interrupted" (a signal ended it: after a save, with exit code 75,
    or as a KeyboardInterrupt) or "failed"; the error is a traceback. A training that returns and has no checkpoint has
    failed. A branch that is complete already is not trained again. Re-entered after a rollback, as by
    `simckpt.supervise`.

    Args:
        job: as `branch_job` makes it.
    """
    started = time.perf_counter()
    status, error = "complete", ""
    try:
        _write_to(job["log"])
        sys.path.extend(entry for entry in job["path"] if entry not in sys.path)
        store = Store(job["store"])
        # whoever writes the branch may be about to complete it
        _wait_for_claim(store, job["run"])
        if is_complete(store.run(job["run"])):
            return _ended("complete", "", started)
        with claims.beating_every(job["beat"]):
            _supervise(function_of(job["train"]), job["store"], job["run"])
        if not mark_complete(store.run(job["run"])):
            status, error = "failed", _nothing_saved(store.run(job["run"]))
    except SystemExit as exit:
        if exit.code == EXIT_REQUEUE:
            status, error = "interrupted", "ended by a signal after a save"
        else:
            # of flags that a script does not take, the traceback says no more than "SystemExit: 2"
            hint = "" if job["log"] is None else f"; see the log {job['log']}"
            status, error = "failed", traceback.format_exc().rstrip() + hint
    except KeyboardInterrupt:
        status, error = "interrupted", traceback.format_exc()
    except BaseException:
        status, error = "failed", traceback.format_exc()
    if error:
        print(error, file=sys.stderr, flush=True)
    return _ended(status, error, started)


def _supervise(train: Callable[[str, str], object], store: str, run: str) -> None:
    try:
        supervise(train, store, run)
    except SystemExit as exit:
        # a script's main() may end that way, and well
        if exit.code not in (None, 0):
            raise


def _ended(status: str, error: str, started: float) -> dict[str, Any]:
    return {"status": status, "error": error, "seconds": time.perf_counter() - started}


def _nothing_saved(run: Run) -> str:
    begin = 0 if run.branch is None else run.branch.step
    return f"returned without a checkpoint: does it save, and is its end beyond step {begin:,}, where it begins?"


def branch_job(
    store: Path,
    run: str,
    train: Train,
    *,
    log: str | os.PathLike[str] | None,
    heartbeat: float | None = None,
) -> dict[str, Any]:
    """Returns the job of training one branch, for `train_branch`.

    Args:
        store: the store's folder.
        run: the branch's name.
        train: called with the store's folder and the run's name; or the command line of a script.
        log: file that takes what the training prints; None leaves it to the engine.
        heartbeat: how long the branch may be silent [s]: it is told to give three heartbeats in that time.

    Raises:
        ConfigurationError: another process cannot find `train`, or cannot call it with a store and a run.
    """
    function = train if callable(train) else _script(train)
    description = described(function)
    check_call(function, str(store), run)
    return {
        "store": str(store),
        "run": run,
        "train": description,
        "beat": claims.BEAT_EVERY if heartbeat is None else min(claims.BEAT_EVERY, heartbeat / 3),
        "path": [str(Path(entry).absolute()) for entry in sys.path],
        "log": None if log is None else str(Path(log).absolute()),
    }


def _script(command: Any) -> Callable[..., Any]:
    words = command if isinstance(command, list | tuple) and command else [""]
    if not all(isinstance(word, str | os.PathLike) for word in words[:1]) or not Path(words[0]).is_file():
        raise ConfigurationError(
            f"train is a function or the command line of a Python script, [path, flag, ...], got {command!r}",
            keys=["train"],
        )
    return functools.partial(run_script, script=str(Path(command[0]).absolute()), flags=list(map(str, command[1:])))


def is_complete(run: Run) -> bool:
    """Returns whether a branch was trained to its end: its head is tagged "complete"."""
    # what cannot be read is not complete, and its training will tell
    with contextlib.suppress(StoreError):
        return COMPLETE in run.latest().tags
    return False


def mark_complete(run: Run) -> bool:
    """Tags the head; returns False if the branch has no checkpoint of its own."""
    try:
        run.latest().tag(COMPLETE)
    except CheckpointNotFoundError:
        return False
    return True


def _wait_for_claim(store: Store, run: str) -> None:
    """Waits until nobody writes the branch: what an interrupted fan-out has left may still be about to end.

    A job that was killed with its machine and put back into the queue waits until its old claim is stale, for ten
    minutes perhaps; `tracking.WAIT` grants it the time.

    Raises:
        RunLockedError: whoever writes the branch does not end.
    """
    started = time.monotonic()
    while True:
        try:
            return store.files.claim(run).release()
        except RunLockedError as error:
            patience = _PATIENCE if error.host == platform.node() else _PATIENCE + claims.STALE_AFTER
            if time.monotonic() - started > patience:
                raise
        time.sleep(0.2)


def _write_to(log: str | None) -> None:
    """Sends what this process and its children print into a file from now on."""
    if log is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        with durable.translated(Path(log)):
            descriptor = durable.Disk().open_log(Path(log))
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


def run_script(store: str, run: str, *, script: str, flags: Sequence[str]) -> None:
    """Runs a script as `python SCRIPT FLAGS --store STORE --run RUN` does, in this process."""
    sys.argv = [script, *flags, "--store", store, "--run", run]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def call_file(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Returns the content of a job file: `function(*arguments)`.

    Raises:
        ConfigurationError: another process cannot find the function, or arguments that JSON cannot hold.
    """
    try:
        return json.dumps({"call": described(function), "arguments": arguments}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the arguments of {function!r} are more than JSON can hold: {error}") from error


def main(job: Path, result: Path) -> int:
    """Runs a job file, writes what the function returned, and returns the exit code.

    Returns 75 if a branch was interrupted: start the same command again; there is no result yet.
    """
    call = json.loads(job.read_bytes())
    value = function_of(call["call"])(*call["arguments"])
    if isinstance(value, dict) and value.get("status") == "interrupted":
        return EXIT_REQUEUE
    disk = durable.Disk()
    partial = result.with_name(f"{result.name}.{os.getpid()}")
    durable.write_record(disk, partial, json.dumps(value).encode())
    durable.replace_file(disk, partial, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
