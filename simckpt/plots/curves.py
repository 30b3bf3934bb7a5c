"""What the curves of a run are drawn from: its evaluations, on the line of its head and in what it abandoned."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from simckpt.branching.lineage import RolledBackPart, RunLineage
from simckpt.decisions import DECISIONS, evaluations_of
from simckpt.errors import CheckpointNotFoundError
from simckpt.run import Run

Evaluations = dict[int, tuple[float, ...]]  # step -> one value for each episode; one alone where only a mean is known

# z of the 97.5th percentile of the normal distribution
_Z = 1.959963984540054


@dataclass(frozen=True)
class Point:
    """One evaluation.

    Attributes:
        step: [env steps].
        mean: of its values.
        half: half the width of the 95 % confidence interval of the mean; NaN for a single value.
        count: of the values.
    """

    step: int
    mean: float
    half: float
    count: int


@dataclass(frozen=True)
class Part:
    """A part of a curve that a rollback left behind.

    Attributes:
        rollback: the rollback.
        points: from the one at which the run went on later to the last that is known.
    """

    rollback: RolledBackPart
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Curve:
    """The evaluations of a run.

    Attributes:
        line: of the head and what it descends from; of a branch from its origin on.
        parts: what rollbacks left behind.
    """

    line: tuple[Point, ...]
    parts: tuple[Part, ...]


def curve(run: Run, metric: str) -> Curve:
    """Returns the evaluations of a run.

    The values of single episodes come from the history that a `RollbackPolicy` keeps in each checkpoint; where there is
    none, the metrics of the checkpoints are what is known.

    Raises:
        CheckpointNotFoundError: nothing in the run has that metric.
    """
    own = run.lineage().run(run.name)
    origin = own.origin_step if own.origin_step is not None else -math.inf
    line = _evaluations(run, own, [commit.id for commit in own.line], metric)
    if own.origin is not None:
        # what lies before the origin is its run's; the last of it joins the two curves
        before = [step for step in line if step <= origin]
        for step in before[:-1]:
            del line[step]
    parts = []
    for rollback in own.rollbacks:
        left = _evaluations(run, own, rollback.abandoned, metric)
        kept = {step: values for step, values in line.items() if step <= rollback.target_step}
        points = _points(_seen(run, rollback, kept | left) | left)
        joint = [each for each in [*_points(kept), *points] if each.step <= rollback.target_step][-1:]
        after = [point for point in points if point.step > rollback.target_step]
        parts.append(Part(rollback, (*joint, *after)))
    if not line and not any(part.points for part in parts):
        known = sorted({name for commit in own.commits for name in commit.metrics})
        raise CheckpointNotFoundError(f"run {run.name!r} has no metric {metric!r}; it has {', '.join(known) or 'none'}")
    return Curve(tuple(_points(line)), tuple(parts))


def _evaluations(run: Run, own: RunLineage, ids: Sequence[str], metric: str) -> Evaluations:
    """Returns the evaluations that the newest of these checkpoints remembers, and the metrics of all of them."""
    by_id = {commit.id: commit for commit in own.commits}
    commits = [by_id[id] for id in ids if id in by_id]
    found: Evaluations = {
        commit.step: (commit.metrics[metric],)
        for commit in commits
        if not math.isnan(commit.metrics.get(metric, math.nan))
    }
    there = {checkpoint.id: checkpoint for checkpoint in run.checkpoints(abandoned=True, damaged={})}
    newest = next((there[commit.id] for commit in reversed(commits) if commit.id in there), None)
    if newest is not None and DECISIONS in newest.components():
        for each in evaluations_of(newest[DECISIONS]).get(metric, ()):
            found[each.step] = each.returns
    return dict(sorted(found.items()))


def _seen(run: Run, rollback: RolledBackPart, known: Evaluations) -> Evaluations:
    """Returns the means of the last evaluations before a rollback, which no checkpoint of what was left may hold.

    They are of the metric that the policy looked at: of none that has other values where both are known.
    """
    there = {checkpoint.id: checkpoint for checkpoint in run.checkpoints(abandoned=True, damaged={})}
    found = there.get(rollback.checkpoint)
    state = found[DECISIONS] if found is not None and DECISIONS in found.components() else {}
    if not state.get("rollbacks"):
        return {}
    seen = {step: mean for step, mean, _ in state["rollbacks"][-1]["saw"]}
    both = [math.isclose(seen[step], point(step, known[step]).mean) for step in seen.keys() & known.keys()]
    return {step: (mean,) for step, mean in seen.items()} if both and all(both) else {}


def _points(evaluations: Mapping[int, Sequence[float]]) -> list[Point]:
    return [point(step, values) for step, values in sorted(evaluations.items())]


def point(step: int, values: Sequence[float]) -> Point:
    """Returns mean and confidence interval of the values of one evaluation, or of one step of many runs."""
    half = math.nan
    if len(values) > 1 and all(map(math.isfinite, values)):
        half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    # not fsum, which refuses infinities of both signs
    return Point(step, sum(values) / len(values), half, len(values))


def student_t(freedom: int) -> float:
    """Returns the 97.5th percentile of Student's t; within 0.2 % from three degrees of freedom on.

    Cornish and Fisher's expansion, Abramowitz and Stegun 26.7.5; one and two degrees exactly.
    """
    if freedom <= 2:
        return (math.tan(math.pi * 0.475), 0.95 * math.sqrt(2 / (1 - 0.95**2)))[freedom - 1]
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def mean_of(curves: Iterable[Curve]) -> tuple[Point, ...]:
    """Returns the mean of several runs' curves, as far as all of them reach, with an interval over three runs or more.

    Each run is interpolated linearly at the steps of the others. A mean over ever fewer runs would jump where one ends.
    """
    lines = [curve.line for curve in curves if curve.line]
    steps = sorted({point.step for line in lines for point in line})
    values = {step: [value for line in lines if (value := _at(line, step)) is not None] for step in steps}
    found = (point(step, there) for step, there in values.items() if len(there) == len(lines))
    # the interval over two runs is six times as wide as they are apart
    return tuple(each if each.count > 2 else replace(each, half=math.nan) for each in found)


def _at(line: Sequence[Point], step: int) -> float | None:
    for before, after in itertools.pairwise(line):
        if before.step <= step <= after.step:
            share = (step - before.step) / (after.step - before.step)
            return before.mean + share * (after.mean - before.mean)
    return line[0].mean if len(line) == 1 and line[0].step == step else None
