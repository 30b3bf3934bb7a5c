"""Random streams derived anew: what makes a branch of a run independent of it, and yet the same each time."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simckpt.errors import UnsupportedStateError
from simckpt.state.nodes import UNSEEDED, ObjectState
from simckpt.state.registry import ContainerKind, LeafKind
from simckpt.state.rng import BIT_GENERATORS, generator_state, set_generator_state
from simckpt.state.walk import Walker

# containers that keep their children in another form, and what returns these, to be changed in place
openers: dict[type, Callable[[Any], Sequence[Any]]] = {}

_TYPES = frozenset({"numpy.Generator", "numpy.BitGenerator", "numpy.RandomState", "random.Random", "torch.Generator"})


def reseed(tree: Any, seed: str) -> None:
    """Replaces every random stream in a state tree, in place, by one that is derived from `seed` and its path there.

    A stream is a state from `generator_state`, a `bit_generator.state` of numpy, or a generator among the values. Each
    keeps its kind, loses half-used draws, and gets a SeedSequence of its own. Streams in any other form, such as a
    tensor from `torch.get_rng_state()` or a key of JAX, are plain numbers to this function and stay as they are.

    Args:
        tree: what was captured or decoded; nobody else may hold it.
        seed: any text; another one gives streams that have nothing to do with these.

    Raises:
        UnsupportedStateError: a stream of a kind that cannot be seeded here, by its path.
    """
    finder = _Finder()
    finder.walk(tree)
    for path, stream in finder.streams:
        seeds = _seeds(seed, path)
        if isinstance(stream, dict):
            _replace(stream, seeds, path)
        else:
            state = generator_state(stream)
            _replace(state, seeds, path)
            set_generator_state(stream, state)


class _Finder(Walker):
    """Walks a tree and notes the streams in it, each object once."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[tuple[str, Any]] = []

    def container(self, kind: ContainerKind, obj: Any, path: str) -> Any:
        if id(obj) in self._memo:
            return None
        self._memo[id(obj)] = {}
        self._alive.append(obj)
        opener = openers.get(type(obj))
        if opener is not None:
            for index, part in enumerate(opener(obj)):
                self.child(part, path, f"env_{index}")
        elif kind.name == "generator" and isinstance(obj, np.random.Generator):
            # two generators may draw from one bit generator
            self.value(obj.bit_generator, path)
        elif kind.name == "generator" or _is_state(obj):
            self.streams.append((path, obj))
        else:
            if isinstance(obj, dict):
                _unmark(obj)
            self.nodes.append(None)
            self._pending.append((len(self.nodes) - 1, kind, obj, path))
        return None

    def leaf(self, kind: LeafKind, obj: Any, path: str) -> Any:
        return None

    def atom(self, obj: Any, to_json: Callable[[Any], Any]) -> Any:
        return None

    def class_meta(self, cls: type) -> Any:
        return None

    def json_meta(self, meta: Any, obj: Any, path: str) -> Any:
        return None


def _unmark(values: dict[Any, Any]) -> None:
    """Takes the marks off streams that nobody had seeded: they are seeded now, and two runs share them."""
    for key, value in values.items():
        if isinstance(value, ObjectState) and value.type_name == UNSEEDED and value.items is not None:
            values[key] = value.items


def _is_state(obj: Any) -> bool:
    if not isinstance(obj, dict) or not ("state" in obj or "key" in obj):
        return False
    kind = obj.get("type")
    return kind in _TYPES if isinstance(kind, str) else obj.get("bit_generator") in BIT_GENERATORS


def _seeds(seed: str, path: str) -> np.random.SeedSequence:
    digest = hashlib.sha256(f"{seed}\0{path}".encode()).digest()
    # words, not one large integer, which would pass for a seed from the operating system
    return np.random.SeedSequence([int(word) for word in np.frombuffer(digest, "<u4")])


def _replace(state: dict[str, Any], seeds: np.random.SeedSequence, path: str) -> None:
    """Overwrites the state of a generator with a fresh one of the same kind."""
    kind = state.get("type")
    if kind == "random.Random":
        number = int.from_bytes(seeds.generate_state(8, np.uint32).astype("<u4").tobytes(), "little")
        state.update(generator_state(random.Random(number)))
    elif kind == "torch.Generator":
        state["state"] = _torch_state(state, seeds, path)
    else:
        _replace_numpy(state, seeds, path)


def _replace_numpy(state: dict[str, Any], seeds: np.random.SeedSequence, path: str) -> None:
    cls = BIT_GENERATORS.get(str(state.get("bit_generator")))
    if cls is None:
        raise _refusal(path, f"numpy's {state.get('bit_generator')}")
    bits = cls(seeds)
    fresh = generator_state(np.random.RandomState(bits) if state.get("type") == "numpy.RandomState" else bits)
    # a state that knows no SeedSequence belongs to a generator that was seeded in another way, and has none
    state.update({key: value for key, value in fresh.items() if key in state and key != "type"})


def _torch_state(state: dict[str, Any], seeds: np.random.SeedSequence, path: str) -> np.ndarray[Any, Any]:
    device = str(state.get("device")).partition(":")[0]
    words = seeds.generate_state(1, np.uint64)
    # torch takes seeds as signed numbers
    number = int(words[0] >> np.uint64(1))
    if device == "cuda" and len(state["state"]) == 16:
        # Philox: a seed and how far it was used (torch/csrc of CUDAGeneratorImpl); there may be no such device here
        return np.array([number, 0], "<u8").view(np.uint8)
    if device != "cpu":
        raise _refusal(path, f"torch's on {device}")
    if "torch" not in sys.modules:
        import torch  # noqa: F401
    generator = sys.modules["torch"].Generator()
    generator.manual_seed(number)
    fresh: np.ndarray[Any, Any] = generator.get_state().numpy().copy()
    return fresh


def _refusal(path: str, what: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{path}: a random stream of this kind cannot be seeded: {what}", path=path, type_name=what
    )
