"""Allgather of torch tensors, with its gradient, and the reduction of sparse ones, which is made of it.

Thread: the caller's; gradients: autograd's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from horoclone.errors import Mismatch
from horoclone.ops import ALLGATHER, Average, Sum
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import rank
from horoclone.torch.operations import calls
from horoclone.torch.operations.all_reduce import allreduce
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph
from horoclone.torch.operations.handles import synchronize
from horoclone.torch.operations.tensors import learns, not_a_tensor


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather and returns a handle."""
    return calls.start(ALLGATHER, name, process_set, tensor)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates everybody's tensor along the first dimension, in rank order; first dimensions may differ.

    Differentiable (each rank gets its own rows of the averaged gradient, as in Horovod). A 0-d tensor is an error:
    Mismatch, or IndexError where it needs a gradient.
    """
    if learns((tensor,), name):
        return Allgather.apply(tensor, name, process_set)[0]
    return calls.call(ALLGATHER, name, process_set, tensor)


class Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, group: ProcessSet) -> Any:
        if not tensor.dim():
            raise IndexError(
                f"allgather {name or 'of an unnamed tensor'}: a 0-d tensor has no rows to gather. Reshape it to [1]."
            )
        ctx.arguments = (tensor.shape[0], name, group)
        return allgather(tensor, name, group), anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        rows, name, group = ctx.arguments
        reduced = allreduce(in_graph(ctx, grad), name=grad_name(name), op=Average, process_set=group)
        return reduced.narrow(0, rows_before(rows, group, name), rows), None, None


def _rank_in(process_set: ProcessSet) -> int:
    return rank() if process_set is global_process_set else (process_set.rank() or 0)


def rows_before(rows: int, process_set: ProcessSet, name: str | None) -> int:
    """How many rows the lower ranks contributed to an allgather to which this rank gave `rows`."""
    everybody = allgather(torch.tensor([rows], device="cpu"), grad_name(name) and f"{name}.rows", process_set)
    return int(everybody[: _rank_in(process_set)].sum())


# --- sparse allreduce ---


class SparseHandle:
    """Handle of a sparse reduction: call it, or pass it to `synchronize`, for the reduced sparse tensor."""

    def __init__(self, tensor: torch.Tensor, name: str, parts: tuple[int, int], divisor: int) -> None:
        self.parts = parts
        self._shape, self._name = tensor.shape, name
        self._divisor = divisor

    def __call__(self) -> torch.Tensor:
        indices, values = (synchronize(part) for part in self.parts)
        sizes = torch.tensor(self._shape[: indices.shape[1]], device=indices.device)
        if (indices >= sizes).any():  # torch would write outside of the dense tensor
            raise Mismatch(
                f"sparse allreduce {self._name!r}: other ranks have entries up to {indices.amax(0).tolist()}, outside "
                f"of the shape {list(self._shape)} of rank {rank()}. Every rank must submit one shape; do the ranks "
                "count different words?"
            )
        if self._divisor > 1:
            values = values / self._divisor
        return torch.sparse_coo_tensor(
            indices.t().contiguous(), values, self._shape, device=values.device, check_invariants=False
        )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Sums (or averages) a sparse COO tensor over the ranks by gathering everybody's indices and values.

    Returns a callable handle; the result is sparse, of the same shape, not coalesced, the same on every rank.
    """
    if op not in (Average, Sum):
        raise ValueError("sparse tensors can be reduced with op=hvd.Average and op=hvd.Sum only")
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(tensor, name)
    tensor = tensor.coalesce()
    indices = allgather_async(tensor.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor.values().contiguous(), f"{name}.values", process_set)
    return SparseHandle(tensor, name, (indices, values), (process_set.size() or 1) if op == Average else 1)
