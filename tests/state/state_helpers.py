"""An equality of state trees that owes nothing to simckpt's own comparison, and a round trip."""

import math
import struct
from collections import OrderedDict, defaultdict, deque

import numpy as np
import torch

from simckpt.state import ObjectState, decode, encode


def round_trip(tree, template=None):
    encoded = encode(tree)
    return decode(encoded.leaves, encoded.structure, template=template)


def tensor_bytes(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return b""
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def assert_same_values(a, b):
    """Asserts equal bits of two arrays, field by field: padding is no value."""
    if a.dtype.names:
        for name in a.dtype.names:
            assert_same_values(a[name], b[name])
    elif a.dtype.char in "gG":
        assert repr(a.tolist()) == repr(b.tolist())
    else:
        assert a.tobytes() == b.tobytes()


def assert_same(a, b, seen=None):
    """Asserts equal types, values and bits, and that the same objects stand for the same objects."""
    seen = {} if seen is None else seen
    assert type(a) is type(b), (a, b)
    if isinstance(a, (dict, list, set, deque, np.ndarray, torch.Tensor, ObjectState, bytearray)):
        if id(a) in seen:
            assert seen[id(a)] is b, "another object where the same one was"
            return
        assert not any(b is other for other in seen.values()), "the same object where another one was"
        seen[id(a)] = b
    if isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    elif isinstance(a, complex):
        assert struct.pack("<2d", a.real, a.imag) == struct.pack("<2d", b.real, b.imag)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.hasobject:
            for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True):
                assert_same(x, y, seen)
        else:
            assert_same_values(a, b)
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype
        assert_same_values(np.asarray(a), np.asarray(b))
        if isinstance(a, (str, bytes)):
            assert list(a) == list(b)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert tensor_bytes(a) == tensor_bytes(b)
    elif isinstance(a, dict):
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory
        assert len(a) == len(b)
        for (key_a, child_a), (key_b, child_b) in zip(a.items(), b.items(), strict=True):
            assert_same(key_a, key_b, seen)
            assert_same(child_a, child_b, seen)
        if isinstance(a, OrderedDict):
            assert_same(dict(vars(a)), dict(vars(b)), seen)
    elif isinstance(a, (list, tuple, deque)):
        assert len(a) == len(b)
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y, seen)
    elif isinstance(a, ObjectState):
        assert a.type_name == b.type_name
        assert_same(a.attributes, b.attributes, seen)
        assert_same(a.items, b.items, seen)
    else:
        assert a == b or (a != a and b != b)


def nan_with_payload(payload):
    value = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000000 | payload))[0]
    assert math.isnan(value)
    return value
