"""Portions of a session are the session, whatever their size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_helpers import cart_pole, record

from simckpt.hardware import Replay
from simckpt.hardware.windows import windows


def leaves(tables: dict[str, Any], path: str = "") -> dict[str, np.ndarray]:
    found = {}
    for name, part in tables.items():
        found |= leaves(part, f"{path}/{name}") if isinstance(part, dict) else {f"{path}/{name}": part}
    return found


def test_portions_have_every_entry_once_and_are_played_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = record(tmp_path / "s", cart_pole())
    monkeypatch.setattr("simckpt.hardware.windows.ROWS", 16)
    portions = list(windows(session))
    assert len(portions) >= 150 // 16
    assert max(len(each["rows"]["row"]) for each in portions) <= 16
    parts = [leaves(each) for each in portions]
    for path, column in leaves(session.read()).items():
        assert np.concatenate([part[path] for part in parts if path in part]).tobytes() == column.tobytes(), path
    for each in portions:
        # what belongs to a row comes with it or before it
        last = int(each["rows"]["row"][-1])
        later = [portion for portion in portions if len(portion["rows"]["row"]) and portion["rows"]["row"][0] > last]
        for portion in later:
            assert (portion["commands"]["motor"]["row"] > last).all()
    assert Replay(session, cart_pole()).run().exact
    some = [row for portion in windows(session, start=40, stop=90) for row in portion["rows"]["row"].tolist()]
    assert some == list(range(40, 90))
