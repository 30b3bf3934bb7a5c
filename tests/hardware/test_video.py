"""A video of a stretch: one picture for each moment, of the state that was then."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from replay_helpers import cart_pole, record

from simckpt.errors import ConfigurationError, ConflictError
from simckpt.hardware import Replay, export_video
from simckpt.hardware.session import Session
from simckpt.hardware.video import _frames

SIZE = (64, 48)


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    def loop(env: Any) -> None:
        env.reset(seed=1)
        for _ in range(6):
            env.step(np.array([1.0]))

    return record(tmp_path_factory.mktemp("pole") / "s", cart_pole(), loop=loop)


@pytest.fixture(scope="module")
def opengl() -> None:
    """Skips where MuJoCo cannot render."""
    if os.environ.get("MUJOCO_GL") == "disabled":
        pytest.skip("no OpenGL: neither libEGL nor a display")
    try:
        mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8).close()
    except Exception as error:
        pytest.skip(f"no OpenGL: {error}")


def fps_of(session: Session, frames: int) -> float:
    """Returns so many frames a second that rows 0 to 6 take that many."""
    begun = session.read(["rows/started"])["rows"]["started"]
    return frames / ((begun[-1] - begun[0]) / 1e9)


@pytest.mark.usefixtures("opengl")
def test_a_gif_has_a_frame_for_each_moment(pole: Session, tmp_path: Path) -> None:
    from PIL import Image

    # a GIF counts in hundredths of a second: slowly, so that rounding does not matter
    fps = 4.0
    path = export_video(
        pole, cart_pole(), tmp_path / "a.gif", fps=fps, speed=4.0 / fps_of(pole, 4), size=SIZE, camera=-1
    )
    with Image.open(path) as picture:
        assert picture.size == SIZE
        # equal pictures are one that is shown for longer
        shown = []
        for number in range(picture.n_frames):
            picture.seek(number)
            shown.append(picture.info["duration"])
    # the first row, and those that had begun by each of four quarters
    assert sum(shown) in (4 * 250, 5 * 250)


@pytest.mark.usefixtures("opengl")
def test_an_mp4_has_the_size_that_was_asked_for(pole: Session, tmp_path: Path) -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = export_video(pole, cart_pole(), tmp_path / "a.mp4", fps=fps_of(pole, 3), size=SIZE)
    frames, _ = imageio_ffmpeg.count_frames_and_secs(os.fspath(path))
    assert frames in (3, 4)
    told = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", path], capture_output=True, text=True, check=False)
    assert "mp4" in told.stderr
    assert f"{SIZE[0]}x{SIZE[1]}" in told.stderr
    with pytest.raises(ConflictError):
        export_video(pole, cart_pole(), path)


@pytest.mark.usefixtures("opengl")
def test_a_frame_shows_the_state_of_its_row(pole: Session) -> None:
    with Replay(pole, cart_pole()) as replay:
        frames = list(_frames(replay, 2, 3, 30.0, 1.0, SIZE, -1))
        assert len(frames) == 1
        renderer = mujoco.Renderer(replay.simulation.model, SIZE[1], SIZE[0])
        data = mujoco.MjData(replay.simulation.model)
        data.qpos[:] = pole.read(["rows/observation"], start=2, stop=3)["rows"]["observation"][0, :2]
        mujoco.mj_forward(replay.simulation.model, data)
        renderer.update_scene(data)
        shown = renderer.render()
        renderer.close()
    # positions of geoms are one physics step behind those of the joints: less than a grey value on the whole
    assert np.abs(shown.astype(int) - frames[0].astype(int)).mean() < 1
    assert frames[0].std() > 1


@pytest.mark.usefixtures("opengl")
def test_what_cannot_be_shown_is_refused_and_nothing_is_left(pole: Session, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"path": "a.avi"}, r"ends in \.mp4 or \.gif"),
        ({"fps": 0}, "positive"),
        ({"size": (4000, 3000)}, "allows pictures of at most 640 x 480"),
        ({"camera": "side"}, "no camera 'side'"),
        ({"start": 6}, "has the rows 0 to 5, none from 6 on"),
    ]
    for changes, match in wrong:
        arguments = {"path": "a.gif", **changes}
        path = tmp_path / arguments.pop("path")
        with pytest.raises(ConfigurationError, match=match):
            export_video(pole, cart_pole(), path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_without_opengl_the_error_says_what_to_set(pole: Session, tmp_path: Path) -> None:
    code = f"""
import sys, simckpt
sys.path.insert(0, {os.fspath(Path(__file__).parent)!r})
from replay_helpers import cart_pole
from simckpt.errors import ConfigurationError
from simckpt.hardware import export_video
try:
    export_video(simckpt.Store({os.fspath(pole.files.root)!r}).session("played"), cart_pole(), "a.gif")
except ConfigurationError as error:
    print(error)
"""
    clean = {key: value for key, value in os.environ.items() if key != "DISPLAY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**clean, "MUJOCO_GL": "disabled", "PYTHONPATH": os.fspath(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "set MUJOCO_GL=egl or MUJOCO_GL=osmesa before Python starts" in done.stdout
    assert list(tmp_path.iterdir()) == []
