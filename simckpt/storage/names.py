"""The rules for names: runs, components, ids and sequence numbers."""

from __future__ import annotations

import functools
import re
import secrets
from urllib.parse import quote, unquote

from simckpt.errors import FormatError, InvalidNameError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ID = re.compile(r"[0-9a-f]{32}")
SEQUENCE = re.compile(r"[0-9]{8}")
STRUCTURE = "_tree"  # the dataset of a component that holds everything which is not an array
STRUCTURE_KIND = "structure"  # of that leaf, and of no other


def check_run_name(name: str) -> str:
    """Returns `name`, if it can be the name of a run and of its folder.

    Raises:
        InvalidNameError: with a name that would do instead.
    """
    if isinstance(name, str) and is_run_name(name):
        return name
    raise InvalidNameError(
        f"{name!r} cannot be the name of a run: up to 100 letters, digits and . _ - are allowed, starting with a "
        f"letter or a digit, without '..' and without a dot at the end; {_suggest(str(name))!r} would do"
    )


def _suggest(name: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    cleaned = re.sub(r"\.{2,}", ".", cleaned).lstrip("._-").rstrip(".-")
    return cleaned[:100].rstrip(".-") or "run"


def is_run_name(name: str) -> bool:
    """Returns whether a folder of this name can hold a run; others in `runs/` are not simckpt's."""
    return RUN_NAME.fullmatch(name) is not None and ".." not in name and not name.endswith(".")


def random_id() -> str:
    """Returns 128 random bits as 32 hexadecimal digits: the identity of a store, a run or a checkpoint."""
    return secrets.token_hex(16)


def is_sequence_number(seq: int) -> bool:
    """Returns whether a commit can have this number."""
    return 1 <= seq <= 99_999_999


def sequence_name(seq: int) -> str:
    """Returns the name of the folder of commit number `seq` (from 1), eight digits, so that names sort like numbers."""
    if not is_sequence_number(seq):
        raise FormatError(f"a commit number lies between 1 and 99999999, got {seq}")
    return f"{seq:08d}"


def encode_part(name: str) -> str:
    """Returns `name` as one part of a path in a file: percent-encoded, never '.' or '..', empty only if `name` is.

    Raises:
        InvalidNameError: half of a surrogate pair, which no file can hold.
    """
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"{name!r} cannot be a name in a file: {error.reason}") from error
    return encoded if encoded.strip(".") else encoded.replace(".", "%2E")


@functools.lru_cache(1024)  # an index has one component's name on each of its lines
def decode_part(part: str) -> str:
    """Returns what `encode_part` was given.

    Raises:
        FormatError: text that `encode_part` does not write, such as a second spelling of a name.
    """
    try:
        name = unquote(part, errors="strict")
        if encode_part(name) == part:
            return name
    except (UnicodeDecodeError, InvalidNameError) as error:
        raise FormatError(f"{part[:80]!r} is no percent-encoded name: {error}") from error
    raise FormatError(f"{part[:80]!r} is no percent-encoded name; {encode_part(name)[:80]!r} would be")
