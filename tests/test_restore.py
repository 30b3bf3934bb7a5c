"""Restores that differ from what was saved: of branches and rollbacks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import simckpt
from simckpt import restore, state
from simckpt.errors import ConfigurationError, HalfRestoredError, RestoreError, StateMismatchError
from simckpt.restore import Adjustment
from tests.examples import Counter, Fragile


def saved(components: Mapping[str, Any]) -> dict[str, state.Encoded]:
    """Returns what a checkpoint would hold."""
    return {name: state.encode(tree) for name, tree in restore.capture(restore.bind(components)).items()}


def filled(rows: int) -> simckpt.ReplayBuffer:
    space = gym.spaces.Box(-1e4, 1e4, (1,), np.float32)
    buffer = simckpt.ReplayBuffer(1000, space, space, seed=1)
    for row in range(rows):
        value = np.full((1, 1), row, np.float32)
        buffer.add(value, value, np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), value)
    return buffer


def put(components: Mapping[str, Any], what: Mapping[str, state.Encoded], **adjustment: Any) -> None:
    if "untouched" in adjustment:
        adjustment["untouched"] = frozenset(adjustment["untouched"])
    restore.apply(restore.bind(components), what, source="the checkpoint", adjustment=Adjustment(**adjustment))


def advanced(count: int) -> Counter:
    counter = Counter()
    for _ in range(count):
        counter.advance()
    return counter


def test_without_an_adjustment_everything_is_as_it_was_saved() -> None:
    generator = np.random.default_rng(1)
    what = saved({"a": advanced(3), "g": generator})
    expected = generator.random(3).tolist()
    counter, live = Counter(), np.random.default_rng(9)
    put({"a": counter, "g": live}, what)
    assert counter.count == 3
    assert live.random(3).tolist() == expected


def test_a_seed_makes_streams_that_differ_by_component_and_are_the_same_each_time() -> None:
    def restored(seed: str) -> list[float]:
        live = {name: np.random.default_rng(9) for name in ("g", "h")}
        put(live, saved({"g": np.random.default_rng(1), "h": np.random.default_rng(1)}), seed=seed)
        return [generator.random() for generator in live.values()]

    assert restored("origin name") == restored("origin name")
    assert len({*restored("origin name"), *restored("origin other"), np.random.default_rng(1).random()}) == 5


def test_untouched_components_stay_and_need_not_be_in_the_checkpoint() -> None:
    live = {"a": Counter(), "b": advanced(7), "c": advanced(8)}
    kept = live["b"].values
    put(live, saved({"a": advanced(3), "b": advanced(4)}), untouched={"b", "c"}, seed="s")
    assert [counter.count for counter in live.values()] == [3, 7, 8]
    assert live["b"].values is kept


def test_untouched_variables_of_the_loop_stay_whatever_was_saved() -> None:
    loop = simckpt.LoopState(step=5, observations=np.ones((8, 3)), fresh="here")
    put(
        {"loop": loop},
        saved({"loop": simckpt.LoopState(step=400, observations=np.zeros((4, 3)), gone=1)}),
        untouched={"loop/observations", "loop/fresh", "loop/gone"},
    )
    assert loop.step == 400
    assert loop.observations.tolist() == np.ones((8, 3)).tolist()
    assert loop.fresh == "here"
    assert not hasattr(loop, "gone")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        pytest.param("lopp", "no such component; did you mean 'loop'", id="component"),
        pytest.param("lopp/step", "no such component", id="component-of-variable"),
        pytest.param("a/count", "'a' is no LoopState", id="no-loop-state"),
        pytest.param("loop/stpe", "'loop' has no such variable; did you mean 'step'", id="variable"),
    ],
)
def test_leaving_untouched_what_there_is_not_is_an_error_before_anything_changes(place: str, message: str) -> None:
    live = {"a": Counter(), "loop": simckpt.LoopState(step=0)}
    with pytest.raises(ConfigurationError, match=message):
        put(live, saved({"a": advanced(1), "loop": simckpt.LoopState(step=9)}), untouched={place})
    assert (live["a"].count, live["loop"].step) == (0, 0)


def test_then_is_called_when_all_is_restored() -> None:
    counter, generator, seen = Counter(), np.random.default_rng(9), []
    what = saved({"a": advanced(3), "g": np.random.default_rng(1)})
    put({"a": counter, "g": generator}, what, then=lambda: seen.append((counter.count, generator.random())))
    assert seen == [(3, np.random.default_rng(1).random())]


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_what_then_raises_comes_out_as_it_is_and_everything_is_put_back(error: BaseException) -> None:
    def fail() -> None:
        optimizer.param_groups[0]["lr"] = 7.0
        raise error

    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    live = {"a": Counter(), "optimizer": optimizer, "g": np.random.default_rng(9)}
    what = saved({"a": advanced(3), "optimizer": optimizer, "g": np.random.default_rng(1)})
    with pytest.raises(type(error)) as caught:
        put(live, what, then=fail, seed="s")
    assert caught.value is error
    assert live["a"].count == 0
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert live["g"].random() == np.random.default_rng(9).random()


def test_a_component_that_fails_keeps_then_from_being_called() -> None:
    called: list[int] = []
    live = {"a": Counter(), "b": Fragile()}
    live["b"].broken = True
    with pytest.raises(RestoreError, match=r"component 'b' failed: .*the light went out"):
        put(live, saved({"a": advanced(3), "b": Fragile()}), then=lambda: called.append(1))
    assert (called, live["a"].count) == ([], 0)


def test_then_failing_after_the_replay_was_restored_is_told_as_what_it_is() -> None:
    def fail() -> None:
        raise OSError("no")

    with pytest.raises(HalfRestoredError, match=r"OSError: no.*replay"):
        put({"replay": filled(0)}, saved({"replay": filled(3)}), then=fail)


def test_another_number_of_envs_is_refused_and_carried_over_where_the_envs_are_fresh() -> None:
    def components(num_envs: int) -> dict[str, Any]:
        envs = simckpt.make_vec("InvertedPendulum-v5", num_envs=num_envs)
        observations, _ = envs.reset(seed=num_envs)
        return {"envs": envs, "loop": simckpt.LoopState(step=num_envs, observations=observations)}

    what, live = saved(components(2)), components(3)
    before = live["loop"].observations.tolist()
    with pytest.raises(StateMismatchError, match="untouched"):
        put(live, what)
    put(live, what, untouched={"envs", "loop/observations"})
    assert live["loop"].step == 2
    assert live["loop"].observations.tolist() == before
    live["envs"].step(live["envs"].action_space.sample())
    live["envs"].close()


@pytest.fixture(params=["sync", "async"])
def make_envs(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return lambda: simckpt.make_vec("Walker2d-v5", num_envs=2, vectorization_mode=request.param)


def test_reseeded_envs_go_on_in_the_same_physics_and_reset_otherwise(make_envs: Callable[[], Any]) -> None:
    def rolled(envs: Any) -> tuple[list[Any], list[Any]]:
        """Returns the observations of a step and of a reset, and closes the envs."""
        stepped = envs.step(np.full(envs.action_space.shape, 0.1, np.float32))[0].tolist()
        reset = envs.reset()[0].tolist()
        envs.close()
        return stepped, reset

    origin = make_envs()
    origin.reset(seed=3)
    what = saved({"envs": origin})

    def restored(**adjustment: Any) -> tuple[list[Any], list[Any]]:
        envs = make_envs()
        envs.reset(seed=4)
        put({"envs": envs}, what, **adjustment)
        return rolled(envs)

    plain, first, again, other = restored(), restored(seed="s"), restored(seed="s"), restored(seed="t")
    assert plain == rolled(origin)
    assert first == again
    assert first[0] == plain[0]
    assert first[1] not in (plain[1], other[1])
    # each env draws from a stream of its own
    assert first[1][0] != first[1][1]


def test_a_reseeded_replay_buffer_samples_other_rows() -> None:
    def sampled(**adjustment: Any) -> list[float]:
        live = filled(1000)
        put({"replay": live}, what, **adjustment)
        found: list[float] = live.sample(8).observations.tolist()
        return found

    what = saved({"replay": filled(1000)})
    assert sampled() == filled(1000).sample(8).observations.tolist()
    assert sampled(seed="s") == sampled(seed="s")
    assert sampled(seed="s") not in (sampled(), sampled(seed="t"))


def test_untouched_components_are_not_read_from_the_checkpoint(tmp_path: Path) -> None:
    components = {"a": advanced(3), "b": advanced(4)}
    run = simckpt.Store(tmp_path).start("r")
    with run.checkpointer(components, save_when=simckpt.EverySteps(1)) as checkpointer:
        checkpointer.save(1)
    checkpoint = simckpt.Store(tmp_path).run("r").latest()
    offset = checkpoint.leaves()["b/values"].offset
    assert offset is not None
    (file,) = tmp_path.glob("runs/r/checkpoints/*/state.h5")
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    live = {"a": Counter(), "b": Counter()}
    checkpoint.restore_bound(restore.bind(live), Adjustment(untouched=frozenset({"b"})))
    assert [counter.count for counter in live.values()] == [3, 0]
