"""Hostile stores, exported files and HDF5 files, one of each kind that we could think of; built anew for each test.

Each lies in a folder of its own, as `store/`, `export.h5` or `file.h5`. `outside` is a folder that none may lead to.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from forging import RUN, Forge, build_store, digest, seal

from simckpt.storage import exports  # noqa: F401 (loaded before any child is forked)

SEGMENT = "../../../../segments/" + "5" * 32 + ".h5"
ROOT = {"node": 0}
GOLDEN_RATIO = (1 << 61) - 1  # the modulus of Python's hash of integers


@dataclass(frozen=True)
class Case:
    """One hostile thing; `kind` is "store", "export" or "hdf5"."""

    name: str
    kind: str
    path: Path


def structure(root: Any, *nodes: Any) -> dict[str, Any]:
    return {"tree": 1, "root": root, "nodes": list(nodes)}


def shared(count: int, kind: str = "tuple") -> list[Any]:
    """Nodes of which each holds the next one ten times."""
    return [[kind, [{"node": number + 1}] * 10] for number in range(count)] + [[kind, []]]


def deep(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


# --- stores -------------------------------------------------------------------------------------------------------


def link(part: str) -> Callable[[Forge, Path], None]:
    def build(forge: Forge, outside: Path) -> None:
        path = forge.root / part
        target = outside / path.name
        if path.is_dir() and not target.exists():
            shutil.copytree(path, target)
        elif path.is_file() and not target.exists():
            shutil.copy(path, target)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target)

    return build


def other(part: str, kind: str) -> Callable[[Forge, Path], None]:
    """Puts something else where a file belongs."""

    def build(forge: Forge, outside: Path) -> None:
        path = forge.root / part
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        elif kind == "empty":
            path.touch()
        else:
            path.touch()
            os.truncate(path, 1 << 41)

    return build


def record(part: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Forge, Path], None]:
    return lambda forge, outside: forge.edit(forge.root / part, change)


def line(leaf: str, /, **fields: Any) -> Callable[[Forge, Path], None]:
    return lambda forge, outside: forge.leaf(leaf, lambda each: each.update(fields))


def tree(document: dict[str, Any] | bytes) -> Callable[[Forge, Path], None]:
    return lambda forge, outside: forge.tree("loop", document)


def start(**fields: Any) -> Callable[[Forge, Path], None]:
    return lambda forge, outside: forge.edit_start(lambda each: each.update(fields))


def body(part: str, old: bytes, new: bytes) -> Callable[[Forge, Path], None]:
    """Replaces text in a record and seals it anew."""

    def build(forge: Forge, outside: Path) -> None:
        path = forge.root / part
        data = path.read_bytes()
        assert old in data
        forge.write(path, data[: data.rindex(b',\n "digest"')].replace(old, new, 1))

    return build


COMMIT = f"runs/{RUN}/checkpoints/00000002/commit.json"
LEAVES = f"runs/{RUN}/checkpoints/00000002/leaves.json"
STATE = f"runs/{RUN}/checkpoints/00000002/state.h5"
RECORD = f"runs/{RUN}/run.json"


def many_files(fields: dict[str, Any]) -> None:
    """Many leaves, each said to lie in a file of its own."""
    sample = fields["leaves"][0]
    fields["leaves"] = [
        {**sample, "path": f"loop/{number}", "file": f"shard-{number // 10:05d}-of-{number % 10:05d}.h5"}
        for number in range(20_000)
    ]


def amplify(fields: dict[str, Any]) -> None:
    """A thousand pieces that are the same rows."""
    (rows,) = [each for each in fields["leaves"] if "pieces" in each]
    rows["pieces"] = rows["pieces"] * 500
    count = sum(piece[2] for piece in rows["pieces"])
    rows.update(shape=[count, 2], size=count * 16)


def nowhere(fields: dict[str, Any]) -> None:
    """Rows of a segment that says it has an exabyte."""
    fields["segments"] = [{**fields["segments"][0], "size": 1 << 60}]
    (rows,) = [each for each in fields["leaves"] if "pieces" in each]
    rows["pieces"] = [[0, 0, 1 << 55, "xxh3-128:" + "0" * 32]]
    rows.update(shape=[1 << 55, 2], size=1 << 59)


def thousand_parts(fields: dict[str, Any]) -> None:
    fields["leaves"][0]["path"] = "loop/" + "a/" * 2000 + "b"


def doubled(fields: dict[str, Any]) -> None:
    first, second = [each for each in fields["leaves"] if each["path"] in ("policy/weight", "policy/record")]
    second.update(offset=first["offset"] + 1)


def sparse_index(forge: Forge, outside: Path) -> None:
    """An index of two gigabytes, about ten million leaves, on a disk that holds none of it."""
    path = forge.root / LEAVES
    os.truncate(path, 2 << 30)
    forge.edit(forge.root / COMMIT, lambda each: each["files"]["leaves.json"].update(size=2 << 30))


def cycle(forge: Forge, outside: Path) -> None:
    """Commits that are each other's parents."""
    ids = [json.loads(path.read_bytes())["id"] for path in sorted(forge.run.glob("checkpoints/*/commit.json"))]
    for number in (1, 2, 3):
        path = forge.run / f"checkpoints/{number:08d}/commit.json"
        forge.edit(path, lambda each, parent=ids[number % 3]: each.update(parent=parent))


def own_origin(forge: Forge, outside: Path) -> None:
    newest = json.loads((forge.run / "checkpoints/00000001/commit.json").read_bytes())["id"]
    forge.edit(forge.root / "runs/ant-low/run.json", lambda each: each["branch"].update(run="ant-low"))
    forge.edit(forge.root / RECORD, lambda each: each.update(origin=newest, branch={**BRANCH_FIELDS}))


BRANCH_FIELDS = {"run": "ant-low", "seq": 1, "step": 1, "overrides": {}, "rng": "continue"}


def collide(kind: str) -> dict[str, Any]:
    """Numbers of one hash."""
    numbers = [number * GOLDEN_RATIO for number in range(1, 10_000)]
    values = [each if each < 2**63 else {"int": hex(each)} for each in numbers]
    return structure(ROOT, [kind, values if kind == "set" else [part for each in values for part in (each, None)]])


def trash(forge: Forge, outside: Path) -> None:
    """The segments are gone, and the trash is a link to a folder of somebody else."""
    shutil.rmtree(forge.root / "segments")
    (forge.root / "segments").mkdir()
    shutil.rmtree(forge.root / "trash", ignore_errors=True)
    (forge.root / "trash").symlink_to(outside)


def archive(forge: Forge, outside: Path) -> None:
    """The state is said to lie in an archive, which is a folder of somebody else."""
    (forge.root / STATE).unlink()
    shutil.copy(forge.root / "store.json", outside / "store.json")
    (forge.root / "archive").mkdir()
    moment = {"utc": "", "unix": 1.8e9}
    fields = {"format": "simckpt archive", "version": "0.3", "id": None, "url": outside.as_uri(), "created": moment}
    forge.write(forge.root / "archive/archive.json", fields)


def long_names(forge: Forge, outside: Path) -> None:
    for name in ("x" * 255, "..hidden", "a\nb", "\udcff", "\x1b[31m", "ant\u202e"):
        folder = forge.root / "runs" / name
        folder.mkdir()
        shutil.copy(forge.root / RECORD, folder / "run.json")


def marks(forge: Forge, outside: Path) -> None:
    (folder,) = [path.parent for path in forge.run.glob("marks/*/metrics-1")]
    for name in ("tag-\x1b[31m", "tag-..", "tag-", "metrics-2"):
        (folder / name).symlink_to(outside / "secret.txt")


def events(forge: Forge, outside: Path) -> None:
    lines = [b"[" * 100_000, b'{"a":' * 100_000, b'{"time": 1e999, "event": "\\ud800"}', b"\xff\x00", b"9" * 10_000]
    (forge.run / "events.jsonl").write_bytes(b"\n".join(lines))


STORES: dict[str, Callable[[Forge, Path], None]] = {
    # what stands where something of the store belongs
    **{f"link {part}": link(part) for part in ("runs", f"runs/{RUN}", f"runs/{RUN}/checkpoints", "segments", STATE)},
    **{f"link {part}": link(part) for part in (COMMIT, LEAVES, RECORD, "store.json", f"runs/{RUN}/starts")},
    **{f"link {part}": link(part) for part in (f"runs/{RUN}/marks", f"runs/{RUN}/events.jsonl", "tmp")},
    "link trash": trash,
    "archive elsewhere": archive,
    **{f"{kind} state.h5": other(STATE, kind) for kind in ("fifo", "device", "folder", "empty", "huge")},
    **{f"{kind} commit.json": other(COMMIT, kind) for kind in ("fifo", "device", "folder", "empty", "huge")},
    **{f"{kind} store.json": other("store.json", kind) for kind in ("fifo", "device", "folder", "empty", "huge")},
    "huge index": sparse_index,
    "odd names of runs": long_names,
    "odd names of marks": marks,
    "odd log": events,
    # names that lead elsewhere
    "run name with dots": record(RECORD, lambda each: each.update(name="../../outside")),
    "run id": record(RECORD, lambda each: each.update(id="../../../../etc/passwd")),
    "file name": record(COMMIT, lambda each: each["files"].update({"../../../../outside/x": {"size": 1}})),
    "file of a leaf": line("policy/weight", file="../../../../outside/secret.txt"),
    "file of a leaf absolute": line("policy/weight", file="/etc/hostname"),
    "file of a leaf not vouched for": line("policy/weight", file="shard-00001-of-00002.h5"),
    "segment id": record(LEAVES, lambda each: each["segments"][0].update(id="../../outside/secret")),
    "start id": record(COMMIT, lambda each: each.update(start="../run")),
    "parent id": record(COMMIT, lambda each: each.update(parent="../00000001")),
    "origin": record("runs/ant-low/run.json", lambda each: each.update(origin="../../x")),
    "branch run": record("runs/ant-low/run.json", lambda each: each["branch"].update(run="../../outside")),
    "branch of itself": own_origin,
    "parents in a circle": cycle,
    "parent of itself": record(COMMIT, lambda each: each.update(parent=each["id"])),
    "equal ids": record(COMMIT, lambda each: each.update(id="0" * 32)),
    "component with dots": line("policy/weight", path="../weight"),
    "path with dots": line("policy/weight", path="policy/../../x"),
    "path with a NUL": line("policy/weight", path="policy/a\0b"),
    "path with half a pair": line("policy/weight", path="policy/\ud800"),
    "path with controls": line("policy/weight", path="policy/\x1b]0;title\x07\x1b[31m"),
    "path of 2,000 parts": record(LEAVES, thousand_parts),
    "path both leaf and group": line("policy/weight", path="policy/names/x"),
    # JSON
    "nested JSON": body(RECORD, b'"origin": null', b'"origin": ' + b"[" * 100_000),
    "nested values": record(RECORD, lambda each: each["hyperparameters"].update(deep=deep(400))),
    "nested values in a start": start(hyperparameters={"deep": deep(400)}),
    "nested values just within JSON": record(RECORD, lambda each: each["hyperparameters"].update(deep=deep(900))),
    "nested rollback": record(
        f"runs/{RUN}/checkpoints/00000003/commit.json", lambda each: each["rollback"].update(reason=deep(99))
    ),
    "rollback of other types": record(
        f"runs/{RUN}/checkpoints/00000003/commit.json",
        lambda each: each.update(rollback={"abandoned": [1], "level": "x", "changes": 5, "step": "y", "reason": None}),
    ),
    "huge JSON": body(RECORD, b'"origin": null', b'"origin": null, "x": "' + b"y" * (1 << 20) + b'"'),
    "key twice": body(COMMIT, b'"seq": 2', b'"seq": 2,\n "seq": 3'),
    "huge integer": body(COMMIT, b'"step": 2', b'"step": ' + b"9" * 5000),
    "large integer": body(COMMIT, b'"step": 2', b'"step": 9223372036854775808'),
    "negative step": record(COMMIT, lambda each: each.update(step=-1)),
    "step is NaN": body(COMMIT, b'"step": 2', b'"step": NaN'),
    "step is a float": record(COMMIT, lambda each: each.update(step=2.0)),
    "moment beyond floats": body(COMMIT, b'"unix": ', b'"unix": 1e999, "x": '),
    "moment beyond calendars": record(COMMIT, lambda each: each["created"].update(unix=1e300)),
    "moment before calendars": record(RECORD, lambda each: each["created"].update(unix=-1e15)),
    "duration beyond floats": body(COMMIT, b'"duration": ', b'"duration": 1e999, "x": '),
    "metric beyond floats": body(COMMIT, b'"loss": 0.5', b'"loss": 1e999'),
    "surrogates in texts": record(
        COMMIT, lambda each: each.update(host="\ud800\x00\x1b[2J", versions={"\udfff": "\x07"})
    ),
    "controls in metrics": record(COMMIT, lambda each: each.update(metrics={"\x1b[31mloss\u202e": 1.0})),
    "controls in hyperparameters": start(hyperparameters={"\x1b]0;x\x07": "\x1b[2J\ud800"}, experiment="\x9b31m"),
    "controls in a reason": record(
        f"runs/{RUN}/checkpoints/00000004/commit.json", lambda each: each.update(reason="\x1b[31m\r\n")
    ),
    "controls in features": record("store.json", lambda each: each.update(requires=["\x1b[31m"])),
    "other types in git": start(git={"commit": [5], "dirty": {"tuple": []}, "diff": 7}),
    "no facts in git": start(git={}),
    "other types in device": start(device={"gpus": 5, "cpu": [1]}),
    "another start": record(COMMIT, lambda each: each.update(start="0" * 32)),
    "newer version": record(COMMIT, lambda each: each.update(version="9.9")),
    "version of ten thousand digits": record(COMMIT, lambda each: each.update(version="1" * 10_000 + ".0")),
    "unknown digest": record(COMMIT, lambda each: each["files"]["leaves.json"].update(digest="md5:00")),
    "forged digest of the index": record(
        COMMIT, lambda each: each["files"]["leaves.json"].update(digest="xxh3-128:" + "0" * 32)
    ),
    "forged digest of a leaf": line("policy/weight", digest="xxh3-128:" + "0" * 32),
    # what the index says of leaves
    "overlapping leaves": record(LEAVES, doubled),
    "offset beyond the file": line("policy/weight", offset=1 << 40),
    "offset of 2**63": line("policy/weight", offset=2**63),
    "negative offset": line("policy/weight", offset=-96),
    "no offset": line("policy/weight", offset=None),
    "huge shape": line("policy/weight", shape=[1 << 40], size=1 << 43),
    "shape beyond numpy": line("policy/weight", shape=[1 << 61] * 3, size=(1 << 183) * 8),
    "huge empty shape": line("loop/empty", shape=[1 << 61, 0]),
    "shape of 64 axes": line("policy/weight", shape=[1] * 63 + [12]),
    "elements without bytes": line(
        "policy/weight", dtype="|S0", stored="|u1", shape=[1 << 40], stored_shape=[1 << 40, 0], size=0, offset=None
    ),
    "records without bytes": line(
        "policy/weight", dtype="[]", stored="|u1", shape=[1 << 40], stored_shape=[1 << 40, 0], size=0, offset=None
    ),
    **{
        f"stored as {name}": line("policy/weight", stored=name)
        for name in ("|O", "O8", "<f8,<f8", "object", "|V8", "<f99", "(3,)<f8", "M8", "builtins.eval")
    },
    **{
        f"dtype {name[:20]}": line("policy/weight", dtype=name)
        for name in ("object", "O", '[["a","|O"]]', "[" * 3000, "os.system", "|S999999999", "longdouble[1]", "<f16")
    },
    "dtype of a million axes": line("policy/weight", dtype='[["a","<f8",[' + "1," * 1000 + "1]]]"),
    **{
        f"kind {name}": line("policy/weight", kind=name)
        for name in ("nobody's", "torch", "jax.key", "bytes", "structure", "dlpack", "os.system")
    },
    "same rows a thousand times": record(LEAVES, amplify),
    "rows of an exabyte": record(LEAVES, nowhere),
    "a file for each leaf": record(LEAVES, many_files),
    "no structure": record(
        LEAVES, lambda each: each.update(leaves=[leaf for leaf in each["leaves"] if leaf["path"] != "loop/_tree"])
    ),
    "structure of floats": line("loop/_tree", kind="numpy"),
    # structures
    "shared lists": tree(structure(ROOT, *shared(60, "list"))),
    "shared tuples as a key": tree(
        structure(ROOT, ["dict", [{"node": 1}, 1]], *[[k, [{"node": n["node"] + 1} for n in v]] for k, v in shared(60)])
    ),
    "shared tuples in a set": tree(
        structure(ROOT, ["set", [{"node": 1}]], *[[k, [{"node": n["node"] + 1} for n in v]] for k, v in shared(60)])
    ),
    "shared frozensets": tree(structure(ROOT, *shared(60, "frozenset"))),
    "keys of one hash": tree(collide("dict")),
    "elements of one hash": tree(collide("set")),
    "list that holds itself": tree(structure(ROOT, ["dict", ["step", ROOT]])),
    "chain of 100,000": tree(structure(ROOT, *[["tuple", [{"node": n + 1}]] for n in range(100_000)], ["tuple", []])),
    "nested meta": tree(structure(ROOT, ["list", [], deep(800)])),
    "nested atom": tree(structure({"int": deep(960)})),
    "alias of nothing": tree(structure(ROOT, ["dict", ["step", {"leaf": "nowhere"}]])),
    "leaf of another component": tree(structure(ROOT, ["dict", ["step", {"leaf": "../policy/weight"}]])),
    "unknown container": tree(structure(ROOT, ["os.system", ["true"]])),
    "class named": tree(structure(ROOT, ["dataclass", ["cmd", "true"], {"class": "subprocess.Popen"}])),
    "module named": tree(structure(ROOT, ["object", [], {"type": "antigravity.x"}])),
    "enum named": tree(structure(ROOT, ["enum", [1], {"class": "this.x", "name": "y"}])),
    "range without end": tree(structure(ROOT, ["dict", ["step", {"range": [0, 2**62, 1]}]])),
    "integer of a million digits": tree(structure(ROOT, ["dict", ["step", {"int": "f" * 1_000_000}]])),
    "position of a generator": tree(
        structure(
            ROOT,
            ["dict", ["step", {"node": 1}]],
            ["generator", [{"node": 2}]],
            ["dict", ["type", "numpy.BitGenerator", "bit_generator", "MT19937", "state", {"node": 3}]],
            ["dict", ["key", 1, "pos", 10**9]],
        )
    ),
    "pool of a generator": tree(
        structure(
            ROOT,
            ["generator", [{"node": 1}]],
            ["dict", ["type", "numpy.BitGenerator", "bit_generator", "PCG64", "seed_sequence", {"node": 2}]],
            ["dict", ["entropy", 1, "spawn_key", {"node": 3}, "pool_size", 2**40, "n_children_spawned", 0]],
            ["tuple", []],
        )
    ),
    "million empty lists": tree(b'{"tree":1,"root":1,"nodes":[' + b"[]," * 1_000_000 + b"[]]}"),
}


# --- exported files -----------------------------------------------------------------------------------------------


def split(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Returns all but the directory and the end, and the directory."""
    length = int(data[-17:-1], 16)
    fields = json.loads(data[-32 - length : -32])
    fields.pop("digest")
    return data[: -32 - length], fields


def join(front: bytes, fields: dict[str, Any]) -> bytes:
    record = seal(("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in fields.items())).encode())
    return front + record + b"simckpt export %016x\n" % len(record)


def table(**changes: Any) -> Callable[[bytes], bytes]:
    def build(data: bytes) -> bytes:
        front, fields = split(data)
        return join(front, {**fields, **changes})

    return build


def part(name: str, **changes: Any) -> Callable[[bytes], bytes]:
    def build(data: bytes) -> bytes:
        front, fields = split(data)
        return join(front, {**fields, name: {**fields[name], **changes}})

    return build


def bomb(data: bytes) -> bytes:
    """A structure whose shared parts are 10**60 at the importer's."""
    front, fields = split(data)
    places = fields["leaves"]
    index = json.loads(front[places["offset"] : places["offset"] + places["size"]])
    index.pop("digest")
    (found,) = [each for each in index["leaves"] if each["path"] == "loop/_tree"]
    text = json.dumps(structure(ROOT, ["set", [{"node": 1}]], *shared(60))).encode()
    found.update(offset=len(front), size=len(text), shape=[len(text)], digest=digest(text))
    return resealed(front + text, fields, index, size=len(front) + len(text))


def resealed(front: bytes, fields: dict[str, Any], index: dict[str, Any], *, size: int) -> bytes:
    leaves = seal(("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in index.items())).encode())
    places = fields["commit"]
    commit = json.loads(front[places["offset"] : places["offset"] + places["size"]])
    commit.pop("digest")
    commit["files"]["leaves.json"] = {"size": len(leaves), "digest": digest(leaves)}
    commit["files"]["state.h5"]["size"] = size
    sealed = seal(("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in commit.items())).encode())
    new = {
        **fields,
        "leaves": {"offset": len(front), "size": len(leaves)},
        "commit": {"offset": len(front) + len(leaves), "size": len(sealed)},
    }
    return join(front + leaves + sealed, new)


EXPORTS: dict[str, Callable[[bytes], bytes]] = {
    "no end": lambda data: data[:-1],
    "nothing": lambda data: b"",
    "end alone": lambda data: b"simckpt export %016x\n" % 0,
    "directory larger than the file": lambda data: data[:-32] + b"simckpt export %016x\n" % (1 << 40),
    "directory of all": lambda data: data[:-32] + b"simckpt export ffffffffffffffff\n",
    "record beyond the end": part("run", offset=1 << 62),
    "record of an exabyte": part("leaves", size=1 << 60),
    "negative place": part("commit", offset=-1),
    "places swapped": table(run={"offset": 0, "size": 100}),
    "store id": table(store="../../x"),
    "start id": table(start_id="../../x"),
    "shared: a leaf without rows": table(shared=["loop/_tree"]),
    "shared: nothing": table(shared=["../../x"]),
    "shared: too many": table(shared=["replay/rows"] * 100_000),
    "seq": table(seq=10**30),
    "structure of shared parts": bomb,
}


# --- HDF5 files ---------------------------------------------------------------------------------------------------


def filtered(file: h5py.File, number: int) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((16,))
    creation.set_filter(number, h5py.h5z.FLAG_OPTIONAL, ())
    space = h5py.h5s.create_simple((16,))
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, dcpl=creation)


def virtual(file: h5py.File, source: str, name: str = "x", *, rows: int = 10) -> None:
    made = h5py.VirtualLayout(shape=(10,), dtype="f8")
    made[:] = h5py.VirtualSource(source, name, shape=(rows,))[:10]
    file.create_virtual_dataset("x", made, fillvalue=-1)


def growing(file: h5py.File, outside: Path) -> None:
    """A virtual dataset as long as its sources are: HDF5 opens them to tell."""
    made = h5py.VirtualLayout(shape=(10,), dtype="f8", maxshape=(None,))
    made[0 : h5py.h5s.UNLIMITED] = h5py.VirtualSource(outside / "other.h5", "x", shape=(10,), maxshape=(None,))[
        0 : h5py.h5s.UNLIMITED
    ]
    file.create_virtual_dataset("x", made, fillvalue=-1)


def numbered(file: h5py.File, source: str, name: str) -> None:
    """A virtual dataset of as many sources as there are."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple((10,), (h5py.h5s.UNLIMITED,))
    space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (2,), (2,))
    creation.set_virtual(space, source.encode(), name.encode(), h5py.h5s.create_simple((2,)))
    h5py.h5d.create(
        file.id, b"x", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((10,), (h5py.h5s.UNLIMITED,)), creation
    )


def zipped(file: h5py.File) -> None:
    made = file.create_dataset("x", shape=(1 << 26,), dtype="u1", chunks=(1 << 22,), compression="gzip")
    for place in range(0, 1 << 26, 1 << 22):
        made[place : place + (1 << 22)] = np.zeros(1 << 22, "u1")


def nested(file: h5py.File) -> None:
    group = file
    for _ in range(3000):
        group = group.create_group("g")


def unallocated(file: h5py.File) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((1 << 40,)), creation)


def hard_cycle(file: h5py.File) -> None:
    group = file.create_group("a")
    group["b"] = group


def compact(file: h5py.File) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((4,)), creation)


def user_link(file: h5py.File, outside: Path) -> None:
    file["x"] = h5py.ExternalLink(str(outside / "fifo"), "/x")


HDF5: dict[str, Callable[[h5py.File, Path], Any]] = {
    "external link": lambda f, o: f.__setitem__("x", h5py.ExternalLink(str(o / "other.h5"), "/x")),
    "external link to a group": lambda f, o: f.__setitem__("g", h5py.ExternalLink(str(o / "other.h5"), "/")),
    "external link to a FIFO": user_link,
    "external link to itself": lambda f, o: f.__setitem__("x", h5py.ExternalLink("file.h5", "/x")),
    "external storage": lambda f, o: f.create_dataset("x", (8,), "u1", external=[(str(o / "secret.txt"), 0, 8)]),
    "external storage, relative": lambda f, o: f.create_dataset("x", (8,), "u1", external=[("../../x", 0, 8)]),
    "external storage in a FIFO": lambda f, o: f.create_dataset("x", (8,), "u1", external=[(str(o / "fifo"), 0, 8)]),
    "virtual, absolute": lambda f, o: virtual(f, str(o / "other.h5")),
    "virtual, missing": lambda f, o: virtual(f, str(o / "nowhere.h5")),
    "virtual, upwards": lambda f, o: virtual(f, "../../../../../outside/other.h5"),
    "virtual, itself": lambda f, o: virtual(f, "."),
    "virtual, same folder": lambda f, o: virtual(f, "other.h5"),
    "virtual, nearly a segment": lambda f, o: virtual(f, SEGMENT.replace("segments/", "segments/../")),
    "virtual, as many datasets as there are": lambda f, o: numbered(f, SEGMENT, "x%b"),
    "virtual, growing": growing,
    "virtual, as many files as there are": lambda f, o: numbered(f, str(o / "part-%b.h5"), "x"),
    "soft link": lambda f, o: f.__setitem__("x", h5py.SoftLink("/nowhere")),
    "soft links in a circle": lambda f, o: (f.create_group("a"), f.__setitem__("a/b", h5py.SoftLink("/a"))),
    "hard links in a circle": lambda f, o: hard_cycle(f),
    "two names": lambda f, o: (f.create_dataset("x", data=1.0), f.__setitem__("y", f["x"])),
    "chunks": lambda f, o: f.create_dataset("x", data=np.zeros(8), chunks=(4,)),
    "chunks without bytes": lambda f, o: f.create_dataset("x", (1 << 40,), "f8", chunks=(1 << 16,), fillvalue=1.0),
    "gzip": lambda f, o: zipped(f),
    "unknown filter": lambda f, o: filtered(f, 31999),
    "filter of a plugin": lambda f, o: filtered(f, 32001),
    "compact": lambda f, o: compact(f),
    "no bytes behind a shape": lambda f, o: unallocated(f),
    "deep groups": lambda f, o: nested(f),
    "texts of variable length": lambda f, o: f.create_dataset("x", data=["a"], dtype=h5py.string_dtype()),
    "arrays of variable length": lambda f, o: f.create_dataset("x", (3,), h5py.vlen_dtype("f8")),
    "references": lambda f, o: f.create_dataset("x", data=f.create_dataset("y", data=1).ref, dtype=h5py.ref_dtype),
    "opaque": lambda f, o: f.create_dataset("x", data=np.void(b"abc")),
    "compound": lambda f, o: f.create_dataset("x", data=np.zeros(3, [("a", "f4")])),
    "complex": lambda f, o: f.create_dataset("x", data=np.zeros(3, complex)),
    "array type": lambda f, o: f.create_dataset("x", (3,), np.dtype(("f8", (2,)))),
    "another enumeration": lambda f, o: f.create_dataset("x", (3,), h5py.enum_dtype({"a": 0, "b": 1, "c": 2})),
    "named type": lambda f, o: f.__setitem__("t", np.dtype("f8")),
    "of a named type": lambda f, o: (f.__setitem__("t", np.dtype("f8")), f.create_dataset("x", (3,), f["t"])),
    "null shape": lambda f, o: f.create_dataset("x", data=h5py.Empty("f8")),
    "attribute of variable length": lambda f, o: f.attrs.__setitem__("kind", "text"),
    "attribute of numbers": lambda f, o: f.attrs.__setitem__("kind", np.zeros(5)),
    "huge attribute": lambda f, o: f.attrs.create("kind", np.bytes_(b"x" * 60_000)),
    "a hundred attributes": lambda f, o: [f.attrs.create(f"a{n}", np.bytes_(b"x")) for n in range(100)],
    "name of a gigabyte's kind": lambda f, o: f.create_dataset("n" * 60_000, data=1.0),
    "name not in UTF-8": lambda f, o: h5py.h5g.create(f.id, b"\xff\xfe"),
}
# what is odd and does no harm
HARMLESS_HDF5: dict[str, Callable[[h5py.File, Path], Any]] = {
    "other attributes": lambda f, o: f.attrs.create("huge", np.zeros(8000)),
    "names with controls": lambda f, o: f.create_dataset("\x1b[31m", data=1.0),
    "many groups": lambda f, o: [f.create_group(f"g{number}") for number in range(2000)],
}


def corrupted(data: bytes) -> dict[str, bytes]:
    """HDF5 files that are none."""
    return {
        "nothing": b"",
        "no HDF5": b"not HDF5" * 100,
        "signature alone": data[:8],
        "half of it": data[: len(data) // 2],
        "garbage behind the signature": data[:8] + bytes(range(256)) * 20,
    }


# what a restore of the hostile checkpoint need not refuse: what is odd lies elsewhere, or is read as what it says
HARMLESS = frozenset(
    {
        f"link runs/{RUN}/starts",
        f"link runs/{RUN}/events.jsonl",
        "link tmp",
        "odd names of runs",
        "odd names of marks",
        "odd log",
        "origin",
        "branch run",
        "branch of itself",
        "parents in a circle",
        "parent of itself",
        "equal ids",
        "nested values in a start",
        "nested rollback",
        "rollback of other types",
        "metric beyond floats",
        "surrogates in texts",
        "controls in metrics",
        "controls in hyperparameters",
        "controls in a reason",
        "other types in git",
        "no facts in git",
        "other types in device",
        "another start",
        "shape of 64 axes",
        # another kind of array: the live object says what it becomes, and the values are the same
        "kind dlpack",
        *HARMLESS_HDF5,
    }
)

# a run's record that is damaged must not take the checkpoints with it: it is refused, and they are restored
REFUSED_AND_RESTORED = frozenset(
    {
        f"link {RECORD}",
        "run name with dots",
        "run id",
        "nested JSON",
        "nested values",
        "nested values just within JSON",
        "huge JSON",
        "moment before calendars",
    }
)


# --- all of them --------------------------------------------------------------------------------------------------


def outside_folder(root: Path) -> Path:
    """Makes what nothing may lead to."""
    outside = root / "outside"
    outside.mkdir(parents=True)
    (outside / "secret.txt").write_bytes(b"secret" * 10)
    os.mkfifo(outside / "fifo")
    with h5py.File(outside / "other.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=np.arange(10.0), maxshape=(None,), chunks=(10,))
    return outside


def build(root: Path, only: Callable[[str], bool] = lambda name: True) -> list[Case]:
    """Returns all hostile things, made below a folder.

    The good store lies in `good/`, what nothing may lead to in `outside/`.
    """
    outside = outside_folder(root)
    good = build_store(root / "good")
    exported = root / "good.h5"
    good.export(RUN, 2, exported, metrics={})
    cases: list[Case] = []

    def place(kind: str, name: str) -> Path:
        folder = root / f"{len(cases):03d}"
        folder.mkdir()
        path = folder / {"store": "store", "export": "export.h5", "hdf5": "file.h5"}[kind]
        cases.append(Case(f"{kind}: {name}", kind, path))
        return path

    for name, change in STORES.items():
        if only(name):
            change(Forge(good.path, place("store", name)), outside)
    for name, mutate in EXPORTS.items():
        if only(name):
            place("export", name).write_bytes(mutate(exported.read_bytes()))
    if only("fifo"):
        os.mkfifo(place("export", "fifo"))
    for name, fill in (HDF5 | HARMLESS_HDF5).items():
        if only(name):
            with h5py.File(place("hdf5", name), "w", libver="latest") as file:
                fill(file, outside)
    state = next(good.path.glob("runs/*/checkpoints/*/state.h5")).read_bytes()
    for name, data in corrupted(state).items():
        if only(name):
            place("hdf5", name).write_bytes(data)
    return cases
