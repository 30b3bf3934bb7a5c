"""The random streams of a process, as one component of a run."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

import numpy as np

from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.state.nodes import UNSEEDED, ObjectState
from simckpt.state.rng import find_generator_problem, generator_state, set_generator_state


def _global_generators() -> dict[str, Any]:
    """Returns the generators behind `random`, `numpy.random` and torch's default streams, as far as they are loaded.

    CUDA devices count once CUDA is in use: before that nothing was drawn from them, and asking would start it.
    """
    # the module functions are bound methods of these two
    found: dict[str, Any] = {"python": random.getstate.__self__, "numpy": np.random.get_state.__self__}  # type: ignore[attr-defined]
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        found["torch"] = {"cpu": torch.default_generator, "cuda": list(cuda)}
    return found


def _states(generators: Any) -> Any:
    if isinstance(generators, dict):
        return {name: _states(generator) for name, generator in generators.items()}
    if isinstance(generators, list):
        return [_states(generator) for generator in generators]
    return generator_state(generators)


def global_streams_state() -> dict[str, Any]:
    """Returns the state of this process's global streams: `random`, `numpy.random`, torch's CPU and CUDA if loaded."""
    states: dict[str, Any] = _states(_global_generators())
    return states


def check_global_streams(state: Any) -> None:
    """Checks that a state from `global_streams_state` fits this process.

    Raises:
        StateMismatchError: it lists every stream that does not.
    """
    problems = [problem for _, _, problem in _pair(state) if problem]
    if problems:
        raise StateMismatchError("the random streams do not fit: " + "; ".join(problems), problems=problems)


def load_global_streams(state: dict[str, Any]) -> None:
    """Puts a state from `global_streams_state` into this process's global streams.

    Streams of GPUs that this machine lacks are left out with a warning. If the state has a torch stream, torch is
    imported: the program will draw from it.

    Raises:
        StateMismatchError: the state does not fit; nothing was touched.
    """
    check_global_streams(state)
    _warn_of_missing_devices(state)
    for generator, saved, _ in _pair(state):
        if generator is not None:
            set_generator_state(generator, saved)


def _pair(state: Any) -> list[tuple[Any, Any, str | None]]:
    """Returns (live generator, saved state, problem) for every stream."""
    if not isinstance(state, dict) or not {"python", "numpy"} <= set(state):
        return [(None, None, "the state is not one of the global random streams")]
    saved_torch = state.get("torch")
    if saved_torch is not None and not _import_torch():
        return [(None, None, "the state has a stream of torch, which is not installed here")]
    live = _global_generators()
    pairs = [(live[name], state[name], name) for name in ("python", "numpy")]
    if saved_torch is not None:
        if (
            not isinstance(saved_torch, dict)
            or not isinstance(saved_torch.get("cuda"), list)
            or "cpu" not in saved_torch
        ):
            return [(None, None, "the state of torch's streams lacks `cpu` or `cuda`")]
        pairs.append((live["torch"]["cpu"], saved_torch["cpu"], "torch/cpu"))
        here = _cuda_generators(len(saved_torch["cuda"]))
        pairs += [
            (generator, saved, f"torch/cuda/{index}")
            for index, (generator, saved) in enumerate(zip(here, saved_torch["cuda"], strict=False))
        ]
    return [(generator, saved, _problem(generator, saved, name)) for generator, saved, name in pairs]


def _problem(generator: Any, saved: Any, name: str) -> str | None:
    problem = find_generator_problem(generator, saved)
    return problem and f"{name}: {problem}"


def _import_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def _cuda_generators(saved_count: int) -> list[Any]:
    """Returns the generators of the CUDA devices here, starting CUDA if streams of it were saved."""
    if not saved_count:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return list(torch.cuda.default_generators)


def _warn_of_missing_devices(state: dict[str, Any]) -> None:
    saved = len(state["torch"]["cuda"]) if "torch" in state else 0
    here = len(_cuda_generators(saved))
    if here < saved:
        warnings.warn(
            f"the checkpoint has random streams of {saved} CUDA devices and this machine has {here}: "
            "the others are not restored, so a run that draws from them will differ",
            stacklevel=4,
        )


class RNGStreams:
    """The global random streams of the process, and the generators handed in, as a component.

    Covers Python's `random`, numpy's global stream, torch on the CPU and on every CUDA device in use. A generator of
    your own (`np.random.default_rng(0)`, a `torch.Generator`, one inside a sampler) has to be handed in, for nothing
    can find it. The generators stay the same objects; only their state is set.

    Args:
        *generators: saved under their position.
        **named: saved under their name.

    Raises:
        UnsupportedStateError: something handed in is no generator with a state.
    """

    # torch's default stream has a fixed seed; these two are seeded by the operating system
    _SEEDED_BY_CHANCE = ("python", "numpy")

    def __init__(self, *generators: Any, **named: Any) -> None:
        # a restore brings back streams of another process that nobody had used there
        self._untouched: dict[str, Any] = {}
        self._generators: dict[str, Any] = {str(index): generator for index, generator in enumerate(generators)} | named
        for name, generator in self._generators.items():
            try:
                generator_state(generator)
            except UnsupportedStateError as error:
                raise UnsupportedStateError(
                    f"generators/{name}: {error}", path=f"generators/{name}", type_name=error.type_name
                ) from error

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all streams, sharing no memory with them.

        A stream of `random` or `numpy.random` that was neither seeded nor drawn from is marked as such: it is restored
        like the others, and not compared between runs.
        """
        own = {name: generator_state(generator) for name, generator in self._generators.items()}
        streams = global_streams_state()
        for name in self._SEEDED_BY_CHANCE:
            if _is_untouched(name) or self._untouched.get(name) == _fingerprint(name):
                streams[name] = ObjectState(UNSEEDED, items=streams[name])
        return {**streams, "generators": own}

    def validate_state_dict(self, state: Any) -> None:
        """Checks that a state fits.

        Raises:
            StateMismatchError: it lists every stream that does not; nothing was touched.
        """
        problems: list[str] = []
        state, _ = _unmarked(state)
        try:
            check_global_streams(state)
        except StateMismatchError as error:
            problems += error.problems
        saved = state.get("generators") if isinstance(state, dict) else None
        saved = saved if isinstance(saved, dict) else {}
        problems += [
            f"generators/{name}: it was saved, but no such generator was handed in"
            for name in saved
            if name not in self._generators
        ]
        for name, generator in self._generators.items():
            if name not in saved:
                problems.append(f"generators/{name}: it was not saved")
            elif problem := find_generator_problem(generator, saved[name]):
                problems.append(f"generators/{name}: {problem}")
        if problems:
            raise StateMismatchError("the random streams do not fit: " + "; ".join(problems), problems=problems)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a state into all streams, in place.

        Raises:
            StateMismatchError: the state does not fit; nothing was touched.
        """
        self.validate_state_dict(state)
        state, marked = _unmarked(state)
        load_global_streams(state)
        for name, generator in self._generators.items():
            set_generator_state(generator, state["generators"][name])
        self._untouched = {name: _fingerprint(name) for name in marked}

    def __repr__(self) -> str:
        return f"RNGStreams({', '.join(['global', *self._generators])})"


def _fingerprint(name: str) -> Any:
    """Returns what tells two states of a global stream apart."""
    if name == "python":
        return random.getstate()
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]


def _is_untouched(name: str) -> bool:
    """Returns whether nobody has seeded or drawn from a global stream of this process."""
    if name == "python":
        return bool(_fingerprint(name) == _AT_IMPORT)
    # a stream that somebody seeded has no SeedSequence, or one of his own
    bits = np.random.get_state.__self__._bit_generator  # type: ignore[attr-defined]
    seeds = bits.seed_seq
    if not isinstance(seeds, np.random.SeedSequence) or seeds.entropy is None:
        return False
    fresh: Any = type(bits)(np.random.SeedSequence(seeds.entropy, spawn_key=seeds.spawn_key)).state
    live: Any = bits.state
    same = fresh["state"]["pos"] == live["state"]["pos"] and np.array_equal(fresh["state"]["key"], live["state"]["key"])
    return bool(same)


# `import simckpt` loads this module, so that seeding and drawing after it can be told
_AT_IMPORT = random.getstate()


def _unmarked(state: Any) -> tuple[Any, frozenset[str]]:
    """Returns the state without the marks of untouched streams, and the names that had one."""
    if not isinstance(state, dict):
        return state, frozenset()
    marked = frozenset(name for name, value in state.items() if isinstance(value, ObjectState))
    return {name: value.items if name in marked else value for name, value in state.items()}, marked
