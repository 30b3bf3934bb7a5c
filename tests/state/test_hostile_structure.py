"""A structure from a stranger gives a FormatError: no crash, no hang, no code, no memory beyond its own size."""

import json
import random

import numpy as np
import pytest
import torch

from simckpt.errors import FormatError, UnsupportedFormatError
from simckpt.state import Leaf, ObjectState, decode, encode

LEAVES = {
    "x": Leaf(np.zeros(3), "float64", (3,), "numpy"),
    "t": Leaf(np.zeros(3, np.float32), "float32", (3,), "torch"),
}


def structure(root, *nodes, **more):
    return json.dumps({"tree": 1, "root": root, "nodes": list(nodes), **more}).encode()


NOT_STRUCTURES = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b'{"tree":1,"nodes":[]}',
    b'{"tree":1,"root":1,"nodes":{}}',
    b'{"tree":"1","root":1,"nodes":[]}',
    b'{"tree":0,"root":1,"nodes":[]}',
    b'{"tree":1,"root":NaN,"nodes":[]}',
    b'{"tree":1,"root":Infinity,"nodes":[]}',
    b'{"tree":1,"root":' + b"9" * 5000 + b',"nodes":[]}',
    b"[" * 200_000,
    b'{"tree":1,"root":' + b"[" * 100_000 + b"]" * 100_000 + b',"nodes":[]}',
    b'{"tree":1,"root":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b',"nodes":[]}',
]

ROOT = {"node": 0}
BAD = [
    structure({"node": 1}, ["list", []]),
    structure({"node": -1}, ["list", []]),
    structure({"node": True}, ["list", []], ["list", []]),
    structure({"node": "0"}, ["list", []]),
    structure({"node": 0.0}, ["list", []]),
    structure({"node": None}, ["list", []]),
    structure({"node": 10**30}, ["list", []]),
    structure({"leaf": "y"}),
    structure({"leaf": 0}),
    structure({"leaf": ["x"]}),
    structure({"leaf": {}}),
    structure({"marked": "x"}),
    structure({"marked": ["x", 1]}),
    structure({"marked": ["y", {"parameter": True, "requires_grad": True}]}),
    structure({"marked": ["t", {"parameter": True}]}),
    structure({"marked": ["t", []]}),
    structure({"same": 1}),
    structure({}),
    structure({"unknown": 1}),
    structure({"float": "00", "int": "0"}),
    structure([1]),
    structure(ROOT, "list"),
    structure(ROOT, None),
    structure(ROOT, ["list"]),
    structure(ROOT, ["list", {}]),
    structure(ROOT, ["list", [[1]]]),
    structure(ROOT, ["list", [], None, None]),
    structure(ROOT, [["list"], []]),
    structure(ROOT, ["builtins.eval", ["1"]]),
    structure(ROOT, ["tuple", [ROOT]]),
    structure(ROOT, ["frozenset", [ROOT]]),
    structure(ROOT, ["tuple", [{"node": 1}]], ["tuple", [ROOT]]),
    structure(ROOT, ["set", [{"node": 1}]], ["list", []]),
    structure(ROOT, ["set", [1, True]]),
    structure(ROOT, ["set", [ROOT]]),
    structure(ROOT, ["dict", ["a"]]),
    structure(ROOT, ["dict", [{"node": 1}, 2]], ["list", []]),
    structure(ROOT, ["dict", ["a", 1, "a", 2]]),
    structure(ROOT, ["dict", [1, 1, True, 2]]),
    structure(ROOT, ["dict", [ROOT, 2]]),
    structure(ROOT, ["defaultdict", [], "eval"]),
    structure(ROOT, ["defaultdict", [], ["list"]]),
    structure(ROOT, ["OrderedDict", [], "attributes"]),
    structure(ROOT, ["OrderedDict", [1], "attributes"]),
    structure(ROOT, ["OrderedDict", [{"node": 1}], "attributes"], ["dict", ["__class__", 1]]),
    structure(ROOT, ["OrderedDict", [{"node": 1}], "attributes"], ["dict", [1, 1]]),
    structure(ROOT, ["deque", []]),
    structure(ROOT, ["deque", [], {"maxlen": "x"}]),
    structure(ROOT, ["deque", [], {"maxlen": -1}]),
    structure(ROOT, ["list", [{"leaf": "t"}], {"packed": True}]),
    structure(ROOT, ["list", [1, 2], {"packed": True}]),
    structure(ROOT, ["slice", [1]]),
    structure(ROOT, ["bytearray", [10**12]]),
    structure(ROOT, ["bytearray", [None]]),
    structure(ROOT, ["bytearray", []]),
    structure(ROOT, ["object", []]),
    structure(ROOT, ["object", [], {"type": 1}]),
    structure(ROOT, ["object", [], {"type": "x", "items": True}]),
    structure(ROOT, ["object", [1, 2], {"type": "x"}]),
    structure(ROOT, ["object", ["a"], {"type": "x"}]),
    structure(ROOT, ["namedtuple", [1]]),
    structure(ROOT, ["dataclass", [1]]),
    structure(ROOT, ["dataclass", [1], {"class": "x"}]),
    structure(ROOT, ["enum", []]),
    structure(ROOT, ["enum", [], {"class": "x", "name": "y"}]),
    structure(ROOT, ["object array", []]),
    structure(ROOT, ["object array", [1], [2]]),
    structure(ROOT, ["object array", [], [10**9, 10**9]]),
    structure(ROOT, ["object array", [], [0, 10**30]]),
    structure(ROOT, ["object array", [1, 1], [-1, -2]]),
    structure(ROOT, ["object array", [], [0] * 100]),
    structure(ROOT, ["generator", []]),
    structure(ROOT, ["generator", [1]]),
    structure(ROOT, ["generator", [1], {"of": "bit generator"}]),
    structure(ROOT, ["generator", [{"node": 1}]], ["dict", ["type", "numpy.Generator", "bit_generator", "eval"]]),
    structure({"int": "12"[:0]}),
    structure({"int": 12}),
    structure({"int": "0xzz"}),
    structure({"float": "7ff8"}),
    structure({"float": "z" * 16}),
    structure({"str": "00"}),
    structure({"str": "ffffffff"}),
    structure({"bytes": "!"}),
    structure({"bytes": 5}),
    structure({"complex": ["0" * 16]}),
    structure({"numpy": ["float64", "00"]}),
    structure({"numpy": ["object", "00" * 8]}),
    structure({"numpy": ["O", "00" * 8]}),
    structure({"numpy": ["<V999999999", ""]}),
    structure({"numpy": ["|V999999999", ""]}),
    structure({"numpy": ["f8,O", ""]}),
    structure({"numpy": [1, ""]}),
    structure({"numpy": "x"}),
    structure({"numpy.dtype": "O"}),
    structure({"numpy.dtype": '[["a","<f8",[99999999999]]]'}),
    structure({"numpy.dtype": '[["a","<f8"],["a","<f8"]]'}),
    structure({"numpy.dtype": "[" * 3000 + '"<f8"' + "]" * 3000}),
    structure({"numpy.str": 4}),
    structure({"range": [1, 2]}),
    structure({"range": [1, 2, 0]}),
    structure({"range": [1, 2, 1.5]}),
    structure({"torch.dtype": "load"}),
    structure({"torch.dtype": "nothing"}),
    structure({"torch.dtype": "__class__"}),
    structure({"torch.layout": "float32"}),
    structure({"torch.device": "nowhere"}),
    structure({"torch.device": 10**30}),
    structure({"torch.Size": [1.5]}),
    structure({"torch.Size": 3}),
]


@pytest.mark.parametrize("index", range(len(NOT_STRUCTURES)))
def test_what_is_no_structure_is_a_format_error(index):
    with pytest.raises(FormatError):
        decode(LEAVES, NOT_STRUCTURES[index])


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:90].decode())
def test_contradiction_is_a_format_error(bad):
    with pytest.raises(FormatError):
        decode(LEAVES, bad)


def test_structure_of_a_newer_version_says_so():
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        decode({}, structure(1, tree=2))


def test_container_that_nobody_registered_is_named():
    with pytest.raises(FormatError, match="my container"):
        decode({}, structure(ROOT, ["my container", []]))


def test_deep_nesting_by_reference_is_built_without_recursion():
    depth = 20_000
    nodes = [["tuple", [{"node": index + 1}]] for index in range(depth)] + [["tuple", []]]
    tree = decode({}, structure(ROOT, *nodes))
    for _ in range(depth):
        (tree,) = tree
    assert tree == ()


def test_shared_nodes_do_not_multiply():
    nodes = [["list", [{"node": index + 1}] * 10] for index in range(60)] + [["list", []]]
    tree = decode({}, structure(ROOT, *nodes))
    assert tree[0] is tree[9]


def test_random_damage_never_gives_anything_but_a_format_error():
    tree = {
        "a": [1, 2.5, None, (3, "x"), {"k": np.zeros(3)}],
        1: {frozenset({1, 2}), "s"},
        "t": torch.nn.Parameter(torch.ones(2)),
        "o": ObjectState("m.C", {"x": b"abc", "g": np.random.default_rng(0)}, items=[1.0] * 70),
        "d": np.dtype([("a", "<f4")]),
        "n": np.float32(1),
    }
    tree["self"] = tree
    encoded = encode(tree)
    draw = random.Random(0)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(encoded.structure)
        for _ in range(draw.choice([1, 1, 2, 5])):
            place = draw.randrange(len(damaged))
            action = draw.randrange(3)
            if action == 0:
                damaged[place] = draw.choice(b'0123456789[]{}",:-.eatrulsnf')
            elif action == 1:
                del damaged[place : place + draw.randrange(1, 8)]
            else:
                other = draw.randrange(len(damaged))
                damaged[place:place] = damaged[other : other + draw.randrange(1, 20)]
        try:
            decode(encoded.leaves, bytes(damaged))
        except FormatError:
            refused += 1
    assert refused > 1000


def shared_tuples(levels: int) -> list:
    """Nodes from number 1 on, each of which holds the next one ten times."""
    return [["tuple", [{"node": number + 2}] * 10] for number in range(levels)] + [["tuple", []]]


@pytest.mark.parametrize(
    "first",
    [
        ["set", [{"node": 1}]],
        ["frozenset", [{"node": 1}]],
        ["dict", [{"node": 1}, None]],
        ["Counter", [{"node": 1}, 1]],
        ["dataclass", [{"node": 1}, 1], {"class": "x"}],
        ["object", [{"node": 1}, 1], {"type": "x"}],
    ],
    ids=lambda first: first[0],
)
def test_a_key_whose_hash_would_never_end_is_refused(first):
    with pytest.raises(FormatError, match="too large to be hashed"):
        decode({}, structure(ROOT, first, *shared_tuples(60)))


def test_keys_that_are_each_large_are_refused_together():
    # 20,000 keys of 1,111 parts: each is fine
    keys = [["tuple", [number, {"node": 20_001}]] for number in range(20_000)]
    nodes = [["set", [{"node": number + 1} for number in range(20_000)]], *keys]
    levels = [["tuple", [{"node": 20_002 + level}] * 10] for level in range(3)]
    with pytest.raises(FormatError, match="too large to be hashed"):
        decode({}, structure(ROOT, *nodes, *levels, ["tuple", []]))


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_keys_of_one_hash_are_refused(kind):
    # Python hashes integers modulo 2**61 - 1
    keys = [{"int": hex(number * (2**61 - 1))} for number in range(1, 1500)]
    values = keys if kind == "set" else [part for key in keys for part in (key, None)]
    with pytest.raises(FormatError, match="1499 keys of container 0 have the same hash"):
        decode({}, structure(ROOT, [kind, values]))
    assert len(decode({}, structure(ROOT, [kind, values[:1000]]))) == (1000 if kind == "set" else 500)


def test_large_tuples_and_many_keys_of_their_own_are_no_bomb():
    tree = {"t": tuple([None, "x"] * 50_000), "s": {(number, str(number)) for number in range(5000)}}
    encoded = encode(tree)
    assert decode(encoded.leaves, encoded.structure) == tree


@pytest.mark.parametrize("depth", range(880, 1000, 20))
@pytest.mark.parametrize("where", ["meta", "atom", "value"])
def test_values_as_deep_as_json_can_be_are_a_format_error(depth, where):
    deep = "[" * depth + "]" * depth
    text = {
        "meta": f'{{"tree":1,"root":{{"node":0}},"nodes":[["deque",[],{deep}]]}}',
        "atom": f'{{"tree":1,"root":{{"int":{deep}}},"nodes":[]}}',
        "value": f'{{"tree":1,"root":{deep},"nodes":[]}}',
    }[where]
    with pytest.raises(FormatError):
        decode({}, text.encode())
