"""Records as text: JSON that carries its own digest, and strict reading of its fields.

A record is one JSON object, one key a line, in ASCII. Its last key is `digest`, over every byte before that key's line.
So a record is whole and unchanged, or it is `DamagedError`; what follows from a good digest but breaks a rule is
`FormatError`; what a newer simckpt wrote is `UnsupportedFormatError`.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

from simckpt.errors import DamagedError, FormatError, StorageError, UnsupportedFormatError
from simckpt.storage import digests, names

VERSION = (0, 3)  # of the format that this simckpt writes; it reads every earlier one
FEATURES = frozenset({"sessions", "shards"})  # what `requires` may name
LEVELS = 100  # of containers in each other in a typed value; Python's JSON reads about a thousand
_FIRST_MOMENT, _LAST_MOMENT = -62_135_596_800.0, 253_402_300_799.0  # the years 1 to 9999 [s since 1970]
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})")
_SEAL = re.compile(rb',\n "digest": "([a-z0-9-]{1,20}:[0-9a-f]{1,128})"\n\}\n\Z')
_SEAL_SIZE = 200  # [bytes] at the end of a record that may be its seal
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FLOATS = [{"float": name} for name in _SPECIAL_FLOATS]

T = TypeVar("T")


def seal(record: str, fields: Mapping[str, Any], *, rows: tuple[str, list[Any]] | None = None) -> bytes:
    """Returns the bytes of a record.

    Args:
        record: what it is, such as "commit".
        fields: its JSON fields.
        rows: a last field that is a list, written with one item a line.
    """
    head = {"format": f"simckpt {record}", "version": f"{VERSION[0]}.{VERSION[1]}", **fields}
    lines = [f" {json.dumps(key)}: {_dump(value)}" for key, value in head.items()]
    if rows is not None:
        lines.append(f' "{rows[0]}": [\n' + ",\n".join(f"  {_dump(row)}" for row in rows[1]) + "\n ]")
    body = ("{\n" + ",\n".join(lines)).encode("ascii")
    return resealed(body)


# built once: json.dumps makes a new one for each call with options
_dump = json.JSONEncoder(ensure_ascii=True, allow_nan=False).encode


def unseal(data: bytes, record: str, *, path: object) -> Fields:
    """Returns the fields of a record whose digest is right.

    Args:
        data: the whole file.
        record: what it must be.
        path: where it was, for messages.

    Raises:
        DamagedError: bytes differ from the digest, or the end is missing.
        UnsupportedFormatError: a newer version, or a feature or digest that this simckpt lacks.
        FormatError: the digest is right and the content breaks a rule.
        StorageError: not enough memory.
    """
    check_digest(data, path=path)
    fields = parse(data, path)
    _check_version(fields)
    if fields.text("format") != f"simckpt {record}":
        raise FormatError(f"{path} is not a {record} record of simckpt but {fields.text('format')!r}")
    return fields


def parse(data: bytes, path: object) -> Fields:
    """Returns the fields of a JSON object; raises FormatError or StorageError."""
    try:
        content = _DECODER.decode(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: {error}") from error
    except MemoryError as error:
        raise StorageError(f"{path} of {len(data)} bytes does not fit into memory") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not a JSON object")
    return Fields(content, path)


def check_digest(data: bytes, *, path: object) -> None:
    """Raises DamagedError unless the bytes of a record have the digest at its end."""
    end = _SEAL.search(data, max(0, len(data) - _SEAL_SIZE))
    if end is None:
        raise DamagedError(f"{path} is damaged: it does not end like a record", path=str(path))
    try:
        whole = digests.matches(memoryview(data)[: end.start()], end[1].decode("ascii"))
    except UnsupportedFormatError:
        # a later version may have another algorithm; up to this one there is none but those that are known
        if _is_newer(data):
            raise
        whole = False
    if not whole:
        raise DamagedError(f"{path} is damaged: its bytes differ from its digest", path=str(path))


def resealed(body: bytes) -> bytes:
    """Returns a record of these bytes, all that comes before its digest."""
    return body + f',\n "digest": "{digests.digest(body)}"\n}}\n'.encode("ascii")


def _is_newer(data: bytes) -> bool:
    """Returns whether the head of a record, which nothing vouches for, has a later version than this simckpt."""
    found = re.search(rb'\n "version": "([0-9]{1,4})\.([0-9]{1,4})"', data[:200])
    return found is None or (int(found[1]), int(found[2])) > VERSION


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result


# built once: json.loads makes a new one for each call with hooks
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=lambda name: _refuse_constant(name))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_version(fields: Fields) -> None:
    text, ours = fields.text("version"), f"{VERSION[0]}.{VERSION[1]}"
    if text != ours:
        match = _VERSION.fullmatch(text)
        if match is None:
            raise FormatError(f"{fields.path}: {text[:80]!r} is not a version of the format")
        if (int(match[1]), int(match[2])) > VERSION:
            raise UnsupportedFormatError(
                f"{fields.path} has format version {text}, this simckpt reads up to {ours}: use a newer simckpt"
            )
    if missing := sorted(set(fields.optional("requires", fields.texts) or ()) - FEATURES):
        raise UnsupportedFormatError(
            f"{fields.path} requires {', '.join(missing)}, which this simckpt (format {ours}) lacks: use a newer one"
        )


class Fields:
    """The fields of one JSON object; each method returns one, of the right type and within bounds, or a FormatError.

    Keys that nobody asks for are ignored: a later version with the same leading number may add some.
    """

    def __init__(self, content: Mapping[str, Any], path: object) -> None:
        self.content = content
        self.path = path

    def wrong(self, key: str, expected: str) -> FormatError:
        """Returns the error to raise for a field that is missing or not what was expected."""
        found = reprlib.repr(self.content[key])[:80] if key in self.content else "nothing"
        return FormatError(f"{self.path}: the field {key!r} must be {expected}, found {found}")

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """Returns `read(key)`, or None if the field is missing or null."""
        return None if self.content.get(key) is None else read(key)

    def text(self, key: str, pattern: re.Pattern[str] | None = None, *, limit: int = 4096) -> str:
        """Returns a string of at most `limit` characters that matches `pattern` in full."""
        value = self.content.get(key)
        if not isinstance(value, str) or len(value) > limit or (pattern is not None and not pattern.fullmatch(value)):
            raise self.wrong(key, f"a string like {pattern.pattern}" if pattern else f"a string of at most {limit}")
        return value

    def id(self, key: str) -> str:
        """Returns a 128-bit id as 32 hexadecimal digits."""
        return self.text(key, names.ID)

    def digest(self, key: str) -> str:
        """Returns a digest with the name of its algorithm."""
        return digests.check_form(self.text(key, limit=160))

    def integer(self, key: str, *, minimum: int = 0, maximum: int = 2**63 - 1) -> int:
        """Returns an integer between the bounds."""
        value = self.content.get(key)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str) -> float:
        """Returns a finite float from 0 on."""
        value = self.content.get(key)
        if not isinstance(value, float) or not 0 <= value < math.inf:
            raise self.wrong(key, "a finite number from 0.0 on")
        return value

    def texts(self, key: str, *, limit: int = 1000) -> tuple[str, ...]:
        """Returns a list of strings."""
        value = self.content.get(key)
        if not isinstance(value, list) or len(value) > limit or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def integers(self, key: str, *, limit: int = 64) -> tuple[int, ...]:
        """Returns a list of integers from 0 on: a shape."""
        value = self.content.get(key)
        if not isinstance(value, list) or len(value) > limit:
            raise self.wrong(key, f"a list of at most {limit} integers")
        if not all(type(item) is int and 0 <= item < 2**62 for item in value):
            raise self.wrong(key, "a list of integers from 0 to 2**62")
        return tuple(value)

    def objects(self, key: str) -> list[Fields]:
        """Returns a list of objects."""
        value = self.content.get(key)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, "a list of objects")
        return [Fields(item, self.path) for item in value]

    def object(self, key: str) -> Fields:
        """Returns an object."""
        value = self.content.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, self.path)

    def string_map(self, key: str) -> dict[str, str]:
        """Returns an object whose values are all strings."""
        content = self.object(key).content
        if not all(isinstance(value, str) for value in content.values()):
            raise self.wrong(key, "an object of strings")
        return dict(content)

    def values(self, key: str) -> dict[str, Any]:
        """Returns an object of typed values, such as hyperparameters."""
        content = self.object(key).content
        try:
            return {name: from_json(value) for name, value in content.items()}
        except (ValueError, RecursionError) as error:
            raise self.wrong(key, f"an object of typed values ({error})") from error

    def floats(self, key: str) -> dict[str, float]:
        """Returns an object whose values are all floats, such as metrics; NaN and infinities included."""
        values = self.values(key)
        if not all(isinstance(value, float) for value in values.values()):
            raise self.wrong(key, "an object of floats")
        return values

    def time(self, key: str) -> float:
        """Returns a moment of the years 1 to 9999 [s since 1970, UTC]; the date beside it is for people."""
        moment = self.object(key)
        seconds = moment.content.get("unix")
        if not isinstance(seconds, float) or not _FIRST_MOMENT <= seconds <= _LAST_MOMENT:
            raise self.wrong(key, "a moment")
        moment.text("utc", limit=40)
        return seconds


def time_to_json(seconds: float) -> dict[str, Any]:
    """Returns a moment as a record holds it: for programs in seconds since 1970, for people as a date in UTC."""
    return {"utc": datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds"), "unix": float(seconds)}


def to_json(value: Any, *, levels: int = LEVELS) -> Any:
    """Returns a plain value as JSON that keeps its type: 1 and 1.0, tuple and list, NaN and infinities differ.

    Args:
        value: to be written.
        levels: how deep containers may lie in each other.

    Raises:
        TypeError: a value that is no bool, int, float, str, None, list, tuple or dict with string keys, or too deep.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) in (list, tuple, dict) and levels == 0:
        raise TypeError(f"its lists, tuples and dicts lie more than {LEVELS} deep in each other")
    if type(value) is list:
        return [to_json(item, levels=levels - 1) for item in value]
    if type(value) is tuple:
        return {"tuple": [to_json(item, levels=levels - 1) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: to_json(item, levels=levels - 1) for key, item in value.items()}}
    raise TypeError(f"{type(value).__name__} is no bool, int, float, str, None, list, tuple or dict with string keys")


def from_json(value: Any, *, levels: int = LEVELS) -> Any:
    """Returns what `to_json` was given.

    Args:
        value: as JSON.
        levels: how deep containers may lie in each other.

    Raises:
        ValueError: JSON that `to_json` does not write.
    """
    if levels == 0 and isinstance(value, list | dict) and value not in _FLOATS:
        raise ValueError(f"its lists, tuples and dicts lie more than {LEVELS} deep in each other")
    if isinstance(value, list):
        return [from_json(item, levels=levels - 1) for item in value]
    if isinstance(value, dict):
        (kind, content), *rest = value.items() or [("", None)]
        if not rest and kind == "float" and isinstance(content, str) and content in _SPECIAL_FLOATS:
            return _SPECIAL_FLOATS[content]
        if not rest and kind == "tuple" and isinstance(content, list):
            return tuple(from_json(item, levels=levels - 1) for item in content)
        if not rest and kind == "dict" and isinstance(content, dict):
            return {key: from_json(item, levels=levels - 1) for key, item in content.items()}
        raise ValueError(f"{reprlib.repr(value)[:80]} is no typed value")
    return value
