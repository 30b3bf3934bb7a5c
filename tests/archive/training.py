"""A small training whose every number depends on all before it, with a replay buffer and random streams."""

from types import SimpleNamespace

import numpy as np
from examples import Counter

import simckpt

SPACE = SimpleNamespace(shape=(3,), dtype=np.dtype(np.float32))


def parts() -> dict:
    rng = np.random.default_rng(7)
    return {
        "counter": Counter(),
        "buffer": simckpt.ReplayBuffer(25, SPACE, SPACE, num_envs=2, seed=3),
        "rng": simckpt.RNGStreams(generator=rng),
        "loop": simckpt.LoopState(step=0, generator=rng),
    }


def advance(made: dict) -> None:
    rng, buffer, counter = made["loop"].generator, made["buffer"], made["counter"]
    rows = rng.standard_normal((2, 3)).astype(np.float32)
    buffer.add(rows, rows, rng.standard_normal(2), np.zeros(2, bool), np.zeros(2, bool), rows + 1)
    counter.advance()
    counter.values += float(buffer.sample(4).rewards.sum()) + float(rng.standard_normal())
    made["loop"].step += 1


def train(
    store: simckpt.Store, until: int, *, run: str = "a", keep=None, started=lambda: None, damaged: str = "fall back"
) -> dict:
    """Trains to a step, going on where the store has it; returns the parts."""
    made = parts()
    with store.start(run) as opened:
        checkpointer = opened.checkpointer(made, save_when=simckpt.EverySteps(10), keep=keep)
        with checkpointer:
            checkpointer.restore_latest(damaged=damaged)
            started()
            while made["loop"].step < until:
                advance(made)
                checkpointer.step(made["loop"].step, {"count": float(made["counter"].count)})
    return made


def bits(made: dict) -> bytes:
    columns = (made["buffer"].observations, made["buffer"].rewards)
    return made["counter"].values.tobytes() + b"".join(np.ascontiguousarray(each).tobytes() for each in columns)
