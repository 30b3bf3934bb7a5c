"""Texts that explain the state of envs to people who open a checkpoint's file in an HDF5 viewer.

Axes carry the names of MuJoCo's own sizes (`nq`, `nbody`, ...). Units are those of a model written in SI units, which
MuJoCo itself neither asks for nor knows.
"""

from __future__ import annotations

from collections.abc import Iterable

Attributes = dict[str, dict[str, str]]

_COORDINATES = "m for positions and slides, rad for hinges, 1 for quaternions"
_VELOCITIES = "m/s for translations, rad/s for rotations"
_ACCELERATIONS = "m/s^2 for translations, rad/s^2 for rotations"
_FORCES = "N for translations, N m for rotations"
_LENGTH = "m, or rad where it acts on a hinge"
_SPEED = "m/s, or rad/s where it acts on a hinge"
_FORCE = "N, or N m where it acts on a hinge"
_SPATIAL_FORCE = "N m, N"
_INERTIA = "kg m^2, kg m, kg"

# MjData field: what it is, its axes for one env, its units where they are known
_PHYSICS: dict[str, tuple[str, str, str]] = {
    # what the next step starts from
    "time": ("simulated time", "", "s"),
    "qpos": ("generalized positions of the joints", "nq", _COORDINATES),
    "qvel": ("generalized velocities of the joints", "nv", _VELOCITIES),
    "act": ("activations of the actuators that have dynamics of their own", "na", ""),
    "history": ("past controls and sensor readings that delays still need", "nhistory", ""),
    "plastic": ("plastic deformation that has remained", "nplastic", ""),
    "qacc_warmstart": ("accelerations from which the constraint solver starts", "nv", _ACCELERATIONS),
    "plugin_state": ("state of engine plugins", "npluginstate", ""),
    "ctrl": ("controls of the actuators", "nu", ""),
    "qfrc_applied": ("generalized forces applied by the program", "nv", _FORCES),
    "xfrc_applied": ("forces and torques on bodies applied by the program (force, torque)", "nbody, 6", "N, N m"),
    "eq_active": ("which equality constraints are switched on", "neq", ""),
    "mocap_pos": ("positions of the mocap bodies", "nmocap, 3", "m"),
    "mocap_quat": ("orientations of the mocap bodies", "nmocap, 4", "1"),
    "userdata": ("numbers that the engine keeps for the program and never touches", "nuserdata", ""),
    "tree_asleep": ("below 0: the tree is awake; else the next tree in its sleeping cycle", "ntree", ""),
    "flexvert_lambda": ("contact multipliers of flex vertices, carried from step to step", "nflexvert", ""),
    "flexvert_conage": ("contact age of flex vertices: below 0 loaded, above 0 steps since", "nflexvert", ""),
    # results
    "qacc": ("generalized accelerations", "nv", _ACCELERATIONS),
    "act_dot": ("time derivatives of the activations", "na", ""),
    "sensordata": ("readings of all sensors, one after the other", "nsensordata", ""),
    "energy": ("potential and kinetic energy, where the model asks for them", "2", "J"),
    # kinematics
    "xpos": ("positions of the body frames", "nbody, 3", "m"),
    "xquat": ("orientations of the body frames, as quaternions", "nbody, 4", "1"),
    "xmat": ("orientations of the body frames, as matrices", "nbody, 9", "1"),
    "xipos": ("centers of mass of the bodies", "nbody, 3", "m"),
    "xiquat": ("orientations of the principal axes of inertia, as quaternions", "nbody, 4", "1"),
    "ximat": ("orientations of the principal axes of inertia, as matrices", "nbody, 9", "1"),
    "xanchor": ("positions of the joint anchors", "njnt, 3", "m"),
    "xaxis": ("axes of the joints", "njnt, 3", "1"),
    "geom_xpos": ("positions of the geoms", "ngeom, 3", "m"),
    "geom_xquat": ("orientations of the geoms, as quaternions", "ngeom, 4", "1"),
    "geom_xmat": ("orientations of the geoms, as matrices", "ngeom, 9", "1"),
    "site_xpos": ("positions of the sites", "nsite, 3", "m"),
    "site_xquat": ("orientations of the sites, as quaternions", "nsite, 4", "1"),
    "site_xmat": ("orientations of the sites, as matrices", "nsite, 9", "1"),
    "cam_xpos": ("positions of the cameras", "ncam, 3", "m"),
    "cam_xmat": ("orientations of the cameras, as matrices", "ncam, 9", "1"),
    "light_xpos": ("positions of the lights", "nlight, 3", "m"),
    "light_xdir": ("directions of the lights", "nlight, 3", "1"),
    # inertia and motion in the frame of a kinematic tree's center of mass
    "subtree_com": ("center of mass of each body with all that hangs on it", "nbody, 3", "m"),
    "cdof": ("motion axis of each degree of freedom (rotation, translation)", "nv, 6", ""),
    "cinert": ("inertia and mass of each body", "nbody, 10", _INERTIA),
    "crb": ("inertia and mass of each body with all that hangs on it", "nbody, 10", _INERTIA),
    "cvel": ("velocity of each body (rotation, translation)", "nbody, 6", "rad/s, m/s"),
    "cdof_dot": ("time derivative of cdof (rotation, translation)", "nv, 6", ""),
    "cacc": ("acceleration of each body (rotation, translation)", "nbody, 6", "rad/s^2, m/s^2"),
    "cfrc_int": ("force between each body and its parent (torque, force)", "nbody, 6", _SPATIAL_FORCE),
    "cfrc_ext": ("external force on each body, contacts included (torque, force)", "nbody, 6", _SPATIAL_FORCE),
    "subtree_linvel": ("velocity of each subtree's center of mass", "nbody, 3", "m/s"),
    "subtree_angmom": ("angular momentum of each subtree about its center of mass", "nbody, 3", "kg m^2/s"),
    # flexes
    "flexvert_xpos": ("positions of the flex vertices", "nflexvert, 3", "m"),
    "flexvert_J": ("Jacobian of the flex vertices, sparse", "nJfv, 2", ""),
    "flexvert_length": ("lengths at the flex vertices", "nflexvert, 2", "m"),
    "flexvert_hessian": ("diagonal blocks of the stretch Hessian, symmetric", "nflexvert, 6", ""),
    "flexelem_aabb": ("bounding boxes of the flex elements (center, half size)", "nflexelem, 6", "m"),
    "flexelem_krot": ("corotated stiffness of the flex elements", "nflexstiffness", ""),
    "flexedge_hessian": ("off-diagonal blocks of the stretch Hessian", "nflexedge, 9", ""),
    "flexedge_J": ("Jacobian of the flex edges, sparse", "nJfe", ""),
    "flexedge_length": ("lengths of the flex edges", "nflexedge", "m"),
    "flexedge_velocity": ("rates of change of the flex edges' lengths", "nflexedge", "m/s"),
    "flex_hessian_valid": ("whether the cached stretch Hessian is up to date", "nflex", ""),
    "bvh_aabb_dyn": ("bounding boxes of moving volumes (center, half size)", "nbvhdynamic, 6", "m"),
    "bvh_active": ("whether the bounding volume was looked at for collisions", "nbvh", ""),
    # tendons and actuators
    "ten_wrapadr": ("where each tendon's path begins among the wrap points", "ntendon", ""),
    "ten_wrapnum": ("number of wrap points of each tendon", "ntendon", ""),
    "ten_J": ("Jacobian of the tendons, sparse", "nJten", ""),
    "ten_length": ("lengths of the tendons", "ntendon", _LENGTH),
    "ten_velocity": ("rates of change of the tendons' lengths", "ntendon", _SPEED),
    "wrap_obj": ("geom at each wrap point; -1 is a site, -2 a pulley", "nwrap, 2", ""),
    "wrap_xpos": ("points of all tendon paths", "nwrap, 6", "m"),
    "actuator_length": ("lengths of the actuators' transmissions", "nout", _LENGTH),
    "actuator_velocity": ("rates of change of the transmissions' lengths", "nout", _SPEED),
    "actuator_force": ("forces of the actuators", "nout", _FORCE),
    "actuator_moment": ("moment arms of the actuators, sparse", "nJmom", ""),
    "moment_rownnz": ("number of non-zeros in each row of actuator_moment", "nout", ""),
    "moment_rowadr": ("where each row of actuator_moment begins", "nout", ""),
    "moment_colind": ("columns of actuator_moment's non-zeros", "nJmom", ""),
    # generalized inertia and its factors
    "M": ("generalized inertia, sparse", "nC", ""),
    "qM": ("generalized inertia, sparse by chains of parents", "nM", ""),
    "qLD": ("factors L' D L of the generalized inertia, sparse", "nC", ""),
    "qLDiagInv": ("inverse of the diagonal D of qLD", "nv", ""),
    "qH": ("factors L' D L of the inertia that the integrator has modified, sparse", "nC", ""),
    "qHDiagInv": ("inverse of the diagonal D of qH", "nv", ""),
    "qDeriv": ("derivative of the smooth forces by velocity, sparse", "nD", ""),
    "qLU": ("factors L U of the implicit integrator's matrix, sparse", "nD", ""),
    # generalized forces
    "qfrc_bias": ("Coriolis, centrifugal and gravitational forces", "nv", _FORCES),
    "qfrc_spring": ("forces of springs", "nv", _FORCES),
    "qfrc_damper": ("forces of dampers", "nv", _FORCES),
    "qfrc_gravcomp": ("forces that compensate gravity", "nv", _FORCES),
    "qfrc_fluid": ("forces of the surrounding fluid", "nv", _FORCES),
    "qfrc_adhesion": ("forces of adhesion at contacts", "nv", _FORCES),
    "qfrc_passive": ("sum of the passive forces", "nv", _FORCES),
    "qfrc_actuator": ("forces of the actuators", "nv", _FORCES),
    "qfrc_smooth": ("sum of all forces but those of constraints", "nv", _FORCES),
    "qacc_smooth": ("accelerations without constraints", "nv", _ACCELERATIONS),
    "qfrc_constraint": ("forces of constraints: contacts, limits, friction, equalities", "nv", _FORCES),
    "qfrc_inverse": ("forces that explain the motion, by inverse dynamics", "nv", _FORCES),
    # sleep
    "tree_awake": ("whether the tree is awake", "ntree", ""),
    "body_awake": ("sleep state of each body", "nbody", ""),
    "body_awake_ind": ("numbers of the bodies that are awake or static", "nbody", ""),
    "parent_awake_ind": ("numbers of the bodies whose parent is awake or static", "nbody", ""),
    "dof_awake_ind": ("numbers of the degrees of freedom that are awake", "nv", ""),
    "ntree_awake": ("number of trees that are awake", "", ""),
    "nbody_awake": ("number of bodies that are awake or static", "", ""),
    "nparent_awake": ("number of bodies whose parent is awake or static", "", ""),
    "nv_awake": ("number of degrees of freedom that are awake", "", ""),
    # how far the lazy stages and the solver got
    "flg_energypos": ("whether the potential energy is up to date", "", ""),
    "flg_energyvel": ("whether the kinetic energy is up to date", "", ""),
    "flg_subtreevel": ("whether the velocities of subtrees are up to date", "", ""),
    "flg_rnepost": ("whether cacc, cfrc_int and cfrc_ext are up to date", "", ""),
    "solver_niter": ("iterations of the constraint solver in each island", "mjNISLAND", ""),
    "solver_nnz": ("non-zeros of the constraint solver's matrix in each island", "mjNISLAND", ""),
    "solver_fwdinv": ("how far forward and inverse dynamics differ (joint forces, constraint forces)", "2", ""),
    "warning.number": ("how often each warning was raised, by mjtWarning", "mjNWARNING", ""),
    "warning.lastinfo": ("detail of the latest warning of each kind, by mjtWarning", "mjNWARNING", ""),
}

_GROUPS = {
    "physics": "State of the simulation, by the names of MuJoCo's MjData: what a step starts from, and what the last "
    "step left in derived fields, which rewards and observations read.",
    "model": "How each env's model differs from the baseline that it names by digest.",
    "models": "Baselines: all fields of the compiled models, by digest.",
    "python": "State of the Python objects: attributes of the wrappers, the env and its spaces, by the path that leads "
    "to them. Random generators and other scalars are in _tree.",
    "vector": "State of the vector env itself: the last results, pending autoresets, and its wrappers and spaces.",
}
_BATCHED = " The first axis is the env."
_VECTOR = {
    "vector/observations": "observations of the latest step or reset, all envs in one buffer",
    "vector/env_observations": "observations of the latest step or reset, as each env returned them",
    "vector/autoreset": "whether the env's next step will be a reset",
    "vector/rewards": "rewards of the latest step",
    "vector/terminations": "terminations of the latest step",
    "vector/truncations": "truncations of the latest step",
    "vector/drawn": "whether the env has drawn from the process-global generators of its worker",
    "vector/around": "State of the vector wrappers and spaces, by the attribute path that leads to it.",
    "vector/returned": "observations last returned through each SnapshotVectorEnv, from the outside inward",
    "vector/streams": "Process-global random generators of the workers.",
}


def explain(paths: Iterable[str], *, vector: bool) -> Attributes:
    """Returns {path of a leaf or group: {name: text}} for the state of an env or vector env.

    Args:
        paths: of its leaves; what has no text is left out.
        vector: whether arrays of many envs are joined along a first axis.
    """
    kind = "vector env" if vector else "env"
    found: Attributes = {"": {"description": f"State of a Gymnasium {kind}: simulation, models and Python objects."}}
    for path in paths:
        head, *inner = path.split("/")
        group, _, number = head.partition("_")
        if group in _GROUPS and head not in found:
            text = f"Simulation {number} of each env. {_GROUPS[group]}" if number else _GROUPS[group]
            joined = vector and group in ("physics", "python")
            found[head] = {"description": text + (_BATCHED if joined else "")}
        if group == "physics" and inner and inner[-1] in _PHYSICS:
            # an env of its own shape lies under `env_<i>`
            found[path] = _explain_field(inner[-1], joined=vector and len(inner) == 1)
        elif head == "models" and inner:
            found[f"models/{inner[0]}"] = {"description": "Fields of one compiled MjModel, by MuJoCo's names."}
        elif head == "vector" and inner:
            name = f"vector/{inner[0]}"
            if name in _VECTOR:
                found[name] = {"description": _VECTOR[name]}
    return found


def _explain_field(name: str, *, joined: bool) -> dict[str, str]:
    description, axes, units = _PHYSICS[name]
    if joined:
        axes = f"num_envs, {axes}" if axes else "num_envs"
    texts = {"description": description, "axes": axes, "units": units}
    return {key: text for key, text in texts.items() if text}
