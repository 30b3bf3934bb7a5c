"""The parts of a torchrl buffer: which of them can be captured exactly, and the priorities of its samplers."""

from __future__ import annotations

import sys
from typing import Any

from simckpt.errors import UnsupportedStateError
from simckpt.state.walk import qualified_name

_STORAGES = ("LazyMemmapStorage", "LazyTensorStorage", "TensorStorage")
_WRITERS = ("RoundRobinWriter", "TensorDictRoundRobinWriter")
_SAMPLERS = ("RandomSampler", "PrioritizedSampler")
# whose output depends on their arguments and their input alone, by the source of 0.14
_TRANSFORMS = (
    *("BinarizeReward", "CatTensors", "CenterCrop", "ClipTransform", "Crop", "DTypeCastTransform"),
    *("DeviceCastTransform", "DoubleToFloat", "ExcludeTransform", "FlattenObservation", "GrayScale"),
    *("PermuteTransform", "RenameTransform", "RewardClipping", "SelectTransform", "SignTransform"),
    *("SqueezeTransform", "ToTensorImage", "UnsqueezeTransform"),
)


def check_parts(buffer: Any) -> None:
    """Checks that each part of one of torchrl's own buffers is of a kind that can be captured exactly.

    Raises:
        UnsupportedStateError: naming the first part that is not.
    """
    data, transforms = sys.modules["torchrl.data"], sys.modules["torchrl.envs.transforms"]
    known = [("storage", buffer.storage, data, _STORAGES), ("writer", buffer.writer, data, _WRITERS)]
    known += [("sampler", sampler, data.replay_buffers, _SAMPLERS) for sampler in samplers(buffer)]
    known += [("transform", transform, transforms, _TRANSFORMS) for transform in buffer.transform or ()]
    for place, part, module, classes in known:
        if all(type(part) is not getattr(module, cls, None) for cls in classes):
            raise _refusal(place, part, f"only these can: {', '.join(classes)}")
    if not hasattr(buffer.storage, "_mutation_revision"):
        raise _refusal("storage", buffer.storage, "simckpt needs torchrl 0.14 or newer")
    if buffer._sample_unit is not None:
        raise _refusal("sample_unit", buffer._sample_unit, "sample transitions")
    if buffer._prefetch:
        raise _refusal("prefetch", buffer, "its batches are drawn ahead by other threads: set prefetch=None")
    if buffer.shared:
        raise _refusal("shared", buffer, "other processes may write to it meanwhile: set shared=False")
    for other in buffer.storage._attached_entities:
        if isinstance(other, data.ReplayBuffer) and other is not buffer:
            raise _refusal("storage", buffer.storage, "another buffer writes to it too")


def _refusal(place: str, part: Any, advice: str) -> UnsupportedStateError:
    type_name = qualified_name(type(part))
    return UnsupportedStateError(
        f"the {place} of a torchrl replay buffer, {type_name}, cannot be captured exactly; {advice}",
        path=place,
        type_name=type_name,
    )


def samplers(buffer: Any) -> list[Any]:
    """Returns the sampler of a buffer, and the prioritized one that the learner keeps beside it (`sync=False`)."""
    beside = getattr(buffer, "_prioritized_sampler", None)
    return [buffer.sampler] if beside is None else [buffer.sampler, beside]


def sampler_state(sampler: Any) -> dict[str, Any] | None:
    """Returns the state of a sampler; None for a uniform one.

    Sum and minimum trees are given by their leaves, without those at the end that nobody has set: each inner node is
    the sum or minimum of its two children. The leaves of both trees are the same as long as every place was set.
    """
    if not hasattr(sampler, "_sum_tree"):
        return None
    sums, minima = _leaves(sampler, sampler._sum_tree), _leaves(sampler, sampler._min_tree)
    return {
        "alpha": sampler._alpha,
        "beta": sampler._beta,
        "eps": sampler._eps,
        "max_priority": tuple(sampler._max_priority),
        "capacity": int(sampler._max_capacity),
        "sums": sums,
        "minima": None if sys.modules["torch"].equal(sums, minima) else minima,
    }


def _leaves(sampler: Any, tree: Any) -> Any:
    torch = sys.modules["torch"]
    values = torch.as_tensor(tree[_places(sampler, int(sampler._max_capacity))])
    written = torch.nonzero(values != tree.identity_element)
    return values[: int(written[-1]) + 1 if len(written) else 0].cpu()


def _places(sampler: Any, count: int) -> Any:
    return sys.modules["torch"].arange(count, device=sampler.device)


def find_sampler_problems(live: list[Any], states: list[Any]) -> list[str]:
    """Returns why samplers cannot take these states."""
    if len(live) != len(states):
        return [f"saved with {len(states)} samplers, live with {len(live)}"]
    problems = []
    for sampler, state in zip(live, states, strict=True):
        if hasattr(sampler, "_sum_tree") != (state is not None):
            kinds = ["uniform", "prioritized"]
            problems.append(f"saved with a {kinds[state is not None]} sampler, live with a {kinds[state is None]} one")
        elif state is not None and int(sampler._max_capacity) != state["capacity"]:
            problems.append(f"saved with {state['capacity']} priorities, live with {sampler._max_capacity}")
        elif state is not None and len(state["sums"]) and state["sums"].dtype != sampler.dtype:
            problems.append(f"saved with priorities of {state['sums'].dtype}, live with {sampler.dtype}")
    return problems


def load_sampler(sampler: Any, state: Any) -> None:
    """Sets a sampler to a state from `sampler_state`."""
    if state is None:
        return
    torch = sys.modules["torch"]
    sampler._init()
    sampler._alpha, sampler._beta, sampler._eps = state["alpha"], state["beta"], state["eps"]
    minima = state["sums"] if state["minima"] is None else state["minima"]
    for tree, values in ((sampler._sum_tree, state["sums"]), (sampler._min_tree, minima)):
        if len(values):
            tree[_places(sampler, len(values))] = values.to(sampler.device)
    maximum, place = state["max_priority"]
    moved = [
        part.to(sampler.device, copy=True) if isinstance(part, torch.Tensor) else part for part in (maximum, place)
    ]
    sampler._max_priority = None if moved[0] is None else tuple(moved)
