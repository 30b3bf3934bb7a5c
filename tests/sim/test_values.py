"""Immutable values in an env: enums, moments, patterns, paths."""

import datetime
import decimal
import enum
import fractions
import pathlib
import re
import string
import types
import uuid
import zoneinfo

import gymnasium as gym
import numpy as np
import pytest

from simckpt.errors import StateMismatchError
from simckpt.sim.environment import EnvHandle
from simckpt.sim.python_state import GraphWalker
from simckpt.state.tree import decode, encode


class Thing:
    """A plain object."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def transfer(source, target):
    """Captures `source` and restores it into `target`, through the form of a file."""
    encoded = encode(GraphWalker("source").capture(source))
    walker = GraphWalker("target")
    walker.capture(target)
    walker.apply(decode(encoded.leaves, encoded.structure), target)
    return target


NEW_YORK = zoneinfo.ZoneInfo("America/New_York")
PAIRS = {
    "naive": (datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2000, 1, 1)),
    "fold": (datetime.datetime(2026, 11, 1, 1, 30, fold=1), datetime.datetime(2026, 11, 1, 1, 30)),
    "aware": (
        datetime.datetime(2026, 11, 1, 1, 30, tzinfo=datetime.UTC),
        datetime.datetime(2026, 11, 1, 1, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "here")),
    ),
    "zone": (
        datetime.datetime(2026, 11, 1, 1, 30, tzinfo=NEW_YORK, fold=1),
        datetime.datetime(2026, 11, 1, 1, 30, tzinfo=datetime.UTC),
    ),
    "zone itself": (NEW_YORK, None),
    "utc": (datetime.UTC, datetime.timezone(datetime.timedelta(seconds=-1))),
    "named": (datetime.timezone(datetime.timedelta(minutes=1), "name"), datetime.UTC),
    "time": (datetime.time(1, 2, 3, 4, tzinfo=datetime.UTC, fold=1), datetime.time(1)),
    "date": (datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2)),
    "delta": (datetime.timedelta(days=-1, microseconds=1), datetime.timedelta(1)),
    "decimal": (decimal.Decimal("1.10"), decimal.Decimal("1.1")),
    "fraction": (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    "uuid": (uuid.UUID(int=5), uuid.UUID(int=6)),
    "pattern": (re.compile("a", re.IGNORECASE), re.compile("a")),
    "bytes pattern": (re.compile(b"a"), re.compile("a")),
    "path": (pathlib.Path("/data/a"), pathlib.Path("/data/b")),
    "relative path": (pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a")),
    "range": (range(2**70, 2**80, 3), range(1)),
    "ellipsis": (..., NotImplemented),
}


@pytest.mark.parametrize("name", PAIRS)
def test_immutable_values_are_state(name):
    wanted, other = PAIRS[name]
    for live in (other, None, wanted):
        target = transfer(Thing(x=wanted, t=(wanted, [wanted])), Thing(x=live, t=(live, [live])))
        for found in (target.x, target.t[0], target.t[1][0]):
            assert type(found) is type(wanted)
            assert (found, repr(found), getattr(found, "fold", None)) == (
                wanted,
                repr(wanted),
                getattr(wanted, "fold", None),
            )
        if live is wanted:
            assert target.x is wanted


def test_templates_change_in_place():
    target = Thing(x=string.Template("$b"))
    kept = target.x
    transfer(Thing(x=string.Template("$a")), target)
    assert target.x is kept
    assert target.x.template == "$a"


class Phase(enum.Enum):
    """No live object of these tests holds one, except where it is saved."""

    START = 0


def test_members_of_enums_are_found_in_the_whole_graph_and_in_loaded_modules():
    class Local(enum.Enum):
        A = 1
        B = 2

    assert transfer(Thing(x=(0, Local.A), y=None), Thing(x=(0,), y=[Local.B])).x == (0, Local.A)
    assert transfer(Thing(x=Phase.START, d={Phase.START: 1}), Thing()).d == {Phase.START: 1}
    state = GraphWalker("env").capture(Thing(x=Local.A))
    with pytest.raises(StateMismatchError, match=r"Local\.A, which the live program does not have"):
        GraphWalker("env").apply(state, Thing(x=None))
    # no other class of the interpreter can be reached by a name in a file
    state.attributes["x"].attributes["class"] = "collections.OrderedDict"
    with pytest.raises(StateMismatchError, match="which the live program does not have"):
        GraphWalker("env").apply(state, Thing(x=None))


def test_namespaces_are_objects_like_any_other():
    class Namespaced(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def __init__(self):
            self.memory = types.SimpleNamespace(x=0)

        def step(self, action):
            self.memory.x += action
            return np.zeros(1, np.float32), float(self.memory.x), False, False, {}

    source, target = Namespaced(), Namespaced()
    source.step(5)
    memory = target.memory
    state = EnvHandle(source).capture()
    EnvHandle(target).apply(state)
    assert target.memory is memory
    assert target.step(1)[1] == 6.0


class Keyed:
    """Hashes by what it holds, which a restore changes in place."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return isinstance(other, Keyed) and self.number == other.number


def test_dicts_and_sets_of_objects_that_hash_by_their_attributes_find_them_after_a_restore():
    class Holder(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def __init__(self, numbers):
            self.by_key = {Keyed(number): number for number in numbers}
            self.elements = {Keyed(number) for number in numbers}

    source, target = Holder([1, 2, 3]), Holder([7, 8, 9])
    EnvHandle(target).apply(EnvHandle(source).capture())
    assert [target.by_key[Keyed(number)] for number in (1, 2, 3)] == [1, 2, 3]
    assert all(Keyed(number) in target.elements for number in (1, 2, 3))
    assert Keyed(7) not in target.by_key
    assert Keyed(7) not in target.elements


def test_a_set_whose_order_cannot_be_brought_back_is_told():
    class Holder(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def __init__(self):
            self.elements = set()

    source, target = Holder(), Holder()
    # a large table that was emptied again keeps its size, and with it another order
    source.elements.update(range(100))
    source.elements.difference_update(range(100))
    source.elements.update([64, 1, 33])
    assert list(source.elements) == [1, 33, 64]
    assert list({64, 1, 33}) == [64, 1, 33]
    with pytest.warns(UserWarning, match="another order"):
        EnvHandle(target).apply(EnvHandle(source).capture())
    assert target.elements == source.elements
