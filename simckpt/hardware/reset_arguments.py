"""The seed and the options of a reset as one text: what was given comes back, bit for bit.

Options that are plain JSON are written so. Others, with arrays, numpy's numbers, tuples or numbers that JSON lacks, are
`!` and an object: `options` has the structure of a state tree and its leaves, `seed` the decimal digits of a seed that
no column of int64 holds.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np

from simckpt import state
from simckpt.errors import ConfigurationError, FormatError, SimckptError
from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded

UNKNOWN = "?"  # options that could not be recorded
_TYPED = "!"
_LIMIT = 1 << 16  # [characters]: they stand in a column of texts, all of which take as much room as the longest
_LARGEST_SEED = 2**63


def to_text(seed: int | None, options: Any) -> str | None:
    """Returns what has to be recorded of a reset besides its row; "" for nothing, None for what cannot be.

    Args:
        seed: as given; one below 2**63 is left to its column.
        options: as given.
    """
    large = seed is not None and not 0 <= seed < _LARGEST_SEED
    if options is None and not large:
        return ""
    content: dict[str, Any] = {}
    if large:
        content["seed"] = str(seed)
    if _is_json(options) and not large:
        text = json.dumps(options)
    else:
        if options is not None:
            try:
                content["options"] = _packed(state.encode(options))
            except (SimckptError, TypeError, ValueError, RecursionError):
                return None
        text = _TYPED + json.dumps(content)
    return text if len(text) <= _LIMIT else None


def options_of(text: str) -> Any:
    """Returns the options that `to_text` was given.

    Raises:
        ConfigurationError: they could not be recorded.
        FormatError: a text that `to_text` does not write.
    """
    if text == UNKNOWN:
        raise ConfigurationError("the options of this reset could not be recorded", keys=["options"])
    if not text.startswith(_TYPED):
        return _parsed(text) if text else None
    content = _parsed(text[1:])
    packed = content.get("options") if isinstance(content, dict) else None
    if packed is None:
        return None
    try:
        return state.decode(*_unpacked(packed))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the options of a reset cannot be read: {error}") from error


def seed_of(text: str, number: int, *, seeded: bool) -> int | None:
    """Returns the seed of a reset, of which the table has a number; raises FormatError for a text that has none."""
    if not seeded:
        return None
    if number >= 0 or not text.startswith(_TYPED):
        return number
    content = _parsed(text[1:])
    digits = content.get("seed") if isinstance(content, dict) else None
    if not isinstance(digits, str) or not digits.removeprefix("-").isdecimal() or len(digits) > 1000:
        raise FormatError("the seed of a reset is no number")
    return int(digits)


def _is_json(value: Any) -> bool:
    """Returns whether JSON brings a value back as it was, types and all."""
    if type(value) is list:
        return all(_is_json(each) for each in value)
    if type(value) is dict:
        return all(type(key) is str and _is_json(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _packed(encoded: Encoded) -> dict[str, Any]:
    leaves = {}
    for path, leaf in encoded.leaves.items():
        # ascontiguousarray would give an array without dimensions one
        data = np.asarray(leaf.data, order="C")
        bits = base64.b64encode(data.reshape(-1).view(np.uint8).tobytes()).decode()
        leaves[path] = [leaf.dtype, list(leaf.shape), leaf.kind, data.dtype.str, list(data.shape), bits]
    return {"structure": encoded.structure.decode(), "leaves": leaves}


def _unpacked(packed: Any) -> tuple[dict[str, Leaf], bytes]:
    leaves = {}
    for path, (dtype, shape, kind, stored, stored_shape, bits) in packed["leaves"].items():
        # where there is no dimension, an earlier simckpt has written one
        stored_shape = [] if (shape, stored_shape) == ([], [1]) else stored_shape
        array = np.frombuffer(base64.b64decode(bits, validate=True), np.dtype(stored)).reshape(stored_shape)
        leaves[path] = Leaf(array.copy(), dtype, tuple(shape), kind)
    return leaves, packed["structure"].encode()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the options of a reset cannot be read: {error}") from error
