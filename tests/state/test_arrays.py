"""Every dtype, shape and memory order keeps its bits."""

import sys

import numpy as np
import pytest
import torch
from state_helpers import assert_same, round_trip

from simckpt.errors import FormatError, StateMismatchError, UnsupportedFormatError
from simckpt.state import Leaf, copy_tree, decode, encode, leaf_value

HDF5_KINDS = "biuf"


def bits(dtype, shape):
    """Returns an array of random bits: NaNs of all payloads, denormals and -0.0 among them."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = np.random.default_rng(len(shape) + dtype.itemsize).bytes(count * dtype.itemsize)
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    if dtype.kind == "U":
        raw = np.frombuffer(raw, np.uint8)[: count * dtype.itemsize // 4].astype(dtype.str[0] + "u4").tobytes()
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


NUMBERS = ["?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "F", "D"]
SWAPPED = [">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16"]
TEXT = ["<U5", ">U3", "S3", "S1", "V7"]
TIMES = ["M8[ns]", "m8[D]", ">M8[us]", "M8[25s]", "M8", "m8"]
RECORDS = [
    [("a", "<f8"), ("b", ">i2", (2, 3)), ("c", "S3")],
    [("n", [("x", "?"), ("y", "<M8[s]")]), ("z", "<U2")],
    [(("title", "t"), "<f4")],
    {"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 24},
]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4), (1,)])
@pytest.mark.parametrize("dtype", [*NUMBERS, *SWAPPED, *TEXT, *TIMES, *RECORDS], ids=str)
def test_array_comes_back(dtype, shape):
    array = np.zeros(shape, dtype) if np.dtype(dtype).fields else bits(dtype, shape)
    if array.dtype.fields and array.size:
        array.reshape(-1)[0] = np.ones(1, dtype)[0]
    encoded = encode({"x": array})
    leaf = encoded.leaves["x"]
    assert leaf.shape == shape
    assert leaf.data.flags.c_contiguous
    assert leaf.data.dtype.kind in HDF5_KINDS
    assert leaf.data.dtype.itemsize <= 8
    assert_same(decode(encoded.leaves, encoded.structure)["x"], array)
    assert_same(copy_tree(array), array)


def test_stored_form_is_what_the_format_says():
    leaf = encode({"x": np.array(["ab", "é"], "<U5")}).leaves["x"]
    assert (leaf.dtype, leaf.data.dtype, leaf.data.tolist()) == (
        "<U5",
        np.uint32,
        [[97, 98, 0, 0, 0], [233, 0, 0, 0, 0]],
    )
    leaf = encode({"x": np.array(["1970-01-02"], "M8[s]")}).leaves["x"]
    assert (leaf.dtype, leaf.data.dtype, leaf.data.tolist()) == ("datetime64[s]", np.int64, [86400])
    leaf = encode({"x": np.array([1 + 2j])}).leaves["x"]
    assert (leaf.dtype, leaf.data.dtype, leaf.data.tolist()) == ("complex128", np.float64, [[1, 2]])
    leaf = encode({"x": np.array([True, False])}).leaves["x"]
    assert (leaf.dtype, leaf.data.dtype) == ("bool", np.bool_)
    leaf = encode({"x": np.array([1], ">f4")}).leaves["x"]
    assert (leaf.dtype, leaf.data.dtype.str, leaf.kind) == (">f4", ">f4", "numpy")


def test_extended_precision_keeps_its_value():
    array = np.array([1, -0.0, np.nan], np.longdouble) / 3
    for value in (array, array + 1j * array, array.reshape(3, 1)[::2]):
        back = round_trip(value)
        assert back.dtype == value.dtype
        assert str(back.tolist()) == str(value.tolist())
        assert np.array_equal(back, value, equal_nan=True)
        assert encode(value).leaves["value"].data.dtype == np.uint8


def test_padding_does_not_reach_the_file():
    padded = np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 24})
    nested = np.dtype([("x", padded, (2,)), ("y", np.longdouble)])
    stored = []
    for filling in (b"\0", b"\xff"):
        array = np.frombuffer(bytearray(filling * nested.itemsize * 3), nested)
        array["x"]["a"], array["x"]["b"], array["y"] = 1, 2.5, 3
        stored += [encode({"x": array}).leaves["x"].data.tobytes()]
    assert stored[0] == stored[1]


def test_extended_precision_of_another_machine_is_refused():
    leaf = Leaf(np.zeros((2, 16), np.uint8), "longdouble[112]", (2,), "numpy")
    with pytest.raises(UnsupportedFormatError, match="long double"):
        leaf_value(leaf)


def test_strings_without_characters():
    for dtype in ("U0", "S0", "V0"):
        array = np.ndarray((2,), dtype)
        back = round_trip(array)
        assert (back.dtype, back.shape) == (array.dtype, (2,))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::2],
        lambda a: a[:, ::-1],
        lambda a: np.asfortranarray(a),
        lambda a: np.broadcast_to(a[0], (3, a.shape[1])),
        lambda a: a[1:, 2:],
        lambda a: np.frombuffer(a.tobytes(), a.dtype),
    ],
)
@pytest.mark.parametrize("dtype", ["f8", "<U2", "M8[s]", "c16", ">i4"])
def test_memory_order_does_not_matter(dtype, view):
    array = view(bits(dtype, (4, 6)))
    for back in (round_trip(array), copy_tree(array)):
        assert back.flags.writeable
        assert_same(back, array)


def test_restored_array_is_writable_even_from_read_only_bytes():
    leaf = Leaf(np.frombuffer(b"\0" * 16, np.float64), "float64", (2,), "numpy")
    array = leaf_value(leaf)
    array[0] = 1
    assert leaf.data[0] == 0


def test_zero_dimensional_array_is_no_scalar():
    back = round_trip([np.array(1.5), np.float64(1.5), 1.5])
    assert [type(value) for value in back] == [np.ndarray, np.float64, float]
    assert back[0].shape == ()


def test_memory_map_becomes_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.int32, "w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    assert_same(round_trip({"x": mapped})["x"], np.array([1, 2, 3], np.int32))


def tensor_bits(dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(count).bytes(count)
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


TENSORS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
TENSORS += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
TENSORS += [getattr(torch, name) for name in dir(torch) if name.startswith(("float8", "float4"))]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", TENSORS, ids=str)
def test_tensor_comes_back(dtype, shape):
    tensor = tensor_bits(dtype, shape)
    encoded = encode({"x": tensor})
    leaf = encoded.leaves["x"]
    assert (leaf.dtype, leaf.shape, leaf.kind) == (str(dtype).removeprefix("torch."), shape, "torch")
    assert leaf.data.dtype.kind in HDF5_KINDS
    assert_same(decode(encoded.leaves, encoded.structure)["x"], tensor)
    assert_same(copy_tree(tensor), tensor)


def test_tensor_views_and_lazy_conjugates_keep_their_values():
    base = tensor_bits(torch.complex64, (3, 4))
    for tensor in (base.t(), base[:, ::2], base.conj(), base.real, base.imag, base.conj().imag, base[0].expand(2, 4)):
        for back in (round_trip([tensor])[0], copy_tree([tensor])[0]):
            assert back.dtype == tensor.dtype
            assert torch.equal(back.nan_to_num(), tensor.nan_to_num())
    negative = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    assert negative.is_neg()
    assert round_trip(negative).tolist() == [-1, -1]


def test_parameters_and_gradient_flags_come_back():
    tree = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "r": torch.ones(2, requires_grad=True),
        "t": torch.ones(2),
    }
    for back in (round_trip(tree), copy_tree(tree)):
        assert_same(back, tree)


def test_leaf_that_contradicts_itself_is_a_format_error():
    good = Leaf(np.zeros((2, 3), np.uint32), "<U3", (2,), "numpy")
    assert leaf_value(good).shape == (2,)
    for bad in (
        Leaf(good.data, "<U4", (2,), "numpy"),
        Leaf(good.data, "<U3", (3,), "numpy"),
        Leaf(good.data, "float64", (2, 3), "numpy"),
        Leaf(good.data, "O", (2, 3), "numpy"),
        Leaf(good.data, "object", (2, 3), "numpy"),
        Leaf(good.data, "i4,O", (2, 3), "numpy"),
        Leaf(good.data, '[["a","|O"]]', (2, 3), "numpy"),
        Leaf(good.data, "[" * 5000, (2, 3), "numpy"),
        Leaf(good.data, "<U999999999", (2,), "numpy"),
        Leaf(good.data, "datetime64[xyz]", (2, 3), "numpy"),
        Leaf(good.data, "float32", (2, 3), "torch"),
        Leaf(good.data, "float32", (2, 3), "nobody"),
        Leaf(good.data, "uint32", (2, 3), "bytes"),
        Leaf(good.data, "load", (2, 3), "torch"),
    ):
        with pytest.raises(FormatError):
            leaf_value(bad)


class OwnArray:
    """An array library of its own, which speaks DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return Namespace

    @property
    def dtype(self):
        return self.array.dtype


class Namespace:
    widest = np.float64

    @classmethod
    def asarray(cls, obj, copy=None):
        array = np.array(obj.array if isinstance(obj, OwnArray) else obj)
        return OwnArray(array.astype(cls.widest))


def test_array_of_any_library_is_written_and_comes_back_through_the_live_one():
    tree = {"x": OwnArray(np.arange(3.0))}
    encoded = encode(tree)
    assert encoded.leaves["x"].kind == "dlpack"
    assert_same(decode(encoded.leaves, encoded.structure)["x"], np.arange(3.0))
    back = decode(encoded.leaves, encoded.structure, template={"x": OwnArray(np.zeros(3))})
    assert type(back["x"]) is OwnArray
    assert_same(back["x"].array, np.arange(3.0))
    copied = copy_tree(tree)["x"]
    assert type(copied) is OwnArray
    assert not np.shares_memory(copied.array, tree["x"].array)


def test_array_library_that_narrows_what_it_is_given_is_a_mismatch(monkeypatch):
    encoded = encode(OwnArray(np.arange(3.0)))
    monkeypatch.setattr(Namespace, "widest", np.float32)
    with pytest.raises(StateMismatchError, match="float32 of a saved float64"):
        decode(encoded.leaves, encoded.structure, template=OwnArray(np.zeros(3)))


class FakeKey:
    """What a typed PRNG key of JAX looks like from outside; JAX itself is not among the test dependencies."""

    dtype = "key<fry>"

    def __init__(self, data):
        self.data = data


FakeKey.__module__ = "jax._src.prng"


def test_jax_keys_are_written_by_their_data_and_wrapped_again(monkeypatch):
    class FakeRandom:
        key_data = staticmethod(lambda key: key.data)
        key_impl = staticmethod(lambda key: "threefry2x32")

        @staticmethod
        def wrap_key_data(data, impl):
            assert impl == "threefry2x32"
            return FakeKey(np.array(data))

    monkeypatch.setitem(sys.modules, "jax", type("jax", (), {"random": FakeRandom}))
    encoded = encode({"key": FakeKey(np.array([1, 2], np.uint32))})
    leaf = encoded.leaves["key"]
    assert (leaf.dtype, leaf.kind, leaf.data.tolist()) == ("key<threefry2x32>", "jax.key", [1, 2])
    assert decode(encoded.leaves, encoded.structure)["key"].data.tolist() == [1, 2]
    monkeypatch.delitem(sys.modules, "jax")
    with pytest.raises(UnsupportedFormatError, match="jax"):
        decode(encoded.leaves, encoded.structure)
