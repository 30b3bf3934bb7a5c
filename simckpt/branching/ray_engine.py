"""Ray as an engine: calls on the machines of a Ray cluster, or on this one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from simckpt.branching.engines import GRACE
from simckpt.branching.functions import described, function_of
from simckpt.errors import ConfigurationError, WorkerDiedError, WorkerFailedError
from simckpt.policies.arguments import check_duration, is_number


class RayEngine:
    """Runs each call in a fresh Ray worker; one that dies takes no other with it.

    ```python
    with simckpt.RayEngine(cpus=2) as engine:
        simckpt.fan_out(checkpoint, variants, train, engine=engine)
    ```

    Uses the cluster that this process is connected to, if it has called `ray.init`. Else it connects to one itself, or
    starts one on this machine, which ends with `close`. All machines need the store and the program's files at the same
    paths, on a file system that they share, and the same Python environment.

    Args:
        cpus: cores that each call takes; Ray starts as many calls as there is room for.
        gpus: GPUs that each call takes; parts of one, too.
        address: of a cluster, as `ray.init` takes it; None starts one on this machine.
        grace: between asking a call to end, by SIGTERM, which `simckpt.OnSignal` answers by a save, and killing its
            process [s].

    Raises:
        ConfigurationError: Ray is not installed, an address is given and this process is connected already, or an
            argument makes no sense.
    """

    def __init__(
        self, *, cpus: float = 1.0, gpus: float = 0.0, address: str | None = None, grace: float = GRACE
    ) -> None:
        for name, share in (("cpus", cpus), ("gpus", gpus)):
            if not is_number(share) or not 0 <= share < math.inf:
                raise ConfigurationError(f"{name} is a number of at least 0, got {share!r}", keys=[name])
        if address is not None and not isinstance(address, str):
            raise ConfigurationError(f"address is a text such as 'auto', got {address!r}", keys=["address"])
        check_duration(grace, policy="RayEngine, grace:", key="grace", unit="seconds", least=0)
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError as error:
            raise ConfigurationError('RayEngine needs Ray: pip install "simckpt[ray]"') from error
        self._ray: Any = ray
        self._grace = grace
        self._futures: list[RayFuture] = []
        self._own = not ray.is_initialized()
        if not self._own and address is not None:
            raise ConfigurationError(
                f"this process is connected to Ray already, and not to {address!r}", keys=["address"]
            )
        if self._own:
            # Ray sends statistics to its makers unless it is told not to
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._ray.init(address=address or "local", include_dashboard=None if address else False)
        # a call that is tried again without being asked to would find its branch half trained, and a used worker keeps
        # what the call before has left in it
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0, "max_calls": 1}
        self._call = self._ray.remote(**options)(_call)

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> RayFuture:
        """Returns a future of `fn(*args)`.

        Raises:
            ConfigurationError: another process cannot find `fn`: it is no function of a module or a script.
        """
        path = [str(Path(entry).absolute()) for entry in sys.path]
        future = RayFuture(self._ray, self._call.remote(described(fn), path, args), self._grace)
        self._futures = [each for each in self._futures if not each.done()] + [future]
        return future

    def close(self) -> None:
        """Ends the calls that are left, waits until they are gone, and stops the Ray that it has started itself."""
        left = [future for future in self._futures if not future.done()]
        for future in left:
            future.cancel()
        for future in left:
            while not future.done():
                time.sleep(0.05)
        self._futures = []
        if self._own:
            self._ray.shutdown()


def _call(function: Mapping[str, Any], path: Sequence[str], args: tuple[Any, ...]) -> Iterator[Any]:
    """Yields where the call has begun, (node, process id), then what it returns; Ray itself does not say when."""
    # the whole group is killed in the end: a forked child keeps the sockets that tell Ray of its parent's death
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    yield _context().get_node_id(), os.getpid()
    sys.path.extend(entry for entry in path if entry not in sys.path)
    yield function_of(function)(*args)


def _context() -> Any:
    """Returns what Ray tells of the worker that calls this."""
    import ray

    return ray.get_runtime_context()


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


class RayFuture:
    """A call of a `RayEngine`; see `engines.Future`."""

    def __init__(self, ray: Any, yielded: Any, grace: float) -> None:
        self._ray: Any = ray
        self._yielded = yielded
        self._grace = grace
        self._place: tuple[str, int] | None = None  # node and process id, once the call has begun
        self._reference: Any = None  # of what the call returned or raised, once it has ended
        self._asked: float | None = None  # when it was asked to end
        self._killed = False

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned.

        Raises:
            TimeoutError: it has not ended within `timeout` [s].
            WorkerFailedError: it raised.
            WorkerDiedError: its process or its machine is gone.
            concurrent.futures.CancelledError: it was taken back, or ended because it was asked to.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the call has not ended within {timeout} s")
            self._wait(min(left, 1.0))
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(self._reference)
        except exceptions.TaskCancelledError as error:
            raise concurrent.futures.CancelledError(str(error)) from error
        except exceptions.RayTaskError as error:
            raise WorkerFailedError(str(error)) from error
        except exceptions.RayError as error:
            if self._asked is not None:
                raise concurrent.futures.CancelledError(str(error)) from error
            raise WorkerDiedError(str(error)) from error

    def running(self) -> bool:
        """Returns whether the call has begun and not ended."""
        return not self.done() and self._place is not None

    def done(self) -> bool:
        """Returns whether it has ended; kills the process of a call that was asked to end and does not."""
        self._wait(0)
        ended = self._reference is not None
        late = self._asked is not None and time.monotonic() - self._asked > self._grace
        # one that was about to begin when it was taken back may tell its place later
        if late and not ended and not self._killed and self._place is not None:
            self._signal(signal.SIGKILL)
            self._killed = True
        return ended

    def _wait(self, timeout: float) -> None:
        """Looks for at most `timeout` [s] at what the call has yielded."""
        while self._reference is None and self._ray.wait([self._yielded], timeout=timeout)[0]:
            reference = next(self._yielded)
            if self._place is not None:
                self._reference = reference
                return
            try:
                self._place = self._ray.get(reference)
            except self._ray.exceptions.RayError:
                self._reference = reference  # it never began

    def cancel(self) -> bool:
        """Takes the call back or asks its process to end, which is killed after the grace period; does not wait."""
        if self._asked is None and not self.done():
            self._asked = time.monotonic()
            if self._place is None:
                self._ray.cancel(self._yielded, force=False)
            else:
                self._signal(signal.SIGTERM)
        return True

    def _signal(self, number: int) -> None:
        """Sends a signal to the process of the call, on whatever machine it is."""
        if self._place is None:
            return
        node, pid = self._place
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        task = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(_send_signal)
        task.remote(pid, number)
