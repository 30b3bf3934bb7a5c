"""Where a run comes from: library versions, machine, git commit and changes. Nothing is imported to find out.

Secrets stay out of the store as far as names and forms can tell: of files whose names look secret (`.env`, `*token*`,
`*.pem`, ...) only the names are kept, and lines that look like keys or passwords are replaced by a note. A secret
that looks like neither is not recognised, and hyperparameters are kept as they are given.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

PACKAGES = ("simckpt", "torch", "gymnasium", "mujoco", "numpy", "h5py", "gymnasium-robotics", "dm-control")
GIT_TIMEOUT = 10  # [s]; a hanging network file system must not hold up a training run
DIFF_LIMIT = 64 << 10  # [bytes] of a diff that are kept
READ_LIMIT = 16 << 20  # [bytes] of a diff that are looked at
NAMES_LIMIT = 100  # names of files in each list
LINE_LIMIT = 4096  # [bytes]; longer lines are data, such as a notebook's pictures

LEFT_OUT_LINE = "<a line that looks like a secret was left out>"
LEFT_OUT_LONG = "<a line of {} bytes was left out>"

# by parts of a path, lower case; `tokenizer.py` is no secret
_SECRET_NAME = re.compile(
    r"\.env.*|\.?netrc|\.npmrc|\.pypirc|\.htpasswd|kubeconfig|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|.*(secret|token(?!iz)|credential|passw|api_?key|private_?key).*|.*\.(pem|key|p12|pfx|jks|kdbx|keystore|ppk|asc|gpg)"
)
_SECRET_LINE = re.compile(
    # what a name like API_KEY or password is set to; tokens also are what language models count and split text into
    r"(?i:(api|access|secret|private|auth|account|license)[_-]?key|secret|passw(or)?d|passphrase|credential)"
    r"[\w-]*[\"']?\s*[:=]\s*[\"']?[^\s\"',)]{6,}"
    r"|(?i:token(?!iz))[\w-]*[\"']?\s*[:=]\s*([\"'][^\s\"']{6,}|(?=\w*[0-9])(?=\w*[A-Za-z])\w{8,})"
    # the forms of OpenAI, Stripe, GitHub, GitLab, Hugging Face, AWS, Slack, Google, JSON web tokens
    r"|\b[srp]k[-_][A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bhf_[A-Za-z0-9]{16,}|\b(AKIA|ASIA)[A-Z0-9]{12,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}|(?i:\bbearer)\s+[\w.~+/-]{16,}"
    r"|://[^/\s:@]+:[^/\s@]+@"  # user:password in a URL
    # forty characters of what base64 is made of, upper and lower case and digits among them
    r"|(?<![\w+/-])(?=[\w+/-]*[A-Z])(?=[\w+/-]*[a-z])(?=[\w+/-]*[0-9])[\w+/-]{40,}"
)


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
    the module says; `diff_complete` is False if it was cut, lines were left out, or git took too long.
    """
    found = _git(folder, "rev-parse", "HEAD", "--show-toplevel")
    if found is None:
        return None
    commit, _, top = found.removesuffix("\n").partition("\n")
    diff, complete, left_out = _diff(Path(top))
    untracked = (_git(Path(top), "ls-files", "--others", "--exclude-standard", "--directory", "-z") or "").split("\0")
    return {
        "commit": commit,
        "dirty": bool(diff or left_out),
        "diff": diff,
        "diff_complete": complete,
        "left_out": left_out[:NAMES_LIMIT],
        "untracked": [_plain(name) for name in untracked if name][:NAMES_LIMIT],
    }


def _diff(root: Path) -> tuple[str, bool, list[str]]:
    options = ["--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"]
    command = [*_GIT, "-C", str(root), "diff", *options, "--submodule=short", "HEAD"]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_git_environment()
        )
    except OSError:
        return "", False, []
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
    return diff, complete and code == 0, left_out


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
    size, complete, skipping, in_key, in_hunk = 0, True, False, False, False
    for raw in lines:
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if line.startswith("diff --git "):
            path = _path_of(line)
            in_key, in_hunk, skipping = False, False, looks_secret(path)
            if skipping:
                left_out.append(_plain(path))
                complete = False
        in_hunk = in_hunk or line.startswith("@@")
        if skipping:
            continue
        if in_hunk:
            in_key = in_key or ("PRIVATE KEY" in line and "BEGIN" in line)
            if in_key or _SECRET_LINE.search(line):
                in_key = in_key and not ("PRIVATE KEY" in line and "END" in line)
                line, complete = line[:1] + LEFT_OUT_LINE, False
            complete = complete and not line[1:].startswith(LEFT_OUT_LONG.partition("{")[0])
        size += len(line.encode("utf-8")) + 1
        if size > DIFF_LIMIT:
            return "".join(kept), False, left_out
        kept.append(line + "\n")
    return "".join(kept), complete, left_out


def looks_secret(path: str) -> bool:
    """Returns whether a file's name, or that of a folder it lies in, looks as if it held secrets."""
    return any(_SECRET_NAME.fullmatch(part) for part in path.lower().split("/"))


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
