"""The quick way to copy ordinary trees gives what the general one gives."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

from simckpt.errors import UnsupportedStateError
from simckpt.state import ObjectState, differences, encode
from simckpt.state.build import Builder
from simckpt.state.quick_copy import quick_copy
from simckpt.state.torch_components import ModuleHandle, OptimizerHandle
from simckpt.state.tree import copy_tree
from simckpt.state.walk import Copier


def general_copy(tree: object) -> object:
    copier = Copier()
    root = copier.walk(tree)
    return Builder(copier.nodes, None).build(root)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    module[2].weight = torch.nn.Parameter(module[2].weight.detach().t().contiguous().t())
    optimizer = torch.optim.AdamW(module.parameters(), amsgrad=True)
    module(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


MODULE, OPTIMIZER = trained()
SHARED = torch.arange(6.0)
EMPTY = np.zeros((0, 3))
TREES = {
    "module": ModuleHandle("m", MODULE)._live(),
    "optimizer": OptimizerHandle("o", OPTIMIZER)._live(),
    "aliases": [
        SHARED,
        {"same": SHARED, "view": SHARED.view(2, 3), "whole": SHARED[:]},
        EMPTY,
        EMPTY,
        np.zeros((0, 3)),
    ],
    "numbers": {1: [True, None, 2.5, float("nan"), "text"], None: (1, 2.0), 2.5: {}},
    "ordered": OrderedDict(b=np.arange(3), a=np.arange(8).reshape(2, 4).T),
    "object": ObjectState("a.B", {"x": np.zeros(3)}, [1, torch.zeros(2)]),
    "numpy and torch": [NUMPY := np.arange(4.0), torch.from_numpy(NUMPY)],
}


@pytest.mark.parametrize("name", TREES)
def test_it_equals_the_general_copy(name: str) -> None:
    tree = TREES[name]
    copy, expected = quick_copy(tree), general_copy(tree)
    assert copy is not NotImplemented
    assert differences(copy, expected) == []
    one, two = encode(copy), encode(expected)
    assert one.structure == two.structure
    assert {path: leaf.data.tobytes() for path, leaf in one.leaves.items()} == {
        path: leaf.data.tobytes() for path, leaf in two.leaves.items()
    }


def test_it_shares_no_memory() -> None:
    module, _ = trained()
    copy = quick_copy(ModuleHandle("m", module)._live())
    before = {name: tensor.clone() for name, tensor in copy.items.items()}
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.add_(1)
    assert all(torch.equal(copy.items[name], tensor) for name, tensor in before.items())


def test_attributes_of_an_ordered_dict_stay() -> None:
    copy = quick_copy(MODULE.state_dict())
    assert copy._metadata == MODULE.state_dict()._metadata
    assert copy._metadata is not MODULE.state_dict()._metadata


LIST: list = [1]
CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "tree",
    [
        [LIST, LIST],
        CYCLE,
        {"a": {1, 2}},
        {"p": torch.nn.Parameter(torch.zeros(2))},
        [np.array([object()])],
        {(1, 2): 3},
        ([1],),
        np.float32(1),
    ],
    ids=["shared list", "cycle", "set", "parameter", "objects", "tuple key", "list in a tuple", "numpy scalar"],
)
def test_what_is_out_of_the_ordinary_goes_the_general_way(tree: object) -> None:
    assert quick_copy(tree) is NotImplemented


def test_a_deep_tree_is_copied_all_the_same() -> None:
    tree: list = []
    for _ in range(10_000):
        tree = [tree]
    assert quick_copy(tree) is NotImplemented
    assert len(copy_tree(tree)) == 1


def test_a_tensor_that_cannot_be_captured_is_named_with_its_place() -> None:
    with pytest.raises(UnsupportedStateError, match="layer/weight"):
        copy_tree({"layer": {"weight": torch.zeros(3).to_sparse()}})
