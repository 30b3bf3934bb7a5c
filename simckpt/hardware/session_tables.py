"""The tables of a session as readers have them: checked, cut to some rows, joined to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError, FormatError
from simckpt.state.tables import mapped
from simckpt.storage import names
from simckpt.storage.session_records import LinkRecord

GROUPS = ("commands", "readings")  # of tables, one for each link
TABLES = ("rows", "resets", "events", *GROUPS)

Array = np.ndarray[Any, Any]
Tables = Mapping[str, Any]

NUMBERS = "biufc"  # kinds of dtypes of what an env is given, and gives
_ORDINARY = {
    **dict.fromkeys(
        ("order", "row", "started", "finished", "monotonic", "wall", "received", "device_time", "seed"), "i"
    ),
    **dict.fromkeys(("terminated", "truncated", "seeded", "late"), "b"),
    **dict.fromkeys(("text", "options"), "U"),
    "reward": "f",
    "sequence": "u",
}


def needed(table: Tables | None, *columns: str) -> list[Any]:
    """Returns some columns of a table, all empty if there is no such table; raises FormatError if one is missing."""
    if not table:
        return [np.empty(0, np.int64)] * len(columns)
    if missing := [column for column in columns if column not in table]:
        raise FormatError(f"a table of the session has no column {', '.join(missing)}")
    return [table[column] for column in columns]


def check_tables(tables: Tables, links: Iterable[LinkRecord], where: str) -> None:
    """Raises FormatError for what recorders do not write: a column of another dtype or shape, a link of no session."""
    known = {link.name: link for link in links}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise FormatError(f"{where}: {name!r} is no table")
        if name not in GROUPS:
            _check_table(table, f"{where}: {name!r}", "U")
            continue
        for link, each in table.items():
            if link not in known or not isinstance(each, dict):
                raise FormatError(f"{where}: {name!r} has {link!r}, which is no link of the session")
            _check_table(each, f"{where}: {name!r} of link {link!r}", "u")
            width = len(known[link].command if name == "commands" else known[link].reading)
            values = each.get("values")
            if values is not None and not _is_column(values, "f", shape=(width,)):
                raise FormatError(f"{where}: {name!r} of link {link!r} has not {width} values in an entry")


def _check_table(table: Tables, where: str, kind: str) -> None:
    for column, expected in {**_ORDINARY, "kind": kind}.items():
        values = table.get(column)
        if values is not None and not _is_column(values, expected):
            raise FormatError(f"{where}: the column {column!r} is not what recorders write")
    if not isinstance(table.get("signals", {}), dict):
        raise FormatError(f"{where}: the signals are no columns")
    for column in ("action", "observation", "signals"):
        if not all(each.dtype.kind in NUMBERS for each in _leaves(table.get(column, {}))):
            raise FormatError(f"{where}: the column {column!r} is not of numbers")


def _leaves(tree: Any) -> Iterator[Array]:
    if isinstance(tree, dict | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each)
    else:
        yield tree


def _is_column(values: Any, kind: str, *, shape: tuple[int, ...] = ()) -> bool:
    return (
        isinstance(values, np.ndarray)
        and values.shape[1:] == shape
        and values.ndim > 0
        and (values.dtype.kind == kind or len(values) == 0)
    )


def cut(tables: Tables, start: int | None = None, stop: int | None = None) -> dict[str, Any]:
    """Returns the entries of all tables with `start <= row < stop`; raises FormatError if a table has no rows."""
    found: dict[str, Any] = {}
    for name, table in tables.items():
        if name in GROUPS:
            found[name] = {link: _cut(each, start, stop) for link, each in table.items()}
        else:
            found[name] = _cut(table, start, stop)
    return found


def _cut(table: Tables, start: int | None, stop: int | None) -> Any:
    (row,) = needed(table, "row")
    chosen = np.ones(len(row), bool)
    if start is not None:
        chosen &= row >= start
    if stop is not None:
        chosen &= row < stop
    return mapped(lambda array: array[chosen], table)


def selected(tables: Tables, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the tables without the columns `row` that are not wanted, and without tables that are empty then."""
    found: dict[str, Any] = {}
    for name, table in tables.items():
        if name in GROUPS:
            inner = {
                link: _without_row(each, wanted, f"{name}/{names.encode_part(link)}/row")
                for link, each in table.items()
            }
            found[name] = {link: each for link, each in inner.items() if each}
        else:
            found[name] = _without_row(table, wanted, f"{name}/row")
    return {name: table for name, table in found.items() if table}


def _without_row(table: Tables, wanted: Callable[[str], bool], path: str) -> dict[str, Any]:
    return {key: column for key, column in table.items() if key != "row" or wanted(path)}


def joined(parts: Sequence[tuple[range, Tables]], of: str) -> dict[str, Any]:
    """Returns the tables of several parts as one; those of links are not in all of them.

    Args:
        parts: (rows of it, its tables) each.
        of: what they are of, for messages.

    Raises:
        ConfigurationError: a column has another size in one part than in another, or no dtype holds the values of
            both; by name and rows.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(key for _, tables in parts for key in tables):
        there = [(rows, tables[name]) for rows, tables in parts if name in tables]
        if name in GROUPS:
            links = dict.fromkeys(link for _, group in there for link in group)
            found[name] = {
                link: _joined([(rows, group[link]) for rows, group in there if link in group], f"{name}/{link}", of)
                for link in links
            }
        else:
            found[name] = _joined(there, name, of)
    return found


def _joined(parts: Sequence[tuple[range, Any]], path: str, of: str) -> Any:
    # what a table without entries has for columns is from before the first values were seen
    parts = [part for part in parts if entries(part[1])] or parts[-1:]
    (rows, first), *others = parts
    for more, tree in others:
        if not _is_alike(first, tree):
            raise ConfigurationError(
                f"{of} cannot be read as one: the column {path!r} has {_told(first)} in rows {_span(rows)}, and "
                f"{_told(tree)} in rows {_span(more)}; read stretches that are alike, read(start=, stop=), or part by "
                "part, chunks()",
                keys=[path],
            )
    if isinstance(first, dict):
        return {key: _joined([(more, tree[key]) for more, tree in parts], f"{path}/{key}", of) for key in first}
    if isinstance(first, tuple):
        columns = ([(more, tree[place]) for more, tree in parts] for place in range(len(first)))
        return tuple(_joined(each, f"{path}/{place}", of) for place, each in enumerate(columns))
    return first if not others else _concatenated(parts, path, of)


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys()
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other)
    return isinstance(other, np.ndarray) and one.shape[1:] == other.shape[1:]


def _concatenated(parts: Sequence[tuple[range, Array]], path: str, of: str) -> Array:
    """Returns one array, of the dtype that holds the values of all; raises ConfigurationError if there is none."""
    found = np.concatenate([array for _, array in parts])
    for rows, array in parts:
        if array.dtype != found.dtype and not (array.dtype.kind == found.dtype.kind == "U"):
            back = array.astype(found.dtype).astype(array.dtype)
            if found.dtype.kind == "U" or back.tobytes() != array.tobytes():
                raise ConfigurationError(
                    f"{of} cannot be read as one: no dtype holds the column {path!r} in rows {_span(parts[0][0])} "
                    f"({parts[0][1].dtype}) and in rows {_span(rows)} ({array.dtype}) exactly; read them part by part, "
                    "chunks()",
                    keys=[path],
                )
    return found


def entries(tree: Any) -> int:
    """Returns how many entries a table or column has."""
    if isinstance(tree, dict | tuple):
        return max(map(entries, tree.values() if isinstance(tree, dict) else tree), default=0)
    return len(tree)


def _told(tree: Any) -> str:
    if isinstance(tree, dict | tuple):
        return f"the parts {', '.join(map(str, tree))}" if isinstance(tree, dict) else f"{len(tree)} parts"
    return f"{tree.dtype} of shape {tree.shape[1:]}"


def _span(rows: range) -> str:
    return f"{rows.start} to {rows.stop - 1}" if len(rows) else f"before {rows.start}"
