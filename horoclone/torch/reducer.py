"""Reduces a set of gradients over the ranks while backward still runs.

The first step only watches: which gradients come, in which order, how often the hooks fire. At its end the ranks agree
on buckets; from then on a bucket is submitted by the hook that completes it, and synchronize() waits for all of them.
Thread: whichever runs backward and step (autograd runs CPU hooks on the caller's thread).
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from horoclone.errors import HorovodInternalError
from horoclone.ops import Max
from horoclone.process_sets import ProcessSet, global_process_set, id_of
from horoclone.runtime import is_initialized, native
from horoclone.torch import mpi_ops
from horoclone.torch.buckets import Bucket, Slot, plan_buckets
from horoclone.torch.compression import Compression

if TYPE_CHECKING:
    from horoclone._core import Runtime

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)

_formed = 0  # bucket layouts formed by this process: makes bucket names unique among its optimizers


class Reducer:
    """The gradients of one optimizer."""

    def __init__(
        self,
        passes: int,
        op: int,
        predivide: float,
        compression: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.passes = passes
        self.outstanding = False  # a hook has fired since the last synchronize()
        self.reduced = False  # synchronize() has run and no hook has fired since
        self.slots: list[Slot] = []
        self.groups: int | list[list[torch.Tensor]] = 0
        self._slot_of: dict[torch.Tensor, Slot] = {}
        self._op = op
        self._scales = (1.0 / predivide, predivide)
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._runtime: Runtime | None = None
        self._set_id = 0
        self._learned = False
        self._buckets: list[Bucket] = []
        self._declared = 0  # the core's number for them, while there are any
        self._abandoned: list[
            Any
        ] = []  # memory of reductions that were given up: the core may still write to it
        self._order: dict[Slot, None] = {}  # in a learning step: by the last time that each hook fired
        self._incomplete = 0  # counted slots that have not arrived in this step

    # --- registration ----------------------------------------------------------------------------------------------

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """Takes a parameter that requires a gradient under this name; the next step is a learning step."""
        slot = Slot(parameter, name)
        slot.expected = slot.left = self.passes
        index = len(self.slots)
        self.slots.append(slot)
        self._slot_of[parameter] = slot
        self._learned = False
        reducer_of = weakref.ref(
            self
        )  # a dropped optimizer must not go on reducing its old model's gradients

        def hook(_: torch.Tensor) -> None:
            reducer = reducer_of()
            if reducer is not None:
                reducer._fired(reducer.slots[index])

        parameter.register_post_accumulate_grad_hook(hook)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether `add` has been called for it."""
        return parameter in self._slot_of

    def set_passes(self, passes: int) -> None:
        """Backward passes per step from now on."""
        self.passes = passes
        for slot in self.slots:
            slot.expected = slot.left = passes * max(1, slot.fires)

    # --- hooks -----------------------------------------------------------------------------------------------------

    def _fired(self, slot: Slot) -> None:
        if not self.outstanding:
            self._begin()
        if not self._learned:
            self._observe(slot)
            return
        slot.left -= 1
        if slot.left > 0:
            return
        if slot.left < 0:
            raise AssertionError(f"{TOO_MANY} (parameter {slot.name!r})")
        grad = slot.parameter.grad
        if grad is None or grad.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name!r} is {'missing' if grad is None else 'part of a graph'}: backward with "
                "create_graph=True cannot be reduced; use torch.autograd.grad for the inner gradients"
            )
        self._arrive(slot, grad)

    def _begin(self) -> None:
        """First hook, or synchronize without one, since the last synchronize()."""
        runtime = native()
        if runtime is not self._runtime:
            self._forget_layout()
            self._runtime = runtime
            self._set_id = 0 if self._process_set is global_process_set else id_of(self._process_set)
        self.outstanding = True
        self.reduced = False
        self._incomplete = 0
        for bucket in self._buckets:
            bucket.waiting = 0
        for slot in self.slots:
            slot.counted = slot.parameter.requires_grad
            if slot.counted:
                self._incomplete += 1
                if slot.bucket is not None:
                    slot.bucket.waiting += 1

    def _observe(self, slot: Slot) -> None:
        """Learning step: several calls within one backward are one pass, whose last call completes the gradient."""
        backward = _outermost_backward()
        if backward is None or backward is not slot.backward:
            slot.backward, slot.fires_in_pass = backward, 0
            slot.passes += 1
            if slot.passes > self.passes:
                raise AssertionError(f"{TOO_MANY} (parameter {slot.name!r})")
            if slot.passes == self.passes and slot.counted:
                self._incomplete -= 1
        slot.fires_in_pass += 1
        slot.fires = max(slot.fires, slot.fires_in_pass)
        self._order.pop(slot, None)
        self._order[slot] = None

    def _arrive(self, slot: Slot, grad: torch.Tensor) -> None:
        slot.arrived = True
        bucket = slot.bucket
        if bucket is None:
            self._submit_alone(slot)
        else:
            if bucket.handle:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} came after its bucket had been sent off: requires_grad must not "
                    "change between the first backward of a step and optimizer.step()"
                )
            if grad is not slot.view:
                slot.place(grad)
            if slot.counted:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._submit(bucket)
        if slot.counted:
            self._incomplete -= 1

    # --- submission ------------------------------------------------------------------------------------------------

    def _submit(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        for slot in bucket.slots:
            if not slot.arrived:  # frozen, or unused in this step
                self._fill(slot)
        bucket.handle = self._runtime.submit_declared(self._set_id, self._declared, bucket.index)

    def _fill(self, slot: Slot) -> None:
        """A slot whose hooks did not complete it: what is in parameter.grad, else zeros."""
        assert slot.view is not None
        grad = slot.parameter.grad
        if grad is None:
            slot.view.zero_()
            slot.apart = slot.view.dtype != slot.parameter.dtype
        elif grad is not slot.view:
            slot.place(grad)
        slot.arrived = True

    def _submit_alone(self, slot: Slot) -> None:
        slot.arrived = True
        grad = slot.parameter.grad
        if grad is None:
            grad = (
                _empty_sparse(slot)
                if slot.sparse_dim
                else torch.zeros_like(slot.parameter, requires_grad=False)
            )
            if slot.parameter.requires_grad:
                slot.parameter.grad = grad
        if grad.is_sparse and self._sparse_as_dense:
            grad = slot.parameter.grad = grad.to_dense()
        if grad.is_sparse:
            handle: Any = mpi_ops.sparse_allreduce_async(grad, slot.name, self._op, self._process_set)
            slot.pending = (handle, None, None)
            return
        wire, ctx = self._compression.compress(grad.detach())
        wire = wire.contiguous()
        handle = mpi_ops.allreduce_async_(wire, None, slot.name, self._op, *self._scales, self._process_set)
        slot.pending = (handle, wire, ctx)

    # --- waiting ---------------------------------------------------------------------------------------------------

    def complete(self) -> bool:
        """Whether every gradient that can come in this step has come (never true inside backward)."""
        return self._incomplete <= 0 and torch._C._current_graph_task_id() == -1

    @torch.no_grad()
    def synchronize(self, find_new: Callable[[], None]) -> None:
        """Sends what has not been sent (zeros for unused parameters), waits for everything, hands out the results.

        find_new: called first; adds parameters that have begun to require gradients. Raises the first error of the
        reductions, after all of them have ended.
        """
        if not self.outstanding:
            self._begin()
        try:
            learning = not self._learned
            before = len(self.slots)
            find_new()
            if learning or len(self.slots) > before:
                self._agree_on(self.slots if learning else self.slots[before:])
            for slot in self.slots:
                if not slot.arrived and slot.bucket is None:
                    self._submit_alone(slot)
            for bucket in self._buckets:
                if not bucket.handle:
                    self._submit(bucket)
            self._collect()
            if learning:
                self._form_buckets()
        finally:
            self._end()
        self.reduced = True

    def _collect(self) -> None:
        first_error: Exception | None = None
        for bucket in self._buckets:
            try:
                self._finish(bucket)
            except (HorovodInternalError, ValueError) as error:
                first_error = first_error or error
        for slot in self.slots:
            if slot.pending is not None:
                try:
                    self._finish_alone(slot)
                except (HorovodInternalError, ValueError) as error:
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _finish(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        handle, bucket.handle = bucket.handle, 0
        self._runtime.wait(handle)
        self._runtime.release(handle)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot in bucket.slots:
            parameter = slot.parameter
            grad = parameter.grad
            if grad is None and not parameter.requires_grad:
                continue  # frozen: must not be updated
            if not slot.apart:
                if grad is not slot.view:
                    parameter.grad = slot.view
                continue
            if grad is None:
                grad = parameter.grad = torch.empty_like(parameter, requires_grad=False)
            targets.append(grad)
            sources.append(slot.view)  # type: ignore[arg-type]
        if targets:
            torch._foreach_copy_(targets, sources)

    def _finish_alone(self, slot: Slot) -> None:
        (handle, wire, ctx), slot.pending = slot.pending, None
        output = mpi_ops.synchronize(handle)
        parameter = slot.parameter
        grad = parameter.grad
        if wire is None:  # sparse
            parameter.grad = output
            return
        if grad is None and not parameter.requires_grad:
            return
        output = self._compression.decompress(output, ctx)
        if grad is None or grad.is_sparse:
            parameter.grad = output.clone()
        elif output.data_ptr() != grad.data_ptr():
            grad.copy_(output)

    def _end(self) -> None:
        self.outstanding = False
        self._order.clear()
        for bucket in self._buckets:
            bucket.handle = 0
        for slot in self.slots:
            slot.left = slot.expected
            slot.arrived = slot.apart = False
            slot.passes = slot.fires_in_pass = 0
            slot.pending = slot.backward = None

    def discard(self) -> None:
        """Gives up reductions in flight (a state is being restored); their memory is kept, not reused."""
        if not self.outstanding:
            return
        self._abandoned.append(([b.flat for b in self._buckets if b.handle], [s.pending for s in self.slots]))
        self._forget_layout()
        self._end()
        self.reduced = False

    # --- agreement -------------------------------------------------------------------------------------------------

    def _forget_layout(self) -> None:
        self._learned = False
        self._undeclare()
        for slot in self.slots:
            slot.bucket = slot.view = None
            slot.fires = 0
            slot.expected = slot.left = self.passes

    def _declare(self, layout: int) -> None:
        """Collective. From here on a bucket starts without any message where all ranks share memory."""
        assert self._runtime is not None
        if self._buckets:
            self._declared = self._runtime.declare(
                [f"gradients.{layout}.{bucket.index}" for bucket in self._buckets],
                [bucket.address for bucket in self._buckets],
                [bucket.flat.numel() for bucket in self._buckets],
                [bucket.number for bucket in self._buckets],
                self._op,
                *self._scales,
                self._set_id,
            )

    def _undeclare(self) -> None:
        if self._buckets and self._runtime is not None and is_initialized() and native() is self._runtime:
            self._runtime.undeclare(self._set_id, self._declared)
        self._buckets = []

    def __del__(self) -> None:
        try:
            self._undeclare()
        except (AttributeError, TypeError, HorovodInternalError):
            pass  # the interpreter, or the runtime, is going

    def _agree_on(self, slots: Sequence[Slot]) -> None:
        """Checks that the ranks mean the same parameters, and learns which gradients are sparse on any rank."""
        ordered = sorted(slots, key=lambda slot: slot.name)
        form = [(s.name, tuple(s.parameter.shape), str(s.parameter.dtype), s.strides()) for s in ordered]
        digest = int.from_bytes(hashlib.sha256(repr(form).encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest])
        mpi_ops.allreduce_(both, name="horoclone.optimizer.parameters", op=Max, process_set=self._process_set)
        if int(both[0]) != -int(both[1]):
            from horoclone.torch.functions import allgather_object

            forms = allgather_object(form, "horoclone.optimizer.differences", self._process_set)
            raise ValueError(_difference(forms, self._process_set.ranks or []))
        flags = torch.tensor([_flag(slot) for slot in ordered], dtype=torch.uint8)
        mpi_ops.allreduce_(flags, name="horoclone.optimizer.sparse", op=Max, process_set=self._process_set)
        for slot, flag in zip(ordered, flags.tolist(), strict=True):
            if not self._sparse_as_dense:
                slot.sparse_dim = max(0, flag - 1)
            if flag and slot.fires == 0:
                slot.fires = 1  # used on another rank

    def _form_buckets(self) -> None:
        """The order of rank 0 of the set, agreed by broadcast, cut into buckets."""
        global _formed
        assert self._runtime is not None
        ordered = sorted(self.slots, key=lambda slot: slot.name)
        index = {slot: i for i, slot in enumerate(ordered)}
        observed = list(self._order) + [slot for slot in ordered if slot not in self._order]
        observed.sort(key=lambda slot: slot.fires == 0)  # stable: never used on any rank goes last
        _formed += 1
        used = sum(slot.fires > 0 for slot in observed)
        message = torch.tensor([_formed, used, *(index[slot] for slot in observed)])
        root = (self._process_set.ranks or [0])[0]
        mpi_ops.broadcast_(message, root, "horoclone.optimizer.order", self._process_set)
        layout, used, *places = message.tolist()
        if self._buckets_allowed():
            runs = [
                [ordered[i] for i in part if not ordered[i].sparse_dim]
                for part in (places[:used], places[used:])
            ]
            plan = plan_buckets(runs, self._groups_of(runs[0] + runs[1]), self._wire_dtype_of)
            self._undeclare()
            self._buckets = [Bucket(self._runtime, k, dtype, slots) for k, (dtype, slots) in enumerate(plan)]
            self._declare(layout)
        for slot in self.slots:
            slot.expected = self.passes * max(1, slot.fires)
        self._learned = True

    def _buckets_allowed(self) -> bool:
        """A compressor of the user's own sees one gradient at a time, as it would in Horovod."""
        return self._compression is Compression.none or hasattr(self._compression, "wire_dtype")

    def _wire_dtype_of(self, slot: Slot) -> torch.dtype:
        dtype = slot.parameter.dtype
        return getattr(self._compression, "wire_dtype", dtype) if dtype.is_floating_point else dtype

    def _groups_of(self, dense: Sequence[Slot]) -> list[list[Slot]]:
        if isinstance(self.groups, int):
            if self.groups <= 0:
                return []
            size, extra = divmod(len(dense), self.groups)
            bounds = [k * size + min(k, extra) for k in range(self.groups + 1)]
            return [list(dense[a:b]) for a, b in pairwise(bounds) if b > a]
        allowed = set(dense)
        return [
            [self._slot_of[p] for p in group if p in self._slot_of and self._slot_of[p] in allowed]
            for group in self.groups
        ]


def _outermost_backward() -> FrameType | None:
    """Frame of the user's backward call (a reentrant checkpoint nests another one inside)."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.autograd":
            found = frame
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _flag(slot: Slot) -> int:
    grad = slot.parameter.grad
    if grad is None:
        return 0
    return 1 + (grad.sparse_dim() if grad.is_sparse else 0)


def _empty_sparse(slot: Slot) -> torch.Tensor:
    shape, sparse_dim = slot.parameter.shape, slot.sparse_dim
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64)
    values = torch.empty((0, *shape[sparse_dim:]), dtype=slot.parameter.dtype)
    return torch.sparse_coo_tensor(indices, values, shape)


def _difference(forms: Sequence[list[Any]], ranks: Sequence[int]) -> str:
    """Which parameter differs between which ranks: the first difference from the first rank's list."""
    named = [{name: (list(shape), dtype, stride) for name, shape, dtype, stride in form} for form in forms]
    for rank, mine in zip(ranks[1:], named[1:], strict=True):
        for name in sorted(named[0].keys() | mine.keys()):
            here, there = named[0].get(name, "no such parameter"), mine.get(name, "no such parameter")
            if here != there:
                return (
                    f"the ranks optimise different parameters: {name!r} is {here} on rank {ranks[0]} and {there} on "
                    f"rank {rank} (shape, dtype, strides). Build the same model, with the same trainable parameters, "
                    "on every rank."
                )
    return "the ranks optimise different parameters"
