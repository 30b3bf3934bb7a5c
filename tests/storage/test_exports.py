"""Exported files as other tools see them, and what files from strangers may do."""

import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import simckpt
from simckpt import state
from simckpt.errors import ConfigurationError, ExportNotFoundError, FormatError, StorageError
from simckpt.state import LogColumn
from simckpt.storage import CommitDraft, exports, hdf5_export, processes
from simckpt.storage.copying import source_of

FORMS = ["h5", "pt", "safetensors"]


def committed(path: Path, trees: dict) -> simckpt.Checkpoint:
    """A checkpoint of a store, made without a training loop."""
    store = simckpt.Store(path)
    with store.start("a") as run:
        run.configure({"learning_rate": 3e-4})
        draft = CommitDraft(parent=None, step=2, metrics={"eval/return": 1.5}, start=run.start_id())
        run._files.commit("a", draft, {name: state.encode(tree) for name, tree in trees.items()})
    return store.run("a").latest()


def bits(checkpoint: simckpt.Checkpoint) -> dict:
    return {
        name: (
            each.structure,
            [(key, leaf.dtype, leaf.shape, leaf.kind, leaf.data.tobytes()) for key, leaf in each.leaves.items()],
        )
        for name, each in checkpoint.read().items()
    }


def many_types() -> dict:
    weight = torch.linspace(-1, 1, 12).reshape(4, 3)
    return {
        "agent": {
            "weight": weight,
            "tied": weight,
            "bfloat16": torch.linspace(-1, 1, 5).bfloat16(),
            "float8": torch.linspace(-1, 1, 3).to(torch.float8_e4m3fn),
            "complex": torch.tensor([1 + 2j, complex(0.0, float("nan"))], dtype=torch.complex64),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3.5),
            "mask": torch.tensor([True, False]),
        },
        "arrays": {
            "uint16": np.arange(5, dtype=np.uint16),
            "uint64": np.array([2**64 - 1], np.uint64),
            "foreign": np.arange(4, dtype=">f4"),
            "foreign complex": np.arange(3).astype(">c8"),
            "foreign text": np.array(["a", "böc"]).astype(">U3"),
            "text": np.array(["a", "böc"]),
            "moments": np.array(["2020-01-01", "NaT"], "datetime64[ns]"),
            "long": np.arange(3, dtype=np.longdouble),
            "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", ">f8")]),
            "odd": np.arange(3, dtype=np.uint8),
            "payload": np.array([0x7FF0_0000_DEAD_BEEF], np.uint64).view(np.float64),
            "none": np.zeros((0, 4)),
        },
        "replay": {"rows": LogColumn(np.arange(4000, dtype=np.float32).reshape(1000, 4), 1000, ()), "added": 1000},
        "x/y": {"count": 2**100, "names": ["a", ("b", None)]},
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> simckpt.Checkpoint:
    return committed(tmp_path_factory.mktemp("types") / "s", many_types())


@pytest.mark.parametrize("form", FORMS)
def test_every_type_goes_through_a_file_bit_for_bit(tmp_path, checkpoint, form: str) -> None:
    found = simckpt.Store(tmp_path / "to").import_checkpoint(checkpoint.export(tmp_path / "one", to=form))
    assert bits(found) == bits(checkpoint)
    assert list(found.leaves()["replay/rows"].pieces)
    again = found.export(tmp_path / "two", to=form)
    assert bits(simckpt.Store(tmp_path / "last").import_checkpoint(again)) == bits(checkpoint)


def test_the_form_follows_the_name_unless_it_is_given(tmp_path, checkpoint) -> None:
    head = {name: checkpoint.export(tmp_path / name).read_bytes()[:4] for name in ("a.h5", "a", "a.pt", "a.PTH")}
    assert head == {"a.h5": b"\x89HDF", "a": b"\x89HDF", "a.pt": b"PK\x03\x04", "a.PTH": b"PK\x03\x04"}
    assert checkpoint.export(tmp_path / "b.pt", to="h5").read_bytes()[:4] == b"\x89HDF"
    assert safetensors.safe_open(checkpoint.export(tmp_path / "a.safetensors"), framework="pt").metadata()
    with pytest.raises(ConfigurationError, match="'h5', 'pt', 'safetensors', got 'zip'"):
        checkpoint.export(tmp_path / "c", to="zip")


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_alone_reads_the_weights_of_a_pt_file(tmp_path, mmap: bool) -> None:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with simckpt.Store(tmp_path / "s").start("a") as run:
        run.configure({"learning_rate": 3e-4})
        run.checkpointer({"agent": net}, save_when=simckpt.EverySteps(1), background=None).save(7)
    path = simckpt.Store(tmp_path / "s").run("a").latest().export(tmp_path / "one.pt")
    document = torch.load(path, weights_only=True, mmap=mmap)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    other.load_state_dict(document["state"]["agent"])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert json.loads(document["simckpt"]["commit"])["step"] == 7
    assert json.loads(document["simckpt"]["start"])["hyperparameters"] == {"learning_rate": 3e-4}


def test_other_tools_see_values_and_not_bits(tmp_path, checkpoint) -> None:
    expected = many_types()
    found = torch.load(checkpoint.export(tmp_path / "one.pt"), weights_only=True)["state"]
    for key, tensor in expected["agent"].items():
        if key != "tied":  # the same memory is there once
            assert found["agent"][key].dtype == tensor.dtype
            if key != "float8":
                assert torch.equal(found["agent"][key].nan_to_num(), tensor.nan_to_num())
    assert np.array_equal(found["arrays"]["foreign"].numpy(), [0, 1, 2, 3])
    assert np.array_equal(found["arrays"]["uint64"].numpy(), [2**64 - 1])
    assert np.array_equal(found["arrays"]["moments"].numpy(), np.array([1577836800 * 10**9, -(2**63)]))
    path = checkpoint.export(tmp_path / "one.safetensors")
    tensors, arrays = safetensors.torch.load_file(path), {}
    with safetensors.safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in ("arrays/foreign", "replay/rows")}
    assert torch.equal(tensors["agent/weight"], expected["agent"]["weight"])
    assert torch.equal(tensors["agent/bfloat16"], expected["agent"]["bfloat16"])
    assert np.array_equal(arrays["arrays/foreign"], [0, 1, 2, 3])
    assert np.array_equal(arrays["replay/rows"].reshape(-1), np.arange(4000))


def test_a_pt_file_is_a_whole_archive_for_other_programs(tmp_path, checkpoint) -> None:
    with zipfile.ZipFile(checkpoint.export(tmp_path / "one.pt")) as archive:
        assert archive.testzip() is None
        for entry in archive.infolist():
            archive.fp.seek(entry.header_offset + 26)
            name, extra = np.frombuffer(archive.fp.read(4), "<u2").tolist()
            assert (entry.header_offset + 30 + name + extra) % 64 == 0


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_file_that_its_library_has_rewritten_is_imported_as_well(tmp_path, checkpoint, form: str) -> None:
    path, again = checkpoint.export(tmp_path / "one", to=form), tmp_path / "again"
    if form == "pt":
        torch.save(torch.load(path, weights_only=True), again)
    else:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            safetensors.torch.save_file(tensors, again, metadata=file.metadata())
    assert bits(simckpt.Store(tmp_path / "to").import_checkpoint(again)) == bits(checkpoint)


def train(store: simckpt.Store, name: str, until: int) -> simckpt.Checkpoint:
    with store.start(name) as run:
        run.configure({"learning_rate": 0.1})
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        optimizer, loop = torch.optim.Adam(net.parameters(), lr=0.1), simckpt.LoopState(step=0)
        components = {"agent": net, "optimizer": optimizer, "rng": simckpt.RNGStreams(), "loop": loop}
        with run.checkpointer(components, save_when=simckpt.EverySteps(5), background=None) as checkpointer:
            checkpointer.restore_latest()
            while loop.step < until:
                loss = net(torch.randn(4, 3)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loop.step += 1
                checkpointer.step(loop.step, {})
        return run.latest()


def test_a_branch_of_an_imported_file_goes_on_bit_for_bit(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "from")
    expected = bits(train(store, "a", 15))
    origin = store.run("a").at(step=5)
    for form in FORMS:
        other = simckpt.Store(tmp_path / form)
        other.import_checkpoint(origin.export(tmp_path / f"one.{form}")).branch("b")
        found = bits(train(other, "b", 15))
        for name in ("agent", "optimizer", "rng", "loop"):
            assert found[name] == expected[name], (form, name)


@pytest.mark.parametrize("form", FORMS)
def test_exports_and_imports_hold_a_few_megabytes_of_a_large_checkpoint(tmp_path, form: str) -> None:
    rows = LogColumn(np.ones((1 << 18, 32), np.float32), 1 << 18, ())  # 32 MB each
    checkpoint = committed(tmp_path / "s", {"agent": {"x": np.ones(1 << 22)}, "replay": {"rows": rows}})
    tracemalloc.start()
    try:
        path = checkpoint.export(tmp_path / "one", to=form)
        simckpt.Store(tmp_path / "to").import_checkpoint(path)
        simckpt.Store(tmp_path / "straight").import_checkpoint(checkpoint)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20  # four portions of 8 MB, a few records


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def archive(path: Path, pickled: bytes, *, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x/data.pkl", pickled)
        file.writestr("x/version", "3\n")
    return path


@pytest.mark.parametrize(
    "case", ["runs", "allocates", "bomb", "weights", "text", "nested", "no zip", "unknown storage"]
)
def test_a_strange_pt_file_is_refused_and_runs_nothing(tmp_path, case: str) -> None:
    path, made = tmp_path / "x.pt", tmp_path / "made"
    if case == "runs":
        torch.save({"state": {}, "simckpt": Runs(made)}, path)
    elif case == "allocates":
        # weights_only calls bytearray, and a hundred gigabytes would be touched
        archive(path, b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\xe8\x76\x48\x17\x85R.")
    elif case == "bomb":
        archive(path, pickle.dumps("x" * (1 << 22), 2), compression=zipfile.ZIP_DEFLATED)
    elif case == "weights":
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    elif case == "text":
        torch.save({"state": {"agent": {"x": "text"}}, "simckpt": {"structures": {}}}, path)
    elif case == "nested":
        archive(path, b"\x80\x02" + b")" + b"\x85" * 100_000 + b".")
    elif case == "no zip":
        path.write_bytes(b"PK\x03\x04" + bytes(100))
    else:
        archive(
            path,
            b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ.",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FormatError):
            simckpt.Store(tmp_path / "to").import_checkpoint(path)
    assert not made.exists()


def edited(checkpoint: simckpt.Checkpoint, path: Path, change) -> Path:
    document = torch.load(checkpoint.export(path.with_suffix(".whole"), to="pt"), weights_only=True)
    change(document)
    torch.save(document, path)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["state"]["agent"].update(weight=torch.zeros(1).expand(10**9)),
        lambda document: document["state"]["agent"].update(weight=torch.zeros(1).expand(4, 3)),
        lambda document: document["state"]["agent"].update(weight=torch.zeros(3, 4).T),
        lambda document: document["state"]["agent"].update(weight=torch.zeros(4, 3, dtype=torch.int32)),
        lambda document: document["state"]["agent"].update(more=torch.zeros(1)),
        lambda document: document["state"]["agent"].pop("weight"),
        lambda document: document["state"].update({"": {}, "a": []}),
        lambda document: document["simckpt"].pop("leaves"),
        lambda document: document["simckpt"].update(leaves="é"),
        lambda document: document["simckpt"]["structures"].pop("agent"),
        lambda document: document["simckpt"]["structures"].update(agent="\udc80"),
        lambda document: document["simckpt"].update(structures=[]),
    ],
    ids=["huge", "expanded", "transposed", "type", "more", "fewer", "empty", "record", "text", "tree", "half", "list"],
)
def test_a_pt_file_that_contradicts_its_records_is_refused(tmp_path, checkpoint, change) -> None:
    with pytest.raises((FormatError, simckpt.errors.DamagedError)):
        simckpt.Store(tmp_path / "to").import_checkpoint(edited(checkpoint, tmp_path / "x", change))


@pytest.mark.parametrize("case", ["long", "beyond", "plain", "shape", "more"])
def test_a_strange_safetensors_file_is_refused(tmp_path, checkpoint, case: str) -> None:
    path = checkpoint.export(tmp_path / "x.safetensors")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if case == "long":
        path.write_bytes((2**60).to_bytes(8, "little") + content[8:])
    elif case == "plain":
        path.unlink()
        safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    else:
        if case == "beyond":
            header["agent/weight"]["data_offsets"] = [0, 2**62]
        elif case == "shape":
            header["agent/weight"]["shape"] = [3, 4]
        else:
            header["agent/other"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        data = json.dumps(header).encode()
        path.write_bytes(len(data).to_bytes(8, "little") + data + content[8 + length :])
    with pytest.raises(FormatError):
        simckpt.Store(tmp_path / "to").import_checkpoint(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path, checkpoint, form: str) -> None:
    """In bytes, of which a character has up to four: 255 at most."""
    for letter in ("x", "é", "語", "🐜"):
        name = letter * (255 // len(letter.encode()))
        assert checkpoint.export(tmp_path / name, to=form).exists()
    assert len(list(tmp_path.iterdir())) == 4


KILLED = """
import os, sys
from pathlib import Path
import simckpt
from simckpt.storage import durable, exports
from simckpt.storage.copying import source_of

class Killing(durable.Disk):
    def link(self, source, target):
        os._exit(9)

found = simckpt.Store(sys.argv[1]).run("a").latest()
exports.write_export(Killing(), Path(sys.argv[2]), source_of(found.files, "a", 1, metrics={}), to="h5")
"""


def test_what_a_killed_export_leaves_is_removed_by_the_next_one_in_that_folder(tmp_path) -> None:
    checkpoint = committed(tmp_path / "s", {"agent": {"x": np.arange(3)}})
    folder = tmp_path / "out"
    folder.mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path / "s", folder / "a.h5"], timeout=120).returncode == 9
    (left,) = folder.iterdir()
    assert (left.name[0], left.suffix) == (".", ".tmp")
    # what is not known to be left over stays
    alive, here = processes.this_process(), tmp_path / "out"
    elsewhere = replace(alive, boot_id="0" * 32, host="elsewhere")
    others = [here / f".{each.token('0' * 8)}.tmp" for each in (alive, elsewhere)]
    others += [here / ".thesis.tmp", here / left.name[1:], here / f"{left.name}.txt"]
    for path in others:
        path.write_bytes(b"of somebody else")
    target = checkpoint.export(folder / "b.h5")
    assert set(folder.iterdir()) == {*others, target}


def test_a_file_that_vanishes_while_it_is_opened_is_said_to_be_missing(tmp_path, checkpoint, monkeypatch) -> None:
    path = checkpoint.export(tmp_path / "x.h5")
    known = hdf5_export.is_hdf5_export
    monkeypatch.setattr(hdf5_export, "is_hdf5_export", lambda end: (path.unlink(), known(end))[1])
    with pytest.raises(ExportNotFoundError, match="there is no file"):
        exports.open_export(path)


def test_a_full_disk_leaves_no_file_of_any_form(tmp_path, checkpoint) -> None:
    class Full(simckpt.storage.durable.Disk):
        def pwrite(self, descriptor, data, offset):
            raise OSError(28, "no room")

    source = source_of(checkpoint.files, "a", 1, metrics={})
    for form in FORMS:
        with pytest.raises(StorageError, match="no room"):
            exports.write_export(Full(), tmp_path / "x", source, to=form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["negative", "conjugate", "sparse", "meta", "parameter", "gradient", "expanded"])
def test_a_pt_file_whose_tensors_are_not_plain_is_refused_by_name(tmp_path, kind: str) -> None:
    weight = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    complex_weight = torch.complex(weight, weight + 1)
    tree = complex_weight if kind == "conjugate" else weight
    path = committed(tmp_path / "from", {"agent": {"weight": tree}}).export(tmp_path / "one.pt")
    document = torch.load(path, weights_only=True)
    # of the right dtype and shape, and for the views with the right bytes in memory
    document["state"]["agent"]["weight"] = {
        "negative": lambda: torch._neg_view(weight),
        "conjugate": lambda: complex_weight.conj(),
        "sparse": weight.to_sparse,
        "meta": lambda: weight.to("meta"),
        "parameter": lambda: torch.nn.Parameter(weight),
        "gradient": lambda: weight.clone().requires_grad_(),
        "expanded": lambda: torch.zeros(1, 4).expand(2, 4),
    }[kind]()
    torch.save(document, path)
    with pytest.raises(FormatError, match=r"weight|_rebuild_(sparse_tensor|meta_tensor_no_storage|parameter)"):
        simckpt.Store(tmp_path / "to").import_checkpoint(path)
    assert not (tmp_path / "to").exists() or simckpt.Store(tmp_path / "to").files.runs() == []
