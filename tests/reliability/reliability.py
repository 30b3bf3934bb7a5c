"""What the suites of `make reliability` share: a line of its table, progress, mutants, and work in forked children."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: what was tried.
        tried: how often.
        failures: how often a promise was broken.
        detail: what else there is to know, in a few words.
        mutants: {deliberately broken variant: whether the suite noticed it}.
        examples: of failures, at most a few.
    """

    name: str
    tried: int
    failures: int
    detail: str = ""
    mutants: dict[str, bool] = field(default_factory=dict)
    examples: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return self.failures == 0 and all(self.mutants.values())

    @property
    def upper_bound(self) -> float | None:
        """Of the rate of failures, at 95 %: the rule of three, for it is asked only where none was seen."""
        return 3 / self.tried if self.tried and not self.failures else None


Progress = Callable[[str], None]
Suite = Callable[[float, Progress], list[Line]]


class Tally:
    """Counts tries and failures of one line."""

    def __init__(self) -> None:
        self.tried, self.failures, self.examples = 0, 0, []

    def attempt(self, what: str, action: Callable[[], object]) -> bool:
        """Counts one try, which fails by raising; returns whether it did not."""
        self.tried += 1
        try:
            action()
        except Exception as error:
            self.failures += 1
            if len(self.examples) < 5:
                place = traceback.extract_tb(error.__traceback__)[-1]
                self.examples.append(f"{what}: {type(error).__name__}: {error} ({place.name}:{place.lineno})"[:800])
            return False
        return True

    def line(self, name: str, detail: str = "", mutants: dict[str, bool] | None = None) -> Line:
        return Line(name, self.tried, self.failures, detail, mutants or {}, tuple(self.examples))


def in_child(action: Callable[[], object], report: Path | None = None) -> int:
    """Runs `action` in a forked child and returns its exit code, or minus the signal that killed it.

    Args:
        action: 99 is the exit code if it raises.
        report: of a file that receives the traceback then.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            result = action()
            code = result if isinstance(result, int) else 0
        except BaseException:
            if report is not None:
                report.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Gives a new folder in memory, if there is one, for thousands of stores are made."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def stride(count: int, wanted: float, offset: int = 0) -> range:
    """Returns about `wanted` of the numbers 1 to `count`, all if there are fewer, evenly; `offset` shifts them."""
    step = max(1, round(count / max(1.0, wanted)))
    return range(1 + offset % step, count + 1, step)


def as_json(line: Line) -> dict[str, object]:
    return json.loads(
        json.dumps(
            {
                "name": line.name,
                "tried": line.tried,
                "failures": line.failures,
                "upper_bound": line.upper_bound,
                "detail": line.detail,
                "mutants": line.mutants,
                "examples": list(line.examples),
            }
        )
    )
