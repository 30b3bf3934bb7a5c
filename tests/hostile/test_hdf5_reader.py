"""The reader of HDF5 files from strangers: what it says of good ones, and what it refuses."""

import errno
import os
import random
import time
from pathlib import Path

import corpus
import forging
import h5py
import numpy as np
import pytest

from simckpt.errors import FormatError, StoreError
from simckpt.storage import hdf5_child, hdf5_reader, reader

GOLDEN = sorted((Path(__file__).parent.parent / "format" / "golden").glob("*/runs/*/checkpoints/*/state.h5"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return forging.build_store(tmp_path_factory.mktemp("hostile") / "good")


def test_it_says_of_a_checkpoint_what_the_index_says(good):
    index = good.index(forging.RUN, 2)
    found = hdf5_reader.describe(good.path / "runs" / forging.RUN / "checkpoints/00000002/state.h5")
    assert set(found.datasets) == set(index.leaves)
    for path, leaf in index.leaves.items():
        dataset = found.datasets[path]
        assert (dataset.dtype, dataset.shape, dataset.size) == (leaf.stored, leaf.stored_shape, leaf.size)
        assert dataset.offset == leaf.offset
        assert dataset.attributes["kind"] == leaf.kind
        assert dataset.attributes.get("dtype", leaf.dtype) == leaf.dtype
        sources = [(piece.segment, piece.start, piece.stop) for piece in leaf.pieces]
        assert [(source.segment, source.start, source.stop) for source in dataset.sources] == sources
        assert ("virtual" in dataset.attributes) == bool(leaf.pieces)
    assert found.groups[""] == {"format": "simckpt state", "version": index.commit and "0.3"}
    assert found.groups["loop"] == {"kind": "component", "name": "loop"}


def test_it_says_of_a_segment_where_its_rows_lie(good):
    index = good.index(forging.RUN, 2)
    (rows,) = [leaf for leaf in index if leaf.pieces]
    for piece in rows.pieces:
        found = hdf5_reader.describe(good.path / "segments" / f"{piece.segment}.h5").datasets[rows.path]
        assert (found.offset, found.shape, found.dtype) == (piece.offset, (piece.rows, 2), "<f8")
        assert found.size == piece.rows * 16


@pytest.mark.parametrize("path", GOLDEN[-1:], ids=str)
def test_it_agrees_with_h5py_on_what_simckpt_wrote(path):
    found = hdf5_reader.describe(path)
    with h5py.File(path) as file:
        names: list[str] = []
        file.visit(names.append)
        datasets = {name: file[name] for name in names if isinstance(file[name], h5py.Dataset)}
        assert set(found.datasets) == set(datasets)
        for name, dataset in datasets.items():
            said = found.datasets[name]
            assert (said.shape, said.dtype) == (dataset.shape, dataset.dtype.str)
            assert said.offset == dataset.id.get_offset()


def test_a_file_of_a_stranger_is_refused_with_what_is_wrong(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros(8), chunks=(4,))
    with pytest.raises(FormatError, match="'x' is neither contiguous nor virtual"):
        hdf5_reader.describe(tmp_path / "a.h5")


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "a.h5"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "b.h5" if kind == "link" else "/dev/zero")
        (tmp_path / "b.h5").touch()
    with pytest.raises(StoreError):
        hdf5_reader.describe(path)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        hdf5_reader.describe(tmp_path / "a.h5")


def test_a_reader_that_does_not_come_to_an_end_is_ended(tmp_path, good):
    path = next(good.path.glob("segments/*.h5"))
    begin = time.monotonic()
    with pytest.raises(FormatError, match=r"did not come to an end within 0\.001 s"):
        hdf5_reader.describe(path, deadline=0.001)
    assert time.monotonic() - begin < 30


SIZE = "    size = os.fstat(0).st_size\n"  # a line of `look`, which does the work of a fork


def broken(tmp_path, monkeypatch, program: str, *, before: str = SIZE) -> None:
    """Has the forks that look at files do something else, from a line of theirs on."""
    source = Path(hdf5_child.__file__).read_text()
    assert source.count(before) == 1
    (tmp_path / "child.py").write_text(source.replace(before, f"    {program}\n{before}"))
    monkeypatch.setattr(hdf5_reader, "_CHILD", tmp_path / "child.py")


ANSWER = "sys.stdout.write({!r}); sys.stdout.flush(); os._exit(0)"
BAD = [
    ("os.kill(os.getpid(), 11)", "died of it .exit code -11"),
    ("os._exit(3)", "died of it .exit code 3"),
    ("raise ValueError", "died of it .exit code 1"),
    (ANSWER.format("x" * 100), "no answer"),
    (ANSWER.format("[" * 100_000), "no answer"),
    (ANSWER.format("[]"), "no answer"),
    (ANSWER.format("{}"), "groups"),
    (ANSWER.format('{"groups": {}, "datasets": [5]}'), "datasets"),
    (ANSWER.format('{"groups": {}, "datasets": [{"path": "x", "dtype": "|O"}]}'), "dtype"),
]


@pytest.mark.parametrize(("program", "message"), BAD)
def test_what_a_broken_reader_answers_is_not_believed(tmp_path, monkeypatch, good, program, message):
    """libhdf5 may be talked into anything, its answer included."""
    broken(tmp_path, monkeypatch, program)
    with pytest.raises(FormatError, match=message):
        hdf5_reader.describe(next(good.path.glob("segments/*.h5")))


def test_a_file_that_its_reader_dies_of_harms_none_after_it(tmp_path, monkeypatch, good):
    """All files by one reader: each is told by its size what to do, and those after it are described as ever."""
    program = (
        "size = os.fstat(0).st_size\n"
        "    if size == 1: os.kill(os.getpid(), 9)\n"
        "    while size == 2: pass\n"
        "    while size == 3: sys.stdout.write('x' * 65536)\n"
        "    if size == 4: os.kill(os.getppid(), 9); os._exit(0)"
    )
    broken(tmp_path, monkeypatch, program)
    monkeypatch.setattr(hdf5_reader, "ANSWER_LIMIT", 1 << 20)
    path = next(good.path.glob("segments/*.h5"))
    expected = ["exit code -9", "within 0.5 s", "more than", "has ended"]
    with hdf5_reader.Reader() as files:
        wanted = files.describe(path)
        for size, message in enumerate(expected, 1):
            (tmp_path / "bad.h5").write_bytes(bytes(size))
            with pytest.raises(StoreError, match=message):
                files.describe(tmp_path / "bad.h5", deadline=0.5 if size == 2 else 60)
            assert files.describe(path) == wanted


def test_a_reader_leaves_no_process_behind(good):
    path = next(good.path.glob("segments/*.h5"))
    with hdf5_reader.Reader() as files:
        files.describe(path)
        process = files._process.pid
        files.describe(path)
        assert files._process.pid == process
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_answer_without_end_is_cut(tmp_path, monkeypatch, good):
    broken(tmp_path, monkeypatch, "while True: sys.stdout.write('x' * 65536)")
    monkeypatch.setattr(hdf5_reader, "ANSWER_LIMIT", 1 << 20)
    with pytest.raises(FormatError, match="more than"):
        hdf5_reader.describe(next(good.path.glob("segments/*.h5")))


def test_the_process_has_little_and_can_open_nothing(tmp_path, monkeypatch, good):
    """By a fork that does what a real one does, and then looks at itself in place of the file."""
    probe = (
        "def found(call):\n"
        "        try: call()\n"
        "        except OSError as error: return error.errno\n"
        "    fds = [n for n in range(3, 100) if found(lambda: os.fstat(n)) is None]\n"
        "    sys.stdout.write(json.dumps({'refused': json.dumps([fds, found(lambda: os.open('/etc/hostname', 0)), "
        "found(lambda: socket.socket()), "
        "resource.getrlimit(resource.RLIMIT_AS)[1], resource.getrlimit(resource.RLIMIT_CPU)[1], "
        "sorted(k for k in os.environ if k.startswith('HDF5'))])}))\n"
        "    sys.stdout.flush(); os._exit(0)"
    )
    broken(
        tmp_path, monkeypatch, probe, before="    try:\n        answer: dict[str, Any] = Walker(h5py, size).walk()\n"
    )
    monkeypatch.setenv("HDF5_VDS_PREFIX", "/tmp")
    with (tmp_path / "open").open("w"), pytest.raises(FormatError) as caught:
        hdf5_reader.describe(next(good.path.glob("segments/*.h5")))
    text = str(caught.value).partition("written: ")[2]
    too_many = errno.EMFILE
    limits = f"{hdf5_child.MEMORY_LIMIT}, {hdf5_child.CPU_LIMIT}"
    assert text == f'[[], {too_many}, {too_many}, {limits}, ["HDF5_PLUGIN_PRELOAD"]]'


def test_nothing_in_simckpt_opens_a_file_by_libhdf5():
    """Layouts are made in memory; a file from disk goes to the child alone, and there by its descriptor."""
    package = Path(reader.__file__).parent.parent
    users = {
        path.name for path in package.rglob("*.py") if "h5py" in path.read_text() and "import h5py" in path.read_text()
    }
    assert users >= {"layout.py", "hdf5_child.py"}
    for name in users - {"layout.py", "hdf5_child.py"}:
        (path,) = package.rglob(name)
        assert "h5py.File(" not in path.read_text()


@pytest.mark.parametrize("name", list(corpus.HARMLESS_HDF5))
def test_what_is_odd_and_does_no_harm_is_described(tmp_path, name):
    outside = corpus.outside_folder(tmp_path)
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        corpus.HARMLESS_HDF5[name](file, outside)
    hdf5_reader.describe(tmp_path / "a.h5")


def survive(data: bytes, path: Path, seeds: range) -> int:
    """Describes mutants of a file; returns how many were refused. The process of each may die, this one does not."""
    with hdf5_reader.Reader() as files:
        return sum(_is_refused(files, data, path, seed) for seed in seeds)


def _is_refused(files: hdf5_reader.Reader, data: bytes, path: Path, seed: int) -> bool:
    draw, changed = random.Random(seed), bytearray(data)
    # what libhdf5 reads is a few spans; its checksums are not mended, so many changes would find no more
    for _ in range(draw.choice([1, 1, 2, 8])):
        place = draw.randrange(len(data) - 8)
        other = draw.choice([b"\0", b"\xff", b"\0" * 8, b"\xff" * 8, draw.randbytes(1), draw.randbytes(4)])
        changed[place : place + len(other)] = other
    path.write_bytes(changed[: draw.randrange(len(data))] if draw.random() < 0.1 else changed)
    try:
        files.describe(path)
    except FormatError:
        return True
    return False


def test_mutated_metadata_ends_in_an_answer_or_an_error(good, tmp_path):
    state = next(good.path.glob("runs/*/checkpoints/00000002/state.h5")).read_bytes()
    survive(state, tmp_path / "a.h5", range(5))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_mutants_of_metadata_end_in_an_answer_or_an_error(good, tmp_path):
    """Old files too, whose metadata has no checksums: there every change reaches libhdf5's parser."""
    state = next(good.path.glob("runs/*/checkpoints/00000002/state.h5")).read_bytes()
    assert survive(state, tmp_path / "a.h5", range(300)) > 30
    with h5py.File(tmp_path / "old.h5", "w", libver=("earliest", "v108")) as file:
        for name in ("a", "b/c", "b/d"):
            file.create_dataset(name, data=np.arange(10.0)).attrs["kind"] = np.bytes_("numpy")
    assert survive((tmp_path / "old.h5").read_bytes(), tmp_path / "a.h5", range(300)) > 20
