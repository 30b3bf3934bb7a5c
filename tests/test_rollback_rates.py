"""What a rollback multiplies where a scheduler has lowered a rate, and keeps no base of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simckpt
from simckpt.errors import RolledBack

RATE, FACTOR = 0.5, 0.25


def train(store: simckpt.Store, seen: list[float], changes: simckpt.Change | list[simckpt.Change]) -> None:
    """Learns until step 60, is cut once by the plateau at step 20, and collapses for good at step 120."""
    with store.start("a") as run:
        args = run.configure({"learning_rate": RATE})
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=args["learning_rate"])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=FACTOR)
        loop = simckpt.LoopState(step=0)
        components: dict[str, Any] = {"net": net, "optimizer": optimizer, "plateau": plateau, "loop": loop}
        checkpointer = run.checkpointer(
            {**components, "rng": simckpt.RNGStreams()},
            save_when=simckpt.EverySteps(10),
            hyperparameters=simckpt.Hyperparameters({"learning_rate": [optimizer, plateau]}),
            rollback=simckpt.RollbackPolicy("eval/return", target="last", changes=changes, max_rollbacks=2),
            background=None,
        )
        with checkpointer:
            checkpointer.restore_latest()
            seen.append(optimizer.param_groups[0]["lr"])
            while loop.step < 160:
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                loop.step += 10
                if loop.step == 20:
                    plateau.step(1.0)
                    plateau.step(1.0)
                level = 100.0 if loop.step <= 100 else 1.0
                returns = [level + 0.1 * each + 0.01 * loop.step for each in range(10)]
                checkpointer.step(loop.step, {"eval/return": returns})


def test_scale_multiplies_what_a_plateau_has_left_of_a_rate(tmp_path) -> None:
    store, seen = simckpt.Store(tmp_path / "s"), []
    changes = simckpt.Reseed() & simckpt.Scale(learning_rate=0.5)
    with pytest.raises(simckpt.RollbackLimitError):
        simckpt.supervise(train, store, seen, changes)
    # each start goes on from what it went back to; both times that is a state in which the plateau had cut once
    assert seen[0] == RATE
    assert seen[1:] == [RATE * FACTOR / 2, RATE * FACTOR / 4]
    last = [each for each in store.run("a").checkpoints() if each.kind == "rollback"][-1]
    assert last.rollback is not None
    assert last.rollback["changes"]["hyperparameters"] == {"learning_rate": RATE * FACTOR / 4}


def test_a_level_that_leaves_the_rate_alone_keeps_what_a_plateau_has_left_of_it(tmp_path) -> None:
    store, seen = simckpt.Store(tmp_path / "s"), []
    levels = [simckpt.Reseed() & simckpt.Scale(learning_rate=0.5), simckpt.Reseed()]
    with pytest.raises(RolledBack):
        train(store, seen, levels)
    with pytest.raises(RolledBack):
        train(store, seen, levels)
    with pytest.raises(simckpt.RollbackLimitError):
        train(store, seen, levels)
    assert seen[1] == RATE * FACTOR / 2
    last = [each for each in store.run("a").checkpoints() if each.kind == "rollback"][-1]
    (origin,) = [each for each in store.run("a").checkpoints() if each.id == last.parent]
    assert seen[2] == origin["optimizer"].items["param_groups"][0]["lr"]
