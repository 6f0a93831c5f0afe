"""Sparse tensors in a process group: an allreduce gathers all ranks' entries and adds up those at the same index.

Each rank's indices, values and the size of the whole tensor, on which the ranks must agree, travel in one group of
allgathers. The entries are added in the order of the ranks, so all ranks get the same bits.
"""

# mypy: disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from horoclone import ops
from horoclone.errors import Mismatch
from horoclone.torch.c10d.tensors import number_at, reduction
from horoclone.torch.operations.gpu import also_used_at, place_of, rows_of

if TYPE_CHECKING:
    from horoclone._core import Runtime

Finish = Callable[["Runtime", int], None]

_RedOp: Any = dist.ReduceOp.RedOpType
ADDITIONS = (_RedOp.SUM, _RedOp.AVG, _RedOp.PREMUL_SUM)


def sparse_among(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The sparse tensor of a call that takes one; None when all are dense. ValueError when one is among several."""
    if not any(tensor.is_sparse for tensor in tensors):
        return None
    if len(tensors) > 1:
        raise ValueError(
            "all_reduce of several tensors takes dense ones only: pass sparse tensors one by one"
        )
    return tensors[0]


def start_sparse_sum(
    submit_group: Callable[..., int], size: int, tensor: torch.Tensor, opts: Any
) -> tuple[int, Any, Finish]:
    """(handle, what must live until it is done, what puts the sum into `tensor`, coalesced).

    tensor: torch.sparse_coo of any sparse and dense dimensions, in host memory or on a GPU; how many entries it has
    may differ from rank to rank. ValueError for other reductions than SUM, AVG and PREMUL_SUM; Mismatch, from wait(),
    when the ranks' tensors differ in size, sparse dimensions or dtype.
    """
    kind, _, factor = reduction(opts)
    if kind not in ADDITIONS:
        raise ValueError("all_reduce of a sparse tensor takes SUM, AVG and PREMUL_SUM only")
    if kind == _RedOp.AVG and not tensor.dtype.is_floating_point:
        raise ValueError(f"the average of a sparse tensor needs floating-point values, not {tensor.dtype}")
    mine = tensor.detach().coalesce()
    places = mine.indices().t().contiguous()
    values = mine.values().contiguous()
    if factor != 1.0:
        values = values * factor
    whole = torch.tensor([list(tensor.shape)], dtype=torch.int64, device=tensor.device)
    sent = (places, values, whole)
    place = place_of(values)
    handle = submit_group(
        ops.ALLGATHER, sources=sent, targets=None, dtypes=[number_at(t) for t in sent], place=place
    )

    def finish(runtime: Runtime, handle: int) -> None:
        everywhere, entries, wholes = (
            rows_of(runtime, handle, i, like, place) for i, like in enumerate(sent)
        )
        shapes = wholes.tolist()
        if any(shape != shapes[0] for shape in shapes):
            raise Mismatch(f"all_reduce: the ranks' sparse tensors differ in size: {shapes}, by rank")
        total = torch.sparse_coo_tensor(
            everywhere.t(), entries, shapes[0], device=entries.device, check_invariants=False
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total / size if kind == _RedOp.AVG else total)  # in new memory
            also_used_at(place, (tensor._indices(), tensor._values()))

    return handle, sent, finish
