"""A folder of runs."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from pathlib import Path

from simckpt import provenance
from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, ConflictError, NotAStoreError
from simckpt.run import Run
from simckpt.storage import CommitRecord, RunRecord, StoreFiles
from simckpt.suggest import nearest

MIN_ID_PREFIX = 6  # hex digits; shorter ones are too easily a step or a typing error


class Store:
    """A folder of runs. Opening one writes nothing; the first `start` makes the folder.

    ```python
    store = simckpt.Store("experiments")
    run = store.start("ant-ppo")                  # to write: creates the run, or reopens it after a crash
    checkpoint = store.run("ant-ppo").latest()    # to read
    ```

    Args:
        path: the store's folder.

    Raises:
        NotAStoreError: the path exists and is neither a store nor an empty folder.
        UnsupportedFormatError: the store needs a newer simckpt.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files: StoreFiles | None = None
        if self.path.exists() and not self.path.is_dir():
            raise NotAStoreError(f"{self.path} is not a store but a file: give the path of its folder")
        if not _is_vacant(self.path):
            self._files = StoreFiles.open(self.path)

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r}>"

    @property
    def files(self) -> StoreFiles:
        """The store's files, for the parts of simckpt that work on them.

        Raises:
            NotAStoreError: nothing has been started in this folder yet.
        """
        if self._files is None:
            raise NotAStoreError(f"{self.path} is not a store yet: the first Store.start(name) makes it")
        return self._files

    @property
    def id(self) -> str:
        """The store's random id, 32 hex digits."""
        return self.files.id

    def start(self, name: str, *, experiment: str | None = None) -> Run:
        """Returns the run to write to: a new one, or the existing one of that name, to go on with.

        The run stays claimed by this process until `Run.close`, the end of a `with`, or the end of the process.

        Args:
            name: letters, digits, dots, underscores and hyphens, at most 100.
            experiment: an id of your own that groups runs; kept with a new run.

        Raises:
            InvalidNameError: the name cannot be a folder.
            RunLockedError: another process is writing this run.
        """
        if self._files is None:
            self._files = StoreFiles.create(self.path)
        if name not in self._files.runs():
            self._create(self._files, name, experiment)
        claim = self._files.claim(name)
        try:
            run = Run(self._files, name, claim=claim)
            run.log("started", git=provenance.git_commit(Path.cwd()), versions=dict(provenance.versions()))
        except BaseException:
            claim.release()
            raise
        return run

    def _create(self, files: StoreFiles, name: str, experiment: str | None) -> None:
        record = RunRecord(
            id=uuid.uuid4().hex,
            name=name,
            created=time.time(),
            experiment=experiment,
            git=provenance.git_commit(Path.cwd()),
            versions=provenance.versions(),
            host=platform.node(),
        )
        # another process that starts the same run at this moment may win; the claim decides between the two
        with contextlib.suppress(ConflictError):
            files.write_run(name, record)

    def run(self, name: str) -> Run:
        """Returns the run of that name, to read.

        Raises:
            RunNotFoundError: there is none; the message lists the near ones.
        """
        return Run(self.files, name)

    def runs(self) -> list[Run]:
        """Returns every run, to read, in the order of their creation."""
        return sorted((Run(self.files, name) for name in self.files.runs()), key=lambda run: (run.created, run.name))

    def checkpoint(self, address: str) -> Checkpoint:
        """Returns a checkpoint by its id, or by `run`, `run@latest` or `run@<step>`.

        An id may be shortened to its first hex digits, at least six, as long as one checkpoint alone has them.

        Raises:
            CheckpointNotFoundError: no checkpoint, or more than one, has that address.
            RunNotFoundError: the part before `@` is no run.
        """
        if address in self.files.runs():
            return self.run(address).latest()
        if "@" in address:
            name, _, place = address.rpartition("@")
            return self._at(self.run(name), place)
        return self._by_id(address)

    def _at(self, run: Run, place: str) -> Checkpoint:
        if place == "latest":
            return run.latest()
        digits = place.replace(",", "").replace("_", "")
        if not (digits.isascii() and digits.isdecimal()):
            raise CheckpointNotFoundError(f"{run.name}@{place}: after the @ comes a step or `latest`")
        return run.at(step=int(digits))

    def _by_id(self, prefix: str) -> Checkpoint:
        if len(prefix) < MIN_ID_PREFIX or set(prefix) - set("0123456789abcdef"):
            known = nearest(prefix, self.files.runs())
            raise CheckpointNotFoundError(
                f"{prefix!r} is no run of {self.path}{known} A checkpoint is named by its id (at least "
                f"{MIN_ID_PREFIX} hex digits), `run`, `run@latest` or `run@<step>`"
            )
        # by the records alone: one damaged record must not hide the checkpoints of the others
        found = [
            Checkpoint(self.files, name, record)
            for name in self.files.runs()
            for record in self.files.records(name, damaged={})
            if isinstance(record, CommitRecord) and record.id.startswith(prefix)
        ]
        if len(found) != 1:
            count = "no checkpoint" if not found else f"{len(found)} checkpoints, give more digits:"
            listing = " ".join(repr(checkpoint) for checkpoint in found)
            raise CheckpointNotFoundError(f"store {self.path} has {count} {prefix} {listing}".rstrip())
        return found[0]


def _is_vacant(path: Path) -> bool:
    """Returns whether a store can still be made here: nothing there, or what a kill left of the making of one."""
    return not path.exists() or all(entry.name == "tmp" for entry in path.iterdir())
