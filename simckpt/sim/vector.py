"""Vector envs as components: `VectorEnvHandle` for any chain, `SnapshotVectorEnv` for use without a run.

A vector env is three things: its sub-environments, wherever they run; what the vector env itself keeps of their last
results (observations, pending autoresets); and the attributes of the wrappers and of the vector env, spaces and
generators included. One that is neither a `SyncVectorEnv` nor an `AsyncVectorEnv` is walked as one object, like an env.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from simckpt.errors import StateMismatchError
from simckpt.sim import descriptions
from simckpt.sim.environment import StandaloneEnvHandle
from simckpt.sim.loading import load_or_put_back
from simckpt.sim.python_state import GraphWalker, mismatch_error
from simckpt.sim.resources import register_stateless
from simckpt.sim.sub_envs import AsyncSubEnvs, SubEnvs, SyncSubEnvs, problems_of
from simckpt.state.tree import copy_tree

if TYPE_CHECKING:
    _VectorWrapper: TypeAlias = gym.vector.VectorWrapper[Any, Any, Any, Any, Any]
else:
    # gymnasium before 1.4 has no type parameters here
    _VectorWrapper = gym.vector.VectorWrapper

# what the vector env's constructor was told, what `SubEnvs` captures, and what belongs to this process
_NOT_WALKED = frozenset(
    {
        "envs",
        "env_fns",
        "_env_obs",
        "_observations",
        "_rewards",
        "_terminations",
        "_truncations",
        "_autoreset_envs",
        "observations",
        "parent_pipes",
        "processes",
        "error_queue",
        "_state",
        "shared_memory",
        "copy",
        "context",
        "daemon",
        "worker",
        "observation_mode",
        "autoreset_mode",
        "max_concurrency",
        "num_envs",
        "closed",
        "spec",
        "metadata",
        "render_mode",
    }
)


class VectorEnvHandle:
    """Captures and restores a vector env with all its wrappers.

    Args:
        envs: the vector env that is stepped, wrapped as you like. An `AsyncVectorEnv` needs
            `worker=simckpt.async_worker`.
        path: its name in messages.

    Raises:
        UnsupportedStateError: foreign workers, or something in an env that is neither state nor a known resource.
        CaptureError: the vector env is closed, waits for a pending step, or a worker has died.
    """

    def __init__(self, envs: gym.vector.VectorEnv[Any, Any, Any], path: str = "envs") -> None:
        self.envs = envs
        self.path = path
        # the observations last returned through a SnapshotVectorEnv that this handle belongs to
        self.returned: Any = None
        outermost = envs
        while isinstance(outermost, SnapshotVectorEnv):
            outermost = outermost.env
        self._base = envs.unwrapped
        sub_envs = _sub_envs_class(self._base)
        self._parts: _Parts | _Whole
        if sub_envs is None:
            self._parts = _Whole(outermost, path)
        else:
            self._parts = _Parts(outermost, self._base, sub_envs(self._base, path), path)

    def capture(self) -> dict[str, Any]:
        """Returns the state of DESIGN's form: `physics` by MjData's field names, `model`, `models`, `python`, `vector`.

        Arrays of `physics` are `(num_envs, ...)`. The state shares no memory with the vector env.

        Raises:
            UnsupportedStateError: something that cannot be captured has appeared; the vector env can go on.
            CaptureError: it is closed, waits for a pending step, or a worker has died.
        """
        state = self._parts.capture()
        state["vector"] = {
            "num_envs": self.envs.num_envs,
            "autoreset_mode": self._autoreset_mode(),
            **state.get("vector", {}),
            "returned": [handle.keep_returned() for handle in self._snapshot_handles()],
        }
        return state

    def attributes(self, paths: Iterable[str]) -> descriptions.Attributes:
        """Returns texts that explain the leaves at these paths of a captured state in a file."""
        # the arrays of one that is walked as a whole have the axes that it gave them
        return descriptions.explain(paths, vector=isinstance(self._parts, _Parts))

    def validate(self, state: Mapping[str, Any]) -> None:
        """Checks that a state fits the live vector env and all its sub-environments; changes nothing.

        A state of a `SyncVectorEnv` fits an `AsyncVectorEnv` and the other way round, except for the process-global
        generators of workers: draws of the envs from those come from other streams afterwards, with a warning.

        Raises:
            StateMismatchError: it lists everything that differs.
            RestoreError: the vector env is closed, waits for a pending step, or a worker has died.
        """
        self._check_header(state)
        problems = self._parts.problems(state)
        if problems:
            raise mismatch_error(self.path, problems)
        self._parts.warn(state)

    def apply(self, state: Mapping[str, Any]) -> None:
        """Makes the vector env go on from a state that `validate` found nothing in, in place.

        Raises:
            RestoreError: a part did not take it; applying what `capture` returned before puts all parts back.
        """
        self._parts.apply(state)
        handles = list(self._snapshot_handles())
        kept = state["vector"]["returned"]
        for handle, returned in zip(handles, kept if len(kept) == len(handles) else [None] * len(handles), strict=True):
            handle.returned = copy_tree(returned)

    def _check_header(self, state: Any) -> None:
        vector = state.get("vector") if isinstance(state, Mapping) else None
        if not isinstance(vector, Mapping) or not isinstance(vector.get("num_envs"), int):
            raise StateMismatchError(f"the state for {self.path} is not one of a vector env")
        if vector["num_envs"] != self.envs.num_envs:
            line = f"{self.path}: the state has {vector['num_envs']} envs, the live vector env has {self.envs.num_envs}"
            raise StateMismatchError(line, problems=[line])
        mode = self._autoreset_mode()
        if vector.get("autoreset_mode") != mode:
            saved = vector.get("autoreset_mode")
            line = f"{self.path}: the autoreset mode is {saved} in the state, {mode} in the live env"
            raise StateMismatchError(line, problems=[line])

    def _autoreset_mode(self) -> str | None:
        # gymnasium 1.2 wrote the metadata into the class of the sub-environment, where another vector env overwrote it
        mode = getattr(self._base, "autoreset_mode", None) or self._base.metadata.get("autoreset_mode")
        return None if mode is None else str(getattr(mode, "value", mode))

    def _snapshot_handles(self) -> Iterator[VectorEnvHandle]:
        envs = self.envs
        while isinstance(envs, gym.vector.VectorWrapper):
            if isinstance(envs, SnapshotVectorEnv):
                yield envs.handle
            envs = envs.env

    def keep_returned(self) -> Any:
        """Returns a copy of the last observations that were returned through a `SnapshotVectorEnv`, or None."""
        if self.returned is None:
            return None
        inner = self.envs.env if isinstance(self.envs, SnapshotVectorEnv) else None
        if inner is self._base and isinstance(self._parts, _Parts):
            # the returned arrays belong to the caller, who may have changed them; these are the vector env's own
            return copy_tree(self._parts.observations)
        return copy_tree(self.returned)


class SnapshotVectorEnv(_VectorWrapper):
    """Gives a vector env `state_dict`, `load_state_dict` and the last observations; steps and resets are its own.

    Inside a run it is not needed: any vector env can be a component.

    Args:
        env: any vector env; an `AsyncVectorEnv` needs `worker=simckpt.async_worker`.

    Raises:
        UnsupportedStateError: foreign workers, or something in an env that is neither state nor a known resource.
    """

    # as part of a longer chain it is a wrapper like any other
    _simckpt_transparent = True

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._handle = VectorEnvHandle(self)

    @property
    def handle(self) -> VectorEnvHandle:
        """The handle behind `state_dict`."""
        return self._handle

    @property
    def last_observations(self) -> Any:
        """A copy of the observations of the latest step or reset, or None before the first.

        They cannot be computed again after a restore, so they are part of the state. Through wrappers inside, they are
        the arrays that were returned: changed in place by their receiver, they are changed here.
        """
        return self._handle.keep_returned()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all envs."""
        results: tuple[Any, Any, Any, Any, dict[str, Any]] = self.env.step(actions)
        self._handle.returned = results[0]
        return results

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, or those of `options["reset_mask"]`."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self._handle.returned = observations
        return observations, infos

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides how the envs go on; it shares no memory with them.

        Raises:
            UnsupportedStateError: something that cannot be captured has appeared; the envs can go on.
            CaptureError: the vector env waits for a pending step, or a worker has died.
        """
        return self._handle.capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the envs go on from a state, bit for bit. If it fails, all envs are as they were.

        Raises:
            StateMismatchError: the state is of other envs; nothing was changed.
            RestoreError: it could not be applied; the envs are as they were.
            HalfRestoredError: they could not be put back either.
        """
        load_or_put_back(self._handle, state, self._handle.path)

    def __getattr__(self, name: str) -> Any:
        # what gymnasium's vector wrappers do not forward: call, get_attr, set_attr, envs, step_async, ...
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    def __enter__(self) -> SnapshotVectorEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Whole:
    """A vector env of its own kind: one object, whose state is what its attributes lead to."""

    def __init__(self, envs: Any, path: str) -> None:
        self._handle = StandaloneEnvHandle(envs, path)

    def capture(self) -> dict[str, Any]:
        return self._handle.capture()

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        return list(problems_of(self._handle.validate, state))

    def apply(self, state: Mapping[str, Any]) -> None:
        self._handle.apply(state)

    def warn(self, state: Mapping[str, Any]) -> None:
        """Nothing is left out."""


class _Parts:
    """A `SyncVectorEnv` or `AsyncVectorEnv`: its sub-environments, its buffers, and the Python objects around them."""

    def __init__(self, outermost: Any, base: Any, sub_envs: SubEnvs, path: str) -> None:
        self._outermost = outermost
        self._base = base
        self._sub_envs = sub_envs
        self._path = path
        # the base is walked as a dict of attributes: so its class may be another one after a restart
        self._walker = GraphWalker(path, elsewhere=[base, *getattr(base, "envs", ())])
        self._walker.capture(self._root())

    @property
    def observations(self) -> Any:
        """The live batched buffer of the last observations."""
        return getattr(self._base, self._sub_envs.buffer_name)

    def _root(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self._base).items() if name not in _NOT_WALKED}
        return {"wrappers": self._outermost, "attributes": attributes}

    def capture(self) -> dict[str, Any]:
        self._sub_envs.check_ready()
        state = self._sub_envs.capture()
        state["vector"] |= {
            "around": self._walker.capture(self._root()),
            "observations": _copy_buffer(self.observations),
        }
        return state

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        vector = state["vector"]
        missing = [name for name in ("around", "observations", "autoreset", "buffered") if name not in vector]
        if missing or "python" not in state:
            return [f"{self._path}: the state is one of another kind of vector env"]
        problems = self._sub_envs.problems(state)
        problems += self._walker.problems(vector["around"], self._root())
        if not _fits(self.observations, vector["observations"]):
            problems.append(f"{self._path}: the observations have another structure, shape or dtype")
        return problems

    def apply(self, state: Mapping[str, Any]) -> None:
        vector = state["vector"]
        saved = _copy_buffer(vector["observations"])
        if not _write(self.observations, saved):
            setattr(self._base, self._sub_envs.buffer_name, saved)
        self._sub_envs.apply(state, self.observations)
        # after the sub-environments: where both sides know a generator (the space of env 0), the loop's view counts
        root = self._root()
        self._walker.apply(vector["around"], root)
        wanted = root["attributes"]
        live = vars(self._base)
        for name in [name for name in live if name not in wanted and name not in _NOT_WALKED]:
            delattr(self._base, name)
        for name, value in wanted.items():
            if live.get(name) is not value:
                setattr(self._base, name, value)

    def warn(self, state: Mapping[str, Any]) -> None:
        """Warns, before anything is changed, of the one thing that cannot be restored exactly."""
        saved = state["vector"]
        own_streams = self._sub_envs.own_streams
        if (saved.get("streams") is not None) == own_streams:
            return
        live = self._sub_envs.capture()["vector"] if own_streams else {}
        if any(np.any(vector["drawn"]) for vector in (saved, live) if vector.get("drawn") is not None):
            warnings.warn(
                f"{self._path}: some envs draw from the process-global generators (random, numpy.random, torch) of "
                "their workers, and the state was moved between a SyncVectorEnv and an AsyncVectorEnv: those draws "
                "come from other streams from now on, and differ",
                stacklevel=4,
            )


def _sub_envs_class(base: Any) -> type[SubEnvs] | None:
    """Returns who reaches the sub-environments, or None where the vector env is one object."""
    own_protocol = callable(getattr(type(base), "state_dict", None)) and callable(
        getattr(type(base), "load_state_dict", None)
    )
    if own_protocol:
        return None
    if isinstance(base, AsyncVectorEnv):
        return AsyncSubEnvs
    return SyncSubEnvs if isinstance(base, SyncVectorEnv) else None


def _copy_buffer(buffer: Any) -> Any:
    return buffer.copy() if type(buffer) is np.ndarray else copy_tree(buffer)


def _fits(live: Any, saved: Any) -> bool:
    if isinstance(live, np.ndarray):
        return isinstance(saved, np.ndarray) and (saved.shape, saved.dtype) == (live.shape, live.dtype)
    if isinstance(live, Mapping):
        return isinstance(saved, Mapping) and list(live) == list(saved) and all(_fits(live[k], saved[k]) for k in live)
    # the observations of a custom space are a tuple of whatever the envs return
    return isinstance(saved, type(live))


def _write(live: Any, saved: Any) -> bool:
    """Writes a saved buffer into the live one; returns False if that cannot be done in place."""
    if isinstance(live, np.ndarray):
        if not isinstance(saved, np.ndarray) or (saved.shape, saved.dtype) != (live.shape, live.dtype):
            return False
        live[...] = saved
        return True
    if isinstance(live, Mapping):
        return all(_write(live[key], saved[key]) for key in live)
    if isinstance(live, tuple) and len(live) == len(saved):
        return all(_write(one, other) for one, other in zip(live, saved, strict=True))
    return False


# the handle inside a SnapshotVectorEnv that is itself part of a chain
register_stateless(VectorEnvHandle)
