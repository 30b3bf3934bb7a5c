"""A session as a data set of episodes: Minari itself opens it, and finds what was recorded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from replay_helpers import Altered, cart_pole, dict_space, record, without

from simckpt.errors import ConfigurationError, ConflictError, DamagedError
from simckpt.hardware import export_minari
from simckpt.hardware.session import Session

minari = pytest.importorskip("minari")


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return record(tmp_path_factory.mktemp("pole") / "s", cart_pole())


def spans(session: Session) -> list[tuple[int, int]]:
    """(first, one behind the last row) of each episode: from a reset to the next one, or to the end."""
    tables = session.read(["rows/row", "resets/row"])
    begun = sorted(set(tables["resets"]["row"].tolist()))
    ends = [*begun[1:], int(tables["rows"]["row"][-1]) + 1]
    return [(start, stop) for start, stop in zip(begun, ends, strict=True) if start < stop]


def test_minari_reads_every_episode_as_it_was_recorded(pole: Session, tmp_path: Path) -> None:
    folder = export_minari(pole, tmp_path / "pole-v0")
    found = minari.MinariDataset(folder / "data")
    tables, expected = pole.read(), spans(pole)
    assert found.spec.dataset_id == "played-v0"
    assert (found.total_episodes, found.total_steps) == (len(expected), len(tables["rows"]["row"]))
    env = cart_pole()
    assert found.observation_space == env.observation_space
    assert found.action_space == env.action_space
    resets = tables["resets"]
    for (start, stop), episode in zip(expected, found, strict=True):
        rows = {name: column[start:stop] for name, column in tables["rows"].items()}
        first = resets["observation"][np.flatnonzero(resets["row"] == start)[-1]]
        assert np.array_equal(episode.observations, np.concatenate([first[None], rows["observation"]]))
        assert episode.observations.dtype == rows["observation"].dtype
        assert np.array_equal(episode.actions, rows["action"])
        assert np.array_equal(episode.rewards, rows["reward"])
        assert np.array_equal(episode.terminations, rows["terminated"])
        # an episode that was cut off counts as truncated
        assert np.array_equal(episode.truncations[:-1], rows["truncated"][:-1])
        assert episode.terminations[-1] or episode.truncations[-1]
        assert str(episode)
    env.close()


def test_seeds_options_and_totals_are_in_its_metadata(pole: Session, tmp_path: Path) -> None:
    found = minari.MinariDataset(export_minari(pole, tmp_path / "d", dataset="bench/pole-v3") / "data")
    assert found.spec.dataset_id == "bench/pole-v3"
    metadata = list(found.storage.get_episode_metadata(range(found.total_episodes)))
    resets, begun = pole.read(["resets"])["resets"], [start for start, _ in spans(pole)]
    assert [each["total_steps"] for each in metadata] == [stop - start for start, stop in spans(pole)]
    for start, each in zip(begun, metadata, strict=True):
        place = np.flatnonzero(resets["row"] == start)[-1]
        assert each.get("seed") == (int(resets["seed"][place]) if resets["seeded"][place] else None)
        options = resets["options"][place]
        assert json.loads(each["options"]) == json.loads(options) if options else "options" not in each
    # Minari counts steps of a selection by the attributes
    assert found.filter_episodes(lambda episode: episode.id == 1).total_steps == metadata[1]["total_steps"]


def test_dict_observations_are_groups(tmp_path: Path) -> None:
    session = record(tmp_path / "s", dict_space())
    found = minari.MinariDataset(export_minari(session, tmp_path / "d") / "data")
    env = dict_space()
    assert found.observation_space == env.observation_space
    recorded = session.read(["rows/observation"])["rows"]["observation"]
    start, stop = spans(session)[1]
    for key, column in recorded.items():
        assert np.array_equal(found[1].observations[key][1:], column[start:stop])
    env.close()


class Tuples(gym.Env):
    """Tuples of a discrete number and an image."""

    observation_space = gym.spaces.Tuple(
        (gym.spaces.Discrete(7), gym.spaces.Box(0, 255, (40, 32, 3), np.uint8), gym.spaces.MultiBinary(3))
    )
    action_space = gym.spaces.MultiDiscrete([3, 4])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        return self._seen(), float(action[0]), False, False, {}

    def _seen(self) -> Any:
        image = self.np_random.integers(0, 256, (40, 32, 3), np.uint8)
        return np.int64(self.np_random.integers(7)), image, self.np_random.integers(0, 2, 3, np.int8)


def test_tuples_images_and_discrete_spaces_come_back_bit_for_bit(tmp_path: Path) -> None:
    def loop(env: Any) -> None:
        env.reset(seed=1)
        for number in range(5):
            env.step(np.array([number % 3, number % 4]))

    session = record(tmp_path / "s", Tuples(), loop=loop)
    found = minari.MinariDataset(export_minari(session, tmp_path / "d") / "data")
    assert found.observation_space == Tuples.observation_space
    assert found.action_space == Tuples.action_space
    recorded = session.read(["rows"])["rows"]
    for now, then in zip(found[0].observations, recorded["observation"], strict=True):
        assert np.array_equal(now[1:], then)
    assert np.array_equal(found[0].actions, recorded["action"])


def test_rows_after_a_gap_wait_for_the_next_reset(pole: Session, tmp_path: Path) -> None:
    start, _ = spans(pole)[1]
    order = pole.read(["rows/order"])["rows"]["order"].tolist()
    lossy = without(pole, tmp_path / "s", (order[start + 5], order[start + 9]))
    found = minari.MinariDataset(export_minari(lossy, tmp_path / "d") / "data")
    lengths = [len(each) for each in found]
    expected = [stop - start for start, stop in spans(pole)]
    expected[1] = 5
    assert lengths == expected


def test_rows_after_a_reset_that_was_lost_are_of_no_episode(pole: Session, tmp_path: Path) -> None:
    """They have a number as if they followed on the rows before."""
    resets, order = pole.read(["resets"])["resets"], pole.read(["rows/order"])["rows"]["order"].tolist()
    rows = pole.read(["rows"])["rows"]
    place = next(
        place
        for place, row in enumerate(resets["row"].tolist())
        if row and not rows["terminated"][row - 1] and not rows["truncated"][row - 1]
    )
    row = int(resets["row"][place])
    lossy = without(pole, tmp_path / "s", (int(resets["order"][place]), order[row]))
    assert lossy.missing == []
    found = minari.MinariDataset(export_minari(lossy, tmp_path / "d") / "data")
    assert [len(each) for each in found] == [stop - start for start, stop in spans(pole) if start != row]


def test_nothing_is_left_of_an_export_that_fails_or_was_killed(pole: Session, tmp_path: Path) -> None:
    last = spans(pole)[-1][0]

    class Damaged(Altered):
        def read(self, columns: Any = None, *, start: int | None = None, stop: int | None = None) -> Any:
            if start == last:
                raise DamagedError("a part is damaged", path="parts")
            return super().read(columns, start=start, stop=stop)

    with pytest.raises(DamagedError, match="a part is damaged"):
        export_minari(Damaged(pole), tmp_path / "d")
    assert list(tmp_path.iterdir()) == []
    # what a process that is gone has left half made
    maker = subprocess.run(
        [sys.executable, "-c", "from simckpt.storage import processes; print(processes.this_process().token('0' * 8))"],
        capture_output=True,
        text=True,
        check=True,
    )
    left = tmp_path / f".{maker.stdout.strip()}.tmp"
    (left / "data").mkdir(parents=True)
    (left / "data/main_data.hdf5").write_bytes(b"half")
    export_minari(pole, tmp_path / "d")
    assert [each.name for each in tmp_path.iterdir()] == ["d"]


def test_what_minari_cannot_have_is_refused(pole: Session, tmp_path: Path) -> None:
    for wrong in ("pole", "pole-v", "a b-v0", "../x-v0", "-v0", "a//b-v0"):
        with pytest.raises(ConfigurationError, match="the id of a data set"):
            export_minari(pole, tmp_path / "d", dataset=wrong)
    (tmp_path / "d").mkdir()
    with pytest.raises(ConflictError):
        export_minari(pole, tmp_path / "d")
    empty = record(tmp_path / "s", cart_pole(), loop=lambda env: None)
    with pytest.raises(ConfigurationError, match="no episode to export"):
        export_minari(empty, tmp_path / "e")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["d", "s"]
