"""numpy arrays as leaves: the stored bytes are the array's own, under a dtype that HDF5 has."""

from __future__ import annotations

import functools
import json
import re
import sys
from typing import Any

import numpy as np

from simckpt.errors import FormatError, UnsupportedFormatError
from simckpt.state import staging
from simckpt.state.leaf import Leaf

Array = np.ndarray[Any, Any]

_NUMBERS: dict[str, np.dtype[Any]] = {np.dtype(code).name: np.dtype(np.dtype(code).name) for code in "?bBhHiIlLefdFD"}
_PATTERN = re.compile(
    r"(?P<swapped>>[iuf][248]|>c(?:8|16))"
    r"|(?P<text>[<>|][USV]\d{1,9})"
    r"|(?P<time>(?:[<>][mM]8|datetime64|timedelta64)(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|μs|ns|ps|fs|as)\])?)"
)
_NATIVE = "<" if sys.byteorder == "little" else ">"
# "<f16" is 80 bits on x86 and 128 on ARM: the name carries the length of the mantissa
_LONG: dict[str, np.dtype[Any]] = {f"longdouble[{np.finfo(np.longdouble).nmant}]": np.dtype(np.longdouble)}
_LONG[f"clongdouble[{np.finfo(np.longdouble).nmant}]"] = np.dtype(np.clongdouble)
# numpy types of the ml_dtypes package, which JAX uses: their bits as unsigned integers
_ML_PATTERN = re.compile(r"ml_dtypes\.(bfloat16|float8_\w+|float6_\w+|float4_\w+|u?int[124])")


@functools.lru_cache(1024)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the name that a file keeps for `dtype`.

    Raises:
        TypeError: the dtype holds Python objects, or is of a kind that has no bytes of its own.
    """
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype} holds Python objects")
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return f"ml_dtypes.{dtype.name}"
    if dtype.fields is not None:
        return json.dumps(np.lib.format.dtype_to_descr(dtype), separators=(",", ":"))
    if dtype.kind in "USV":
        return dtype.str
    if dtype.char in "gG":
        if not dtype.isnative:
            raise TypeError(f"dtype {dtype.str} is an extended precision type in foreign byte order")
        return f"{'c' if dtype.char == 'G' else ''}longdouble[{np.finfo(np.longdouble).nmant}]"
    if dtype.kind in "biufcmM":
        return dtype.name if dtype.isnative else dtype.str
    raise TypeError(f"dtype {dtype} has no bytes of its own")


def parse_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype for a name from `dtype_name`; nothing else is accepted.

    Raises:
        FormatError: not such a name.
        UnsupportedFormatError: a type that this machine or this environment lacks.
    """
    found = _NUMBERS.get(name) or _LONG.get(name)
    if found is not None:
        return found
    try:
        if name.startswith("["):
            return _parse_record(json.loads(name))
        if _PATTERN.fullmatch(name):
            named: np.dtype[Any] = np.dtype(name)
            return named
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise FormatError(f"{name[:80]!r} is not a dtype: {error}") from error
    if name.startswith(("longdouble[", "clongdouble[")):
        raise UnsupportedFormatError(f"{name} was written on a machine whose long double differs from this one's")
    if match := _ML_PATTERN.fullmatch(name):
        return _parse_ml_dtype(match[1])
    raise FormatError(f"{name[:80]!r} is not a dtype that a leaf can have")


def _parse_ml_dtype(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise UnsupportedFormatError(f"a leaf of type {name} needs the package ml_dtypes: install it") from error
    found = getattr(ml_dtypes, name, None)
    if found is None:
        raise UnsupportedFormatError(f"the installed ml_dtypes has no type {name}")
    dtype: np.dtype[Any] = np.dtype(found)
    return dtype


def _parse_record(description: Any) -> np.dtype[Any]:
    """Returns the structured dtype of a description in JSON, whose field types are checked like all others."""
    if not isinstance(description, list):
        raise FormatError("the description of a structured dtype is not a list")
    names: list[str] = []
    formats: list[Any] = []
    titles: list[str | None] = []
    offsets: list[int] = []
    offset = 0
    for entry in description:
        if not isinstance(entry, list) or len(entry) not in (2, 3):
            raise FormatError("a field of a structured dtype is not [name, type] or [name, type, shape]")
        field = _parse_record(entry[1]) if isinstance(entry[1], list) else _parse_field(entry[1])
        if len(entry) == 3:
            field = np.dtype((field, tuple(int(size) for size in entry[2])))
        # padding is written as a nameless field
        if not (entry[0] == "" and field.kind == "V" and field.fields is None):
            title, name = entry[0] if isinstance(entry[0], list) else (None, entry[0])
            names.append(name)
            titles.append(title)
            formats.append(field)
            offsets.append(offset)
        offset += field.itemsize
    return np.dtype({"names": names, "formats": formats, "titles": titles, "offsets": offsets, "itemsize": offset})


def _parse_field(code: Any) -> np.dtype[Any]:
    if not isinstance(code, str) or not re.fullmatch(r"[<>|][biufcmMUSV]\d{1,9}(\[\d{0,9}\w{1,2}\])?", code):
        raise FormatError(f"{str(code)[:80]!r} is not the type of a field")
    return np.dtype(code)


@functools.lru_cache(1024)
def _storage(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Returns the dtype whose elements spell one element of `dtype` along an extra axis, or None if it needs none."""
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes" or (dtype.kind in "biuf" and dtype.char != "g"):
        return None
    if dtype.kind in "mM":
        return None
    if dtype.kind == "U":
        return np.dtype(f"{dtype.str[0]}u4") if dtype.itemsize else np.dtype(np.uint32)
    if dtype.kind == "c" and dtype.char != "G":
        return np.dtype(f"{'<' if dtype.str[0] == '|' else dtype.str[0]}f{dtype.itemsize // 2}")
    return np.dtype(np.uint8)


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of equal size that stands for one without an extra axis."""
    if dtype.kind in "mM":
        return np.dtype(f"{dtype.str[0]}i8")
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def array_to_leaf(array: Array, kind: str = "numpy") -> Leaf:
    """Returns the leaf of an array; shares its memory where the array is in C order.

    Raises:
        TypeError: the dtype holds Python objects.
    """
    dtype = array.dtype
    name = dtype_name(dtype)
    # ascontiguousarray would turn a 0-d array into a 1-d one
    contiguous = array if array.flags.c_contiguous else array.copy(order="C")
    if dtype.char in "gG" or (dtype.fields is not None and dtype.type is np.void):
        # bytes between the values may be anything, and equal states should have equal digests
        contiguous = _clear_padding(contiguous)
    if type(contiguous) is not np.ndarray:
        contiguous = contiguous.view(np.ndarray)
    storage = _storage(dtype)
    if storage is None:
        plain = _plain(dtype)
        return Leaf(contiguous if plain is dtype else contiguous.view(plain), name, array.shape, kind)
    width = dtype.itemsize // storage.itemsize
    if width == 0:
        return Leaf(np.zeros((*array.shape, 0), storage), name, array.shape, kind)
    data = contiguous.reshape(-1).view(storage).reshape(*array.shape, width)
    return Leaf(data, name, array.shape, kind)


def leaf_to_array(leaf: Leaf) -> Array:
    """Returns the array of a leaf, writable; shares the memory of `leaf.data` unless that is read-only.

    Raises:
        FormatError: bytes, dtype and shape contradict each other.
    """
    dtype = parse_dtype(leaf.dtype)
    storage = _storage(dtype)
    shape = tuple(leaf.shape)
    if storage is None:
        expected, width = _plain(dtype), None
    else:
        expected, width = storage, dtype.itemsize // storage.itemsize
    stored_shape = shape if width is None else (*shape, width)
    if leaf.data.dtype != expected or leaf.data.shape != stored_shape:
        raise FormatError(
            f"a leaf of type {leaf.dtype} and shape {shape} is stored as {expected} {stored_shape}, "
            f"but the bytes are {leaf.data.dtype} {leaf.data.shape}"
        )
    data = leaf.data if leaf.data.flags.c_contiguous and leaf.data.flags.writeable else leaf.data.copy(order="C")
    if width is None:
        return data if expected is dtype else data.view(dtype)
    if width == 0:
        return np.ndarray(shape, dtype)
    return data.reshape(-1).view(dtype).reshape(shape)


def _clear_padding(array: Array) -> Array:
    """Returns a copy whose bytes outside the values are zero."""
    cleared = np.zeros(array.shape, array.dtype)
    if array.dtype.names is None:
        cleared[...] = array
        if array.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
            # 16 bytes hold 10 bytes of number (x86)
            cleared.reshape(-1).view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    for name in array.dtype.names or ():
        cleared[name][...] = _clear_padding(array[name])
    return cleared


def copy_array(array: Array) -> Array:
    """Returns a copy that shares no memory, in the same memory order; see `staging` for large ones during a save.

    Raises:
        TypeError: the dtype holds Python objects.
    """
    dtype_name(array.dtype)
    return staging.copy_array(array)
