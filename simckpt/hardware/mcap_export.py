"""A session as MCAP, the file that Foxglove and other viewers of robots' logs open; messages are JSON with schemas."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.hardware.session import READING
from simckpt.hardware.session_tables import needed
from simckpt.hardware.windows import windows
from simckpt.storage import durable, exports

if TYPE_CHECKING:
    from simckpt.hardware.session import Session
    from simckpt.storage.session_records import LinkRecord

_SEQUENCE = 0xFFFFFFFF  # MCAP counts in 32 bits
_LATEST = 2**64 - 1  # [ns] that it can hold

# (time, order, topic, content, wall, sequence)
Message = tuple[int, int, str, dict[str, Any], int, int]


def export_mcap(
    session: Session, path: str | os.PathLike[str], *, start: int | None = None, stop: int | None = None
) -> Path:
    """Writes a session as one MCAP file and returns its path; nothing is replaced.

    All messages of links are in it; looks for a reading that found none are not, nor whether a reading was late.

    Channels: `/action`, `/observation`, `/reward` (with `terminated` and `truncated`), `/signal/<name>`, `/reset`,
    `/command/<link>`, `/reading/<link>`, `/event`, `/snapshot`. Each message has the number of its row. `log_time` is
    the wall clock at the beginning of the session plus the monotonic time since, so that messages are in order whatever
    was done to the wall clock; `publish_time` is the wall clock as it was. JSON has `null` alone for numbers that are
    not finite. Arrays of more than one dimension are flat, with their shape in the metadata of the channel; a complex
    number is [real, imaginary].

    Args:
        session: what was recorded.
        path: of the new file.
        start: the first row; by default that of the session.
        stop: one behind the last row.

    Raises:
        ConfigurationError: the library `mcap` is not installed.
        ConflictError: the path exists.
        DamagedError: something of the session cannot be trusted; there is no file then.
        StorageError: the disk refused; there is no file then.
    """
    writer, target = _writer_class(), Path(path)
    disk = durable.Disk()
    with exports.new_file(disk, target) as made:
        # the size is not known before the end, so nothing is reserved
        durable.write_file(disk, made, _portions(writer, session, start, stop), size=0)
    return target


def _writer_class() -> Any:
    try:
        from mcap.writer import Writer
    except ImportError as error:
        message = 'MCAP is written by the library mcap, which is not installed: pip install "simckpt[hardware]"'
        raise ConfigurationError(message) from error
    return Writer


class _Stream:
    """What the library writes to: keeps the bytes until they are taken."""

    def __init__(self) -> None:
        self._written: list[bytes] = []
        self._taken = 0  # [bytes]
        self._size = 0  # [bytes]

    def write(self, data: bytes) -> int:
        self._written.append(bytes(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def take(self) -> tuple[int, bytes]:
        """Returns (offset, bytes) of what was written since the last call."""
        data, offset = b"".join(self._written), self._taken
        self._written, self._taken = [], self._size
        return offset, data


def _portions(
    writer_class: Any, session: Session, start: int | None, stop: int | None
) -> Iterator[tuple[int, durable.Bytes]]:
    stream = _Stream()
    writer = writer_class(stream)
    writer.start(library="simckpt")
    writer.add_metadata("session", _facts(session))
    channels: dict[str, int] = {}
    origin, latest = round(session.created * 1e9) - session.record.monotonic, 0
    for messages in _messages(session, start, stop):
        for time, _, topic, content, wall, sequence in messages:
            if topic not in channels:
                channels[topic] = _register(writer, topic, content)
            # what another thread noted may have come a little late
            latest = max(latest, time + origin)
            data = json.dumps(_plain(content), allow_nan=False, separators=(",", ":")).encode()
            writer.add_message(
                channels[topic],
                log_time=min(latest, _LATEST),
                publish_time=min(max(wall, 0), _LATEST),
                sequence=sequence & _SEQUENCE,
                data=data,
            )
        yield stream.take()
    writer.finish()
    yield stream.take()


def _facts(session: Session) -> dict[str, str]:
    return {"session": session.name, "id": session.id, "host": session.host, "rows": str(len(session.rows))}


def _messages(session: Session, start: int | None, stop: int | None) -> Iterator[list[Message]]:
    """Yields the messages of a session in order, those of some rows at a time."""
    snapshots = [
        (each.monotonic, each.order, "/snapshot", {"row": each.row, "reason": each.reason}, each.wall, each.number)
        for each in session.snapshots
        if (start is None or each.row >= start) and (stop is None or each.row < stop)
    ]
    links = {link.name: link for link in session.links}
    for tables in windows(session, start=start, stop=stop):
        messages = [*_row_messages(tables.get("rows")), *_reset_messages(tables.get("resets"))]
        for name, table in tables.get("commands", {}).items():
            messages += _command_messages(links[name], table)
        for name, table in tables.get("readings", {}).items():
            messages += _reading_messages(links[name], table)
        messages += _event_messages(tables.get("events"))
        last = max((message[0] for message in messages), default=0)
        messages += [message for message in snapshots if message[0] <= last]
        snapshots = [message for message in snapshots if message[0] > last]
        yield sorted(messages, key=lambda message: message[:2])
    yield snapshots


def _row_messages(rows: Mapping[str, Any] | None) -> Iterator[Message]:
    actions, observations = needed(rows, "action", "observation")
    signals = (rows or {}).get("signals", {})
    names = ("row", "order", "started", "finished", "wall", "reward", "terminated", "truncated")
    for place, (row, order, started, finished, wall, *told) in enumerate(_lines(rows, names)):
        yield started, order, "/action", {"row": row, "action": _at(actions, place)}, wall, row
        wall += finished - started
        yield finished, order, "/observation", {"row": row, "observation": _at(observations, place)}, wall, row
        flags = dict(zip(("reward", "terminated", "truncated"), told, strict=True))
        yield finished, order, "/reward", {"row": row, **flags}, wall, row
        for name, values in signals.items():
            yield finished, order, f"/signal/{name}", {"row": row, "value": _at(values, place)}, wall, row


def _reset_messages(resets: Mapping[str, Any] | None) -> Iterator[Message]:
    names = ("row", "order", "started", "finished", "wall", "seed", "seeded", "options")
    (observations,) = needed(resets, "observation")
    for place, each in enumerate(_lines(resets, names)):
        row, order, started, finished, wall, seed, seeded, options = each
        content = {"row": row, "seed": seed, "seeded": seeded, "options": options}
        content["observation"] = _at(observations, place)
        yield finished, order, "/reset", content, wall + finished - started, row


def _command_messages(link: LinkRecord, table: Mapping[str, Any]) -> Iterator[Message]:
    for row, order, sequence, monotonic, wall, values in _lines(
        table, ("row", "order", "sequence", "monotonic", "wall", "values")
    ):
        content = {"row": row, "sequence": sequence, "values": dict(zip(link.command, values, strict=True))}
        yield monotonic, order, f"/command/{link.name}", content, wall, sequence


def _reading_messages(link: LinkRecord, table: Mapping[str, Any]) -> Iterator[Message]:
    for row, order, kind, sequence, device_time, received, wall, values in _lines(
        table, ("row", "order", "kind", "sequence", "device_time", "received", "wall", "values")
    ):
        if kind == READING:
            content = {"row": row, "sequence": sequence, "device_time": device_time}
            content["values"] = dict(zip(link.reading, values, strict=True))
            yield received, order, f"/reading/{link.name}", content, wall, sequence


def _event_messages(events: Mapping[str, Any] | None) -> Iterator[Message]:
    for row, order, monotonic, wall, kind, text in _lines(
        events, ("row", "order", "monotonic", "wall", "kind", "text")
    ):
        yield monotonic, order, "/event", {"row": row, "kind": kind, "text": text}, wall, max(row, 0)


def _lines(table: Mapping[str, Any] | None, names: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    return zip(*(np.asarray(column).tolist() for column in needed(table, *names)), strict=True)


def _at(tree: Any, place: int) -> Any:
    """Returns what a row of a column holds: dicts and arrays; the parts of a tuple get their places as names."""
    if isinstance(tree, Mapping):
        return {str(name): _at(part, place) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return {str(number): _at(part, place) for number, part in enumerate(tree)}
    return tree[place]


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value).reshape(-1) if np.ndim(value) > 1 else np.asarray(value)
        if array.dtype.kind == "c":
            array = np.stack([array.real, array.imag], axis=-1)
        plain = array.tolist()
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return plain
        return _plain(plain)
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _register(writer: Any, topic: str, content: dict[str, Any]) -> int:
    """Returns the id of a new channel for messages such as this one."""
    schema = json.dumps(_schema(content))
    schema_id = writer.register_schema(
        name=f"simckpt{topic.replace('/', '.')}", encoding="jsonschema", data=schema.encode()
    )
    metadata = {"shape": json.dumps(shapes)} if (shapes := _shapes(content)) else {}
    return int(writer.register_channel(topic, "json", schema_id, metadata))


_TYPES = {"f": "number", "i": "integer", "u": "integer", "b": "boolean"}


def _schema(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"type": "object", "properties": {name: _schema(part) for name, part in value.items()}}
    if isinstance(value, str):
        return {"type": "string"}
    array = np.asarray(value)
    element: dict[str, Any] = {"type": _TYPES.get(array.dtype.kind, "string")}
    if array.dtype.kind == "c":
        element = {"type": "array", "items": {"type": "number"}}
    return {"type": "array", "items": element} if array.ndim else element


def _shapes(value: Any, path: str = "") -> dict[str, list[int]]:
    """Returns {path: shape} of the arrays that are flat in messages."""
    if isinstance(value, dict):
        return {
            inner: shape for name, part in value.items() for inner, shape in _shapes(part, f"{path}.{name}").items()
        }
    return {path[1:]: list(np.shape(value))} if np.ndim(value) > 1 else {}
