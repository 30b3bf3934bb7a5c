"""Progress bars of a fan-out: one line for each branch, one for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_COLOURS = {"complete": "green", "interrupted": "yellow"}


class Bars:
    """Draws how far the branches are, in a terminal or notebook; a context manager.

    At which step a training will end is known to itself alone: the bar of a branch shows that it runs, and its text
    the step of its newest checkpoint.

    Args:
        names: of the branches.
        shown: whether to draw at all.
    """

    def __init__(self, names: Sequence[str], *, shown: bool) -> None:
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")]
        self._progress = Progress(*columns, TimeElapsedColumn(), disable=not shown)
        self._total = len(names)
        self._ended = 0
        self._all = self._progress.add_task("all branches", total=self._total, text=f"0 of {self._total}")
        self._tasks = {
            name: self._progress.add_task(f"  {name}", start=False, total=None, text="waits") for name in names
        }

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, name: str, step: int | None, *, running: bool) -> None:
        """Shows where a branch is."""
        if running:
            self._progress.start_task(self._tasks[name])
            self._progress.update(self._tasks[name], text="runs" + _at(step))

    def end(self, name: str, status: str, step: int | None) -> None:
        """Shows how a branch has ended."""
        task, self._ended = self._tasks[name], self._ended + 1
        # a whole bar for one that is complete, an empty one for the others
        self._progress.update(task, total=1, completed=int(status == "complete"))
        self._progress.stop_task(task)
        colour = _COLOURS.get(status, "red")
        self._progress.update(task, text=f"[{colour}]{status}[/{colour}]{_at(step)}")
        self._progress.update(self._all, completed=self._ended, text=f"{self._ended} of {self._total}")


def _at(step: int | None) -> str:
    return "" if step is None else f", step {step:,}"
