"""Where a run comes from: library versions, machine, git commit and changes. Nothing is imported to find out.

Secrets stay out of the store as far as names and forms can tell: of files whose names look secret (`.env`, `*token*`,
`*.pem`, ...) only the names are kept, and lines that look like keys or passwords are replaced by a note; see
`redaction`. A secret that looks like neither is not recognised, and hyperparameters are kept as they are given.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simckpt.redaction import SecretLines, looks_secret

PACKAGES = ("simckpt", "torch", "gymnasium", "mujoco", "numpy", "h5py", "gymnasium-robotics", "dm-control")
GIT_TIMEOUT = 10  # [s]; a hanging network file system must not hold up a training run
DIFF_LIMIT = 64 << 10  # [bytes] of a diff that are kept
READ_LIMIT = 16 << 20  # [bytes] of a diff that are looked at
NAMES_LIMIT = 100  # names of files in each list
LINE_LIMIT = 4096  # [bytes]; longer lines are data, such as a notebook's pictures

LEFT_OUT_LINE = "<a line that looks like a secret was left out>"
LEFT_OUT_LONG = "<a line of {} bytes was left out>"


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


def device() -> dict[str, Any]:
    """Returns {"cpu": model, "gpus": [names]}; the GPUs are those that torch has in use by now, if it is loaded."""
    gpus: list[str] = []
    torch = sys.modules.get("torch")
    # asking torch about a GPU that it does not use yet would set it up, which takes memory there and breaks forks
    if torch is not None and torch.cuda.is_initialized():
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"cpu": _cpu_model(), "gpus": gpus}


@functools.cache
def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "hardware", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the working tree that holds `folder` and what differs from it, or None outside of one.

    {"commit": hash, "dirty": bool, "diff": text, "diff_complete": bool, "left_out": [files with secret-looking names],
    "untracked": [names]}. The diff is that of tracked files against the commit, at most 64 KB, without secrets as
    the module says; `diff_complete` is False if it was cut, lines were left out, or git failed or took too long. Where
    git did not say, `dirty` and `untracked` are None.
    """
    found = _git(folder, "rev-parse", "HEAD", "--show-toplevel")
    if found is None:
        return None
    commit, _, top = found.removesuffix("\n").partition("\n")
    diff, complete, left_out, failed = _diff(Path(top))
    untracked = _git(Path(top), "ls-files", "--others", "--exclude-standard", "--directory", "-z")
    names = None if untracked is None else [_plain(name) for name in untracked.split("\0") if name]
    return {
        "commit": commit,
        "dirty": True if diff or left_out else None if failed else False,
        "diff": diff,
        "diff_complete": complete,
        "left_out": left_out[:NAMES_LIMIT],
        "untracked": None if names is None else names[:NAMES_LIMIT],
    }


def git_commit(folder: Path) -> dict[str, Any] | None:
    """Returns {"commit": hash, "dirty": bool} of the working tree that holds `folder`, or None outside of one.

    What `git_state` says of the two, without looking at what has changed, so that a hundred branches cost no diffs.
    """
    found = _git(folder, "describe", "--always", "--dirty", "--abbrev=64", "--exclude=*")
    if found is None:
        return None
    commit, dirty, _ = found.strip().partition("-dirty")
    return {"commit": commit, "dirty": bool(dirty)}


def _diff(root: Path) -> tuple[str, bool, list[str], bool]:
    """Returns what `bounded_diff` does, and whether git failed, was stopped, or is not there."""
    options = ["--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"]
    command = [*_GIT, "-C", str(root), "diff", *options, "--submodule=short", "HEAD"]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_git_environment()
        )
    except OSError:
        return "", False, [], True
    # a diff may be gigabytes: it is read line by line, and git is stopped when enough of it has been seen
    timer = threading.Timer(GIT_TIMEOUT, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout as stream:
            diff, complete, left_out = bounded_diff(_lines(stream))
        code = process.wait()
    finally:
        timer.cancel()
        timer.join()
    return diff, complete and code == 0, left_out, code != 0


def _lines(stream: Any) -> Iterator[bytes]:
    """Gives the lines of a stream, each cut to what is needed to judge it."""
    read = 0
    while line := stream.readline(LINE_LIMIT):
        size = len(line)
        while not line.endswith(b"\n") and (rest := stream.readline(1 << 20)):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        read += size
        yield line if size == len(line) else line[:1] + LEFT_OUT_LONG.format(size).encode() + b"\n"
        if read > READ_LIMIT:
            return


def bounded_diff(lines: Iterable[bytes]) -> tuple[str, bool, list[str]]:
    """Returns a diff without secrets and of at most `DIFF_LIMIT` bytes, whether it is complete, and files left out.

    Args:
        lines: of `git diff --no-renames`, with their ends.
    """
    kept: list[str] = []
    left_out: list[str] = []
    size, complete, skipping, in_hunk, secrets = 0, True, False, False, SecretLines()
    for raw in lines:
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if line.startswith("diff --git "):
            path = _path_of(line)
            in_hunk, skipping, secrets = False, looks_secret(path), SecretLines()
            if skipping:
                left_out.append(_plain(path))
                complete = False
        in_hunk = in_hunk or line.startswith("@@")
        if skipping:
            continue
        if in_hunk:
            if secrets.hides(line[1:]):
                line, complete = line[:1] + LEFT_OUT_LINE, False
            complete = complete and not line[1:].startswith(LEFT_OUT_LONG.partition("{")[0])
        size += len(line.encode("utf-8")) + 1
        if size > DIFF_LIMIT:
            return "".join(kept), False, left_out
        kept.append(line + "\n")
    return "".join(kept), complete, left_out


def _path_of(header: str) -> str:
    # without renames both halves of `diff --git a/<path> b/<path>` are equal, spaces in the path or not
    rest = header.removeprefix("diff --git ").replace('"', "")
    return rest[2 : 2 + (len(rest) - 5) // 2]


def _plain(name: str) -> str:
    return name.encode("utf-8", errors="replace").decode("utf-8")[:1000]


def version_differences(saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    """Returns one line for each package whose saved and live versions differ."""
    lines = []
    for name in sorted(set(saved) | set(live)):
        before, now = saved.get(name, "not installed"), live.get(name, "not installed")
        if before != now:
            lines.append(f"{name}: saved with {before}, now {now}")
    return lines


_GIT = ("git", "-c", "core.quotePath=false")


def _git_environment() -> dict[str, str]:
    # asking must not write: `git status` would refresh the index, under a lock that the user's own git waits for
    return {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}


def _git(folder: Path, *arguments: str) -> str | None:
    command = [*_GIT, "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=GIT_TIMEOUT,
            check=True,
            env=_git_environment(),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="surrogateescape")
