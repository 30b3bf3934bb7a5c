"""A Slurm cluster as an engine, through submitit (extra `simckpt[slurm]`): a job of its own for each call.

submitit makes the batch script, and knows the parameters of a job. What the job runs is
`python -m simckpt.branching.jobs` with a JSON file, and its result comes back as one: submitit's own way sends pickles,
and asks the accounting database how a job has ended; without that database it waits for ever for one that was killed.
Here `squeue` is asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simckpt.branching.jobs import call_file
from simckpt.errors import ConfigurationError, WorkerDiedError
from simckpt.policies.arguments import check_count
from simckpt.signals import EXIT_REQUEUE
from simckpt.storage import durable

ASK = 2.0  # between two questions to the controller [s]
POLL = 0.2  # between two looks for a result [s]
SETTLE = 10.0  # until the result of a job that has ended is visible through a shared file system [s]
WARNING = 120  # between Slurm's signal and its kill: for the last save [s]
_LIVE = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "CONFIGURING", "RESIZING", "SUSPENDED", "STOPPED"}
_LIVE |= {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT"}


class SlurmEngine:
    """Runs each call as a Slurm job, on whatever machine of the cluster has room.

    Jobs outlive this process. A job that is preempted or reaches its time limit gets SIGUSR1 first, which
    `simckpt.OnSignal` answers by a save and exit code 75; the job then goes back into the queue, and on from there. A
    second job of the same call waits until the first has ended: so a fan-out that was killed may be started again at
    once.

    Args:
        folder: takes the job files and what the jobs print, a folder for each call; shared by the machines of the
            cluster, as the store must be.
        python: the interpreter on those machines; this one's path by default.
        warning: how long before the end of its time a job gets its signal [s].
        parameters: of a job, as `submitit.SlurmExecutor.update_parameters` takes them: `partition`, `time` (minutes, a
            day by default), `cpus_per_task`, `mem`, `gpus_per_node`, `account`, `setup` (shell lines), ...

    Raises:
        ConfigurationError: submitit is missing, there is no Slurm here, parameters that it does not know, or another
            argument that makes no sense.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, python: str = sys.executable, warning: int = WARNING, **parameters: Any
    ) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ConfigurationError(f"folder is the path of a folder, got {folder!r}", keys=["folder"])
        if not isinstance(python, str) or not python:
            raise ConfigurationError(f"python is the path of an interpreter, got {python!r}", keys=["python"])
        check_count(warning, policy="SlurmEngine, warning [s]:", key="warning")
        self.folder = Path(folder).absolute()
        self._python = python
        self._parameters = {"time": 24 * 60, **parameters}
        self._warning = warning
        self._queue = _Queue()
        # unknown parameters are told now
        self._executor(durable.made_folder(durable.Disk(), self.folder), "simckpt")

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> SlurmFuture:
        """Returns a future of `fn(*args)`.

        Args:
            fn: at the top level of a module or a script that is at the same path there.
            args: values that JSON can hold; so is the result.

        Raises:
            ConfigurationError: a function that another machine cannot find, or other arguments.
            StorageError: the disk refused.
        """
        call = call_file(fn, args)
        name = f"simckpt-{hashlib.sha256(call).hexdigest()[:16]}"
        disk = durable.Disk()
        folder = durable.made_folder(disk, self.folder / name)
        file = folder / "job.json"
        if not file.exists():
            partial = folder / f"job.json.{os.getpid()}"
            durable.write_record(disk, partial, call)
            durable.replace_file(disk, partial, file)
        command = shlex.join([self._python, "-u", "-m", "simckpt.branching.jobs", str(file)])
        # a result for each job: that of an earlier one says nothing about this one
        result = f'{shlex.quote(str(folder))}/result-"$SLURM_JOB_ID".json'
        job = self._executor(folder, name)._submit_command(f"{command} {result}")
        return SlurmFuture(job.job_id, folder, self._queue)

    def _executor(self, folder: Path, name: str) -> Any:
        try:
            from submitit import SlurmExecutor
        except ImportError as error:
            raise ConfigurationError('SlurmEngine needs submitit: pip install "simckpt[slurm]"') from error
        own = {
            "job_name": name,
            # one job of a name at a time
            "dependency": "singleton",
            "stderr_to_stdout": True,
            "teardown": _TEARDOWN,
            "additional_parameters": {"requeue": True, "signal": f"USR1@{self._warning}"},
        }
        if clash := own.keys() & self._parameters.keys():
            raise ConfigurationError(f"SlurmEngine sets {', '.join(sorted(clash))} itself", keys=sorted(clash))
        try:
            executor = SlurmExecutor(folder)
            executor.update_parameters(**own, **self._parameters)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigurationError(f"Slurm cannot be used: {error}", keys=list(self._parameters)) from error
        return executor


# a cluster whose administrator set RequeueExit=75 does the same by itself
_TEARDOWN = [
    "code=$?",
    f'if [ $code -eq {EXIT_REQUEUE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
    "exit $code",
]


class SlurmFuture:
    """A call of a `SlurmEngine`; see `Future`.

    Attributes:
        id: of the job.
        folder: of the call: job file, batch script, what the job printed, result.
    """

    def __init__(self, id: str, folder: Path, queue: _Queue) -> None:
        self.id = id
        self.folder = folder
        self._queue = queue
        self._queue.expect(id)
        self._result = folder / f"result-{id}.json"
        self._gone: float | None = None  # when the job was first seen to have ended

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned.

        Raises:
            TimeoutError: it has not ended within `timeout` [s].
            WorkerDiedError: the job ended without a result; the message says where its output is.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"Slurm job {self.id} has not ended within {timeout} s")
            time.sleep(POLL)
        try:
            return json.loads(self._result.read_bytes())
        except FileNotFoundError:
            state = self._queue.state(self.id) or "unknown"
            message = f"Slurm job {self.id} ended without a result (state {state}); what it printed is in {self.folder}"
            raise WorkerDiedError(message) from None

    def running(self) -> bool:
        """Returns whether the job runs, as `squeue` says at most every `ASK` seconds."""
        return self._queue.state(self.id) in ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT")

    def done(self) -> bool:
        """Returns whether there is a result, or the job has ended without one."""
        if self._result.exists():
            return True
        if not self._queue.has_ended(self.id):
            self._gone = None
            return False
        if self._gone is None:
            self._gone = time.monotonic()
        return time.monotonic() - self._gone > SETTLE

    def cancel(self) -> bool:
        """Takes the job back, or has Slurm end it: SIGTERM, and SIGKILL after the cluster's `KillWait`."""
        return subprocess.run(["scancel", self.id], capture_output=True).returncode == 0


class _Queue:
    """What `squeue` says of this user's jobs, asked for all of them at once."""

    def __init__(self) -> None:
        self._states: Mapping[str, str] = {}
        self._asked = 0.0
        self._expected: set[str] = set()

    def expect(self, id: str) -> None:
        """Counts a job as pending until the controller has been asked again."""
        self._expected.add(id)

    def state(self, id: str) -> str | None:
        """Returns a job's state, such as "RUNNING"; None of one that the controller has forgotten."""
        self._ask()
        return "PENDING" if id in self._expected else self._states.get(id)

    def has_ended(self, id: str) -> bool:
        """Returns whether a job has ended; one that the controller has forgotten, some minutes later, has."""
        return self.state(id) not in _LIVE

    def _ask(self) -> None:
        if time.monotonic() - self._asked < ASK:
            return
        asked = subprocess.run(["squeue", "--me", "-h", "-t", "all", "-o", "%i|%T"], capture_output=True, text=True)
        self._asked = time.monotonic()
        # a controller that does not answer tells nothing: what is known stays
        if asked.returncode == 0:
            self._states = dict(line.strip().split("|") for line in asked.stdout.splitlines() if "|" in line)
            self._expected.clear()
