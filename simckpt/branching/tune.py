"""Ray Tune over branches: trials are runs of a store, and what Tune calls a checkpoint is a pointer into it.

Tune's schedulers move such pointers from trial to trial; each move becomes a branch, so that the store has the lineage.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simckpt import configuration
from simckpt.branching.arguments import check_origin, check_rng
from simckpt.branching.functions import check_call, described, function_of
from simckpt.branching.generations import result_at
from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, ConfigurationError
from simckpt.policies.arguments import check_count, check_metric
from simckpt.rollback import supervise
from simckpt.run import Run
from simckpt.storage import durable
from simckpt.storage.names import check_run_name
from simckpt.store import Store

POINTER = "simckpt.json"  # the file in Tune's checkpoint folder


def trainable(
    train: Callable[..., object],
    checkpoint: Checkpoint,
    *,
    metric: str,
    interval: int,
    name: str = "tune",
    rng: str = "reseed",
) -> type[Any]:
    """Returns a `ray.tune.Trainable` whose trials are branches of a checkpoint.

    ```python
    trial = simckpt.branching.tune.trainable(train, run.at(step=0), metric="eval/return", interval=50_000)
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=1,
        hyperparam_mutations={"learning_rate": tune.loguniform(1e-5, 1e-2)},
    )
    tune.Tuner(
        trial, param_space={"learning_rate": tune.loguniform(1e-5, 1e-2)},
        tune_config=tune.TuneConfig(metric="eval/return", mode="max", scheduler=scheduler, num_samples=8),
    ).fit()
    ```

    Trial `t` is the run `<name>-t`. When Tune gives it another trial's checkpoint, or other hyperparameters, it goes on
    as a branch, `<name>-t-2` and so on. A checkpoint that Tune has a pointer to is pinned, for Tune does not say when
    it is done with one; `Checkpoint.unpin` ends that. Results have the metrics, and `run`, `step` and `checkpoint`.

    Args:
        train: called as `train(store, run, until_step=...)`, see `PopulationBasedTraining.train`; in the trial's
            process, once for each iteration.
        checkpoint: where all trials start from. Tune's configuration holds hyperparameters of it, and nothing else.
        metric: that `train` saves with the checkpoint at the end of each iteration.
        interval: the length of an iteration [env steps].
        name: the beginning of the runs' names.
        rng: "reseed" or "continue", see `Checkpoint.branch`.

    Raises:
        ConfigurationError: Ray Tune is not installed, another process cannot find `train`, or another argument makes no
            sense.
    """
    try:
        from ray import tune
    except ImportError as error:
        raise ConfigurationError('Ray Tune is needed: pip install "simckpt[ray]"') from error

    check_origin(checkpoint)
    check_metric(metric, "max", policy="trainable")
    check_count(interval, policy="trainable", key="interval")
    check_run_name(name)
    check_rng(rng)
    store, origin, path = str(checkpoint.files.path.absolute()), checkpoint.id, list(sys.path)
    function = described(train)
    check_call(train, store, name, until_step=interval)

    base: Any = tune.Trainable

    class Branching(base):  # type: ignore[misc]
        """One trial; Tune makes it in a process of its own."""

        def setup(self, config: dict[str, Any]) -> None:
            sys.path.extend(entry for entry in path if entry not in sys.path)
            self.trial = Trial(function_of(function), Store(store).checkpoint(origin), metric, interval, name, rng)
            self.reset_config(config)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.trial.begin(str(self.trial_id), new_config)
            return True

        def step(self) -> dict[str, Any]:
            return self.trial.step(self.iteration + 1)

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self.trial.save(checkpoint_dir)

        def load_checkpoint(self, checkpoint: str) -> None:
            self.trial.load(checkpoint)

    return Branching


class Trial:
    """What a trial of Tune does with the store; `trainable` tells the arguments."""

    def __init__(
        self,
        train: Callable[..., object],
        origin: Checkpoint,
        metric: str,
        interval: int,
        name: str,
        rng: str,
    ) -> None:
        self._train = train
        self._origin = origin
        self._files = origin.files
        self._metric = metric
        self._interval = interval
        self._name = name
        self._rng = rng
        self._prefix = ""
        self._config: dict[str, Any] = {}
        self._at = origin  # the newest result, or what was loaded
        self._run: Run | None = None

    def begin(self, trial: str, config: Mapping[str, Any]) -> None:
        """Becomes the trial of that id, from the origin on, with the hyperparameters of `config`."""
        self._prefix = f"{self._name}-{trial}"
        self._config = {key: configuration.plain(key, value) for key, value in config.items()}
        self._at, self._run = self._origin, None

    def step(self, iteration: int) -> dict[str, Any]:
        """Trains to the end of an iteration (from 1 on), and returns its result.

        Raises:
            CheckpointNotFoundError: `train` returned without a checkpoint that has the metric.
        """
        if self._run is None:
            self._run = self._branch(self._origin)
        until = self._origin.step + iteration * self._interval
        supervise(self._train, str(self._files.path), self._run.name, until_step=until)
        result = result_at(self._run, until, self._metric)
        if result is None or result.checkpoint is None:
            raise CheckpointNotFoundError(
                f"the training of run {self._run.name!r} returned without a checkpoint at step {until:,} that has "
                f"{self._metric!r}"
            )
        self._at = result.checkpoint
        return {**self._at.metrics, "run": self._at.run, "step": self._at.step, "checkpoint": self._at.id}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the pointer to the newest result, and pins that."""
        self._at.pin()
        pointer = {"store": str(self._files.path), "run": self._at.run, "checkpoint": self._at.id}
        durable.write_record(durable.Disk(), Path(folder) / POINTER, json.dumps(pointer).encode())

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Goes on from a pointer: in its run, if that is the trial's own with these hyperparameters; else in a branch.

        Raises:
            CheckpointNotFoundError: the checkpoint is gone.
        """
        pointer = json.loads((Path(folder) / POINTER).read_bytes())
        self._at = Store(self._files.path).checkpoint(pointer["checkpoint"])
        own = self._at.run in self._runs().values()
        in_run = Run(self._files, self._at.run) if own else None
        self._run = in_run if in_run is not None and self._fits(in_run) else self._branch(self._at)

    def _runs(self) -> dict[int, str]:
        """Returns {number: name} of the trial's runs, in the order in which they were made."""
        pattern = re.compile(re.escape(self._prefix) + "(?:-([0-9]+))?")
        matches = filter(None, map(pattern.fullmatch, self._files.runs()))
        return dict(sorted((int(match[1] or 1), match[0]) for match in matches))

    def _fits(self, run: Run) -> bool:
        return all(key in run.hyperparameters and run.hyperparameters[key] == self._config[key] for key in self._config)

    def _branch(self, checkpoint: Checkpoint) -> Run:
        """Returns a branch of a checkpoint with the trial's hyperparameters; the last one made, if it is just that."""
        made = self._runs()
        newest = max(made, default=0)
        if made:
            last = Run(self._files, made[newest])
            if last.record.origin == checkpoint.id and self._fits(last):
                return last  # the trial failed before its first result in it
        values = checkpoint.hyperparameters
        changed = {key: value for key, value in self._config.items() if key not in values or values[key] != value}
        name = f"{self._prefix}-{newest + 1}" if made else self._prefix
        return checkpoint.branch(name, changed, rng=self._rng)
