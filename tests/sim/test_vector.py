import random
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import gymnasium.envs.mujoco as mujoco_envs
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as wrappers
from vector_helpers import Turn, Walk, actions_for, assert_same, build, through_file_form, without_clock

from simckpt.errors import CaptureError, RestoreError, StateMismatchError, UnsupportedStateError
from simckpt.sim import SnapshotVectorEnv, VectorEnvHandle
from simckpt.sim.batch import PerEnv
from simckpt.sim.loading import load_or_put_back
from simckpt.sim.worker import async_worker
from simckpt.state.streams import global_streams_state, load_global_streams
from simckpt.state.tree import encode

# gymnasium warns of its v4 envs, which are here because they read stale fields
pytestmark = pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")

KINDS = ["sync", "shared", "piped"]
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def _seed_process(seed):
    random.seed(seed)
    np.random.seed(seed)


def _advance(envs, actions):
    """Returns the results of the steps; in mode DISABLED the finished envs are reset by hand."""
    results = []
    for action in actions:
        result = envs.step(action)
        results.append(without_clock(result))
        done = result[2] | result[3]
        if envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED and done.any():
            results.append(envs.reset(options={"reset_mask": done}))
    return results


def _resumes_exactly(make, *, steps=137, more=60):
    """Asserts that a state taken at an odd step continues bit for bit in fresh envs that went elsewhere."""
    _seed_process(1)
    first = make()
    other = None
    try:
        first.reset(seed=1)
        actions = actions_for(first, steps + more)
        _advance(first, actions[:steps])
        state = through_file_form(VectorEnvHandle(first).capture())
        streams = global_streams_state()
        expected = _advance(first, actions[steps:])
        expected.append(first.action_space.sample())
        expected.append(first.single_action_space.sample())
        _seed_process(2)
        other = make()
        other.reset(seed=99)
        _advance(other, actions_for(other, 7, seed=5))
        other.action_space.sample()
        handle = VectorEnvHandle(other)
        handle.validate(state)
        handle.apply(state)
        load_global_streams(streams)
        resumed = _advance(other, actions[steps:])
        resumed.append(other.action_space.sample())
        resumed.append(other.single_action_space.sample())
        assert_same(resumed, expected)
    finally:
        first.close()
        if other is not None:
            other.close()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_with_hidden_state(kind, mode):
    _resumes_exactly(lambda: build(kind, [Walk] * 3, autoreset_mode=mode))


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_with_dict_observations(kind):
    _resumes_exactly(lambda: build(kind, [lambda: Walk(keys=True)] * 2))


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_with_classes_that_differ(kind):
    _resumes_exactly(lambda: build(kind, [Walk, Turn, Turn]))


@pytest.mark.parametrize("env_id", ["Ant-v5", "Hopper-v5", "Reacher-v4"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_with_mujoco(kind, env_id):
    _resumes_exactly(lambda: build(kind, [lambda: gym.make(env_id)] * 2))


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_with_inner_and_outer_wrappers(kind):
    def make_env():
        env = gym.make("Hopper-v5")
        env = gym.wrappers.StickyAction(env, repeat_action_probability=0.25)
        env = gym.wrappers.DelayObservation(env, delay=2)
        env = gym.wrappers.NormalizeObservation(env)
        env = gym.wrappers.FrameStackObservation(env, 3)
        return gym.wrappers.RecordEpisodeStatistics(env)

    def make():
        envs = build(kind, [make_env] * 2)
        envs = wrappers.NormalizeObservation(envs)
        envs = wrappers.NormalizeReward(envs)
        return wrappers.ClipReward(envs, -5.0, 5.0)

    _resumes_exactly(make)


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.value)
def test_resume_is_exact_with_statistics_and_info_lists(mode):
    def make():
        envs = build("shared", [Walk] * 3, autoreset_mode=mode)
        envs = wrappers.RecordEpisodeStatistics(envs, buffer_length=7)
        return SnapshotVectorEnv(envs)

    _resumes_exactly(make)
    envs = wrappers.DictInfoToList(build("sync", [Walk] * 2))
    VectorEnvHandle(envs).capture()
    envs.close()


@pytest.mark.parametrize(
    "wrap",
    [
        wrappers.FlattenObservation,
        lambda envs: wrappers.TransformReward(envs, lambda rewards: rewards * 2),
        lambda envs: wrappers.VectorizeTransformReward(envs, gym.wrappers.ClipReward, min_reward=-1.0, max_reward=1.0),
        lambda envs: wrappers.TransformAction(envs, lambda actions: actions * 0.5),
    ],
    ids=["flatten", "transform reward", "clip reward", "transform action"],
)
@pytest.mark.parametrize("copy", [True, False])
def test_resume_is_exact_with_other_vector_wrappers(wrap, copy):
    _resumes_exactly(
        lambda: wrap(build("sync", [lambda: gym.make("Pendulum-v1", max_episode_steps=20)] * 2, copy=copy)),
        steps=37,
        more=30,
    )


class Words(gym.Env):
    """Observations of a space that has no arrays."""

    observation_space = gym.spaces.Text(8)
    action_space = gym.spaces.Discrete(2)
    word = ""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = ""
        return self.word, {}

    def step(self, action):
        self.word += "abcdefgh"[self.np_random.integers(8)]
        return self.word, float(action), len(self.word) == 8, False, {}


@pytest.mark.parametrize("kind", ["sync", "shared", "piped"])
def test_resume_is_exact_with_observations_that_are_no_arrays(kind):
    _resumes_exactly(lambda: build(kind, [Words] * 2), steps=13, more=20)


def test_resume_is_exact_with_spaces_that_differ():
    def make():
        limits = [lambda: gym.make("Pendulum-v1", g=9.81), lambda: gym.make("Pendulum-v1", g=1.62)]
        return build("sync", limits, observation_mode="different")

    _resumes_exactly(make, steps=13, more=20)


def test_resume_is_exact_with_a_chain_around_a_snapshot_env():
    def make():
        return wrappers.NormalizeObservation(SnapshotVectorEnv(wrappers.NormalizeReward(build("shared", [Walk] * 2))))

    _resumes_exactly(make)


def test_state_inside_a_snapshot_env_is_captured_once():
    envs = wrappers.NormalizeReward(SnapshotVectorEnv(build("sync", [lambda: gym.make("Hopper-v5")] * 2)))
    bare = wrappers.NormalizeReward(build("sync", [lambda: gym.make("Hopper-v5")] * 2))
    try:
        wrapped_leaves = encode(VectorEnvHandle(envs).capture()).leaves
        bare_leaves = encode(VectorEnvHandle(bare).capture()).leaves
        size = sum(leaf.data.nbytes for leaf in wrapped_leaves.values())
        assert size == sum(leaf.data.nbytes for leaf in bare_leaves.values())
    finally:
        envs.close()
        bare.close()


def test_resume_is_exact_with_a_vector_entry_point():
    _resumes_exactly(lambda: gym.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point"))


@pytest.mark.parametrize(
    ("saved", "live"), [("sync", "shared"), ("shared", "sync"), ("sync", "piped"), ("shared", "piped")]
)
@pytest.mark.parametrize("steps", [0, 11, 37])
def test_state_moves_between_vectorizations(saved, live, steps):
    def make(kind):
        # no draws from process-global streams, which belong to another process after the move
        return build(kind, [lambda: gym.make("Hopper-v5", max_episode_steps=12)] * 2)

    first, other = make(saved), make(live)
    try:
        first.reset(seed=3)
        actions = actions_for(first, steps + 40)
        _advance(first, actions[:steps])
        state = through_file_form(VectorEnvHandle(first).capture())
        VectorEnvHandle(other).apply(state)
        assert_same(_advance(other, actions[steps:]), _advance(first, actions[steps:]))
    finally:
        first.close()
        other.close()


def test_lost_worker_streams_are_reported():
    first, other = build("piped", [Walk] * 2), build("sync", [Walk] * 2)
    try:
        handle = VectorEnvHandle(first)
        first.reset(seed=3)
        first.step(np.zeros(2, int))
        with pytest.warns(UserWarning, match="process-global generators"):
            VectorEnvHandle(other).validate(handle.capture())
    finally:
        first.close()
        other.close()


def test_a_warning_that_is_an_error_changes_nothing():
    first, other = build("piped", [Walk] * 2), SnapshotVectorEnv(build("sync", [Walk] * 2))
    try:
        handle = VectorEnvHandle(first)
        first.reset(seed=3)
        first.step(np.zeros(2, int))
        other.reset(seed=4)
        before = encode(other.state_dict())
        # warnings are errors here
        with pytest.raises(UserWarning, match="process-global generators"):
            other.load_state_dict(handle.capture())
        after = encode(other.state_dict())
        assert before.structure == after.structure
        assert_same({p: x.data for p, x in before.leaves.items()}, {p: x.data for p, x in after.leaves.items()})
    finally:
        first.close()
        other.close()


def _at_terminal_step(envs):
    done = False
    while not done:
        _, _, terminations, truncations, _ = envs.step(np.ones(envs.num_envs, int))
        done = (terminations | truncations).any()


@pytest.mark.parametrize("moment", ["before reset", "after reset", "terminal"])
@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.value)
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_at_special_moments(kind, mode, moment):
    make_env = lambda: gym.make("CartPole-v1")  # noqa: E731
    first = build(kind, [make_env] * 3, autoreset_mode=mode)
    other = build(kind, [make_env] * 3, autoreset_mode=mode)
    try:
        if moment != "before reset":
            first.reset(seed=4)
        if moment == "terminal":
            _at_terminal_step(first)
        other.reset(seed=5)
        _at_terminal_step(other)
        state = through_file_form(VectorEnvHandle(first).capture())
        VectorEnvHandle(other).apply(state)
        if moment == "before reset":
            # unseeded: the generators themselves must agree
            assert_same(other.reset(), first.reset())
        actions = actions_for(first, 50)
        assert_same(_advance(other, actions), _advance(first, actions))
    finally:
        first.close()
        other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_partial_reset_after_a_restore_re_emits_the_saved_observations(kind):
    first, other = (build(kind, [Walk] * 2, autoreset_mode=AutoresetMode.DISABLED) for _ in range(2))
    try:
        first.reset(seed=6)
        other.reset(seed=7)
        first.step(np.array([0, 1]))
        VectorEnvHandle(other).apply(through_file_form(VectorEnvHandle(first).capture()))
        mask = np.array([True, False])
        assert_same(other.reset(options={"reset_mask": mask}), first.reset(options={"reset_mask": mask}))
    finally:
        first.close()
        other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_saving_at_every_step_changes_nothing(kind):
    _seed_process(8)
    plain = build(kind, [Walk] * 2)
    expected = [plain.reset(seed=8), *_advance(plain, actions_for(plain, 40))]
    plain.close()
    _seed_process(8)
    saved = build(kind, [Walk] * 2)
    try:
        handle = VectorEnvHandle(saved)
        results = [saved.reset(seed=8)]
        for action in actions_for(saved, 40):
            encode(handle.capture())
            results += _advance(saved, [action])
        assert_same(results, expected)
    finally:
        saved.close()


@pytest.mark.parametrize("kind", KINDS)
def test_captured_state_shares_nothing_with_the_live_envs(kind):
    envs = build(kind, [lambda: gym.make("Hopper-v5")] * 2)
    try:
        envs.reset(seed=0)
        handle = VectorEnvHandle(envs)
        state = handle.capture()
        before = encode(state)
        before = {path: leaf.data.copy() for path, leaf in before.leaves.items()}, before.structure
        _advance(envs, actions_for(envs, 5))
        handle.apply(state)
        _advance(envs, actions_for(envs, 5))
        after = encode(state)
        assert_same(dict(sorted(before[0].items())), {p: leaf.data for p, leaf in sorted(after.leaves.items())})
        assert before[1] == after.structure
    finally:
        envs.close()


def test_layout_is_batched_by_mujocos_names():
    envs = build("sync", [lambda: gym.make("Ant-v5")] * 3)
    try:
        envs.reset(seed=0)
        state = VectorEnvHandle(envs).capture()
        assert set(state) == {"physics", "model", "models", "python", "vector"}
        assert state["physics"]["qpos"].shape == (3, 15)
        assert state["physics"]["qvel"].dtype == np.float64
        for index, env in enumerate(envs.envs):
            assert_same(state["physics"]["qpos"][index], env.unwrapped.data.qpos)
        leaves = encode({"envs": state}).leaves
        assert leaves["envs/physics/cfrc_ext"].shape == (3, 14, 6)
        # the model of all three once
        assert [path for path in leaves if path.endswith("/body_mass")] == [
            f"envs/models/{next(iter(state['models']))}/body_mass"
        ]
    finally:
        envs.close()


def test_layout_of_envs_that_differ_is_per_env():
    envs = build("sync", [lambda: Walk(9), lambda: Turn(9)])
    try:
        envs.reset(seed=0)
        leaves = encode({"envs": VectorEnvHandle(envs).capture()}).leaves
        assert any("/env_1/" in path for path in leaves)
    finally:
        envs.close()


def _hopper(index, tmp_path):
    """Returns a Hopper whose model has one more site for each index; observations and actions are the same."""
    xml = Path(mujoco_envs.__file__).parent / "assets" / "hopper.xml"
    sites = "".join(f'<site name="mark{i}" pos="0 0 0.1"/>' for i in range(index))
    path = tmp_path / f"hopper{index}.xml"
    path.write_text(xml.read_text().replace("<worldbody>", f"<worldbody>{sites}"))
    return gym.make("Hopper-v5", xml_file=str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_with_models_of_other_sizes(tmp_path, kind):
    def make():
        return build(kind, [lambda: _hopper(1, tmp_path), lambda: _hopper(2, tmp_path), lambda: gym.make("Hopper-v5")])

    _resumes_exactly(make, steps=37, more=20)
    envs = make()
    try:
        state = VectorEnvHandle(envs).capture()
        assert len(state["models"]) == 3
        leaves = encode({"envs": state}).leaves
        assert leaves["envs/physics/env_0/site_xpos"].shape == (1, 3)
        assert leaves["envs/physics/env_1/site_xpos"].shape == (2, 3)
    finally:
        envs.close()


class RandomMass(gym.Wrapper):
    """Domain randomisation: another mass in every episode."""

    def reset(self, *, seed=None, options=None):
        result = self.env.reset(seed=seed, options=options)
        self.unwrapped.model.body_mass[1] = 3.0 + self.np_random.random()
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_with_models_that_the_envs_change(kind):
    _resumes_exactly(lambda: build(kind, [lambda: RandomMass(gym.make("Hopper-v5"))] * 2))


def test_foreign_workers_are_refused_with_the_advice():
    envs = gym.vector.AsyncVectorEnv([Walk] * 2)
    try:
        with pytest.raises(UnsupportedStateError, match=r"worker=simckpt\.async_worker"):
            VectorEnvHandle(envs)
        # and are none the worse for having been asked
        envs.reset(seed=0)
        envs.step(np.zeros(2, int))
    finally:
        envs.close()


def test_capture_between_step_async_and_step_wait_is_refused():
    envs = build("shared", [Walk] * 2)
    try:
        handle = VectorEnvHandle(envs)
        envs.reset(seed=0)
        envs.step_async(np.zeros(2, int))
        with pytest.raises(CaptureError, match="step_wait"):
            handle.capture()
        envs.step_wait()
        handle.capture()
    finally:
        envs.close()


def test_dead_worker_is_named():
    envs = build("shared", [Walk] * 3)
    try:
        handle = VectorEnvHandle(envs)
        state = handle.capture()
        envs.processes[1].kill()
        envs.processes[1].join()
        with pytest.raises(CaptureError, match=r"worker of env 1 has died \(exit code -9\)"):
            handle.capture()
        with pytest.raises(RestoreError, match="worker of env 1 has died"):
            handle.validate(state)
    finally:
        envs.parent_pipes[1].close()
        envs.close(terminate=True)


def test_closed_envs_are_refused():
    envs = build("shared", [Walk])
    handle = VectorEnvHandle(envs)
    envs.close()
    with pytest.raises(CaptureError, match="closed"):
        handle.capture()


class Secret(Walk):
    """Holds something nobody knows how to save, from the third step on."""

    def step(self, action):
        if self.count == 2:
            self.source = (number for number in range(3))
        return super().step(action)


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_cannot_be_saved_fails_the_save_and_not_the_training(kind):
    envs = build(kind, [Secret] * 2)
    try:
        handle = VectorEnvHandle(envs)
        envs.reset(seed=0)
        for _ in range(4):
            envs.step(np.zeros(2, int))
        with pytest.raises(UnsupportedStateError, match="source") as caught:
            handle.capture()
        assert "env_0" in caught.value.path
        envs.step(np.zeros(2, int))
    finally:
        envs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_number_of_envs_is_refused(kind):
    first, other = build(kind, [Walk] * 2), build(kind, [Walk] * 3)
    try:
        with pytest.raises(StateMismatchError, match=r"2 envs.*3"):
            VectorEnvHandle(other).validate(VectorEnvHandle(first).capture())
    finally:
        first.close()
        other.close()


def test_wrong_autoreset_mode_is_refused():
    first, other = build("sync", [Walk]), build("sync", [Walk], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(StateMismatchError, match="autoreset"):
        VectorEnvHandle(other).validate(VectorEnvHandle(first).capture())


@pytest.mark.parametrize("kind", KINDS)
def test_other_models_are_refused_and_nothing_is_touched(kind):
    first = build(kind, [lambda: gym.make("Hopper-v5")] * 2)
    other = build(kind, [lambda: gym.make("Walker2d-v5")] * 2)
    try:
        first.reset(seed=0)
        other.reset(seed=0)
        handle = VectorEnvHandle(other)
        before = encode(handle.capture())
        state = VectorEnvHandle(first).capture()
        with pytest.raises(StateMismatchError) as caught:
            handle.validate(state)
        assert any("env_1" in problem for problem in caught.value.problems)
        with pytest.raises(RestoreError):
            load_or_put_back(handle, state, "envs")
        after = encode(handle.capture())
        assert before.structure == after.structure
        assert_same({p: x.data for p, x in before.leaves.items()}, {p: x.data for p, x in after.leaves.items()})
    finally:
        first.close()
        other.close()


class Stubborn(Walk):
    """Takes a state only if it is not told to refuse."""

    refuses = False

    def state_dict(self):
        return {"count": self.count, "place": self.place.copy()}

    def load_state_dict(self, state):
        self.place[:] = state["place"]
        if self.refuses and state["count"] == 1:
            raise ValueError("no")
        self.count = state["count"]


@pytest.mark.parametrize("kind", KINDS)
def test_failed_restore_puts_every_env_back(kind):
    envs = build(kind, [Stubborn] * 3)
    try:
        handle = VectorEnvHandle(envs)
        envs.reset(seed=0)
        envs.step(np.zeros(3, int))
        state = handle.capture()
        envs.step(np.zeros(3, int))
        before = encode(handle.capture())
        envs.set_attr("refuses", [False, False, True])
        with pytest.raises(Exception, match="no"):
            load_or_put_back(handle, state, "envs")
        envs.set_attr("refuses", [False, False, False])
        after = encode(handle.capture())
        assert before.structure == after.structure
        assert_same({p: x.data for p, x in before.leaves.items()}, {p: x.data for p, x in after.leaves.items()})
    finally:
        envs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_vector_env_has_the_state_protocol(kind):
    with SnapshotVectorEnv(build(kind, [lambda: gym.make("Hopper-v5")] * 2)) as envs:
        assert envs.last_observations is None
        observations, _ = envs.reset(seed=0)
        assert_same(envs.last_observations, observations)
        for action in actions_for(envs, 5):
            observations, *_ = envs.step(action)
        state = envs.state_dict()
        kept = observations.copy()
        expected = _advance(envs, actions_for(envs, 9, seed=2))
        observations *= 2
        envs.load_state_dict(state)
        assert_same(envs.last_observations, kept)
        envs.last_observations[:] = 0
        assert_same(envs.last_observations, kept)
        assert_same(_advance(envs, actions_for(envs, 9, seed=2)), expected)


_FRESH = """
import sys
import gymnasium as gym
import numpy as np
from simckpt.sim import VectorEnvHandle
from vector_helpers import actions_for, build, load_encoded, save_results

kind, env_id, steps, source, target = sys.argv[1:]
if __name__ == "__main__":
    envs = build(kind, [lambda: gym.make(env_id)] * 2)
    handle = VectorEnvHandle(envs)
    handle.apply(load_encoded(source))
    save_results(target, [envs.step(action) for action in actions_for(envs, int(steps) + 60)[int(steps):]])
    envs.close()
"""


@pytest.mark.parametrize(("kind", "env_id"), [("sync", "Ant-v5"), ("shared", "Ant-v5"), ("piped", "Hopper-v5")])
def test_resume_is_exact_in_a_fresh_process(tmp_path, kind, env_id):
    from vector_helpers import load_results, save_encoded, save_results

    envs = build(kind, [lambda: gym.make(env_id)] * 2)
    try:
        envs.reset(seed=11)
        actions = actions_for(envs, 197)
        _advance(envs, actions[:137])
        save_encoded(tmp_path / "state", encode(VectorEnvHandle(envs).capture()))
        save_results(tmp_path / "expected", [envs.step(action) for action in actions[137:]])
    finally:
        envs.close()
    script = tmp_path / "resume.py"
    script.write_text(_FRESH)
    command = [sys.executable, script, kind, env_id, "137", tmp_path / "state", tmp_path / "resumed"]
    subprocess.run(command, check=True, env=_environment())
    assert_same(load_results(tmp_path / "resumed"), load_results(tmp_path / "expected"))


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


def test_images_with_an_open_renderer():
    try:
        probe = gym.make("Hopper-v5", render_mode="rgb_array", width=32, height=32)
        probe.reset(seed=0)
        probe.render()
        probe.close()
    except Exception as error:
        pytest.skip(f"no GL here: {error}")

    def make_env():
        env = gym.make("Hopper-v5", render_mode="rgb_array", width=32, height=32)
        return gym.wrappers.AddRenderObservation(env)

    _resumes_exactly(lambda: build("sync", [make_env] * 2), steps=17, more=10)


def test_per_env_python_state_is_reachable():
    envs = build("sync", [lambda: gym.make("Hopper-v5")] * 3)
    try:
        envs.reset(seed=0)
        state = VectorEnvHandle(envs).capture()
        assert len(state["python"]) == 3
        assert not isinstance(state["physics"], PerEnv)
    finally:
        envs.close()


def test_async_worker_is_exported():
    import simckpt.sim

    assert simckpt.sim.async_worker is async_worker
