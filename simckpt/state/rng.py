"""Random generators: everything that decides their next draws, taken and put back in place."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import numpy as np

from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.state.registry import ContainerKind, Handler, add_container, container_handler, container_kinds, resolvers
from simckpt.state.walk import Walker, qualified_name

# the last index into the word tables of MT19937 and Philox
_POSITIONS = {"pos": 624, "buffer_pos": 4}
# a file may name these and no others
BIT_GENERATORS = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
# seeds given by people fit into 64 bits; the system gives 128 random ones, of which the upper 64 are never all zero
_LARGEST_SEED = 2**64 - 1
# more children than this between two states: the counter is set on a new SeedSequence rather than by spawning
_MOST_SPAWNS = 1000


def generator_state(generator: Any) -> dict[str, Any]:
    """Returns the state of a generator as a tree of its own memory; its key "type" names the kind.

    Beyond the integers of the stream: the half-used 32-bit draw (`has_uint32`, `uinteger`), the pending Gaussian of
    RandomState and `random.Random`, and how many children the SeedSequence has spawned.

    Args:
        generator: numpy's Generator, BitGenerator or RandomState, `random.Random`, or `torch.Generator`.

    Raises:
        UnsupportedStateError: another type, or a generator without a state, such as `random.SystemRandom`.
    """
    if isinstance(generator, np.random.Generator):
        return _bit_generator_state(generator.bit_generator, "numpy.Generator")
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
        return {"type": "numpy.RandomState", **state}
    if isinstance(generator, np.random.BitGenerator):
        return _bit_generator_state(generator, "numpy.BitGenerator")
    if isinstance(generator, random.Random):
        return _python_state(generator)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(generator, torch.Generator):
        return {
            "type": "torch.Generator",
            "device": str(generator.device),
            "state": generator.get_state().numpy().copy(),
        }
    name = qualified_name(type(generator))
    raise UnsupportedStateError(
        f"an object of type {name} is not a random generator that simckpt knows; hand in numpy's Generator or "
        "RandomState, random.Random or torch.Generator",
        path="",
        type_name=name,
    )


def is_unseeded(state: Any) -> bool:
    """Returns whether a state is that of a PCG64 which the operating system seeded and nobody has drawn from.

    numpy asks the system for 128 bits where no seed is given; shorter entropy is somebody's seed. Two processes never
    share such a state, and nothing depends on it yet.
    """
    seeds = state.get("seed_sequence")
    if seeds is None or state.get("bit_generator") != "PCG64" or state["has_uint32"] or seeds["n_children_spawned"]:
        return False
    entropy = seeds["entropy"]
    if type(entropy) is not int or entropy <= _LARGEST_SEED:
        return False
    words: dict[str, int] = state["state"]
    return _first_words(entropy, seeds["spawn_key"], seeds["pool_size"]) == words


@functools.lru_cache(maxsize=4096)
def _first_words(entropy: int, spawn_key: tuple[int, ...], pool_size: int) -> dict[str, int]:
    seeds = np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size)
    state: dict[str, Any] = {**np.random.PCG64(seeds).state}
    words: dict[str, int] = state["state"]
    return words


def _bit_generator_state(bit_generator: Any, kind: str) -> dict[str, Any]:
    state: dict[str, Any] = {"type": kind, **bit_generator.state}
    seeds = _seeds_state(bit_generator.seed_seq)
    if seeds is not None:
        state["seed_sequence"] = seeds
    return state


def _seeds_state(seeds: Any) -> dict[str, Any] | None:
    """Returns the state of a SeedSequence; None for anything else, which then is not numpy's own and spawns nothing."""
    if type(seeds) is not np.random.SeedSequence:
        return None
    entropy = seeds.entropy
    return {
        "entropy": entropy if type(entropy) is int or entropy is None else _integers(entropy),
        "spawn_key": tuple(seeds.spawn_key),
        "pool_size": seeds.pool_size,
        "n_children_spawned": seeds.n_children_spawned,
    }


def _integers(entropy: Any) -> Any:
    return [int(word) for word in entropy] if np.ndim(entropy) else int(entropy)


def _python_state(generator: random.Random) -> dict[str, Any]:
    try:
        version, internal, gauss_next = generator.getstate()
        extra = set(vars(generator)) - {"gauss_next"}
        if extra:
            raise NotImplementedError(f"it has attributes of its own: {', '.join(sorted(extra))}")
    except (NotImplementedError, TypeError, ValueError) as error:
        name = qualified_name(type(generator))
        raise UnsupportedStateError(
            f"a {name} has no state that can be saved ({error}); use random.Random", path="", type_name=name
        ) from error
    return {"type": "random.Random", "version": version, "key": np.array(internal, np.uint32), "gauss_next": gauss_next}


def is_generator(obj: Any) -> bool:
    """Returns whether `generator_state` knows this type of object."""
    torch = sys.modules.get("torch")
    known = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
    return isinstance(obj, known) or (torch is not None and isinstance(obj, torch.Generator))


def find_generator_problem(generator: Any, state: Any) -> str | None:
    """Returns why a state does not fit a generator, or None if it does."""
    return _find_problem(generator_state(generator), state)


def check_generator_state(generator: Any, state: Any) -> None:
    """Checks that a state is one of this kind of generator.

    Raises:
        StateMismatchError: it is not; nothing was touched.
    """
    problem = find_generator_problem(generator, state)
    if problem:
        raise StateMismatchError(f"the state does not fit the random generator: {problem}", problems=[problem])


def _find_problem(live: dict[str, Any], state: Any) -> str | None:
    if not isinstance(state, dict) or "type" not in state:
        return "it is not the state of a generator"
    if state["type"] != live["type"]:
        return f"saved from a {state['type']}, live is a {live['type']}"
    for key in ("bit_generator", "device"):
        saved, here = state.get(key), live.get(key)
        # a generator of another GPU of the same kind has the same state
        if key == "device" and saved is not None and here is not None:
            saved, here = str(saved).partition(":")[0], str(here).partition(":")[0]
        if saved != here:
            return f"{key} is {here}, saved {saved}"
    missing = [key for key in live if key not in state and key != "seed_sequence"]
    if missing:
        return f"it lacks {', '.join(missing)}"
    return _find_wrong_part(live, state, "") or _find_wrong_seeds(state.get("seed_sequence"))


def _find_wrong_part(live: dict[str, Any], state: dict[str, Any], where: str) -> str | None:
    """Returns which part does not fit: numpy's setters trust positions, and would read out of bounds."""
    for key, here in live.items():
        if key == "seed_sequence":
            continue
        saved = state.get(key)
        if isinstance(here, dict):
            if not isinstance(saved, dict) or set(saved) != set(here):
                return f"{where}{key} has other parts"
            problem = _find_wrong_part(here, saved, f"{where}{key}/")
            if problem:
                return problem
        elif not _is_alike(key, here, saved):
            return f"{where}{key} is out of range or of another type"
    return None


def _is_alike(key: str, here: Any, saved: Any) -> bool:
    if isinstance(here, np.ndarray):
        return isinstance(saved, np.ndarray) and saved.shape == here.shape and saved.dtype == here.dtype
    if key in _POSITIONS:
        return type(saved) is int and 0 <= saved <= _POSITIONS[key]
    if key == "gauss_next":
        return saved is None or type(saved) is float
    if isinstance(here, int):
        return isinstance(saved, int) and saved >= 0
    return type(saved) is type(here)


def _find_wrong_seeds(seeds: Any) -> str | None:
    """Returns what is wrong with the part that says how many children were spawned."""
    if seeds is None:
        return None
    if not isinstance(seeds, dict) or set(seeds) != {"entropy", "spawn_key", "pool_size", "n_children_spawned"}:
        return "its seed sequence has other parts"
    words = seeds["entropy"] if isinstance(seeds["entropy"], list) else [seeds["entropy"] or 0]
    numbers = [*words, *seeds["spawn_key"], seeds["n_children_spawned"]]
    if not all(type(number) is int and number >= 0 for number in numbers) or seeds["n_children_spawned"] >= 2**32:
        return "its seed sequence is no sequence of numbers"
    # numpy makes a pool of that many words
    if type(seeds["pool_size"]) is not int or not 4 <= seeds["pool_size"] <= 1024:
        return "the pool of its seed sequence is out of range"
    return None


def set_generator_state(generator: Any, state: dict[str, Any]) -> None:
    """Puts a state from `generator_state` into a generator, in place.

    Raises:
        StateMismatchError: the state is of another kind of generator; nothing was touched.
        UnsupportedStateError: not a generator that simckpt knows.
    """
    check_generator_state(generator, state)
    if isinstance(generator, np.random.Generator):
        _set_bit_generator(generator.bit_generator, state)
    elif isinstance(generator, np.random.BitGenerator):
        _set_bit_generator(generator, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state({key: value for key, value in state.items() if key != "type"})
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["key"].tolist()), state["gauss_next"]))
    else:
        torch: Any = sys.modules["torch"]
        generator.set_state(torch.from_numpy(state["state"].copy()))


def _set_bit_generator(bit_generator: Any, state: dict[str, Any]) -> None:
    plain = {key: value for key, value in state.items() if key not in ("type", "seed_sequence")}
    saved = state.get("seed_sequence")
    if saved is None or not _set_spawn_count(bit_generator.seed_seq, saved):
        bit_generator.state = plain
        return
    # a spawn counter cannot be turned back: numpy's own unpickling puts a new SeedSequence into the same bit generator
    bit_generator.__setstate__((plain, _seed_sequence(saved)))


def _set_spawn_count(seeds: Any, saved: Any) -> bool:
    """Spawns until the live SeedSequence has as many children as the saved one; returns whether it takes a new one."""
    live = _seeds_state(seeds)
    if live is None:
        return True
    if live == saved:
        return False
    ahead = saved["n_children_spawned"] - live["n_children_spawned"]
    if {**saved, "n_children_spawned": 0} != {**live, "n_children_spawned": 0} or not 0 < ahead <= _MOST_SPAWNS:
        return True
    seeds.spawn(ahead)
    return False


def _seed_sequence(saved: dict[str, Any]) -> np.random.SeedSequence:
    return np.random.SeedSequence(
        saved["entropy"],
        spawn_key=tuple(saved["spawn_key"]),
        pool_size=saved["pool_size"],
        n_children_spawned=saved["n_children_spawned"],
    )


def new_generator(state: dict[str, Any]) -> Any:
    """Returns a new generator in a given state. Its class comes from a list of numpy's, Python's and torch's own.

    Raises:
        StateMismatchError: the state is not one of a generator in that list.
    """
    kind = state.get("type") if isinstance(state, dict) else None
    generator: Any
    if kind in ("numpy.Generator", "numpy.BitGenerator", "numpy.RandomState"):
        cls = BIT_GENERATORS.get(state.get("bit_generator", ""))
        if cls is None:
            raise StateMismatchError(f"{str(state.get('bit_generator'))[:80]!r} is not one of numpy's bit generators")
        seeds = state.get("seed_sequence")
        problem = _find_wrong_seeds(seeds)
        if problem:
            raise StateMismatchError(f"a generator cannot be made from this state: {problem}", problems=[problem])
        # without one, numpy would ask the system for entropy
        bits = cls(_seed_sequence(seeds) if seeds is not None else 0)
        generator = {"numpy.Generator": np.random.Generator, "numpy.RandomState": np.random.RandomState}.get(
            str(kind), lambda b: b
        )(bits)
    elif kind == "random.Random":
        generator = random.Random(0)
    elif kind == "torch.Generator":
        import torch

        generator = torch.Generator(device=state.get("device", "cpu"))
    else:
        raise StateMismatchError("the state is not one of a random generator that simckpt can make")
    set_generator_state(generator, state)
    return generator


def _flatten_generator(walker: Walker, obj: Any, path: str) -> list[Any]:
    # two Generators may draw from one BitGenerator, which therefore is a container of its own
    if isinstance(obj, np.random.Generator):
        return ["generator", [walker.value(obj.bit_generator, path)], {"of": "bit generator"}]
    return ["generator", [walker.value(generator_state(obj), path)]]


def _finish_generator(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    (content,) = values
    if meta is not None:
        if not isinstance(content, np.random.BitGenerator):
            raise ValueError("a generator without its bit generator")
        return np.random.Generator(content)
    try:
        return new_generator(content)
    except StateMismatchError as error:
        # there is no live generator that the state could mismatch
        raise ValueError(str(error)) from error


def _find(obj: Any) -> Handler | None:
    """Returns the handler of a generator; bit generators outside numpy's own cannot be made again from a file."""
    torch = sys.modules.get("torch")
    known: tuple[type, ...] = (np.random.Generator, np.random.RandomState, random.Random)
    if (
        type(obj) in known
        or type(obj) in BIT_GENERATORS.values()
        or (torch is not None and type(obj) is torch.Generator)
    ):
        return container_handler(container_kinds["generator"])
    return None


add_container(ContainerKind("generator", _flatten_generator, _finish_generator))
resolvers.append(_find)
