"""Checks for arguments of single operations, which fail with HorovodInternalError as in Horovod. Thread: any."""

from __future__ import annotations

from typing import Any

import torch

from horoclone.arguments import SPLITS, check_compression, given, is_integer, wrong_type
from horoclone.errors import InvalidArgument
from horoclone.ops import REDUCE_NAMES, Sum, resolve_reduce
from horoclone.runtime import native
from horoclone.torch.operations.tensors import is_compiling, not_a_tensor


def _refusal(what: str, name: str | None, why: str) -> InvalidArgument:
    label = f"{what} {name!r}" if name else f"unnamed {what}"
    return InvalidArgument(f"rank {native().rank}: {label}: {why}")


def share_reduce(op: int, name: str | None) -> int:
    """The reduction of a reducescatter; InvalidArgument for all but Average and Sum."""
    reduce = resolve_reduce(None, op)
    if reduce > Sum:
        why = (
            f"op={REDUCE_NAMES[reduce]}: Reducescatter currently only supports AVERAGE and SUM. Pass op=Sum or "
            "op=Average, or take this rank's rows of an allreduce."
        )
        raise _refusal("reducescatter", name, why)
    return reduce


def rows_to_send(splits: Any, name: str | None) -> list[int] | None:
    """The splits of an alltoall as a list; ValueError for a tensor that is not 1-d or not int32, InvalidArgument for
    negative entries."""
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1:
            raise ValueError("alltoall expects a 1D splits tensor")
        if splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects a 32-bit integer splits tensor, not {splits.dtype}")
        rows: list[int] = splits.tolist()
    else:
        if isinstance(splits, (str, bytes)) or not hasattr(splits, "__iter__"):
            raise wrong_type("alltoall", "splits", splits, SPLITS)
        listed = list(splits)
        for count in listed:
            if not is_integer(count):
                raise wrong_type("alltoall", "splits", splits, f"{SPLITS}, not {given(count)}")
        rows = [int(count) for count in listed]
    if rows and min(rows) < 0:
        raise _refusal("alltoall", name, f"negative entry in splits {rows}")
    return rows


def tuple_of(call: str, tensors: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a group. TypeError for one tensor, which would be cut into rows, and for what is no sequence."""
    if is_compiling():
        return tuple(tensors)
    if isinstance(tensors, (torch.Tensor, str, bytes)) or not hasattr(tensors, "__iter__"):
        raise wrong_type(call, "tensors", tensors, "a list or tuple of torch.Tensors")
    return tuple(tensors)


def compressed(call: str, compression: Any, tensor: Any, name: str | None) -> tuple[torch.Tensor, Any]:
    """compression.compress(tensor); TypeError when it is no compressor, or was given what is no tensor."""
    if is_compiling():
        return compression.compress(tensor)  # type: ignore[no-any-return]
    try:
        return compression.compress(tensor)  # type: ignore[no-any-return]
    except AttributeError:
        check_compression(call, compression)
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(tensor, name) from None
        raise
