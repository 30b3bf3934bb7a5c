"""The process that moves checkpoints to an archive, killed at every request, beside a server that flips bits."""

from __future__ import annotations

import kills
import session_kills
from reliability import Line, Progress, folder


def run(scale: float, progress: Progress) -> list[Line]:
    lines = []
    seldom = max(1, round(0.2 / scale))  # a broken mover, and a server that flips bits, show at some requests alone
    for name, fault, every in (
        ("kills of the mover to the archive", None, seldom),
        ("uploads that arrive flipped", "flip", 1),
    ):
        progress(f"archive: {name}")
        with folder() as base:
            tried, losses = kills.kill_at_every_request(base, fault=fault, every=every)
        lines.append(Line(name, tried, len(losses), examples=tuple(losses[:5])))
    caught = {}
    for variant in kills.VARIANTS:
        progress(f"archive: a mover that is broken on purpose, {variant}")
        with folder() as base:
            caught[variant] = bool(kills.kill_at_every_request(base, variant=variant)[1])
    lines[0] = Line(**{**vars(lines[0]), "mutants": caught})
    return [*lines, _sessions(seldom, progress)]


def _sessions(seldom: int, progress: Progress) -> Line:
    progress("archive: kills of the mover, sessions")
    with folder() as base:
        tried, losses = session_kills.kill_at_every_request(base, every=seldom)
    with folder() as base:
        caught = bool(session_kills.kill_at_every_request(base, end_first=True, every=2)[1])
    return Line(
        "kills of the mover, sessions", tried, len(losses), examples=tuple(losses[:5]), mutants={"end first": caught}
    )
