"""What a start of a run restores: its head, or what it was branched from; and what is to differ from that."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from simckpt import other_ranks
from simckpt.branching.construction import kept_rates, refuse_taken
from simckpt.branching.hyperparameters import other_ways
from simckpt.branching.origin import original_id, past_of
from simckpt.branching.watching import Rate
from simckpt.comparison import fingerprint
from simckpt.configuration import same_values
from simckpt.errors import (
    BranchWarning,
    DamagedError,
    FormatError,
    OverrideNotAppliedError,
    StateMismatchError,
    StoreError,
)
from simckpt.maintenance.fallback import AWAY
from simckpt.resizing import Changed
from simckpt.restore import Adjustment
from simckpt.searching import candidates

if TYPE_CHECKING:
    from simckpt.branching.hyperparameters import Hyperparameters
    from simckpt.checkpoint import Checkpoint
    from simckpt.ranks import Phases
    from simckpt.run import Run
    from simckpt.saver import Saver
    from simckpt.storage import StoreFiles


def resume(
    run: Run,
    files: StoreFiles,
    saver: Saver,
    components: Mapping[str, Any],
    hyperparameters: Hyperparameters | None,
    *,
    damaged: str,
    untouched: frozenset[str] = frozenset(),
    note_beginning: Callable[[], None] | None = None,
    note_restored: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Checkpoint | None:
    """Returns the checkpoint that was put into the live objects, or None if there is none; see `restore_latest`.

    Args:
        run: that is started.
        files: of its store.
        saver: of its checkpointer.
        components: {name: live object}.
        hyperparameters: what holds them, if the program says so.
        damaged: see `Checkpointer.restore_latest`.
        untouched: as there.
        note_beginning: called before anything is restored.
        note_restored: called once the checkpoint is in the live objects, before it is told: warnings may be errors.
    """
    search = candidates(run, files, damaged=damaged)
    counts = other_ranks.counts_of(saver)
    while (checkpoint := search.next()) is not None:
        try:
            with run.ranks.phases() as phases:
                adjustment = adjustment_of(run, checkpoint, hyperparameters, components)
                adjustment = replace(adjustment, untouched=adjustment.untouched | untouched)
                if note_beginning is not None:
                    note_beginning()
                together = in_phases(adjustment, saver, hyperparameters, phases)
                saver.report = _restore(saver, checkpoint, together, counts)
        except (DamagedError, FormatError, *AWAY) as error:
            search.pass_over(checkpoint, error)
            continue
        # on all ranks, or on none
        if run.ranks.first(lambda: saver.writer.head not in (checkpoint.id, None)):
            saver.go_on_from(checkpoint)
        note_restored(checkpoint)
        run.log("restored", checkpoint=checkpoint.id, step=checkpoint.step)
        if any(told := run.ranks.gather(list(saver.report))):
            run.log(
                "resharded",
                checkpoint=checkpoint.id,
                report=list(dict.fromkeys(line for each in told for line in each)),
            )
        search.tell(checkpoint)
        break
    return checkpoint


def _restore(
    saver: Saver, checkpoint: Checkpoint, adjustment: Adjustment, counts: other_ranks.Counts
) -> tuple[str, ...]:
    """Restores a checkpoint; returns what is to be told of one of another number of ranks."""
    names, lines = checkpoint.components(), list[str]()
    if other_ranks.needs_resharding(checkpoint, names, saver):
        adjustment, lines = other_ranks.resharded(checkpoint, saver, adjustment, counts)
        extra = other_ranks.unknown_components(names, saver)
    else:
        extra = [name for name in names if saver.ranks.component_of(name) not in saver.known]
    if extra:
        problems = [f"component {name!r} is in the checkpoint but not registered" for name in extra]
        message = f"checkpoint {checkpoint.id} does not fit the live objects, which are untouched:\n  "
        raise StateMismatchError(message + "\n  ".join(problems), problems=problems)
    checkpoint.restore_bound(saver.bound, adjustment)
    saver.restored(checkpoint, untouched=adjustment.untouched)
    return tuple(lines)


def in_phases(
    adjustment: Adjustment, saver: Saver, hyperparameters: Hyperparameters | None, phases: Phases
) -> Adjustment:
    """Returns an adjustment by the names of components in a checkpoint, with which all ranks restore or none.

    Args:
        adjustment: by the names that the program gives them.
        saver: knows both.
        hyperparameters: what holds them, if the program says so.
        phases: of the restore.
    """
    given = {stored: name for name, stored in saver.names.items()}

    def by_name(trees: Mapping[str, Any]) -> dict[str, Any]:
        return {given[stored]: tree for stored, tree in trees.items()}

    def inspect(saved: Mapping[str, Any], live: Mapping[str, Any], loops: Collection[str]) -> None:
        if adjustment.inspect is not None:
            adjustment.inspect(by_name(saved), by_name(live), [given[stored] for stored in loops])
        phases.ready()

    def then() -> None:
        if adjustment.then is not None:
            adjustment.then()
        try:
            phases.done()
        except BaseException:
            if hyperparameters is not None:
                hyperparameters.take_back()
            raise

    return replace(
        adjustment,
        untouched=frozenset(map(saver.place, adjustment.untouched)),
        beginnings={saver.place(place): tree for place, tree in adjustment.beginnings.items()},
        inspect=inspect,
        then=then,
    )


def adjustment_of(
    run: Run,
    checkpoint: Checkpoint,
    hyperparameters: Hyperparameters | None,
    components: Mapping[str, Any] | None = None,
) -> Adjustment:
    """Returns what is to differ from the checkpoint that a start restores.

    Args:
        run: that is started.
        checkpoint: of the run, or what it was branched from.
        hyperparameters: what holds them, if the program says so.
        components: {name: live object}, in which what holds them may lie.

    Raises:
        OverrideNotAppliedError: nothing declares what holds a hyperparameter that the branch overrides.
    """
    if hyperparameters is not None:
        hyperparameters.locate(components or {})
    if checkpoint.id == run.record.origin:
        return _branching(run, checkpoint, hyperparameters, components or {})
    return _going_on(run, checkpoint, hyperparameters, components or {})


@dataclass(frozen=True)
class Beginning:
    """How a branch differs from its origin when it begins.

    Attributes:
        overrides: the hyperparameters that it changes, with their values.
        seed: from which all random streams are derived, or None: they go on as the origin has them.
        untouched: components, and variables of loops, that are as the program builds them.
        differing: {hyperparameter: (value of the origin, value in force)} of all that differ, overridden or not.
    """

    overrides: Mapping[str, Any]
    seed: str | None
    untouched: frozenset[str]
    differing: Changed


def beginning_of(
    run: Run, origin: Checkpoint, hyperparameters: Hyperparameters | None, *, changed: Collection[str] = ()
) -> Beginning:
    """Returns how a branch begins.

    Args:
        run: the branch.
        origin: what it was branched from.
        hyperparameters: what holds them, if the program says so.
        changed: keys that rollbacks of the run have changed: what is in force of them is not what it began with.
    """
    # a free key may have been given another value since
    overrides = {
        key: value if key in changed else run.hyperparameters_in_force.get(key, value)
        for key, value in run.overrides.items()
    }
    reseeds = run.branch is not None and run.branch.rng == "reseed"
    now = {key: value for key, value in run.hyperparameters_in_force.items() if key not in changed}
    differing = _differing(_values_of(origin), {**now, **overrides}, overrides)
    return Beginning(
        overrides,
        f"{original_id(origin)} {run.name}" if reseeds else None,
        frozenset() if hyperparameters is None else hyperparameters.untouched(differing),
        differing,
    )


def _branching(
    run: Run, origin: Checkpoint, hyperparameters: Hyperparameters | None, components: Mapping[str, Any]
) -> Adjustment:
    beginning = beginning_of(run, origin, hyperparameters)
    require_declared(hyperparameters, beginning.overrides.keys())
    if hyperparameters is None:
        return Adjustment(beginning.seed)
    # what else differs, such as a name or a device, is no wish for other shapes
    wished = beginning.overrides.keys() | hyperparameters.fresh.keys()
    # a rate, a coefficient that is set in the live objects gives them no other shape
    set_later = hyperparameters.controls - hyperparameters.fresh.keys()
    shaping = {
        key: pair
        for key, pair in beginning.differing.items()
        if key in wished and (key not in set_later or type(pair[1]) is not float)
    }
    return _adjustment(run, origin, hyperparameters, beginning, components, shaping=shaping)


def _going_on(
    run: Run, head: Checkpoint, hyperparameters: Hyperparameters | None, components: Mapping[str, Any]
) -> Adjustment:
    if hyperparameters is None:
        return Adjustment()
    now = run.hyperparameters_in_force
    # what a rollback has changed is part of its state already: set once more, it is watched like any other change
    changes = (head.rollback or {}).get("changes", {}).get("hyperparameters", {})
    # a free key may have been given another value since
    overrides = {key: now.get(key, value) for key, value in changes.items()}
    differing = _differing(_values_of(head), now)
    shaping = {key: pair for key, pair in differing.items() if key in hyperparameters.fresh}
    going_on = Beginning(overrides, None, hyperparameters.untouched(differing), differing)
    rolled_back = _differing(_values_before(head), overrides)
    return _adjustment(run, head, hyperparameters, going_on, components, shaping=shaping, rolled_back=rolled_back)


def _adjustment(
    run: Run,
    source: Checkpoint,
    hyperparameters: Hyperparameters,
    beginning: Beginning,
    components: Mapping[str, Any],
    *,
    shaping: Changed,
    rolled_back: Changed = MappingProxyType({}),
) -> Adjustment:
    """Returns an adjustment that sets what differs, and watches what a branch or a rollback has changed before."""
    controls, differing, untouched = hyperparameters.controls, beginning.differing, beginning.untouched
    to_set = {**beginning.overrides, **{key: new for key, (_, new) in differing.items() if key in controls}}
    now = run.hyperparameters_in_force
    past = past_of(source.files, run.record)
    changed = past.changed & controls
    to_watch = {key: now[key] for key in sorted(changed) if key in now and key not in to_set}
    from_args = hyperparameters.from_args | hyperparameters.fresh.keys()
    taken = {key: pair for key, pair in {**rolled_back, **differing}.items() if key in from_args - controls}

    # a rate that was lost at an earlier start is in the state by now
    rated = [
        (key, old, now[key])
        for key in (past.changed | differing.keys()) & from_args - controls
        for old in [*(each.get(key) for each in past.formerly), *taken.get(key, ())[:1]]
        if key in now and old is not None
    ]
    rates: list[Rate] = []

    def inspect(saved: Mapping[str, Any], live: Mapping[str, Any], loops: Collection[str]) -> None:
        fresh, reseeded = hyperparameters.fresh, beginning.seed is not None
        refuse_taken(saved, live, taken, fresh=fresh, loops=loops, reseeded=reseeded)
        found = (rate for rate in kept_rates(saved, live, rated) if rate.component in components)
        rates.extend(replace(rate, optimizer=components[rate.component]) for rate in found)

    lacking = hyperparameters.lacking(to_watch)

    def then() -> None:
        # what the restore left alone is no part of the state: it has to be set at every start
        left = {key for key, loss in hyperparameters.lacking(to_watch).items() if lacking.get(key) == loss}
        hyperparameters.apply(to_set | {key: to_watch[key] for key in left})
        try:
            hyperparameters.watch({key: value for key, value in to_watch.items() if key not in left})
            hyperparameters.watch_rates(rates)
            if untouched:
                keys = ", ".join(repr(key) for key in sorted(differing) if hyperparameters.untouched({key}))
                dropped = ", ".join(map(repr, sorted(untouched)))
                # now, for until here the restore may have been refused
                warnings.warn(
                    f"run {run.name!r} overrides {keys}: {dropped} begin as the program made them, and what checkpoint "
                    f"{source.id} has of them is dropped",
                    BranchWarning,
                    stacklevel=8,
                )
        except BaseException:
            hyperparameters.take_back()
            raise

    return Adjustment(beginning.seed, untouched, then, changed=shaping, inspect=inspect if taken or rated else None)


def _differing(
    before: Mapping[str, Any], now: Mapping[str, Any], overrides: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Returns {key: (value in the saved state, value in force)}; an override whose old value is unknown differs."""
    return {
        key: (before.get(key), value)
        for key, value in now.items()
        if not (key in before and same_values(before[key], value)) and (key in before or key in overrides)
    }


def _values_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    # a damaged record of a start is no reason not to go on
    with contextlib.suppress(StoreError):
        return checkpoint.hyperparameters
    return {}


def _values_before(head: Checkpoint) -> Mapping[str, Any]:
    """Returns the hyperparameters of the start that rolled back, if the head is a rollback and says which it was."""
    start = (head.rollback or {}).get("start")
    if isinstance(start, str):
        with contextlib.suppress(StoreError):
            return head.files.read_start(head.run, start).hyperparameters
    return {}


def require_declared(hyperparameters: Hyperparameters | None, keys: Collection[str]) -> None:
    """Checks that the program says what holds these hyperparameters; raises OverrideNotAppliedError."""
    if not keys:
        return
    if hyperparameters is None:
        key = min(keys)
        raise OverrideNotAppliedError(
            f"nothing says what holds the hyperparameter {key!r}, which is to be changed: give run.checkpointer "
            f"hyperparameters=simckpt.Hyperparameters({{{key!r}: optimizer}}) or "
            f'({{{key!r}: (object, "attribute")}}); {other_ways(key)}',
            key=key,
        )
    hyperparameters.check(keys)


def seed_of(target: Checkpoint, number: int, branch: str, *, without: Collection[str] = ()) -> str:
    """Returns the text from which the random streams after a rollback are derived.

    Depends on what the target holds, and not on its id: a run that was killed and goes back once more draws the same
    numbers as the one that was not killed, and runs of different seeds draw different ones.

    Args:
        target: what the run goes back to.
        number: of the rollback in the run, from 1 on: another try is another one.
        branch: the run's name if it is a branch: several may go back to one origin. Empty for others.
        without: components that do not count, for they are large or no part of training.
    """
    of_branch = f" of branch {branch}" if branch else ""
    return f"rollback {number}{of_branch} to step {target.step}, {fingerprint(target, without=without)}"
