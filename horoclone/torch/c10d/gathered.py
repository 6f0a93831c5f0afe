"""Reductions of torch.distributed that the core does not have: everybody's part is gathered and reduced on each rank.

Bitwise ones; for sums of sparse tensors see sparse.py.
"""

# mypy: disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from typing import TYPE_CHECKING, Any

import torch

from horoclone import ops
from horoclone.torch.c10d.tensors import BITWISE, Tensors, as_bytes, copy_apart
from horoclone.torch.c10d.work import Work
from horoclone.torch.operations.gpu import place_of, rows_of

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
