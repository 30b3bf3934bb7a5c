"""A log as a replay buffer would keep it, for the tests of segments; it knows storage by its words alone."""

from dataclasses import replace

import numpy as np

from simckpt.state.leaf import Leaf, LogLeaf, Piece
from simckpt.state.tree import Encoded
from simckpt.storage import Commit, CommitDraft, StoreFiles
from simckpt.storage.preparing import write_prepared

RUN = "ant-ppo"
# stored dtype and shape of a row of each column; the true dtype of the last differs
COLUMNS = {"observations": ("<f4", (2, 3)), "rewards": ("<f8", ()), "done": ("|b1", (2,)), "half": ("<u2", (5,))}


def rows(name: str, start: int, stop: int) -> np.ndarray:
    """The rows with these numbers of a column: a row's values follow from its number."""
    dtype, shape = COLUMNS[name]
    numbers = np.arange(start, stop).reshape(-1, *[1] * len(shape))
    spread = np.arange(int(np.prod(shape))).reshape(shape)
    return np.ascontiguousarray((numbers * 31 + spread * 7) % 251).astype(dtype)


class Log:
    """A ring of rows and its table, which says where they lie."""

    def __init__(self, capacity: int = 10**9, columns: tuple[str, ...] = tuple(COLUMNS)) -> None:
        self.capacity = capacity
        self.added = 0
        self.columns = columns
        self.pieces: dict[str, tuple[tuple[Piece, int], ...]] = dict.fromkeys(columns, ())  # with first row numbers

    @property
    def first(self) -> int:
        return max(0, self.added - self.capacity)

    def add(self, count: int) -> None:
        self.added += count

    def forget(self, segments: set[str]) -> None:
        """Rows that lie behind a lost segment are captured whole again, from the oldest lost one on."""
        for name, pieces in self.pieces.items():
            lost = [place for place, (piece, _) in enumerate(pieces) if piece.segment in segments]
            self.pieces[name] = pieces[: lost[0]] if lost else pieces

    def capture(self) -> dict[str, Leaf]:
        leaves: dict[str, Leaf] = {}
        self.captured = self.added
        for name in self.columns:
            kept = [
                replace(piece, start=piece.start + max(0, self.first - number))
                for piece, number in self.pieces[name]
                if number + piece.stop - piece.start > self.first
            ]
            known = self.first + sum(piece.stop - piece.start for piece in kept)
            new = rows(name, known, self.added)
            dtype = "bfloat16" if name == "half" else new.dtype.name
            kind = "torch" if name == "half" else "numpy"
            leaves[name] = LogLeaf(new, dtype, (self.added - self.first, *new.shape[1:]), kind, tuple(kept))
        return leaves

    def committed(self, commit: Commit, component: str = "replay") -> None:
        for name in self.columns:
            number = max(0, self.captured - self.capacity)
            table = []
            for piece in commit.leaves[f"{component}/{name}"].pieces:
                table.append((piece, number))
                number += piece.stop - piece.start
            self.pieces[name] = tuple(table)

    def expected(self) -> dict[str, np.ndarray]:
        return {name: rows(name, self.first, self.added) for name in self.columns}


def state(log: Log, **leaves: np.ndarray) -> dict[str, Encoded]:
    plain = {key: Leaf(array, array.dtype.name, array.shape, "numpy") for key, array in leaves.items()}
    return {"replay": Encoded(log.capture(), b'{"ring":1}'), "agent": Encoded(plain, b"{}")}


def save_log(store: StoreFiles, log: Log, *, limit: int = 128, run: str = RUN, **leaves: np.ndarray) -> Commit:
    """Saves as the checkpointer does: what is lost is written anew."""
    log.forget(store.missing_segments({piece.segment for table in log.pieces.values() for piece, _ in table}))
    job = replace(store.prepare_job(run), limit=limit)
    prepared = write_prepared(store._disk, job, state(log, **leaves))
    commit = store.publish(run, CommitDraft(None, log.added), prepared)
    log.committed(commit)
    return commit


def assert_holds(store: StoreFiles, seq: int, log: Log, *, run: str = RUN) -> None:
    found = store.read(run, seq)["replay"].leaves
    for name, wanted in log.expected().items():
        assert (found[name].data.dtype, found[name].data.shape) == (wanted.dtype, wanted.shape), name
        assert found[name].data.tobytes() == wanted.tobytes(), name


def segment_files(store: StoreFiles) -> set[str]:
    folder = store.path / "segments"
    return {path.stem for path in folder.iterdir()} if folder.exists() else set()
