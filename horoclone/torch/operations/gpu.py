"""Torch tensors on a GPU: where a tensor lies, whose stream fills it, and results that streams wait for, not the host.

Otherwise they are treated as tensors in host memory. Thread: the caller's; its current stream counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from horoclone.errors import Unsupported
from horoclone.handles import Maker
from horoclone.requests import HOST as HOST
from horoclone.requests import Place as Place
from horoclone.runtime import is_initialized, logs, native
from horoclone.torch.operations.tensors import (
    address_of,
    dtype_of,
    from_result,
    received,
    received_counts,
)

if TYPE_CHECKING:
    from horoclone._core import DeviceBlock, Runtime

log = logs.logger()


def place_of(tensor: torch.Tensor) -> Place:
    """Where work on the tensor runs: its device and the stream that is current there."""
    if not tensor.is_cuda:
        return HOST
    device = tensor.get_device()
    return device, _stream_now(device)


def _stream_now(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def place_of_all(tensors: Sequence[torch.Tensor]) -> Place:
    """The common place of a group; ValueError when some of it lie elsewhere."""
    places = {place_of(tensor) for tensor in tensors}
    if len(places) > 1:
        where = sorted({str(tensor.device) for tensor in tensors})
        raise ValueError(
            f"the tensors of one group lie on different devices ({', '.join(where)}); pass one group for each"
        )
    return places.pop()


def place_to_join(device: int) -> Place:
    """For hvd.join(device): the GPU that stands in for this rank's tensors; -1: the current one, if torch uses any."""
    uses_any = torch.cuda.is_available() and torch.cuda.is_initialized()
    if device < 0 and uses_any:
        device = torch.cuda.current_device()
    if device < 0 or not torch.cuda.is_available():
        return HOST
    return device, _stream_now(device) if uses_any else 0


def place_to_receive(beside: torch.Tensor | None = None) -> Place:
    """Where a message from another GPU may be placed: beside that tensor, else on the current GPU if torch uses one."""
    if beside is not None:
        return place_of(beside)
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return HOST
    device = torch.cuda.current_device()
    return device, _stream_now(device)


def is_capturing() -> bool:
    """Whether what the current stream is given goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def offer_memory(runtime: Runtime) -> None:
    """The core may ask torch for GPU memory that its allocator keeps for later."""
    runtime.offer_memory(torch.cuda.empty_cache)


@cache
def _watch_allocator() -> None:
    """Once in a process that uses CUDA: where torch has no memory left, which stays an error, the core gives back what
    it keeps, so that what is tried next may have it."""
    watch = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if watch is not None:
        with suppress(RuntimeError):  # an allocator that knows no observers, as cudaMallocAsync
            watch(_on_out_of_memory)


def _on_out_of_memory(*_: int) -> None:
    if is_initialized():
        native().trim_memory()


def memory_beside(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """New memory on the same GPU; not written yet."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def registered_memory(
    runtime: Runtime, like: torch.Tensor, count: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """New memory on the same GPU that NCCL is told of when buckets in it are declared; None where it cannot be."""
    try:
        block = runtime.allocate_on_device(place_of(like)[0], count * dtype.itemsize)
    except Unsupported as reason:
        log.debug("buckets lie in torch's memory: %s", reason)
        return None
    try:
        return shared_with(block, like, dtype)
    except (RuntimeError, TypeError, ValueError) as reason:  # a torch that asks more of such memory
        log.warning("buckets lie in torch's memory, since torch does not take NCCL's: %s", reason)
        return None


def shared_with(block: DeviceBlock, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a block, which the tensor keeps alive."""
    return torch.as_tensor(block, device=like.device).view(dtype)


def memory_on(device: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """New memory on that GPU; not written yet."""
    return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))


def to_gpu(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values from host memory in new memory beside `like`."""
    return memory_beside(like, values.shape, values.dtype).copy_(values)


def side_stream(place: Place) -> Any:
    """A stream beside the caller's, which no other code uses; None for host memory."""
    return None if place[0] < 0 else torch.cuda.Stream(place[0])


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Within it, that stream is the current one. None: no change."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def mark(stream: Any) -> Any:
    """A place in the stream: behind what it has been given so far."""
    return None if stream is None else stream.record_event()


def stream_behind(event: Any) -> None:
    """The current stream goes on behind the place that mark() gave; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream(event.device).wait_event(event)


def also_used_at(place: Place, tensors: Sequence[torch.Tensor]) -> None:
    """Memory taken on the current stream goes to the caller's: torch waits for both before it gives it to others."""
    if place[0] >= 0:
        stream = _torchs_stream(place)
        for tensor in tensors:
            tensor.record_stream(stream)


def _torchs_stream(place: Place) -> Any:
    """The stream of that number. Of the number 0 ExternalStream would take another one, from torch's pool."""
    if place[1] == 0:
        return torch.cuda.default_stream(place[0])
    return torch.cuda.ExternalStream(place[1], device=place[0])


def in_use_by(stream: Any, kept: Any) -> None:
    """Nobody waits for a stream that still uses these tensors (also in lists and tuples): torch gives their memory to
    others when the stream has come so far."""
    if isinstance(kept, torch.Tensor):
        if kept.is_cuda:
            kept.record_stream(stream)
    elif isinstance(kept, (list, tuple)):
        for part in kept:
            in_use_by(stream, part)


def devices_of(place: Place) -> list[int | str | torch.device]:
    """For a future: the streams of those who wait for it come behind its result."""
    return [] if place[0] < 0 else [torch.device("cuda", place[0])]


def follow(runtime: Runtime, handle: int, place: Place) -> None:
    """After wait(): the caller's current stream comes behind the result, and so does the one that made the input."""
    device, submitted_on = place
    if device < 0:
        return
    _watch_allocator()
    now = _stream_now(device)
    runtime.stream_wait(handle, now)
    if now != submitted_on:
        runtime.stream_wait(handle, submitted_on)


def behind(place: Place, output: Any) -> Maker | None:
    """For handles.remember: gives `output`, whose memory was given to the operation, once streams wait for it."""
    if place[0] < 0:
        return None

    def make(runtime: Runtime, handle: int) -> Any:
        follow(runtime, handle, place)
        return output

    return make


def rows_of(runtime: Runtime, handle: int, index: int, like: torch.Tensor, place: Place) -> torch.Tensor:
    """A core-owned result: rows of the shape and dtype of `like`, on its device. On a GPU it is copied once, there."""
    result = runtime.result(handle, index)
    if place[0] < 0:
        return from_result(result, tuple(like.shape[1:]), like.dtype)
    rows = memory_beside(like, (result.first_dimension, *like.shape[1:]), like.dtype)
    follow(runtime, handle, place)
    size = rows.numel() * rows.element_size()
    runtime.copy_result(handle, index, address_of(rows), size, _stream_now(place[0]))
    return rows


def rows_here(tensor: torch.Tensor) -> Maker:
    """As rows_like(), for host memory."""
    row, kind = tensor.shape[1:], tensor.dtype

    def make(runtime: Runtime, handle: int) -> Any:
        result = runtime.result(handle)
        rows = from_result(result, row, kind)
        return (rows, received_counts(result.rows_from)) if result.rows_from else rows

    return make


def rows_like(tensor: torch.Tensor, place: Place, splits: Any = None) -> Maker:
    """For handles.remember: the one core-owned result of an operation on `tensor`; of an alltoall also how many rows
    came from each rank, beside `splits` if that is a tensor on a GPU."""
    form = tensor.detach()[:0] if tensor.dim() else tensor.detach()

    def make(runtime: Runtime, handle: int) -> Any:
        rows, result = rows_of(runtime, handle, 0, form, place), runtime.result(handle)
        if not result.rows_from:
            return rows
        counts = received_counts(result.rows_from)
        there = isinstance(splits, torch.Tensor) and place_of(splits) is not HOST
        return rows, to_gpu(counts, splits) if there else counts

    return make


def arrived(runtime: Runtime, handle: int, index: int = 0) -> torch.Tensor:
    """What another rank sent, in its dtype and shape: on the GPU if the core has it there, else in host memory."""
    result = runtime.result(handle, index)
    if result.device < 0:
        return received(result)
    values = memory_on(result.device, result.shape, dtype_of(result))
    follow(runtime, handle, (result.device, _stream_now(result.device)))
    size = values.numel() * values.element_size()
    runtime.copy_result(handle, index, address_of(values), size, _stream_now(result.device))
    return values
