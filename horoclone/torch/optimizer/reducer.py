"""Reduces a set of gradients over the ranks while backward still runs.

The first step only observes: which gradients come, in which order, and how often the hooks fire. At its end the ranks
agree on buckets; from then on a bucket is submitted by the hook that completes it, and synchronize() waits for all of
them. Thread: whichever run backward and step (autograd runs CPU hooks on the caller's thread; there may be several).
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
from horoclone.torch.operations import requests, spans
from horoclone.torch.operations.gpu import HOST, follow, is_capturing, offer_memory, place_of
from horoclone.torch.operations.tensors import from_result
from horoclone.torch.optimizer.agreement import agree_on_order, agree_on_parameters, by_name
from horoclone.torch.optimizer.backward_calls import outermost_backward
from horoclone.torch.optimizer.buckets import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    Bucket,
    GradState,
    groups_of,
    is_dense,
    plan_buckets,
)
from horoclone.torch.optimizer.gradient_bucket import GradientBucket, run_compressors
from horoclone.torch.optimizer.residuals import Residuals
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
        self.states: list[GradState] = []
        self.groups: int | list[list[torch.Tensor]] = 0
        self.buckets: list[Bucket] = []
        self.bucket_bytes = BUCKET_BYTES  # that gradients outside of groups are gathered up to
        self.shards = 1  # parts that a bucket is cut into: the set's size where state is sharded by elements
        self.layout = 0  # number of the bucket layout, the same on every rank; 0: not formed yet
        self._terms = terms
        self.residuals = Residuals(terms.compression)
        self._state_of: dict[torch.Tensor, GradState] = {}
        self.local: dict[torch.Tensor, None] = {}  # parameters whose gradients stay here
        self._runtime: Runtime | None = None
        self._set_id = 0
        self._learned = False
        self._scatter = False  # a bucket is reduced to shards: half of an allreduce, except in shared memory
        self._declared: int | None = None  # the core's number for the buckets
        self._abandoned: list[Any] = []  # memory of reductions given up: the core may still write to it
        self._order: dict[GradState, None] = {}  # in a learning step: by the last time that each hook fired
        self._incomplete = 0  # counted gradients that have not arrived in this step
        # Guards the counts of one step (left, waiting, _incomplete, outstanding) when several threads run backward.
        self._lock = threading.Lock()

    # --- registration ----------------------------------------------------------------------------------------------

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """Takes a parameter that requires a gradient under this name; the next step is a learning step."""
        state = GradState(parameter, name)
        state.expected = state.left = self.passes
        self.states.append(state)
        self._state_of[parameter] = state
        self._learned = False
        self._watch(parameter)

    def add_local(self, parameters: Iterable[torch.Tensor]) -> None:
        """Parameters whose gradients are not reduced from now on; also ones that were until now."""
        if self.outstanding:
            raise RuntimeError(
                "register_local() between backward and optimizer.step(): call it before backward"
            )
        for parameter in parameters:
            state = self._state_of.pop(parameter, None)
            if state is not None:
                self.states.remove(state)
                self._forget_layout()
            elif parameter not in self.local and parameter.requires_grad:
                self._watch(parameter)
            self.local[parameter] = None

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
        return parameter in self._state_of or parameter in self.local

    def set_passes(self, passes: int) -> None:
        """Backward passes per step from now on."""
        self.passes = passes
        for state in self.states:
            state.expected = state.left = passes * max(1, state.fires)

    # --- hooks -----------------------------------------------------------------------------------------------------

    def _fired(self, parameter: torch.Tensor) -> None:
        with self._lock:
            if not self.outstanding:
                self._begin()
            state = self._state_of.get(parameter)
            if state is None:  # local
                return
            if not self._learned:
                self._observe(state)
                return
            state.left -= 1
            if state.left > 0:
                return
        if state.left < 0:
            raise AssertionError(f"{TOO_MANY} (parameter {state.name!r})")
        grad = parameter.grad
        if grad is None or grad.requires_grad:
            raise AssertionError(
                f"the gradient of {state.name!r} is {'missing' if grad is None else 'part of a graph'}: backward with "
                "create_graph=True cannot be reduced; use torch.autograd.grad for the inner gradients"
            )
        self._arrive(state, grad)

    def _begin(self) -> None:
        """First hook, or synchronize without one, since the last synchronize()."""
        runtime = native()
        if runtime is not self._runtime:
            self._forget_layout()
            self._runtime = runtime
            offer_memory(runtime)
            own = self._terms.process_set
            self._set_id = 0 if own is global_process_set else id_of(own)
        self.outstanding = True
        self.reduced = self.partial = False
        self._incomplete = 0
        for bucket in self.buckets:
            bucket.waiting = 0
        for state in self.states:
            state.counted = state.parameter.requires_grad
            if state.counted:
                self._incomplete += 1
                if state.bucket is not None:
                    state.bucket.waiting += 1

    def _observe(self, state: GradState) -> None:
        """Learning step: several calls within one backward are one pass, whose last call completes the gradient."""
        backward = outermost_backward()
        if backward is None or backward is not state.backward:
            state.backward, state.fires_in_pass = backward, 0
            state.passes += 1
            if state.passes > self.passes:
                raise AssertionError(f"{TOO_MANY} (parameter {state.name!r})")
            if state.passes == self.passes and state.counted:
                self._incomplete -= 1
        state.fires_in_pass += 1
        state.fires = max(state.fires, state.fires_in_pass)
        self._order.pop(state, None)
        self._order[state] = None

    def _arrive(self, state: GradState, grad: torch.Tensor) -> None:
        state.arrived = state.used = True
        bucket = state.bucket
        if bucket is None:
            submit_alone(state, self._terms)
            with self._lock:
                self._incomplete -= state.counted
            return
        if bucket.sent:
            raise RuntimeError(
                f"the gradient of {state.name!r} came after its bucket had been sent off: requires_grad must not "
                "change between the first backward of a step and optimizer.step(); cross_barrier: or a parameter "
                "is read by no module's forward"
            )
        if grad is not state.view:
            state.place(grad)
        with self._lock:
            bucket.waiting -= state.counted
            self._incomplete -= state.counted
            full = bucket.waiting == 0 and state.counted
        if full:
            self._submit(bucket)

    # --- submission ------------------------------------------------------------------------------------------------

    def _submit(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        for state in bucket.states:
            if not state.arrived:  # frozen, or unused in this step
                self._fill(state)
        bucket.sent = True
        try:
            if bucket.exposed is None:
                bucket.handle = self._submit_flat(bucket)
                return
            with torch.no_grad():
                bucket.work = self._terms.compression.reduce(bucket.exposed)
                bucket.handle = next(bucket.work, None)
        except BaseException:
            # It was refused, in a capture say: synchronize() sends it again, or hears the reason again.
            bucket.sent, bucket.work, bucket.handle = False, None, None
            raise

    def _submit_flat(self, bucket: Bucket) -> int:
        assert self._runtime is not None
        bucket.place = place_of(bucket.flat)
        if not self._scatter:
            assert self._declared is not None
            return self._submit_declared(bucket, self._declared)
        target = None if bucket.place is HOST else self._shard_of(bucket)  # there it works in place
        return requests.submit(
            self._runtime, REDUCESCATTER, self._name_of(bucket), source=bucket.flat, target=target,
            dtype=bucket.number, process_set=self._set_id, place=bucket.place, **self._terms.reduction(),
        )  # fmt: skip

    def _submit_declared(self, bucket: Bucket, declared: int) -> int:
        assert self._runtime is not None
        under = spans.profiler._is_profiler_enabled
        span = spans.Submission("allreduce", self._name_of(bucket)) if under else None
        try:
            handle = self._runtime.submit_declared(
                self._set_id, declared, bucket.index, bucket.place[1], bucket.priority
            )
            return handle if span is None else span.gave(handle)
        finally:
            if span is not None:
                span.end()

    def _fill(self, state: GradState) -> None:
        """A gradient whose hooks did not complete it: what is in parameter.grad, else zeros."""
        assert state.view is not None
        grad = state.parameter.grad
        state.used = grad is not None
        if grad is None:
            state.view.zero_()
            state.apart = state.view.dtype != state.parameter.dtype or state.becomes_sparse
        elif grad is not state.view:
            state.place(grad)
        state.arrived = True

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
        span = spans.Span("synchronize", None) if spans.profiler._is_profiler_enabled else None
        try:
            learning = not self._learned
            if learning and is_capturing():
                raise Unsupported(
                    "this step is being captured into a CUDA graph, but its gradients have no buckets yet. Run at "
                    "least two whole steps (forward, backward, optimizer.step()) on every rank before the capture"
                )
            before = len(self.states)
            find_new()
            if learning or len(self.states) > before:
                self._agree_on(self.states if learning else self.states[before:])
            for state in self.states:
                if not state.arrived and state.bucket is None:
                    submit_alone(state, self._terms)
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
            if span is not None:
                span.end()
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
        for state in self.states:
            if state.pending is not None:
                try:
                    finish_alone(state, self._terms)
                except (HorovodInternalError, ValueError) as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _finish(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        if bucket.exposed is None:
            handle, bucket.handle = bucket.handle, None
            spans.wait(self._runtime, handle)
            follow(self._runtime, handle, bucket.place)
            if self._scatter:
                self._keep_share(bucket, handle)
            self._runtime.release(handle)
        self._hand_out(bucket)

    def _keep_share(self, bucket: Bucket, handle: int) -> None:
        """Puts this rank's shard of the sum where it belongs in the bucket; the rest of it stays as it was."""
        assert self._runtime is not None
        if bucket.place is HOST:
            self._shard_of(bucket).copy_(from_result(self._runtime.result(handle), (), bucket.flat.dtype))
        self.partial = True

    def _shard_of(self, bucket: Bucket) -> torch.Tensor:
        return bucket.flat.chunk(self.shards)[self._terms.process_set.rank() or 0]

    @torch.no_grad()
    def gather(self) -> None:
        """After synchronize() that has left this rank with its shards only: makes the gradients whole. Collective."""
        runtime, shards = self._runtime, [self._shard_of(bucket) for bucket in self.buckets]
        assert runtime is not None
        places = [place_of(shard) for shard in shards]
        handles = [
            requests.submit(
                runtime, ALLGATHER, self._name_of(bucket), source=shard, target=bucket.flat, dtype=bucket.number,
                process_set=self._set_id, place=place,
            )
            for bucket, shard, place in zip(self.buckets, shards, places, strict=True)
        ]  # fmt: skip
        for handle, place in zip(handles, places, strict=True):
            spans.wait(runtime, handle)
            follow(runtime, handle, place)
            runtime.release(handle)
        for state in self.states:
            grad = state.parameter.grad
            if state.view is not None and grad is not None and grad is not state.view:
                grad.copy_(state.view)
        self.partial = False

    def _hand_out(self, bucket: Bucket) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for state in bucket.states:
            parameter = state.parameter
            grad = parameter.grad
            if grad is None and not parameter.requires_grad:
                continue  # frozen: must not be updated
            if not state.apart:
                if grad is not state.view:
                    parameter.grad = state.view
                continue
            if state.becomes_sparse:
                state.hand_out_sparse(state.view)  # type: ignore[arg-type]
                continue
            if grad is None:
                grad = parameter.grad = torch.empty_like(parameter, requires_grad=False)
            targets.append(grad)
            sources.append(state.view)  # type: ignore[arg-type]
        if targets:
            torch._foreach_copy_(targets, sources)

    def _clear_unused(self) -> None:
        """Gradients that no rank has computed go back to None."""
        ordered = by_name(self.states)
        used = torch.tensor([state.used for state in ordered], dtype=torch.uint8)
        operations.allreduce_(
            used, name="horoclone.optimizer.used", op=Max, process_set=self._terms.process_set
        )
        for state, flag in zip(ordered, used.tolist(), strict=True):
            if not flag:
                state.parameter.grad = None

    def _scale_local(self) -> None:
        size = self._terms.process_set.size() or 1
        if self._terms.scale_local_gradients and self._terms.op == Average and size > 1:
            for parameter in self.local:
                if parameter.grad is not None:
                    parameter.grad.div_(size)

    def _end(self) -> None:
        self.outstanding = False
        self._order.clear()
        for bucket in self.buckets:
            bucket.handle = bucket.work = None
            bucket.sent = False
        for state in self.states:
            state.left = state.expected
            state.arrived = state.apart = state.used = False
            state.passes = state.fires_in_pass = 0
            state.pending = state.backward = None

    def discard(self) -> None:
        """Gives up reductions in flight (a state is being restored); their memory is kept, not reused."""
        if not self.outstanding:
            return
        self._abandoned.append(([b.flat for b in self.buckets if b.sent], [s.pending for s in self.states]))
        self._forget_layout()
        self._end()
        self.reduced = False

    # --- agreement -------------------------------------------------------------------------------------------------

    def _forget_layout(self) -> None:
        self._learned = False
        self._undeclare()
        for state in self._state_of.values():
            state.bucket = state.view = None
            state.fires = 0
            state.expected = state.left = self.passes

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
        self._withdraw()
        self.residuals.leave(self.buckets)
        self.buckets = []

    def _withdraw(self) -> None:
        """Tells the core that the buckets end. Touches no tensor: the interpreter may be collecting them."""
        runtime, declared, self._declared = self._runtime, self._declared, None
        if declared is not None and runtime is not None and is_initialized() and native() is runtime:
            runtime.undeclare(self._set_id, declared)

    def __del__(self) -> None:
        try:
            self._withdraw()
        except (AttributeError, TypeError, HorovodInternalError):
            pass  # the interpreter, or the runtime, is going

    def _agree_on(self, states: Sequence[GradState]) -> None:
        """Checks that the ranks mean the same parameters, and learns which gradients are sparse on any rank."""
        flags = agree_on_parameters(states, self._terms.process_set)
        for state, flag in zip(by_name(states), flags, strict=True):
            if not self._terms.sparse_as_dense:
                state.sparse_dim = max(0, flag - 1)
            elif flag > 1 and self.shards == 1:  # sharded by elements it is updated in dense pieces
                state.becomes_sparse = True
            if flag and state.fires == 0:
                state.fires = 1  # used on another rank

    def _form_buckets(self) -> None:
        """The order of rank 0 of the set, agreed by broadcast, cut into buckets."""
        assert self._runtime is not None
        observed = list(self._order) + [state for state in by_name(self.states) if state not in self._order]
        self.layout, used, unused = agree_on_order(observed, self._terms.process_set)
        if self._buckets_allowed():
            runs = [[state for state in part if self._fits_bucket(state)] for part in (used, unused)]
            groups = groups_of(self.groups, runs[0] + runs[1])
            size = self.bucket_bytes
            if size == BUCKET_BYTES and self.states and place_of(self.states[0].parameter) is not HOST:
                size = GPU_BUCKET_BYTES
            plan = plan_buckets(runs, groups, self._wire_dtype_of, size)
            self._undeclare()
            self.buckets = [
                Bucket(self._runtime, k, dtype, states, self.shards) for k, (dtype, states) in enumerate(plan)
            ]
            on_gpu = any(bucket.place is not HOST for bucket in self.buckets)
            self._scatter = self.shards > 1 and (on_gpu or not self._runtime.shares_memory())
            if reduces_buckets(self._terms.compression):
                self._scatter = False
                self._expose()
            elif not self._scatter:
                self._declare()
        for state in self.states:
            state.expected = self.passes * max(1, state.fires)
        self._learned = True

    def _fits_bucket(self, state: GradState) -> bool:
        together = state.parameter.device == self.states[0].parameter.device
        return together and not state.sparse_dim and (self.shards == 1 or is_dense(state.parameter))

    def _name_of(self, bucket: Bucket) -> str:
        return f"gradients.{self.layout}.{bucket.index} ({bucket.summary})"

    def _expose(self) -> None:
        for bucket in self.buckets:
            bucket.exposed = GradientBucket(
                bucket, self._name_of(bucket), self._terms.op, self._terms.process_set
            )
            self.residuals.enter(bucket)

    def _buckets_allowed(self) -> bool:
        """A stateless compressor of the user's own sees one gradient at a time, as it would in Horovod."""
        chosen = self._terms.compression
        return chosen is Compression.none or hasattr(chosen, "wire_dtype") or reduces_buckets(chosen)

    def _wire_dtype_of(self, state: GradState) -> torch.dtype:
        dtype = state.parameter.dtype
        return getattr(self._terms.compression, "wire_dtype", dtype) if dtype.is_floating_point else dtype
