"""Files from strangers: a corpus of hostile ones, and mutants of good ones."""

from __future__ import annotations

import hostile_suite
from reliability import Line, Progress, folder


def run(scale: float, progress: Progress) -> list[Line]:
    progress("hostile files")
    with folder() as base:
        tried, through = hostile_suite.hostile_files(base / "corpus")
        progress("mutants of good files")
        plain, resealed = round(6000 * scale), round(4000 * scale)
        mutants, wrong = hostile_suite.mutants(base / "mutants", plain=plain, resealed=resealed)
        broken = hostile_suite.broken_variants(base / "broken")
    return [
        Line(
            "hostile files",
            tried,
            through,
            "kinds",
            {f"check of {name} left out": seen for name, seen in broken.items()},
        ),
        Line("mutants of good files", mutants, wrong, f"{plain:,} with their old digests, {resealed:,} sealed anew"),
    ]
