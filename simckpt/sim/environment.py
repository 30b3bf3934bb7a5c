"""One environment with its whole wrapper chain: captured, checked against, and restored exactly."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium as gym
import mujoco

from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.sim import descriptions
from simckpt.sim.callbacks import installed_callbacks, put_global_variables
from simckpt.sim.loading import load_or_put_back
from simckpt.sim.memory import SimulationMemory
from simckpt.sim.model import Baseline
from simckpt.sim.objects.kind import join_path
from simckpt.sim.objects.matching import GraphMatching
from simckpt.sim.physics import Physics
from simckpt.sim.python_state import GraphWalker, listing, mismatch_error

Models = dict[str, dict[str, Any]]


class EnvHandle:
    """Captures and restores one env: simulations, models, and all Python state of the chain from `env` inward.

    Constructing it walks the env once, so that what cannot be captured is refused now.

    Args:
        env: the outermost wrapper that is stepped.
        path: its name in messages.

    Raises:
        UnsupportedStateError: something in the env is neither state nor a known resource.
    """

    def __init__(self, env: gym.Env[Any, Any], path: str = "env") -> None:
        self.env = env
        self.path = path
        self._walker = GraphWalker(path, label=self._label)
        self._simulations: dict[str, Physics] = {}
        # some envs compile the model they really use in their first reset
        self._sizes_may_change = not _was_reset(env)
        self._capture_python()

    @property
    def simulations(self) -> Mapping[str, Physics]:
        """The simulations by name: "physics", "physics_2", ...; as the latest capture found them."""
        return self._simulations

    @property
    def baselines(self) -> dict[str, Baseline]:
        """The baseline of every model, by digest."""
        return {physics.baseline.digest: physics.baseline for physics in self._simulations.values()}

    @property
    def models(self) -> Models:
        """The fields of every baseline by digest: what a checkpoint stores once."""
        return {digest: baseline.fields for digest, baseline in self.baselines.items()}

    def capture(self) -> dict[str, Any]:
        """Returns the env's state: `physics` and `model` (for envs with MuJoCo), and `python`.

        The tree shares no memory with the env. A second simulation is `physics_2` with `model_2`. The baselines that
        `model` refers to by digest are in `models`.

        Raises:
            UnsupportedStateError: something that cannot be captured has appeared; the env is untouched.
        """
        python = self._capture_python()
        state: dict[str, Any] = {}
        for name, physics in self._simulations.items():
            state[name] = physics.capture()
            state[_model_key(name)] = physics.capture_model()
        state["python"] = python
        return state

    def attributes(self, paths: Iterable[str]) -> descriptions.Attributes:
        """Returns texts that explain the leaves at these paths of a captured state in a file."""
        return descriptions.explain(paths, vector=False)

    def _label(self, steps: list[str]) -> str:
        """Returns the path of an object in messages, with `unwrapped` for the whole chain of wrappers."""
        if steps[:1] != ["['env']"]:
            return join_path(self.path, steps)
        depth = 0
        env: Any = self.env
        while isinstance(env, gym.Wrapper):
            env = env.env
            depth += 1
        inner = steps[1:]
        if inner[:depth] == ["env"] * depth and len(inner) > depth:
            inner = ["unwrapped", *inner[depth:]]
        return join_path(self.path, inner)

    def _root(self) -> dict[str, Any]:
        root: dict[str, Any] = {"env": self.env}
        if self._simulations:
            callbacks = installed_callbacks(self.path)
            if callbacks:
                root["callbacks"] = callbacks
        return root

    def _capture_python(self) -> Any:
        # the simulations are looked for in every capture, because some envs put new ones into their place
        for _ in range(3):
            python = self._walker.capture(self._root())
            if self._adopt(self._walker.physics):
                return python
        raise UnsupportedStateError(
            f"{self.path}: the env replaces its simulation while it is being looked at",
            path=self.path,
            type_name="mujoco.MjData",
        )

    def _adopt(self, found: list[mujoco.MjData]) -> bool:
        """Makes `found` the simulations of this env; returns whether they were so already."""
        known = [physics.data for physics in self._simulations.values()]
        if len(known) == len(found) and all(map(_same_simulation, self._simulations.values(), found)):
            return True
        simulations = {}
        for number, data in enumerate(found, start=1):
            name = "physics" if number == 1 else f"physics_{number}"
            old = self._simulations.get(name)
            physics = Physics(data, path=f"{self.path}/{name}", baseline=None if old is None else old.baseline)
            found_sizes = [] if old is None else physics.access.mismatches(old.baseline.fields)
            if found_sizes:
                self._refuse_other_model(physics, found_sizes)
                physics = Physics(data, path=physics.path)
            simulations[name] = physics
        self._sizes_may_change = self._sizes_may_change and not self._simulations
        self._simulations = simulations
        self._walker.memory = SimulationMemory(simulations)
        return False

    def _refuse_other_model(self, physics: Physics, sizes: list[str]) -> None:
        """Refuses a model of other sizes, unless it is the first that came after the one of registration."""
        if not self._sizes_may_change:
            raise UnsupportedStateError(
                f"{physics.path}: the env has replaced its model by one of other sizes, which cannot be restored in "
                f"place (in the state: when it was captured before):{listing(sizes)}",
                path=physics.path,
                type_name="mujoco.MjModel",
            )

    def validate(self, state: Mapping[str, Any]) -> None:
        """Checks that a state fits the live env; changes nothing. Warns if another version of MuJoCo saved it.

        Args:
            state: as `capture` returns it, with `models` where its baselines are others than the live env's.

        Raises:
            StateMismatchError: it does not; the error lists everything that differs.
        """
        self._match(state)
        versions = {state[_model_key(name)].get("mujoco") for name in state if _is_simulation(name)}
        for version in sorted(versions - {mujoco.__version__}, key=str):
            warnings.warn(
                f"{self.path}: the state was saved with mujoco {version} and is restored with {mujoco.__version__}: "
                "it continues, but not bit for bit",
                stacklevel=2,
            )

    def _match(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], GraphMatching]:
        self._capture_python()
        python = state.get("python")
        if not isinstance(python, Mapping) or not isinstance(python.get("callbacks", {}), Mapping):
            raise StateMismatchError(f"the state for {self.path} is not one of an env: it has no 'python'")
        root = self._root()
        matching = self._walker.match(state["python"], root)
        problems = self._physics_problems(state, matching)
        problems += _callback_problems(state["python"], root)
        problems += matching.problems(state["python"], root)
        if problems:
            raise mismatch_error(self.path, problems)
        return root, matching

    def _physics_problems(self, state: Mapping[str, Any], matching: GraphMatching) -> list[str]:
        saved = [name for name in state if _is_simulation(name)]
        problems = [f"{name} is missing from the state" for name in self._simulations if name not in saved]
        for name in saved:
            physics = self._live_simulation(name, matching)
            if physics is None:
                problems.append(f"{name} is in the state, and the live env has no such simulation")
                continue
            model = state.get(_model_key(name))
            baseline = None if model is None else self._baseline_fields(state, model["baseline"])
            if model is None or baseline is None:
                problems.append(f"{name}: the fields of its model are missing from the state")
                continue
            problems += physics.problems(state[name], model, baseline)
        return problems

    def _live_simulation(self, name: str, matching: GraphMatching) -> Physics | None:
        data = matching.physics.get(name)
        found = [physics for physics in self._simulations.values() if data is None or physics.data is data]
        return self._simulations.get(name) if data is None else next(iter(found), None)

    def _baseline_fields(self, state: Mapping[str, Any], digest: str) -> Mapping[str, Any] | None:
        models = state.get("models") or {}
        if digest in models:
            found: Mapping[str, Any] = models[digest]
            return found
        own = self.baselines.get(digest)
        return None if own is None else own.fields

    def apply(self, state: Mapping[str, Any]) -> None:
        """Makes the live env equal to a state: physics first, then Python state, because `mj_forward` runs callbacks.

        Arrays and containers are changed in place. Nothing of the state is handed to the env: it can be applied again.

        Raises:
            StateMismatchError: the state does not fit; nothing was changed.
        """
        root, matching = self._match(state)
        for name in filter(_is_simulation, state):
            physics = self._live_simulation(name, matching)
            model = state[_model_key(name)]
            baseline = self._baseline_fields(state, model["baseline"])
            assert physics is not None
            assert baseline is not None
            physics.apply(state[name], model, baseline)
        self._walker.apply(state["python"], root, matching)
        for callback in root.get("callbacks", {}).values():
            put_global_variables(callback["callback"], callback["globals"])


class StandaloneEnvHandle(EnvHandle):
    """An `EnvHandle` whose captures carry the baselines of their models: the state of one env by itself."""

    def capture(self) -> dict[str, Any]:
        """Returns the state of `EnvHandle.capture` and `models`, the fields of each baseline by digest."""
        state = super().capture()
        if self._simulations:
            state["models"] = {digest: dict(fields) for digest, fields in self.models.items()}
        return state


class SnapshotEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Gives an env `state_dict` and `load_state_dict`; steps, resets and renders are the env's own.

    Args:
        env: any Gymnasium env, wrapped as you like.

    Raises:
        UnsupportedStateError: something in the env is neither state nor a known resource.
    """

    # as part of a longer chain it is a wrapper like any other
    _simckpt_transparent = True

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._handle = StandaloneEnvHandle(env)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides how the env goes on; it shares no memory with the env.

        Raises:
            UnsupportedStateError: something that cannot be captured has appeared; the env is untouched.
        """
        return self._handle.capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the env go on from a state, bit for bit. If it fails, the env is as it was.

        Raises:
            StateMismatchError: the state is of another env; nothing was changed.
            RestoreError: it could not be applied; the env is as it was.
            HalfRestoredError: it could not be put back either.
        """
        load_or_put_back(self._handle, state, self._handle.path)


def _same_simulation(physics: Physics, data: mujoco.MjData) -> bool:
    return physics.data is data and data.model is physics.model


def _was_reset(env: Any) -> bool:
    """Returns whether the env is known to have been reset, as `gym.make`'s own wrapper notes."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.OrderEnforcing):
            return bool(env.has_reset)
        env = env.env
    return False


def _is_simulation(name: str) -> bool:
    return name == "physics" or name.startswith("physics_")


def _model_key(physics_name: str) -> str:
    return f"model{physics_name.removeprefix('physics')}"


def _callback_problems(python: Any, root: Mapping[str, Any]) -> list[str]:
    saved = set(python.get("callbacks", {}))
    live = set(root.get("callbacks", {}))
    return [
        *(
            f"mjcb_{name} was set when the state was saved and is not set now: set it first"
            for name in sorted(saved - live)
        ),
        *(
            f"mjcb_{name} is set now and was not when the state was saved: set it to None"
            for name in sorted(live - saved)
        ),
    ]
