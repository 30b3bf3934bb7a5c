"""Sessions for the tests of replays: envs with a device, what drives them, and sessions that were changed later."""

import dataclasses
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import envs
import simckpt
from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import Motor
from simckpt import state
from simckpt.hardware import UDP, Link, Recorder, Simulated
from simckpt.hardware.session import Session
from simckpt.hardware.wire import COMMAND, READING, Codec
from simckpt.storage import StoreFiles
from simckpt.storage.session_writing import SessionWriter, create_session

assert envs  # registers them

STEPS = 150  # rows of a session
EPISODE = 45  # rows until the time is up
SNAPSHOTS = (37, 97, 130)


class OverLink(gym.Wrapper):
    """Sends every action through a link, and hands on what comes back."""

    def __init__(self, env: gym.Env, link: Link) -> None:
        super().__init__(env)
        self.link = link
        self.applied = np.zeros(env.action_space.shape, env.action_space.dtype)
        self.stiffness = 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.link.send(np.zeros(len(self.link.command)))
        self.link.receive(0.01)
        self.stiffness = 1 - (options or {}).get("step", 0) / 1000
        return super().reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> Any:
        self.link.send(action)
        reading = self.link.receive_newest(0.02)
        if self.link.time() <= 0:
            raise AssertionError("the clock does not go")
        if reading is not None:
            self.applied[:] = reading.values * self.stiffness
        return super().step(self.applied)

    def close(self) -> None:
        self.link.close()
        super().close()


def joints(number: int) -> tuple[str, ...]:
    return tuple(f"joint_{place}" for place in range(number))


def ant(address: str) -> gym.Env:
    """Contacts, running means and a time limit, with a device at a UDP address between policy and joints."""
    link = Link(UDP(address), command=joints(8), reading=joints(8), name="legs")
    env = gym.make("Ant-v5", max_episode_steps=EPISODE)
    return gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(OverLink(env, link)))


def cart_pole() -> gym.Env:
    """A cart-pole with a model of its motor in this process, some of whose readings get lost."""
    model = Simulated(Motor(4, loss=0.1), period=0.002)
    link = Link(model, command=Motor.command, reading=Motor.reading, name="motor")
    return gym.wrappers.TimeLimit(CartPoleInTheLoopEnv(link), EPISODE)


def dict_space() -> gym.Env:
    """Observations that are dicts, goals that are drawn by a generator for each key, no link at all."""
    return gym.make("simckpt/DictSpace-v0", max_episode_steps=EPISODE)


def drive(env: Recorder, steps: int = STEPS, *, seed: int = 11) -> None:
    """Runs a random policy; some resets have a seed, some options, one comes in the middle of an episode.

    Snapshots are taken before the rows of `SNAPSHOTS`, and once between the end of an episode and the reset after it.
    """
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    for step in range(steps):
        if step in SNAPSHOTS:
            env.snapshot()
        action = rng.uniform(-1, 1, env.action_space.shape).astype(env.action_space.dtype)
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated or step == 70:
            env.snapshot("end of an episode")
            env.reset(seed=step if step % 2 else None, options={"step": step} if step % 3 else None)


def record(
    path: Path, env: gym.Env, name: str = "played", loop: Callable[[Recorder], None] = drive, **settings: Any
) -> Session:
    """Records what a loop does."""
    recorder = Recorder(env, path, name, **{"snapshot_every": 1000.0, "part_seconds": 0.3, **settings})
    try:
        loop(recorder)
    finally:
        recorder.close()
    return simckpt.Store(path).session(name)


@contextmanager
def device(commands: int, *, loss: float = 0.1) -> Iterator[str]:
    """A device of the test's own at a UDP port; yields its address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{own.getsockname()[1]}"
        thread = threading.Thread(target=_serve, args=(own, commands, loss))
        thread.start()
        try:
            yield address
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stop:
                stop.sendto(b"stop", own.getsockname())
            thread.join()


def _serve(own: socket.socket, commands: int, loss: float) -> None:
    incoming, outgoing = Codec(COMMAND, commands), Codec(READING, commands)
    rng, sequence = np.random.default_rng(5), 0
    while True:
        data, peer = own.recvfrom(65536)
        message = incoming.decode(data)
        if message is None:
            return
        values = 0.9 * message.values + rng.normal(0, 0.01, commands)
        # two readings for some commands, in the wrong order; none for others
        sequence += 2
        for number in {0: (1, 0), 1: (0, 1)}.get(sequence % 5, (1,)):
            if rng.random() >= loss:
                own.sendto(outgoing.encode(3, sequence + number, 1000 * sequence, 0, values + number), peer)


class Altered(Session):
    """A session that says something else than what was recorded.

    Args:
        session: what was recorded.
        tables: changes the tables of all rows, in place.
        snapshot: changes what a snapshot holds, given its number, in place.
    """

    def __init__(
        self,
        session: Session,
        *,
        tables: Callable[[dict[str, Any]], None] = lambda tables: None,
        snapshot: Callable[[int, dict[str, Any]], None] = lambda number, saved: None,
    ) -> None:
        super().__init__(session.files)
        self._tables, self._snapshot = session.read(), snapshot
        tables(self._tables)

    def chunks(self, columns: Any = None, *, start: int | None = None, stop: int | None = None) -> Iterator[Any]:
        first, last = self.rows.start if start is None else start, self.rows.stop + 1 if stop is None else stop
        for low in range(first, last, 64):
            yield _chosen(self._tables, list(range(low, min(low + 64, last))))

    def snapshot(self, which: Any) -> dict[str, Any]:
        saved = super().snapshot(which)
        self._snapshot(which.number, saved)
        return saved


def without(session: Session, path: Path, *lost: tuple[int, int]) -> Session:
    """Returns a session in another store that has lost what came at some places among all that was recorded.

    Args:
        session: a whole one.
        path: of the new store.
        lost: (first, one behind the last) of these places, in order; a row came when its last command or reading did.
    """
    simckpt.Store(path).start("none").close()
    record = dataclasses.replace(session.record, origin=None)
    create_session(StoreFiles.open(path), record)
    for folder in ("models", "snapshots"):
        shutil.copytree(session.path / folder, path / "sessions" / session.name / folder, dirs_exist_ok=True)
    tables = {name: table for name, table in session.read().items() if name != "events"}
    paths = [(name,) if "order" in table else (name, link) for name, table in tables.items() for link in _links(table)]
    came = {each: _table(tables, each)["order"].copy() for each in paths}
    rows = tables["rows"]
    for place, (row, order) in enumerate(zip(rows["row"].tolist(), rows["order"].tolist(), strict=True)):
        inside = [
            int(another)
            for each in paths
            if len(each) == 2
            for another in came[each][_table(tables, each)["row"] == row].tolist()
            if another > order and not any(order < reset <= another for reset in tables["resets"]["order"].tolist())
        ]
        came["rows",][place] = max(inside, default=order)
    stop = 0
    with SessionWriter(path, session.name) as writer:
        edges = [0, *(edge for pair in lost for edge in pair), 1 << 60]
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            part: dict[str, Any] = {}
            spans = {}
            for each in paths:
                chosen = (came[each] >= low) & (came[each] < high)
                first = int((came[each] < low).sum())
                spans["/".join(each)] = (first, first + int(chosen.sum()))
                group = part.setdefault(each[0], {}) if len(each) == 2 else part
                group[each[-1]] = _mapped(lambda array, chosen=chosen: array[chosen], _table(tables, each))
            numbers = part["rows"]["row"]
            start = int(numbers[0]) if len(numbers) else stop
            stop = start + len(numbers)
            writer.write_part(state.encode(part), rows=(start, stop), spans=spans, started=low, stopped=low)
        writer.close(rows=(0, max(stop, session.rows.stop)))
    return simckpt.Store(path).session(session.name)


def _links(table: Mapping[str, Any]) -> list[str]:
    return [""] if "order" in table else list(table)


def _table(tables: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    return tables[path[0]] if len(path) == 1 else tables[path[0]][path[1]]


def _chosen(tables: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    found = {}
    for name, table in tables.items():
        if "row" in table:
            chosen = np.isin(table["row"], rows)
            found[name] = _mapped(lambda array, chosen=chosen: array[chosen], table)
        else:
            found[name] = _chosen(table, rows)
    return found


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(change, each) for key, each in tree.items()}
    return tuple(_mapped(change, each) for each in tree) if isinstance(tree, tuple) else change(tree)
