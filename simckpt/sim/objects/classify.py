"""From the class of an object, or the name in a node, to its kind."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import types
from collections import OrderedDict, deque
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np

from simckpt.sim import resources
from simckpt.sim.objects import arrays, containers, functions, generators, instances, tensors, values
from simckpt.sim.objects.kind import PLAIN, Capture, Kind, Matching, Rebuild
from simckpt.sim.objects.layout import hidden_layout, static_lookup
from simckpt.sim.resources import Adapter
from simckpt.state.nodes import ObjectState
from simckpt.state.walk import qualified_name

PHYSICS = "mujoco.MjData"


class PhysicsKind(Kind):
    """An MjData: its content is captured elsewhere, the graph only says which one it is."""

    def capture(self, run: Capture, value: Any) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            run.physics.append(value)
            number = len(run.physics)
            node = ObjectState(PHYSICS, {"physics": "physics" if number == 1 else f"physics_{number}"})
            run.memo[id(value)] = node
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return isinstance(live, mujoco.MjData)

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        return "is a mujoco.MjData, which the live env does not have at this place"

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        return


class ConstantKind(Kind):
    """Immutable leaves beside the plain ones (records, subclasses of numbers)."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        return value.copy()

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        return node.copy()


class SentinelKind(instances.ResourceKind):
    """Bare `object()`s, which are told apart by identity alone."""

    def capture(self, run: Capture, value: Any) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            node = run.memo[id(value)] = ObjectState(instances.RESOURCE, {"class": "object"})
        return node


_STATE_ON_CLASSES = (gym.Space, *generators.CLASSES, np.ndarray, list, dict, set, deque)

KINDS: dict[type, Kind] = {}
_PHYSICS = PhysicsKind()
_RECORDS = ConstantKind()
# classes whose content is captured by their own kind, where the check for hidden memory may stop
_KNOWN_BASES = frozenset(
    {object, dict, OrderedDict, list, tuple, deque, set, frozenset, int, float, complex, str, bytes, np.ndarray}
)
_BY_NAME: dict[str, Kind] = {
    PHYSICS: _PHYSICS,
    **containers.BY_NAME,
    **arrays.BY_NAME,
    **functions.BY_NAME,
    **generators.BY_NAME,
    **instances.BY_NAME,
    **values.BY_NAME,
    **tensors.BY_NAME,
}
_BY_NODE: dict[type, Kind] = {
    dict: containers.BY_CLASS[dict],
    OrderedDict: containers.BY_CLASS[OrderedDict],
    list: containers.BY_CLASS[list],
    tuple: containers.BY_CLASS[tuple],
    deque: containers.BY_CLASS[deque],
    np.ndarray: arrays.ARRAYS,
    np.void: _RECORDS,
}


def forget() -> None:
    """Forgets what was concluded about classes, because a registration changed it."""
    KINDS.clear()


resources.on_change(forget)


def classify(cls: type) -> Kind:
    """Returns the kind of the objects of a class, and remembers it."""
    kind = _classify(cls)
    KINDS[cls] = kind
    return kind


def _classify(cls: type) -> Kind:
    adapter = resources.adapter_for(cls)
    if adapter is not None:
        return instances.ProtocolKind(qualified_name(cls), adapter, inner=getattr(cls, "_simckpt_inner", None))
    if resources.declared_stateless(cls):
        return instances.ResourceKind(qualified_name(cls))
    for table in (containers.BY_CLASS, functions.BY_CLASS):
        if cls in table:
            return table[cls]
    builtin = _classify_values(cls)
    if builtin is not None:
        return builtin
    if resources.known_resource(cls):
        return instances.ResourceKind(qualified_name(cls))
    reason = resources.refusal(cls)
    if reason is not None:
        return containers.RefusedKind(qualified_name(cls), reason)
    return _classify_instances(cls)


def _classify_values(cls: type) -> Kind | None:
    if cls is np.ndarray:
        return arrays.ARRAYS
    if cls is np.void:
        return _RECORDS
    if issubclass(cls, np.generic) and cls.__module__ == "numpy":
        PLAIN.add(cls)
        return _RECORDS
    if values.is_enum(cls):
        return values.BY_NAME[values.ENUM]
    if issubclass(cls, np.dtype):
        return arrays.BY_NAME[arrays.DTYPE]
    if issubclass(cls, generators.CLASSES):
        return generators.GENERATORS
    torch = tensors.torch_module()
    if torch is not None and issubclass(cls, torch.Generator):
        return generators.GENERATORS
    if issubclass(cls, mujoco.MjData):
        return _PHYSICS
    if cls in values.IMMUTABLES:
        return values.BY_NAME[values.IMMUTABLE]
    if cls is types.SimpleNamespace:
        return instances.ObjectKind(cls)
    if issubclass(cls, type) or cls.__module__ in ("typing", "types") or cls is np.ufunc:
        return functions.REFERENCES
    if cls.__name__ in ("_lru_cache_wrapper", "cython_function_or_method"):
        return functions.REFERENCES
    if cls is object:
        return SentinelKind("object")
    return tensors.kind_of(cls)


def _classify_instances(cls: type) -> Kind:
    own = _own_protocol(cls)
    if own is not None:
        return own
    hidden = hidden_layout(cls, _KNOWN_BASES)
    if hidden is not None:
        where = "it keeps" if hidden == qualified_name(cls) else f"its base {hidden} keeps"
        return containers.RefusedKind(qualified_name(cls), f"{where} memory of its own, outside Python's attributes")
    return instances.ObjectKind(cls, generator=generators.lazy_generator(cls), class_attributes=_class_attributes(cls))


def _class_attributes(cls: type) -> dict[str, type]:
    """Returns the state that lies on the class of an env, by name, with the base that holds it.

    Spaces (which hold generators), generators, arrays and containers; numbers are taken for constants.
    """
    if not issubclass(cls, gym.Env | gym.vector.VectorEnv):
        return {}
    skipped = resources.skipped_attributes(cls)
    found: dict[str, type] = {}
    for base in cls.__mro__:
        if base.__module__ in ("gymnasium.core", "gymnasium.vector.vector_env", "builtins", "typing"):
            continue
        for name, value in base.__dict__.items():
            if name not in skipped and not name.startswith("__") and isinstance(value, _STATE_ON_CLASSES):
                found.setdefault(name, base)
    return found


def _own_protocol(cls: type) -> Kind | None:
    """Returns the kind of a class that says itself what its state is."""
    if not callable(static_lookup(cls, "state_dict")) or not callable(static_lookup(cls, "load_state_dict")):
        return None
    if getattr(cls, "_simckpt_transparent", False):
        return None
    torch = tensors.torch_module()
    if torch is not None and issubclass(cls, torch.nn.Module | torch.optim.Optimizer):
        return instances.ProtocolKind(qualified_name(cls), _component_adapter())
    adapter = Adapter(lambda value: value.state_dict(), lambda value, state: value.load_state_dict(state))
    wrapper = issubclass(cls, gym.Wrapper | gym.vector.VectorWrapper)
    return instances.ProtocolKind(qualified_name(cls), adapter, inner="env" if wrapper else None)


def _component_adapter() -> Adapter:
    from simckpt.state.components import handle_for

    def put(value: Any, state: Any) -> None:
        handle = handle_for(qualified_name(type(value)), value)
        handle.validate(state)
        handle.apply(state)

    return Adapter(lambda value: handle_for(qualified_name(type(value)), value).capture(), put)


def kind_of_node(node: Any, find_class: Any) -> Kind | None:
    """Returns the kind that restores a node, or None for a class that the live program does not have.

    Args:
        node: a node that is not plain.
        find_class: from a qualified name to a class of the live program, or None.
    """
    if isinstance(node, ObjectState):
        known = _BY_NAME.get(node.type_name)
        if known is not None:
            return known
        name = node.attributes["class"] if node.type_name == instances.PROTOCOL else node.type_name
        cls = find_class(name)
        if cls is None:
            return None
        kind = KINDS.get(cls) or classify(cls)
        wanted = instances.ProtocolKind if node.type_name == instances.PROTOCOL else instances.ObjectKind
        return kind if isinstance(kind, wanted) else None
    found = _BY_NODE.get(type(node))
    return found if found is not None else tensors.kind_of(type(node))
