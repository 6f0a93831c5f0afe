"""What the gradients of all operations share: the names of their transfers, and which reductions have one.

A named operation names the transfer of its gradient NAME.grad, so that ranks agree whatever the order of backward.
"""

from __future__ import annotations

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


def scaled_share(grad: torch.Tensor, op: int, group: ProcessSet, scale: float) -> torch.Tensor:
    """The gradient of a reducescatter's share, before it is gathered."""
    factor = scale * ((group.size() or 1) if op == Sum else 1)
    return (grad if factor == 1.0 else grad * factor).contiguous()
