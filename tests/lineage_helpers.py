"""A store whose runs have histories of evaluations, as a loop with a rollback policy leaves them."""

from pathlib import Path

import numpy as np

from simckpt import Store
from simckpt.decisions import Decisions
from simckpt.state import encode
from simckpt.storage import CommitDraft, RunRecord, StoreFiles

METRIC = "eval/return"
EVERY = 10_000  # [env steps] between evaluations; a checkpoint at every second one


class Writer:
    """Writes one run: evaluations, checkpoints, rollbacks."""

    def __init__(self, files: StoreFiles, name: str, seed: int, *, parent: str | None = None) -> None:
        self.files, self.name, self.parent = files, name, parent
        self.rng = np.random.default_rng(seed)
        self.decisions = Decisions()
        self.ids: dict[int, str] = {}

    def train(self, start: int, end: int, level: float, growth: float, *, episodes: int = 10) -> None:
        for step in range(start + EVERY, end + 1, EVERY):
            level += growth
            values = level + self.rng.normal(0, 60 + abs(level) / 12, episodes)
            self.decisions.note(step, {METRIC: tuple(values.tolist())})
            if step % (2 * EVERY) == 0:
                self.commit(step, {METRIC: float(values.mean()), "train/loss": 1e4 / step})

    def commit(self, step: int, metrics: dict[str, float] | None = None, **others: object) -> str:
        draft = CommitDraft(others.pop("parent", self.parent), step, metrics or {}, **others)
        weights = self.rng.normal(size=(64, 17)) * step
        trees = {"agent": {"weight": weights, "bias": np.zeros(64)}, "checkpointer": self.decisions.state_dict()}
        encoded = {name: encode(tree) for name, tree in trees.items()}
        self.parent = self.ids[step] = self.files.commit(self.name, draft, encoded).record.id
        return self.parent

    def roll_back(self, to: int, *, level: int, reason: str, changes: dict[str, object]) -> None:
        left, target = self.parent, self.ids[to]
        saw = [[each.step, float(np.mean(each.returns)), len(each.returns)] for each in self.decisions.history(METRIC)]
        facts = {"step": saw[-1][0], "target_step": to, "level": level, "evaluations": len(saw), "reason": reason}
        self.decisions.evaluations[METRIC] = [each for each in self.decisions.history(METRIC) if each.step <= to]
        self.decisions.rollbacks.append(facts | {"changes": {}, "saw": saw[-10:]})
        rollback = {"abandoned": left, "level": level, "changes": changes, "reason": reason, "step": facts["step"]}
        self.commit(to, kind="rollback", parent=target, rollback=rollback)


def make_store(path: Path) -> Store:
    """Returns a store: a run that collapsed twice and went back, three branches, a post-mortem, a pruned checkpoint."""
    files = StoreFiles.create(path)
    files.write_run("ant-ppo", RunRecord("a" * 32, "ant-ppo", 1.7e9, {"learning_rate": 1e-3}))
    ant = Writer(files, "ant-ppo", 1)
    ant.train(0, 200_000, 0, 90)
    ant.train(200_000, 250_000, 1_700, -330)
    change = {"description": "Reseed()", "hyperparameters": {}}
    ant.roll_back(200_000, level=1, reason="eval/return fell from 1,790 to 210 (Welch p = 2e-9)", changes=change)
    ant.train(200_000, 240_000, 1_750, 60)
    ant.train(240_000, 270_000, 1_900, -500)
    change = {"description": "Reseed() & Scale(learning_rate=0.5)", "hyperparameters": {"learning_rate": 5e-4}}
    ant.roll_back(240_000, level=2, reason="eval/return fell from 1,950 to 470 (Welch p = 4e-7)", changes=change)
    ant.train(240_000, 400_000, 1_950, 60)
    head = ant.parent
    ant.commit(403_000, kind="exception")
    ant.parent = head
    files.prune("ant-ppo", 3, "KeepLast(20) keeps others")
    store = Store(path)
    growths = {"low": 70, "high": 10, "reseeded": 90}
    for place, (name, growth) in enumerate(growths.items()):
        overrides = {} if name == "reseeded" else {"learning_rate": 3e-4 if name == "low" else 3e-3}
        rng = "reseed" if name == "reseeded" else "continue"
        origin = store.run("ant-ppo").at(step=100_000)
        store.checkpoint(origin.id).branch(name, overrides, rng=rng)
        branch = Writer(files, name, 10 + place, parent=origin.id)
        branch.decisions.load_state_dict(origin["checkpointer"])
        branch.train(100_000, 300_000 - 40_000 * place, 900, growth)
    store.run("low").at(step=200_000).branch("lower", {"learning_rate": 1e-4})
    return store
