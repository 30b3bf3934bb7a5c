"""A run recorded here, restored and compared in a fresh process."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.exactness import harness
from tests.exactness.cases import CannotConstructError, Case

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What the fresh process found: how many differences, and the first of them."""

    count: int
    first: list[str]


class FreshProcess:
    """Restores snapshots in a process that never saw the runs they come from; a new one after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def restore_and_compare(self, case: Case, folder: Path) -> Answer:
        """Returns how the run that goes on from the snapshot in `folder` differs from the one that never stopped."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.exactness.replayer"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"case": harness.to_json(case), "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{case}: the fresh process died with status {self._process.wait()}")
        answer = json.loads(line)
        if answer["error"]:
            raise RuntimeError(f"{case}: in the fresh process:\n{answer['error']}")
        return Answer(answer["count"], answer["first"])

    def close(self) -> None:
        """Ends the process by ending its input."""
        if self._process is not None:
            self._process.communicate(timeout=30)


class Suite:
    """Records a case here, restores it there."""

    def __init__(self, fresh_process: FreshProcess, folder: Path) -> None:
        self._fresh_process = fresh_process
        self._folder = folder

    def compare(self, case: Case, *, in_store: bool = False) -> Answer:
        """Returns what differs after the restore; skips ids that cannot be constructed and says why.

        The run is first compared with a twin of which no snapshot is taken: taking one must not change it. For single
        envs the run is snapshotted at every step.
        """
        try:
            store = self._folder / "store" if in_store else None
            recording = harness.record(case, capture_always=case.vectorization is None, store=store)
        except CannotConstructError as error:
            pytest.skip(f"cannot be constructed: {error}")
        if case.moment != "fresh" and case.twins:
            assert recording.expected == harness.run_undisturbed(case), f"{case}: the snapshot disturbed the run"
        harness.save(recording, self._folder)
        return self._fresh_process.restore_and_compare(case, self._folder)

    def assert_exact(self, case: Case, *, in_store: bool = False) -> None:
        """Fails with the first differences, if there are any."""
        answer = self.compare(case, in_store=in_store)
        assert answer.count == 0, "\n".join([f"{case}: {answer.count} differences", *answer.first])
