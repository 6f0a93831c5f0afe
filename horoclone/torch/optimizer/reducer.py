"""Reduces a set of gradients over the ranks while backward still runs.

The first step only watches: which gradients come, in which order, how often the hooks fire. At its end the ranks agree
on buckets; from then on a bucket is submitted by the hook that completes it, and synchronize() waits for all of them.
Thread: whichever run backward and step (autograd runs CPU hooks on the caller's thread; there may be several).
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from horoclone.errors import HorovodInternalError, Unsupported
from horoclone.ops import ALLGATHER, REDUCESCATTER, Average, Max
from horoclone.process_sets import global_process_set, id_of
from horoclone.runtime import is_initialized, native
from horoclone.torch import operations
from horoclone.torch.compression import Compression
from horoclone.torch.operations import requests
from horoclone.torch.operations.gpu import HOST, follow, is_capturing, place_of
from horoclone.torch.operations.tensors import from_result
from horoclone.torch.optimizer.agreement import agree_on_order, agree_on_parameters, by_name
from horoclone.torch.optimizer.backward_calls import outermost_backward
from horoclone.torch.optimizer.buckets import BUCKET_BYTES, Bucket, Slot, groups_of, is_dense, plan_buckets
from horoclone.torch.optimizer.gradient_bucket import GradientBucket, run_compressors
from horoclone.torch.optimizer.single import Terms, finish_alone, reduces_buckets, submit_alone

if TYPE_CHECKING:
    from horoclone._core import Runtime

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class Reducer:
    """The gradients of one optimizer."""

    def __init__(self, passes: int, terms: Terms) -> None:
        self.passes = passes
        self.outstanding = False  # a hook has fired since the last synchronize()
        self.reduced = False  # synchronize() has run and no hook has fired since
        self.partial = False  # and what it left here is right only in this rank's shards of the buckets
        self.slots: list[Slot] = []
        self.groups: int | list[list[torch.Tensor]] = 0
        self.buckets: list[Bucket] = []
        self.bucket_bytes = BUCKET_BYTES  # that slots outside of groups are gathered up to
        self.shards = 1  # parts that a bucket is cut into: the set's size where state is sharded by elements
        self.layout = 0  # number of the bucket layout, the same on every rank; 0: not formed yet
        self._terms = terms
        self._slot_of: dict[torch.Tensor, Slot] = {}
        self._local: dict[torch.Tensor, None] = {}  # parameters whose gradients stay here
        self._runtime: Runtime | None = None
        self._set_id = 0
        self._learned = False
        self._scatter = False  # a bucket is reduced to shards: between machines that is half of an allreduce
        self._declared: int | None = None  # the core's number for the buckets
        self._abandoned: list[Any] = []  # memory of reductions given up: the core may still write to it
        self._order: dict[Slot, None] = {}  # in a learning step: by the last time that each hook fired
        self._incomplete = 0  # counted slots that have not arrived in this step
        # Guards the counts of one step (left, waiting, _incomplete, outstanding) when several threads run backward.
        self._lock = threading.Lock()

    # --- registration ----------------------------------------------------------------------------------------------

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """Takes a parameter that requires a gradient under this name; the next step is a learning step."""
        slot = Slot(parameter, name)
        slot.expected = slot.left = self.passes
        self.slots.append(slot)
        self._slot_of[parameter] = slot
        self._learned = False
        self._watch(parameter)

    def add_local(self, parameters: Iterable[torch.Tensor]) -> None:
        """Parameters whose gradients are not reduced from now on; also ones that were until now."""
        if self.outstanding:
            raise RuntimeError(
                "register_local() between backward and optimizer.step(): call it before backward"
            )
        for parameter in parameters:
            slot = self._slot_of.pop(parameter, None)
            if slot is not None:
                self.slots.remove(slot)
                self._forget_layout()
            elif parameter not in self._local and parameter.requires_grad:
                self._watch(parameter)
            self._local[parameter] = None

    def _watch(self, parameter: torch.Tensor) -> None:
        # A dropped optimizer must not go on reducing its old model's gradients.
        reducer_of = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            reducer = reducer_of()
            if reducer is not None:
                reducer._fired(parameter)

        parameter.register_post_accumulate_grad_hook(hook)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether `add` or `add_local` has been called for it."""
        return parameter in self._slot_of or parameter in self._local

    def set_passes(self, passes: int) -> None:
        """Backward passes per step from now on."""
        self.passes = passes
        for slot in self.slots:
            slot.expected = slot.left = passes * max(1, slot.fires)

    # --- hooks -----------------------------------------------------------------------------------------------------

    def _fired(self, parameter: torch.Tensor) -> None:
        with self._lock:
            if not self.outstanding:
                self._begin()
            slot = self._slot_of.get(parameter)
            if slot is None:  # local
                return
            if not self._learned:
                self._observe(slot)
                return
            slot.left -= 1
            if slot.left > 0:
                return
        if slot.left < 0:
            raise AssertionError(f"{TOO_MANY} (parameter {slot.name!r})")
        grad = parameter.grad
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
            own = self._terms.process_set
            self._set_id = 0 if own is global_process_set else id_of(own)
        self.outstanding = True
        self.reduced = self.partial = False
        self._incomplete = 0
        for bucket in self.buckets:
            bucket.waiting = 0
        for slot in self.slots:
            slot.counted = slot.parameter.requires_grad
            if slot.counted:
                self._incomplete += 1
                if slot.bucket is not None:
                    slot.bucket.waiting += 1

    def _observe(self, slot: Slot) -> None:
        """Learning step: several calls within one backward are one pass, whose last call completes the gradient."""
        backward = outermost_backward()
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
        slot.arrived = slot.used = True
        bucket = slot.bucket
        if bucket is None:
            submit_alone(slot, self._terms)
            with self._lock:
                self._incomplete -= slot.counted
            return
        if bucket.sent:
            raise RuntimeError(
                f"the gradient of {slot.name!r} came after its bucket had been sent off: requires_grad must not "
                "change between the first backward of a step and optimizer.step(); cross_barrier: or a parameter "
                "is read by no module's forward"
            )
        if grad is not slot.view:
            slot.place(grad)
        with self._lock:
            bucket.waiting -= slot.counted
            self._incomplete -= slot.counted
            full = bucket.waiting == 0 and slot.counted
        if full:
            self._submit(bucket)

    # --- submission ------------------------------------------------------------------------------------------------

    def _submit(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        for slot in bucket.slots:
            if not slot.arrived:  # frozen, or unused in this step
                self._fill(slot)
        bucket.sent = True
        if bucket.exposed is not None:
            with torch.no_grad():
                bucket.work = self._terms.compression.reduce(bucket.exposed)
                bucket.handle = next(bucket.work, None)
        elif self._scatter:
            bucket.handle = requests.submit(
                self._runtime, REDUCESCATTER, self._name_of(bucket), source=bucket.flat, dtype=bucket.number,
                process_set=self._set_id, **self._terms.reduction(),
            )  # fmt: skip
        else:
            assert self._declared is not None
            bucket.place = place_of(bucket.flat)
            bucket.handle = self._runtime.submit_declared(
                self._set_id, self._declared, bucket.index, bucket.place[1], bucket.priority
            )

    def _fill(self, slot: Slot) -> None:
        """A slot whose hooks did not complete it: what is in parameter.grad, else zeros."""
        assert slot.view is not None
        grad = slot.parameter.grad
        slot.used = grad is not None
        if grad is None:
            slot.view.zero_()
            slot.apart = slot.view.dtype != slot.parameter.dtype or slot.becomes_sparse
        elif grad is not slot.view:
            slot.place(grad)
        slot.arrived = True

    # --- waiting ---------------------------------------------------------------------------------------------------

    @property
    def leaves_none(self) -> bool:
        """Whether a gradient that no rank has computed is None after synchronize()."""
        return self._terms.unused_as_none

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
            if learning and is_capturing():
                raise Unsupported(
                    "this step is being captured into a CUDA graph, but its gradients have no buckets yet. Run at "
                    "least two whole steps (forward, backward, optimizer.step()) on every rank before the capture"
                )
            before = len(self.slots)
            find_new()
            if learning or len(self.slots) > before:
                self._agree_on(self.slots if learning else self.slots[before:])
            for slot in self.slots:
                if not slot.arrived and slot.bucket is None:
                    submit_alone(slot, self._terms)
            for bucket in self.buckets:
                if not bucket.sent:
                    self._submit(bucket)
            self._collect()
            if self._terms.unused_as_none:
                self._clear_unused()
            if learning:
                if self.partial:  # new buckets will be cut elsewhere
                    self.gather()
                self._form_buckets()
            self._scale_local()
        finally:
            self._end()
        self.reduced = True

    def _collect(self) -> None:
        errors: list[Exception] = []
        run_compressors(self.buckets, errors)
        for bucket in self.buckets:
            try:
                self._finish(bucket)
            except (HorovodInternalError, ValueError) as error:
                errors.append(error)
        for slot in self.slots:
            if slot.pending is not None:
                try:
                    finish_alone(slot, self._terms)
                except (HorovodInternalError, ValueError) as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _finish(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        if bucket.exposed is None:
            handle, bucket.handle = bucket.handle, None
            self._runtime.wait(handle)
            follow(self._runtime, handle, bucket.place)
            if self._scatter:
                self._keep_share(bucket, handle)
            self._runtime.release(handle)
        self._hand_out(bucket)

    def _keep_share(self, bucket: Bucket, handle: int) -> None:
        """Puts this rank's shard of the sum where it belongs in the bucket; the rest of it stays as it was."""
        assert self._runtime is not None
        self._shard_of(bucket).copy_(from_result(self._runtime.result(handle), (), bucket.flat.dtype))
        self.partial = True

    def _shard_of(self, bucket: Bucket) -> torch.Tensor:
        return bucket.flat.chunk(self.shards)[self._terms.process_set.rank() or 0]

    @torch.no_grad()
    def gather(self) -> None:
        """After synchronize() that has left this rank with its shards only: makes the gradients whole. Collective."""
        runtime, shards = self._runtime, [self._shard_of(bucket) for bucket in self.buckets]
        assert runtime is not None
        handles = [
            requests.submit(
                runtime, ALLGATHER, self._name_of(bucket), source=shard, target=bucket.flat, dtype=bucket.number,
                process_set=self._set_id,
            )
            for bucket, shard in zip(self.buckets, shards, strict=True)
        ]  # fmt: skip
        for handle in handles:
            runtime.wait(handle)
            runtime.release(handle)
        for slot in self.slots:
            grad = slot.parameter.grad
            if slot.view is not None and grad is not None and grad is not slot.view:
                grad.copy_(slot.view)
        self.partial = False

    def _hand_out(self, bucket: Bucket) -> None:
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
            if slot.becomes_sparse:
                slot.hand_out_sparse(slot.view)  # type: ignore[arg-type]
                continue
            if grad is None:
                grad = parameter.grad = torch.empty_like(parameter, requires_grad=False)
            targets.append(grad)
            sources.append(slot.view)  # type: ignore[arg-type]
        if targets:
            torch._foreach_copy_(targets, sources)

    def _clear_unused(self) -> None:
        """Gradients that no rank has computed go back to None."""
        ordered = by_name(self.slots)
        used = torch.tensor([slot.used for slot in ordered], dtype=torch.uint8)
        operations.allreduce_(
            used, name="horoclone.optimizer.used", op=Max, process_set=self._terms.process_set
        )
        for slot, flag in zip(ordered, used.tolist(), strict=True):
            if not flag:
                slot.parameter.grad = None

    def _scale_local(self) -> None:
        size = self._terms.process_set.size() or 1
        if self._terms.scale_local_gradients and self._terms.op == Average and size > 1:
            for parameter in self._local:
                if parameter.grad is not None:
                    parameter.grad.div_(size)

    def _end(self) -> None:
        self.outstanding = False
        self._order.clear()
        for bucket in self.buckets:
            bucket.handle = bucket.work = None
            bucket.sent = False
        for slot in self.slots:
            slot.left = slot.expected
            slot.arrived = slot.apart = slot.used = False
            slot.passes = slot.fires_in_pass = 0
            slot.pending = slot.backward = None

    def discard(self) -> None:
        """Gives up reductions in flight (a state is being restored); their memory is kept, not reused."""
        if not self.outstanding:
            return
        self._abandoned.append(([b.flat for b in self.buckets if b.sent], [s.pending for s in self.slots]))
        self._forget_layout()
        self._end()
        self.reduced = False

    # --- agreement -------------------------------------------------------------------------------------------------

    def _forget_layout(self) -> None:
        self._learned = False
        self._undeclare()
        for slot in self._slot_of.values():
            slot.bucket = slot.view = None
            slot.fires = 0
            slot.expected = slot.left = self.passes

    def _declare(self) -> None:
        """Collective. From here on a bucket starts without any message where all ranks share memory."""
        assert self._runtime is not None
        if self.buckets:
            self._declared = self._runtime.declare(
                names=[self._name_of(b) for b in self.buckets], data=[b.address for b in self.buckets],
                counts=[b.flat.numel() for b in self.buckets], dtypes=[b.number for b in self.buckets],
                process_set=self._set_id, device=self.buckets[0].place[0], **self._terms.reduction(),
            )  # fmt: skip

    def _undeclare(self) -> None:
        declared, self._declared = self._declared, None
        if (
            declared is not None
            and self._runtime is not None
            and is_initialized()
            and native() is self._runtime
        ):
            self._runtime.undeclare(self._set_id, declared)
        self.buckets = []

    def __del__(self) -> None:
        try:
            self._undeclare()
        except (AttributeError, TypeError, HorovodInternalError):
            pass  # the interpreter, or the runtime, is going

    def _agree_on(self, slots: Sequence[Slot]) -> None:
        """Checks that the ranks mean the same parameters, and learns which gradients are sparse on any rank."""
        flags = agree_on_parameters(slots, self._terms.process_set)
        for slot, flag in zip(by_name(slots), flags, strict=True):
            if not self._terms.sparse_as_dense:
                slot.sparse_dim = max(0, flag - 1)
            elif (
                flag > 1 and self.shards == 1
            ):  # state that is sharded by elements is updated in dense pieces
                slot.becomes_sparse = True
            if flag and slot.fires == 0:
                slot.fires = 1  # used on another rank

    def _form_buckets(self) -> None:
        """The order of rank 0 of the set, agreed by broadcast, cut into buckets."""
        assert self._runtime is not None
        observed = list(self._order) + [slot for slot in by_name(self.slots) if slot not in self._order]
        self.layout, used, unused = agree_on_order(observed, self._terms.process_set)
        if self._buckets_allowed():
            runs = [[slot for slot in part if self._fits_bucket(slot)] for part in (used, unused)]
            groups = groups_of(self.groups, runs[0] + runs[1])
            plan = plan_buckets(runs, groups, self._wire_dtype_of, self.bucket_bytes)
            self._undeclare()
            self.buckets = [
                Bucket(self._runtime, k, dtype, slots, self.shards) for k, (dtype, slots) in enumerate(plan)
            ]
            on_host = all(bucket.place is HOST for bucket in self.buckets)
            self._scatter = self.shards > 1 and on_host and not self._runtime.shares_memory()
            if reduces_buckets(self._terms.compression):
                self._scatter = False
                self._expose()
            elif not self._scatter:
                self._declare()
        for slot in self.slots:
            slot.expected = self.passes * max(1, slot.fires)
        self._learned = True

    def _fits_bucket(self, slot: Slot) -> bool:
        together = slot.parameter.device == self.slots[0].parameter.device
        return together and not slot.sparse_dim and (self.shards == 1 or is_dense(slot.parameter))

    def _name_of(self, bucket: Bucket) -> str:
        return f"gradients.{self.layout}.{bucket.index}"

    def _expose(self) -> None:
        for bucket in self.buckets:
            bucket.exposed = GradientBucket(
                bucket, self._name_of(bucket), self._terms.op, self._terms.process_set
            )

    def _buckets_allowed(self) -> bool:
        """A stateless compressor of the user's own sees one gradient at a time, as it would in Horovod."""
        chosen = self._terms.compression
        return chosen is Compression.none or hasattr(chosen, "wire_dtype") or reduces_buckets(chosen)

    def _wire_dtype_of(self, slot: Slot) -> torch.dtype:
        dtype = slot.parameter.dtype
        return getattr(self._terms.compression, "wire_dtype", dtype) if dtype.is_floating_point else dtype
