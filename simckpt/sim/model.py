"""The fields of an `MjModel`: a baseline stored once by digest, and what differs from it.

Many environments write into their model at reset or mid-episode (targets in `body_pos`, masses, `hfield_data`,
`opt.timestep`). A snapshot holds the difference from a baseline, and the baseline itself is stored whole, so that a
restore makes every live field equal to baseline plus difference whatever the live model looked like.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import mujoco
import numpy as np

from simckpt.sim.objects.arrays import address

# where files lay on the machine that compiled the model: no part of the physics, and different for every instance
_PATH_FIELDS = frozenset(
    {"paths", "npaths", "nbuffer", "mesh_pathadr", "skin_pathadr", "hfield_pathadr", "tex_pathadr"}
)
_SUBSTRUCTS = ("opt", "stat", "vis")

ModelFields = Mapping[str, Any]


class Baseline:
    """All fields of one model at one moment, read-only.

    Attributes:
        digest: blake2b-128 of names, dtypes, shapes and bytes, in hexadecimal; equal for equal models.
        fields: by name, such as `body_mass` or `opt.timestep`: read-only arrays, ints, floats and bytes.
    """

    def __init__(self, fields: ModelFields) -> None:
        self.fields = dict(fields)
        self.digest = _digest(fields)
        # the main buffer of a model without difference, shared by all envs that have this baseline: it stays in cache
        self.image: bytearray | None = None
        self._bytes: dict[str, bytes] | None = None

    def raw(self, name: str) -> bytes:
        """Returns the bytes of an array field."""
        if self._bytes is None:
            self._bytes = {key: value.tobytes() for key, value in self.fields.items() if isinstance(value, np.ndarray)}
        return self._bytes[name]


# equal baselines of many envs share one object; the content is the key, so sharing cannot be observed
_known: weakref.WeakValueDictionary[str, Baseline] = weakref.WeakValueDictionary()


def shared_baseline(fields: ModelFields) -> Baseline:
    """Returns the baseline with these fields, the existing one if this process has it already."""
    baseline = Baseline(fields)
    return _known.setdefault(baseline.digest, baseline)


class ModelAccess:
    """Reads, compares and writes the fields of one live `MjModel` in place.

    Args:
        model: the live model; it is never replaced.
    """

    def __init__(self, model: mujoco.MjModel) -> None:
        self.model = model
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        # (owner, attribute) of what has a setter
        self._scalars: dict[str, tuple[Any, str]] = {}
        # sizes, names and texts: compared, never written
        self._identity: dict[str, Any] = {}
        for name, owner, attribute in _walk_fields(model):
            self._classify(name, owner, attribute)
        self._buffer = _span([array for name, array in self._arrays.items() if "." not in name], model.nbuffer)
        in_structs = [array for name, array in self._arrays.items() if "." in name]
        self._structs = _span(in_structs, _MOST_STRUCT_BYTES, lead=_STRUCT_LEAD)
        covered = _scalars_between_arrays() if self._structs is not None else frozenset()
        self._loose = [place for name, place in self._scalars.items() if name not in covered]
        self._loose_bits = struct.Struct(f"{len(self._loose)}d")
        # what the latest look saw, and what it found
        self._seen: tuple[Baseline | None, bytearray, Any] = (None, bytearray(), None)
        self._found: dict[str, Any] = {}

    def _classify(self, name: str, owner: Any, attribute: str) -> None:
        value = getattr(owner, attribute)
        if isinstance(value, np.ndarray):
            if value.size:
                self._arrays[name] = value
        elif isinstance(value, bytes):
            self._identity[name] = value
        elif isinstance(value, bool | int | float):
            try:
                setattr(owner, attribute, value)
            except AttributeError:
                self._identity[name] = value
            else:
                self._scalars[name] = (owner, attribute)

    def read(self) -> dict[str, Any]:
        """Returns copies of all fields; arrays are read-only."""
        fields: dict[str, Any] = dict(self._identity)
        for name, array in self._arrays.items():
            fields[name] = array.copy()
            fields[name].flags.writeable = False
        for name, (owner, attribute) in self._scalars.items():
            fields[name] = getattr(owner, attribute)
        return fields

    def difference(self, baseline: Baseline) -> dict[str, Any]:
        """Returns copies of the fields that differ from the baseline by bits.

        Raises:
            KeyError: the baseline is of a model with other fields; `mismatches` says which.
        """
        # unless something changed since the last look, all is compared in one go, without touching the fields
        seen_baseline, image, seen_rest = self._seen
        rest = self._rest()
        # a bytearray compares itself with a buffer by memcmp
        if seen_baseline is not baseline or rest != seen_rest or image != self._buffer:
            self._found = self._compare(baseline)
            self._seen = (baseline, self._image(baseline), rest)
        return {name: _copy(value) for name, value in self._found.items()}

    def _rest(self) -> tuple[Any, ...]:
        """Returns the bits of everything outside the main buffer."""
        structs = None if self._structs is None else self._structs.tobytes()
        return structs, self._loose_bits.pack(*[getattr(owner, name) for owner, name in self._loose])

    def _image(self, baseline: Baseline) -> bytearray:
        if self._buffer is None:
            # never equal to None: every look compares the fields
            return bytearray()
        if baseline.image is not None and baseline.image == self._buffer:
            return baseline.image
        image = bytearray(self._buffer)
        if baseline.image is None and not any("." not in name for name in self._found):
            baseline.image = image
        return image

    def _compare(self, baseline: Baseline) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, array in self._arrays.items():
            if array.tobytes() != baseline.raw(name):
                found[name] = array.copy()
        for name, (owner, attribute) in self._scalars.items():
            value = getattr(owner, attribute)
            if not _same_scalar(value, baseline.fields[name]):
                found[name] = value
        return found

    def mismatches(self, fields: ModelFields) -> list[str]:
        """Returns one line for each size, name or field in which a model with `fields` differs from the live one."""
        problems = []
        for name, value in self._identity.items():
            if name not in fields:
                problems.append(f"model field {name}: missing from the state")
            elif fields[name] != value:
                problems.append(
                    f"model field {name}: {_short(fields[name])} in the state, {_short(value)} in the live env"
                )
        for name, array in self._arrays.items():
            saved = fields.get(name)
            if not isinstance(saved, np.ndarray):
                problems.append(f"model field {name}: missing from the state")
            elif saved.shape != array.shape or saved.dtype != array.dtype:
                problems.append(
                    f"model field {name}: {saved.dtype}{saved.shape} in the state, "
                    f"{array.dtype}{array.shape} in the live env"
                )
        problems += [f"model field {name}: missing from the state" for name in self._scalars if name not in fields]
        known = self._identity.keys() | self._arrays.keys() | self._scalars.keys()
        problems += [f"model field {name}: unknown to the live model" for name in fields if name not in known]
        return problems

    def difference_problems(self, difference: ModelFields) -> list[str]:
        """Returns one line for each entry of a difference that cannot be written."""
        problems = []
        for name, value in difference.items():
            if name in self._arrays:
                live = self._arrays[name]
                if not isinstance(value, np.ndarray) or (value.shape, value.dtype) != (live.shape, live.dtype):
                    problems.append(f"model difference {name}: not {live.dtype}{live.shape}")
            elif name not in self._scalars:
                problems.append(f"model difference {name}: no writable field of the live model")
            elif not isinstance(value, bool | int | float | np.generic):
                problems.append(f"model difference {name}: not a number")
        return problems

    def write(self, baseline: ModelFields, difference: ModelFields) -> None:
        """Makes every field equal to baseline plus difference, in place, writing only what differs."""
        for name, array in self._arrays.items():
            wanted = difference[name] if name in difference else baseline[name]
            if array.tobytes() != wanted.tobytes():
                array[...] = wanted
        for name, (owner, attribute) in self._scalars.items():
            wanted = difference[name] if name in difference else baseline[name]
            current = getattr(owner, attribute)
            if not _same_scalar(current, wanted):
                setattr(owner, attribute, type(current)(wanted))

    def memory(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yields the name and the live array of every array field."""
        yield from self._arrays.items()


# scalars outside `_all_fields`, which newer versions of mujoco have
_FLAGS = tuple(
    name for name in dir(mujoco.MjModel) if name.startswith("flg_") and name not in mujoco.MjModel._all_fields
)

# opt, vis and stat lie inside the mjModel struct, one after the other, in about 1.5 KB
_MOST_STRUCT_BYTES = 8192
# numbers that opt begins with [bytes]; the model's sizes, hundreds of bytes, lie before them in the same struct
_STRUCT_LEAD = 64


class _Memory:
    """A range of bytes, for numpy; `owner` keeps it alive."""

    def __init__(self, owner: Any, start: int, size: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (start, True), "shape": (size,), "typestr": "|u1", "version": 3}


def _span(arrays: list[np.ndarray[Any, Any]], limit: int, *, lead: int = 0) -> np.ndarray[Any, Any] | None:
    """Returns the bytes from the first array in memory to the end of the last, or None if that is more than `limit`.

    Args:
        arrays: in one allocation.
        limit: what their memory can span at most [bytes].
        lead: begin so much before the first array [bytes].
    """
    if not arrays:
        return None
    first = min(arrays, key=address)
    start = address(first)
    size = max(address(array) + array.nbytes for array in arrays) - start
    if size > limit or not first.flags.c_contiguous:
        return None
    return np.asarray(_Memory(first, start - lead, size + lead))


@functools.cache
def _scalars_between_arrays() -> frozenset[str]:
    """Returns the scalars of opt, vis and stat that lie within the span of their bytes, found by writing to them."""
    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    places = [place for place in _walk_fields(model) if "." in place[0]]
    values = {name: getattr(owner, attribute) for name, owner, attribute in places}
    span = _span(
        [value for value in values.values() if isinstance(value, np.ndarray) and value.size],
        _MOST_STRUCT_BYTES,
        lead=_STRUCT_LEAD,
    )
    covered = set()
    for name, owner, attribute in places:
        if span is None or isinstance(values[name], np.ndarray):
            continue
        before = span.tobytes()
        setattr(owner, attribute, values[name] + 1)
        if span.tobytes() != before:
            covered.add(name)
        setattr(owner, attribute, values[name])
    return frozenset(covered)


def _walk_fields(model: mujoco.MjModel) -> Iterator[tuple[str, Any, str]]:
    for name in (*model._all_fields, *_FLAGS):
        if name not in _PATH_FIELDS:
            yield name, model, name
    for substruct in _SUBSTRUCTS:
        yield from _walk_struct(substruct, getattr(model, substruct))


def _walk_struct(prefix: str, struct: Any) -> Iterator[tuple[str, Any, str]]:
    for name in dir(struct):
        if name.startswith("_"):
            continue
        value = getattr(struct, name)
        if isinstance(value, bool | int | float | np.ndarray):
            yield f"{prefix}.{name}", struct, name
        elif type(value).__module__.startswith("mujoco."):
            yield from _walk_struct(f"{prefix}.{name}", value)


def _digest(fields: ModelFields) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(fields):
        value = fields[name]
        if isinstance(value, np.ndarray):
            digest.update(f"{name}:{value.dtype.str}{value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).data)
        else:
            raw = value if isinstance(value, bytes) else _scalar_bytes(value)
            digest.update(f"{name}:{len(raw)}\n".encode())
            digest.update(raw)
    return digest.hexdigest()


def _scalar_bytes(value: Any) -> bytes:
    return np.float64(value).tobytes() if isinstance(value, float) else str(int(value)).encode()


def _same_scalar(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    return bool(one == other)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
