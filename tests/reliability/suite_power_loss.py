"""A power failure at every moment of all that a store does: what returned is there, and nothing on offer is damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from reliability import Line, Progress, folder
from store_operations import CASES, Case, World, case
from store_states import RUN, BrokenError, Look, States, look, small_leaves_count
from suite_faults import _renamed_first

from simckpt.errors import StoreError
from simckpt.storage import StoreFiles
from simckpt.testing.faults import FaultyDisk
from simckpt.testing.power_loss import CrashState, Recording, RecordingDisk, Syncing


@dataclass(frozen=True)
class Recorded:
    """What some operations did to the disk, and what may be found at which promise.

    Attributes:
        recording: the changes.
        looks: before the first operation, and after each.
        between: the looks that are allowed besides, at any moment before the last promise.
        world: what the process keeps in mind, for a save afterwards.
    """

    recording: Recording
    looks: tuple[Look, ...]
    between: tuple[Look, ...] = ()
    world: World | None = None

    def allowed(self, promised: int) -> list[Look]:
        return [*self.looks[promised : promised + 2], *(self.between if promised + 1 < len(self.looks) else ())]


def recorded(each: Case, base: Path, states: States) -> Recorded:
    """Records one case."""
    base.mkdir(parents=True)
    template = each.made(base / "template", states)
    before = template.look()
    world = template.copied(base / "recorded")
    disk = RecordingDisk(world.base)
    world.opened(disk)
    with world.claimed(each.claims):
        each.operate(world)
        disk.note(each.name)
    after = world.look()
    return Recorded(disk.recording, (before, after), tuple(each.between(before, after)), template)


def session(base: Path, states: States) -> Recorded:
    """Records what a training process does: it saves, marks, prunes, and another one branches meanwhile."""
    base.mkdir(parents=True)
    template = case("save").made(base / "template", states)
    world = template.copied(base / "recorded")
    disk = RecordingDisk(world.base)
    world.opened(disk)
    looks = [world.look()]
    steps: list[Callable[[], object]] = [
        lambda: world.save(4),
        lambda: world.store.tag(RUN, 4, "good"),
        lambda: world.store.prune(RUN, 1, "test"),
        lambda: world.save(5),
        lambda: world.store.prune(RUN, 3, "test"),
        lambda: case("branch").operate(world),
        lambda: world.store.unpin(RUN, 2),
        lambda: world.store.prune(RUN, 4, "test"),
        lambda: world.save(6),
        lambda: world.store.prune(RUN, 5, "test"),
    ]
    with world.claimed((RUN,)):
        for number, step in enumerate(steps):
            step()
            disk.note(number)
            looks.append(world.look())
    return Recorded(disk.recording, tuple(looks), (), template)


@dataclass
class Count:
    """States that were looked at.

    Attributes:
        states: as enumerated.
        distinct: of these; equal ones are looked at once.
        lost: states in which something that was promised is not there.
        damaged: states in which something damaged is on offer.
    """

    states: int = 0
    distinct: int = 0
    lost: int = 0
    damaged: int = 0
    examples: list[str] = field(default_factory=list)


def cut_power(
    found: Recorded,
    base: Path,
    *,
    relaxed: bool,
    samples: int,
    every: int = 64,
    seed: int = 0,
    count: Count | None = None,
) -> Count:
    """Counts what is wrong in all states that a power failure may leave."""
    count, seen, rng = count or Count(), set(), random.Random(seed)
    for state in found.recording.states(relaxed=relaxed, samples=samples, seed=seed, every=every):
        count.states += 1
        key = state.key()
        if key in seen:
            continue
        seen.add(key)
        count.distinct += 1
        wrong = _wrong(found, state, base / "state", goes_on=rng.random() < 0.05)
        if wrong is not None:
            count.lost += wrong[0]
            count.damaged += not wrong[0]
            if len(count.examples) < 5:
                count.examples.append(f"{'relaxed' if relaxed else 'ordered'}, moment {state.moment}: {wrong[1]}")
    return count


def _wrong(found: Recorded, state: CrashState, path: Path, *, goes_on: bool) -> tuple[bool, str] | None:
    """Returns (whether something is lost, rather than damaged, and what), or None if all is as promised."""
    shutil.rmtree(path, ignore_errors=True)
    state.write(path)
    states = found.world.states
    try:
        seen = look(path, states)
    except (BrokenError, StoreError) as error:
        return False, f"{type(error).__name__}: {error}"
    if seen not in found.allowed(len(state.notes)):
        return True, f"{len(state.notes)} promised, and found {seen}"
    if goes_on and seen and RUN in seen:
        try:
            _go_on(found.world, path)
            after = look(path, states)
        except (BrokenError, StoreError) as error:
            return False, f"the next save: {type(error).__name__}: {error}"
        if after[RUN][1][:-1] != seen[RUN][1]:
            return True, f"the next save changed {seen} to {after}"
    return None


def _go_on(template: World, path: Path) -> None:
    world = template.copied(path.with_name("unused"))
    shutil.rmtree(world.base)
    world.base = path
    world.opened(FaultyDisk())
    with world.claimed((RUN,)):
        world.savers[RUN].head = None
        world.save(12)


def role(event: object) -> str | None:
    """Returns what a sync is of, in words, or None for anything else."""
    if not isinstance(event, Syncing):
        return None
    parts = event.path.split("/")
    if parts[-1].count(".") and parts[-1].endswith(".tmp"):
        return "an exported file"
    if "tmp" in parts:
        below = parts[parts.index("tmp") + 2 :]
        if not below:
            return "tmp/" if parts[-1] == "tmp" else "tmp/<who>/"
        if len(below[-1]) == 35:
            return "a segment"
        if len(below[-1]) == 37:
            return "a start"
        return below[-1] if "." in below[-1] or below[-1] in HARMLESS else f"tmp/<who>/{below[-1]}"
    if parts[-1].isdigit():
        return "checkpoints/<seq>/"
    if len(parts) > 1 and parts[-2] == "marks":
        return "marks/<id>/"
    return f"{parts[-1]}/"


# (case, sync): each of these, left out, must be noticed
NECESSARY = [
    *(("save", sync) for sync in ("a segment", "segments/", "state.h5", "leaves.json", "commit.json", "tmp/<who>/")),
    ("save", "checkpoints/"),
    *(("save of ranks", f"shard-{rank:05d}-of-00002.h5") for rank in range(2)),
    *(("save of ranks", f"leaves-{rank:05d}.json") for rank in range(2)),
    *(("save of ranks", sync) for sync in ("a segment", "segments/", "shards.json", "commit.json", "tmp/<who>/")),
    ("save of ranks", "checkpoints/"),
    ("prune, freeing segments", "commit.json"),
    ("prune, freeing segments", "checkpoints/<seq>/"),
    *(("branch", sync) for sync in ("run.json", "tmp/<who>/", "runs/")),
    *(("import", sync) for sync in ("run.json", "segments/", "state.h5", "checkpoints/")),
    *(("tag", sync) for sync in ("marks/", "marks/<id>/")),
    ("unpin", "marks/<id>/"),
    *(("later metrics", sync) for sync in ("tmp/<who>/metrics-1", "marks/<id>/")),
    *(("start", sync) for sync in ("a start", "starts/")),
    *(("new store", sync) for sync in ("./", "store/", "store.json", "run.json", "runs/")),
    *(("export", sync) for sync in ("an exported file", "./")),
]
# what all the others are for: without them files lie around for longer, or a tag is an empty file, which is a tag
HARMLESS = {"job.json", "tmp/", "owner.json", "lock", "heartbeat", "reserve", "reserve/", "trash/", "tag-good", "run/"}


def syncs(found: Recorded) -> list[str]:
    """Returns what was synced, in words, each once."""
    return list(dict.fromkeys(filter(None, map(role, found.recording.events))))


def without(found: Recorded, sync: str) -> Recorded:
    """Returns what would have happened without the syncs of one kind."""
    events = tuple(event for event in found.recording.events if role(event) != sync)
    return replace(found, recording=replace(found.recording, events=events))


def noticed(pairs: list[tuple[str, str]], progress: Progress = lambda text: None) -> dict[str, bool]:
    """Returns {sync that was left out: whether a state shows it}."""
    result: dict[str, bool] = {}
    with folder() as base, small_leaves_count():
        for name in dict.fromkeys(name for name, _ in pairs):
            found = recorded(case(name), base / "case", States())
            for sync in [sync for other, sync in pairs if other == name]:
                progress(f"power loss, {name} without the sync of {sync}")
                assert sync in syncs(found), f"{name} has no sync of {sync}, but of {syncs(found)}"
                result[f"{name} without the sync of {sync}"] = shows(without(found, sync), base)
            shutil.rmtree(base / "case")
    return result


def shows(mutant: Recorded, base: Path, samples: int = 3) -> bool:
    """Returns whether a state shows that something is wrong; ends with the first."""
    # what is missing is mostly seen when something was promised
    for promised in (True, False):
        for relaxed in (False, True):
            seen = set()
            for state in mutant.recording.states(relaxed=relaxed, samples=samples, every=16):
                key = state.key()
                if key not in seen and bool(state.notes) == promised:
                    seen.add(key)
                    if _wrong(mutant, state, base / "state", goes_on=False):
                        return True
    return False


def renaming_first_is_noticed() -> bool:
    """A commit whose folder gets its name before its record is in it."""
    with (
        folder() as base,
        small_leaves_count(),
        mock.patch.object(StoreFiles, "_publish", _renamed_first),
    ):
        return shows(recorded(case("save"), base / "case", States()), base)


def run(scale: float, progress: Progress) -> list[Line]:
    counts = {False: Count(), True: Count()}
    samples, every = max(1, round(24 * scale)), 64 if scale >= 1 else 8
    with folder() as base, small_leaves_count():
        for seed in range(max(1, round(scale))):
            found = {each.name: recorded(each, base / f"{seed}" / each.name, States(seed)) for each in CASES}
            found["a session"] = session(base / f"{seed}" / "session", States(seed))
            for name, each in found.items():
                for relaxed, count in counts.items():
                    progress(f"power loss, states {seed}, {name}")
                    few = max(1, samples // 8) if name == "a session" else samples
                    cut_power(each, base, relaxed=relaxed, samples=few, every=every, seed=seed, count=count)
            shutil.rmtree(base / f"{seed}")
    mutants = {**noticed(NECESSARY, progress), "folder renamed before its record is in it": renaming_first_is_noticed()}
    return [
        Line(
            f"power-loss states, {'relaxed' if relaxed else 'ordered'}",
            count.states,
            count.lost + count.damaged,
            f"{count.distinct:,} distinct; {count.lost} lost, {count.damaged} damaged on offer",
            {} if relaxed else mutants,
            tuple(count.examples),
        )
        for relaxed, count in counts.items()
    ]
