"""Starts `training_runs.train` on ranks, and looks at what it has left."""

from pathlib import Path
from typing import Any

from ranks import Ranks
from training_runs import train

import simckpt

LIMIT = 150.0  # [s] a loaded machine may take


def until(
    rank: int, size: int, store: str, step: int, layout: str = "ddp", options: dict[str, Any] | None = None
) -> Any:
    return train(rank, size, store, step, layout=layout, **(options or {}))


def trained(
    ranks: Ranks, size: int, store: Path, step: int, layout: str = "ddp", **options: Any
) -> list[dict[str, str]]:
    found: list[dict[str, str]] = ranks.run(size, until, str(store), step, layout, options, limit=LIMIT)
    return found


def steps(store: Path) -> list[int]:
    return [each.step for each in simckpt.Store(store).run("cart").checkpoints()]


def leftovers(store: Path) -> list[str]:
    return [path.name for path in (store / "tmp").iterdir()]
