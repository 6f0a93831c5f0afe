"""What the gradients of all operations share: the names of their transfers, and which reductions have one.

A named operation names the transfer of its gradient NAME.grad, so that ranks agree whatever the order of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horoclone.errors import Unsupported
from horoclone.ops import REDUCE_NAMES, Average, Sum
from horoclone.process_sets import ProcessSet


def grad_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def require_linear(op: int, what: str) -> None:
    if op not in (Average, Sum):
        raise Unsupported(
            f"{what} with op={REDUCE_NAMES[op]} has no gradient here: only Average and Sum are linear. Call it on "
            "tensor.detach() if the gradient is not wanted."
        )


def anchor(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """For in_graph(): one more result of the operation on `tensors`, without elements; called in its forward."""
    made = next((tensor for tensor in tensors if tensor.requires_grad), tensors[0]).new_empty(0)
    ctx.save_for_backward(made)
    return made


def in_graph(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """The gradient, contiguous, and in a backward that builds a graph a function of the operation's result.

    A rank whose loss is linear in the result has a constant gradient where another one has not. Both have to take part
    in the transfers of the second backward: one would wait for the other.
    """
    if torch.is_grad_enabled():
        grad = grad + ctx.saved_tensors[0].sum().to(grad)  # of no elements: 0
    return grad.contiguous()


def zeros_of(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros that belong to the graph of `tensor`: the gradient of a rank whose values went nowhere."""
    return tensor.new_zeros(shape) + tensor.flatten()[:0].sum()


def share_scale(op: int, group: ProcessSet, scale: float) -> float:
    """By what Horovod multiplies the gradient of a reducescatter's share, before it is gathered."""
    return scale * ((group.size() or 1) if op == Sum else 1)
