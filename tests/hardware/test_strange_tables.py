"""Tables that no recorder has written are read, exported, drawn and played, or refused, by simckpt's own errors."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from recorder_helpers import counting
from replay_helpers import record

import simckpt
from simckpt import plots, state
from simckpt.errors import SimckptError
from simckpt.hardware import Recorder, Replay, export_mcap, export_minari, series
from simckpt.hardware.session import Session
from simckpt.hardware.time_series import names_of
from simckpt.storage import StoreFiles
from simckpt.storage.session_writing import SessionWriter, create_session

ROWS = 12


def loop(env: Recorder) -> None:
    env.reset(seed=1, options={"height": 0.5})
    for step in range(ROWS):
        env.step(np.full(2, 0.1 * step, np.float32))
        if step == 5:
            env.note("half")
            env.reset()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("real") / "s"
    return record(path, counting(), loop=loop, signals={"steps": lambda env, info: info["steps"]})


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, dict):
        for key, each in tree.items():
            yield from leaves(each, (*path, key))
    else:
        yield path


def table_of(tables: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        tables = tables[key]
    return tables


def copied(tree: Any) -> Any:
    return {key: copied(each) for key, each in tree.items()} if isinstance(tree, dict) else tree.copy()


def forged(real: Session, path: Path, tables: Any, **changes: Any) -> Session:
    """Writes a session like the real one, with other tables, which are in order as far as its records say."""
    store = StoreFiles.create(path)
    create_session(store, replace(real.record, **changes))
    parts = real.parts
    whole = {name: (span[0], parts[-1].tables[name][1]) for name, span in parts[0].tables.items()}
    with SessionWriter(store.path, real.name) as writer:
        spans = {name: span for name, span in whole.items() if has(tables, name.split("/"))}
        spans |= {
            f"{group}/{link}": (0, ROWS)
            for group in ("commands", "readings")
            for link in tables.get(group, {})
            if f"{group}/{link}" not in spans
        }
        first = real.snapshots[0]
        saved = real.snapshot(first)
        models = saved["env"].pop("models", {})
        for digest, fields in models.items():
            writer.write_model(digest, state.encode(fields))
        writer.write_snapshot(
            state.encode(saved),
            row=first.row,
            order=first.order,
            monotonic=first.monotonic,
            wall=first.wall,
            reason="start",
            models=list(models),
        )
        times = {"started": parts[0].started, "stopped": parts[-1].stopped}
        writer.write_part(state.encode(tables), rows=(0, ROWS), spans=spans, **times)
        writer.close()
    return simckpt.Store(path).session(real.name)


def has(tables: Any, path: list[str]) -> bool:
    return not path or (isinstance(tables, dict) and path[0] in tables and has(tables[path[0]], path[1:]))


def draw(session: Session, path: Path) -> None:
    for figure in (plots.commands_and_readings, plots.delays, plots.step_times):
        figure(session)


def all_series(session: Session, path: Path) -> None:
    for name in names_of(session):
        series(session, name)


def look(session: Session, path: Path) -> None:
    session.statistics()
    _ = session.events, session.times, session.row_at(session.duration), repr(session), session._repr_html_()
    session.read(["rows/reward", "readings/motor"], start=2, stop=5)
    session.read()


def options(session: Session, path: Path) -> None:
    for text in session.read(["resets/options"])["resets"]["options"].tolist():
        session.options(text)


def what_if(session: Session, path: Path) -> None:
    Replay(session, counting()).what_if(lambda observation: np.zeros(2, np.float32), start=3, steps=3)


USES: dict[str, Callable[[Session, Path], Any]] = {
    "look": look,
    "options": options,
    "series": all_series,
    "figures": draw,
    "mcap": lambda session, path: export_mcap(session, path / "a.mcap"),
    "minari": lambda session, path: export_minari(session, path / "minari"),
    "replay": lambda session, path: Replay(session, counting()).run(),
    "what if": what_if,
}


def use(session: Session, path: Path) -> set[str]:
    """Uses a session in every way, and returns the ways that were refused."""
    refused = set()
    for name, each in USES.items():
        made = path / "made"
        made.mkdir()
        try:
            each(session, made)
        except SimckptError:
            refused.add(name)
            # nothing half is left of an export
            assert list(made.iterdir()) == []
        shutil.rmtree(made)
    return refused


def test_the_real_one_is_refused_nowhere(real: Session, tmp_path: Path) -> None:
    assert use(forged(real, tmp_path / "s", copied(real.read())), tmp_path) == set()


COLUMNS = 41


def test_columns_are_as_many_as_this_file_knows(real: Session) -> None:
    assert len(list(leaves(real.read()))) == COLUMNS


# each costs a third of a second
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] * (number % 4 != 0)) for number in range(COLUMNS)]
)
def test_without_any_one_column(real: Session, tmp_path: Path, number: int) -> None:
    tables = copied(real.read())
    path = list(leaves(tables))[number]
    del table_of(tables, path)[path[-1]]
    use(forged(real, tmp_path / "s", tables), tmp_path)


# what reads the tables of links
OF_LINKS = {"look", "series", "figures", "mcap", "replay", "what if"}


OF_ROWS = {"look", "series", "mcap", "minari", "replay", "what if"}


def renamed(tables: dict[str, Any], group: str) -> None:
    tables[group]["arm"] = tables[group].pop("motor")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], set[str]]] = {
    "no actions": (lambda t: t["rows"].pop("action"), {"mcap", "minari", "replay", "what if"}),
    "commands of no link": (lambda t: renamed(t, "commands"), {"look", "mcap", "replay", "what if"}),
    "readings of no link": (lambda t: renamed(t, "readings"), {"look", "mcap", "replay", "what if"}),
    "a reading too wide": (lambda t: t["readings"]["motor"].update(values=np.zeros((ROWS + 2, 3))), OF_LINKS),
    "a reading that is flat": (lambda t: t["readings"]["motor"].update(values=np.zeros(ROWS + 2)), OF_LINKS),
    "commands too narrow": (lambda t: t["commands"]["motor"].update(values=np.zeros((ROWS, 0))), OF_LINKS),
    "commands of texts": (lambda t: t["commands"]["motor"].update(values=np.array([["a"]] * ROWS)), OF_LINKS),
    "readings of whole numbers": (
        lambda t: t["readings"]["motor"].update(values=np.zeros((ROWS + 2, 2), np.int64)),
        OF_LINKS,
    ),
    "options that are no JSON": (lambda t: t["resets"].update(options=np.array(["{", "nul"])), {"options", "replay"}),
    "options that are odd": (
        lambda t: t["resets"].update(options=np.array(["!{}", '!{"options": {"leaves": 3}}'])),
        {"options", "replay"},
    ),
    "kinds that are texts": (
        lambda t: t["readings"]["motor"].update(kind=np.array(["reading"] * (ROWS + 2))),
        OF_LINKS,
    ),
    "kinds that there are none of": (
        lambda t: t["readings"]["motor"].update(kind=np.full(ROWS + 2, 7, np.uint8)),
        set(),
    ),
    "signals that are an array": (lambda t: t["rows"].update(signals=np.zeros(ROWS)), {"look", "mcap", "replay"}),
    "an observation of another form": (
        lambda t: t["rows"].update(observation={"a/b": (np.zeros((ROWS, 2)), np.zeros(ROWS))}),
        {"minari"},
    ),
    "an observation of texts": (lambda t: t["rows"].update(observation=np.array(["up"] * ROWS)), OF_ROWS),
    "actions of texts": (lambda t: t["rows"].update(action=np.array(["up"] * ROWS)), OF_ROWS),
    "no rows at all": (lambda t: t.pop("rows"), set()),
    "times that go back": (lambda t: t["rows"].update(started=t["rows"]["started"][::-1].copy()), set()),
    "times before all time": (
        lambda t: t["rows"].update(wall=np.full(ROWS, -(2**63)), started=np.full(ROWS, -(2**63))),
        set(),
    ),
    "rows far away": (lambda t: t["rows"].update(row=np.arange(ROWS) + 2**62), set()),
    "orders that are all one": (lambda t: t["rows"].update(order=np.zeros(ROWS, np.int64)), set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_with_what_recorders_do_not_write(real: Session, tmp_path: Path, change: str) -> None:
    tables = copied(real.read())
    apply, expected = CHANGES[change]
    apply(tables)
    try:
        session = forged(real, tmp_path / "s", tables)
    except SimckptError:
        assert change == "no rows at all"
        return
    assert use(session, tmp_path) >= expected


@pytest.mark.parametrize(
    "space",
    [
        3,
        "Box",
        [],
        {"type": "Box"},
        {"type": "Box", "low": "a", "high": 1.0},
        {"type": "Box", "low": [[0.0] * 5], "high": 1.0},
        {"type": "Box", "low": None, "high": {}},
        {"type": "Dict", "subspaces": 3},
        {"type": ["Box"]},
    ],
)
def test_spaces_that_are_none_are_refused_or_passed_over(real: Session, tmp_path: Path, space: Any) -> None:
    session = forged(real, tmp_path / "s", copied(real.read()), spaces={"observation": space, "action": space})
    assert use(session, tmp_path) <= {"minari"}


def test_complex_numbers_are_exported_as_pairs(real: Session, tmp_path: Path) -> None:
    tables = copied(real.read())
    seen = np.arange(3 * ROWS).reshape(ROWS, 3) + 1j * np.arange(ROWS)[:, None]
    seen[4, 1] = complex(np.nan, 2.0)
    tables["rows"]["observation"] = seen
    path = export_mcap(forged(real, tmp_path / "s", tables), tmp_path / "a.mcap")
    with path.open("rb") as file:
        found = [
            json.loads(message.data)["observation"]
            for _, _, message in make_reader(file).iter_messages(topics=["/observation"])
        ]
    assert found[3] == [[9.0, 3.0], [10.0, 3.0], [11.0, 3.0]]
    assert found[4] == [[12.0, 4.0], [None, 2.0], [14.0, 4.0]]
