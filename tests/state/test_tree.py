"""Trees come back as they were: types, keys, order, bits, aliases and cycles."""

import dataclasses
import enum
import itertools
import json
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from state_helpers import assert_same, nan_with_payload, round_trip

from simckpt.errors import UnsupportedStateError
from simckpt.state import ObjectState, copy_tree, decode, encode

SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    2**200000,
    0.0,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    0.1,
    1e16,
    float("inf"),
    float("-inf"),
    nan_with_payload(1),
    nan_with_payload(0x8000000000001),
    -float("nan"),
    complex(-0.0, float("nan")),
    complex(1.5, -2),
    "",
    "é\U0001f600",
    "\ud83d\ude00",
    "a\0b\n\\\"'",
    "<>&",
    b"",
    b"\0\xff",
    bytes(range(256)) * 4,
    range(3, -10, -2),
    range(2**70),
    ...,
    NotImplemented,
    (),
    frozenset({1, "1", (2, 3)}),
    np.float32(-0.0),
    np.float16("nan"),
    np.longdouble(1) / 3,
    np.clongdouble(1j) / 3,
    np.bool_(True),
    np.uint64(2**64 - 1),
    np.complex64(complex(float("nan"), -0.0)),
    np.datetime64("2026-01-02T03:04:05", "ns"),
    np.datetime64("NaT"),
    np.timedelta64(3, "D"),
    np.str_("a\0"),
    np.bytes_(b"a\0"),
    np.void(b"\1\2\0"),
    np.array([(1, 2.5)], [("a", "<i4"), ("b", ">f8")])[0],
    np.dtype(">f4"),
    np.dtype("<U7"),
    np.dtype([("a", "<i4"), ("b", "<f8", (2,))]),
    torch.float32,
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.Size([2, 0]),
    torch.strided,
    torch.channels_last,
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_scalar_comes_back_with_its_type_and_bits(value):
    assert_same(round_trip([value]), [value])
    assert_same(round_trip(value), value)
    assert_same(copy_tree([value]), [value])


CONTAINERS = [
    {},
    [],
    set(),
    deque(),
    bytearray(b"abc"),
    bytearray(bytes(range(256)) * 9),
    {"b": 1, "a": 2},
    OrderedDict(b=1, a=[2]),
    defaultdict(list, {1: [2]}),
    defaultdict(None, {1: 2}),
    Counter("abca"),
    Counter({"a": -3, "b": 0}),
    deque([1, 2, 3], maxlen=3),
    deque([1.5] * 100, maxlen=100),
    deque([1, [2]], maxlen=0),
    [1.0] * 63,
    [float(i) / 3 for i in range(64)],
    [nan_with_payload(7)] * 70 + [-0.0],
    list(range(1000)),
    [2**63] * 64,
    [True] * 64,
    [1.0] * 63 + [1],
    tuple(range(625)),
    set(range(100)),
    slice(1, None, 2),
    {1, (2, (3, None)), "x", frozenset({4})},
    np.array([{"a": 1}, None, [np.arange(2)], 3.5], object).reshape(2, 2),
    np.empty((0, 3), object),
    np.array(None, object),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_container_comes_back(value):
    if isinstance(value, slice):
        assert round_trip([value]) == [value]
        return
    assert_same(round_trip(value), value)
    copied = copy_tree(value)
    assert_same(copied, value)
    assert copied is not value or isinstance(value, tuple)


KEYS = [
    "1",
    "",
    ".",
    "..",
    "/",
    "a/b",
    "%",
    "%2F",
    "a\0",
    "é",
    "_tree",
    "x" * 3000,
    "\ud800",
    "%~empty",
    "value",
    " ",
    "key 3",
]
KEYS += [
    1,
    -1,
    2**80,
    True,
    None,
    0.5,
    -0.0,
    float("inf"),
    (),
    (1, "a"),
    (1, (True, None)),
    b"\0",
    "True",
    "None",
    "1%~1",
]
KEYS += [frozenset({3}), np.int64(7), torch.float32, "(1, 'a')", 1.5 + 2j]


def test_keys_of_any_type_and_spelling_keep_type_and_order():
    # True equals 1 as a key, so it cannot stand beside it
    keys = [key for key in KEYS if key is not True]
    for order in (keys, keys[::-1], [key for key in keys if key != 1] + [True]):
        tree = {key: np.array([index]) for index, key in enumerate(order)}
        encoded = encode(tree)
        assert len(encoded.leaves) == len(order)
        assert_same(decode(encoded.leaves, encoded.structure), tree)
        assert_same(copy_tree(tree), tree)


def test_one_and_true_and_text_one_are_different_keys():
    tree = {"int": {1: np.zeros(1)}, "bool": {True: np.ones(1)}, "str": {"1": np.ones(2)}, "float": {1.0: np.ones(3)}}
    assert_same(round_trip(tree), tree)


def test_paths_are_safe_unique_and_never_both_dataset_and_group():
    tree = {key: {"x": np.zeros(1), key: np.zeros(1), "": {"": np.zeros(1)}} for key in KEYS if key is not True}
    tree |= {"a": np.zeros(1), "_tree": {"_tree": np.zeros(2)}, "value": np.zeros(3)}
    paths = list(encode(tree).leaves)
    count = 3 + sum(len(child) for key, child in tree.items() if key not in ("a", "_tree", "value"))
    assert len(paths) == len({*paths}) == count
    groups = {path[:i] for path in paths for i, character in enumerate(path) if character == "/"}
    assert not groups & set(paths)
    for path in paths:
        assert path.isascii()
        assert path.isprintable()
        for part in path.split("/"):
            assert part not in ("", ".", "..", "_tree")
            assert len(part) < 256


def test_paths_say_where_a_leaf_is():
    tree = {"physics": {"qpos": np.zeros(2)}, "eval/return": np.zeros(1), "list": [1, np.zeros(3)], 3: np.zeros(4)}
    assert list(encode(tree).leaves) == ["eval%2Freturn", "3", "physics/qpos", "list/1"]


def test_bare_leaf_is_called_value():
    encoded = encode(np.arange(3))
    assert list(encoded.leaves) == ["value"]
    assert_same(decode(encoded.leaves, encoded.structure), np.arange(3))


def test_aliases_and_cycles_come_back_as_the_same_objects():
    array, tensor, shared = np.zeros(3), torch.zeros(3), [1]
    node = ObjectState("m.C", {"array": array})
    node.attributes["self"] = node
    node.items = [node, shared]
    tree = {"a": array, "b": [array, tensor], "t": tensor, "l": shared, "m": (shared, shared), "o": node}
    tree["tree"] = tree
    cycle = []
    inner = (cycle, {1: cycle})
    cycle.append(inner)
    tree["cycle"] = cycle
    for back in (round_trip(tree), copy_tree(tree)):
        assert_same(back, tree)
        assert back["tree"] is back
        assert back["a"] is back["b"][0] is back["o"].attributes["array"]
        assert back["o"].items[0] is back["o"].attributes["self"] is back["o"]
        assert back["cycle"][0][0] is back["cycle"]
    assert len(encode(tree).leaves) == 2


def test_tensors_on_the_same_memory_are_stored_once():
    base = torch.arange(6.0).reshape(2, 3)
    parameter = torch.nn.Parameter(torch.ones(2))
    tree = {"a": base, "b": base[:], "c": base.t(), "d": base[0], "p": parameter, "data": parameter.detach()}
    encoded = encode(tree)
    assert list(encoded.leaves) == ["a", "c", "d", "p"]
    for back in (decode(encoded.leaves, encoded.structure), copy_tree(tree)):
        back["a"][0, 0] = 9
        assert back["b"][0, 0] == 9
        assert back["c"][0, 0] == 0
        with torch.no_grad():
            back["p"][0] = 7
        assert back["data"][0] == 7
        assert isinstance(back["p"], torch.nn.Parameter)
        assert not back["data"].requires_grad


def test_copy_shares_no_memory_and_keeps_memory_order():
    tree = {"a": np.asfortranarray(np.ones((2, 3))), "t": torch.ones(2, 3).t(), "l": [[1]], "b": bytearray(b"x")}
    copied = copy_tree(tree)
    assert not np.shares_memory(copied["a"], tree["a"])
    assert copied["a"].flags.f_contiguous
    assert copied["t"].data_ptr() != tree["t"].data_ptr()
    assert copied["t"].stride() == tree["t"].stride()
    copied["l"][0].append(2)
    assert tree["l"] == [[1]]


def test_deep_trees_need_no_recursion():
    depth = 5_000
    tree = leaf = np.arange(2)
    for _ in range(depth):
        tree = ObjectState("m.Node", {"next": [tree]})
    for back in (round_trip(tree), copy_tree(tree)):
        for _ in range(depth):
            back = back.attributes["next"][0]
        assert_same(back, leaf)
    nested = ()
    for _ in range(depth):
        nested = (nested,)
    back = round_trip(nested)
    for _ in range(depth):
        (back,) = back
    assert back == ()


def test_structure_is_plain_json_and_padding_does_no_harm():
    encoded = encode({"a": [1, None, float("nan"), "é"], "b": np.zeros(2)})

    def no_constant(name):
        raise AssertionError(name)

    document = json.loads(encoded.structure.decode("utf-8"), parse_constant=no_constant)
    assert document["tree"] == 1
    assert_same(decode(encoded.leaves, encoded.structure + b"  \n "), decode(encoded.leaves, encoded.structure))


def test_encoding_is_deterministic():
    make = lambda: {"a": np.zeros(3), "b": {1: [2, (3,)], "x": torch.ones(2)}, "c": [1.0] * 100}  # noqa: E731
    first, second = encode(make()), encode(make())
    assert first.structure == second.structure
    assert list(first.leaves) == list(second.leaves)


def test_contiguous_arrays_are_not_copied():
    array, tensor = np.ones((2, 3), ">f4"), torch.ones(3, dtype=torch.bfloat16)
    encoded = encode({"a": array, "t": tensor})
    assert np.shares_memory(encoded.leaves["a"].data, array)
    tensor[0] = 2
    assert encoded.leaves["t"].data[0] == 0x4000


Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1
    BLUE = (2, "b")


class Mode(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    rate: float
    parts: list


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: object = None


def make_classes():
    config = Config(0.5, [np.zeros(2)])
    config.extra = "kept"
    return {
        "p": Point(1, np.ones(2)),
        "e": [Color.RED, Color.BLUE, Mode.A | Mode.B],
        "c": config,
        "f": Frozen(3, Color.RED),
    }


def test_classes_come_back_from_the_live_template_only():
    tree = make_classes()
    back = round_trip(tree, template=make_classes())
    assert type(back["p"]) is Point
    assert back["e"] == tree["e"]
    assert all(type(x) is type(y) for x, y in zip(back["e"], tree["e"], strict=True))
    assert type(back["c"]) is Config
    assert vars(back["c"]).keys() == {"rate", "parts", "extra"}
    assert type(back["f"]) is Frozen
    assert back["f"] == tree["f"]
    plain = round_trip(tree)
    assert type(plain["p"]) is tuple
    assert plain["e"] == [1, "BLUE", 3]
    assert plain["c"]["extra"] == "kept"
    assert plain["f"] == {"a": 3, "b": 1}


def test_template_of_another_class_is_not_used():
    other = namedtuple("Other", "x y")
    tree = {"p": Point(1, 2)}
    assert type(round_trip(tree, template={"p": other(1, 2)})["p"]) is tuple
    assert type(round_trip(tree, template={"p": None})["p"]) is tuple
    assert type(round_trip(tree, template=[1])["p"]) is tuple


def test_last_element_of_a_shorter_live_list_speaks_for_the_others():
    tree = deque([Point(i, i) for i in range(5)], maxlen=9)
    assert [type(item) for item in round_trip(tree, template=deque([Point(0, 0)]))] == [Point] * 5


def test_copy_keeps_classes():
    tree = make_classes()
    copied = copy_tree(tree)
    assert type(copied["p"]) is Point
    assert copied["e"] == tree["e"]
    assert copied["c"] is not tree["c"]
    assert vars(copied["c"]).keys() == vars(tree["c"]).keys()
    assert copied["c"].parts[0] is not tree["c"].parts[0]


def test_attributes_of_ordered_dicts_are_kept():
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    back = round_trip({"m": state})["m"]
    assert back._metadata == state._metadata
    assert type(back._metadata) is OrderedDict
    assert_same(back, state)
    assert_same(copy_tree(state), state)


class ListWithAttribute(list):
    pass


class PlainObject:
    pass


class IntWithUnit(int):
    pass


REFUSED = [
    PlainObject(),
    ListWithAttribute([1]),
    IntWithUnit(3),
    type("D", (dict,), {})(a=1),
    type("P", (Point,), {})(1, 2),
    defaultdict(lambda: 0),
    lambda: 0,
    PlainObject,
    open,
    object(),
    (i for i in range(3)),
    memoryview(b"x"),
    np.ma.masked_array([1, 2], [True, False]),
    np.array([(1, None)], [("a", int), ("b", object)]),
    np.array(["a"], np.dtypes.StringDType()),
    torch.ones(2, 2).to_sparse(),
    torch.empty(2, device="meta"),
    torch.ones(2, requires_grad=True) * 2,
    torch.nn.UninitializedParameter(),
    torch.nn.Linear(1, 1),
]


def refused_id(value):
    return type(value).__name__


@pytest.mark.parametrize("value", REFUSED, ids=refused_id)
@pytest.mark.parametrize("function", [encode, copy_tree])
def test_what_cannot_be_captured_is_refused_with_its_path(function, value):
    if isinstance(value, Point):
        value.note = "lost otherwise"
    with pytest.raises(UnsupportedStateError) as caught:
        function({"a/b": [1, {"deep": value}]})
    assert caught.value.path == "a%2Fb/1/deep"
    assert "a%2Fb/1/deep" in str(caught.value)
    assert type(value).__qualname__ in caught.value.type_name


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_tensor_is_refused():
    with pytest.raises(UnsupportedStateError, match="quantized"):
        encode({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})


def test_a_fresh_process_without_torch_reads_the_same_bits(tmp_path):
    tree = {
        "a": np.array([nan_with_payload(5), -0.0]),
        "u": np.array(["é", "ab\0c"]),
        "t": np.array("2026-01-02", "datetime64[s]"),
        1: [2**90, float("-inf"), ("x", None)],
    }
    encoded = encode(tree)
    np.savez(tmp_path / "leaves.npz", **{path: leaf.data for path, leaf in encoded.leaves.items()})
    index = {path: [leaf.dtype, leaf.shape, leaf.kind] for path, leaf in encoded.leaves.items()}
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "structure.json").write_bytes(encoded.structure)
    program = """
import json, pathlib, sys
sys.modules["torch"] = None
import numpy as np
from simckpt.state import Leaf, decode, encode
folder = pathlib.Path(sys.argv[1])
data = np.load(folder / "leaves.npz")
index = json.loads((folder / "index.json").read_text())
leaves = {path: Leaf(data[path], dtype, tuple(shape), kind) for path, (dtype, shape, kind) in index.items()}
tree = decode(leaves, (folder / "structure.json").read_bytes())
assert list(tree) == ["a", "u", "t", 1], tree
assert tree["a"].view(np.uint64).tolist() == [0x7ff0000000000005, 1 << 63]
assert tree["u"].dtype == "<U4" and tree["u"].tolist() == ["\\xe9", "ab\\0c"]
assert tree["t"].dtype == "<M8[s]" and tree["t"].shape == ()
assert tree[1] == [2**90, float("-inf"), ("x", None)]
again = encode(tree)
assert again.structure == (folder / "structure.json").read_bytes()
assert all(again.leaves[path].data.tobytes() == leaves[path].data.tobytes() for path in leaves)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


def test_import_leaves_torch_alone():
    program = (
        "import sys, simckpt.state; assert not {'torch', 'gymnasium', 'mujoco', 'h5py', 'xxhash'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("numbers", [(-9, 7), (0, 8, 16), (7, 15, 23, -9), (1, 9, 17, 2, 10)], ids=str)
def test_a_small_set_of_numbers_iterates_as_before_whoever_came_first(numbers, kind):
    for order in itertools.permutations(numbers):
        before = kind(order)
        encoded = encode({"set": before})
        assert list(decode(encoded.leaves, encoded.structure)["set"]) == list(before)
