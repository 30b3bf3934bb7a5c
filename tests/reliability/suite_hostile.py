"""Files from strangers: a corpus of hostile ones, and mutants of good ones."""

from __future__ import annotations

import hostile_suite
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
    ]
