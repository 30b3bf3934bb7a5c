import hashlib
import subprocess
import sys

import h5py
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from storage_helpers import assert_same, checkpoint_folder, components, leaf, new_store, save

from simckpt.errors import FormatError, InvalidNameError
from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, layout, state_file
from simckpt.storage.layout import Slot

DTYPES = ["?", "<i1", "<u2", "<i4", ">i8", "<f2", "<f4", ">f4", "<f8", ">f8", "<c8", "<c16", "S5"]

LAY_OUT = """
import hashlib, numpy as np
from simckpt.storage.layout import Slot, lay_out
slots = [Slot(f"g{n % 3}/leaf{n}", np.dtype("f4"), (n, 2), (("kind", "numpy"),)) for n in range(50)]
found = lay_out(slots, groups={"": (("format", "test"),)})
print(hashlib.sha256(repr((found.size, found.rest, found.offsets)).encode()).hexdigest())
"""


def test_the_layout_is_the_same_in_every_process():
    found = {
        subprocess.run([sys.executable, "-c", LAY_OUT], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1


def test_rest_and_payloads_cover_every_byte_once():
    slots = [Slot(f"a/b{n}", np.dtype("f8"), (n, 3)) for n in range(40)] + [Slot("a/scalar", np.dtype("i4"), ())]
    found = layout.lay_out(slots, groups={"": (("text", "x" * 3000),)})
    sizes = {slot.path: slot.dtype.itemsize * int(np.prod(slot.shape)) for slot in slots}
    spans = [(offset, offset + len(data)) for offset, data in found.rest]
    spans += [(offset, offset + sizes[path]) for path, offset in found.offsets.items() if offset is not None]
    position = 0
    for start, stop in sorted(spans):
        assert start == position
        position = stop
    assert position == found.size
    assert found.rest_digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(b''.join(data for _, data in found.rest))}"


def test_empty_datasets_have_no_offset():
    found = layout.lay_out([Slot("a/empty", np.dtype("f4"), (0, 5)), Slot("a/one", np.dtype("f4"), (1,))], groups={})
    assert found.offsets["a/empty"] is None
    assert found.offsets["a/one"] is not None


def test_the_second_save_of_a_tree_makes_no_call_to_hdf5(tmp_path, monkeypatch):
    store = new_store(tmp_path / "store")
    save(store, 0)
    for module, name in [(h5py.h5f, "create"), (h5py.h5d, "create"), (h5py.h5g, "create"), (h5py.h5p, "create")]:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("libhdf5 was called"))
    save(store, 1)
    assert_same(store.read("ant-ppo", 2), components(1))


def test_equal_states_give_equal_files(tmp_path):
    found = set()
    for name in ("one", "two"):
        store = new_store(tmp_path / name)
        save(store, 3)
        layout._cache.clear()
        found.add(hashlib.sha256((checkpoint_folder(store) / "state.h5").read_bytes()).hexdigest())
    assert len(found) == 1


def test_viewers_see_whole_typed_arrays_that_explain_themselves(tmp_path):
    store = new_store(tmp_path / "store")
    expected = components(5)
    attributes = {"envs/physics/qpos": {"description": "positions [m, rad]"}, "envs/physics": {"description": "ähm"}}
    store.commit("ant-ppo", CommitDraft(None, 5), expected, attributes=attributes)
    with h5py.File(checkpoint_folder(store) / "state.h5") as file:
        for component, encoded in expected.items():
            for key, wanted in encoded.leaves.items():
                found = file[component][key][...]
                assert (found.dtype, found.shape) == (wanted.data.dtype, wanted.data.shape)
                assert found.tobytes() == wanted.data.tobytes()
            assert bytes(file[component]["_tree"][...]).rstrip() == encoded.structure
        assert file["envs/physics/qpos"].attrs["description"].decode() == "positions [m, rad]"
        assert file["envs/physics"].attrs["description"].decode() == "ähm"
        assert file["agent/0/weight"].attrs["dtype"] == b"bfloat16"
        assert "dtype" not in file["envs/physics/qpos"].attrs
        assert file.attrs["format"] == b"simckpt state"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.sampled_from(DTYPES).flatmap(lambda code: hnp.arrays(code, hnp.array_shapes(min_dims=0, min_side=0))),
        max_size=5,
    )
)
def test_arrays_of_every_stored_dtype_come_back_bit_for_bit(tmp_path_factory, arrays):
    store = new_store(tmp_path_factory.mktemp("store"))
    leaves = {f"leaf{n}": Leaf(array, array.dtype.str, array.shape, "numpy") for n, array in enumerate(arrays)}
    expected = {"state": Encoded(leaves, b"{}")}
    store.commit("ant-ppo", CommitDraft(None, 0), expected)
    assert_same(store.read("ant-ppo", 1), expected)
    with h5py.File(checkpoint_folder(store) / "state.h5") as file:
        for key, wanted in leaves.items():
            assert file["state"][key][...].tobytes() == wanted.data.tobytes()


def test_arrays_in_any_memory_order_are_saved_by_their_values(tmp_path):
    store = new_store(tmp_path / "store")
    base = np.arange(24.0).reshape(4, 6)
    views = {"turned": base.T, "strided": base[::2, ::3], "reversed": base[::-1], "fortran": np.asfortranarray(base)}
    store.commit("ant-ppo", CommitDraft(None, 0), {"a": Encoded({k: leaf(v) for k, v in views.items()}, b"{}")})
    for key, found in store.read("ant-ppo", 1)["a"].leaves.items():
        assert found.data.tolist() == views[key].tolist()


def test_the_structure_keeps_its_size_when_a_number_grows():
    sizes = {len(state_file.pad(b'{"step":%d}' % step)) for step in (0, 999, 10**6, 10**18)}
    assert sizes == {256}
    for length in (0, 1, 255, 256, 257, 5000, 100_000):
        padded = len(state_file.pad(b"x" * length))
        assert length <= padded <= max(length * 1.125, length + 256)


@pytest.mark.parametrize(
    "leaves",
    [
        {"a": leaf(np.zeros(1)), "a/b": leaf(np.zeros(1))},
        {"_tree": leaf(np.zeros(1))},
        {"_tree/a": leaf(np.zeros(1))},
        {"a//b": leaf(np.zeros(1))},
        {"../a": leaf(np.zeros(1))},
        {"": leaf(np.zeros(1))},
        {"a": leaf(np.array([None], object), dtype="object")},
        {"a": leaf(np.zeros(1, "f4,i4"), dtype="record")},
        {"a": leaf(np.zeros(1, "<U3"), dtype="<U3")},
    ],
    ids=["leaf below leaf", "structure", "below structure", "empty part", "dots", "empty", "object", "record", "text"],
)
def test_leaves_that_no_file_can_hold_are_refused_and_leave_nothing(tmp_path, leaves):
    store = new_store(tmp_path / "store")
    with pytest.raises(FormatError):
        store.commit("ant-ppo", CommitDraft(None, 0), {"a": Encoded(leaves, b"{}")})
    assert store.records("ant-ppo") == []
    assert list((store.path / "tmp").iterdir()) == []


def test_a_component_without_a_name_is_refused(tmp_path):
    store = new_store(tmp_path / "store")
    with pytest.raises(InvalidNameError):
        store.commit("ant-ppo", CommitDraft(None, 0), {"": Encoded({}, b"{}")})


def test_components_and_deep_paths_of_any_name_come_back(tmp_path):
    store = new_store(tmp_path / "store")
    deep = "/".join(["part"] * 60)
    expected = {name: Encoded({deep: leaf(np.arange(3))}, b"{}") for name in ("my/agent", "...", "ü", "a b", "_tree")}
    store.commit("ant-ppo", CommitDraft(None, 0), expected)
    assert_same(store.read("ant-ppo", 1), expected)
    assert store.index("ant-ppo", 1).components == tuple(expected)
