"""Sessions for the tests of storage; the values of a row follow from its number alone."""

from pathlib import Path
from typing import Any

import numpy as np

from simckpt import state
from simckpt.storage import StoreFiles
from simckpt.storage.session_records import LinkRecord, OriginRecord, SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import SessionFiles

ID = "5e" * 16
MODEL = "30" * 16
SECOND = 1_000_000_000  # [ns]


def record(name: str = "pole", *, origin: OriginRecord | None = None, **changes: Any) -> SessionRecord:
    fields = {
        "id": ID,
        "name": name,
        "created": 1.8e9,
        "monotonic": 5 * SECOND,
        "links": (LinkRecord("motor", ("force",), ("force", "position"), "udp://127.0.0.1:9000"),),
        "env": {"id": "CartPole-v1", "kwargs": {"gravity": 9.81}},
        "spaces": {"action": {"type": "Box", "low": float("-inf"), "shape": [1]}},
        "host": "here",
    }
    return SessionRecord(**{**fields, **changes}, origin=origin)


def tables(start: int, stop: int) -> dict[str, Any]:
    """Rows `start` to `stop`, each with two commands."""
    rows = np.arange(start, stop)
    sent = np.repeat(rows, 2)
    return {
        "rows": {
            "order": 3 * rows,
            "row": rows,
            "reward": np.sin(rows),
            "observation": {"place": np.cos(rows)[:, None], "speed": (rows % 7).astype(np.float32)},
        },
        "commands": {"motor": {"order": 3 * sent + [1, 2] * len(rows), "row": sent, "values": sent[:, None] / 3}},
        "events": {
            "order": np.empty(0, np.int64),
            "row": np.empty(0, np.int64),
            "text": np.empty(0, "U1"),
        },
    }


def write_part(writer: SessionWriter, start: int, stop: int) -> None:
    writer.write_part(
        state.encode(tables(start, stop)),
        rows=(start, stop),
        spans={"rows": (start, stop), "commands/motor": (2 * start, 2 * stop), "events": (0, 0)},
        started=start * SECOND,
        stopped=stop * SECOND,
    )


def snapshot_of(row: int) -> dict[str, Any]:
    return {"env": {"physics": {"qpos": np.full(3, row / 7)}, "python": {"count": row}}, "observation": np.ones(2)}


def write_snapshot(writer: SessionWriter, row: int) -> None:
    writer.write_model(MODEL, state.encode({"mass": np.arange(4.0)}))
    writer.write_snapshot(
        state.encode(snapshot_of(row)),
        row=row,
        order=3 * row,
        monotonic=row * SECOND,
        wall=row,
        reason="interval",
        models=[MODEL],
    )


def new_session(path: Path, *, disk: Any = None, name: str = "pole") -> SessionWriter:
    store = StoreFiles.create(path, disk=disk)
    create_session(store, record(name), disk=disk)
    return SessionWriter(store.path, name, disk=disk)


def rows_of(path: Path, name: str = "pole") -> list[int]:
    """Returns the numbers of the rows that a reader finds, after every table was compared with what was written."""
    files = SessionFiles(path, name)
    rows: list[int] = []
    for part in files.parts():
        files.verify(f"parts/{part.folder}", part)
        found, expected = files.read_part(part), tables(*part.rows)
        assert_equal(found, expected)
        rows += found["rows"]["row"].tolist()
    return rows


def assert_equal(found: Any, expected: Any) -> None:
    """Equality of every bit, key, dtype and shape."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype.kind == expected.dtype.kind
        assert found.dtype == expected.dtype or found.dtype.kind == "U"
        assert found.shape == expected.shape
        assert found.tobytes() == expected.astype(found.dtype).tobytes()
    else:
        assert found == expected
