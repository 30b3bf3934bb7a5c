"""Contact forces of a MuJoCo env, as a signal beside its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np

from simckpt.errors import ConfigurationError


def contact_force(env: Any, info: Mapping[str, Any] | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the size of the force that acts on each body through its contacts, `(nbody,)` float64 [N].

    It is that of the last physics step, and changes nothing in the simulation, unlike `mj_rnePostConstraint`, which
    fills `cfrc_ext`. Contacts of flexes are left out.

    Args:
        env: one with MuJoCo's `model` and `data` as attributes of its innermost env, as Gymnasium's have them.
        info: of the step; not looked at.

    Raises:
        ConfigurationError: it has none.
    """
    inner = getattr(env, "unwrapped", env)
    model, data = getattr(inner, "model", None), getattr(inner, "data", None)
    if not isinstance(model, mujoco.MjModel) or not isinstance(data, mujoco.MjData):
        raise ConfigurationError(
            f"{type(inner).__name__} has no MuJoCo `model` and `data` to take contact forces from",
            keys=["contact_force"],
        )
    forces = np.zeros((model.nbody, 3))
    found = np.zeros(6)
    for number in range(data.ncon):
        contact = data.contact[number]
        first, second = contact.geom
        if first < 0 or second < 0:
            continue
        mujoco.mj_contactForce(model, data, number, found)
        # the rows of the frame are its axes in the world; the force is the one that the first geom exerts
        force = found[:3] @ contact.frame.reshape(3, 3)
        forces[model.geom_bodyid[second]] += force
        forces[model.geom_bodyid[first]] -= force
    sizes: np.ndarray[Any, np.dtype[np.float64]] = np.linalg.norm(forces, axis=1)
    return sizes
