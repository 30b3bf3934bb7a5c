"""Makes `golden_sessions/`, a store with sessions of the present format: one closed and merged, one that was killed.

    python tests/format/make_golden_sessions.py

Made once for a version of the format and kept from then on; later versions read it (`test_golden_sessions.py`).
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from simckpt import state
from simckpt.storage import StoreFiles
from simckpt.storage.session_records import LinkRecord, SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session

HOME = Path(__file__).parent / "golden_sessions"
MODEL = "30" * 16
MS = 1_000_000  # [ns]
MOMENT = 1_800_000_000.0


def tables(start: int, stop: int) -> dict[str, Any]:
    """Returns rows of 2 ms with a command and a reading each; every number follows from the row by exact arithmetic."""
    rows = np.arange(start, stop)
    first = rows[rows == 0]
    times = {"started": rows * 2 * MS, "finished": rows * 2 * MS + MS, "wall": rows * 2 * MS + 7}
    reset_times = dict.fromkeys(("started", "finished", "wall"), first * 0)
    return {
        "rows": {
            "order": 4 * rows + 2,
            "row": rows.copy(),
            **times,
            "action": (rows[:, None] % 3).astype(np.float32),
            "observation": {"arm": np.stack([rows / 4, -rows / 8], 1), "pair": (rows % 2 == 0, rows.astype(np.int8))},
            "reward": rows / 16,
            "terminated": rows == 7,
            "truncated": rows == 5,
            "signals": {"heat": rows * 0.5},
        },
        "resets": {
            "order": first + 1,
            "row": first.copy(),
            **reset_times,
            "seed": first + 3,
            "seeded": first == 0,
            "observation": {"arm": np.zeros((len(first), 2)), "pair": (first == 0, first.astype(np.int8))},
            "options": np.array(['{"height": 0.5}'] * len(first), str if len(first) else "U1"),
        },
        "commands": {
            "motor": {
                "order": 4 * rows + 3,
                "row": rows.copy(),
                "sequence": rows.astype(np.uint64),
                "monotonic": rows * 2 * MS,
                "wall": rows * 2,
                "values": rows[:, None] / 2,
            }
        },
        "readings": {
            "motor": {
                "order": 4 * rows + 4,
                "row": rows.copy(),
                "kind": (rows % 3).astype(np.uint8),
                "sequence": rows.astype(np.uint64),
                "device_time": rows * MS,
                "received": rows * 2 * MS,
                "wall": rows * 2,
                "late": rows % 4 == 1,
                "values": np.where(rows[:, None] % 3 == 0, rows[:, None] / [[2.0, 4.0]], np.nan),
            }
        },
        "events": {
            "order": np.array([-1]),
            "row": np.array([start]),
            "monotonic": np.array([start * MS]),
            "wall": np.array([start]),
            "kind": np.array(["note"]),
            "text": np.array([f"bei Zeile {start}: \N{GREEK SMALL LETTER OMEGA}"]),
        },
    }


def write_part(writer: SessionWriter, start: int, stop: int) -> None:
    """Writes one part of four rows."""
    number = start // 4
    spans = dict.fromkeys(("rows", "commands/motor", "readings/motor"), (start, stop))
    spans |= {"resets": (min(start, 1), 1), "events": (number, number + 1)}
    encoded = state.encode(tables(start, stop))
    writer.write_part(encoded, rows=(start, stop), spans=spans, started=start * 2 * MS, stopped=stop * 2 * MS)


def write_snapshot(writer: SessionWriter, row: int) -> None:
    """Writes a snapshot and its model."""
    writer.write_model(MODEL, state.encode({"mass": np.arange(4.0)}))
    encoded = state.encode({"env": {"python": {"row": row}}, "observation": {"arm": np.array([row / 4, -row / 8])}})
    settings = {"monotonic": row * 2 * MS, "wall": row, "reason": "interval", "models": [MODEL]}
    writer.write_snapshot(encoded, row=row, order=4 * row + 1, **settings)


def main() -> None:
    """Makes the store anew."""
    shutil.rmtree(HOME, ignore_errors=True)
    store = StoreFiles.create(HOME, clock=lambda: MOMENT, new_id=lambda: "0" * 31 + "1")
    links = (LinkRecord("motor", ("force",), ("force", "position"), "udp://127.0.0.1:9000"),)
    facts = {
        "env": {"id": "Arm-v0", "kwargs": {"gravity": (0.0, 9.81)}},
        "spaces": {"action": {"type": "Box", "low": -1.0}},
    }
    for name, id in (("closed", "c" * 32), ("killed", "d" * 32)):
        record = SessionRecord(id, name, MOMENT, 5, links=links, signals=("heat",), host="golden", **facts)
        create_session(store, record)
        with SessionWriter(HOME, name, clock=lambda: MOMENT + 9) as writer:
            for start in (0, 4, 8):
                write_snapshot(writer, start)
                write_part(writer, start, start + 4)
            if name == "closed":
                writer.close("error", "the arm fell off")
    shutil.rmtree(HOME / "tmp")


if __name__ == "__main__":
    main()
