"""How ranks are found, and what one process pays for it."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from ranks import Ranks

from simckpt.distributed.world import find_world
from simckpt.errors import ConfigurationError


def test_one_process_has_no_ranks_and_does_not_import_torch() -> None:
    code = "import sys; from simckpt.distributed.world import find_world; print(find_world(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


def test_ranks_that_were_not_set_up_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_world() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match=r"started 4 ranks: call torch.distributed.init_process_group"):
        find_world()


def worlds(rank: int, size: int) -> object:
    first, second = find_world(), find_world()
    return {
        "alone": first is None,
        "ids": None if first is None else (first.id, second.id),
        "exchanged": None if first is None else [first.exchange({"rank": rank, "n": n}) for n in range(3)],
        "largest": None if first is None else first.largest(rank, -rank, 2**40 * rank),
        "own group": None if first is None else first.group is not dist.group.WORLD,
    }


def test_ranks_find_each_other_and_exchange_values(ranks: Ranks) -> None:
    found = ranks.run(3, worlds)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0]["ids"])) == 2
    assert found[0]["exchanged"] == [[{"rank": rank, "n": n} for rank in range(3)] for n in range(3)]
    assert found[0]["largest"] == (2, 0, 2**41)
    assert found[0]["own group"]


def test_a_process_group_of_one_is_one_process(ranks: Ranks) -> None:
    assert ranks.run(1, worlds)[0]["alone"]
