"""Population-based training: who copies whom, and how hyperparameters are explored, as pure functions of values.

After Jaderberg et al. 2017, "Population Based Training of Neural Networks" (arXiv:1711.09846): truncation selection
(section 4.1.1 there), and exploration by perturbing or resampling. `branching.generations` carries the decisions out.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from simckpt.branching.arguments import HEARTBEAT, check_engine, check_origin, check_rng, check_times
from simckpt.branching.engines import Engine, LocalEngine
from simckpt.errors import CheckpointNotFoundError, ConfigurationError
from simckpt.policies.arguments import check_count, check_metric, is_number
from simckpt.storage.names import check_run_name

if TYPE_CHECKING:
    from simckpt.branching.generations import Population
    from simckpt.checkpoint import Checkpoint


@dataclass(frozen=True)
class Range:
    """The values that a hyperparameter may take, and the distribution it is drawn from.

    Args:
        low: the smallest value.
        high: the largest. If both are ints, so are the values: `Range(0.0, 1.0)` is not `Range(0, 1)`.
        log: draw the logarithm uniformly, as suits a learning rate.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        numbers = is_number(self.low) and is_number(self.high)
        if not numbers or not -math.inf < self.low < self.high < math.inf or (self.log and self.low <= 0):
            kind = "two finite numbers, the first below the second" + (" and above 0" if self.log else "")
            raise ConfigurationError(f"a Range needs {kind}, got {self.low!r} and {self.high!r}", keys=["low", "high"])

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def sample(self, draw: Callable[[], float]) -> float:
        """Returns a value of the range, from one call of `draw`, uniform in [0, 1)."""
        # of whole numbers every one has the same share, the last as well
        width = 1 if self.whole else 0
        if self.log:
            value = math.exp(math.log(self.low) + draw() * (math.log(self.high + width) - math.log(self.low)))
        else:
            value = self.low + draw() * (self.high + width - self.low)
        return self._clipped(math.floor(value) if self.whole else value)

    def perturb(self, value: float, factor: float) -> float:
        """Returns the value times the factor, within the range; a whole number changes by at least one, except 0."""
        changed = value * factor
        if self.whole:
            changed = round(changed)
            if changed == value != 0:
                changed = value + (1 if (factor > 1) == (value > 0) else -1)
        return self._clipped(changed)

    def _clipped(self, value: float) -> float:
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Member:
    """What a decision looks at of one member of the population, at the end of a generation.

    Attributes:
        score: the metric at the end of the generation; None if the member failed. NaN and infinities rank like that.
        hyperparameters: the explored ones, in force at the end of the generation.
    """

    score: float | None
    hyperparameters: Mapping[str, Any]

    @property
    def ranks(self) -> bool:
        """Whether it has a score to rank by."""
        return self.score is not None and math.isfinite(self.score)


@dataclass(frozen=True)
class Decision:
    """What becomes of one member.

    Attributes:
        source: the member whose state it goes on from: its own number, or that of the member it copies.
        overrides: the hyperparameters of the copy; empty for a member that goes on as it is.
        reason: why.
    """

    source: int
    overrides: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class PopulationBasedTraining:
    """Trains a population of runs; again and again the worst copy the best, with other hyperparameters.

    ```python
    population = simckpt.PopulationBasedTraining(
        "eval/return", explore={"learning_rate": simckpt.Range(1e-5, 1e-2, log=True), "gamma": [0.98, 0.99, 0.995]},
        size=10, interval=100_000,
    )
    result = population.train(store.run("ant-ppo").at(step=0), train, name="pbt", generations=20)
    ```

    A copy is a branch of the member it copies, so that the whole history lies in the store: `simckpt log` draws it.
    Equal settings give equal decisions, wherever and however often the population was interrupted.

    Args:
        metric: what members are ranked by, such as "eval/return".
        explore: {hyperparameter: a `Range`, or a list of the values it may take, in order}.
        size: how many members, at least 2.
        interval: the length of a generation [env steps].
        mode: "max" or "min".
        truncation: the share that is replaced, rounded up: each copies one drawn from as many at the top. At most 0.5.
            A member that failed, or whose metric is no number, always copies.
        factors: a number is multiplied with one of these, and stays within its range (the paper knows no bounds); a
            value from a list moves to one of its neighbours.
        resample: how often a hyperparameter is drawn anew instead.
        rng: "reseed" gives a copy random streams of its own; "continue" those of the member it copies.
        seed: of every draw.
    """

    metric: str
    explore: Mapping[str, Range | Sequence[Any]]
    size: int
    interval: int
    mode: str = "max"
    truncation: float = 0.2
    factors: tuple[float, ...] = (0.8, 1.2)
    resample: float = 0.25
    rng: str = "reseed"
    seed: int = 0

    def __post_init__(self) -> None:
        check_metric(self.metric, self.mode, policy="PopulationBasedTraining")
        check_count(self.interval, policy="PopulationBasedTraining", key="interval")
        check_count(self.size, policy="PopulationBasedTraining", key="size")
        check_rng(self.rng)
        for wrong, message, key in (
            (self.size < 2, "size: a population has at least 2 members", "size"),
            (
                not _is_share(self.truncation, 0.5) or not self.truncation,
                "truncation: above 0, at most 0.5",
                "truncation",
            ),
            (not _is_share(self.resample, 1.0), "resample: from 0 to 1", "resample"),
            (
                not _is_list(self.factors) or not all(map(_is_factor, self.factors)),
                "factors: numbers above 0",
                "factors",
            ),
            (type(self.seed) is not int, "seed: a whole number", "seed"),
            (
                not isinstance(self.explore, Mapping) or not self.explore,
                "explore: {hyperparameter: a Range or a list of values}, of at least one",
                "explore",
            ),
        ):
            if wrong:
                raise ConfigurationError(f"PopulationBasedTraining, {message}; got {getattr(self, key)!r}", keys=[key])
        for key, values in self.explore.items():
            if not isinstance(values, Range) and not _is_list(values):
                raise ConfigurationError(
                    f"PopulationBasedTraining, explore: {key!r} needs a Range or a list of values, got {values!r}",
                    keys=[key],
                )
        object.__setattr__(self, "explore", MappingProxyType(dict(self.explore)))
        object.__setattr__(self, "factors", tuple(self.factors))

    def first(self, member: int) -> dict[str, Any]:
        """Returns the hyperparameters that a member (from 0 on) begins with, drawn from `explore`."""
        return {key: _sample(values, self._draws(0, member, key)) for key, values in self.explore.items()}

    def decide(self, generation: int, members: Sequence[Member]) -> list[Decision]:
        """Returns what becomes of each member at the end of a generation (from 1 on), in the order of the members.

        Raises:
            CheckpointNotFoundError: no member has a score.
        """
        sign = 1.0 if self.mode == "max" else -1.0
        scored = [number for number, member in enumerate(members) if member.ranks]
        if not scored:
            raise CheckpointNotFoundError(
                f"no member of the population has a number for {self.metric!r} at the end of generation {generation}"
            )
        # the first member wins a tie
        ranked = sorted(scored, key=lambda number: -sign * (members[number].score or 0.0))
        ranked += [number for number, member in enumerate(members) if not member.ranks]
        # 0.2 * 35 is a little more than 7 in floating point
        count = min(math.ceil(self.truncation * len(members) - 1e-9), len(members) // 2)
        top, bottom = ranked[: max(count, 1)], set(ranked[len(ranked) - count :])
        top = [number for number in top if members[number].ranks]
        places = {number: place for place, number in enumerate(ranked, start=1)}
        decisions = []
        for number, member in enumerate(members):
            standing = f"rank {places[number]} of {len(members)} with {_shown(member.score)}"
            if number not in bottom and member.ranks:
                decisions.append(Decision(number, {}, standing))
                continue
            source = _pick(top, self._draws(generation, number, ""))
            overrides = {
                key: self._explored(key, members[source].hyperparameters[key], self._draws(generation, number, key))
                for key in self.explore
            }
            reason = f"{standing}: copies member {source} with {_shown(members[source].score)}"
            decisions.append(Decision(source, overrides, reason))
        return decisions

    def _explored(self, key: str, value: Any, draw: Callable[[], float]) -> Any:
        """Returns another value for a hyperparameter, drawn anew or near the old one."""
        values = self.explore[key]
        anew = draw() < self.resample
        if isinstance(values, Range):
            if not is_number(value):
                raise ConfigurationError(f"hyperparameter {key!r} is {value!r}, and no number to perturb", keys=[key])
            return values.sample(draw) if anew else values.perturb(value, _pick(self.factors, draw))
        if anew or value not in values:
            return _pick(values, draw)
        place = list(values).index(value) + _pick((-1, 1), draw)
        return values[min(max(place, 0), len(values) - 1)]

    def _draws(self, generation: int, member: int, key: str) -> Callable[[], float]:
        """Returns the draws for one purpose, uniform in [0, 1): the same whatever else is drawn, and before or after.

        Python promises the numbers of `Random.random` for a seed for all its versions, and of no other method.
        """
        return random.Random(f"{self.seed} {generation} {member} {key}").random

    def train(
        self,
        checkpoint: Checkpoint,
        train: Callable[..., object],
        *,
        name: str,
        generations: int,
        engine: Engine | None = None,
        deadline: float | None = None,
        heartbeat: float | None = HEARTBEAT,
        progress: bool = True,
    ) -> Population:
        """Trains the population from a checkpoint on, and returns what became of it; goes on after an interruption.

        The members are branches of the checkpoint, runs `<name>-00`, `<name>-01`, ...; a copy that member 3 makes at
        the end of generation 5 is the run `<name>-03-g5`, which stands for the member from then on. Copies that were
        made stay, whatever the settings are now; more `generations` go on where the last ones ended. A member that
        fails is replaced by a copy like the worst; one that was killed is first started once more.

        Args:
            checkpoint: where all members start from; one at step 0 for a population from scratch.
            train: called as `train(store, run, until_step=...)` with the store's folder and the run's name, both
                strings, in a process of its own. It starts the run, trains until that step, and saves there with the
                metric. A function at the top level of a module or a script.
            name: the beginning of the runs' names.
            generations: how many, those included that an earlier call has trained.
            engine: where the members train; processes of this machine by default, as many as it has cores.
            deadline: for each member in each generation [s]; None: none.
            heartbeat: how long a member may be silent, see `fan_out` [s]; None: for ever.
            progress: whether to draw progress bars.

        Raises:
            CheckpointNotFoundError: no member came through a generation; the message has the error of the first.
            ConflictError: a run of such a name started elsewhere.
            ConfigurationError: arguments that make no sense, values that do not fit the checkpoint's hyperparameters,
                or a script that makes this call outside of its main part.
            StorageError: the disk refused.
        """
        from simckpt.branching.generations import PopulationTraining

        check_origin(checkpoint)
        check_run_name(name)
        check_times(deadline, heartbeat)
        check_engine(engine)
        if not callable(train):
            message = f"train is a function, called as train(store, run, until_step=...), got {train!r}"
            raise ConfigurationError(message, keys=["train"])
        check_count(generations, policy="PopulationBasedTraining.train, generations:", key="generations")
        with contextlib.ExitStack() as stack:
            used = engine if engine is not None else stack.enter_context(LocalEngine())
            training = PopulationTraining(
                self,
                checkpoint,
                train,
                name=name,
                engine=used,
                deadline=deadline,
                heartbeat=heartbeat,
                progress=progress,
            )
            return training.run(generations)


def _sample(values: Range | Sequence[Any], draw: Callable[[], float]) -> Any:
    return values.sample(draw) if isinstance(values, Range) else _pick(values, draw)


def _pick(values: Sequence[Any], draw: Callable[[], float]) -> Any:
    return values[int(draw() * len(values))]


def _is_list(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0


def _is_share(value: Any, most: float) -> bool:
    return is_number(value) and 0 <= value <= most


def _is_factor(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _shown(score: float | None) -> str:
    return "no score" if score is None else f"score {score:.6g}"
