"""Options of a reset come back as they were given: every dtype, with any number of dimensions, none included."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorder_helpers import Counting
from replay_helpers import record

from simckpt.hardware import Recorder, Replay
from simckpt.hardware.reset_arguments import options_of, to_text

DTYPES = ("?", "i1", "u8", ">i4", "f2", "f4", "f8", "c8", "c16", "S3", "U2", "M8[s]", "m8[ns]")
SHAPES = ((), (1,), (0,), (3,), (1, 1), (2, 3), (2, 0, 1))


def same(given: Any, back: Any) -> bool:
    kept = type(given) is type(back) and given.dtype == back.dtype and given.shape == back.shape
    return kept and given.tobytes() == back.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_any_shape_come_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape, dtype=int))
    given = np.arange(count).astype("i8").astype(dtype).reshape(shape)
    for each in (given, np.asfortranarray(given) if shape else given, given[::-1] if shape else given):
        text = to_text(None, {"x": each, "y": [each, (each,)]})
        assert text is not None
        back = options_of(text)
        assert same(each, back["x"])
        assert same(each, back["y"][0])
        assert same(each, back["y"][1][0])


def test_arrays_without_dimensions_that_were_written_with_one_are_read() -> None:
    text = to_text(None, {"x": np.array(1.5)})
    assert text is not None
    content = json.loads(text[1:])
    ((path, leaf),) = content["options"]["leaves"].items()
    assert leaf[4] == []
    content["options"]["leaves"][path] = [*leaf[:4], [1], leaf[5]]
    assert same(np.array(1.5), options_of("!" + json.dumps(content))["x"])


def test_a_session_whose_resets_had_such_options_is_played(tmp_path: Path) -> None:
    def loop(env: Recorder) -> None:
        for gain in (np.array(1.5), np.array(True), np.zeros((1, 2))):
            env.reset(seed=3, options={"gain": gain})
            for _ in range(4):
                env.step(np.zeros(2, np.float32))

    session = record(tmp_path / "s", Counting(), loop=loop)
    report = Replay(session, Counting()).run()
    assert report.exact, str(report)
    assert report.rows == (range(12),)
