"""What the walker refuses, what it leaves alone, and how users say what they know better."""

import ctypes
import itertools
import logging
import pathlib
import socket
import tempfile
import threading

import gymnasium as gym
import numpy as np
import pytest

from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.sim.python_state import GraphWalker
from simckpt.sim.resources import register_adapter, register_stateless


class Thing:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def refused(value):
    with pytest.raises(UnsupportedStateError) as caught:
        GraphWalker("envs/env_0").capture(Thing(inner=Thing(_bad=[value])))
    error = caught.value
    assert error.path == "envs/env_0/inner._bad[0]"
    assert error.path in str(error)
    assert error.type_name in str(error)
    for way_out in ("state_dict", "register_adapter", "register_stateless"):
        assert way_out in str(error)
    return error


def generator():
    yield 1


def test_generators_and_iterators_are_refused():
    assert refused(generator()).type_name == "generator"
    assert refused(iter([1])).type_name == "list_iterator"
    assert refused(itertools.cycle([1])).type_name == "itertools.cycle"


def test_files_sockets_and_threads_are_refused():
    with tempfile.TemporaryFile() as file:
        refused(file)
    with socket.socket() as end:
        assert refused(end).type_name == "socket.socket"
    assert refused(threading.Thread(target=print)).type_name == "threading.Thread"


def test_objects_with_memory_of_their_own_are_refused():
    class Hidden(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int),)

    refused(Hidden(1))
    refused(memoryview(b"x"))
    refused(Exception("x"))


def test_a_python_subclass_does_not_hide_what_its_base_hides():
    class Counter(itertools.cycle):
        def __init__(self, values):
            self.seen = 0

    assert "itertools.cycle" in str(refused(Counter([1, 2])))


def test_file_backed_arrays_are_refused(tmp_path):
    refused(np.memmap(tmp_path / "x", np.uint8, "w+", shape=(3,)))


def test_a_chain_that_is_too_long_is_refused():
    first = here = Thing()
    for _ in range(10_000):
        here.next = Thing()
        here = here.next
    with pytest.raises(UnsupportedStateError, match="too long"):
        GraphWalker("env").capture(first)


def test_resources_stay_as_they_are_live():
    def make():
        return Thing(
            lock=threading.Lock(), rlock=threading.RLock(), log=logging.getLogger("x"), path=pathlib.Path("/a"),
            sentinel=object(), condition=threading.Condition(),
        )  # fmt: skip

    state = GraphWalker("env").capture(make())
    target = make()
    before = dict(vars(target))
    GraphWalker("env").apply(state, target)
    assert all(getattr(target, name) is value for name, value in before.items())


def test_a_resource_that_was_opened_since_stays_open():
    state = GraphWalker("env").capture(Thing(viewer=None))
    target = Thing(viewer=threading.Lock(), late=threading.Lock())
    viewer, late = target.viewer, target.late
    GraphWalker("env").apply(state, target)
    assert target.viewer is viewer
    assert target.late is late


def test_a_resource_that_is_not_open_here_is_not_invented():
    state = GraphWalker("env").capture(Thing(viewer=threading.Lock(), x=2))
    target = Thing(viewer=None, x=1)
    GraphWalker("env").apply(state, target)
    assert (target.viewer, target.x) == (None, 2)


def test_a_class_can_be_declared_stateless_by_name_or_by_type():
    class Window(itertools.cycle):
        pass

    class Door(itertools.cycle):
        pass

    register_stateless(f"{Window.__module__}.{Window.__qualname__}")
    register_stateless(Door)
    target = Thing(window=Window([1]), door=Door([1]), x=0)
    window = target.window
    GraphWalker("env").apply(GraphWalker("env").capture(Thing(window=Window([1]), door=Door([1]), x=1)), target)
    assert target.window is window
    assert target.x == 1


def test_an_adapter_reads_and_writes():
    class Cycle(itertools.cycle):
        pass

    places = {}
    refused(Cycle([1]))
    register_adapter(
        Cycle,
        lambda value: {"place": places[id(value)]},
        lambda value, state: places.update({id(value): state["place"]}),
    )
    source, target = Cycle([1]), Cycle([1])
    places.update({id(source): [3], id(target): [0]})
    state = GraphWalker("env").capture(Thing(c=source))
    places[id(source)].append(4)
    GraphWalker("env").apply(state, Thing(c=target))
    assert places[id(target)] == [3]


def test_problems_are_all_listed_and_nothing_is_changed():
    class A:
        pass

    space = gym.spaces.Box(0, 1, (3,))
    state = GraphWalker("env").capture(Thing(a=1, env=gym.make("CartPole-v1"), space=space, f=lambda x=[1]: x))
    target = Thing(a=2, env=gym.make("Pendulum-v1"), space=gym.spaces.Box(0, 1, (4,)), f=None)
    before = dict(vars(target))
    with pytest.raises(StateMismatchError) as caught:
        GraphWalker("env").apply(state, target)
    text = "\n".join(caught.value.problems)
    for part in ("CartPoleEnv", "PendulumEnv", "env/space.low", "float32(3,)", "env/f is the function"):
        assert part in text, part
    assert vars(target) == before


def test_parts_that_others_capture_are_not_entered():
    sub = [Thing(x=iter([1]))]
    walker = GraphWalker("envs", elsewhere=[sub])
    target = Thing(envs=sub, y=1)
    state = walker.capture(target)
    target.y = 2
    walker.apply(state, target)
    assert target.envs is sub
    assert target.y == 1


def foreign(name):
    module, _, cls = name.rpartition(".")
    return type(cls, (), {"__module__": module})


@pytest.mark.parametrize(
    "name",
    [
        "pygame.surface.Surface",
        "pygame.time.Clock",
        "pygame.font.Font",
        "matplotlib.artist.Artist",
        "pyglet.window.Window",
        "cv2.VideoWriter",
        "OpenGL.GL.Context",
    ],
)
def test_what_only_shows_the_env_stays_as_it_is_live(name):
    cls = foreign(name)
    drawn, window = type("Special", (cls,), {})(), cls()
    target = Thing(drawn=drawn, window=window, opened=None)
    window.x = 1
    state = GraphWalker("env").capture(target)
    window.x, target.opened, target.closed = 2, cls(), cls()
    opened, closed = target.opened, target.closed
    GraphWalker("env").apply(state, target)
    assert (target.drawn, target.window, target.opened, target.closed) == (drawn, window, opened, closed)
    assert window.x == 2


@pytest.mark.parametrize(
    "name", ["pygame.math.Vector2", "pygame.sprite.Sprite", "matplotlib.colors.Normalize", "dm_control.utils.X"]
)
def test_values_of_the_same_packages_are_state(name):
    target = Thing(value=foreign(name)())
    target.value.x = [1]
    state = GraphWalker("env").capture(target)
    target.value.x[0] = 2
    GraphWalker("env").apply(state, target)
    assert target.value.x == [1]


def test_classes_seen_through_their_attributes_are_refused():
    refused(vars(Thing))
