"""An env with a device: exact with a model in its place, disarmed by a restore, paced without the pace being state."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hardware_helpers import Loopback, link_to, reading, udp_device

import simckpt
from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import LAG, LIMIT, PATIENCE, Motor
from simckpt.errors import ConfigurationError, LinkDisarmedError, RestoreError, StateMismatchError
from simckpt.hardware import UDP, Link, Pace, Reading, Simulated
from simckpt.sim import SnapshotEnv
from simckpt.state.compare import differences

STEPS = 60


class CountingEnv(gym.Env[Any, Any]):
    """Counts its steps."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.count = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.array([self.count]), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.array([self.count]), 0.0, False, False, {}


# restores the run's env into an env that has been elsewhere, and goes on
FRESH = """
import json, sys
import numpy as np
import simckpt
from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import Motor
from simckpt.errors import LinkDisarmedError
from simckpt.hardware import Link, Simulated

env = CartPoleInTheLoopEnv(Link(Simulated(Motor(8, loss=0.2)), command=Motor.command, reading=Motor.reading))
env.reset(seed=77)
for _ in range(9):
    env.step(np.array([-0.4]))
with simckpt.Store(sys.argv[1]).start("run") as run:
    checkpointer = run.checkpointer({"envs": env}, save_when=simckpt.EverySteps(1))
    assert checkpointer.restore_latest() is not None
try:
    env.step(np.array([0.0]))
    refused = False
except LinkDisarmedError:
    refused = True
env.arm()
steps = []
for action in json.loads(sys.argv[2]):
    observation, reward, fallen, _, info = env.step(np.array(action))
    steps.append([observation.tobytes().hex(), reward, fallen, info["held"]])
print(json.dumps({"refused": refused, "steps": steps, "sequence": env.link.send((0.0, 0.0))}))
"""


def simulated(seed: int = 0, **settings: Any) -> Link:
    return Link(Simulated(Motor(seed, **settings)), command=Motor.command, reading=Motor.reading, name="motor")


def play(env: Any, actions: np.ndarray) -> list[Any]:
    steps = []
    for action in actions:
        observation, reward, fallen, _, info = env.step(action)
        steps.append([observation.tobytes().hex(), reward, fallen, info["held"]])
    return steps


def test_a_saved_env_goes_on_in_a_fresh_process_bit_for_bit_once_it_is_armed(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    actions = rng.uniform(-1, 1, (2 * STEPS, 1))
    env = CartPoleInTheLoopEnv(simulated(8, loss=0.2))
    env.reset(seed=3)
    play(env, actions[:STEPS])
    run = simckpt.Store(tmp_path / "store").start("run")
    with run, run.checkpointer({"envs": env}, save_when=simckpt.EverySteps(1)) as checkpointer:
        checkpointer.save(STEPS)
    # a save disarms nothing
    expected = play(env, actions[STEPS:])
    assert any(held for *_, held in expected)

    command = [sys.executable, "-c", FRESH, str(tmp_path / "store"), json.dumps(actions[STEPS:].tolist())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["refused"]
    assert answer["steps"] == expected
    # one command in reset, then one a step
    assert answer["sequence"] == 1 + 2 * STEPS


def test_a_rolled_back_env_is_exact_with_a_reading_under_way_and_a_closure_for_a_device() -> None:
    noise = np.random.default_rng(0)

    def model(command: Any, time: int) -> Any:
        return None if command is None else (command[0] + noise.normal(), command[1])

    link = Link(Simulated(model), command=Motor.command, reading=Motor.reading)
    env = SnapshotEnv(CartPoleInTheLoopEnv(link))
    actions = np.random.default_rng(5).uniform(-1, 1, (2 * STEPS, 1))
    env.reset(seed=1)
    play(env, actions[:STEPS])
    link.send((9.0, 1.0))
    state = env.state_dict()
    first = play(env, actions[STEPS:])
    end = env.state_dict()
    env.load_state_dict(state)
    with pytest.raises(LinkDisarmedError):
        env.step(actions[0])
    env.unwrapped.arm()
    assert play(env, actions[STEPS:]) == first
    assert not differences(end, env.state_dict())


def test_restoring_an_env_sends_nothing_to_its_device() -> None:
    with udp_device() as device:
        settings: dict[str, Any] = {"command": ("force",), "reading": ("force", "position")}
        link = Link(UDP(device.address), **settings)

        class Env(CartPoleInTheLoopEnv):
            def _exchange(self, wanted: float) -> None:
                self.link.send((wanted,))
                self.reading = self.link.receive_newest() or getattr(self, "reading", None)

        env = SnapshotEnv(Env(link))
        env.reset(seed=0)
        device.take()
        device.give(reading(0, values=(0.5, 0.25), time=11))
        while env.unwrapped.reading is None:
            env.step(np.zeros(1))
        state = env.state_dict()
        while not device.untouched():
            continue
        # the connection was opened by this process; in another one it would not be open at all
        env.load_state_dict(state)
        env.load_state_dict(state)
        assert device.untouched()
        assert not link.connected
        # a reading that the env has kept is state
        kept = env.unwrapped.reading
        assert isinstance(kept, Reading)
        assert (kept.values.tolist(), kept.device_time) == ([0.5, 0.25], 11)
        env.close()


def test_restoring_a_checkpoint_disarms_links_too_that_an_env_uses_without_holding_them(tmp_path) -> None:
    elsewhere = link_to(Loopback())  # of the program, as a global

    class Env(CountingEnv):
        of_the_class = link_to(Loopback(), name="of the class")

        def step(self, action: Any) -> Any:
            elsewhere.send((1.0,))
            type(self).of_the_class.send((1.0,))
            return super().step(action)

    env = Env()
    planning = SnapshotEnv(CountingEnv())
    planning.reset(seed=1)
    kept = planning.state_dict()
    with simckpt.Store(tmp_path).start("run") as run:
        run.checkpointer({"env": env}, save_when=simckpt.EverySteps(1)).save(1)
        checkpoint = run.latest()
        env.step(0)
        # a snapshot of another env, as in planning, disarms nobody's links
        planning.load_state_dict(kept)
        env.step(0)
        checkpoint.restore({"env": env})
    with pytest.raises(LinkDisarmedError):
        env.step(0)
    elsewhere.arm()
    with pytest.raises(LinkDisarmedError):
        env.step(0)
    assert [len(link.transport.sent) for link in (elsewhere, Env.of_the_class)] == [3, 2]


def test_the_state_of_a_device_fits_a_model_and_not_the_other_way_round() -> None:
    # a session of the real device is looked at on a machine without it
    real = SnapshotEnv(CartPoleInTheLoopEnv(Link(UDP("127.0.0.1:9"), command=Motor.command, reading=Motor.reading)))
    model = SnapshotEnv(CartPoleInTheLoopEnv(simulated()))
    model.reset(seed=0)
    model.load_state_dict(real.state_dict())
    model.unwrapped.arm()
    model.step(np.zeros(1))
    with pytest.raises(StateMismatchError, match="Simulated"):
        real.load_state_dict(model.state_dict())
    real.close()


def test_a_link_with_other_names_is_refused_and_the_env_is_as_it_was() -> None:
    one = SnapshotEnv(CartPoleInTheLoopEnv(simulated()))
    other = SnapshotEnv(
        CartPoleInTheLoopEnv(Link(Simulated(Motor()), command=Motor.command, reading=("current", "position")))
    )
    one.reset(seed=0)
    other.reset(seed=0)
    before = one.state_dict()
    with pytest.raises((StateMismatchError, RestoreError), match="current"):
        one.load_state_dict(other.state_dict())
    assert not differences(before, one.state_dict())


def test_the_cart_holds_the_last_force_when_nothing_comes() -> None:
    answers = iter([(0.0, 0.0), (3.0, 0.1), None, None, (-2.0, 0.2)])
    env = CartPoleInTheLoopEnv(Link(Simulated(lambda *_: next(answers)), command=("f", "x"), reading=("f", "x")))
    env.reset(seed=0)
    found = [env.step(np.zeros(1)) for _ in range(4)]
    assert [item[4]["held"] for item in found] == [False, True, True, False]
    assert [item[0][4:].tolist() for item in found] == [[3.0, 0.1], [3.0, 0.1], [3.0, 0.1], [-2.0, 0.2]]


def test_an_episode_does_not_begin_with_what_piled_up_before_it() -> None:
    transport = Loopback()
    env = CartPoleInTheLoopEnv(Link(transport, command=Motor.command, reading=Motor.reading))
    transport.arriving += [reading(number, values=(9.0, 0.7)) for number in range(300)]
    observation, info = env.reset(seed=0)
    assert info["held"]
    assert observation[4] == 0.0
    assert observation[5] == observation[0]


def test_the_motor_is_late_bounded_and_lets_go_without_commands() -> None:
    motor = Motor(0)
    period = 2_000_000
    assert motor((100.0, 0.2), 0) is not None
    # a first-order lag towards the limit: after n periods, limit * (1 - exp(-t / lag))
    for step in range(1, 6):
        motor((100.0, 0.2), step * period)
        assert motor.force == pytest.approx(LIMIT * (1 - np.exp(-step * 0.002 / LAG)))
    for step in range(6, 200):
        motor(None, step * period)
        if step * 0.002 < PATIENCE:
            assert motor.force > 0.9 * LIMIT * (1 - np.exp(-5 * 0.002 / LAG))
    assert abs(motor.force) < 1e-3
    assert motor.position == pytest.approx(0.2)
    readings = [Motor(1, loss=0.5)(None, 0) for _ in range(3)]
    assert readings[0] == readings[1] == readings[2]
    with_loss = Motor(1, loss=0.5)
    lost = sum(with_loss(None, step) is None for step in range(1000))
    assert abs(lost - 500) < 5 * (1000 * 0.25) ** 0.5


def test_an_env_with_a_rate_keeps_it_and_a_replay_does_not_wait() -> None:
    class Source:
        def send(self, values: np.ndarray) -> int:
            return 0

        def receive(self, timeout: float) -> None:
            return None

        def time(self) -> int:
            return 0

    env = SnapshotEnv(CartPoleInTheLoopEnv(simulated(), rate=100))
    env.reset(seed=0)
    started = time.monotonic()
    play(env, np.zeros((6, 1)))
    # the first step is the first tick
    assert time.monotonic() - started >= 0.05
    # ticks are no state
    state = env.state_dict()
    play(env, np.zeros((2, 1)))
    env.load_state_dict(state)
    assert not differences(state, env.state_dict())

    slow = CartPoleInTheLoopEnv(simulated(), rate=1e-3)
    slow.reset(seed=0)
    slow.link.source = Source()
    play(slow, np.zeros((5, 1)))
    # nor does it need to know the rate
    free = SnapshotEnv(CartPoleInTheLoopEnv(simulated()))
    free.load_state_dict(env.state_dict())
    assert not differences(free.state_dict(), env.state_dict())


def test_ticks_stay_on_their_grid_and_those_that_passed_are_counted() -> None:
    pace = Pace(1000)
    pace.wait()
    first = time.monotonic_ns()
    for _ in range(10):
        pace.wait()
    assert time.monotonic_ns() - first >= 9_000_000
    pace.start()
    pace.wait()
    begun = time.monotonic_ns()
    while time.monotonic_ns() - begun < 5_500_000:
        continue
    pace.wait()
    # five and a half periods: the one after the first begins late, four have passed meanwhile
    assert pace.missed >= 4
    pace.start()
    assert pace.missed == 0
    for rate in (0, -1, float("nan"), float("inf"), "500"):
        with pytest.raises(ConfigurationError, match="rate"):
            Pace(rate)  # type: ignore[arg-type]
