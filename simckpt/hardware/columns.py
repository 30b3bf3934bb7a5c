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
        return {str(key): form_of(each, what) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(form_of(each, what) for each in value)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise ConfigurationError(f"{what} cannot be recorded: it is {type(value).__name__} {str(value)[:80]!r}")
    return array.dtype, array.shape


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
        array = np.asarray(value)
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

    def copied(self) -> dict[str, Any]:
        """Returns {table: nested columns} of the entries that are there, in memory of their own."""
        counts = self.counts.tolist()
        return {
            name: _copied(columns, count) for (name, columns), count in zip(self.tables.items(), counts, strict=True)
        }


def _copied(column: Any, count: int) -> Any:
    if isinstance(column, dict):
        return {key: _copied(each, count) for key, each in column.items()}
    if isinstance(column, tuple):
        return tuple(_copied(each, count) for each in column)
    return column[:count].copy()
