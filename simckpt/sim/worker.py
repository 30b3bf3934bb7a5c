"""The process behind one sub-environment of an `AsyncVectorEnv`, able to hand out and take back its state.

Gymnasium's own worker keeps the pending autoreset and the last observation in local variables that nothing outside can
reach. `async_worker` speaks the same protocol (gymnasium 1.2 to 1.4, where 1.4 added the semaphore) and five commands
more: `simckpt_open`, `simckpt_models`, `simckpt_capture`, `simckpt_validate` and `simckpt_apply`. A failure of one of
those is an answer, not the end of the worker. States cross the pipe as `Encoded`, numpy alone: torch's own reductions
would move tensors through shared memory that dies with the worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium as gym
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import write_to_shared_memory

from simckpt.errors import CaptureError, SimckptError
from simckpt.state.streams import global_streams_state, load_global_streams
from simckpt.state.tree import Encoded, decode, encode

HELLO = ("simckpt", 1)
"""What this worker answers to `_check_spaces` in mode "simckpt"; gymnasium's own answers two booleans."""

_GRACE = 0.5  # [s] left to an orderly exit once the parent has closed its end
_NOTICE = 10.0  # [s] after a SIGTERM in which the parent is expected to close its end, if it meant this worker


def async_worker(
    index: int,
    env_fn: Callable[[], gym.Env[Any, Any]],
    pipe: Connection,
    parent_pipe: Connection,
    shared_memory: Any,
    error_queue: Any,
    autoreset_mode: AutoresetMode,
    semaphore: Any = None,
) -> None:
    """Serves one sub-environment until it is told to close or its parent is gone.

    Pass it as `AsyncVectorEnv(env_fns, worker=simckpt.async_worker)`. It ignores SIGTERM, SIGINT, SIGUSR1 and
    SIGUSR2, for a signal to the whole job must not kill the envs before the last save; it leaves at the end of its
    pipe, when the parent process dies in whatever way, and, without closing the env, when the parent drops it by
    `close(terminate=True)`.

    Args:
        index: number of the sub-environment.
        env_fn: makes the sub-environment.
        pipe: this worker's end.
        parent_pipe: the parent's end, closed here.
        shared_memory: buffers of the observations, or None where they travel through the pipe.
        error_queue: takes `(index, type, message, trace)` of an exception that ends the worker.
        autoreset_mode: as in gymnasium.
        semaphore: limits how many workers reset or step at once; gymnasium before 1.4 passes none.
    """
    lifeline = _Lifeline(pipe, parent_pipe)
    env = env_fn()
    parent_pipe.close()
    try:
        _Worker(index, env, lifeline, shared_memory, autoreset_mode, semaphore).serve()
    except _ParentGone:
        pass
    except (KeyboardInterrupt, Exception):
        error_type, error_message, _ = sys.exc_info()
        error_queue.put((index, error_type, error_message, traceback.format_exc()))
        with contextlib.suppress(_ParentGone):
            lifeline.send((None, False))
    finally:
        env.close()


class _ParentGone(BaseException):
    """Nobody is left at the other end of the pipe; not an Exception, so that no env's handler swallows it."""


class _Worker:
    """The loop of one worker and the state it keeps outside its env: pending autoreset and last observation."""

    def __init__(
        self,
        index: int,
        env: gym.Env[Any, Any],
        lifeline: _Lifeline,
        shared_memory: Any,
        autoreset_mode: AutoresetMode,
        semaphore: Any,
    ) -> None:
        self._index = index
        self._env = env
        self._lifeline = lifeline
        self._shared_memory = shared_memory
        self._autoreset_mode = autoreset_mode
        self._semaphore = semaphore
        # the spaces as they were at the start, as gymnasium's worker does
        self._observation_space = env.observation_space
        self._action_space = env.action_space
        self._autoreset = False
        self._observation: Any = None
        self._handle: Any = None
        # what the streams looked like when nobody had drawn from them, and whether somebody has
        self._known_streams = _fingerprint(global_streams_state())
        self._drawn = False

    def serve(self) -> None:
        """Answers commands until `close`."""
        commands: dict[str, Callable[[Any], Any]] = {
            "reset": self._reset,
            "reset-noop": lambda _: (self._observation, {}),
            "step": self._step,
            "_call": self._call,
            "_setattr": lambda data: self._env.set_wrapper_attr(*data) and None,
            "_check_spaces": self._check_spaces,
            "simckpt_open": self._guarded(self._open),
            "simckpt_models": self._guarded(self._models),
            "simckpt_capture": self._guarded(self._capture),
            "simckpt_validate": self._guarded(self._validate),
            "simckpt_apply": self._guarded(self._apply),
        }
        while True:
            command, data = self._lifeline.receive()
            if command == "close":
                self._lifeline.send((None, True))
                return
            if command not in commands:
                raise RuntimeError(f"Received unknown command `{command}`. Must be one of {['close', *commands]}.")
            if self._semaphore is not None and command in ("reset", "step"):
                # held while the env runs, not while the answer is sent, which waits for the parent to read
                with self._semaphore:
                    answer = commands[command](data)
            else:
                answer = commands[command](data)
            self._lifeline.send((answer, True))

    def _reset(self, data: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        observation, info = self._env.reset(**data)
        # gymnasium up to 1.4.0 clears the flag only with shared memory; without, the first step after an explicit
        # reset() would be one more reset with reward 0, unlike SyncVectorEnv
        self._autoreset = False
        return self._emit(observation), info

    def _step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        reward: Any
        terminated: Any
        truncated: Any
        if self._autoreset_mode == AutoresetMode.NEXT_STEP:
            if self._autoreset:
                observation, info = self._env.reset()
                reward, terminated, truncated = 0, False, False
            else:
                observation, reward, terminated, truncated, info = self._env.step(action)
            self._autoreset = terminated or truncated
        elif self._autoreset_mode == AutoresetMode.SAME_STEP:
            observation, reward, terminated, truncated, info = self._env.step(action)
            if terminated or truncated:
                reset_observation, reset_info = self._env.reset()
                info = {"final_info": info, "final_obs": observation, **reset_info}
                observation = reset_observation
        elif self._autoreset_mode == AutoresetMode.DISABLED:
            assert self._autoreset is False
            observation, reward, terminated, truncated, info = self._env.step(action)
        else:
            raise ValueError(f"Unexpected autoreset_mode: {self._autoreset_mode}")
        return self._emit(observation), reward, terminated, truncated, info

    def _emit(self, observation: Any) -> Any:
        """Returns what the answer carries of an observation: nothing where it went into shared memory."""
        if self._shared_memory:
            write_to_shared_memory(self._observation_space, self._index, observation, self._shared_memory)
            observation = None
        self._observation = observation
        return observation

    def _call(self, data: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Any:
        name, args, kwargs = data
        if name in ["reset", "step", "close", "_setattr", "_check_spaces"]:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        attribute = self._env.get_wrapper_attr(name)
        return attribute(*args, **kwargs) if callable(attribute) else attribute

    def _check_spaces(self, data: tuple[Any, gym.Space[Any], gym.Space[Any]]) -> tuple[Any, Any]:
        mode, observation_space, action_space = data
        if mode == "simckpt":
            return HELLO
        if mode == "same":
            same_observations = observation_space == self._observation_space
        else:
            same_observations = is_space_dtype_shape_equiv(observation_space, self._observation_space)
        return same_observations, action_space == self._action_space

    def _guarded(self, command: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, BaseException | None, str]]:
        """Returns `command` as a function that answers `(result, error, trace)` and never raises."""

        def run(data: Any) -> tuple[Any, BaseException | None, str]:
            try:
                return command(data), None, ""
            except Exception as error:
                return None, _sendable(error), traceback.format_exc()

        return run

    def _open(self, path: str) -> list[str]:
        """Makes the env ready to be captured, and returns the digests of its models."""
        if self._handle is None:
            # not at the top: a worker that is never saved need not load mujoco
            from simckpt.sim.environment import EnvHandle

            self._handle = EnvHandle(self._env, path=path)
        return list(self._handle.models)

    def _models(self, digests: list[str]) -> Encoded:
        return encode({digest: self._handle.models[digest] for digest in digests})

    def _capture(self, _: None) -> Encoded:
        streams = global_streams_state()
        self._drawn = self._drawn or _fingerprint(streams) != self._known_streams
        state = {
            "env": self._handle.capture(),
            "autoreset": bool(self._autoreset),
            "observation": self._observation,
            "buffered": bool(self._shared_memory),
            "streams": streams,
            "drawn": self._drawn,
        }
        return encode(state)

    def _validate(self, encoded: Encoded) -> None:
        self._handle.validate(decode(encoded.leaves, encoded.structure)["env"])

    def _apply(self, encoded: Encoded) -> None:
        state = decode(encoded.leaves, encoded.structure)
        self._handle.apply(state["env"])
        self._autoreset = state["autoreset"]
        self._observation = None if self._shared_memory else state["observation"]
        # last: rebuilding the env's state may itself draw
        if state["streams"] is not None:
            load_global_streams(state["streams"])
            self._drawn = state["drawn"]
            self._known_streams = _fingerprint(global_streams_state())


def _fingerprint(tree: Any) -> tuple[bytes, tuple[bytes, ...]]:
    encoded = encode(tree)
    return encoded.structure, tuple(leaf.data.tobytes() for leaf in encoded.leaves.values())


def _sendable(error: Exception) -> Exception:
    """Returns the error if it survives a pipe, else one of simckpt's with the same text."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:
        # whatever a stranger's exception does when it is copied
        pass
    kind = SimckptError if isinstance(error, SimckptError) else CaptureError
    return kind(f"{type(error).__qualname__}: {error}")


class _Lifeline:
    """The pipe to the parent, and the knowledge of whether the parent is still there.

    The end of the pipe alone does not tell: under fork, workers started later hold copies of the parent's ends of
    earlier ones (so do all other children the parent forks), and such a pipe ends only when the last copy is closed.
    """

    def __init__(self, pipe: Connection, parent_pipe: Connection) -> None:
        parent = multiprocessing.parent_process()
        self._pipe = pipe
        self._parent_pid = parent.pid if parent is not None and parent.pid is not None else os.getppid()
        # names the parent's end as the parent's table of open files does
        self._parent_end = f"socket:[{os.fstat(parent_pipe.fileno()).st_ino}]"
        self._poller = select.poll()
        self._poller.register(pipe, select.POLLIN)
        self._watched: list[int] = []
        try:
            self._watched.append(os.pidfd_open(self._parent_pid))
        except ProcessLookupError:
            raise SystemExit(0) from None
        except (AttributeError, OSError):
            # no pidfd here (macOS, old kernels): the sentinel ends with the parent, if no sibling holds a copy
            if parent is not None:
                self._watched.append(parent.sentinel)
        for descriptor in self._watched:
            self._poller.register(descriptor, select.POLLIN)
        self._ignore_signals()

    def receive(self) -> Any:
        """Returns the next message.

        Raises:
            _ParentGone: the pipe ended or the parent process died.
        """
        # a plain loop, for every step comes through here
        for descriptor, _ in self._poller.poll():
            if descriptor in self._watched:
                raise _ParentGone
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise _ParentGone from None

    def send(self, message: Any) -> None:
        """Sends a message; `_ParentGone` if nobody can read it."""
        # pickled first, so that only the pipe's own errors are taken for the parent's end
        encoded = ForkingPickler.dumps(message)
        try:
            self._pipe.send_bytes(encoded)
        except ConnectionError:
            raise _ParentGone from None

    def _ignore_signals(self) -> None:
        # an inherited wakeup descriptor would report this worker's signals to the parent's watcher
        signal.set_wakeup_fd(-1)
        # what schedulers send before they kill: some send it to the process group, some to every process of the job
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            # a handler and not SIG_IGN, which programs that the env starts would inherit
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            threading.Thread(target=self._leave_if_dropped, daemon=True).start()

    def _leave_if_dropped(self) -> None:
        """Exits if the parent closes its end soon after a SIGTERM, as `close(terminate=True)` does before it joins.

        A copy of that end in another vector env's workers keeps the pipe open, and the parent would wait for ever.
        """
        deadline = time.monotonic() + _NOTICE
        while time.monotonic() < deadline:
            if not self._parent_holds_its_end():
                time.sleep(_GRACE)
                os._exit(128 + signal.SIGTERM)
            time.sleep(0.05)

    def _parent_holds_its_end(self) -> bool:
        try:
            descriptors = list(Path(f"/proc/{self._parent_pid}/fd").iterdir())
        except OSError:
            return True
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) == self._parent_end:
                    return True
        return False
