"""A session as MCAP: opened with the library's reader, every message is there, equal and in order."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from replay_helpers import Altered, cart_pole, dict_space, record

from simckpt.errors import ConfigurationError, ConflictError, DamagedError
from simckpt.hardware import export_mcap
from simckpt.hardware.session import READING, Session


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return record(tmp_path_factory.mktemp("pole") / "s", cart_pole())


def read(path: Path) -> tuple[list[tuple[str, dict[str, Any], Any]], dict[str, Any]]:
    """Returns (topic, content, message) of all messages as they stand in the file, and the schemas by topic."""
    from mcap.reader import make_reader

    found, schemas = [], {}
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        for schema, channel, message in reader.iter_messages(log_time_order=False):
            assert (schema.encoding, channel.message_encoding) == ("jsonschema", "json")
            schemas[channel.topic] = json.loads(schema.data)
            found.append((channel.topic, json.loads(message.data), message))
        summary = reader.get_summary()
    assert summary is not None
    assert summary.statistics is not None
    assert summary.statistics.message_count == len(found)
    return found, schemas


def test_every_message_is_there_equal_and_in_order(pole: Session, tmp_path: Path) -> None:
    path = export_mcap(pole, tmp_path / "pole.mcap")
    found, _ = read(path)
    of = {topic: [content for each, content, _ in found if each == topic] for topic, _, _ in found}
    tables = pole.read()
    rows, sent, looks = tables["rows"], tables["commands"]["motor"], tables["readings"]["motor"]
    came = looks["kind"] == READING
    assert [each["action"] for each in of["/action"]] == rows["action"].tolist()
    assert [each["observation"] for each in of["/observation"]] == rows["observation"].tolist()
    for name in ("reward", "terminated", "truncated"):
        assert [each[name] for each in of["/reward"]] == rows[name].tolist()
    for topic in ("/action", "/observation", "/reward"):
        assert [each["row"] for each in of[topic]] == rows["row"].tolist()
    assert [list(each["values"].values()) for each in of["/command/motor"]] == sent["values"].tolist()
    assert [each["sequence"] for each in of["/command/motor"]] == sent["sequence"].tolist()
    assert list(of["/command/motor"][0]["values"]) == ["force", "position"]
    assert [list(each["values"].values()) for each in of["/reading/motor"]] == looks["values"][came].tolist()
    assert [each["device_time"] for each in of["/reading/motor"]] == looks["device_time"][came].tolist()
    assert [each["observation"] for each in of["/reset"]] == tables["resets"]["observation"].tolist()
    assert [each["seed"] for each in of["/reset"]] == tables["resets"]["seed"].tolist()
    assert [each["row"] for each in of["/snapshot"]] == [each.row for each in pole.snapshots]
    assert [each["text"] for each in of.get("/event", [])] == [each.text for each in pole.events]


def test_times_never_go_back_and_are_those_of_the_wall_clock(pole: Session, tmp_path: Path) -> None:
    found, _ = read(export_mcap(pole, tmp_path / "pole.mcap"))
    times = [message.log_time for *_, message in found]
    assert times == sorted(times)
    rows = pole.read(["rows"])["rows"]
    offset = round(pole.created * 1e9) - pole.record.monotonic
    acted = [message for topic, _, message in found if topic == "/action"]
    assert [each.log_time for each in acted] == (rows["started"] + offset).tolist()
    assert [each.publish_time for each in acted] == rows["wall"].tolist()
    # what a step sends lies between its action and its observation
    order = [(topic, content["row"]) for topic, content, _ in found if topic != "/snapshot"]
    for row in (0, 50, 149):
        first, last = order.index(("/action", row)), order.index(("/observation", row))
        assert ("/command/motor", row) in order[first:last]


def test_schemas_say_what_messages_hold(pole: Session, tmp_path: Path) -> None:
    _, schemas = read(export_mcap(pole, tmp_path / "pole.mcap"))
    assert schemas["/observation"] == {
        "type": "object",
        "properties": {"row": {"type": "integer"}, "observation": {"type": "array", "items": {"type": "number"}}},
    }
    assert schemas["/reward"]["properties"]["terminated"] == {"type": "boolean"}
    assert schemas["/reset"]["properties"]["seed"] == {"type": "integer"}


def test_parts_of_observations_keep_their_names(tmp_path: Path) -> None:
    session = record(tmp_path / "s", dict_space())
    found, schemas = read(export_mcap(session, tmp_path / "a.mcap"))
    recorded = session.read(["rows/observation"])["rows"]["observation"]
    seen = [content["observation"] for topic, content, _ in found if topic == "/observation"]
    for key, column in recorded.items():
        assert [each[key] for each in seen] == column.tolist()
    assert set(schemas["/observation"]["properties"]["observation"]["properties"]) == set(recorded)


def test_numbers_that_json_lacks_and_arrays_of_more_dimensions(tmp_path: Path) -> None:
    class Grid(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (2, 3), np.float32)
        action_space = gym.spaces.Discrete(5, start=1)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.arange(6, dtype=np.float32).reshape(2, 3), {}

        def step(self, action: Any) -> Any:
            return np.full((2, 3), 0.1, np.float32), math.inf, False, False, {}

    def loop(env: Any) -> None:
        env.reset()
        env.step(np.int64(2))
        env.step(np.int64(3))

    session = record(tmp_path / "s", Grid(), loop=loop)
    found, _ = read(export_mcap(session, tmp_path / "a.mcap"))
    contents = {topic: content for topic, content, _ in found}
    assert contents["/reset"]["observation"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert contents["/observation"]["observation"] == [float(np.float32(0.1))] * 6
    assert contents["/reward"]["reward"] is None
    assert contents["/action"]["action"] == 3
    from mcap.reader import make_reader

    with (tmp_path / "a.mcap").open("rb") as file:
        channels = make_reader(file).get_summary().channels.values()
        shapes = {each.topic: each.metadata for each in channels if each.metadata}
    assert json.loads(shapes["/observation"]["shape"]) == {"observation": [2, 3]}


def test_some_rows_alone(pole: Session, tmp_path: Path) -> None:
    found, _ = read(export_mcap(pole, tmp_path / "a.mcap", start=40, stop=60))
    assert {content["row"] for _, content, _ in found} == set(range(40, 60))


def test_nothing_is_replaced_and_nothing_is_left_of_a_failure(pole: Session, tmp_path: Path) -> None:
    path = tmp_path / "a.mcap"
    path.write_bytes(b"mine")
    with pytest.raises(ConflictError, match="nothing is replaced"):
        export_mcap(pole, path)
    assert path.read_bytes() == b"mine"

    class Damaged(Altered):
        def chunks(self, *arguments: Any, **options: Any) -> Any:
            for number, tables in enumerate(super().chunks(*arguments, **options)):
                if number == 2:
                    raise DamagedError("a part is damaged", path="parts")
                yield tables

    with pytest.raises(DamagedError):
        export_mcap(Damaged(pole), tmp_path / "b.mcap")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.mcap"]


def test_without_the_library_the_error_names_the_extra(
    pole: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcap.writer", None)
    with pytest.raises(ConfigurationError, match=r"simckpt\[hardware\]"):
        export_mcap(pole, tmp_path / "a.mcap")
    assert list(tmp_path.iterdir()) == []
