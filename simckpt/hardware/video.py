"""A video of a stretch of a session: it is replayed, and MuJoCo renders what the simulation was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import mujoco
import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.storage import durable, exports

if TYPE_CHECKING:
    from simckpt.hardware.replay import Replay
    from simckpt.hardware.session import Session

Frame = np.ndarray[Any, np.dtype[np.uint8]]


def export_video(
    session: Session,
    env: gym.Env[Any, Any],
    path: str | os.PathLike[str],
    *,
    start: int | None = None,
    stop: int | None = None,
    fps: float = 30.0,
    speed: float = 1.0,
    size: tuple[int, int] = (640, 480),
    camera: int | str = -1,
) -> Path:
    """Writes a video of some rows, and returns its path; nothing is replaced.

    It is made from a replay, so the env's links are disarmed afterwards, and nothing is sent to a device. Each frame
    shows the state after the first row that began then or later; of rows that a replay passes over there is none.
    MuJoCo needs OpenGL: on a machine without a display, set `MUJOCO_GL=egl` or `MUJOCO_GL=osmesa` before Python starts.

    Args:
        session: what was recorded.
        env: built as it was for the recording.
        path: of the new file, `.mp4` or `.gif`.
        start: the first row; by default that of the first snapshot.
        stop: one behind the last row; by default the end of the session.
        fps: frames for each second of the video; a GIF has whole hundredths of a second between two.
        speed: seconds of the session for each second of the video.
        size: width and height [pixels]; at most what the model's `offwidth` and `offheight` allow.
        camera: name or number of one of the model's; -1 is the free one.

    Raises:
        ConfigurationError: another ending, arguments that make no sense, an env without MuJoCo, no OpenGL here, or for
            mp4 `imageio-ffmpeg` is not installed.
        ConflictError: the path exists.
        StateMismatchError: the session is of another env.
        DamagedError: what was recorded cannot be trusted; there is no file then.
        StorageError: the disk refused; there is no file then.
    """
    from simckpt.hardware.replay import Replay

    target = Path(path)
    write = FORMS.get(target.suffix.lower())
    if write is None:
        raise ConfigurationError(f"a video ends in {' or '.join(FORMS)}, got {target.name!r}", keys=["path"])
    if not (fps > 0 and speed > 0 and min(size) > 0):
        raise ConfigurationError("fps, speed and size are positive numbers", keys=["fps", "speed", "size"])
    disk = durable.Disk()
    with exports.new_file(disk, target) as made, Replay(session, env) as replay:
        frames = _frames(replay, start, stop, fps, speed, size, camera)
        with durable.translated(target):
            write(made, frames, size, fps)
        if not made.exists():
            raise ConfigurationError(f"session {session.name!r} has no such rows to show", keys=["start", "stop"])
        durable.sync_path(disk, made.parent, made.name)
    return target


def _write_mp4(path: Path, frames: Iterator[Frame], size: tuple[int, int], fps: float) -> None:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        message = 'an mp4 is written by imageio-ffmpeg, which is not installed: pip install "simckpt[video]"'
        raise ConfigurationError(f"{message}; a .gif needs nothing more") from error
    # the name of the file does not say yet what it is; sides are made even
    writer = imageio_ffmpeg.write_frames(
        os.fspath(path), size, fps=fps, macro_block_size=2, output_params=["-f", "mp4"]
    )
    try:
        writer.send(None)
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()


def _write_gif(path: Path, frames: Iterator[Frame], size: tuple[int, int], fps: float) -> None:
    import imageio.v2 as imageio

    options: dict[str, Any] = {"duration": 1000 / fps, "loop": 0}
    writer: Any = imageio.get_writer(path, format="GIF", mode="I", **options)
    with writer:
        for frame in frames:
            writer.append_data(frame)


FORMS = {".mp4": _write_mp4, ".gif": _write_gif}


def _frames(
    replay: Replay,
    start: int | None,
    stop: int | None,
    fps: float,
    speed: float,
    size: tuple[int, int],
    camera: int | str,
) -> Iterator[Frame]:
    """Yields `(height, width, 3)` uint8 pictures."""
    apart = speed / fps * 1e9  # [ns]
    due = 0.0
    renderer = None
    try:
        for _ in replay.steps(start, stop):
            if renderer is None:
                renderer, due = _renderer(replay, size), replay.begun
            picture = None
            while replay.begun >= due:
                # of a stretch in which nothing ran, each frame is the same
                picture = _render(renderer, replay, camera) if picture is None else picture
                yield picture
                due += apart
    finally:
        if renderer is not None:
            renderer.close()


def _renderer(replay: Replay, size: tuple[int, int]) -> Any:
    simulation = _simulation(replay)
    width, height = size
    most = simulation.model.vis.global_
    if width > most.offwidth or height > most.offheight:
        raise ConfigurationError(
            f"the model allows pictures of at most {most.offwidth} x {most.offheight} pixels "
            f'(<visual><global offwidth="..."/></visual>), got {width} x {height}',
            keys=["size"],
        )
    try:
        return mujoco.Renderer(simulation.model, height, width)
    except Exception as error:  # each of the ways to OpenGL fails with errors of its own
        raise ConfigurationError(
            f"MuJoCo cannot render here ({type(error).__name__}: {error}): set MUJOCO_GL=egl or MUJOCO_GL=osmesa "
            "before Python starts, with that library installed (libegl1 or libosmesa6)"
        ) from error


def _simulation(replay: Replay) -> mujoco.MjData:
    found = replay.simulation
    if found is None:
        raise ConfigurationError("the env has no MuJoCo simulation to render", keys=["env"])
    return found


def _render(renderer: Any, replay: Replay, camera: int | str) -> Frame:
    try:
        renderer.update_scene(_simulation(replay), camera=camera)
    except ValueError as error:
        raise ConfigurationError(f"the model has no camera {camera!r}: {error}", keys=["camera"]) from error
    picture: Frame = renderer.render()
    return picture
