"""The sub-environments of a vector env, reached in this process or through the pipes of an `AsyncVectorEnv`.

Both hand out the same: one `SubEnvState` for each env, joined to one tree. So a checkpoint of a `SyncVectorEnv` fits an
`AsyncVectorEnv` and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import iterate

from simckpt.errors import CaptureError, RestoreError, SimckptError, StateMismatchError, UnsupportedStateError
from simckpt.sim.batch import Batched, PerEnv, stack_arrays
from simckpt.sim.environment import EnvHandle
from simckpt.sim.physics import Physics
from simckpt.sim.physics_batch import PhysicsBatch
from simckpt.sim.worker import HELLO
from simckpt.state.nodes import UNSEEDED, ObjectState
from simckpt.state.tree import Encoded, copy_tree, decode, encode


@dataclass(slots=True)
class SubEnvState:
    """What one sub-environment is made of.

    Attributes:
        env: the state of its `EnvHandle`.
        autoreset: whether its next step will be a reset.
        observation: the last observation as the env returned it; None before the first.
        buffered: whether only the batched buffer holds the last observation.
        streams: the process-global generators of its worker, or None where it has no process of its own.
        drawn: whether somebody drew from these in the worker.
    """

    env: dict[str, Any]
    autoreset: bool
    observation: Any = None
    buffered: bool = False
    streams: Any = None
    drawn: bool = False


class SubEnvs(Protocol):
    """The sub-environments of one vector env.

    Attributes:
        buffer_name: the attribute of the vector env that holds the batched observations.
        own_streams: whether each has process-global random generators of its own, in a worker.
    """

    buffer_name: str
    own_streams: bool

    def __init__(self, envs: Any, path: str) -> None: ...

    def check_ready(self) -> None:
        """Raises CaptureError if the vector env cannot be captured now."""

    def capture(self) -> dict[str, Any]:
        """Returns the joined state of all envs, which shares no memory with them; see `join`."""

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Returns what keeps a joined state from being applied; touches nothing."""

    def apply(self, state: Mapping[str, Any], observations: Any) -> None:
        """Puts a joined state into the live envs; `observations` is the batched buffer, restored already."""


class _SubEnvHandle(EnvHandle):
    """The handle of one env among many, whose simulations are captured together with the others'."""

    def capture_python(self) -> Any:
        """Returns the Python state alone, and brings `simulations` up to date."""
        return self._capture_python()


class SyncSubEnvs:
    """The sub-environments of a `SyncVectorEnv`."""

    buffer_name = "_observations"
    own_streams = False

    def __init__(self, envs: SyncVectorEnv[Any, Any], path: str) -> None:
        self._envs = envs
        self._path = path
        self._handles: list[_SubEnvHandle] = []
        self._batches: dict[str, PhysicsBatch] = {}
        self._open()

    def _open(self) -> None:
        # the list is public, and somebody may have put other envs into it
        if len(self._handles) != len(self._envs.envs) or any(
            handle.env is not env for handle, env in zip(self._handles, self._envs.envs, strict=True)
        ):
            self._handles = [_SubEnvHandle(env, path=f"{self._path}/env_{i}") for i, env in enumerate(self._envs.envs)]

    def check_ready(self) -> None:
        """Does nothing: a `SyncVectorEnv` is never in the middle of a step."""

    def capture(self) -> dict[str, Any]:
        """Returns the joined state; see `SubEnvs`."""
        self._open()
        envs = self._envs
        # one kind of work for all envs before the next: comparing models sweeps the caches that the walk needs
        python = [handle.capture_python() for handle in self._handles]
        state = self._capture_simulations()
        state["python"] = Batched(python)
        state["vector"] = {
            "autoreset": envs._autoreset_envs.copy(),
            "env_observations": Batched([_copy(observation) for observation in envs._env_obs]),
            "buffered": False,
            "streams": None,
            "drawn": None,
            "rewards": envs._rewards.copy(),
            "terminations": envs._terminations.copy(),
            "truncations": envs._truncations.copy(),
        }
        return state

    def _capture_simulations(self) -> dict[str, Any]:
        """Returns physics and models of all envs; call it after their Python state was captured, which finds them."""
        state: dict[str, Any] = {}
        names = list(dict.fromkeys(name for handle in self._handles for name in handle.simulations))
        for name in names:
            simulations = [handle.simulations.get(name) for handle in self._handles]
            state[name] = self._capture_physics(name, simulations)
            state[f"model{name.removeprefix('physics')}"] = Batched(
                [None if physics is None else physics.capture_model() for physics in simulations]
            )
        if names:
            baselines: dict[str, Any] = {}
            for handle in self._handles:
                baselines |= handle.baselines
            state["models"] = {digest: dict(baselines[digest].fields) for digest in sorted(baselines)}
        return state

    def _capture_physics(self, name: str, simulations: Sequence[Physics | None]) -> Any:
        present = [physics for physics in simulations if physics is not None]
        if len(present) == len(simulations):
            batch = self._batches.get(name)
            if batch is None or not batch.is_for(present):
                batch = self._batches[name] = PhysicsBatch(present)
            if batch.fits:
                return batch.capture()
        return PerEnv([None if physics is None else physics.capture() for physics in simulations])

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Returns what keeps a joined state from being applied; touches nothing."""
        self._open()
        found: list[str] = []
        for handle, one in zip(self._handles, part(state), strict=True):
            found += problems_of(handle.validate, one.env)
        return found

    def apply(self, state: Mapping[str, Any], observations: Any) -> None:
        """Puts a joined state into the live envs."""
        self._open()
        envs = self._envs
        states = part(state)
        for handle, one in zip(self._handles, states, strict=True):
            handle.apply(one.env)
        vector = state["vector"]
        envs._autoreset_envs[...] = vector["autoreset"]
        # from an AsyncVectorEnv, which keeps none of these; the next step overwrites them
        envs._rewards[...] = vector.get("rewards", 0.0)
        envs._terminations[...] = vector.get("terminations", vector["autoreset"])
        envs._truncations[...] = vector.get("truncations", False)
        for index, observation in enumerate(_own_observations(envs, states, observations)):
            # bound anew, not written in place: the list may hold an env's own buffer
            envs._env_obs[index] = _copy(observation)


class AsyncSubEnvs:
    """The sub-environments of an `AsyncVectorEnv` whose workers are `simckpt.async_worker`."""

    buffer_name = "observations"
    own_streams = True

    def __init__(self, envs: AsyncVectorEnv[Any, Any], path: str) -> None:
        self._envs = envs
        self._path = path
        # the fields of models by digest: large and hardly ever new, so they cross the pipe once
        self._models: dict[str, Any] = {}
        self._refuse_foreign_workers()
        self._open()
        # at exit multiprocessing sends its daemons SIGTERM, which these ignore, and waits for them: so their pipes are
        # closed first, also where an exception or Ctrl-C left the vector env open
        Finalize(envs, _hang_up, args=(list(envs.parent_pipes),), exitpriority=0)

    def _refuse_foreign_workers(self) -> None:
        # gymnasium's own worker answers this with two booleans and is none the worse for it
        spaces = ("simckpt", self._envs.single_observation_space, self._envs.single_action_space)
        if any(reply != HELLO for reply in self._talk("_check_spaces", [spaces] * self._envs.num_envs, CaptureError)):
            raise UnsupportedStateError(
                f"{self._path}: the workers of this AsyncVectorEnv cannot hand out the state of their envs: build it "
                "by simckpt.make_vec(..., vectorization_mode='async') or "
                "AsyncVectorEnv(..., worker=simckpt.async_worker)",
                path=self._path,
                type_name="gymnasium.vector.AsyncVectorEnv",
            )

    def _open(self, failure: type[SimckptError] = CaptureError) -> list[list[str]]:
        """Returns the digests of the models in each worker."""
        paths = [f"{self._path}/env_{index}" for index in range(self._envs.num_envs)]
        return self._exchange("simckpt_open", paths, failure)

    def check_ready(self) -> None:
        """Raises CaptureError if the vector env is closed or between `step_async` and `step_wait`."""
        self._check(CaptureError)

    def capture(self) -> dict[str, Any]:
        """Returns the joined state; see `SubEnvs`."""
        encoded: list[Encoded] = self._exchange("simckpt_capture", [None] * self._envs.num_envs, CaptureError)
        states = [SubEnvState(**decode(one.leaves, one.structure)) for one in encoded]
        digests = [_digests(state.env) for state in states]
        self._fetch_models(digests)
        used = {digest for found in digests for digest in found}
        return join(states, {digest: dict(self._models[digest]) for digest in sorted(used)})

    def _fetch_models(self, digests: Sequence[Sequence[str]]) -> None:
        wanted: list[list[str]] = []
        coming: set[str] = set(self._models)
        for found in digests:
            wanted.append([digest for digest in found if digest not in coming])
            coming |= set(found)
        if any(wanted):
            for one in self._exchange("simckpt_models", wanted, CaptureError):
                self._models |= decode(one.leaves, one.structure)
            for fields in self._models.values():
                for value in fields.values():
                    if isinstance(value, np.ndarray):
                        # every state shares it
                        value.flags.writeable = False

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Returns what keeps a joined state from being applied; touches nothing."""
        found: list[str] = []
        payloads = self._payloads(part(state), self._open(RestoreError))
        for index, (_, error, trace) in enumerate(self._talk("simckpt_validate", payloads, RestoreError)):
            if isinstance(error, StateMismatchError):
                found += error.problems or [str(error)]
            elif error is not None:
                _raise(error, index, trace)
        return found

    def apply(self, state: Mapping[str, Any], observations: Any) -> None:
        """Puts a joined state into the live envs."""
        states = part(state)
        for one, observation in zip(states, _own_observations(self._envs, states, observations), strict=True):
            one.observation = observation
        self._exchange("simckpt_apply", self._payloads(states, self._open(RestoreError)), RestoreError)

    def _payloads(self, states: Sequence[SubEnvState], known: Sequence[Sequence[str]]) -> list[Encoded]:
        """Returns each state in the form that crosses the pipe, with the models that its worker lacks."""
        payloads = []
        for one, digests in zip(states, known, strict=True):
            needed = set(_digests(one.env)) - set(digests)
            models = {digest: fields for digest, fields in one.env.get("models", {}).items() if digest in needed}
            tree = {name: getattr(one, name) for name in SubEnvState.__slots__}
            payloads.append(encode({**tree, "env": {**one.env, "models": models}}))
        return payloads

    def _exchange(self, command: str, payloads: Sequence[Any], failure: type[SimckptError]) -> list[Any]:
        """Returns the results of one of simckpt's commands; raises the first error that a worker answered."""
        replies = self._talk(command, payloads, failure)
        for index, (_, error, trace) in enumerate(replies):
            if error is not None:
                _raise(error, index, trace)
        return [result for result, _, _ in replies]

    def _check(self, failure: type[SimckptError]) -> None:
        envs = self._envs
        if envs.closed:
            raise failure(f"{self._path}: the vector env is closed")
        if envs._state is not AsyncState.DEFAULT:
            pending = envs._state.value
            raise failure(
                f"{self._path}: the vector env waits for a pending {pending}: call {pending}_wait() first, then save "
                "or restore"
            )
        for index, (pipe, process) in enumerate(zip(envs.parent_pipes, envs.processes, strict=True)):
            if not process.is_alive():
                raise failure(f"{self._path}: {_obituary(index, process)}")
            if pipe is None or pipe.closed:
                raise failure(f"{self._path}: the worker of env {index} was shut down after an error in its env")

    def _talk(self, command: str, payloads: Sequence[Any], failure: type[SimckptError]) -> list[Any]:
        """Sends one payload to each worker and returns the answers.

        Every worker that was sent something is also read, whatever happens to the others: else its answer would be
        taken for that of the next step.
        """
        self._check(failure)
        envs = self._envs
        # interrupted halfway, the vector env refuses to step instead of reading answers that are not its own
        envs._state = AsyncState.WAITING_CALL
        dead: set[int] = set()
        for index, (pipe, payload) in enumerate(zip(envs.parent_pipes, payloads, strict=True)):
            try:
                pipe.send((command, payload))
            except OSError:
                dead.add(index)
        replies: list[Any] = []
        for index, pipe in enumerate(envs.parent_pipes):
            if index not in dead:
                try:
                    replies.append(pipe.recv())
                except (EOFError, OSError):
                    dead.add(index)
        envs._state = AsyncState.DEFAULT
        if dead:
            raise failure(f"{self._path}: " + "; ".join(_obituary(i, envs.processes[i]) for i in sorted(dead)))
        # a foreign worker that broke over the question: gymnasium shuts it down and raises its error
        envs._raise_if_errors([success for _, success in replies])
        return [answer for answer, _ in replies]


def join(states: Sequence[SubEnvState], models: dict[str, Any]) -> dict[str, Any]:
    """Returns the joined state of some envs: physics by field as `(num_envs, ...)`, the rest joined when it is encoded.

    Args:
        states: one for each env; the joined state takes them over.
        models: the fields of all models by digest.
    """
    names = list(dict.fromkeys(name for state in states for name in state.env))
    joined: dict[str, Any] = {}
    for name in sorted(names, key=lambda name: name == "python"):
        values = [state.env.get(name) for state in states]
        joined[name] = _join_physics(values) if name.startswith("physics") else Batched(values)
        if name.startswith("model") and "models" not in joined:
            joined["models"] = models
    # one dataset each, and None where no env has a process of its own
    own_process = any(state.streams is not None for state in states)
    joined["vector"] = {
        "autoreset": np.array([state.autoreset for state in states], np.bool_),
        "env_observations": Batched([state.observation for state in states]),
        "buffered": any(state.buffered for state in states),
        "streams": _join_streams(states) if own_process else None,
        "drawn": np.array([state.drawn for state in states], np.bool_) if own_process else None,
    }
    return joined


def part(state: Mapping[str, Any]) -> list[SubEnvState]:
    """Returns the states that `join` joined; arrays are views of the joined ones.

    Raises:
        StateMismatchError: the parts are not for as many envs as the state claims.
    """
    vector = state["vector"]
    count = len(vector["autoreset"])
    try:
        columns = {
            name: _part_physics(value, count) if name.startswith("physics") else _column(value, count)
            for name, value in state.items()
            if name not in ("vector", "models")
        }
        observations = _column(vector["env_observations"], count)
        streams = [None] * count if vector["streams"] is None else _column(_unwrapped(vector["streams"]), count)
        drawn = [False] * count if vector["drawn"] is None else list(vector["drawn"])
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateMismatchError(f"the state is not one of {count} envs joined: {error}") from error
    models = state.get("models", {})
    return [
        SubEnvState(
            env={**{name: column[i] for name, column in columns.items() if column[i] is not None}, "models": models},
            autoreset=bool(vector["autoreset"][i]),
            observation=observations[i],
            buffered=bool(vector["buffered"]),
            streams=streams[i],
            drawn=bool(drawn[i]),
        )
        for i in range(count)
    ]


def _hang_up(pipes: Sequence[Connection]) -> None:
    """Closes this process's ends of the workers' pipes; in a forked child it is not called."""
    for pipe in pipes:
        pipe.close()


def _join_streams(states: Sequence[SubEnvState]) -> Any:
    """Returns the streams of all workers; marked as unseeded while nobody has drawn from them or seeded them."""
    joined = Batched([state.streams for state in states])
    return joined if any(state.drawn for state in states) else ObjectState(UNSEEDED, items=joined)


def _unwrapped(streams: Any) -> Any:
    return streams.items if isinstance(streams, ObjectState) else streams


def _join_physics(values: Sequence[Any]) -> Any:
    first = values[0]
    same = first is not None and all(
        value is not None
        and value.keys() == first.keys()
        and all(value[name].shape == array.shape and value[name].dtype == array.dtype for name, array in first.items())
        for value in values
    )
    if not same:
        return PerEnv(values)
    return {name: stack_arrays([value[name] for value in values]) for name in first}


def _part_physics(value: Any, count: int) -> list[Any]:
    if isinstance(value, PerEnv):
        return _column(value.children, count)
    if any(len(array) != count for array in value.values()):
        raise ValueError(f"physics is not for {count} envs")
    return [{name: array[index, ...] for name, array in value.items()} for index in range(count)]


def _column(values: Any, count: int) -> list[Any]:
    found = list(values)
    if len(found) != count:
        raise ValueError(f"{len(found)} parts instead of {count}")
    return found


def problems_of(validate: Callable[[Any], None], state: Any) -> Sequence[str]:
    """Returns the problems that a handle's `validate` raises about a state."""
    try:
        validate(state)
    except StateMismatchError as error:
        return error.problems or [str(error)]
    return []


def _digests(env_state: Mapping[str, Any]) -> list[str]:
    return [value["baseline"] for name, value in env_state.items() if name.startswith("model") and name != "models"]


def _raise(error: BaseException, index: int, trace: str) -> None:
    error.add_note(f"in the worker of env {index}:\n{trace}")
    raise error


def _obituary(index: int, process: Any) -> str:
    process.join(timeout=1)
    how = "is not answering" if process.exitcode is None else f"has died (exit code {process.exitcode})"
    return f"the worker of env {index} {how}: build the vector env anew and restore the last checkpoint"


def _own_observations(envs: Any, states: Sequence[SubEnvState], observations: Any) -> list[Any]:
    """Returns the last observation of each env, out of the batched buffer where nothing else held it."""
    if not any(state.buffered for state in states):
        return [state.observation for state in states]
    rows = iterate(envs.observation_space, observations)
    return [row if state.buffered else state.observation for row, state in zip(rows, states, strict=True)]


def _copy(observation: Any) -> Any:
    return observation.copy() if type(observation) is np.ndarray else copy_tree(observation)
