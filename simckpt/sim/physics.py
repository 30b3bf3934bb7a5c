"""One MuJoCo simulation, captured and restored exactly through arrays with MuJoCo's own names.

The integration state alone is not enough: environments read derived fields (`xpos`, `cfrc_ext`) that `mj_step` leaves
one substep stale, and some step functions take the contact arena as input. What is exact:
`mj_setState(INTEGRATION)`, then `mj_forward` (which recomputes the arena), then every array and scalar of the main
buffer overwritten by name.
Not restored: contact and `efc_*` arrays read before the next step are the recomputed ones, not the stale ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mujoco
import numpy as np

from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.sim.model import Baseline, ModelAccess, ModelFields, shared_baseline

# pointers, sizes, arena counts, timers and solver statistics: not state, or not assignable
_NOT_STATE = frozenset(
    [
        "plugin",
        "plugin_data",
        "narena",
        "nbuffer",
        "nplugin",
        "pstack",
        "pbase",
        "parena",
        "threadpool",
        "signature",
        "ncon",
        "ne",
        "nf",
        "nl",
        "nefc",
        "nJ",
        "nY",
        "nA",
        "nisland",
        "nidof",
        "efm_active",
        "nefmK",
        "nefmcon",
        "nefmT",
        "nefmA",
        "nefmdof",
        "nefmL",
        "maxuse_stack",
        "maxuse_arena",
        "maxuse_con",
        "maxuse_efc",
        "maxuse_threadstack",
        "solver",
        "warning",
        "timer",
    ]
)
# not in `_all_fields`, but environments may read how often the simulation was unstable
_WARNING_ARRAYS = ("number", "lastinfo")
# where a component of mjtState lies in MjData, if not under its own name
_COMPONENT_FIELDS = {"warmstart": "qacc_warmstart", "plugin": "plugin_state"}

PhysicsState = dict[str, np.ndarray[Any, Any]]


class Physics:
    """Reads and writes the simulation state of one `(MjModel, MjData)` in place.

    Args:
        data: the live data; its model is `data.model`. Neither is ever replaced.
        path: where it was found, for messages.
        baseline: of the model; by default the model as it is now.

    Raises:
        UnsupportedStateError: an engine plugin keeps data behind an opaque pointer.
    """

    def __init__(self, data: mujoco.MjData, *, path: str = "physics", baseline: Baseline | None = None) -> None:
        self.data = data
        self.model = data.model
        self.path = path
        _refuse_opaque_plugins(self.model, self.data, path)
        # the binding hands out the same views on every access, so they may be kept
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.scalars: dict[str, type] = {}
        for name in data._all_fields:
            if name in _NOT_STATE:
                continue
            value = getattr(data, name)
            if not isinstance(value, np.ndarray):
                self.scalars[name] = type(value)
            elif value.size:
                self.arrays[name] = value
        for name in _WARNING_ARRAYS:
            self.arrays[f"warning.{name}"] = getattr(data.warning, name)
        self._array_items = list(self.arrays.items())
        self._scalar_items = [(name, np.dtype(kind)) for name, kind in self.scalars.items()]
        self.access = ModelAccess(self.model)
        self.baseline = baseline if baseline is not None else shared_baseline(self.access.read())

    def capture(self) -> PhysicsState:
        """Returns copies: `{MjData field: array}`, scalars as arrays of shape `()`, empty fields left out."""
        state = {name: array.copy() for name, array in self._array_items}
        data = self.data
        for name, dtype in self._scalar_items:
            state[name] = array = np.empty((), dtype)
            array[()] = getattr(data, name)
        return state

    def capture_model(self) -> dict[str, Any]:
        """Returns `{"baseline": digest, "difference": {field: value}, "mujoco": version}`."""
        return {
            "baseline": self.baseline.digest,
            "difference": self.access.difference(self.baseline),
            "mujoco": mujoco.__version__,
        }

    def problems(self, physics: Mapping[str, Any], model: Mapping[str, Any], baseline: ModelFields) -> list[str]:
        """Returns one line for each thing that keeps a state from being restored; changes nothing."""
        if model.get("mujoco") != mujoco.__version__:
            return self._problems_between_versions(physics, model, baseline)
        found = self.access.mismatches(baseline)
        if not found:
            found = self.access.difference_problems(model["difference"])
        found += self._array_problems(physics)
        found += [f"physics field {name}: missing from the state" for name in self._names() if name not in physics]
        found += [f"physics field {name}: unknown to the live data" for name in physics if name not in self._names()]
        return [f"{self.path}: {line}" for line in found]

    def _array_problems(self, physics: Mapping[str, Any]) -> list[str]:
        found = []
        for name, array in self._array_items:
            saved = physics.get(name)
            if saved is not None and (saved.shape != array.shape or saved.dtype != array.dtype):
                found.append(
                    f"physics field {name}: {saved.dtype}{saved.shape} in the state, "
                    f"{array.dtype}{array.shape} in the live env"
                )
        return found

    def _problems_between_versions(
        self, physics: Mapping[str, Any], model: Mapping[str, Any], baseline: ModelFields
    ) -> list[str]:
        # another version has other fields: what both have must fit
        found = [line for line in self.access.mismatches(baseline) if "in the live env" in line]
        found += self._array_problems(physics)
        found += [f"physics field {name}: missing from the state" for name in ("qpos", "qvel") if name not in physics]
        return [f"{self.path}: {line}" for line in found]

    def _names(self) -> dict[str, Any]:
        return {**self.arrays, **self.scalars}

    def apply(self, physics: Mapping[str, Any], model: Mapping[str, Any], baseline: ModelFields) -> None:
        """Makes the live simulation equal to a state that `problems` found nothing in.

        `mj_forward` runs once, and with it every global `mjcb_*` callback: Python state is restored after this.

        Args:
            physics: as `capture` returns it.
            model: as `capture_model` returns it.
            baseline: the fields that `model["baseline"]` names.

        Raises:
            StateMismatchError: the model has an engine plugin that the live one has not (or the reverse).
        """
        if model.get("mujoco") != mujoco.__version__:
            baseline = {**self.baseline.fields, **baseline}
        self.access.write(baseline, model["difference"])
        self._set_integration_state(physics)
        mujoco.mj_forward(self.model, self.data)
        for name, array in self._array_items:
            if name in physics:
                array[...] = physics[name]
        for name, kind in self.scalars.items():
            if name in physics:
                setattr(self.data, name, kind(physics[name]))
        # later differences are relative to the restored baseline, as they are in a run that was never interrupted
        if self.baseline.digest != model["baseline"] and model.get("mujoco") == mujoco.__version__:
            self.baseline = shared_baseline(baseline)

    def _set_integration_state(self, physics: Mapping[str, Any]) -> None:
        """Assembles the integration vector by component names, because its layout changes between versions."""
        parts = []
        for bit, field in _integration_components():
            size = mujoco.mj_stateSize(self.model, bit)
            if size == 0:
                continue
            part = np.asarray(physics[field] if field in physics else getattr(self.data, field), np.float64).reshape(-1)
            if part.size != size:
                raise StateMismatchError(f"{self.path}: {field} has {part.size} numbers, the live model needs {size}")
            parts.append(part)
        mujoco.mj_setState(self.model, self.data, np.concatenate(parts), mujoco.mjtState.mjSTATE_INTEGRATION)

    def memory(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yields name and live array of every array of data and model, for recognising views into them."""
        yield from self._array_items
        for name, array in self.access.memory():
            yield f"model.{name}", array


def _integration_components() -> Iterator[tuple[int, str]]:
    integration = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    bits = {int(value): name for name, value in mujoco.mjtState.__members__.items() if name.startswith("mjSTATE_")}
    for bit in sorted(bits):
        if bit & integration and bit.bit_count() == 1:
            name = bits[bit].removeprefix("mjSTATE_").lower()
            yield bit, _COMPONENT_FIELDS.get(name, name)


def _refuse_opaque_plugins(model: mujoco.MjModel, data: mujoco.MjData, path: str) -> None:
    """Refuses plugins that hold a pointer to data of their own: arrays cannot carry it."""
    if model.nplugin and np.any(data.plugin_data):
        raise UnsupportedStateError(
            f"{path}: the model has {model.nplugin} engine plugin(s) that keep data behind an opaque pointer, which "
            "cannot be captured; remove them from the model, or give the env its own state_dict and load_state_dict",
            path=path,
            type_name="mujoco plugin",
        )
