"""Undoes part of a restore, so that the suite can be seen to fail where a naive restore fails."""

from typing import Any

import mujoco
import numpy as np


def before(kind: str | None, env: Any) -> Any:
    """Returns what `after` needs of the env as it was before the restore."""
    return _model_fields(env.unwrapped.model) if kind == "model" else None


def after(kind: str | None, env: Any, spared: Any) -> None:
    """Damages a restored env.

    Args:
        kind: `positions` keeps nothing of the physics but `qpos`, `qvel` and `time`, as `set_state` does;
            `integration` keeps `mjSTATE_INTEGRATION` and forwards; `model` puts the model back as it was before;
            `autoreset` forgets which sub-envs are about to be reset; None damages nothing, and `python`, which needs a
            second env, is the harness's affair.
        env: the restored env.
        spared: what `before` returned.
    """
    if kind in ("positions", "integration"):
        _forget_physics(env.unwrapped.model, env.unwrapped.data, kind)
    elif kind == "model":
        _write_model_fields(env.unwrapped.model, spared)
    elif kind == "autoreset":
        env.unwrapped._autoreset_envs[:] = False
    elif kind not in (None, "python"):
        raise ValueError(kind)


def transplant_physics(source: Any, target: Any) -> None:
    """Copies the whole model and data of one env into another, and nothing of its Python state."""
    _write_model_fields(target.unwrapped.model, _model_fields(source.unwrapped.model))
    mujoco.mj_copyData(target.unwrapped.data, target.unwrapped.model, source.unwrapped.data)


def _forget_physics(model: mujoco.MjModel, data: mujoco.MjData, kind: str) -> None:
    signature = int(mujoco.mjtState.mjSTATE_QPOS | mujoco.mjtState.mjSTATE_QVEL | mujoco.mjtState.mjSTATE_TIME)
    if kind == "integration":
        signature = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(mujoco.mj_stateSize(model, signature))
    mujoco.mj_getState(model, data, state, signature)
    mujoco.mj_resetData(model, data)
    mujoco.mj_setState(model, data, state, signature)
    mujoco.mj_forward(model, data)


def _model_fields(model: mujoco.MjModel) -> dict[str, Any]:
    fields: dict[str, Any] = {"gravity": model.opt.gravity.copy(), "timestep": model.opt.timestep}
    for name in dir(model):
        values = None if name.startswith("_") else getattr(model, name)
        if isinstance(values, np.ndarray) and values.flags.writeable:
            fields[name] = values.copy()
    return fields


def _write_model_fields(model: mujoco.MjModel, fields: dict[str, Any]) -> None:
    fields = dict(fields)
    model.opt.gravity[:] = fields.pop("gravity")
    model.opt.timestep = fields.pop("timestep")
    for name, values in fields.items():
        getattr(model, name)[...] = values
