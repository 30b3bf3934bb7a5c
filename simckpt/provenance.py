"""Where a run comes from: library versions, machine, git commit. Nothing is imported to find out."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

PACKAGES = ("simckpt", "torch", "gymnasium", "mujoco", "numpy", "h5py", "gymnasium-robotics", "dm-control")
GIT_TIMEOUT = 10  # [s]; a hanging network file system must not hold up a training run


@functools.cache
def versions() -> Mapping[str, str]:
    """Returns {package: version} of Python and of what is installed of `PACKAGES`, and the machine's architecture."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return MappingProxyType(found)


def git_commit(folder: Path) -> dict[str, object] | None:
    """Returns {"commit": hash, "dirty": bool} of the working tree that holds `folder`, or None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": bool(changes)}


def version_differences(saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    """Returns one line for each package whose saved and live versions differ."""
    lines = []
    for name in sorted(set(saved) | set(live)):
        before, now = saved.get(name, "not installed"), live.get(name, "not installed")
        if before != now:
            lines.append(f"{name}: saved with {before}, now {now}")
    return lines


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
