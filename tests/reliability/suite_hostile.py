"""Files from strangers: a corpus of hostile ones, and mutants of good ones."""

from __future__ import annotations

import hostile_suite
import session_suite
from reliability import Line, Progress, folder


def run(scale: float, progress: Progress) -> list[Line]:
    progress("hostile files")
    with folder() as base:
        (base / "corpus").mkdir()
        corpus = hostile_suite.run_corpus(base / "corpus")
        progress("mutants of good files")
        plain, resealed = round(6000 * scale), round(4000 * scale)
        outcomes = hostile_suite.mutants(base / "mutants", plain=plain, resealed=resealed)
        broken = hostile_suite.broken_variants(base / "broken")
        progress("recordings from strangers")
        (base / "sessions").mkdir()
        count = max(1, round(500 * scale))
        sessions = session_suite.run(base / "sessions", dict.fromkeys(session_suite.KINDS, count), progress=progress)
    wrong = [each for outcome in outcomes for each in (*outcome.faults, *outcome.foreign)]
    return [
        Line(
            "hostile files",
            corpus.tried,
            corpus.let_through,
            "kinds",
            {f"check of {name} left out": seen for name, seen in broken.items()},
            tuple(corpus.wrong[:20]),
        ),
        Line(
            "mutants of good files",
            sum(outcome.tried for outcome in outcomes),
            len(wrong),
            f"{plain:,} with their old digests, {resealed:,} sealed anew",
            {},
            tuple(wrong[:20]),
        ),
        Line(
            "recordings from strangers",
            sessions.tried,
            len(sessions.faults) + len(sessions.foreign),
            f"{count:,} each of {', '.join(session_suite.KINDS)}; {sessions.refused:,} refused in part or whole",
            {},
            tuple([*sessions.faults, *sessions.foreign][:20]),
        ),
    ]
