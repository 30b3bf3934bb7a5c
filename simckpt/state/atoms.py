"""Immutable values that live in the structure: plain JSON where JSON says exactly the same, else `{type: text}`."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from simckpt.errors import FormatError, UnsupportedFormatError
from simckpt.state import arrays

# JSON readers outside Python keep at most these
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


def int_to_json(value: int) -> Any:
    """Returns the integer itself if 64 bits hold it, else its hexadecimal form (which has no length limit)."""
    return value if _SMALLEST <= value <= _LARGEST else {"int": hex(value)}


def float_to_json(value: float) -> Any:
    """Returns the number itself if finite (its repr keeps every bit), else its 64 bits: NaNs have payloads."""
    return value if math.isfinite(value) else {"float": _float_bits(value)}


def str_to_json(value: str) -> Any:
    """Returns the string itself; one with lone surrogates, which UTF-8 cannot hold, as its 32-bit code points."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"str": value.encode("utf-32-le", "surrogatepass").hex()}
    return value


def bytes_to_json(value: bytes) -> Any:
    """Returns the base64 form."""
    return {"bytes": base64.b64encode(value).decode("ascii")}


def complex_to_json(value: complex) -> Any:
    """Returns the bits of both parts."""
    return {"complex": [_float_bits(value.real), _float_bits(value.imag)]}


def scalar_to_json(value: np.generic) -> Any:
    """Returns the dtype and the bytes of a numpy scalar; strings as text, for numpy strips trailing NULs from bytes.

    Raises:
        TypeError: a record that holds Python objects.
    """
    if isinstance(value, np.str_):
        # numpy's own __str__ strips NULs
        return {"numpy.str": str_to_json(str.__str__(value))}
    if isinstance(value, np.bytes_):
        return {"numpy.bytes": base64.b64encode(bytes(value)).decode("ascii")}
    leaf = arrays.array_to_leaf(np.asarray(value))
    return {"numpy": [leaf.dtype, leaf.data.tobytes().hex()]}


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float(text: Any) -> float:
    if type(text) is not str or len(text) != 16:
        raise FormatError(f"{text!r} is not the 64 bits of a float")
    number: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return number


def _text(value: Any) -> str:
    if type(value) is not str:
        raise FormatError(f"{str(value)[:80]!r} should be text")
    return value


def _integers(values: Any, count: int | None = None) -> list[int]:
    if type(values) is not list or (count is not None and len(values) != count):
        raise FormatError(f"{str(values)[:80]!r} should be a list of {'' if count is None else count} integers")
    return [_integer(value) for value in values]


def _integer(value: Any) -> int:
    if type(value) is dict and list(value) == ["int"]:
        return int(_text(value["int"]), 16)
    if type(value) is not int:
        raise FormatError(f"{str(value)[:80]!r} should be an integer")
    return value


def _scalar(value: Any) -> Any:
    name, text = value
    dtype = arrays.parse_dtype(_text(name))
    data = bytes.fromhex(_text(text))
    if len(data) != dtype.itemsize:
        raise FormatError(f"a {name} has {dtype.itemsize} bytes, not {len(data)}")
    return np.frombuffer(bytearray(data), dtype)[0] if data else np.ndarray((), dtype)[()]


def _complex(value: Any) -> complex:
    real, imaginary = value
    return complex(_float(real), _float(imaginary))


def _numpy_str(value: Any) -> Any:
    return np.str_(from_json(value) if type(value) is dict else _text(value))


def _torch() -> Any:
    """Returns torch, which has to be installed to read what torch wrote."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedFormatError("this checkpoint holds torch values: install torch to restore it") from error
    return torch


def _torch_constant(kind: str, value: Any) -> Any:
    """Returns the constant of torch by that name, if it is of the type `torch.<kind>`."""
    name = _text(value)
    # not getattr, which would import what torch loads lazily
    found = vars(_torch()).get(name)
    if not isinstance(found, getattr(_torch(), kind)):
        raise FormatError(f"{name[:80]!r} is not a {kind} of torch")
    return found


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(_text(value), 16),
    "float": _float,
    "str": lambda value: bytes.fromhex(_text(value)).decode("utf-32-le", "surrogatepass"),
    "bytes": lambda value: base64.b64decode(_text(value), validate=True),
    "complex": _complex,
    "numpy": _scalar,
    "numpy.str": _numpy_str,
    "numpy.bytes": lambda value: np.bytes_(base64.b64decode(_text(value), validate=True)),
    "numpy.dtype": lambda value: arrays.parse_dtype(_text(value)),
    "range": lambda value: range(*_integers(value, 3)),
    "ellipsis": lambda value: ...,
    "not implemented": lambda value: NotImplemented,
    "torch.dtype": lambda value: _torch_constant("dtype", value),
    "torch.layout": lambda value: _torch_constant("layout", value),
    "torch.memory_format": lambda value: _torch_constant("memory_format", value),
    "torch.device": lambda value: _torch().device(_text(value)),
    "torch.Size": lambda value: _torch().Size(_integers(value)),
}


def from_json(value: Any) -> Any:
    """Returns the value of a typed `{type: text}`.

    Raises:
        FormatError: no known type, or a text that is not of that type.
    """
    if len(value) != 1:
        raise FormatError(f"a typed value has one key, not {len(value)}")
    ((tag, content),) = value.items()
    reader = _READERS.get(tag)
    if reader is None:
        raise FormatError(f"{str(tag)[:80]!r} is not a type of value that this version knows")
    try:
        return reader(content)
    except (TypeError, ValueError, binascii.Error, OverflowError, RuntimeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{str(content)[:80]!r} is not a value of type {tag!r}: {error}") from error
