"""Training many branches of one checkpoint at a time, somewhere else."""

from __future__ import annotations

import contextlib
import html
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simckpt.branching.arguments import HEARTBEAT, check_engine, check_origin, check_rng, check_times
from simckpt.branching.branch import checked_overrides
from simckpt.branching.engines import Engine, LocalEngine
from simckpt.branching.jobs import Train, branch_job, is_complete, train_branch
from simckpt.branching.progress import Bars
from simckpt.branching.tracking import BranchResult, Tracked
from simckpt.checkpoint import Checkpoint
from simckpt.configuration import same_values
from simckpt.errors import ConfigurationError, ConflictError
from simckpt.presentation import printable
from simckpt.run import Run
from simckpt.storage import StoreFiles, durable
from simckpt.storage.names import check_run_name

POLL = 0.2  # between two looks at the futures [s]
_COLUMNS = ("run", "status", "step", "seconds", "error")


class FanOut(Mapping[str, BranchResult]):
    """What a fan-out returns: {branch name: `BranchResult`}, in the order of the variants; prints as a table."""

    def __init__(self, results: Mapping[str, BranchResult]) -> None:
        self._results = dict(results)

    def __getitem__(self, run: str) -> BranchResult:
        return self._results[run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    @property
    def complete(self) -> bool:
        """Whether every branch was trained to its end."""
        return all(result.status == "complete" for result in self._results.values())

    def table(self) -> list[dict[str, Any]]:
        """Returns a row for each branch, as `pandas.DataFrame` takes them: overrides and metrics are columns.

        All rows have all columns, None where a branch lacks a value. A name that is taken is called
        `hyperparameters.<name>` or `metrics.<name>`, as in queries. The error is the last line of `BranchResult.error`,
        control characters spelled out.
        """
        results = self._results.values()
        overrides = dict.fromkeys(key for result in results for key in result.overrides)
        changed = {f"hyperparameters.{key}" if key in _COLUMNS else key: key for key in overrides}
        measured = dict.fromkeys(key for result in results for key in result.metrics)
        metrics = {f"metrics.{key}" if key in {*_COLUMNS, *changed} else key: key for key in measured}
        return [
            {
                "run": result.run,
                **{column: result.overrides.get(key) for column, key in changed.items()},
                "status": result.status,
                "step": result.step,
                **{column: result.metrics.get(key) for column, key in metrics.items()},
                "seconds": result.seconds,
                "error": last_line(result.error),
            }
            for result in results
        ]

    def _cells(self) -> list[list[str]]:
        """Returns the table as texts, its head first; without the last columns where nothing is in them."""
        rows = self.table()
        columns = list(rows[0]) if rows else ["run", "status"]
        empty = [name for name in ("seconds", "error") if all(row[name] in (None, "") for row in rows)]
        columns = [name for name in columns if name not in empty]
        return [[printable(name) for name in columns], *([_shown(row[name]) for name in columns] for row in rows)]

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        )

    def _repr_html_(self) -> str:
        lines = [
            "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in zip(["th"] + ["td"] * len(self), self._cells(), strict=True)
        ]
        return "<table>" + "".join(lines) + "</table>"


def last_line(error: str) -> str:
    """Returns the last line of a traceback, as it can be shown on a terminal."""
    return printable(error.strip().rpartition("\n")[2])


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return printable(str(value))
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else repr(value)
    return printable(shown)


def fan_out(
    checkpoint: Checkpoint,
    variants: Mapping[str, Mapping[str, Any]],
    train: Train,
    *,
    engine: Engine | None = None,
    rng: str = "continue",
    deadline: float | None = None,
    heartbeat: float | None = HEARTBEAT,
    logs: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> FanOut:
    """Trains a branch of a checkpoint for each variant, several at a time, and returns how each of them ended.

    A branch that fails, is killed or hangs takes no other with it. Interrupted by Ctrl-C or a kill, the same call goes
    on: branches that are complete are left alone, others go on from their newest checkpoint. A branch is complete when
    `train` has returned, which tags its head "complete"; without that tag, it is trained further.

    ```python
    rates = {f"lr-{rate:g}": {"learning_rate": rate} for rate in (1e-4, 3e-4, 1e-3)}
    print(simckpt.fan_out(run.at(step=400_000), rates, ["train.py", "--env-id", "Ant-v5"]))
    ```

    Args:
        checkpoint: the origin of all branches.
        variants: {name of the new run: its overrides}.
        train: called with the store's folder and the branch's name, both strings, in a process of its own. A function
            at the top level of a module or a script, or a `functools.partial` of one with arguments that JSON can hold.
            Or a list, the path of a script and its flags: it is run with `--store` and `--run` added. A checkpoint
            names what is defined in a script by where it is, so that what was trained by a script is trained on by it.
        engine: where the branches run; processes of this machine by default, as many as it has cores.
        rng: "continue" or "reseed", see `Checkpoint.branch`.
        deadline: for each branch, from its start, such a wait included [s]; None: none.
        heartbeat: how long a branch may be silent [s], at least 1: neither a checkpoint nor a heartbeat of
            `Checkpointer.step`, of which a branch is told to give three in that time. Longer than an evaluation takes,
            in which no step comes, and than a shared file system hides what another machine has written. Until its
            first heartbeat a branch has two minutes in any case, and twelve while a claim on it lies in the store: that
            of a machine which is gone counts for ten, and the branch waits for its end. None: for ever.
        logs: a folder, in which a text file for each branch takes what it prints; None leaves that to the engine.
        progress: whether to draw progress bars.

    Raises:
        ConfigurationError: overrides that do not fit the checkpoint, a `train` that another process cannot find, or
            another argument that makes no sense. Nothing was made then.
        ConflictError: a run of that name is not this branch. Nothing was made then, either.
        InvalidNameError: a name that no run can have.
        StorageError: the disk refused.
    """
    _check(checkpoint, variants, rng, logs)
    check_times(deadline, heartbeat)
    check_engine(engine)
    files = checkpoint.files
    folder = None if logs is None else durable.made_folder(durable.Disk(), Path(logs))
    jobs = {
        name: branch_job(
            files.path, name, train, log=None if folder is None else folder / f"{name}.log", heartbeat=heartbeat
        )
        for name in variants
    }
    branches = _branches(files, checkpoint, variants, rng)
    tracked = {name: Tracked(run, deadline=deadline, heartbeat=heartbeat) for name, run in branches.items()}
    with contextlib.ExitStack() as stack:
        used = engine if engine is not None else stack.enter_context(LocalEngine())
        bars = stack.enter_context(Bars(list(variants), shown=progress))
        try:
            for name, each in tracked.items():
                if not is_complete(each.run):
                    each.future = used.submit(train_branch, jobs[name])
            results = wait_for(tracked, bars)
        except BaseException:
            for each in tracked.values():
                each.end()
            raise
    return FanOut({name: results[name] for name in variants})


def _check(checkpoint: Any, variants: Any, rng: Any, logs: Any) -> None:
    check_origin(checkpoint)
    check_rng(rng)
    if logs is not None and not isinstance(logs, str | os.PathLike):
        raise ConfigurationError(f"logs is the path of a folder, got {logs!r}", keys=["logs"])
    if not isinstance(variants, Mapping):
        raise ConfigurationError(
            f"variants are {{name of the new run: its overrides}}, got {variants!r}", keys=["variants"]
        )
    for name, overrides in variants.items():
        check_run_name(name)
        if not isinstance(overrides, Mapping):
            message = f"the overrides of variant {name!r} are {{hyperparameter: value}}, got {overrides!r}"
            raise ConfigurationError(message, keys=[name])


def _branches(
    files: StoreFiles, checkpoint: Checkpoint, variants: Mapping[str, Mapping[str, Any]], rng: str
) -> dict[str, Run]:
    """Returns the branches, to read, after making those that are missing; none is made if any of them cannot be."""
    existing = set(files.runs())
    values = checkpoint.hyperparameters
    for name, overrides in variants.items():
        changed = checked_overrides(values, overrides, source=f"{checkpoint!r} (variant {name!r})")
        if name in existing:
            _check_same(Run(files, name), checkpoint, changed, rng)
    return {
        name: Run(files, name) if name in existing else checkpoint.branch(name, overrides, rng=rng)
        for name, overrides in variants.items()
    }


def _check_same(run: Run, checkpoint: Checkpoint, overrides: Mapping[str, Any], rng: str) -> None:
    problem = ""
    if run.branch is None or run.record.origin != checkpoint.id:
        problem = f"does not come from checkpoint {checkpoint.id}"
    elif not same_values(run.overrides, overrides):
        problem = f"has the overrides {dict(run.overrides)}, not {dict(overrides)}"
    elif run.branch.rng != rng:
        problem = f"was branched with rng={run.branch.rng!r}, not {rng!r}"
    if problem:
        raise ConflictError(f"run {run.name!r} exists and {problem}: choose another name")


def wait_for(tracked: Mapping[str, Tracked], bars: Bars) -> dict[str, BranchResult]:
    """Returns how the branches ended, when all have."""
    results: dict[str, BranchResult] = {}
    while len(results) < len(tracked):
        for name, each in tracked.items():
            if name in results:
                continue
            if each.look():
                results[name] = each.result()
                bars.end(name, results[name].status, results[name].step)
            else:
                bars.update(name, each.step, running=each.running)
        time.sleep(POLL if len(results) < len(tracked) else 0)
    return results
