"""A start goes on from the newest checkpoint that comes back whole, says so, and equals a run that began there."""

import shutil
import warnings
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pytest
import xxhash
from maintenance_helpers import PLAIN, flip, place_of

import simckpt
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, DamagedError, UnsupportedFormatError
from simckpt.maintenance.check import check
from simckpt.provenance import versions
from simckpt.storage import CommitDraft, StoreFiles

RUN = "run"


BOX = gymnasium.spaces.Box(-1, 1, (3,))


class Training:
    """A loop whose future depends on all it keeps: values, a random stream, a ring of rows; a large constant leaf."""

    def __init__(self, root: Path, name: str = RUN) -> None:
        self.run = simckpt.Store(root).start(name)
        self.loop = simckpt.LoopState(step=0, values=np.zeros(4), rng=np.random.default_rng(7), big=np.ones(150_000))
        self.buffer = simckpt.ReplayBuffer(4, BOX, BOX, num_envs=2, seed=0)
        components = {"loop": self.loop, "replay": self.buffer}
        self.checkpointer = self.run.checkpointer(components, save_when=simckpt.EverySteps(1), background=None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.run.close()

    def train(self, steps: int) -> None:
        with self.checkpointer:
            while self.loop.step < steps:
                self.loop.step += 1
                self.loop.values += self.loop.rng.standard_normal(4)
                row = np.outer([1, 2], self.loop.values[:3]).astype(np.float32)
                self.buffer.add(row, row, row[:, 0], row[:, 1] > 0, row[:, 2] > 0, row)
                self.loop.values += float(np.asarray(self.buffer.rewards).sum())
                self.checkpointer.step(self.loop.step, {"loss": float(self.loop.values.sum())})


def train(root: Path, steps: int, **how: str) -> simckpt.Checkpoint | None:
    with Training(root) as training:
        restored = training.checkpointer.restore_latest(**how)
        training.train(steps)
    return restored


def folder(root: Path, seq: int) -> Path:
    return root / "runs" / RUN / "checkpoints" / f"{seq:08d}"


def damage_arrays(root: Path, seq: int) -> None:
    path = folder(root, seq) / "state.h5"
    flip(path, place_of(path, "loop/values")[0] * 8)


def damage_record(root: Path, seq: int) -> None:
    (folder(root, seq) / "commit.json").write_bytes(b"")


def damage_index(root: Path, seq: int) -> None:
    (folder(root, seq) / "leaves.json").unlink()


def state_of(root: Path, seq: int) -> dict[str, bytes]:
    found = {}
    store = StoreFiles.open(root)
    for name, encoded in store.read(RUN, seq).items():
        found |= {f"{name}/{key}": leaf.data.tobytes() for key, leaf in encoded.leaves.items()}
        found[name] = encoded.structure
    return found


@pytest.fixture
def root(tmp_path):
    train(tmp_path / "store", 2)
    shutil.copytree(tmp_path / "store", tmp_path / "shorter")
    train(tmp_path / "store", 3)
    return tmp_path / "store"


@pytest.mark.parametrize("damage", [damage_arrays, damage_record, damage_index])
def test_going_on_from_an_older_checkpoint_equals_a_run_that_was_killed_there(root, damage):
    # of the large leaf, seen unchanged, both have a copy in a segment by now
    damage(root, 3)
    lost = StoreFiles.open(root.with_name("shorter")).index(RUN, 2).commit.id
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restored = train(root, 5)
    train(root.with_name("shorter"), 5)
    assert (restored.id, restored.step) == (lost, 2)
    (message,) = [str(each.message) for each in told if each.category is simckpt.DamageWarning]
    assert lost in message
    assert "00000003" in message
    run, twin = (simckpt.Store(each).run(RUN) for each in (root, root.with_name("shorter")))
    line = run.checkpoints(damaged={})
    assert [(checkpoint.seq, checkpoint.step) for checkpoint in line] == [(1, 1), (2, 2), (4, 3), (5, 4), (6, 5)]
    assert run.latest() == line[-1]
    assert line[2].parent == lost
    for ours, theirs in zip(line[2:], twin.checkpoints()[2:], strict=True):
        assert state_of(root, ours.seq) == state_of(root.with_name("shorter"), theirs.seq)
    (event,) = [event for event in StoreFiles.open(root).events(RUN) if event["event"] == "fell back"]
    assert (event["checkpoint"], [each["number"] for each in event["damaged"]]) == (lost, [3])
    if damage is damage_arrays:
        assert event["damaged"][0]["leaves"] == ["loop/values"]
    # the next start has nothing to say
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if damage is not damage_record:
            assert train(root, 6).step == 5


def test_several_damaged_ones_are_passed_over_and_all_are_named(root):
    train(root, 5)
    damage_arrays(root, 5)
    damage_index(root, 4)
    damage_arrays(root, 3)
    with pytest.warns(simckpt.DamageWarning) as told:
        assert train(root, 4).step == 2
    assert all(f"0000000{seq}" in str(told[0].message) for seq in (3, 4, 5))


def test_a_record_that_breaks_the_line_is_passed_over(root):
    train(root, 5)
    damage_record(root, 4)
    damage_arrays(root, 5)
    with pytest.warns(simckpt.SimckptWarning):
        assert train(root, 5).step == 3
    assert [each.seq for each in simckpt.Store(root).run(RUN).checkpoints(damaged={})] == [1, 2, 3, 6, 7]


def test_with_raise_the_newest_is_an_error_that_names_the_one_that_is_whole(root):
    damage_arrays(root, 3)
    whole = StoreFiles.open(root).index(RUN, 2).commit.id
    with Training(root) as training:
        before = training.loop.values.copy()
        with pytest.raises(DamagedError, match=whole) as caught:
            training.checkpointer.restore_latest(damaged="raise")
        assert (caught.value.leaves, caught.value.intact) == (("loop/values",), whole)
        assert (training.loop.step, training.loop.values.tobytes()) == (0, before.tobytes())
        with pytest.raises(ConfigurationError, match="fall back"):
            training.checkpointer.restore_latest(damaged="ignore")


def test_where_nothing_comes_back_nothing_is_touched(root):
    for seq in (1, 2, 3):
        damage_arrays(root, seq)
    with Training(root) as training:
        with pytest.raises(DamagedError) as caught:
            training.checkpointer.restore_latest()
        assert "00000003" in caught.value.path
        assert training.loop.step == 0
        # and going on would bury them
        with pytest.raises(ConfigurationError), training.checkpointer:
            training.checkpointer.step(1)


def test_a_restore_names_damaged_leaves_and_the_newest_that_is_whole(root):
    damage_arrays(root, 3)
    damage_arrays(root, 2)
    run = simckpt.Store(root).run(RUN)
    first = run.checkpoints()[0]
    with pytest.raises(DamagedError, match=f"loop/values.*{first.id} at step 1") as caught:
        run.latest().restore(
            {"loop": simckpt.LoopState(step=0, values=np.zeros(4), rng=np.random.default_rng(7), big=0)}
        )
    assert (caught.value.leaves, caught.value.intact) == (("loop/values",), first.id)


def test_a_damaged_segment_is_not_referred_to_by_what_comes_after(root):
    train(root, 4)
    with h5py.File(folder(root, 4) / "state.h5") as file:
        (source,) = file["loop/big"].virtual_sources()
    segment = root / "segments" / Path(source.file_name).name
    flip(segment, place_of(segment, "loop/big")[0] * 8 + 9)
    with pytest.warns(simckpt.DamageWarning):
        # the first saw it for the first time, and has it in its own file
        assert train(root, 3).step == 1
    report = check(root, PLAIN)
    assert {each.seq for each in report.lost} == {2, 3, 4} - ({2} if _has_own(root, 2) else set())
    assert state_of(root, 6)["loop"]


def _has_own(root: Path, seq: int) -> bool:
    with h5py.File(folder(root, seq) / "state.h5") as file:
        return not file["loop/big"].is_virtual


def test_damaged_rows_are_left_behind_and_the_rows_before_them_go_on(root):
    with h5py.File(folder(root, 3) / "state.h5") as file:
        *_, newest = file["replay/rewards"].virtual_sources()
    segment = root / "segments" / Path(newest.file_name).name
    flip(segment, place_of(segment, "replay/rewards")[0] * 8)
    with pytest.warns(simckpt.DamageWarning, match="replay/rewards"):
        assert train(root, 7).step == 2
    train(root.with_name("shorter"), 7)
    report = check(root, PLAIN)
    assert [(each.seq, each.leaves) for each in report.lost] == [(3, ("replay/rewards",))]
    head, twin = (simckpt.Store(each).run(RUN).latest() for each in (root, root.with_name("shorter")))
    assert state_of(root, head.seq) == state_of(root.with_name("shorter"), twin.seq)


def test_a_newer_format_is_no_damage(root):
    path = folder(root, 3) / "commit.json"
    body, _, _ = path.read_bytes().replace(b'"version": "0.3"', b'"version": "9.0"').rpartition(b',\n "digest"')
    path.write_bytes(sealed_again(body))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Training(root) as training, pytest.raises(UnsupportedFormatError):
            training.checkpointer.restore_latest()


def sealed_again(body: bytes) -> bytes:
    return body + f',\n "digest": "xxh3-128:{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def test_a_flipped_bit_in_the_name_of_a_digest_is_damage_and_no_newer_format(root):
    path = folder(root, 3) / "commit.json"
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"xxh3-128")] + data[data.rindex(b"xxh3-128") :].replace(b"xxh3", b"xxi3", 1))
    with pytest.warns(simckpt.SimckptWarning):
        assert train(root, 3).step == 2


def test_a_branch_whose_own_checkpoints_are_damaged_begins_again_at_its_origin(root):
    simckpt.Store(root).run(RUN).latest().branch("trial")
    for _ in range(2):
        with Training(root, "trial") as training, warnings.catch_warnings():
            warnings.simplefilter("ignore", simckpt.DamageWarning)
            restored = training.checkpointer.restore_latest()
            training.train(4)
        assert (restored.run, restored.step) == (RUN, 3)
        path = root / "runs" / "trial" / "checkpoints" / "00000001" / "state.h5"
        flip(path, place_of(path, "loop/values")[0] * 8)
    found = simckpt.Store(root).run("trial").latest()
    assert (found.seq, found.parent) == (2, restored.id)


def test_a_branch_whose_origin_is_damaged_says_what_to_branch_from_instead(root):
    simckpt.Store(root).run(RUN).latest().branch("trial")
    damage_arrays(root, 3)
    with Training(root, "trial") as training, pytest.raises(DamagedError, match="at step 2") as caught:
        training.checkpointer.restore_latest()
    whole = simckpt.Store(root).run(RUN).at(step=2)
    assert caught.value.intact == whole.id
    (note,) = caught.value.__notes__
    assert "run 'trial' begins at this checkpoint, at step 3 of run 'run'" in note


def test_after_a_repair_the_run_goes_on_from_the_one_before(root):
    damage_arrays(root, 3)
    assert simckpt.Store(root).repair(quick=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(root, 4).step == 2
    run = simckpt.Store(root).run(RUN)
    assert [checkpoint.seq for checkpoint in run.checkpoints()] == [1, 2, 4, 5]
    for seq in (1, 2, 4, 5):
        damage_arrays(root, seq)
    assert simckpt.Store(root).repair()
    with Training(root) as training, pytest.raises(CheckpointNotFoundError, match="quarantine"):
        training.checkpointer.restore_latest()


def test_what_a_damaged_rollback_had_changed_is_not_in_force(root):
    files = StoreFiles.open(root)
    with Training(root) as training:
        training.run.configure({"lr": 1.0, "seed": 3})
        start = training.run.start_id()
        training.run.change_hyperparameters({"lr": 0.5})
        later = training.run.start_id()
    third = files.index(RUN, 3).commit
    with files.claim(RUN):
        encoded = files.read(RUN, 3)
        good = files.commit(RUN, CommitDraft(third.id, 4, start=start, versions=versions()), encoded).record
        changes = {"hyperparameters": {"lr": 0.5}}
        facts = {"abandoned": good.id, "level": 1, "changes": changes, "reason": "r"}
        draft = CommitDraft(good.id, 4, kind="rollback", rollback=facts, start=later, versions=versions())
        files.commit(RUN, draft, encoded)
    with Training(root) as training:
        assert training.run.configure({"lr": 1.0, "seed": 3})["lr"] == 0.5
    damage_arrays(root, 5)
    with Training(root) as training:
        training.run.configure({"lr": 1.0, "seed": 3})
        with pytest.warns(simckpt.DamageWarning):
            assert training.checkpointer.restore_latest().seq == 4
        assert training.checkpointer.hyperparameters["lr"] == 1.0
    assert simckpt.Store(root).repair()
    with Training(root) as training:
        assert training.run.configure({"lr": 1.0, "seed": 3})["lr"] == 1.0
        assert training.checkpointer.restore_latest().seq == 4
