"""Gradient memory: buckets in the rank's shared-memory arena, each parameter's position in them, and their layout.

A bucket is one allreduce. The layout is a pure function of what the ranks have agreed on, so it is equal on all of
them. Owner: reducer.py; thread: whichever runs backward or step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from horoclone.errors import HorovodInternalError
from horoclone.torch.operations.gpu import HOST, memory_beside, place_of, registered_memory
from horoclone.torch.operations.tensors import NUMBER_OF

if TYPE_CHECKING:
    from horoclone._core import Runtime

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early in backward
BUCKET_BYTES = 16 << 20
GPU_BUCKET_BYTES = (
    25 << 20
)  # as DistributedDataParallel: a launch costs more there, and NCCL likes them larger
URGENT_BUCKET_BYTES = 1 << 20  # where a forward waits for each: little else goes with what it needs
ALIGNMENT_BYTES = 64


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class GradState:
    """One parameter's gradient: where it lies and how far it is in the current step."""

    __slots__ = (
        "apart",
        "arrived",
        "backward",
        "becomes_sparse",
        "bucket",
        "counted",
        "expected",
        "fires",
        "fires_in_pass",
        "left",
        "name",
        "parameter",
        "passes",
        "pending",
        "sparse_dim",
        "used",
        "view",
    )  # fmt: skip

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.bucket: Bucket | None = None  # None: reduced alone, under its own name
        self.view: torch.Tensor | None = None  # its part of the bucket, in the parameter's shape
        self.expected = 1  # hook calls in a step after which the gradient is complete
        self.left = 1
        self.counted = True  # its bucket waits for it in this step
        self.arrived = False  # complete and in its bucket, or submitted
        self.used = False  # this rank had a gradient for it in this step
        self.apart = False  # in this step parameter.grad is not the view: copied in, result copied back
        self.sparse_dim = 0  # > 0: gradients are sparse, with so many sparse dimensions
        self.becomes_sparse = False  # reduced dense, and handed out sparse again
        self.pending: Any = None  # (handle, wire tensor, compression context) while reduced alone
        # Observations of a learning step.
        self.fires = 0  # most hook calls in one backward pass (reentrant checkpoints make several)
        self.fires_in_pass = 0
        self.passes = 0
        self.backward: Any = None  # frame of the backward call seen last

    def strides(self) -> tuple[int, ...]:
        """Of the gradient in its bucket: the parameter's, if it is dense without overlap."""
        return torch.empty_like(self.parameter, device="meta").stride()

    def empty_sparse(self) -> torch.Tensor:
        """The sparse gradient of a rank that has none."""
        shape, sparse_dim = self.parameter.shape, self.sparse_dim
        device = self.parameter.device
        indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=device)
        values = torch.empty((0, *shape[sparse_dim:]), dtype=self.parameter.dtype, device=device)
        return torch.sparse_coo_tensor(indices, values, shape)

    def place(self, grad: torch.Tensor) -> None:
        """Copies a gradient into the bucket and makes parameter.grad the view, where dtypes and layouts allow."""
        view = self.view
        assert view is not None
        if grad.is_sparse:
            grad = grad.to_dense()
            if not self.becomes_sparse:
                self.parameter.grad = grad
        view.copy_(grad)
        if view.dtype == self.parameter.dtype and not self.becomes_sparse:
            self.parameter.grad = view
        else:
            self.apart = True

    def hand_out_sparse(self, reduced: torch.Tensor) -> None:
        """Makes parameter.grad what has been reduced dense, without its zeros."""
        self.parameter.grad = reduced.to(self.parameter.dtype).to_sparse()


class Bucket:
    """Contiguous memory of several gradients of one dtype, reduced in place by one operation."""

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        dtype: torch.dtype,
        states: Sequence[GradState],
        shards: int = 1,
    ) -> None:
        """shards: the size is a multiple of so many aligned parts."""
        self.index = index
        self.states = list(states)
        more = len(self.states) - 1
        self.summary = self.states[0].name + (f" and {more} more" if more else "")
        align = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        offsets, count = [], 0
        for state in self.states:
            offsets.append(count)
            count += -(-state.parameter.numel() // align) * align
        count = -(-max(count, 1) // (align * shards)) * align * shards
        self.flat = _allocate(runtime, count, dtype, self.states[0].parameter)
        self.place = place_of(self.flat)  # of the bucket; when it is submitted, with the stream that fills it
        for state, offset in zip(self.states, offsets, strict=True):
            state.bucket = self
            state.view = self.flat.as_strided(state.parameter.size(), state.strides(), offset)
        self.address = self.flat.data_ptr()
        self.number = NUMBER_OF[dtype]
        self.waiting = 0  # counted gradients that have not arrived
        self.sent = False
        self.priority = 0  # the higher, the sooner it is needed
        self.handle: Any = None  # of the operation under way
        self.exposed: Any = None  # GradientBucket, where a GradientCompressor reduces it
        self.work: Any = None  # the compressor's generator, while it runs


def _allocate(runtime: Runtime, count: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Zeroed memory in the arena, or private where it cannot give any (reduced with copies). On a GPU: there."""
    if place_of(like) is not HOST:
        memory = registered_memory(runtime, like, count, dtype)
        return (memory_beside(like, (count,), dtype) if memory is None else memory).zero_()
    try:
        block = runtime.allocate(count * dtype.itemsize)
    except HorovodInternalError:
        return torch.zeros(count, dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=count)


def groups_of(
    groups: int | Sequence[Sequence[torch.Tensor]], dense: Sequence[GradState]
) -> list[list[GradState]]:
    """The user's `groups` argument as gradients: that many groups of `dense`, or lists of parameters that are in it."""
    if isinstance(groups, int):
        if groups <= 0:
            return []
        size, extra = divmod(len(dense), groups)
        bounds = [k * size + min(k, extra) for k in range(groups + 1)]
        return [list(dense[a:b]) for a, b in pairwise(bounds) if b > a]
    state_of = {state.parameter: state for state in dense}
    return [[state_of[p] for p in group if p in state_of] for group in groups]


def plan_buckets(
    runs: Sequence[Sequence[GradState]],
    groups: Sequence[Sequence[GradState]],
    wire_dtype_of: Callable[[GradState], torch.dtype],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[tuple[torch.dtype, list[GradState]]]:
    """Cuts gradients into buckets of one dtype each, in the order in which they become complete.

    A bucket does not cross from one run into the next. Groups are kept whole, one bucket for each dtype in them; the
    other gradients fill buckets up to `bucket_bytes`, the first one of each dtype up to 1 MiB.
    """
    grouped: set[GradState] = {state for group in groups for state in group}
    plan: list[tuple[torch.dtype, list[GradState]]] = []
    for group in groups:
        by_dtype: dict[torch.dtype, list[GradState]] = {}
        for state in group:
            by_dtype.setdefault(wire_dtype_of(state), []).append(state)
        plan.extend(by_dtype.items())
    limits: dict[torch.dtype, int] = {}
    for run in runs:
        filling: dict[torch.dtype, list[GradState]] = {}
        for state in run:
            if state in grouped:
                continue
            dtype = wire_dtype_of(state)
            bucket = filling.setdefault(dtype, [])
            if bucket and _bytes_of([*bucket, state], dtype) > limits.get(dtype, FIRST_BUCKET_BYTES):
                plan.append((dtype, bucket))
                limits[dtype] = bucket_bytes
                bucket = filling[dtype] = []
            bucket.append(state)
        plan.extend(filling.items())
    return plan


def _bytes_of(states: Iterable[GradState], dtype: torch.dtype) -> int:
    return sum(state.parameter.numel() for state in states) * dtype.itemsize
