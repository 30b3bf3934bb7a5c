"""Runs the hostile corpus and the mutants, and counts; the tests and `make reliability` use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import corpus
import forging

HERE = Path(__file__).parent


@dataclass
class Outcome:
    """What became of hostile files.

    Attributes:
        tried: how many kinds.
        taken: names of those whose state was taken, although it must not be.
        faults: what went wrong: crashes, hangs, other errors than simckpt's own, control characters on a terminal.
        foreign: what was opened outside of the store.
    """

    tried: int = 0
    taken: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What was not as it must be."""
        return [*self.taken, *self.faults, *self.foreign]

    @property
    def let_through(self) -> int:
        """How many of them did something that they must not."""
        return len({each.partition(" | ")[0] for each in self.wrong})


@dataclass
class MutantOutcome:
    """What became of mutants.

    Attributes:
        tried: how many.
        refused: how many were refused.
        equal: how many were restored as saved.
        different: how many that are sealed anew hold another state, which is read as what it is.
        faults: crashes, hangs, wrong values, other errors than simckpt's own.
        foreign: what was opened outside of the store.
    """

    tried: int = 0
    refused: int = 0
    equal: int = 0
    different: int = 0
    faults: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def run_corpus(
    root: Path,
    only: Callable[[str], bool] = lambda name: True,
    *,
    broken: str | None = None,
    tracer: Sequence[str] = (),
) -> Outcome:
    """Builds the corpus in an empty folder and takes it through every door.

    Args:
        root: where to build.
        only: says which kinds.
        broken: a check that is left out, see `breaking`.
        tracer: a command in front of the program, such as strace.
    """
    cases = corpus.build(root, only)
    job = {
        "cases": [[case.name, case.kind, str(case.path)] for case in cases],
        "allowed": [
            *(str(case.path.parent) for case in cases),
            str(root / "good"),
            str(root / "scratch"),
            str(root / "cache"),
        ],
        "good": str(root / "good"),
        "scratch": str(root / "scratch"),
        **({} if broken is None else {"broken": broken}),
    }
    (root / "scratch").mkdir()
    outcome = Outcome()
    for found in _run("doors.py", root, job, tracer):
        name = found["name"]
        outcome.tried += 1
        if "died" in found:
            outcome.faults.append(f"{name} | {found['died']}")
            continue
        outcome.faults += [f"{name} | {each}" for each in found["faults"]]
        outcome.foreign += [f"{name} | {each}" for each in found["foreign"]]
        kind = name.partition(": ")[2]
        harmless = bool(found["refused"]) if kind in corpus.REFUSED_AND_RESTORED else kind in corpus.HARMLESS
        if found["taken"] and not harmless:
            outcome.taken.append(name)
    if outcome.tried != len(cases):
        outcome.faults.append(f"everything | {outcome.tried} of {len(cases)} were tried")
    return outcome


# what Python, its libraries and the system's open for themselves
OWN_FILES = (sys.prefix, sys.base_prefix, str(HERE.parent.parent), "/usr/lib", "/lib", "/usr/share", "/usr/local/lib")
OWN_FILES += (
    "/proc",
    "/sys",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
    "/etc/localtime",
    "/etc/locale.alias",
    "/etc/ssl",
    "/usr/bin",
)


def traced(root: Path, strace: str, only: Callable[[str], bool]) -> tuple[Outcome, list[str]]:
    """Returns what became of hostile files, and the paths of all that was opened, by what the kernel saw.

    Args:
        root: where to build.
        strace: the program.
        only: says which kinds.
    """
    trace = root / "trace"
    # -y: the path of each descriptor, of the one that was opened as well, links resolved
    options = ["-f", "-y", "-qq", "-e", "trace=open,openat,openat2,creat", "-e", "signal=none", "-o", str(trace)]
    outcome = run_corpus(root, only, tracer=[strace, *options])
    found = re.findall(r"= \d+<(/[^\n]*)>$", trace.read_text(errors="replace"), re.MULTILINE)
    return outcome, sorted(set(found))


def run_mutants(root: Path, count: int, *, seed: int, resealed: bool, broken: str | None = None) -> MutantOutcome:
    """Makes mutants of a good store and restores each.

    Args:
        root: an empty folder.
        count: of mutants.
        seed: for one seed they are the same, on every machine.
        resealed: whether their digests are right.
        broken: a check that is left out, see `breaking`.
    """
    store = forging.build_store(root / "good")
    store.export(forging.RUN, 2, root / "good.h5", metrics={})
    job = {
        "root": str(root),
        "seed": seed,
        "count": count,
        "resealed": resealed,
        "scratch": str(root / "scratch"),
        "allowed": [str(root / "cache")],
        **({} if broken is None else {"broken": broken}),
    }
    outcome = MutantOutcome()
    for found in _run("mutants.py", root, job, ()):
        outcome.tried = found["tried"]
        outcome.refused, outcome.equal, outcome.different = (
            found["counts"].get(each, 0) for each in ("refused", "equal", "different")
        )
        outcome.faults, outcome.foreign = found["faults"], found["foreign"]
    return outcome


def _run(program: str, root: Path, job: dict[str, object], tracer: Sequence[str]) -> list[dict[str, object]]:
    path = root / "job.json"
    path.write_text(json.dumps(job))
    for name in ("cache", "temporary"):
        (root / name).mkdir(exist_ok=True)
    own = {"XDG_CACHE_HOME": str(root / "cache"), "TMPDIR": str(root / "temporary")}
    done = subprocess.run(
        [*tracer, sys.executable, "-W", "ignore", str(HERE / program), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, **own, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{program} failed: {done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def mutants(root: Path, *, plain: int = 6000, resealed: int = 4000, seed: int = 0) -> list[MutantOutcome]:
    """Returns what became of mutants with their old digests, and of those that are sealed anew."""
    outcomes = []
    for name, count in (("plain", plain), ("resealed", resealed)):
        (root / name).mkdir(parents=True)
        outcomes.append(run_mutants(root / name, count, seed=seed, resealed=name == "resealed"))
    return outcomes


def broken_variants(root: Path) -> dict[str, bool]:
    """Returns {check that was left out: whether the suite notices}."""
    folder = root / "digests"
    folder.mkdir(parents=True)
    noticed = {"digests": bool(run_mutants(folder, 40, seed=1, resealed=False, broken="digests").faults)}
    for name, kinds in (("links", ("link runs/ant/",)), ("bound", ("same rows",))):
        folder = root / name
        folder.mkdir(parents=True)
        outcome = run_corpus(folder, lambda each, kinds=kinds: each.startswith(kinds), broken=name)
        noticed[name] = outcome.let_through > 0
    return noticed
