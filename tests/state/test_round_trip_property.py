"""Any tree that the strategies can make comes back bit for bit, from a file's form and from a copy."""

from collections import Counter, OrderedDict, deque

import hypothesis.extra.numpy as numpy_strategies
import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from state_helpers import assert_same

from simckpt.state import Encoded, ObjectState, copy_tree, decode, differences, encode

text = st.text(st.characters(exclude_categories=())) | st.sampled_from(["", ".", "..", "_tree", "a/b", "%2F", "\0"])
numbers = st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.complex_numbers()
atoms = st.none() | st.booleans() | numbers | text | st.binary(max_size=400)
dtypes = (
    numpy_strategies.scalar_dtypes()
    | numpy_strategies.byte_string_dtypes(min_len=1)
    | numpy_strategies.unicode_string_dtypes(min_len=1)
    | numpy_strategies.array_dtypes(allow_subarrays=True)
)
arrays = numpy_strategies.arrays(dtypes, numpy_strategies.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
scalars = numpy_strategies.arrays(numpy_strategies.scalar_dtypes(), ()).map(lambda array: array[()])
FLOATS = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.float32,
    torch.complex64,
    torch.int64,
]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(FLOATS))
    count = draw(st.integers(0, 6))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(draw(st.sampled_from([(count,), (count, 1), (1, count, 1)])))
    if dtype.is_floating_point and dtype.itemsize > 1 and draw(st.booleans()):
        return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(max_size=9),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def containers(children):
    return (
        st.lists(children, max_size=5)
        | st.lists(children, max_size=4).map(tuple)
        | st.lists(children, max_size=4).map(lambda items: deque(items, maxlen=9))
        | st.dictionaries(keys, children, max_size=5)
        | st.dictionaries(text, children, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
        | st.dictionaries(text, children, max_size=4).map(lambda attributes: ObjectState("m.C", attributes))
        | st.tuples(children, st.dictionaries(text, children, max_size=3)).map(
            lambda parts: ObjectState("m.D", parts[1], items=parts[0])
        )
        | children.map(lambda child: [child, child, {"again": child}])
        | st.lists(st.floats(), min_size=60, max_size=70)
    )


trees = st.recursive(atoms | arrays | scalars | tensors(), containers, max_leaves=20)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trees)
@example({"a": {"": np.zeros(1)}, "a/": np.zeros(1)})
def test_every_tree_comes_back_bit_for_bit(tree):
    encoded = encode(tree)
    # what lies on a disk shares no memory with anything
    stored = Encoded(dict(encoded.leaves), bytes(encoded.structure))
    back = decode(stored.leaves, stored.structure)
    assert_same(back, tree)
    copied = copy_tree(tree)
    assert_same(copied, tree)
    assert not differences(tree, back)
    assert not differences(tree, copied)
    again = encode(back)
    assert again.structure == encoded.structure
    assert list(again.leaves) == list(encoded.leaves)
    for path, leaf in again.leaves.items():
        assert (leaf.dtype, leaf.shape, leaf.kind) == (
            encoded.leaves[path].dtype,
            encoded.leaves[path].shape,
            encoded.leaves[path].kind,
        )
        assert leaf.data.tobytes() == encoded.leaves[path].data.tobytes()
    groups = {path[:i] for path in encoded.leaves for i, character in enumerate(path) if character == "/"}
    assert not groups & set(encoded.leaves)
