"""A small good store, and forgeries of it whose digests are right: sealed anew without the code under test."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from simckpt.state import LogColumn, LoopState, encode
from simckpt.storage import BranchRecord, CommitDraft, RunRecord, StartRecord, StoreFiles

RUN, BRANCH = "ant", "ant-low"
ROWS, NEW = 8, 4


def digest(data: bytes) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def trees(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "policy": {
            "weight": rng.standard_normal((4, 3)),
            "names": np.array(["left", "right"]),
            "when": np.array(["2026-11-30"], "datetime64[D]"),
            "record": np.zeros(2, [("a", "<f4"), ("b", "<i8")]),
            "layers": (8, 8),
            "tied": [1.5] * 70,
        },
        "loop": {
            "step": step,
            "big": 2**100,
            "best": float("-inf"),
            "seen": {(1, 2), "x"},
            "history": [b"abc", None, {"k": 1j}, range(3)],
            "empty": np.empty((0, 5), np.int32),
        },
        "rng": {"generator": np.random.default_rng(step), "legacy": np.random.RandomState(step)},
    }


def live() -> dict[str, Any]:
    """Live objects that the good store fits."""
    start = trees(0)
    return {
        "policy": LoopState(**start["policy"]),
        "loop": LoopState(**start["loop"]),
        "rng": LoopState(**start["rng"]),
        "replay": LoopState(rows=np.zeros((ROWS, 2)), added=0),
    }


def replay(step: int, pieces: tuple[Any, ...], *, new: int = NEW) -> dict[str, Any]:
    rows = np.arange(2.0 * NEW * step).reshape(-1, 2)
    return {"rows": LogColumn(rows[len(rows) - new :], len(rows), pieces), "added": len(rows)}


def build_store(path: Path) -> StoreFiles:
    """Returns a store with two checkpoints, a rollback and a tombstone between them, marks, a branch and a log."""
    store = StoreFiles.create(path)
    settings = {"learning_rate": 3e-4, "layers": (64, 64), "nested": {"clip": None}}
    git = {"commit": "c" * 40, "dirty": True, "diff": "+a", "diff_complete": True, "left_out": [], "untracked": []}
    store.write_run(RUN, RunRecord("a" * 32, RUN, 1.8e9, settings, git=None, versions={"python": "3"}, host="here"))
    start = StartRecord(1.8e9, settings, "exp", git, {"python": "3.11"}, "here", {"cpu": "x", "gpus": []})
    start_id = store.write_start(RUN, start)
    parent, pieces, records = None, (), []
    with store.claim(RUN):
        for step in (1, 2):
            components = {name: encode(tree) for name, tree in trees(step).items()}
            components["replay"] = encode(replay(step, pieces))
            draft = CommitDraft(
                parent, step, {"loss": 1.0 / step}, versions={"python": "3"}, host="here", start=start_id
            )
            commit = store.commit(RUN, draft, components)
            parent, pieces = commit.record.id, commit.leaves["replay/rows"].pieces
            records.append(commit.record)
        rollback = {
            "abandoned": records[1].id,
            "level": 1,
            "changes": {"hyperparameters": {"learning_rate": 1e-4}},
            "reason": "fell",
            "step": 2,
        }
        draft = CommitDraft(records[0].id, 1, {"loss": 1.0}, kind="rollback", rollback=rollback, start=start_id)
        components = {name: encode(tree) for name, tree in trees(1).items()}
        components["replay"] = encode(replay(2, pieces, new=0))
        store.commit(RUN, draft, components)
        draft = CommitDraft(records[1].id, 3, {}, kind="exception", start=start_id)
        store.commit(RUN, draft, components)
        store.prune(RUN, 4, "to show a tombstone")
        store.log_event(RUN, {"event": "saved"})
    store.tag(RUN, 1, "good")
    store.pin(RUN, 2)
    store.add_metrics(RUN, 1, {"late": 2.0})
    branch = BranchRecord(RUN, 1, 1, {"learning_rate": 1e-5}, "reseed")
    store.write_run(BRANCH, RunRecord("b" * 32, BRANCH, 1.8e9 + 1, settings, origin=records[0].id, branch=branch))
    return store


def seal(body: bytes) -> bytes:
    return body + f',\n "digest": "{digest(body)}"\n}}\n'.encode()


def body_of(data: bytes) -> bytes:
    return data[: data.rindex(b',\n "digest"')]


def dumped(document: object) -> bytes:
    """JSON of a document of any depth, however deep in calls one is: the limit counts both."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 5000)
    try:
        return json.dumps(document).encode()
    finally:
        sys.setrecursionlimit(limit)


class Forge:
    """A copy of the good store that can be changed; every change leaves the digests right."""

    def __init__(self, good: Path, root: Path) -> None:
        shutil.copytree(good, root, symlinks=True)
        self.root = root
        self.run = root / "runs" / RUN
        self.checkpoint = self.run / "checkpoints" / "00000002"

    def content(self, path: Path) -> dict[str, Any]:
        found = json.loads(path.read_bytes())
        found.pop("digest")
        return found

    def write(self, path: Path, content: dict[str, Any] | bytes) -> None:
        """Replaces a record by fields, or by the body of one (up to where the digest stands)."""
        if isinstance(content, dict):
            lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
            content = ("{\n" + ",\n".join(lines)).encode()
        data = seal(content)
        path.write_bytes(data)
        if path.name == "leaves.json":
            commit = path.with_name("commit.json")
            fields = self.content(commit)
            fields["files"]["leaves.json"] = {"size": len(data), "digest": digest(data)}
            self.write(commit, fields)

    def edit(self, path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        fields = self.content(path)
        found = change(fields)
        self.write(path, fields if found is None else found)

    def edit_start(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes the record of the start and gives it the name that its content has."""
        (path,) = (self.run / "starts").iterdir()
        fields = self.content(path)
        change(fields)
        path.unlink()
        named = {
            "hyperparameters": fields["hyperparameters"],
            **{key: fields[key] for key in ("experiment", "git", "versions", "host", "device")},
        }
        name = xxhash.xxh3_128_hexdigest(json.dumps(named, sort_keys=True).encode())
        self.write(path.with_name(f"{name}.json"), fields)
        for commit in self.run.glob("checkpoints/*/commit.json"):
            if "start" in self.content(commit):
                self.edit(commit, lambda each: each.update(start=name))

    def leaf(self, path: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes one line of the index."""

        def changed(fields: dict[str, Any]) -> None:
            (line,) = [line for line in fields["leaves"] if line["path"] == path]
            change(line)

        self.edit(self.checkpoint / "leaves.json", changed)

    def data(self, path: str, data: bytes, **fields: Any) -> None:
        """Gives a leaf other bytes, at the end of the state file."""
        state = self.checkpoint / "state.h5"
        offset = state.stat().st_size
        with state.open("ab") as file:
            file.write(data)
        self.leaf(
            path,
            lambda line: line.update(
                {"shape": [len(data)], "offset": offset, "size": len(data), "digest": digest(data), **fields}
            ),
        )
        self.vouch()

    def tree(self, component: str, document: dict[str, Any] | bytes) -> None:
        """Gives a component another structure."""
        data = document if isinstance(document, bytes) else dumped(document)
        self.data(f"{component}/_tree", data)

    def vouch(self) -> None:
        """Gives the state file the size and the digest of the rest that it has now."""
        data = (self.checkpoint / "state.h5").read_bytes()
        leaves = self.content(self.checkpoint / "leaves.json")["leaves"]
        spans = sorted((leaf["offset"], leaf["size"]) for leaf in leaves if leaf.get("offset") is not None)
        rest, position = [], 0
        for offset, size in spans:
            rest.append(data[position:offset])
            position = max(position, offset + size)
        rest.append(data[position:])
        fields = {"size": len(data), "metadata": digest(b"".join(rest))}
        self.edit(self.checkpoint / "commit.json", lambda each: each["files"].update({"state.h5": fields}))
