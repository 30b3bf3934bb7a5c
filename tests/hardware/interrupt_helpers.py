"""Exceptions of signal handlers, at every instruction at which one can come."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Interrupt(BaseException):
    """What a signal handler raises."""


def _raise() -> None:
    raise Interrupt


def interrupted_at(
    number: int, work: Callable[[], object], *modules: ModuleType, work_then: Callable[[], object] = _raise
) -> bool:
    """Does something, and raises `Interrupt` before the instruction of some modules that has this number, from 1 on.

    Args:
        number: of the instruction.
        work: to do.
        modules: whose instructions count.
        work_then: what to do there instead.

    Returns:
        Whether there were so many.
    """
    files = {module.__file__ for module in modules}
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == number:
                work_then()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return count >= number
