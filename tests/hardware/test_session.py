"""`Session`: reading what was recorded, by columns, rows and times, while it is recorded and afterwards."""

import json
from pathlib import Path

import numpy as np
import pytest

import simckpt
from simckpt import plots, state
from simckpt.errors import (
    ConfigurationError,
    DamagedError,
    DamageWarning,
    LeafNotFoundError,
    SessionNotFoundError,
    SimckptError,
)
from simckpt.hardware import series
from simckpt.hardware.session import Session
from simckpt.storage import StoreFiles, sealed
from simckpt.storage.session_records import LinkRecord, SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import SessionFiles

MS = 1_000_000  # [ns]


def tables(start: int, stop: int) -> dict:
    """Rows of 2 ms, each with a command and, but for every fourth, a reading; a reset lies before row 6."""
    rows = np.arange(start, stop)
    came = rows % 4 != 3
    resets = rows[rows == 6]
    return {
        "rows": {
            "order": 10 * rows,
            "row": rows,
            "started": 100 * MS + rows * 2 * MS,
            "finished": 100 * MS + rows * 2 * MS + MS // 2,
            "reward": rows / 3,
            "observation": (np.stack([rows, -rows], 1).astype(np.float32), rows % 2 == 0),
        },
        "resets": {"order": 10 * resets - 5, "row": resets, "options": np.array([""] * len(resets), "U1")},
        "commands": {"motor": {"order": 10 * rows + 1, "row": rows, "values": rows[:, None] / 7}},
        "readings": {
            "motor": {
                "order": 10 * rows + 2,
                "row": rows,
                "kind": np.where(came, 0, 1).astype(np.uint8),
                "sequence": np.where(came, rows, 0).astype(np.uint64),
                "device_time": np.where(came, rows * 2 * MS, -1),
                "received": 100 * MS + rows * 2 * MS + 100_000 * (rows % 3),
                "late": np.zeros(len(rows), bool),
                "values": np.where(came[:, None], rows[:, None] / [[2.0, 5.0]], np.nan),
            }
        },
        "events": {
            "order": np.array([10 * start], np.int64),
            "row": np.array([start]),
            "monotonic": np.array([start * MS]),
            "wall": np.array([start]),
            "kind": np.array(["note"]),
            "text": np.array([f"begun at {start}"]),
        },
    }


def write_part(writer: SessionWriter, start: int, stop: int) -> None:
    resets = (0, 0) if stop <= 6 else (0, 1) if start <= 6 else (1, 1)
    spans = {"rows": (start, stop), "resets": resets, "commands/motor": (start, stop), "readings/motor": (start, stop)}
    count = start // 4
    times = {"started": 100 * MS + start * 2 * MS, "stopped": 100 * MS + stop * 2 * MS}
    encoded = state.encode(tables(start, stop))
    writer.write_part(encoded, rows=(start, stop), spans={**spans, "events": (count, count + 1)}, **times)


@pytest.fixture
def writer(tmp_path) -> SessionWriter:
    store = StoreFiles.create(tmp_path)
    links = (LinkRecord("motor", ("force",), ("force", "position"), "udp://127.0.0.1:9000"),)
    create_session(
        store, SessionRecord("5e" * 16, "pole", 1.8e9, 7, links=links, signals=("heat",), host="<b>here</b>")
    )
    with SessionWriter(store.path, "pole") as made:
        for start in (0, 4, 8):
            write_part(made, start, start + 4)
        for number, row in enumerate((0, 6, 6)):
            encoded = state.encode({"env": {"count": number}, "observation": None})
            settings = {
                "row": row,
                "order": 10 * row - number,
                "monotonic": row,
                "wall": row,
                "reason": "",
                "models": (),
            }
            made.write_snapshot(encoded, **settings)
        yield made


def session(path: Path) -> Session:
    return simckpt.Store(path).session("pole")


def test_all_tables_are_read_as_one(tmp_path, writer) -> None:
    found, expected = session(tmp_path).read(), tables(0, 12)
    for name in ("rows", "resets"):
        for column, values in expected[name].items():
            if column == "observation":
                for one, other in zip(found[name][column], values, strict=True):
                    assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
            else:
                assert found[name][column].tolist() == values.tolist(), column
    assert found["commands"]["motor"]["values"].tobytes() == expected["commands"]["motor"]["values"].tobytes()
    readings = found["readings"]["motor"]
    assert readings["values"].tobytes() == expected["readings"]["motor"]["values"].tobytes()
    assert readings["sequence"].dtype == np.uint64


def test_merging_changes_nothing(tmp_path, writer) -> None:
    reading = session(tmp_path)
    before, listed = reading.read(), reading.parts
    iterator = reading.chunks()
    first = next(iterator)
    writer.close()
    assert first["rows"]["row"].tolist() == [0, 1, 2, 3]
    # the parts that it had listed are gone by now
    assert [chunk["rows"]["row"].tolist() for chunk in iterator] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(reading.parts) == 1 < len(listed)
    after = reading.read()
    assert after["rows"]["reward"].tobytes() == before["rows"]["reward"].tobytes()
    assert after["events"]["text"].tolist() == before["events"]["text"].tolist()


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (3, 9), (5, 6), (None, 5), (11, None), (7, 7), (20, 30)])
def test_a_range_of_rows_cuts_all_tables(tmp_path, writer, start, stop) -> None:
    found = session(tmp_path).read(start=start, stop=stop)
    rows = list(range(12))[slice(start, stop)]
    assert found.get("rows", {"row": np.empty(0)})["row"].tolist() == rows
    if rows:
        assert found["commands"]["motor"]["row"].tolist() == rows
        assert found["readings"]["motor"]["row"].tolist() == rows
        assert found["resets"]["row"].tolist() == [row for row in rows if row == 6]


def test_some_columns_are_read_alone(tmp_path, writer) -> None:
    reading = session(tmp_path)
    found = reading.read(["rows/reward", "readings/motor/values"])
    assert {key: list(value) for key, value in found.items()} == {"rows": ["reward"], "readings": ["motor"]}
    assert list(found["readings"]["motor"]) == ["values"]
    cut = reading.read(["rows/reward"], start=5, stop=7)
    assert list(cut) == ["rows"]
    assert list(cut["rows"]) == ["reward"]
    assert cut["rows"]["reward"].tolist() == [5 / 3, 2.0]
    assert isinstance(reading.read(["rows/observation"])["rows"]["observation"], tuple)


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path, writer) -> None:
    with pytest.raises(LeafNotFoundError, match=r"no column 'rows/rewards'; it has .*rows/reward"):
        session(tmp_path).read(["rows/rewards"])


def test_times_and_rows_find_each_other(tmp_path, writer) -> None:
    reading = session(tmp_path)
    assert reading.started == 100 * MS
    assert reading.times.tolist() == pytest.approx([0.002 * row for row in range(12)], abs=1e-9)
    assert reading.duration == pytest.approx(0.024)
    assert [reading.row_at(seconds) for seconds in (0.0, 0.0019, 0.002, 0.0201, 99.0)] == [0, 0, 1, 10, 11]
    with pytest.raises(ConfigurationError, match="no row"):
        reading.row_at(-0.1)


def test_snapshots_are_found_by_rows(tmp_path, writer) -> None:
    reading = session(tmp_path)
    assert [each.row for each in reading.snapshots] == [0, 6, 6]
    assert reading.snapshot(0) == {"env": {"count": 0}, "observation": None}
    # of two at one row the later one
    assert reading.snapshot(6)["env"] == {"count": 2}
    with pytest.raises(ConfigurationError, match="it has some at 0, 6, 6"):
        reading.snapshot(3)


def test_figures_of_a_session(tmp_path, writer) -> None:
    figures = session(tmp_path).statistics()
    assert figures["rows"] == 12
    assert figures["rate"] == pytest.approx(500.0)
    assert figures["step"]["median"] == pytest.approx(0.0005)
    assert figures["period"]["longest"] == pytest.approx(0.002)
    motor = figures["links"]["motor"]
    # of the numbers 0 to 10 the device's 3 and 7 did not come
    assert (motor["commands"], motor["readings"], motor["nothing"], motor["lost"], motor["late"]) == (12, 9, 3, 2, 0)
    assert motor["delay"]["longest"] == pytest.approx(0.0002)


def test_what_a_session_says_of_itself(tmp_path, writer) -> None:
    reading = session(tmp_path)
    assert repr(reading) == "<Session 'pole': 12 rows, 0.0 s, recording>"
    assert "<b>here</b>" not in reading._repr_html_()
    assert "&lt;b&gt;here" in reading._repr_html_()
    assert (reading.name, reading.id, reading.mode, reading.origin) == ("pole", "5e" * 16, "continuous", None)
    assert [event.text for event in reading.events] == ["begun at 0", "begun at 4", "begun at 8"]
    writer.release()
    assert reading.status == "unfinished"


def test_a_session_without_rows_is_empty_everywhere(tmp_path) -> None:
    store = StoreFiles.create(tmp_path)
    create_session(store, SessionRecord("5e" * 16, "pole", 1.8e9, 7))
    reading = session(tmp_path)
    assert (reading.rows, reading.missing, reading.events, reading.snapshots) == (range(0), [], [], ())
    assert (reading.read(), reading.duration, len(reading.times)) == ({}, 0.0, 0)
    assert reading.statistics()["rate"] == 0.0
    assert "0 rows" in repr(reading)


def test_damage_is_told_and_what_comes_before_it_can_be_read(tmp_path, writer) -> None:
    path = tmp_path / "sessions/pole/parts/00000002-00000002/state.h5"
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, len(data)):
        data[place] ^= 1
    path.write_bytes(data)
    reading = session(tmp_path)
    with pytest.raises(DamagedError):
        reading.read()
    chunks = reading.chunks()
    assert next(chunks)["rows"]["row"].tolist() == [0, 1, 2, 3]
    with pytest.raises(DamagedError):
        next(chunks)
    assert reading.read(stop=4)["rows"]["row"].tolist() == [0, 1, 2, 3]
    assert "12 rows" in repr(reading)


def test_sessions_are_listed_in_the_order_of_their_beginnings(tmp_path) -> None:
    store = StoreFiles.create(tmp_path)
    for name, created in (("b", 3.0), ("c", 1.0), ("a", 2.0)):
        create_session(store, SessionRecord(name * 32, name, created, 0))
    assert [each.name for each in simckpt.Store(tmp_path).sessions()] == ["c", "a", "b"]
    with pytest.raises(SessionNotFoundError, match="did you mean"):
        simckpt.Store(tmp_path).session("aa")
    (tmp_path / "sessions/a/session.json").write_bytes(b"garbage")
    with pytest.warns(DamageWarning, match="session 'a' was passed over"):
        assert [each.name for each in simckpt.Store(tmp_path).sessions()] == ["c", "b"]


def look_at_everything(path: Path) -> None:
    reading = session(path)
    _ = (
        reading.status,
        reading.statistics(),
        reading.events,
        reading.times,
        reading.missing,
        reading.statistics(),
        repr(reading),
    )
    _ = (reading._repr_html_(), reading.read(start=2, stop=9), reading.row_at(0.01), list(reading.chunks(["rows/row"])))
    for each in reading.snapshots:
        reading.snapshot(each)
    _ = reading.absent


WRONG = [None, -1, 2**63 - 1, 0.5, "", "\x1b[31m", [], [0, 2**61], {}, {"rows": [0, 4], "x/../y": [0, 4]}, True]
RECORDS = [
    "session.json",
    "closed.json",
    "parts/00000001-00000003/part.json",
    "snapshots/00000001/snapshot.json",
]


@pytest.mark.parametrize("record", RECORDS)
def test_records_of_a_stranger_are_read_or_refused(tmp_path, writer, record) -> None:
    writer.close()
    look_at_everything(tmp_path)
    path = tmp_path / "sessions/pole" / record
    data = path.read_bytes()
    fields = {key: value for key, value in json.loads(data).items() if key not in ("format", "version", "digest")}
    refused = 0
    for key in fields:
        for value in WRONG:
            path.write_bytes(sealed.seal(record.split("/")[-1].removesuffix(".json"), {**fields, key: value}))
            try:
                look_at_everything(tmp_path)
            except SimckptError:
                refused += 1
    assert refused > 4 * len(fields)
    path.write_bytes(data)
    look_at_everything(tmp_path)


TREES = {
    "scalars": {"rows": {"row": 3, "order": np.arange(4)}},
    "lengths": {"rows": {"row": np.arange(3), "order": np.arange(4)}},
    "no rows": {"rows": {}},
    "a list": [1, 2],
    "an array": np.arange(4),
    "tables in tables": {"rows": {"row": {"row": np.arange(4)}, "order": np.arange(4)}},
    "other dtypes": {"rows": {key: np.array(["a"] * 4) for key in ("row", "order", "started", "finished", "reward")}},
    "a column as a table": {"rows": np.arange(4)},
    "no axes": {"rows": {"row": np.array(4), "order": np.arange(4)}},
    "events that are none": {"rows": {"row": np.arange(4)}, "events": {"order": np.arange(0)}},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_tables_of_a_stranger_are_read_or_refused(tmp_path, tree) -> None:
    store = StoreFiles.create(tmp_path)
    create_session(store, SessionRecord("5e" * 16, "pole", 1.8e9, 7))
    with SessionWriter(store.path, "pole") as writer:
        spans = {"rows": (0, 4), **({"events": (0, 0)} if isinstance(tree, dict) and "events" in tree else {})}
        writer.write_part(state.encode(tree), rows=(0, 4), spans=spans, started=0, stopped=9)
        with pytest.raises(SimckptError):
            look_at_everything(tmp_path)


CHANGED = {
    "another size": ({"place": np.zeros((4, 3))}, "rows/observation/place", r"float64 of shape \(3,\)"),
    "another number of axes": ({"place": np.zeros(4)}, "rows/observation/place", r"float64 of shape \(\)"),
    "a part more": ({"place": np.zeros((4, 2)), "speed": np.zeros(4)}, "rows/observation", "the parts place, speed"),
    "no parts": (np.zeros((4, 2)), "rows/observation", r"float64 of shape \(2,\)"),
    "a tuple": ((np.zeros((4, 2)),), "rows/observation", "1 parts"),
}


def of_two_forms(path: Path, first: object, second: object) -> Session:
    """Rows 0 to 3 and 8 to 11 have one observation, rows 4 to 7 another."""
    store = StoreFiles.create(path)
    create_session(store, SessionRecord("5e" * 16, "pole", 1.8e9, 7))
    with SessionWriter(store.path, "pole") as writer:
        for start, observation in ((0, first), (4, second), (8, first)):
            rows = np.arange(start, start + 4)
            table = {"order": rows, "row": rows, "reward": rows / 3, "observation": observation}
            span = (start, start + 4)
            writer.write_part(
                state.encode({"rows": table}), rows=span, spans={"rows": span}, started=start * MS, stopped=4 * MS
            )
    return session(path)


@pytest.mark.parametrize("change", CHANGED)
def test_a_column_that_changes_its_size_is_told_by_name_and_rows_and_all_else_can_be_read(tmp_path, change) -> None:
    other, column, told = CHANGED[change]
    first = {"place": np.arange(8.0).reshape(4, 2)}
    reading = of_two_forms(tmp_path, first, other)
    with pytest.raises(
        ConfigurationError, match=rf"column '{column}' has .* in rows 0 to 3, and {told} in rows 4 to 7.*chunks"
    ):
        reading.read()
    assert reading.read(["rows/reward"])["rows"]["reward"].tolist() == [row / 3 for row in range(12)]
    for start, expected in ((0, first), (4, other), (8, first)):
        found = reading.read(["rows/observation"], start=start, stop=start + 4)["rows"]["observation"]
        assert state.differences(found, expected) == []
    assert [len(each["rows"]["row"]) for each in reading.chunks()] == [4, 4, 4]


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (np.float32, np.float64, np.float64),
        (np.float64, np.float32, np.float64),
        (np.int8, np.float32, np.float32),
        (np.bool_, np.int64, np.int64),
        (np.uint8, np.int8, np.int16),
    ],
)
def test_a_column_whose_dtype_changes_has_the_one_that_holds_all(tmp_path, first, second, joined) -> None:
    one, two = np.array([0, 1, 1, 0], first), np.array([1, 0, 1, 1], second)
    found = of_two_forms(tmp_path, one, two).read()["rows"]["observation"]
    assert found.dtype == joined
    assert found.tolist() == [*one.tolist(), *two.tolist(), *one.tolist()]


def test_values_that_no_dtype_holds_with_those_before_are_told(tmp_path) -> None:
    reading = of_two_forms(tmp_path, np.full(4, 2**53 + 1), np.full(4, 0.5))
    with pytest.raises(ConfigurationError, match=r"no dtype holds the column 'rows/observation' in rows .*\(int64\)"):
        reading.read()
    # a float64 holds that one
    assert of_two_forms(tmp_path / "b", np.full(4, 2**53), np.full(4, 0.5)).read()["rows"]["observation"][4] == 0.5


def with_readings(path: Path, sequence: np.ndarray, device_time: np.ndarray, received: np.ndarray) -> Session:
    """A session with a reading in each row."""
    store = StoreFiles.create(path)
    links = (LinkRecord("left arm", ("force",), ("place",)), LinkRecord("silent", ("x",), ("y",)))
    create_session(store, SessionRecord("5e" * 16, "pole", 1.8e9, 7, links=links))
    rows = np.arange(len(sequence))
    table = {
        "order": rows,
        "row": rows,
        "kind": np.zeros(len(rows), np.uint8),
        "sequence": sequence.astype(np.uint64),
        "device_time": device_time,
        "received": received,
        "late": np.zeros(len(rows), bool),
        "values": np.zeros((len(rows), 1)),
    }
    steps = {"order": rows, "row": rows, "started": received, "finished": received}
    with SessionWriter(store.path, "pole") as writer:
        span = (0, len(rows))
        writer.write_part(
            state.encode({"rows": steps, "readings": {"left arm": table}}),
            rows=span,
            spans={"rows": span, "readings/left%20arm": span},
            started=int(received[0]),
            stopped=int(received[-1]),
        )
    return session(path)


def test_delays_are_those_that_figures_show_whatever_the_clocks_do(tmp_path) -> None:
    rng = np.random.default_rng(3)
    count = 6000
    sent = 600_000_000 * np.arange(count)  # an hour [ns]
    extra = rng.exponential(300_000, count).astype(np.int64)
    extra[:: count // 50] = 0  # the quickest ones, all along
    device = 5_000 + (sent * (1 + 50e-6)).astype(np.int64)  # runs ahead by 50 ppm, 180 ms in an hour
    device[count // 2 :] -= device[count // 2]  # it was started anew
    reading = with_readings(tmp_path, np.arange(count), device, 10**15 + sent + extra)
    found = reading.statistics()["links"]
    expected = np.quantile(extra, (0.5, 0.99, 0.999, 1.0)) / 1e9
    # the line through the quickest ones is off by what the next of them took: 1 us
    assert list(found["left arm"]["delay"].values()) == pytest.approx(expected.tolist(), abs=1e-6)
    shown = np.array(plots.delays(reading, "left arm").data[0].y) / 1e3
    assert np.quantile(shown, 0.5) == pytest.approx(found["left arm"]["delay"]["median"], abs=1e-4)
    assert found["silent"] == {
        "commands": 0,
        "readings": 0,
        "nothing": 0,
        "lost": 0,
        "late": 0,
        "delay": dict.fromkeys(("median", "p99", "p999", "longest"), 0.0),
    }


@pytest.mark.parametrize("lost", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("restarts", [0, 2])
def test_lost_readings_are_counted_once_whatever_their_order(tmp_path, lost, restarts) -> None:
    rng = np.random.default_rng(7)
    sequences, expected = [], 0
    for _ in range(restarts + 1):
        numbers = np.arange(400)
        came = numbers[rng.random(400) >= lost]
        came = np.unique([0, *came, 399])
        expected += 400 - len(came)
        # some overtake others, but not the first
        order = np.argsort(
            came + np.where(rng.random(len(came)) < 0.2, rng.integers(0, 8, len(came)), 0), kind="stable"
        )
        assert came[order][0] == 0
        sequences.append(came[order])
    sequence = np.concatenate(sequences)
    times = 1000 * np.arange(len(sequence))
    assert with_readings(tmp_path, sequence, times, times).statistics()["links"]["left arm"]["lost"] == expected


def test_figures_are_those_of_what_is_on_the_disk_by_then(tmp_path, writer) -> None:
    reading = session(tmp_path)
    assert reading.statistics()["rows"] == 12
    write_part(writer, 12, 16)
    assert reading.statistics()["rows"] == 16
    assert reading.statistics()["links"]["motor"]["commands"] == 16


def test_one_look_reads_each_record_once_and_only_the_columns_that_are_wanted(tmp_path, writer, monkeypatch) -> None:
    reading = session(tmp_path)
    opened: list[str] = []
    part, bundle = SessionFiles.part, SessionFiles.read_bundle
    monkeypatch.setattr(SessionFiles, "part", lambda self, numbers: opened.append("part") or part(self, numbers))
    for look in (repr, lambda each: each._repr_html_(), lambda each: each.rows, lambda each: each.missing):
        opened.clear()
        look(reading)
        assert opened == ["part"] * 3
    wanted: set[str] = set()

    def read(self, folder, record, component, chosen=None):
        if chosen is not None:
            wanted.update(path for path in PATHS if chosen(path))
        return bundle(self, folder, record, component, chosen)

    monkeypatch.setattr(SessionFiles, "read_bundle", read)
    series(reading, "reading/motor/force", start=3, stop=9)
    assert wanted == {path for path in PATHS if path.startswith("readings/motor/")}
    wanted.clear()
    series(reading, "reward", start=3, stop=9)
    assert wanted == {"rows/reward", "rows/row", "rows/finished"}


PATHS = [
    "rows/row",
    "rows/reward",
    "rows/started",
    "rows/finished",
    "rows/observation/0",
    "commands/motor/row",
    "commands/motor/values",
    "readings/motor/row",
    "readings/motor/values",
    "readings/other/row",
    "events/row",
]
