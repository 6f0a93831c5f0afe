"""Gradient memory: buckets in the rank's shared-memory arena, each parameter's position in them, and their layout.

A bucket is one allreduce. The layout is a pure function of what the ranks have agreed on, so it is equal on all of
them. Owner: reducer.py; thread: whichever runs backward or step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from horoclone.comparison import PLACES
from horoclone.errors import HorovodInternalError
from horoclone.torch.operations.gpu import HOST, memory_beside, place_of, registered_memory
from horoclone.torch.operations.tensors import NUMBER_OF
from horoclone.torch.operations.weighted import length

if TYPE_CHECKING:
    from horoclone._core import Runtime

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early in backward
BUCKET_BYTES = 16 << 20
# As DistributedDataParallel: a launch costs more there, and NCCL likes them larger
GPU_BUCKET_BYTES = 25 << 20
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
        "address",
        "apart",
        "arrived",
        "becomes_sparse",
        "bits",
        "bucket",
        "call",
        "counted",
        "dtype",
        "expected",
        "fired",
        "fires",
        "fires_in_pass",
        "form",
        "in_backward",
        "left",
        "lent",
        "name",
        "noted",
        "parameter",
        "passes",
        "pending",
        "reduced",
        "sparse_dim",
        "used",
        "view",
    )  # fmt: skip

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.bucket: Bucket | None = None  # None: reduced alone, under its own name
        self.view: torch.Tensor | None = None  # its part of the bucket, in the parameter's shape
        self.lent: torch.Tensor | None = (
            None  # the same memory as parameter.grad: the user may point it elsewhere
        )
        self.address = 0  # of that memory
        self.form = form_of(parameter)  # of the parameter for which the ranks have agreed
        self.dtype = parameter.dtype  # of the gradient (Tensor.grad_dtype)
        self.in_backward = False  # every rank computes it in every step: backward() waits for it
        self.expected = 1  # hook calls in a step after which the gradient is complete
        self.left = 1
        self.counted = True  # its bucket waits for it in this step
        self.fired = False  # its hook was called in this step
        self.arrived = False  # complete and in its bucket, or submitted
        self.reduced = False  # parameter.grad is the result
        self.used = False  # this rank had a gradient for it in this step
        self.apart = False  # in this step parameter.grad is not in the bucket: copied in, result copied back
        self.noted: tuple[Any, ...] | None = None  # parameter.grad as it was: see note()
        self.bits: torch.Tensor | None = None  # of its content then, where that was noted
        self.sparse_dim = 0  # > 0: gradients are sparse, with so many sparse dimensions
        self.becomes_sparse = False  # reduced dense, and handed out sparse again
        self.pending: Any = None  # (handle, wire tensor, compression context) while reduced alone
        # Observations of a learning step.
        self.fires = 0  # most hook calls in one backward pass (reentrant checkpoints make several)
        self.fires_in_pass = 0
        self.passes = 0
        self.call = -1  # number of the backward call seen last

    def strides(self) -> tuple[int, ...]:
        """Of the gradient in its bucket: the parameter's, if it is dense without overlap."""
        return torch.empty_like(self.parameter, device="meta").stride()

    def zeros(self, as_agreed: bool = False) -> torch.Tensor:
        """A gradient for a rank that has none. as_agreed: for the parameter as it was when the ranks agreed."""
        shape, device = self.parameter.shape, self.parameter.device
        if as_agreed:
            shape, device = self.form[0], self.form[3]
        if not self.sparse_dim:
            if as_agreed:
                return torch.zeros(shape, dtype=self.dtype, device=device)
            return torch.zeros_like(self.parameter, dtype=self.dtype, requires_grad=False)
        indices = torch.empty((self.sparse_dim, 0), dtype=torch.int64, device=device)
        values = torch.empty((0, *shape[self.sparse_dim :]), dtype=self.dtype, device=device)
        return torch.sparse_coo_tensor(indices, values, shape, device=device, check_invariants=False)

    # --- in a bucket -----------------------------------------------------------------------------------------------

    def lies_in(self, bucket: Bucket, offset: int) -> None:
        """From now on its place is there."""
        self.bucket = bucket
        self.view = bucket.flat.as_strided(self.parameter.size(), self.strides(), offset)
        self.address = self.view.data_ptr()
        self.lent = None

    def lend(self) -> torch.Tensor:
        """What parameter.grad becomes. Its version, storage and place may become anything, and the bucket stays."""
        lent, view, bucket = self.lent, self.view, self.bucket
        assert view is not None and bucket is not None
        if lent is None or not self.is_in_bucket(lent):
            # .data: with a version of its own, else a change of any gradient would count for all of the bucket.
            at = int(view.storage_offset())
            lent = self.lent = bucket.alias().as_strided(view.size(), view.stride(), at).data
        return lent

    def is_in_bucket(self, grad: torch.Tensor) -> bool:
        """Whether it is this part of the bucket. A tensor can be given other memory, so its identity says nothing."""
        view = self.view
        assert view is not None
        return (
            grad.layout is torch.strided
            and grad.data_ptr() == self.address
            and grad.dtype == view.dtype
            and grad.shape == view.shape
            and grad.stride() == view.stride()
        )

    def take(self, grad: torch.Tensor, lends: bool) -> None:
        """Copies a gradient into the bucket. lends: makes parameter.grad that memory where dtypes and layouts allow.

        ValueError for one of another shape.
        """
        view = self.view
        assert view is not None
        if self.is_in_bucket(grad):
            return
        if grad.shape != view.shape:
            raise ValueError(
                f"the gradient of {self.name!r} has the shape {list(grad.shape)}, and in this step it was "
                f"{list(view.shape)}: change shapes between optimizer.step() and backward(), on every rank"
            )
        if grad.is_sparse:
            grad = grad.to_dense()
            if not self.becomes_sparse:
                self.parameter.grad = grad
        self._part_from_kept()
        view.copy_(grad.detach())
        if lends and view.dtype == grad.dtype and not self.becomes_sparse:
            self.parameter.grad = self.lend()
        else:
            self.apart = True

    def take_none(self) -> None:
        """There is no gradient on this rank: zeros."""
        assert self.view is not None
        self._part_from_kept()
        self.view.zero_()
        same = self.view.dtype == self.dtype and self.parameter.dtype == self.form[1]
        self.apart = not same or self.becomes_sparse

    def _part_from_kept(self) -> None:
        """Before this step's gradient is written: that of an earlier step, where a script has kept it and cleared
        parameter.grad, gets memory of its own, since torch's next backward would leave it alone."""
        if self.lent is not None and sys.getrefcount(self.lent) > 2:  # more than ours and the argument
            self.lent.data = self.lent.clone()
            self.lent = None

    def hand_out_sparse(self, reduced: torch.Tensor) -> None:
        """Makes parameter.grad what has been reduced dense, without its zeros."""
        self.parameter.grad = reduced.to(self.dtype).to_sparse()

    def new_grad(self) -> torch.Tensor:
        """Memory for parameter.grad outside of the bucket, of the dtype that it may have now."""
        dtype = self.dtype if self.parameter.dtype == self.form[1] else self.parameter.dtype
        return torch.empty_like(self.parameter, dtype=dtype, requires_grad=False)

    # --- what the user does to it ----------------------------------------------------------------------------------

    def note(self, content: bool = False) -> None:
        """Remembers parameter.grad as it is now, for is_changed(). A write through .data raises no version: it takes
        the content to see it (with_other_content); and a view's version is that of all views of its memory."""
        grad = self.parameter.grad
        if grad is None:
            self.noted = self.bits = None
            return
        # On a GPU nobody looks at contents in every step.
        is_view = grad._is_view() and place_of(grad) is HOST
        self.bits = bits_of(grad) if content or is_view else None
        self.noted = (grad, None if is_view else grad._version, address_of(grad))

    def is_changed(self) -> bool:
        """Whether parameter.grad is another tensor, or has been written to, since note()."""
        grad = self.parameter.grad
        if grad is None or self.noted is None:
            return False
        before, version, address = self.noted
        if grad is not before or address_of(grad) != address:
            return True
        return bool(self.bits != bits_of(grad)) if version is None else grad._version != version

    def is_same(self) -> bool:
        """Whether parameter.grad is the tensor that it was at note(), whatever has been written to it."""
        return self.noted is not None and self.parameter.grad is self.noted[0]


def form_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What buckets are made for: another shape, dtype, layout or place needs other ones."""
    own = getattr(parameter, "grad_dtype", None)  # since torch 2.10
    return (parameter.shape, parameter.dtype, parameter.stride(), parameter.device, own)


_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(grad: torch.Tensor) -> torch.Tensor:
    """A checksum of a gradient's content, on its device; values that change places change it, too."""
    values = (grad._values() if grad.is_sparse else grad).detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    flat = values.contiguous().view(_AS_INTEGER[values.element_size()]).flatten()
    ratio = 8 // flat.element_size()  # sums of 64-bit integers are the only fast ones
    if flat.storage_offset() % ratio:
        flat = flat.clone()
    even = flat.numel() // ratio * ratio
    words = flat[:even].view(torch.int64)
    rows = words[: words.numel() // 256 * 256].view(-1, 256)
    parts = (rows.sum(0), rows.sum(1), words[rows.numel() :], flat[even:].long())
    return torch.cat(parts).cumsum(0).sum()


def with_other_content(states: Iterable[GradState]) -> list[GradState]:
    """Those whose content was noted and is another now. One look at the device for all of them."""
    found = [(state, state.bits, state.parameter.grad) for state in states]
    noted = [(state, bits, grad) for state, bits, grad in found if bits is not None and grad is not None]
    if not noted:
        return []
    device = noted[0][1].device
    same = torch.stack([(bits == bits_of(grad)).to(device) for _, bits, grad in noted]).tolist()
    return [state for (state, _, _), is_same in zip(noted, same, strict=True) if not is_same]


def address_of(grad: torch.Tensor) -> int:
    return grad.data_ptr() if grad.layout is torch.strided else 0


def summary_of(names: Sequence[str]) -> str:
    """Parameters that travel together, as errors and views name them."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class Bucket:
    """Contiguous memory of several gradients of one dtype, reduced in place by one operation."""

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        dtype: torch.dtype,
        states: Sequence[GradState],
        shards: int = 1,
        ranks: int = 0,
    ) -> None:
        """shards: the size is a multiple of so many aligned parts. ranks: whose weights travel in it."""
        self.under_way: tuple[Runtime, int] | None = None  # the core's handle, while the core uses the memory
        _let_go(runtime)
        self.index = index
        self.states = list(states)
        self.summary = summary_of([state.name for state in self.states])
        align = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        offsets, count = [], 0
        for state in self.states:
            offsets.append(count)
            count += -(-state.parameter.numel() // align) * align
        mark_at = max(count, align)
        check_at = mark_at + 1
        weights_at = check_at + (PLACES if index == 0 else 0)
        end = weights_at + length(dtype, ranks)
        count = -(-end // (align * shards)) * align * shards
        self.flat = _allocate(runtime, count, dtype, self.states[0].parameter)
        self.gradients = self.flat[:mark_at]  # with zeros where there are gaps between them
        self.mark = self.flat[mark_at : mark_at + 1]  # another one where some rank has other parameters now
        self.check = self.flat[check_at:weights_at]  # of the ranks' values: compared.py; in the first bucket
        self.weights = self.flat[weights_at:end]  # of the ranks; empty where gradients are not weighted
        self.place = place_of(self.flat)  # of the bucket; when it is submitted, with the stream that fills it
        self.address = self.flat.data_ptr()
        self._alias: torch.Tensor | None = None
        for state, offset in zip(self.states, offsets, strict=True):
            state.lies_in(self, offset)
        self.number = NUMBER_OF[dtype]
        # Sent by hooks, waited for by backward().
        self.in_backward = all(state.in_backward for state in self.states)
        for state in self.states:
            state.in_backward = self.in_backward
        self.waiting = 0  # counted gradients that have not arrived
        self.sent = False
        self.done = False  # reduced, and handed out
        self.priority = 0  # the higher, the sooner it is needed
        self.handle: Any = None  # of the operation under way
        self.exposed: Any = None  # GradientBucket, where a GradientCompressor reduces it
        self.work: Any = None  # the compressor's generator, while it runs

    def release(self) -> None:
        """Its operation is over."""
        if self.under_way is not None:
            (runtime, handle), self.under_way = self.under_way, None
            runtime.release(handle)

    def __del__(self) -> None:
        # Its optimizer was dropped, or gives up a step: the other ranks may still write to the memory.
        if self.under_way is not None:
            _in_use.append((self.under_way, self.flat))

    def alias(self) -> torch.Tensor:
        """The same memory through a storage of its own, which a user may exchange (share_memory() does)."""
        if self._alias is None or self._alias.data_ptr() != self.address:
            self._alias = _alias_of(self.flat)
        return self._alias


_in_use: list[tuple[tuple[Runtime, int], torch.Tensor]] = []  # memory of buckets that are gone


def _let_go(now: Runtime) -> None:
    """Of what is not used any more; an earlier runtime uses nothing."""
    kept, _in_use[:] = list(_in_use), []
    for (runtime, handle), memory in kept:
        if runtime is now and not runtime.poll(handle):
            _in_use.append(((runtime, handle), memory))
        elif runtime is now:
            runtime.release(handle)


def _allocate(runtime: Runtime, count: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Zeroed memory in the arena, or private where it cannot give any (reduced with copies). On a GPU: there."""
    if place_of(like) is not HOST:
        memory = registered_memory(runtime, like, count, dtype)
        return (memory_beside(like, (count,), dtype) if memory is None else memory).zero_()
    try:
        block = runtime.allocate(count * dtype.itemsize)
    except HorovodInternalError:
        return torch.zeros(count, dtype=dtype, device="cpu")
    return torch.frombuffer(block, dtype=dtype, count=count)


def _alias_of(flat: torch.Tensor) -> torch.Tensor:
    if place_of(flat) is not HOST:
        return flat
    return torch.frombuffer(flat.view(torch.uint8).numpy(), dtype=flat.dtype, count=flat.numel())


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

    A bucket does not cross from one run into the next. Groups are kept whole, one bucket for each dtype in them and
    for what some rank does without; the other gradients fill buckets up to `bucket_bytes`, the first one of each dtype
    up to 1 MiB.
    """
    grouped: set[GradState] = {state for group in groups for state in group}
    plan: list[tuple[torch.dtype, list[GradState]]] = []
    for group in groups:
        alike: dict[tuple[bool, torch.dtype], list[GradState]] = {}
        for state in group:
            alike.setdefault((state.in_backward, wire_dtype_of(state)), []).append(state)
        plan.extend((dtype, part) for (_, dtype), part in alike.items())
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
