"""One commit of what ranks have prepared, and what becomes of that if there is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from storage_helpers import new_store

from simckpt.distributed.committing import commit_together
from simckpt.distributed.voting import Ballot
from simckpt.distributed.world import find_world
from simckpt.errors import ConflictError, SimckptError
from simckpt.state.tree import encode
from simckpt.storage import CommitDraft, Shard, StoreFiles

RUN = "ant-ppo"


def committed(rank: int, size: int, path: str, steps: list[int], fails: bool) -> Any:
    """Each rank says what it saves; rank 0 may fail to publish it."""
    files, world = StoreFiles.open(path), find_world()
    components = {f"loop@{rank}": encode({"step": steps[rank], "x": np.full(3, rank)})}
    prepared = files.prepare(RUN, components, shard=Shard(rank, size))
    heard: list[Any] = []

    def publish(of_ranks: Any, facts: Any) -> Any:
        heard.append(facts)
        if fails:
            raise ConflictError("somebody else was first")
        return files.publish_shards(RUN, CommitDraft(None, steps[0]), of_ranks)

    ballot = Ballot(world.store, rank, size, "save", 20.0, 20.0)
    try:
        commit = commit_together(files, RUN, prepared, ballot, publish, same={"step": steps[rank]}, facts=rank)
    except SimckptError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None), heard
    finally:
        world.largest(0)
    return commit.record.step, commit.record.seq, heard


def test_all_ranks_hear_of_the_commit_and_rank_0_of_the_facts(ranks: Ranks, tmp_path: Path) -> None:
    path = new_store(tmp_path / "store").path
    first, second = ranks.run(2, committed, str(path), [10, 10], False)
    assert first == (10, 1, [[0, 1]])
    assert second == (10, 1, [])
    assert not list((path / "tmp").iterdir())
    assert set(StoreFiles.open(path).read(RUN, 1)) == {"loop@0", "loop@1"}


@pytest.mark.parametrize(
    ("steps", "fails", "expected"),
    [
        ([10, 11], False, ("CoordinationError", "ranks 0 and 1 save different things", "step: 10 and 11")),
        ([10, 10], True, ("ConflictError", "somebody else was first", "")),
    ],
)
def test_what_is_not_committed_leaves_nothing_and_raises_the_same_on_all_ranks(
    ranks: Ranks, tmp_path: Path, steps: list[int], fails: bool, expected: tuple[str, str, str]
) -> None:
    path = new_store(tmp_path / "store").path
    found = ranks.run(2, committed, str(path), steps, fails)
    for kind, message, odd, _ in found:
        assert kind == expected[0]
        assert expected[1] in message
        assert expected[2] in message
        if kind == "CoordinationError":
            assert odd == (1,)
    assert StoreFiles.open(path).sequence(RUN) == []
    assert not list((path / "tmp").iterdir())
