"""Saves of arrays that are no copies, and that another thread of the program changes meanwhile."""

import numpy as np
import pytest
from storage_helpers import leaf, new_store

import simckpt
from simckpt.errors import DamagedError
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, StoreFiles
from simckpt.storage.durable import Disk

RUN = "ant-ppo"


class Meddling(Disk):
    """Changes an array right before each write: after its digest was taken, and before its bytes are."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        self.array += 1
        return super().pwrite(descriptor, data, offset)


@pytest.mark.parametrize("size", [10, 131_072, 300_001], ids=["small", "one portion", "three portions"])
@pytest.mark.parametrize("lent", [True, False])
def test_what_is_digested_is_written_of_arrays_that_change(tmp_path, size: int, lent: bool) -> None:
    array = np.zeros(size)
    store = new_store(tmp_path / "store", disk=Meddling(array))
    array[:] = 0
    components = {"agent": Encoded({"w": leaf(array)}, b"{}")}
    with store.claim(RUN):
        store.publish(RUN, CommitDraft(None, 0), store.prepare(RUN, components, lent=lent))
    reader = StoreFiles.open(store.path)
    if not lent:
        # the check can fail: copies are not made of what is said to stay as it is
        with pytest.raises(DamagedError):
            reader.verify(RUN, 1)
        return
    reader.verify(RUN, 1)
    found = reader.read(RUN, 1)["agent"].leaves["w"].data
    # each portion is as it was at one moment
    assert all(len(set(found[start : start + 131_072])) == 1 for start in range(0, size, 131_072))
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("background", [None, "thread", "process"])
def test_parameters_that_change_after_a_save_are_not_in_it(tmp_path, background: str | None) -> None:
    """In the foreground no copy is made of them."""
    torch = pytest.importorskip("torch")
    agent = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(agent.parameters())
    run = simckpt.Store(tmp_path).start("a")
    components = {"agent": agent, "optimizer": optimizer}
    wanted = {}
    with run.checkpointer(components, save_when=simckpt.EverySteps(1), background=background) as checkpointer:
        for step in (1, 2, 3):
            agent(torch.ones(300)).sum().backward()
            optimizer.step()
            moments = optimizer.state[agent.weight]["exp_avg"]
            wanted[step] = (agent.weight.detach().clone(), moments.clone())
            checkpointer.step(step)
            with torch.no_grad():
                agent.weight.add_(1)
            checkpointer.wait()
    for checkpoint in run.checkpoints():
        checkpoint.restore(components)
        weight, moments = wanted.pop(checkpoint.step)
        assert torch.equal(agent.weight, weight)
        assert torch.equal(optimizer.state[agent.weight]["exp_avg"], moments)
    assert not wanted
    run.close()
