"""Recordings from strangers: mutants of a good one, and tables that no recorder writes, taken through all that reads.

Whatever they hold, only simckpt's own errors come out, in little time and memory, and nothing elsewhere is opened.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import doors
import forging
import mutants
import numpy as np
from recorder_helpers import Seen, counting

import simckpt
from simckpt import state
from simckpt.errors import SimckptError
from simckpt.hardware import Recorder, Replay, time_series
from simckpt.hardware.mcap_export import export_mcap
from simckpt.hardware.minari_export import export_minari
from simckpt.maintenance import check
from simckpt.storage.session_ending import close_session, remove_session
from simckpt.storage.session_records import SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import SessionFiles

NAME = "pole"
SECONDS = 60  # of processor time, for some mutants
BATCH = 10
RECORDS = ("session.json", "part.json", "snapshot.json", "model.json", "closed.json", "leaves.json", "structure")


@dataclass
class Outcome:
    """What became of recordings from strangers.

    Attributes:
        tried: how many.
        refused: of how many something was refused.
        faults: other errors, crashes, too much time or memory.
        foreign: what was opened outside of the store.
    """

    tried: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def build(path: Path) -> None:
    """Records a good session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = Recorder(counting(), path, NAME, snapshot_every=0.02, part_seconds=0.01, signals={"heat": _heat})
        env.reset(seed=1, options={"goal": [1, 2]})
        Seen(env).run(12)
        env.note("the motor smells")
        env.snapshot()
        env.reset(seed=2)
        Seen(env, 1).run(12)
        env.close()


def _heat(env: Any, info: dict[str, Any]) -> Any:
    return np.array([info["steps"], 0.5])


# mutants


def damaged(good: Path, where: Path, draw: random.Random) -> None:
    """Changes bytes of a file; its digests are the old ones."""
    shutil.copytree(good, where)
    files = sorted(each for each in (where / "sessions").rglob("*") if each.is_file() and each.stat().st_size)
    path = draw.choice(files)
    others = [each.read_bytes() for each in files if each.name == path.name]
    path.write_bytes(mutants.damaged(path.read_bytes(), draw, others))


def resealed(good: Path, where: Path, draw: random.Random) -> None:
    """Changes a record, an index or the structure of a tree, and seals all anew."""
    shutil.copytree(good, where)
    session = where / "sessions" / NAME
    name = draw.choice(RECORDS)
    if name == "structure":
        record = draw.choice(sorted(session.rglob("state.h5"))).parent
        restructure(record, lambda document: mutants.edited(document, draw))
        return
    # this env has no models
    path = draw.choice(sorted(session.rglob(name)) or [session / "session.json"])
    rewrite(path, lambda document: mutants.edited(document, draw))
    if name == "leaves.json":
        vouch(path.parent)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a record, and seals it anew without the code under test."""
    document = json.loads(path.read_bytes())
    head = {key: document.pop(key) for key in ("format", "version") if key in document}
    document.pop("digest", None)
    change(document)
    text = forging.dumped({**head, **document})
    path.write_bytes(_sealed(text))


def _sealed(text: bytes) -> bytes:
    body = text.rstrip()
    assert body.endswith(b"}")
    return forging.seal(body[:-1].rstrip())


def restructure(folder: Path, change: Callable[[Any], Any]) -> None:
    """Changes the structure of a tree in its place, as long as the text has room there."""
    index = json.loads((folder / "leaves.json").read_bytes())
    (line,) = [each for each in index["leaves"] if each["path"].endswith("/_tree")]
    data = bytearray((folder / "state.h5").read_bytes())
    start, size = line["offset"], line["size"]
    document = json.loads(bytes(data[start : start + size]).rstrip(b"\0 "))
    change(document)
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    if len(text) > size:
        text = text[:size]
    data[start : start + size] = text.ljust(size)
    (folder / "state.h5").write_bytes(data)

    def update(fields: dict[str, Any]) -> None:
        for each in fields["leaves"]:
            if each["path"] == line["path"]:
                each["digest"] = forging.digest(bytes(data[start : start + size]))

    rewrite(folder / "leaves.json", update)
    vouch(folder)


def vouch(folder: Path) -> None:
    """Has a folder's record say what its index is by now."""
    data = (folder / "leaves.json").read_bytes()
    (record,) = [each for each in folder.glob("*.json") if each.name != "leaves.json"]

    def update(fields: dict[str, Any]) -> None:
        entry = fields["files"]["leaves.json"]
        entry["size"], entry["digest"] = len(data), forging.digest(data)

    rewrite(record, update)


# tables that no recorder writes


def crafted(good: Path, where: Path, draw: random.Random) -> str:
    """Writes a session whose tables are changed at random, by the ordinary writer; returns how."""
    files = SessionFiles(good, NAME)
    record = SessionRecord(**{**vars(files.record), "origin": None, **draw.choice(_records(draw))})
    store = simckpt.Store(where)
    create_session(store.made(), record)
    told = []
    with SessionWriter(where, NAME) as writer:
        for part in files.parts():
            tables = files.read_part(part)
            spans = dict(part.tables)
            if draw.random() < 0.7:
                told.append(change(tables, spans, draw))
            rows, started, stopped = part.rows, part.started, part.stopped
            if draw.random() < 0.1:
                rows = draw.choice([(0, 0), (5, 2**61), (rows[0], rows[0]), (0, rows[1])])
                started, stopped = draw.choice([(0, 2**61), (started, started), (2**61, 0)])
            writer.write_part(state.encode(tables), rows=rows, spans=spans, started=started, stopped=stopped)
        for model in files.models():
            writer.write_model(model.digest, state.encode(files.read_model(model)))
        for snapshot in files.snapshots():
            tree = files.read_bundle(f"snapshots/{snapshot.number:08d}", snapshot, "snapshot")
            if draw.random() < 0.3:
                told.append(spoil(tree, draw))
            facts = {key: getattr(snapshot, key) for key in ("row", "order", "monotonic", "wall", "reason")}
            if draw.random() < 0.2:
                facts[draw.choice(["row", "order", "monotonic", "wall"])] = draw.choice([0, 2**61, 7])
            writer.write_snapshot(state.encode(tree), models=snapshot.models, **facts)
        if draw.random() < 0.8:
            writer.close(draw.choice(["closed", "killed"]), rows=draw.choice([None, (0, 2**61), (3, 3), part.rows]))
    return "; ".join(told)


def _records(draw: random.Random) -> list[dict[str, Any]]:
    odd = {"type": draw.choice(["Box", "Dict", "Discrete", "no such", "Tuple", ""]), "shape": [2**40], "n": -1}
    return [
        {},
        {},
        {},
        {"links": ()},
        {"signals": ("heat", "no such", "../up", "")},
        {"spaces": {}},
        {"spaces": {"observation": odd, "action": odd}},
        {"env": {"id": "\x1b[2J", "kwargs": {"a": [[]]}, "dt": "never"}},
        {"monotonic": 2**61, "created": 0.0},
        {"mode": "ring"},
    ]


def change(tables: dict[str, Any], spans: dict[str, tuple[int, int]], draw: random.Random) -> str:
    """Changes one column or table of a part; the record says the same of their lengths, or is refused at once."""
    names = list(spans)
    name = draw.choice(names)
    holder, last = tables, name
    if "/" in name:
        group, _, last = name.partition("/")
        holder = tables[group]
    table = holder[last]
    length = spans[name][1] - spans[name][0]
    how = draw.randrange(7)
    if how == 0:
        del holder[last], spans[name]
        return f"without {name}"
    column = draw.choice(list(table))
    if how == 1:
        del table[column]
    elif how == 2:
        table[column] = odd_column(length, draw)
    elif how == 3:
        table["odd"] = odd_column(length, draw)
    elif how == 4:
        table[column] = {"a": odd_column(length, draw), "b": (odd_column(length, draw),)}
    elif how == 5:
        table[column] = (odd_column(length, draw),)
    else:
        values = np.array(table[column]) if isinstance(table[column], np.ndarray) else None
        if values is not None and values.dtype.kind in "iu" and length:
            values[draw.randrange(length)] = draw.choice([0, 2**31, 2**62])
            table[column] = values
    return f"{name}/{column}, {how}"


def odd_column(length: int, draw: random.Random) -> Any:
    return draw.choice(
        [
            lambda: np.zeros(length),
            lambda: np.full(length, np.nan),
            lambda: np.full(length, np.iinfo(np.int64).max),
            lambda: np.full(length, np.iinfo(np.int64).min),
            lambda: np.zeros((length, 0)),
            lambda: np.zeros((length, 7), np.float32),
            lambda: np.zeros((length, 2, 3, 2), np.uint8),
            lambda: np.zeros(length, "M8[D]"),
            lambda: np.zeros(length, "U5"),
            lambda: np.full(length, '{"a": [', "U9"),
            lambda: np.full(length, "[" * 3000, "U3000"),
            lambda: np.full(length, "\x1b[2J\u202e"),
            lambda: np.zeros(length, np.complex128),
            lambda: np.zeros(length, bool),
            lambda: np.zeros(length, [("a", "<f4"), ("b", "<i8")]),
            lambda: np.zeros(length, "S3"),
        ]
    )()


def spoil(tree: Any, draw: random.Random) -> str:
    """Changes something in the tree of a snapshot."""
    known = [(holder, key) for holder, key in mutants.places(tree)]
    holder, key = draw.choice(known)
    if isinstance(holder, dict) and draw.random() < 0.3:
        del holder[key]
    else:
        holder[key] = draw.choice([None, 3, "x", np.zeros(5), {"a": 1}, [1, 2], float("nan"), np.zeros((2, 2), "U3")])
    return f"snapshot {key!r}"


# all that reads


def ways(path: Path, scratch: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Gives the name of each way to read a session, and a call that goes it."""
    yield "check", lambda: check.check(path)
    yield "sessions", lambda: [repr(each) for each in simckpt.Store(path).sessions()]
    for words in (["list"], ["list", "--json"]):
        yield f"session {' '.join(words)}", lambda words=words: doors.command("session", words[0], path, *words[1:])
    yield "session show", lambda: doors.command("session", "show", path, NAME)
    yield "session show --json", lambda: doors.command("session", "show", path, NAME, "--json")
    yield "session", lambda: simckpt.Store(path).session(NAME)
    try:
        session = simckpt.Store(path).session(NAME)
    except SimckptError:
        return
    yield "repr", lambda: repr(session)
    yield "html", session._repr_html_
    for name in ("closed", "status", "parts", "rows", "missing", "duration", "started", "snapshots", "times", "events"):
        yield name, lambda name=name: getattr(session, name)
    yield "statistics", session.statistics
    yield "chunks", lambda: [None for _ in session.chunks()]
    yield "read", session.read
    yield "read some", lambda: session.read(["rows/observation", "readings/motor", "resets"], start=3, stop=9)
    yield "row_at", lambda: session.row_at(100.0)
    yield "options", lambda: [session.options(text) for text in session.read(["resets/options"])["resets"]["options"]]
    for row in (0, 12):
        yield f"snapshot {row}", lambda row=row: session.snapshot(row)
    names: list[str] = []
    yield "series", lambda: names.extend(time_series.names_of(session))
    for name in [*names[:8], "reward", "nope"]:
        yield f"series {name}", lambda name=name: time_series.series(session, name)
    yield "plot", lambda: _page(session)
    yield "mcap", lambda: export_mcap(session, scratch / "it.mcap")
    yield "minari", lambda: export_minari(session, scratch / "it-minari")
    yield "replay", lambda: _played(session)
    yield "close", lambda: close_session(path, NAME)
    yield "remove", lambda: remove_session(path, NAME)


def _page(session: Any) -> None:
    from simckpt.plots import session as drawing

    drawing.page(session, ())


def _played(session: Any) -> None:
    with Replay(session, counting()) as replay:
        replay.run()
        replay.what_if(lambda observation: np.zeros(2, np.float32), start=2, steps=3)


def taken(path: Path, scratch: Path) -> tuple[list[str], list[str]]:
    """Returns what went wrong in reading a session in all ways, and which ways refused it."""
    faults, refused = [], []
    for name, call in ways(path, scratch):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except SimckptError as error:
            refused.append(name)
            str(error).encode("utf-8", "backslashreplace")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            caller = next(
                (each for each in reversed(traceback.extract_tb(error.__traceback__)) if "/simckpt/" in each.filename),
                place,
            )
            where = f"{Path(caller.filename).name}:{caller.lineno}"
            faults.append(f"{name}: {type(error).__name__}: {str(error)[-300:]} at {where}")
    return faults, refused


KINDS = {"damaged": damaged, "resealed": resealed, "crafted": crafted}


def run(
    root: Path, counts: dict[str, int], *, seed: int = 0, progress: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Tries so many of each kind, in processes of their own.

    Args:
        root: an empty folder.
        counts: {kind: how many}.
        seed: for one seed they are the same, on every machine, but for the times in the good session.
        progress: told what is tried.
    """
    good = root / "good"
    build(good)
    outcome = Outcome()
    with tempfile.TemporaryDirectory(dir=root) as warm:
        shutil.copytree(good, Path(warm) / "store")
        # whatever is loaded late shall be loaded now
        faults, refused = taken(Path(warm) / "store", Path(warm))
        assert (faults, refused) == ([], ["series nope"]), (faults, refused)
    watch = doors.Watch([str(root)])
    for kind, count in counts.items():
        for first in range(0, count, BATCH):
            progress(f"recordings from strangers, {kind} {first}")
            numbers = range(first, min(first + BATCH, count))
            found = doors.run_forked(
                lambda kind=kind, numbers=numbers: _batch(root, kind, numbers, seed, watch),
                memory=2 * doors.MEMORY,
                seconds=SECONDS,
            )
            outcome.tried += len(numbers)
            if "died" in found:
                current = (root / "current").read_text()
                outcome.faults.append(f"{current}: the process died, {found['died']}")
                continue
            outcome.refused += found["refused"]
            outcome.faults += found["faults"]
            outcome.foreign += found["foreign"]
    return outcome


def _batch(root: Path, kind: str, numbers: range, seed: int, watch: doors.Watch) -> dict[str, Any]:
    faults, refused = [], 0
    for number in numbers:
        label = f"{kind} {seed} {number}"
        (root / "current").write_text(label)
        where = root / "tried"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        told = KINDS[kind](root / "good", where / "store", random.Random(label)) or ""
        watch.on = True
        found, ways_refused = taken(where / "store", where)
        watch.on = False
        faults += [f"{label} ({told}): {each}" for each in found]
        refused += ways_refused != ["series nope"]
    return {"faults": faults, "refused": refused, "foreign": sorted(set(watch.found))}
