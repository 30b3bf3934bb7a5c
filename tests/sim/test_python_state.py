"""The walker: any Python object, in place, aliases kept."""

import collections
import dataclasses
import enum
import functools
import itertools
import pathlib
import random
import types
import weakref

import numpy as np
import pytest

from simckpt.errors import StateMismatchError
from simckpt.sim.python_state import GraphWalker
from simckpt.state.tree import decode, encode


class Thing:
    """A plain object."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def step(self):
        return "step"

    def rest(self):
        return "rest"


class Slotted:
    __slots__ = ("__weakref__", "left", "right")


class SlottedChild(Slotted):
    __slots__ = ("__private", "extra")

    def set(self, value):
        self.__private = value

    def get(self):
        return self.__private


class Labelled(dict):
    """A dict with attributes."""


class Row(list):
    """A list with attributes."""


class Unit(np.ndarray):
    """An array with attributes."""


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    data: list


Point = collections.namedtuple("Point", "x y")


def through_file(tree):
    """The tree as it comes back from a file: nothing of the live objects survives in it."""
    encoded = encode(tree)
    return decode(encoded.leaves, encoded.structure)


def transfer(source, target):
    """Captures `source` and restores it into `target`, through a file."""
    state = through_file(GraphWalker("source").capture(source))
    walker = GraphWalker("target")
    walker.capture(target)
    walker.apply(state, target)
    return target


def bits(value):
    return np.asarray(value).tobytes()


def test_plain_values_keep_their_bits_and_types():
    nan = np.frombuffer(np.uint64(0x7FF8DEADBEEF0001).tobytes(), np.float64)[0]
    source = Thing(
        a=1, b=-0.0, c=float(nan), d=None, e="text", f=b"\x00\xff", g=2**200, h=complex(1, -0.0), i=True,
        j=np.float32(1.5), k=np.int8(-3), l=np.bool_(True), m=np.datetime64("2020-01-01"),
    )  # fmt: skip
    target = transfer(source, Thing(a=2))
    assert vars(target).keys() == vars(source).keys()
    for name, value in vars(source).items():
        assert type(getattr(target, name)) is type(value), name
        assert bits(getattr(target, name)) == bits(value) or name == "g", name
    assert target.g == 2**200


def test_attributes_appear_disappear_and_keep_their_order():
    target = transfer(Thing(b=1, a=[1], c=3), Thing(gone=[5], c=2, b=[1]))
    assert list(vars(target).items()) == [("b", 1), ("a", [1]), ("c", 3)]


def test_arrays_are_written_in_place():
    buffer = np.zeros((2, 3))
    target = Thing(x=buffer, view=buffer[0])
    source_buffer = np.full((2, 3), 7.0)
    source_buffer[0] = [1, 2, np.nan]
    transfer(Thing(x=source_buffer, view=source_buffer[0]), target)
    assert target.x is buffer
    assert target.view.base is buffer
    assert bits(buffer) == bits(source_buffer)


def test_views_are_views_again_when_the_live_object_has_none():
    base = np.arange(12).reshape(3, 4)
    target = transfer(Thing(view=base[1:, ::2], base=base), Thing(view=None, base=None))
    target.base[:] = 0
    target.base[2, 2] = 5
    assert target.view.tolist() == [[0, 0], [0, 5]]


def test_arrays_that_shared_memory_in_the_live_object_alone_are_parted():
    shared = np.zeros(4)
    target = transfer(Thing(a=np.arange(4.0), b=np.arange(2.0) + 10), Thing(a=shared, b=shared[:2]))
    assert target.a.tolist() == [0, 1, 2, 3]
    assert target.b.tolist() == [10, 11]
    target.a[:] = -1
    assert target.b.tolist() == [10, 11]


def test_arrays_of_other_shape_or_dtype_are_replaced():
    target = transfer(Thing(a=np.arange(3), b=np.zeros(2, ">f4")), Thing(a=np.zeros(7), b=np.zeros(2)))
    assert (target.a.dtype, target.a.tolist()) == (np.dtype(int), [0, 1, 2])
    assert target.b.dtype == np.dtype(">f4")


def test_read_only_arrays_are_replaced_only_if_they_differ():
    same, other = np.arange(3), np.arange(3)
    same.flags.writeable = other.flags.writeable = False
    target = Thing(same=same, other=other)
    transfer(Thing(same=np.arange(3), other=np.arange(3) + 1), target)
    assert target.same is same
    assert target.other.tolist() == [1, 2, 3]
    assert other.tolist() == [0, 1, 2]


def test_memory_order_of_replaced_arrays_is_kept():
    source = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)).transpose(1, 0, 2)
    target = transfer(Thing(a=source), Thing(a=None))
    assert bits(target.a) == bits(source)
    assert target.a.strides == source.strides


def test_object_arrays_and_records():
    shared = [1]
    source = np.array([shared, {"a": shared}, None], object)
    record = np.array([(1, 2.5)], np.dtype([("a", "i4"), ("b", "f8")]))
    target = transfer(
        Thing(o=source, r=record, v=record[0]),
        Thing(o=np.array([None] * 3, object), r=record.copy(), v=None),
    )
    assert target.o[0] is target.o[1]["a"]
    assert target.o[0] == [1]
    assert target.r.tolist() == [(1, 2.5)]
    assert target.v.item() == (1, 2.5)


def test_aliases_are_restored_as_aliases_and_no_others():
    shared, array = [1, 2], np.arange(3)
    source = Thing(a=shared, b={"x": shared}, c=(shared,), d=array, e=array)
    one = [0]
    target = Thing(a=one, b={"x": [0]}, c=([0],), d=np.zeros(3, int), e=np.zeros(3, int))
    transfer(source, target)
    assert target.a is one
    assert target.b["x"] is one
    assert target.c[0] is one
    assert target.d is target.e
    back = Thing(a=shared, b=shared)
    transfer(Thing(a=[1], b=[2]), back)
    assert back.a == [1]
    assert back.b == [2]


def test_cycles():
    source = Thing(name="s")
    source.me = source
    source.items = [source]
    source.items.append(source.items)
    target = Thing(items=[])
    items = target.items
    transfer(source, target)
    assert target.me is target
    assert target.items is items
    assert items[0] is target
    assert items[1] is items


def test_containers_change_in_place():
    target = Thing(
        d={"b": 1, "gone": 2}, l=[1, 2, 3], s={1, 2}, q=collections.deque([1], maxlen=2),
        o=collections.OrderedDict(a=1, b=2), c=collections.Counter("a"),
        dd=collections.defaultdict(list), y=bytearray(b"x"),
    )  # fmt: skip
    before = dict(vars(target))
    source = Thing(
        d={"c": [1], "b": 2}, l=[3], s={3, 1}, q=collections.deque([4, 5], maxlen=2),
        o=collections.OrderedDict(b=2, a=1), c=collections.Counter("abca"), dd=collections.defaultdict(list, k=[1]),
        y=bytearray(b"yz"),
    )  # fmt: skip
    transfer(source, target)
    for name, value in before.items():
        assert getattr(target, name) is value, name
        assert value == getattr(source, name), name
    assert list(target.d) == ["c", "b"]
    assert list(target.o) == ["b", "a"]
    assert target.dd["new"] == []


def test_deque_of_another_length_limit_is_replaced():
    target = transfer(Thing(q=collections.deque([1, 2, 3], maxlen=3)), Thing(q=collections.deque(maxlen=2)))
    assert target.q.maxlen == 3
    assert list(target.q) == [1, 2, 3]


def test_dict_keys_of_any_kind():
    content = {
        1: "a",
        "1": "b",
        (1, ("x", None)): [1],
        None: 2,
        Color.RED: 3,
        2.5: 4,
        b"k": 5,
        frozenset({1}): 6,
        np.int64(9): 7,
    }
    target = transfer(Thing(d=content), Thing(d={}))
    assert list(target.d.items()) == list(content.items())
    assert [type(key) for key in target.d] == [type(key) for key in content]


def test_subclasses_of_containers_keep_content_and_attributes():
    source = Thing(d=Labelled(a=[1]), l=Row([1, 2]), u=np.arange(3.0).view(Unit))
    source.d.label, source.l.label, source.u.label = "d", ["l"], {"u": 1}
    target = Thing(d=Labelled(b=1), l=Row(), u=np.zeros(3).view(Unit))
    before = dict(vars(target))
    transfer(source, target)
    for name, value in before.items():
        assert getattr(target, name) is value
    assert dict(target.d) == {"a": [1]}
    assert list(target.l) == [1, 2]
    assert target.u.tolist() == [0, 1, 2]
    assert (target.d.label, target.l.label, target.u.label) == ("d", ["l"], {"u": 1})
    empty = transfer(source, Thing())
    assert (type(empty.d), type(empty.l), type(empty.u)) == (Labelled, Row, Unit)
    assert empty.u.label == {"u": 1}


def test_slots_of_every_base():
    source = SlottedChild()
    source.left, source.extra = [1], np.arange(2)
    source.set("hidden")
    target = SlottedChild()
    target.right = 5
    transfer(Thing(s=source), Thing(s=target))
    assert target.left == [1]
    assert target.get() == "hidden"
    assert not hasattr(target, "right")


def test_tuples_named_tuples_enums_and_dataclasses():
    source = Thing(
        p=Point([1], 2.5),
        e=Color.BLUE,
        f=Rights.READ | Rights.WRITE,
        d=Frozen(1, [2]),
        t=(1, (2, [3])),
        s=slice(1, None, 2),
    )
    target = Thing(p=Point([0], 0), e=Color.RED, f=Rights.READ, d=Frozen(5, [6]), t=(0, (0, [0])))
    inner, frozen = target.t[1][1], target.d
    transfer(source, target)
    assert target.p == Point([1], 2.5)
    assert type(target.p) is Point
    assert target.s == slice(1, None, 2)
    assert target.e is Color.BLUE
    assert target.f is Rights.READ | Rights.WRITE
    assert target.d is frozen
    assert target.d == Frozen(1, [2])
    assert target.t[1][1] is inner
    assert inner == [3]


def test_objects_that_the_live_program_lacks_are_built_from_its_classes():
    target = transfer(Thing(list=[Thing(x=1), Slotted(), Frozen(1, [2])], e=Color.RED, p=Point(1, 2)), Thing(list=[]))
    assert [type(item) for item in target.list] == [Thing, Slotted, Frozen]
    assert target.list[0].x == 1
    assert target.list[2].data == [2]
    assert target.e is Color.RED
    assert target.p == Point(1, 2)


def test_unknown_classes_are_refused_by_name():
    local = type("Local", (), {})
    state = GraphWalker("env").capture(Thing(x=local()))
    state.attributes["x"].type_name = "os.PathLike"
    with pytest.raises(
        StateMismatchError, match=r"env/x is a os.PathLike in the state, a tests\S*Local|env/x is a os.PathLike"
    ):
        GraphWalker("env").apply(state, Thing(x=1))


def test_sets_iterate_in_the_same_order():
    content = {8, 0, 16, 3}
    order = list(content)
    target = transfer(Thing(s=content, f=frozenset({1, 2}), t={(1, "a")}), Thing(s={0, 8, 16, 3}))
    assert list(target.s) == order
    assert target.f == frozenset({1, 2})
    assert target.t == {(1, "a")}


def test_generators_continue_their_streams():
    def make(seed):
        shared = np.random.default_rng(seed)
        shared.integers(0, 10, dtype=np.int32)
        return Thing(
            g=shared, again=shared, philox=np.random.Generator(np.random.Philox(seed)),
            legacy=np.random.RandomState(seed), python=random.Random(seed), bits=np.random.PCG64(seed),
        )  # fmt: skip

    def draw(thing):
        thing.python.gauss(0, 1)
        return (
            thing.g.integers(0, 2**31, 3, dtype=np.int32).tolist(), thing.g.spawn(1)[0].random(), thing.philox.random(),
            thing.legacy.normal(), thing.python.gauss(0, 1), thing.bits.random_raw(),
        )  # fmt: skip

    source, target = make(1), make(2)
    draw(source)
    source.legacy.normal()
    generators = dict(vars(target))
    transfer(source, target)
    for name, generator in generators.items():
        assert getattr(target, name) is generator
    assert target.again is target.g
    fresh = transfer(source, Thing())
    expected = draw(source)
    assert draw(target) == expected
    assert draw(fresh) == expected


def test_closures_defaults_and_attributes_of_functions():
    def make(start):
        count = start
        log = []

        def tick(step=[start], *, scale={"by": start}):  # noqa: B006
            nonlocal count
            count += step[0] * scale["by"]
            log.append(count)
            return count

        def read():
            return count, list(log)

        tick.calls = [start]
        return Thing(tick=tick, read=read, alias=log)

    source, target = make(1), make(5)
    source.tick()
    transfer(source, target)
    assert target.read() == (2, [2])
    assert target.tick() == 3
    assert target.read() == (3, [2, 3])
    assert target.alias == [2, 3]
    assert target.tick.calls == [1]


def test_functions_chosen_at_run_time_are_found_by_name():
    source = Thing(choice=len, now=None)
    source.now = source.rest
    target = Thing(choice=abs)
    target.now = target.step
    walker = GraphWalker("env")
    table = Thing(thing=target, functions=[abs, len])
    walker.apply(through_file(GraphWalker("env").capture(Thing(thing=source, functions=[abs, len]))), table)
    assert target.choice is len
    assert target.now() == "rest"
    assert target.now.__self__ is target


def test_bound_objects_and_partials():
    def make(value):
        box = [value]
        thing = Thing(box=box, push=box.append, draw=np.random.default_rng(value).random, other=Thing(x=value))
        thing.method = thing.other.step
        thing.partial = functools.partial(dict, box=box, n=value)
        return thing

    source, target = make(1), make(2)
    box, partial = target.box, target.partial
    source.draw()
    transfer(source, target)
    assert target.box is box
    assert box == [1]
    target.push(9)
    assert box == [1, 9]
    assert target.draw() == source.draw()
    assert target.method.__self__ is target.other
    assert target.other.x == 1
    assert target.partial is partial
    assert partial() == {"box": box, "n": 1}
    assert partial()["box"] is box


def test_counters_weak_references_and_read_only_mappings():
    source = Thing(count=itertools.count(3, 2), inner=Thing(x=1), proxy=types.MappingProxyType({"a": [1]}))
    next(source.count)
    source.weak = weakref.ref(source.inner)
    target = Thing(count=itertools.count(), inner=Thing(x=0), weak=None, proxy=types.MappingProxyType({"a": [0]}))
    source.table, target.table = {"k": [1]}, {"k": [0]}
    source.values, target.values = source.table.values(), target.table.values()
    target.same_count = target.count
    source.same_count = source.count
    transfer(source, target)
    assert next(target.count) == 5
    assert next(target.same_count) == 7
    assert target.weak() is target.inner
    assert dict(target.proxy) == {"a": [1]}
    target.table["new"] = 1
    assert list(target.values) == [[1], 1]


def test_a_state_can_be_applied_many_times():
    source = Thing(a=np.arange(3), l=[[1]], s=SimpleState([1]))
    state = GraphWalker("env").capture(source)
    target = Thing(a=np.zeros(3, int), l=[], s=SimpleState([2]))
    walker = GraphWalker("env")
    for _ in range(3):
        walker.apply(state, target)
        assert (target.a.tolist(), target.l, target.s.content) == ([0, 1, 2], [[1]], [1])
        target.a += 1
        target.l[0].append(2)
        target.s.content.append(3)
    source.a[:] = 9
    source.l[0][0] = 9
    source.s.content[0] = 9
    walker.apply(state, target)
    assert (target.a.tolist(), target.l, target.s.content) == ([0, 1, 2], [[1]], [1])


class SimpleState:
    """Says itself what its state is."""

    def __init__(self, content):
        self.content = content
        self.secret = object()

    def state_dict(self):
        return {"content": self.content}

    def load_state_dict(self, state):
        self.content = state["content"]


def test_own_state_dict_wins_over_attributes():
    target = Thing(s=SimpleState([2]))
    kept, secret = target.s, target.s.secret
    transfer(Thing(s=SimpleState([1])), target)
    assert target.s is kept
    assert kept.content == [1]
    assert kept.secret is secret


class Trap:
    @property
    def value(self):
        raise AssertionError("properties are not called")

    def __getattr__(self, name):
        raise AssertionError(f"{name} was looked up through __getattr__")

    def __eq__(self, other):
        raise AssertionError("not compared")

    __hash__ = None

    def __len__(self):
        raise AssertionError("not measured")


def test_no_code_of_the_object_runs():
    source, target = Trap(), Trap()
    source.__dict__["x"] = [1]
    holder = Thing(t=target)
    transfer(Thing(t=source), holder)
    assert holder.t is target
    assert target.__dict__["x"] == [1]


def test_strings_that_look_like_paths_are_state():
    source = Thing(motion_file="/data/b.npz", direction="/s", xml="relative", items=["/x"], table={"path": "/y"})
    target = Thing(motion_file="/data/c.npz", direction="/w", xml="c", items=["/z"], table={"path": "/z"})
    transfer(source, target)
    assert vars(target) == vars(source)


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_path_that_is_gone_gives_way_to_one_that_is_there(tmp_path, kind):
    here, there = tmp_path / "a.xml", tmp_path / "b.xml"
    here.touch()
    gone = tmp_path / "gone" / "model.xml"
    target = transfer(Thing(xml=kind(gone)), Thing(xml=kind(here)))
    assert target.xml == kind(here)
    there.touch()
    assert transfer(Thing(xml=kind(there)), Thing(xml=kind(here))).xml == kind(there)
    assert transfer(Thing(xml=kind(gone)), Thing(xml=kind(gone.parent))).xml == kind(gone)
    assert transfer(Thing(xml=kind(gone)), Thing()).xml == kind(gone)


@pytest.mark.parametrize("first", ["table", "view"])
@pytest.mark.parametrize(
    "view", [types.MappingProxyType, dict.keys, dict.values, dict.items], ids=["proxy", "keys", "values", "items"]
)
@pytest.mark.parametrize("keys", [("k", "l"), (Color.RED, Color.BLUE), ((1, "a"), 2.5)], ids=["text", "enums", "other"])
def test_views_of_a_mapping_show_the_restored_one(view, first, keys):
    def make(value, keys):
        table = {key: [value, i] for i, key in enumerate(keys)}
        parts = {"table": table, "view": view(table)}
        return Thing(**{name: parts[name] for name in sorted(parts, reverse=first == "view")})

    source = make(1, keys)
    for target in (make(2, keys), make(2, keys[:1]), make(1, keys), Thing(table={}, view=None)):
        live = target.table
        transfer(source, target)
        assert target.table is live
        assert target.table == source.table
        assert type(target.view) is type(source.view)
        target.table["new"] = 5
        assert "new" in (target.view if view in (types.MappingProxyType, dict.keys) else dict(target.table))
        assert len(target.view) == len(keys) + 1


def test_a_mapping_that_only_its_view_knows():
    source = Thing(view=types.MappingProxyType({Color.RED: [1]}))
    assert dict(transfer(source, Thing(view=types.MappingProxyType({Color.RED: [2]}))).view) == {Color.RED: [1]}
    assert dict(transfer(source, Thing()).view) == {Color.RED: [1]}


def plain_function():
    """Carries nothing."""


def test_what_functions_got_after_the_snapshot_is_taken_away():
    def make(step):
        return lambda x=[step]: x

    thing = Thing(plain=plain_function, carrying=make(1), bare=make(2))
    thing.bare.__defaults__ = None
    thing.bare.first = [1]
    walker = GraphWalker("env")
    state = through_file(walker.capture(thing))
    try:
        plain_function.n = thing.carrying.n = thing.bare.n = 2
        thing.bare.__defaults__ = ([3],)
        thing.bare.__kwdefaults__ = {"x": 4}
        walker.apply(state, thing)
        assert vars(plain_function) == vars(thing.carrying) == {}
        assert vars(thing.bare) == {"first": [1]}
        assert (thing.bare.__defaults__, thing.bare.__kwdefaults__) == (None, None)
        assert thing.carrying() == [1]
    finally:
        vars(plain_function).clear()


def test_an_array_that_somebody_outside_holds_is_not_changed_under_his_hands():
    target = Thing(buffer=np.zeros(2), last=np.zeros(2))
    walker = GraphWalker("env")
    walker.capture(target)
    state = walker.capture(target)
    buffer = target.buffer
    buffer += 1
    # the env makes a new observation, keeps it and returns it
    target.last = returned = np.ones(2)
    walker.apply(state, target)
    assert target.buffer is buffer
    assert buffer.tolist() == [0, 0]
    assert target.last.tolist() == [0, 0]
    assert returned.tolist() == [1, 1]


def test_an_array_that_nobody_else_holds_is_written_in_place():
    target = Thing(last=np.zeros(2), names=[])
    walker = GraphWalker("env")
    state = walker.capture(target)
    target.last = np.ones(2)
    target.names.append(target.last)
    target.box = (target.last,)
    address = target.last.__array_interface__["data"][0]
    state = walker.capture(target)
    target.last += 1
    walker.apply(state, target)
    assert target.last.tolist() == [1, 1]
    assert target.last.__array_interface__["data"][0] == address
    assert target.names[0] is target.last


def test_returned_dicts_and_their_arrays_are_not_changed_either():
    target = Thing(last={"a": np.zeros(2)}, log=[])
    log = target.log
    walker = GraphWalker("env")
    state = walker.capture(target)
    target.last = returned = {"a": np.ones(2), "b": [np.ones(2)]}
    target.log.append((target.last["a"], 1))
    inner = returned["b"]
    walker.apply(state, target)
    assert target.last["a"].tolist() == [0, 0]
    assert "b" not in target.last
    assert returned["a"].tolist() == [1, 1]
    assert returned["b"] is inner
    assert target.log is log
    assert log == []


def test_dicts_that_nobody_else_holds_change_in_place():
    target = Thing(last={})
    walker = GraphWalker("env")
    walker.capture(target)
    target.last = {"a": np.ones(2)}
    state = walker.capture(target)
    before = id(target.last), id(target.last["a"])
    target.last["a"] += 1
    target.last["b"] = 1
    walker.apply(state, target)
    assert (id(target.last), id(target.last["a"])) == before
    assert target.last["a"].tolist() == [1, 1]


@pytest.mark.parametrize("order", [("view", "base"), ("base", "view"), ("left", "right"), ("left", "right", "base")])
def test_views_of_a_fortran_ordered_array_in_any_order_of_attributes(order):
    base = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))
    parts = {"base": base, "view": base[:, 1], "left": base[:, :2], "right": base[:, 1:]}
    source = Thing(**{name: parts[name] for name in order})
    target = transfer(source, Thing(**dict.fromkeys(order)))
    for name in order:
        assert bits(getattr(target, name)) == bits(parts[name])
        assert getattr(target, name).strides == parts[name].strides
    first, second = (getattr(target, name) for name in order[:2])
    first[...] = -1
    base_like = second[:, 1] if second.ndim == 3 and order[1] == "base" else second
    assert (base_like == -1).any()
