"""The tree of runs as text and as a table for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from simckpt import presentation

if TYPE_CHECKING:
    from simckpt.branching.lineage import Graph, RolledBackPart, RunLineage

HEADER = ("run", "from", "overrides", "steps", "checkpoints", "added", "metrics")


def lines(graph: Graph) -> list[str]:
    """Returns a line for each run and each rollback, under a header; nothing is cut."""
    drawn = list(_drawn(graph))
    rows = [HEADER, *([name, *cells] for name, cells in drawn if len(cells) > 1)]
    shown = [place for place in range(len(HEADER)) if any(row[place] for row in rows[1:])]
    widths = {place: max(len(row[place]) for row in rows) for place in shown}
    text = []
    for name, cells in [(HEADER[0], HEADER[1:]), *drawn]:
        if len(cells) == 1:
            text.append(f"{name}{cells[0]}")
            continue
        row = [name, *cells]
        text.append("  ".join(row[place].ljust(widths[place]) for place in shown).rstrip())
    return text


def html(graph: Graph) -> str:
    """Returns the same as an HTML table."""
    rows = [[name, *cells] if len(cells) > 1 else [name + cells[0]] for name, cells in _drawn(graph)]
    return presentation.html_table(HEADER, rows, caption=graph.title(), numbers=(1, 5))


def overrides(run: RunLineage) -> str:
    """Returns "learning_rate=0.0001, reseed", or an empty text for a run that is no branch."""
    parts = [presentation.hyperparameters(run.overrides), "reseed" if run.rng == "reseed" else ""]
    return "  ".join(filter(None, parts))


def origin(run: RunLineage) -> str:
    """Returns the step at which a run left its origin; with the id, if that is in no run of the tree."""
    if run.imported is not None:
        return f"imported from {run.imported.run} of store {run.imported.store[: presentation.SHORT_ID]}"
    if run.origin is None:
        return ""
    step = "" if run.origin_step is None else f"{run.origin_step:,}"
    if run.origin_run is not None:
        return step
    return f"{step} of {run.origin[: presentation.SHORT_ID]}, which is not here".lstrip()


def rollback(part: RolledBackPart) -> str:
    """Returns one rollback of a run as a sentence."""
    where = f"rolled back at {part.left_step:,} to {part.target_step:,}"
    left = f"{presentation.count(len(part.abandoned), 'checkpoint')} abandoned"
    return _sentence(where, left, part.level, part.changes, part.reason)


def rollback_facts(facts: Mapping[str, Any]) -> str:
    """Returns what `Checkpoint.rollback` says, as a sentence."""
    level, given = facts.get("level"), facts.get("changes")
    left = f"left checkpoint {presentation.printable(str(facts.get('abandoned')))}"
    return _sentence(left, "", level, given if isinstance(given, Mapping) else {}, str(facts.get("reason", "")))


def _sentence(where: str, left: str, level: Any, changed: Mapping[str, Any], reason: str) -> str:
    parts = [where, left, f"level {level}", changes(changed), presentation.printable(reason)]
    return "; ".join(filter(None, parts))


def changes(values: Mapping[str, Any]) -> str:
    """Returns what a rollback changed: its policy's description and the new hyperparameters, or all that is known."""
    described, inner = values.get("description"), values.get("hyperparameters")
    shown = inner if isinstance(inner, Mapping) else {} if described else values
    return ": ".join(filter(None, [presentation.printable(str(described or "")), presentation.hyperparameters(shown)]))


def _drawn(graph: Graph) -> Iterator[tuple[str, list[str]]]:
    """Gives (name with the branches of the tree before it, the other cells); one cell alone stands for a rollback."""
    last_below = {run.origin_run: run.name for run in graph.runs}
    prefixes: dict[str | None, str] = {None: ""}
    for run in graph.runs:
        above = prefixes[run.origin_run]
        is_root = run.origin_run is None
        last = last_below[run.origin_run] == run.name
        mark, below = ("", "") if is_root else ("└─ ", "   ") if last else ("├─ ", "│  ")
        prefixes[run.name] = above + below
        yield f"{above}{mark}{run.name}", _cells(run)
        trunk = prefixes[run.name] + ("│  " if run.name in last_below else "   ")
        for part in run.rollbacks:
            yield trunk, [rollback(part)]
        for message in run.damaged:
            yield trunk, [f"damaged: {presentation.printable(message)}"]


def _cells(run: RunLineage) -> list[str]:
    steps = run.steps
    span = "" if steps is None else f"{steps[0]:,} to {steps[1]:,}" if steps[0] != steps[1] else f"{steps[0]:,}"
    counts = [f"{len(run.checkpoints):,}"]
    for number, what in (
        (sum(commit.abandoned and not commit.pruned for commit in run.commits), "abandoned"),
        (sum(commit.evicted for commit in run.commits), "in the archive"),
        (len(run.commits) - len(run.checkpoints), "pruned"),
    ):
        counts += [f"{number:,} {what}"] if number else []
    cells = [origin(run), overrides(run), span, ", ".join(counts), presentation.size(run.bytes_added)]
    return [*cells, presentation.metrics(run.metrics)]
