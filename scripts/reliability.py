"""Try to break a store in every way that the suites of `tests/reliability` know, and print how often it was tried.

    python scripts/reliability.py                # half an hour on two quiet cores
    python scripts/reliability.py --scale 0.1    # a few minutes
    python scripts/reliability.py --only faults "power loss"

Each line of the table says what was tried and how often a promise was broken; where that is never, the upper bound of
the rate at 95 % is 3 / tries (the rule of three). Suites are also run on deliberately broken variants of the library,
which they have to notice. What a suite found is written to `scripts/reliability.json` when it ends, in place of what it
found before; the exit code is 1 if anything failed.
"""

import argparse
import concurrent.futures
import importlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [
    str(ROOT),
    *(
        str(ROOT / "tests" / name)
        for name in ("reliability", "maintenance", "hostile", "archive", "storage", "hardware")
    ),
]

from reliability import Line, as_json  # noqa: E402
from suites import SUITES  # noqa: E402

RESULT = ROOT / "scripts" / "reliability.json"


def run_suite(name: str, scale: float) -> tuple[float, list[Line]]:
    """Returns how long a suite took [s], and its lines; one that ends with an error has failed."""
    began, module = time.monotonic(), SUITES[name]
    shown = began

    def progress(text: str) -> None:
        nonlocal shown
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            print(f"  [{shown - began:4.0f} s] {text}", flush=True)

    try:
        lines = importlib.import_module(module).run(scale, progress)
    except Exception as error:
        lines = [Line(name, 0, 1, "the suite ended with an error", {}, (f"{type(error).__name__}: {error}",))]
    return time.monotonic() - began, lines


def row(line: Line) -> list[str]:
    """Returns the cells of one line of the table."""
    bound = f"{line.upper_bound:.1e}" if line.upper_bound else ""
    noticed = f"{sum(line.mutants.values())} of {len(line.mutants)}" if line.mutants else ""
    return [line.name, f"{line.tried:,}", f"{line.failures:,}", bound, noticed]


def table(lines: list[Line]) -> str:
    """Returns the lines as a Markdown table."""
    head = ["what was tried", "times", "failures", "upper bound, 95 %", "mutants caught"]
    cells = [head, ["---"] * len(head), *map(row, lines)]
    return "\n".join(f"| {' | '.join(cell)} |" for cell in cells)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def keep(name: str, how: dict[str, Any], lines: list[Line]) -> None:
    """Writes what a suite found into the file of results, in place of what it found before."""
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    machine = f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}"
    known[name] = {**how, "date": time.strftime("%Y-%m-%d"), "machine": machine, "lines": [*map(as_json, lines)]}
    ordered = {suite: known[suite] for suite in SUITES if suite in known}
    RESULT.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of tries; 1 takes half an hour")
    parser.add_argument("--jobs", type=int, default=2, help="suites at once")
    parser.add_argument("--only", nargs="+", choices=list(SUITES), help="these suites alone")
    args = parser.parse_args()

    there = args.only or list(SUITES)
    began, found, version = time.monotonic(), {}, commit()
    # each suite in a process of its own: some of them fork, count open files, or patch the library
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=1) as pool:
        jobs = {pool.submit(run_suite, name, args.scale): name for name in there}
        for job in concurrent.futures.as_completed(jobs):
            name = jobs[job]
            seconds, found[name] = job.result()
            print(f"{name}: {seconds:.0f} s\n{table(found[name])}", flush=True)
            keep(name, {"commit": version, "scale": args.scale, "seconds": round(seconds)}, found[name])
    lines = [line for name in there for line in found[name]]

    print(f"\n{table(lines)}\n")
    for line in lines:
        print(f"{line.name}: {line.detail}" if line.detail else line.name)
        for mutant, noticed in line.mutants.items():
            print(f"  mutant {'caught' if noticed else 'NOT CAUGHT'}: {mutant}")
        for example in line.examples:
            print(f"  FAILED {example}")
    mutants = [noticed for line in lines for noticed in line.mutants.values()]
    print(f"mutants caught: {sum(mutants)} of {len(mutants)}; {time.monotonic() - began:.0f} s")
    sys.exit(not all(line.good for line in lines))


if __name__ == "__main__":
    main()
