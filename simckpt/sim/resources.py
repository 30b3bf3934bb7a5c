"""What is known not to be state: resources by class, attributes by name; and the doors for users to add to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from simckpt.state.walk import qualified_name


@dataclass(frozen=True, eq=False)
class Adapter:
    """How objects of a user's class are read and written.

    Attributes:
        get: object -> state tree.
        set: (object, state tree) -> None, in place.
    """

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


# entries ending in a dot are prefixes of module names; the rest are qualified class names, and match subclasses too
_RESOURCES = [
    "mujoco._structs.",
    "mujoco._specs.",
    "mujoco._render.",
    "mujoco.renderer.",
    "mujoco.viewer.",
    "mujoco.glfw.",
    "mujoco.egl.",
    "mujoco.osmesa.",
    "mujoco.cgl.",
    "mujoco.gl_context.",
    "mujoco.rendering.",
    "mujoco._callbacks.",
    "mujoco._errors.",
    "gymnasium.envs.mujoco.mujoco_rendering.",
    "gymnasium.envs.registration.",
    "gymnasium.utils.ezpickle.",
    "gymnasium_robotics.utils.mujoco_utils.",
    "pygame.surface.Surface",
    "pygame.Surface",
    "pygame.window.Window",
    "pygame.time.Clock",
    "pygame.font.Font",
    "pygame.ftfont.Font",
    "pygame.freetype.Font",
    "pygame.mixer.Sound",
    "pygame.mixer.Channel",
    "pygame.joystick.Joystick",
    "glfw.",
    "OpenGL.",
    "moviepy.video.io.",
    "moviepy.Clip.Clip",
    "matplotlib.figure.FigureBase",
    "matplotlib.artist.Artist",
    "matplotlib.backend_bases.",
    "matplotlib.backends.",
    "matplotlib.animation.",
    "matplotlib.widgets.",
    "pyglet.gl.",
    "pyglet.window.",
    "pyglet.canvas.",
    "pyglet.display.",
    "pyglet.graphics.",
    "pyglet.image.",
    "pyglet.text.",
    "pyglet.font.",
    "pyglet.media.",
    "cv2.VideoWriter",
    "imageio.core.format.Format.Writer",
    "PIL.ImageFont.ImageFont",
    "PIL.ImageFont.FreeTypeFont",
    "PIL.ImageFont.TransposedFont",
    "dm_control._render.",
    "dm_control.mujoco.engine.Camera",
    "dm_control.mujoco.engine.Contexts",
    "dm_control.mujoco.engine.NamedIndexStructs",
    "dm_control.mujoco.index.",
    "dm_control.mujoco.wrapper.",
    "dm_control.mjcf.",
    "dm_control.rl.specs.",
    "dm_control.viewer.",
    "dm_env.specs.",
    "lxml.etree._Element",
    "lxml.etree._ElementTree",
    "lxml.etree._Document",
    "logging.Logger",
    "logging.LoggerAdapter",
    "logging.Handler",
    "_thread.lock",
    "_thread.RLock",
    "threading.Condition",
    "threading.Semaphore",
    "threading.Barrier",
    "_thread._local",
    "weakref.ProxyType",
    "weakref.CallableProxyType",
    "weakproxy",
    "weakcallableproxy",
    "gymnasium.logger.",
    "simckpt.hardware.pace.Pace",
    "simckpt.hardware.transports.Transport",
    "simckpt.sim.environment.",
    "simckpt.sim.python_state.",
    "simckpt.sim.physics.",
    "simckpt.sim.model.",
]

# inside the prefixes above, but state all the same
_NOT_RESOURCES = frozenset({"simckpt.sim.environment.SnapshotEnv"})

_REASONS = {
    "threading.Thread": "a running thread has a stack that cannot be saved",
    "multiprocessing.process.BaseProcess": "it is another process",
    "multiprocessing.connection._ConnectionBase": "it is an open pipe",
    "multiprocessing.queues.Queue": "it is shared with other processes",
    "multiprocessing.managers.BaseManager": "it is another process",
    "multiprocessing.pool.Pool": "it is a pool of processes",
    "concurrent.futures._base.Executor": "it is a pool of workers",
    "subprocess.Popen": "it is another process",
    "socket.socket": "the other end of a socket cannot be saved",
    "_io._IOBase": "an open file is not part of the state",
    "tempfile._TemporaryFileWrapper": "an open file is not part of the state",
    "generator": "a suspended generator has a stack that cannot be saved; keep the place in attributes instead",
    "coroutine": "a suspended coroutine has a stack that cannot be saved",
    "async_generator": "a suspended generator has a stack that cannot be saved",
    "numpy.memmap": "its content lies in a file; hold an ordinary array",
}

# attributes that describe how an object was made or is shown, by class
_SKIPPED_ATTRIBUTES: dict[str, frozenset[str]] = {
    "gymnasium.core.Env": frozenset({"spec", "metadata", "render_mode"}),
    "gymnasium.core.Wrapper": frozenset({"_cached_spec", "_metadata", "spec"}),
    "gymnasium.vector.vector_env.VectorEnv": frozenset({"spec", "metadata", "render_mode"}),
    "gymnasium.vector.vector_env.VectorWrapper": frozenset({"_metadata", "_spec"}),
    "gymnasium.utils.ezpickle.EzPickle": frozenset({"_ezpickle_args", "_ezpickle_kwargs"}),
    "gymnasium.utils.record_constructor.RecordConstructorArgs": frozenset({"_saved_kwargs"}),
    # files that one instance compiled its model from, temporary ones among them
    "gymnasium.envs.mujoco.mujoco_env.MujocoEnv": frozenset({"fullpath", "model_path"}),
    "gymnasium_robotics.envs.robot_env.BaseRobotEnv": frozenset({"fullpath"}),
    "gymnasium_robotics.envs.mujoco.mujoco_py_env.BaseMujocoPyEnv": frozenset({"fullpath"}),
    "gymnasium_robotics.envs.maze.maze.MazeEnv": frozenset({"tmp_xml_file_path"}),
    "gymnasium_robotics.envs.maze.maze_v4.MazeEnv": frozenset({"tmp_xml_file_path"}),
    # caches of accessors, and contexts of renderers
    "dm_control.mujoco.engine.Physics": frozenset({"_contexts", "_named", "_bindings"}),
    "gymnasium.wrappers.rendering.RecordVideo": frozenset({"video_folder", "disable_logger"}),
}

# wall-clock marks, kept as the time that has passed since, and queues of durations
_CLOCKS = dict.fromkeys(
    (
        "gymnasium.wrappers.common.RecordEpisodeStatistics",
        "gymnasium.wrappers.vector.common.RecordEpisodeStatistics",
    ),
    frozenset({"episode_start_time", "episode_start_times", "time_queue"}),
)

_stateless: set[type | str] = set()
_adapters: dict[type, Adapter] = {}
_listeners: list[Callable[[], None]] = []


def register_stateless(cls: type | str) -> None:
    """Declares a class, with its subclasses, stateless: its objects are left alone by captures and restores.

    Args:
        cls: the class, or its qualified name such as `"mylib.viewer.Window"`.
    """
    _stateless.add(cls)
    _changed()


def register_adapter(cls: type, get: Callable[[Any], Any], set: Callable[[Any, Any], None]) -> None:
    """Says how objects of a class, and of its subclasses, are captured and restored.

    Args:
        cls: the class.
        get: `get(obj)` returns a state tree; it is copied.
        set: `set(obj, state)` puts it back in place; it receives a copy.
    """
    _adapters[cls] = Adapter(get, set)
    _changed()


def on_change(listener: Callable[[], None]) -> None:
    """Calls `listener()` after every registration, so that it can forget what it concluded."""
    _listeners.append(listener)


def _changed() -> None:
    for listener in _listeners:
        listener()


def adapter_for(cls: type) -> Adapter | None:
    """Returns the adapter of the nearest base, or None."""
    return next((_adapters[base] for base in cls.__mro__ if base in _adapters), None)


def declared_stateless(cls: type) -> bool:
    """Returns whether a user declared the class, or a base of it, stateless."""
    return any(base in _stateless or qualified_name(base) in _stateless for base in cls.__mro__)


def known_resource(cls: type) -> bool:
    """Returns whether objects of the class are models, windows, locks and the like, which are not state."""
    names = {qualified_name(base) for base in cls.__mro__}
    if names & _NOT_RESOURCES or _is_dm_control_physics(cls):
        return False
    own = qualified_name(cls)
    return any(own.startswith(entry) if entry.endswith(".") else entry in names for entry in _RESOURCES)


def _is_dm_control_physics(cls: type) -> bool:
    return any(
        base.__name__ in ("Physics", "MjData") and base.__module__.startswith("dm_control.") for base in cls.__mro__
    )


def refusal(cls: type) -> str | None:
    """Returns why objects of a class that is known to hold outside state cannot be captured, or None."""
    return next((_REASONS[name] for base in cls.__mro__ if (name := qualified_name(base)) in _REASONS), None)


def skipped_attributes(cls: type) -> frozenset[str]:
    """Returns the names of attributes that are not state in objects of a class."""
    found: frozenset[str] = frozenset()
    for base in cls.__mro__:
        found |= _SKIPPED_ATTRIBUTES.get(qualified_name(base), frozenset())
    return found


def clock_attributes(cls: type) -> frozenset[str]:
    """Returns the names of attributes that hold `time.perf_counter()` values."""
    found: frozenset[str] = frozenset()
    for base in cls.__mro__:
        found |= _CLOCKS.get(qualified_name(base), frozenset())
    return found


def is_moved_path(saved: Any, live: Any) -> bool:
    """Returns whether a saved path is of another machine, or of a temporary file that is gone, and the live one is not.

    Args:
        saved: any value of the state.
        live: what stands at its place; kept if this returns True.
    """
    if type(live) is not type(saved) or not isinstance(saved, str | PurePath) or str(saved)[:1] != "/":
        return False
    return live != saved and _exists(live) and not _exists(saved)


def _exists(path: str | PurePath) -> bool:
    try:
        return Path(path).is_absolute() and Path(path).exists()
    except (OSError, ValueError):
        # a text that is no path at all
        return False
