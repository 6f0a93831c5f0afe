"""Collective operations on torch tensors, with Horovod's names, arguments and handles.

Thread: the caller's submits and waits. Tensors of a pending operation are kept alive by handles.py; grouped
operations are in grouped.py and exported from here.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from horoclone import ops
from horoclone.common.basics import HorovodBasics
from horoclone.errors import HorovodInternalError as HorovodInternalError  # Horovod has it here, too
from horoclone.ops import *  # noqa: F403 - the reductions
from horoclone.ops import (
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
    Average,
    Sum,
    at_priority,
    resolve_reduce,
)
from horoclone.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horoclone.runtime import (
    cross_rank,
    cross_size,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_enabled,
    mpi_threads_supported,
    native,
    rank,
    size,
    start_timeline,
    stop_timeline,
)
from horoclone.runtime.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
    sycl_built,
)
from horoclone.runtime.life import init, shutdown
from horoclone.torch import handles
from horoclone.torch.alltoall import alltoall, alltoall_async
from horoclone.torch.arguments import share_reduce
from horoclone.torch.compression import Compression
from horoclone.torch.functional import is_compiling, reduced, start
from horoclone.torch.gpu import place_to_join
from horoclone.torch.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from horoclone.torch.handles import (
    poll,
    remember,
    run,
    run_for_rows,
    set_id,
    start_for_rows,
    start_on_gpu,
    synchronize,
)
from horoclone.torch.tensors import NOWHERE, ON_GPU, address_of, not_a_tensor, number_of, refuse_scalar

__all__ = [
    *ops.__all__, "ProcessSet", "add_process_set", "allgather",
    "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built",
    "gloo_enabled", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank",
    "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "sycl_built", "synchronize",
]  # fmt: skip

_basics = HorovodBasics()  # a private name that many scripts know

# --- allreduce -----------------------------------------------------------------------------------------------------


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces `tensor` over the ranks in place and returns it. Any shape and dtype (no Average of bool).

    Raises ValueError for wrong arguments, Mismatch when the ranks differ in dtype, shape, op or scales, Unsupported
    for tensors that are neither in host memory nor on one of NVIDIA's GPUs.
    """
    if is_compiling():
        return reduced(
            "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor), process_set, True
        )()
    plain = handles.call_plain(
        tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set, 0
    )
    if plain is not None:
        return tensor if plain is tensor else handles.synchronize(plain)
    reduce = resolve_reduce(average, op)
    dtype, scales = number_of(tensor, name, True), (prescale_factor, postscale_factor)
    return run(ALLREDUCE, name, tensor, tensor, dtype, reduce, *scales, 0, set_id(process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> int:
    """Starts `allreduce_` and returns a handle for `poll` and `synchronize`. ValueError if `name` is pending.

    priority: of what all ranks have submitted, the highest runs first (docs/priority.md).
    """
    if is_compiling():
        return reduced(
            "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor), process_set, True
        )
    plain = handles.start_plain(
        tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority
    )
    if plain is not None:
        return plain
    reduce = resolve_reduce(average, op)
    dtype = number_of(tensor, name, True)
    rest = (reduce, prescale_factor, postscale_factor, 0, set_id(process_set))
    if dtype >= ON_GPU:
        return start_on_gpu(ALLREDUCE, name, tensor, tensor, dtype, *rest, priority=priority)
    place, runtime = tensor.data_ptr() or NOWHERE, native()
    handle = runtime.submit(ALLREDUCE, name, place, place, tensor.shape, dtype, *rest, *at_priority(priority))
    return remember(runtime, handle, tensor, tensor)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> int:
    """Starts a reduction into a new tensor and returns a handle; `tensor` must not change until it is done."""
    if is_compiling():
        return reduced(
            "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor), process_set
        )
    reduce = resolve_reduce(average, op)
    dtype = number_of(tensor, name, True)
    output = torch.empty_like(tensor, requires_grad=False)
    plain = handles.start_plain(
        tensor, output, None, name, reduce, prescale_factor, postscale_factor, process_set, priority
    )
    if plain is not None:
        return plain
    rest = (reduce, prescale_factor, postscale_factor, 0, set_id(process_set))
    if dtype >= ON_GPU:
        return start_on_gpu(ALLREDUCE, name, tensor, output, dtype, *rest, priority=priority)
    core, source, target = native(), address_of(tensor), address_of(output)
    handle = core.submit(ALLREDUCE, name, source, target, tensor.shape, dtype, *rest, *at_priority(priority))
    return remember(core, handle, output, tensor)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the reduction of `tensor` over the ranks as a new tensor of the same shape and dtype.

    Differentiable for Average and Sum: the gradient is the same reduction of the gradient.
    """
    reduce = resolve_reduce(average, op)
    wire, ctx = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    if is_compiling():
        return compression.decompress(
            start("allreduce", [wire], name, reduce, scales, process_set, differentiable=True)(), ctx
        )
    try:
        learns = wire.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        raise not_a_tensor(wire, name) from None
    if learns:
        from horoclone.torch.autograd import Allreduce

        reduced = Allreduce.apply(wire, name, reduce, *scales, process_set)
    else:
        reduced = _reduced_now(wire, name, reduce, scales, process_set)
    return compression.decompress(reduced, ctx)


def _reduced_now(
    tensor: torch.Tensor, name: str | None, reduce: int, scales: tuple[float, float], process_set: ProcessSet
) -> torch.Tensor:
    output = torch.empty_like(tensor, requires_grad=False)
    plain = handles.call_plain(tensor, output, None, name, reduce, *scales, process_set, 0)
    if plain is not None:
        return output if plain is output else handles.synchronize(plain)
    dtype = number_of(tensor, name, True)
    return run(ALLREDUCE, name, tensor, output, dtype, reduce, *scales, 0, set_id(process_set))


# --- allgather -----------------------------------------------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather and returns a handle."""
    if is_compiling():
        return start("allgather", [tensor], name, process_set=process_set)
    return start_for_rows(ALLGATHER, name, tensor, Sum, 1.0, 1.0, 0, set_id(process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates everybody's tensor along the first dimension, in rank order; first dimensions may differ.

    Differentiable (each rank gets its own rows of the averaged gradient, as in Horovod). A 0-d tensor is an error:
    Mismatch, or IndexError where it needs a gradient.
    """
    if is_compiling():
        return start("allgather", [tensor], name, process_set=process_set, differentiable=True)()
    try:
        learns = tensor.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        raise not_a_tensor(tensor, name) from None
    if learns:
        from horoclone.torch.autograd import Allgather

        return Allgather.apply(tensor, name, process_set)
    dtype = number_of(tensor, name, True)
    if dtype >= ON_GPU:
        return synchronize(allgather_async(tensor, name, process_set))
    return run_for_rows(ALLGATHER, name, tensor, dtype, Sum, 1.0, 1.0, 0, set_id(process_set))[0]


# --- sparse allreduce ----------------------------------------------------------------------------------------------


class SparseHandle:
    """Handle of a sparse reduction: call it, or pass it to `synchronize`, for the reduced sparse tensor."""

    def __init__(self, tensor: torch.Tensor, parts: tuple[int, int], divisor: int) -> None:
        self.parts = parts
        self._shape = tensor.shape
        self._divisor = divisor

    def __call__(self) -> torch.Tensor:
        indices, values = (synchronize(part) for part in self.parts)
        if self._divisor > 1:
            values = values / self._divisor
        return torch.sparse_coo_tensor(indices.t().contiguous(), values, self._shape)


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
    return SparseHandle(tensor, (indices, values), (process_set.size() or 1) if op == Average else 1)


# --- broadcast -----------------------------------------------------------------------------------------------------


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `broadcast_` and returns a handle."""
    if is_compiling():
        return start("broadcast", [tensor], name, process_set=process_set, root=root_rank, in_place=True)
    dtype = number_of(tensor, name, True)
    if dtype >= ON_GPU:
        return start_on_gpu(
            BROADCAST, name, tensor, tensor, dtype, Sum, 1.0, 1.0, root_rank, set_id(process_set)
        )
    address = address_of(tensor)
    runtime = native()
    handle = runtime.submit(
        BROADCAST, name, address, address, tensor.shape, dtype, Sum, 1.0, 1.0, root_rank, set_id(process_set)
    )
    return remember(runtime, handle, tensor, tensor)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites `tensor` with rank root_rank's (a world rank, also within a process set) and returns it."""
    if is_compiling():
        return start("broadcast", [tensor], name, process_set=process_set, root=root_rank, in_place=True)()
    dtype = number_of(tensor, name, True)
    return run(BROADCAST, name, tensor, tensor, dtype, Sum, 1.0, 1.0, root_rank, set_id(process_set))


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast into a new tensor and returns a handle."""
    if is_compiling():
        return start("broadcast", [tensor], name, process_set=process_set, root=root_rank)
    number_of(tensor, name, True)  # refuses what is not contiguous before the copy would hide it
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns rank root_rank's tensor. Differentiable: the root gets the averaged gradient, the others zero."""
    if is_compiling():
        return start(
            "broadcast", [tensor], name, process_set=process_set, root=root_rank, differentiable=True
        )()
    try:
        learns = tensor.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        raise not_a_tensor(tensor, name) from None
    if learns:
        from horoclone.torch.autograd import Broadcast

        return Broadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))


# --- reducescatter -------------------------------------------------------------------------------------------------


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter and returns a handle."""
    scales = (prescale_factor, postscale_factor)
    if is_compiling():
        return start("reducescatter", [tensor], name, share_reduce(op, name), scales, process_set)
    refuse_scalar([tensor])
    reduce = share_reduce(op, name)
    return start_for_rows(REDUCESCATTER, name, tensor, reduce, *scales, 0, set_id(process_set))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces over the ranks (Average or Sum; InvalidArgument for others) and returns this rank's share of the rows.

    The first ranks get one row more where the rows cannot be shared equally. Differentiable: the gradient is the
    allgather of the gradient, times the size for Sum, as in Horovod.
    """
    wire, ctx = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    if is_compiling():
        begun = start(
            "reducescatter", [wire], name, share_reduce(op, name), scales, process_set, differentiable=True
        )
        return compression.decompress(begun(), ctx)
    try:
        learns = wire.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        raise not_a_tensor(wire, name) from None
    if learns:
        from horoclone.torch.autograd import Reducescatter

        share = Reducescatter.apply(wire, name, op, process_set, *scales)
    elif (dtype := number_of(wire, name, True)) >= ON_GPU or not wire.dim():
        share = synchronize(reducescatter_async(wire, name, op, process_set, *scales))
    else:
        rest = (share_reduce(op, name), *scales, 0, set_id(process_set))
        share = run_for_rows(REDUCESCATTER, name, wire, dtype, *rest)[0]
    return compression.decompress(share, ctx)


# --- join and barrier ----------------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until every rank has said so. Returns the rank that joined last.

    Meanwhile this rank takes part in the others' allreduces with neutral elements, on GPU number `device` (-1: the
    current one) where the others' tensors are on GPUs.
    """
    runtime = native()
    handle = runtime.submit(JOIN, None, 0, 0, (), 0, Sum, 1.0, 1.0, 0, 0, None, 0, *place_to_join(device))
    return synchronize(remember(runtime, handle, None, None, lambda rt, h: rt.result(h).join_rank))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the process set has called it."""
    native().run(BARRIER, None, 0, 0, (), 0, Sum, 1.0, 1.0, 0, set_id(process_set))
