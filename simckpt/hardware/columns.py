"""What the values of a column look like, and memory for tables of them that two processes map.

A form is a nested dict or tuple whose leaves are `(dtype, shape)`: an observation space's, or that of a value. Buffers
are laid out by forms alone, so that both processes find every column at the same place.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError

Array = np.ndarray[Any, Any]
Form = Any  # (dtype, shape), or a dict or tuple of forms

INT, BOOL, FLOAT = np.dtype(np.int64), np.dtype(np.bool_), np.dtype(np.float64)
COMMON: dict[str, Form] = {"order": (INT, ()), "row": (INT, ())}  # columns of every table
_ALIGNMENT = 64  # [bytes]
SERIAL, STARTED, STOPPED, FIRST_ROW, COUNTS = 0, 1, 2, 3, 4  # places in a buffer's head


def form_of(value: Any, what: str) -> Form:
    """Returns the form of a value.

    Raises:
        ConfigurationError: it has no fixed size in bytes, such as a text or a graph.
    """
    if isinstance(value, dict):
        return {str(key): form_of(each, f"{what}/{key}") for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(form_of(each, f"{what}/{place}") for place, each in enumerate(value))
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ConfigurationError(f"{what} cannot be recorded: it is no array, {error}") from error
    if array.dtype.kind not in "biufc":
        raise ConfigurationError(f"{what} cannot be recorded: it is {type(value).__name__} {str(value)[:80]!r}")
    return array.dtype, array.shape


def check_shapes(known: Form, form: Form, what: str) -> None:
    """Raises ConfigurationError, by the name of the leaf, if a form has other parts or shapes than those before."""
    if _is_leaf(known) and _is_leaf(form):
        if known[1] != form[1]:
            raise ConfigurationError(
                f"{what} cannot be recorded: its shape is {form[1]}, and was {known[1]} before; values of one column "
                "are of one size"
            )
        return
    parts = [dict(_parts(each)) for each in (known, form)]
    if _is_leaf(known) or _is_leaf(form) or type(known) is not type(form) or parts[0].keys() != parts[1].keys():
        raise ConfigurationError(
            f"{what} cannot be recorded: it has the parts {_told(form)}, and had {_told(known)} before"
        )
    for key, each in parts[0].items():
        check_shapes(each, parts[1][key], f"{what}/{key}")


def widest(known: Form, form: Form) -> Form:
    """Returns the form whose dtypes hold those of two others with the same shapes, as far as there are such dtypes."""
    if _is_leaf(known):
        return np.promote_types(known[0], form[0]), known[1]
    if isinstance(known, dict):
        return {key: widest(each, form[key]) for key, each in known.items()}
    return tuple(widest(each, form[place]) for place, each in enumerate(known))


def _parts(form: Form) -> list[tuple[Any, Form]]:
    if _is_leaf(form):
        return []
    return list(form.items() if isinstance(form, dict) else enumerate(form))


def _told(form: Form) -> str:
    return ", ".join(str(key) for key, _ in _parts(form)) or "none, being an array"


def forms_of(env: Any) -> dict[str, Form]:
    """Returns the forms of an env's "action" and "observation"; raises ConfigurationError if a size is not fixed."""
    spaces = {"action": env.action_space, "observation": env.observation_space}
    return {name: form_of_space(space, f"the {name}") for name, space in spaces.items()}


def form_of_space(space: Any, what: str) -> Form:
    """Returns the form that values of a Gymnasium space have.

    Raises:
        ConfigurationError: their size is not fixed, as in a `Text` or a `Sequence`.
    """
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        return {key: form_of_space(each, what) for key, each in inner.items()}
    if isinstance(inner, tuple):
        return tuple(form_of_space(each, what) for each in inner)
    if space.shape is None or space.dtype is None or np.dtype(space.dtype).kind not in "biufc":
        raise ConfigurationError(
            f"{what} of the space {str(space)[:80]} cannot be recorded: its size is not fixed; wrap the env first, for "
            "example by gymnasium.wrappers.TransformObservation"
        )
    return np.dtype(space.dtype), tuple(space.shape)


def form_to_json(form: Form) -> Any:
    """Returns a form as JSON."""
    if isinstance(form, dict):
        return {"dict": {key: form_to_json(each) for key, each in form.items()}}
    if _is_leaf(form):
        return {"array": [form[0].str, list(form[1])]}
    return {"tuple": [form_to_json(each) for each in form]}


def form_from_json(content: Any) -> Form:
    """Returns what `form_to_json` was given."""
    ((kind, value),) = content.items()
    if kind == "dict":
        return {key: form_from_json(each) for key, each in value.items()}
    if kind == "tuple":
        return tuple(form_from_json(each) for each in value)
    return np.dtype(value[0]), tuple(value[1])


def _is_leaf(form: Form) -> bool:
    return isinstance(form, tuple) and len(form) == 2 and isinstance(form[0], np.dtype)


def leaves_of(form: Form) -> Iterator[tuple[np.dtype[Any], tuple[int, ...]]]:
    """Yields the leaves of a form."""
    if _is_leaf(form):
        yield form
    else:
        for each in form.values() if isinstance(form, dict) else form:
            yield from leaves_of(each)


def size_of(form: Form) -> int:
    """Returns how many bytes one value takes."""
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in leaves_of(form))


def put(column: Any, place: int, value: Any) -> bool:
    """Copies a value into a column; returns False, and may have copied a part, if it has another form."""
    if type(column) is np.ndarray:
        try:
            array = np.asarray(value)
        except ValueError:
            return False
        if array.dtype != column.dtype or array.shape != column.shape[1:]:
            return False
        column[place] = array
        return True
    if isinstance(column, dict):
        if not isinstance(value, dict) or len(value) != len(column):
            return False
        return all(key in column and put(column[key], place, each) for key, each in value.items())
    if not isinstance(value, tuple) or len(value) != len(column):
        return False
    return all(put(each, place, inner) for each, inner in zip(column, value, strict=True))


def put_converted(column: Any, place: int, value: Any) -> bool:
    """Does what `put` does, and converts values of another dtype where not a bit is lost by that."""
    if type(column) is np.ndarray:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or array.shape != column.shape[1:]:
            return False
        if array.dtype.kind == "c" and column.dtype.kind != "c":
            return False
        with np.errstate(all="ignore"):
            converted = array.astype(column.dtype)
            if converted.astype(array.dtype).tobytes() != array.tobytes():
                return False
        column[place] = converted
        return True
    if isinstance(column, dict):
        return all(put_converted(each, place, value[key]) for key, each in column.items())
    return all(put_converted(each, place, inner) for each, inner in zip(column, value, strict=True))


def number(value: Any, what: str) -> float:
    """Returns a number, or that in an array of one element, as a float; raises ConfigurationError for others."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.size != 1:
        raise ConfigurationError(f"{what} cannot be recorded: it is {type(value).__name__} {str(value)[:80]!r}")
    return float(array.reshape(()))


def flag(value: Any) -> bool:
    """Returns a flag of a step; raises ConfigurationError for what is none."""
    return bool(number(value, "a flag of the step"))


def at(column: Any, place: int) -> Any:
    """Returns a copy of one value of a column."""
    if isinstance(column, dict):
        return {key: at(each, place) for key, each in column.items()}
    if isinstance(column, tuple):
        return tuple(at(each, place) for each in column)
    return column[place].copy()


@dataclass(frozen=True)
class Table:
    """A table to be: its columns, and how many entries fit into one buffer."""

    columns: Mapping[str, Form]
    capacity: int


class Layout:
    """Where everything lies in a buffer: a head of int64, then the columns of each table.

    The head has the number of the part (0 while it is empty), its first and last moment, its first row, how many
    entries each table has, and how many it had before this buffer.

    Attributes:
        tables: {name: table}.
        size: of one buffer [bytes], a multiple of the page size.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self.tables = dict(tables)
        self._head = COUNTS + 2 * len(self.tables)
        self.size = 0
        self._walk(lambda dtype, shape, offset: None)

    def to_json(self) -> Any:
        """Returns it as JSON."""
        return {
            name: {"capacity": table.capacity, "columns": form_to_json(dict(table.columns))}
            for name, table in self.tables.items()
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Layout:
        """Returns what `to_json` was called of."""
        return cls({name: Table(form_from_json(each["columns"]), each["capacity"]) for name, each in content.items()})

    def buffer(self, memory: mmap.mmap, number: int) -> Buffer:
        """Returns the views of one of the buffers that lie in this memory one after the other."""
        start = number * self.size

        def view(dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Array:
            return np.ndarray(shape, dtype, memory, start + offset)

        return Buffer(number, view(np.dtype(np.int64), (self._head,), 0), self._walk(view))

    def _walk(self, make: Callable[[np.dtype[Any], tuple[int, ...], int], Any]) -> dict[str, Any]:
        offset = -(-8 * self._head // _ALIGNMENT) * _ALIGNMENT

        def walk(form: Form, capacity: int) -> Any:
            nonlocal offset
            if isinstance(form, dict):
                return {key: walk(each, capacity) for key, each in form.items()}
            if not _is_leaf(form):
                return tuple(walk(each, capacity) for each in form)
            dtype, shape = form
            made = make(dtype, (capacity, *shape), offset)
            offset += -(-dtype.itemsize * capacity * int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
            return made

        made = {name: walk(dict(table.columns), table.capacity) for name, table in self.tables.items()}
        self.size = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        return made


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory for one part.

    Attributes:
        number: of it.
        head: int64; see `Layout`.
        tables: {name: nested columns}, arrays `(capacity, ...)`.
    """

    number: int
    head: Array
    tables: Mapping[str, Any]

    @property
    def counts(self) -> Array:
        """How many entries each table has; a view."""
        return self.head[COUNTS : COUNTS + len(self.tables)]

    @property
    def firsts(self) -> Array:
        """How many entries each table had before; a view."""
        return self.head[COUNTS + len(self.tables) :]


def copied_entries(column: Any, start: int, stop: int) -> Any:
    """Returns some entries of nested columns, in memory of their own."""
    if isinstance(column, dict):
        return {key: copied_entries(each, start, stop) for key, each in column.items()}
    if isinstance(column, tuple):
        return tuple(copied_entries(each, start, stop) for each in column)
    return column[start:stop].copy()
