"""torch tensors in environments, without importing torch: it is loaded already if there is a tensor."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from simckpt.sim.objects.kind import MISSING, Capture, Child, Kind, Matching, Rebuild, Unsupported
from simckpt.state.nodes import ObjectState

TENSOR = "torch.Tensor"


def torch_module() -> Any:
    """Returns torch if the program has loaded it, else None."""
    return sys.modules.get("torch")


class TensorKind(Kind):
    """Tensors, written in place. Plain ones stand in the tree as they are; others carry device, gradient and flags."""

    def capture(self, run: Capture, value: Any) -> Any:
        node = run.memo.get(id(value))
        if node is not None:
            return node
        torch = torch_module()
        if value.grad_fn is not None:
            raise Unsupported("torch.Tensor", "it belongs to an autograd graph; detach it")
        if value.layout is not torch.strided or value.is_quantized:
            raise Unsupported("torch.Tensor", f"its layout is {value.layout}")
        content = value.detach().clone()
        if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
            run.memo[id(value)] = content
            return content
        node = run.memo[id(value)] = ObjectState(TENSOR, items=content.cpu())
        node.attributes["device"] = str(value.device)
        node.attributes["requires_grad"] = bool(value.requires_grad)
        node.attributes["parameter"] = isinstance(value, torch.nn.Parameter)
        node.attributes["grad"] = None if value.grad is None else run.child(value.grad, "grad")
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        torch = torch_module()
        if torch is None or not isinstance(live, torch.Tensor):
            return False
        saved = node.items if isinstance(node, ObjectState) else node
        parameter = isinstance(node, ObjectState) and node.attributes["parameter"]
        return (
            live.shape == saved.shape
            and live.dtype == saved.dtype
            and live.is_leaf
            and isinstance(live, torch.nn.Parameter) == parameter
        )

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        if isinstance(node, ObjectState):
            yield "grad", node.attributes["grad"], MISSING if live is MISSING else live.grad

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        torch = torch_module()
        if not isinstance(node, ObjectState):
            return node.clone()
        made = node.items.clone().to(node.attributes["device"])
        return torch.nn.Parameter(made) if node.attributes["parameter"] else made

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        torch = torch_module()
        saved = node.items if isinstance(node, ObjectState) else node
        with torch.no_grad():
            # copy_ keeps the bits of NaNs: no conversion takes place
            target.copy_(saved)
        if isinstance(node, ObjectState):
            target.requires_grad_(node.attributes["requires_grad"])
            target.grad = rebuild.value(node.attributes["grad"], target.grad)
        elif target.requires_grad:
            target.requires_grad_(False)


class TorchConstantKind(Kind):
    """torch dtypes, devices and sizes, which are immutable and stand in a tree as they are."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        return value

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        return live if type(live) is type(node) and live == node else node


TENSORS = TensorKind()
CONSTANTS = TorchConstantKind()
BY_NAME: dict[str, Kind] = {TENSOR: TENSORS}


def kind_of(cls: type) -> Kind | None:
    """Returns the kind of a torch class, or None if it is not one of these."""
    torch = torch_module()
    if torch is None:
        return None
    if issubclass(cls, torch.Tensor):
        return TENSORS if cls in (torch.Tensor, torch.nn.Parameter) else None
    return CONSTANTS if cls in (torch.dtype, torch.device, torch.Size) else None
