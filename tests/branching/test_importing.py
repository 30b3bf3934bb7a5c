import errno
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from branch_helpers import VALUES, origin_run, rows, save, tree
from source_helpers import read_source

import simckpt
from simckpt import state
from simckpt.branching import importing
from simckpt.errors import (
    ConfigurationError,
    ConflictError,
    DamagedError,
    ExportNotFoundError,
    FormatError,
    RunLockedError,
    SimckptError,
    StorageError,
)
from simckpt.storage import ImportRecord, RunRecord, StoreFiles, exports
from simckpt.storage.durable import Disk


def decoded(checkpoint) -> dict:
    return {name: state.decode(each.leaves, each.structure) for name, each in checkpoint.read().items()}


def assert_equal(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for name, tree_ in expected.items():
        for key, value in tree_.items():
            if isinstance(value, np.ndarray):
                assert (found[name][key].dtype, found[name][key].shape) == (value.dtype, value.shape)
                assert found[name][key].tobytes() == value.tobytes()
            else:
                assert found[name][key] == value


def with_rows(path, count: int = 1000):
    """A store whose checkpoint at step 2 has a replay buffer in a segment, and everything that is to be kept."""
    store = simckpt.Store(path)
    with store.start("a", experiment="sweep") as run:
        run.configure(dict(VALUES))
        checkpoint = save(run, 2, metrics={"eval/return": 1.5}, components={"agent/x": tree(2), "replay": rows(count)})
    checkpoint.add_metrics({"eval/late": 7.0})
    return store, checkpoint


EXPECTED = {
    "agent/x": tree(2),
    "replay": {"observations": np.arange(4000, dtype=np.float32).reshape(1000, 4), "added": 1000},
}


FORMS = ["h5", "pt", "safetensors"]


@pytest.fixture(params=["checkpoint", *FORMS])
def imported(request, tmp_path):
    """A checkpoint, and a function that imports it into a store, straight or by way of a file."""
    store, checkpoint = with_rows(tmp_path / "from")
    source = checkpoint if request.param == "checkpoint" else checkpoint.export(tmp_path / "one", to=request.param)
    return store, checkpoint, lambda other, **options: other.import_checkpoint(source, **options)


def test_an_imported_checkpoint_is_the_first_of_a_run_of_its_own(tmp_path, imported) -> None:
    store, checkpoint, bring = imported
    other = simckpt.Store(tmp_path / "to")
    found = bring(other)
    assert (found.run, found.seq, found.step, found.kind, found.parent) == ("a", 1, 2, "import", None)
    assert found.id != checkpoint.id
    assert found.metrics == {"eval/return": 1.5, "eval/late": 7.0}
    assert (found.hyperparameters, found.versions, found.host, found.experiment) == (
        VALUES, {"python": "3.11.7"}, "there", "sweep",
    )  # fmt: skip
    assert_equal(decoded(found), EXPECTED)
    run = other.run("a")
    assert run.record.imported == ImportRecord(store.id, "a", checkpoint.id)
    assert run.hyperparameters == VALUES
    assert run.latest() == found
    assert run.branch is None


def test_the_rows_of_an_imported_replay_buffer_lie_in_a_segment_again(tmp_path, imported) -> None:
    _, _, bring = imported
    other = simckpt.Store(tmp_path / "to")
    found = bring(other)
    (piece,) = found.leaves()["replay/observations"].pieces
    assert piece.rows == 1000
    other.files.verify("a", 1)


def test_importing_twice_gives_the_checkpoint_that_is_there(tmp_path, imported) -> None:
    _, checkpoint, bring = imported
    other = simckpt.Store(tmp_path / "to")
    found = bring(other)
    assert bring(simckpt.Store(other.path)) == found
    # by whichever way
    assert other.import_checkpoint(checkpoint, run="a") == found
    assert other.import_checkpoint(found) == found
    # another name would be left out in silence
    for source in (checkpoint, found):
        with pytest.raises(ConflictError, match=r"in the store already.*'b'"):
            other.import_checkpoint(source, run="b")
    with pytest.raises(ConflictError, match="in the store already"):
        bring(other, run="b")
    assert [run.name for run in other.runs()] == ["a"]


def test_a_copy_of_a_copy_is_a_copy_of_the_original(tmp_path) -> None:
    store, checkpoint = with_rows(tmp_path / "from")
    copy = simckpt.Store(tmp_path / "between").import_checkpoint(checkpoint)
    last = simckpt.Store(tmp_path / "to")
    found = last.import_checkpoint(copy.export(tmp_path / "copy.pt"))
    assert last.run(found.run).record.imported == ImportRecord(store.id, "a", checkpoint.id)
    assert last.import_checkpoint(checkpoint) == found


def test_a_store_is_the_same_by_whichever_path_and_its_copy_is_another(tmp_path, monkeypatch) -> None:
    store, checkpoint = with_rows(tmp_path / "from")
    (tmp_path / "link").symlink_to(tmp_path / "from")
    monkeypatch.chdir(tmp_path)
    for path in ("from", "link", "./from/../link"):
        same = simckpt.Store(path)
        same.files.path = Path(path)  # as another spelling that resolving does not notice
        assert same.import_checkpoint(checkpoint) == checkpoint
    assert [run.name for run in store.runs()] == ["a"]
    shutil.copytree(tmp_path / "from", tmp_path / "copy")
    copied = simckpt.Store("copy")
    assert copied.import_checkpoint(checkpoint).run == "a-2"


def test_an_imported_run_is_named_apart_from_those_that_are_there(tmp_path, imported) -> None:
    _, _, bring = imported
    other = simckpt.Store(tmp_path / "to")
    other.start("a").close()
    other.start("a-2").close()
    assert bring(other).run == "a-3"
    third = simckpt.Store(tmp_path / "third")
    third.start("a").close()
    with pytest.raises(ConflictError, match="exists already"):
        bring(third, run="a")
    assert bring(third, run="b").run == "b"


def test_a_copy_that_was_pruned_is_made_anew_in_another_run(tmp_path, imported) -> None:
    _, _, bring = imported
    other = simckpt.Store(tmp_path / "to")
    found = bring(other)
    with other.start("a") as run:
        save(run, 3, parent=found)
    other.files.prune("a", 1, "old")
    assert bring(other).run == "a-2"


def test_an_import_that_was_cut_off_is_finished_by_the_next_one(tmp_path, imported) -> None:
    _, checkpoint, bring = imported
    other = simckpt.Store(tmp_path / "to")

    class Full(Disk):
        full = False

        def create(self, path):
            if self.full and path.name == "state.h5":
                raise OSError(errno.ENOSPC, "no room")
            return super().create(path)

    other.made()
    disk = Full()
    other._files = StoreFiles.open(other.path, disk=disk)
    disk.full = True
    with pytest.raises(StorageError, match="no room"):
        bring(other)
    assert other.runs() == []
    assert list(other.path.glob("tmp/*")) == []
    # a kill between the run and its checkpoint
    origin = ImportRecord(checkpoint.files.id, "a", checkpoint.id)
    other.files.write_run("a", RunRecord("e" * 32, "a", 1.8e9, imported=origin))
    disk.full = False
    assert bring(other).run == "a"
    assert_equal(decoded(other.run("a").latest()), EXPECTED)
    assert [run.name for run in other.runs()] == ["a"]


def test_an_import_that_somebody_else_finishes_meanwhile_is_found(tmp_path, imported) -> None:
    _, _, bring = imported
    other = simckpt.Store(tmp_path / "to")
    other.made()
    rivals = [bring]

    class Overtaken(StoreFiles):
        def claim(self, run):
            if rivals:
                rivals.pop()(simckpt.Store(other.path))
            return super().claim(run)

    other._files = Overtaken.open(other.path)
    found = bring(other)
    assert [each.id for each in simckpt.Store(other.path).run("a").checkpoints(abandoned=True)] == [found.id]


def two_checkpoints(path) -> tuple[simckpt.Checkpoint, simckpt.Checkpoint]:
    """Of one run, so that imports of both want the same name."""
    with simckpt.Store(path).start("a") as run:
        first = save(run, 10)
        return first, save(run, 20, parent=first)


class Meanwhile(StoreFiles):
    """Lets others act once a copy is made, and again when the claim is asked for."""

    copied = claimed = staticmethod(lambda: None)

    def prepare_copy(self, run, source):
        prepared = super().prepare_copy(run, source)
        self.copied()
        return prepared

    def claim(self, run):
        self.claimed()
        return super().claim(run)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("moment", ["copied", "named"])
def test_an_import_heeds_what_others_import_while_it_copies(tmp_path, monkeypatch, same: bool, moment: str) -> None:
    """The same checkpoint is found; for another of the same run, the name that was free is taken."""
    first, second = two_checkpoints(tmp_path / "from")
    other = simckpt.Store(tmp_path / "to")
    rival = simckpt.Store(tmp_path / "to")
    other.made()
    theirs = []

    def act() -> None:
        if not theirs:
            theirs.append(None)
            theirs[0] = rival.import_checkpoint(first if same else second)

    other._files = Meanwhile.open(other.path)
    if moment == "copied":
        other._files.copied = act
    else:
        # between the choice of the name and the run
        write_run = other._files.write_run
        monkeypatch.setattr(other._files, "write_run", lambda *arguments: (act(), write_run(*arguments))[1])
    found = other.import_checkpoint(first)
    assert theirs[0].run == "a"
    assert (found.run, found.step) == (("a", 10) if same else ("a-2", 10))
    assert (found == theirs[0]) is same
    assert [each.id for each in simckpt.Store(other.path).checkpoints()] == list(
        dict.fromkeys([theirs[0].id, found.id])
    )
    assert list(other.path.glob("tmp/*")) == []


@pytest.mark.parametrize("by", ["start", "import"])
def test_a_given_name_that_is_taken_during_the_copy_is_refused(tmp_path, by: str) -> None:
    first, second = two_checkpoints(tmp_path / "from")
    other = simckpt.Store(tmp_path / "to")
    rival = simckpt.Store(tmp_path / "to")
    other.made()
    other._files = Meanwhile.open(other.path)
    other._files.copied = {
        "start": lambda: rival.start("b").close(),
        "import": lambda: rival.import_checkpoint(second, run="b"),
    }[by]
    with pytest.raises(ConflictError, match=r"'b' exists already: choose another name"):
        other.import_checkpoint(first, run="b")
    assert other.files.runs() == ["b"]
    assert list(other.path.glob("tmp/*")) == []


def test_an_import_waits_for_another_that_writes_the_same_run(tmp_path, monkeypatch) -> None:
    first, _ = two_checkpoints(tmp_path / "from")
    other = simckpt.Store(tmp_path / "to")
    other.made()
    other._files = Meanwhile.open(other.path)
    held = []

    def hold() -> None:
        if held:
            held.pop().release()
        else:
            held.append(StoreFiles.open(other.path).claim("a"))

    other._files.claimed = hold
    assert other.import_checkpoint(first).step == 10
    # not for ever
    monkeypatch.setattr(importing, "PATIENCE", 0)
    last = simckpt.Store(tmp_path / "last")
    last.made().write_run("a", RunRecord("e" * 32, "a", 1.8e9, imported=ImportRecord(first.files.id, "a", first.id)))
    with last.start("a"), pytest.raises(RunLockedError, match="being written by this process"):
        last.import_checkpoint(first)
    assert last.checkpoints() == []
    assert list(last.path.glob("tmp/*")) == []


def test_many_imports_at_once_make_one_copy_of_each_checkpoint(tmp_path) -> None:
    sources = two_checkpoints(tmp_path / "from") * 4
    simckpt.Store(tmp_path / "to").made()
    barrier = threading.Barrier(len(sources))

    def bring(source: simckpt.Checkpoint) -> simckpt.Checkpoint:
        store = simckpt.Store(tmp_path / "to")
        barrier.wait()
        return store.import_checkpoint(source)

    with ThreadPoolExecutor(len(sources)) as workers:
        found = list(workers.map(bring, sources))
    assert [each.step for each in found] == [10, 20] * 4
    assert {each.run for each in found} == {"a", "a-2"}
    assert sorted(each.id for each in simckpt.Store(tmp_path / "to").checkpoints()) == sorted(
        {each.id for each in found}
    )


def test_an_import_that_was_cut_off_goes_on_under_its_own_name_alone(tmp_path, imported) -> None:
    _, checkpoint, bring = imported
    other = simckpt.Store(tmp_path / "to")
    record = RunRecord("e" * 32, "first", 1.8e9, imported=ImportRecord(checkpoint.files.id, "a", checkpoint.id))
    other.made().write_run("first", record)
    # before anything is copied
    other._files = Meanwhile.open(other.path)
    other._files.copied = pytest.fail
    with pytest.raises(ConflictError, match=r"was begun, as run 'first': it cannot be imported as 'second'"):
        bring(other, run="second")
    other._files.copied = lambda: None
    assert bring(other, run="first").run == "first"


def test_no_store_is_made_for_what_cannot_be_imported(tmp_path) -> None:
    _, checkpoint = with_rows(tmp_path / "from", count=1)
    path = checkpoint.export(tmp_path / "one.h5")
    other = simckpt.Store(tmp_path / "to")
    for source, run in ((path, "a/b"), (tmp_path / "absent", None), (5, None), (tmp_path, None)):
        with pytest.raises(SimckptError):
            other.import_checkpoint(source, run=run)
    assert not other.path.exists()


def test_an_import_looks_past_damaged_runs(tmp_path, imported) -> None:
    _, _, bring = imported
    other = simckpt.Store(tmp_path / "to")
    other.start("a").close()
    (other.path / "runs" / "a" / "run.json").write_bytes(b"damaged")
    found = bring(other)
    assert (found.run, bring(other)) == ("a-2", found)


def test_an_imported_run_goes_on_with_what_a_rollback_had_changed(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "from")
    with store.start("a") as run:
        run.change_hyperparameters({"learning_rate": 1e-5})
        changes = {"hyperparameters": {"learning_rate": 1e-5}}
        back = save(run, 20, parent=origin, kind="rollback", rollback={"level": 1, "changes": changes})
    other = simckpt.Store(tmp_path / "to")
    copy = other.import_checkpoint(back)
    with other.start(copy.run) as run:
        assert run.hyperparameters_in_force["learning_rate"] == 1e-5
        assert run.configure(dict(VALUES)) == {**VALUES, "learning_rate": 1e-5}


def test_what_was_imported_is_found_while_somebody_trains_on_it(tmp_path, imported) -> None:
    _, _, bring = imported
    other = simckpt.Store(tmp_path / "to")
    found = bring(other)
    with other.start("a"):
        assert bring(simckpt.Store(other.path)) == found


def test_a_damaged_source_is_refused_before_anything_is_written(tmp_path) -> None:
    store, checkpoint = with_rows(tmp_path / "from")
    path = checkpoint.export(tmp_path / "one.h5")
    (segment,) = (store.path / "segments").iterdir()
    for file, source in ((segment, checkpoint), (path, path)):
        content = bytearray(file.read_bytes())
        place = content.find(np.arange(500, 520, dtype=np.float32).tobytes())
        content[place] ^= 1
        file.write_bytes(content)
        other = simckpt.Store(tmp_path / f"to-{file.stem}")
        with pytest.raises(DamagedError, match="replay/observations"):
            other.import_checkpoint(source)
        assert other.files.runs() == []


def test_a_branch_in_another_store_imports_its_origin_first(tmp_path) -> None:
    _, checkpoint = with_rows(tmp_path / "from")
    other = simckpt.Store(tmp_path / "to")
    trial = checkpoint.branch("a", {"epochs": 3}, store=other)
    origin = trial.origin()
    assert (trial.name, trial.hyperparameters["epochs"]) == ("a", 3)
    assert (origin.run, origin.kind, origin.metrics["eval/return"]) == ("a-2", "import", 1.5)
    assert origin.files.path == other.path
    again = checkpoint.branch("b", store=other)
    assert again.origin() == origin
    assert checkpoint.branch("c", store=simckpt.Store(tmp_path / "from")).origin() == checkpoint


def test_a_branch_that_is_refused_imports_nothing(tmp_path) -> None:
    _, checkpoint = with_rows(tmp_path / "from")
    other = simckpt.Store(tmp_path / "to")
    for name, overrides, rng in (("b", {"epoch": 3}, "continue"), ("b", {}, "copy"), ("a/b", {}, "continue")):
        with pytest.raises(ValueError, match=r"epoch|rng|a/b"):
            checkpoint.branch(name, overrides, rng=rng, store=other)
    assert other.files.runs() == []


def test_the_script_of_the_origin_configures_a_branch_of_an_import_alike(tmp_path) -> None:
    """What a rollback had changed is in force, and the command line may say what it said at first."""
    store, origin = origin_run(tmp_path / "from")
    with store.start("a") as run:
        run.change_hyperparameters({"learning_rate": 1e-5})
        changes = {"hyperparameters": {"learning_rate": 1e-5}}
        back = save(run, 20, parent=origin, kind="rollback", rollback={"level": 1, "changes": changes})
    other = simckpt.Store(tmp_path / "to")
    trial = back.branch("b", {"epochs": 3}, store=other)
    assert trial.hyperparameters == {**VALUES, "learning_rate": 1e-5, "epochs": 3}
    with other.start("b") as run:
        assert run.configure(dict(VALUES)) == {**VALUES, "learning_rate": 1e-5, "epochs": 3}


def test_an_exported_file_opens_in_any_hdf5_viewer_and_holds_all_rows(tmp_path) -> None:
    _, checkpoint = with_rows(tmp_path / "from")
    path = checkpoint.export(tmp_path / "one.h5")
    with h5py.File(path) as file:
        assert set(file) == {"agent%2Fx", "replay"}
        found = file["replay/observations"]
        assert found.is_virtual is False
        assert np.array_equal(found[...], EXPECTED["replay"]["observations"])
        assert np.array_equal(file["agent%2Fx/weights"][...], tree(2)["weights"])
    assert {path.name for path in tmp_path.iterdir()} == {"from", "one.h5"}


def test_an_export_replaces_nothing(tmp_path) -> None:
    _, checkpoint = with_rows(tmp_path / "from")
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ConflictError, match="exists already"):
        checkpoint.export(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "chapter 1"


def test_every_damaged_record_of_an_exported_file_is_noticed(tmp_path) -> None:
    """One bit flipped in each of a few hundred bytes of its last part, which holds the records."""
    _, checkpoint = with_rows(tmp_path / "from", count=1)
    path = checkpoint.export(tmp_path / "one.h5")
    content = path.read_bytes()
    start = content.find(b'{\n "format": "simckpt run"')
    assert start > 0
    other = simckpt.Store(tmp_path / "to")
    for place in range(start, len(content), 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises((DamagedError, FormatError)):
            other.import_checkpoint(path)
    assert not other.path.exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_is_refused_although_its_checkpoint_is_in_the_store(tmp_path, form: str) -> None:
    _, checkpoint = with_rows(tmp_path / "from")
    path = checkpoint.export(tmp_path / "one", to=form)
    other = simckpt.Store(tmp_path / "to")
    other.import_checkpoint(path)
    content = bytearray(path.read_bytes())
    content[content.find(np.arange(500, 520, dtype=np.float32).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="replay/observations"):
        other.import_checkpoint(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_anywhere_is_noticed_or_changes_nothing(tmp_path, form: str) -> None:
    """One bit of every 101st byte; once it was done with every byte. What goes unnoticed is the padding of a .pt file,
    a fifth of one as small as this."""
    _, checkpoint = with_rows(tmp_path / "from", count=3)
    path = checkpoint.export(tmp_path / "one", to=form)
    content, whole = path.read_bytes(), exports.open_export(path)
    state = {name: (each.structure, as_bytes(each.leaves)) for name, each in read_source(whole).items()}
    records = (whole.store, whole.run, whole.start, whole.commit, whole.leaves, whole.shared)
    noticed = 0
    places = range(0, len(content), 101)
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        try:
            found = exports.open_export(path)
            read = {name: (each.structure, as_bytes(each.leaves)) for name, each in read_source(found).items()}
        except (DamagedError, FormatError):
            noticed += 1
            continue
        assert (found.store, found.run, found.start, found.commit, found.leaves, found.shared) == records
        assert read == state
    assert noticed > 0.5 * len(places)


def as_bytes(leaves: dict) -> dict:
    return {key: (leaf.dtype, leaf.shape, leaf.kind, leaf.data.tobytes()) for key, leaf in leaves.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [0, 7, 31, 33, -1, -33, -200])
def test_a_file_that_ends_too_early_is_refused(tmp_path, kept: int, form: str) -> None:
    _, checkpoint = with_rows(tmp_path / "from", count=1)
    path = checkpoint.export(tmp_path / "one", to=form)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises((DamagedError, FormatError)):
        simckpt.Store(tmp_path / "to").import_checkpoint(path)


def test_other_files_are_no_exported_checkpoints(tmp_path) -> None:
    other = simckpt.Store(tmp_path / "to")
    with pytest.raises(ExportNotFoundError, match=r"there is no file .*absent\.h5"):
        other.import_checkpoint(tmp_path / "absent.h5")
    with pytest.raises(FormatError, match="not a regular file"):
        other.import_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match="takes a Checkpoint, or the path"):
        other.import_checkpoint(5)
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["x"] = np.zeros(100)
    with pytest.raises(FormatError, match=r"no checkpoint that Checkpoint\.export wrote"):
        other.import_checkpoint(tmp_path / "plain.h5")
    (tmp_path / "short").write_bytes(b"simckpt")
    with pytest.raises(FormatError, match="no checkpoint"):
        other.import_checkpoint(tmp_path / "short")
    (tmp_path / "long").write_bytes(b"x" * 100 + b"simckpt export ffffffffffffffff\n")
    with pytest.raises(FormatError, match="directory"):
        other.import_checkpoint(tmp_path / "long")


def test_a_reseeded_branch_of_an_import_draws_the_same_numbers_in_every_store(tmp_path) -> None:
    """By way of whichever copy: what it derives from is the original."""

    def first_draws(store: simckpt.Store) -> list[float]:
        with store.start("b") as run:
            generator = np.random.default_rng(99)
            loop = simckpt.LoopState(step=0)
            checkpointer = run.checkpointer({"rng": generator, "loop": loop}, save_when=simckpt.EverySteps(1))
            checkpointer.restore_latest()
            return generator.random(3).tolist()

    store = simckpt.Store(tmp_path / "from")
    with store.start("a") as run:
        components = {"rng": np.random.default_rng(1), "loop": simckpt.LoopState(step=0)}
        run.checkpointer(components, save_when=simckpt.EverySteps(1)).save(2)
    origin = store.run("a").latest()
    copies = [simckpt.Store(tmp_path / name) for name in ("one", "two", "three")]
    first = copies[0].import_checkpoint(origin)
    copies[1].import_checkpoint(origin.export(tmp_path / "x.pt"))
    copies[2].import_checkpoint(first)
    draws = []
    for each in (store, *copies):
        each.run("a").latest().branch("b", rng="reseed")
        draws.append(first_draws(each))
    assert draws == [draws[0]] * 4
    assert draws[0] != np.random.default_rng(1).random(3).tolist()


def test_an_export_that_fails_leaves_no_file(tmp_path) -> None:
    _, checkpoint = with_rows(tmp_path / "from")

    class Broken(Disk):
        def fsync(self, descriptor):
            raise OSError(errno.EIO, "broken")

    files = StoreFiles.open(tmp_path / "from", disk=Broken())
    with pytest.raises(StorageError, match="broken"):
        files.export("a", checkpoint.seq, tmp_path / "one.h5", metrics={})
    assert [path.name for path in tmp_path.iterdir()] == ["from"]
