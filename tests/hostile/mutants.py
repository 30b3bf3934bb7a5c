"""Damages a good store or exported file in many ways, and restores it: an error or the saved bits, nothing else.

    python tests/hostile/mutants.py <job.json>

The job: {"root": <folder of good/ and good.h5>, "seed": n, "count": n, "resealed": bool, "scratch": folder}; with
"broken" a check is left out. Of a mutant that is sealed anew the digests are right, so it may hold other values: it
must not crash, hang, lead elsewhere or take much memory. Prints one line of JSON: how many were tried, refused, equal,
different, and what went wrong.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breaking
import doors
import forging
import numpy as np
from source_helpers import read_source

import simckpt
from simckpt.errors import SimckptError
from simckpt.storage import exports

TOKENS: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**63,
    2**64,
    1e308,
    0.5,
    "",
    "x",
    "..",
    "/etc/passwd",
    "\ud800",
]
TOKENS += ["a" * 5000, "0" * 32, [], [[]], [1] * 70, {}, {"tuple": [1]}, {"float": "nan"}, {"node": 0}, {"leaf": "x"}]
TOKENS += [
    {"node": 2**40},
    {"int": "0x" + "f" * 50},
    {"numpy": ["<f8", "00" * 8]},
    "|O",
    "<f8",
    "torch",
    "|V8",
    "numpy",
]
BATCH = 50  # mutants of one process


def damaged(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Returns other bytes: bits, bytes, ends, spans of zeros, splices, numbers that are lengths."""
    changed = bytearray(data)
    how = draw.randrange(8)
    place = draw.randrange(len(data)) if data else 0
    if how == 0:
        changed[place] ^= 1 << draw.randrange(8)
    elif how == 1:
        changed[place] = draw.choice([0, 0xFF, 0x7F, 0x80, draw.randrange(256)])
    elif how == 2:
        del changed[place:]
    elif how == 3:
        changed[place : place + draw.choice([1, 8, 512])] = bytes(min(draw.choice([1, 8, 512]), len(data) - place))
    elif how == 4:
        other = draw.choice(others)
        changed[place:] = other[place:]
    elif how == 5:
        number = draw.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
        changed[place : place + 8] = number.to_bytes(8, "little")
    elif how == 6:
        del changed[place : place + draw.randrange(1, 64)]
    else:
        start = draw.randrange(len(data))
        changed[place:place] = data[start : start + draw.randrange(1, 64)]
    return bytes(changed)


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Returns (container, key) of everything in a JSON document."""
    found = [] if found is None else found
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        places(value[key], found)
    return found


def edited(document: Any, draw: random.Random) -> None:
    """Changes a JSON document in place: values put in the place of others, left out, doubled, exchanged."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        known = places(document)
        if not known:
            return
        holder, key = draw.choice(known)
        how = draw.randrange(6)
        if how <= 1:
            holder[key] = copy.deepcopy(draw.choice(TOKENS))
        elif how == 2:
            other, place = draw.choice(known)
            holder[key] = json.loads(json.dumps(other[place])) if place in other or isinstance(other, list) else None
        elif how == 3:
            del holder[key]
        elif how == 4 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += draw.choice([-1, 1, 8, -8, 1 << 40])
        elif isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        else:
            holder[f"{key}x"] = holder.pop(key)


def forge(forge: forging.Forge, draw: random.Random) -> str:
    """Changes one record or structure of the store and seals all anew; returns what."""
    start = next((forge.run / "starts").iterdir())
    what = draw.choice(
        ["tree", "tree", "tree", "leaves", "leaves", "leaf bytes", "commit", "rollback", "run", "start", "store"]
    )
    if what == "tree":
        component = draw.choice(["loop", "policy", "rng", "replay"])
        (line,) = [
            each
            for each in forge.content(forge.checkpoint / "leaves.json")["leaves"]
            if each["path"] == f"{component}/_tree"
        ]
        data = (forge.checkpoint / "state.h5").read_bytes()[line["offset"] : line["offset"] + line["size"]]
        if draw.random() < 0.3:
            forge.tree(component, damaged(data.rstrip(), draw, [data]))
        else:
            document = json.loads(data)
            edited(document, draw)
            forge.tree(component, document)
    elif what == "leaf bytes":
        path = draw.choice(["policy/weight", "policy/names", "loop/empty", "policy/tied", "replay/_tree"])
        forge.data(path, draw.randbytes(draw.choice([0, 1, 48, 96, 4096])))
    elif what == "start":
        forge.edit_start(lambda fields: edited(fields.setdefault("git", {}) or fields, draw))
    else:
        path = {
            "leaves": forge.checkpoint / "leaves.json",
            "commit": forge.checkpoint / "commit.json",
            "rollback": forge.run / "checkpoints/00000003/commit.json",
            "run": forge.run / "run.json",
            "start": start,
            "store": forge.root / "store.json",
        }[what]
        if draw.random() < 0.15:
            forge.write(path, damaged(forging.body_of(path.read_bytes()), draw, [b"{" * 100]))
        else:
            forge.edit(path, lambda fields: edited(fields, draw))
    return what


def restored(checkpoint: simckpt.Checkpoint) -> list[bytes]:
    """Returns the bits of live objects after a restore."""
    live = forging.live()
    checkpoint.restore(live)
    return [bits(vars(component)) for component in live.values()]


def bits(value: Any, above: tuple[int, ...] = ()) -> bytes:
    """Returns a text of all bits of a state, without the code under test; `above` are the ids of what holds it."""
    if id(value) in above:
        # a container may hold itself, in a mutant as in a program
        return f"up {len(above) - above.index(id(value))}".encode()
    inner = (*above, id(value))
    if isinstance(value, dict):
        return b"{" + b",".join(bits(key, inner) + b":" + bits(each, inner) for key, each in value.items()) + b"}"
    if isinstance(value, list | tuple):
        return type(value).__name__.encode() + b"(" + b",".join(bits(each, inner) for each in value) + b")"
    if isinstance(value, set):
        return b"set" + b",".join(sorted(bits(each, inner) for each in value))
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, np.random.Generator):
        return bits(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return bits(value.get_state(legacy=False))
    return repr(value).encode()


def ways(root: Path) -> list[Callable[[], Any]]:
    """Returns how a store is looked at besides a restore."""
    return [
        lambda: simckpt.Store(root).contents(),
        lambda: str(simckpt.Store(root).graph()),
        lambda: doors.command("ls", root),
        lambda: doors.command("show", root, f"{forging.RUN}@2"),
    ]


def one(
    root: Path,
    where: Path,
    draw: random.Random,
    expected: dict[str, list[bytes]],
    watch: doors.Watch,
    *,
    resealed: bool,
) -> str:
    """Makes a mutant and restores it; returns "refused", "equal" or "different", or raises."""
    shutil.rmtree(where, ignore_errors=True)
    if not resealed and draw.random() < 0.2:
        where.mkdir(parents=True)
        data = (root / "good.h5").read_bytes()
        (where / "export.h5").write_bytes(damaged(data, draw, [bytes(len(data)), data[::-1]]))
        watch.on = True
        try:
            read = read_source(exports.open_export(where / "export.h5"))
        except SimckptError:
            return "refused"
        finally:
            watch.on = False
        found = [
            each.structure + b"".join(leaf.data.tobytes() for leaf in each.leaves.values()) for each in read.values()
        ]
        return "equal" if found == expected["export"] else "different"
    if resealed:
        forge(forging.Forge(root / "good", where), draw)
    else:
        shutil.copytree(root / "good", where)
        files = sorted(path for path in where.rglob("*") if path.is_file() and path.stat().st_size)
        near = [path for path in files if "00000002" in str(path) or "segments" in str(path)]
        path = draw.choice(near if draw.random() < 0.7 else files)
        others = [each.read_bytes() for each in files if each.name == path.name or each.suffix == path.suffix]
        path.write_bytes(damaged(path.read_bytes(), draw, others))
    watch.on = True
    try:
        store = simckpt.Store(where)
        for seq in (2, 3):
            record = [
                each
                for each in store.checkpoints(abandoned=True, damaged={})
                if each.run == forging.RUN and each.seq == seq
            ]
            if not record:
                return "refused"
            found = restored(record[0])
            if found != expected[str(seq)]:
                return "different"
        store.files.verify(forging.RUN, 2)
    except SimckptError:
        return "refused"
    finally:
        for look in ways(where) if draw.random() < (0.3 if resealed else 0.05) else ():
            with contextlib.suppress(SimckptError):
                look()
        watch.on = False
    return "equal"


def batch(
    root: Path, scratch: Path, seed: int, numbers: range, watch: doors.Watch, *, resealed: bool
) -> dict[str, Any]:
    good = simckpt.Store(root / "good")
    by_seq = {each.seq: each for each in good.checkpoints(abandoned=True) if each.run == forging.RUN}
    expected = {str(seq): restored(by_seq[seq]) for seq in (2, 3)}
    read = read_source(exports.open_export(root / "good.h5"))
    expected["export"] = [
        each.structure + b"".join(leaf.data.tobytes() for leaf in each.leaves.values()) for each in read.values()
    ]
    counts: dict[str, int] = {}
    faults: list[str] = []
    for number in numbers:
        (scratch / "current").write_text(str(number))
        try:
            result = one(
                root, scratch / "mutant", random.Random(f"{seed} {number}"), expected, watch, resealed=resealed
            )
        except Exception as error:
            import traceback

            place = traceback.extract_tb(error.__traceback__)[-1]
            result = "fault"
            faults.append(
                f"{seed} {number}: {type(error).__name__}: {str(error)[-500:]} at {place.filename}:{place.lineno}"
            )
        watch.on = False
        counts[result] = counts.get(result, 0) + 1
        if result == "different" and not resealed:
            faults.append(f"{seed} {number}: restored other values")
    return {"counts": counts, "faults": faults, "foreign": sorted(set(watch.found))}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    root, scratch, resealed = Path(job["root"]), Path(job["scratch"]), job["resealed"]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if "broken" in job:
        breaking.BROKEN[job["broken"]]()
    watch = doors.Watch([str(root / "good"), str(scratch), *job["allowed"]])
    total: dict[str, Any] = {"tried": 0, "counts": {}, "faults": [], "foreign": []}
    for first in range(0, job["count"], BATCH):
        numbers = range(first, min(first + BATCH, job["count"]))

        def work(numbers: range = numbers) -> dict[str, Any]:
            return batch(root, scratch, job["seed"], numbers, watch, resealed=resealed)

        found = doors.run_forked(work, memory=doors.MEMORY, seconds=60)
        total["tried"] += len(numbers)
        if "died" in found:
            place = (scratch / "current").read_text()
            total["faults"].append(f"{job['seed']} {place}: the process died, {found['died']}")
            continue
        for name, count in found["counts"].items():
            total["counts"][name] = total["counts"].get(name, 0) + count
        total["faults"] += found["faults"]
        total["foreign"] = sorted({*total["foreign"], *found["foreign"]})
    print(json.dumps(total))


if __name__ == "__main__":
    main()
