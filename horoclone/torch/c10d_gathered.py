"""Reductions of torch.distributed that the core does not have: everybody's part is gathered and reduced on each rank.

Bitwise ones, and sums of sparse tensors (gradients of nn.Embedding(sparse=True) under DDP). See c10d.py.
"""

# mypy: disable-error-code="misc, no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce as fold
from typing import TYPE_CHECKING, Any

import torch

from horoclone import ops
from horoclone.torch.c10d_tensors import BITWISE, Tensors, as_bytes, copy_apart
from horoclone.torch.c10d_work import Work
from horoclone.torch.gpu import place_of, rows_of

if TYPE_CHECKING:
    from horoclone._core import Runtime


def reduce_bits(group: Any, tensors: Tensors, kind: Any, root: int | None = None) -> Work:
    """root None: for everybody."""
    operation: Callable[..., torch.Tensor] = BITWISE[kind]
    if any(t.dtype.is_floating_point or t.is_complex() for t in tensors):
        raise ValueError("bitwise reductions need whole numbers or bool")
    flat = torch.cat([as_bytes(t) for t in tensors])

    def finish(runtime: Runtime, handle: int) -> None:
        rows = rows_of(runtime, handle, 0, flat, place_of(flat)).view(group.size(), -1)
        copy_apart(fold(operation, rows), tensors)

    if root is None:
        return group._submit(ops.ALLGATHER, flat, None, outputs=tensors, finish=finish)  # type: ignore[no-any-return]
    here = finish if root == group.rank() else None
    return group._submit(ops.GATHER, flat, None, root=root, outputs=tensors, finish=here)  # type: ignore[no-any-return]


def sum_sparse(group: Any, tensors: Tensors, reduce: int, factor: float) -> Work:
    """The sum (or average) of one torch.sparse_coo tensor in place, coalesced. Ranks may have different indices and
    numbers of them; ValueError from wait() where sizes or dtypes differ."""
    if len(tensors) != 1 or tensors[0].layout is not torch.sparse_coo:
        raise ValueError("all_reduce of sparse tensors takes one tensor, of layout torch.sparse_coo")
    if reduce not in (ops.Sum, ops.Average):
        raise ValueError("all_reduce of a sparse tensor knows SUM and AVG only")
    (tensor,) = tensors
    mine = tensor.detach().coalesce()
    facts = torch.tensor([mine._nnz(), mine.sparse_dim(), *mine.shape])
    mark = (str(mine.dtype).encode() + b" " * 24)[:24]
    head = torch.cat([as_bytes(facts), torch.frombuffer(bytearray(mark), dtype=torch.uint8)])
    parts = [as_bytes(part.contiguous()) for part in (mine.indices(), mine.values())]
    data = torch.cat([head.to(mine.device), *parts])

    def take_apart(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = int(rows[:8].clone().view(torch.int64)) if rows.numel() >= head.numel() else -1
        if count < 0 or not torch.equal(rows[8 : head.numel()].cpu(), head[8:]):
            raise ValueError(
                f"all_reduce of a sparse tensor: another rank has another size or dtype than {tuple(mine.shape)}, "
                f"{mine.dtype}"
            )
        shape = (count, *mine.values().shape[1:])
        sizes = [count * mine.sparse_dim() * 8, math.prod(shape) * mine.dtype.itemsize]
        indices, values, rest = rows[head.numel() :].split([*sizes, rows.numel() - head.numel() - sum(sizes)])
        # Cloned: a view as numbers needs their alignment.
        return (
            indices.clone().view(torch.int64).view(mine.sparse_dim(), count),
            values.clone().view(mine.dtype).view(shape),
            rest,
        )

    def finish(runtime: Runtime, handle: int) -> None:
        rest = rows_of(runtime, handle, 0, data, place_of(data)).reshape(-1)
        indices, values = [], []
        for _ in range(group.size()):
            its_indices, its_values, rest = take_apart(rest)
            indices.append(its_indices)
            values.append(its_values)
        found = (torch.cat(indices, 1), torch.cat(values), mine.shape)
        total = torch.sparse_coo_tensor(
            *found, check_invariants=False
        ).coalesce()  # each rank's own were valid
        scale = factor / group.size() if reduce == ops.Average else factor
        with torch.no_grad():  # detach() would give a tensor with indices of its own
            tensor.copy_(total if scale == 1.0 else (total * scale).to(total.dtype))

    return group._submit(ops.ALLGATHER, data, None, outputs=tensors, finish=finish)  # type: ignore[no-any-return]
