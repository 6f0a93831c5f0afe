"""Reduces a set of gradients over the ranks while backward still runs.

The first step only observes: which gradients come, in which order, and how often the hooks fire. At its end the ranks
agree on buckets; from then on a bucket is submitted by the hook that completes it, and backward() ends when all of them
are reduced. synchronize() sends the gradients that some rank does without at times, and waits for the rest.
Thread: whichever run backward and step (autograd runs CPU hooks on the caller's thread; there may be several).
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from horoclone import weights
from horoclone.comparison import PLACES, Policy
from horoclone.errors import HorovodInternalError, Mismatch, Unsupported
from horoclone.gradient_names import Turn
from horoclone.ops import ALLGATHER, REDUCESCATTER, Average, Max, Min, Product, Sum
from horoclone.process_sets import global_process_set, id_of
from horoclone.runtime import is_initialized, native
from horoclone.runtime.steps import joins
from horoclone.torch import operations
from horoclone.torch.compression import Compression
from horoclone.torch.operations import requests, spans
from horoclone.torch.operations.gpu import HOST, follow, is_capturing, offer_memory, place_of
from horoclone.torch.operations.tensors import from_result, uncompiled
from horoclone.torch.operations.weighted import divide, weigh, wire_of
from horoclone.torch.optimizer.agreement import (
    agree_on_order,
    agree_on_parameters,
    by_name,
    first_that_differs,
)
from horoclone.torch.optimizer.backward_calls import BackwardCalls
from horoclone.torch.optimizer.buckets import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    Bucket,
    GradState,
    form_of,
    groups_of,
    is_dense,
    plan_buckets,
    with_other_content,
)
from horoclone.torch.optimizer.compared import Comparison
from horoclone.torch.optimizer.gradient_bucket import OptimizerBucket, run_compressors
from horoclone.torch.optimizer.residuals import Residuals
from horoclone.torch.optimizer.single import Terms, reduces_buckets, start_alone, submit_alone, wait_alone

if TYPE_CHECKING:
    from horoclone._core import Runtime

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
CHANGED = (
    "the gradient of {changed!r} was changed between backward() and optimizer.step(), while {pending} was not reduced "
    "yet: {why}. The ranks would have gone on with different parameters. Wait for all gradients before you change them "
    "(clipping, scaling, masks):\n"
    "    optimizer.synchronize()\n"
    "    ...  # the change\n"
    "    with optimizer.skip_synchronize():\n"
    "        optimizer.step()"
)

DIFFERS = (
    "the gradient of {name!r} was changed between backward() and optimizer.step(), differently on each rank, so that "
    "the ranks would have gone on with different parameters. Some parameters are local: norms over all gradients "
    "differ between ranks; so may the last bits of a norm with other numbers of threads (set OMP_NUM_THREADS "
    "alike) or other kinds of processors, and whether a parameter is frozen. Clip those of local parameters apart:\n"
    "    local = set(...)  # what was given as local_parameters\n"
    "    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p not in local], max_norm)\n"
    "    torch.nn.utils.clip_grad_norm_(local, max_norm)"
)
CHANGED_BY_HOOK = (
    "the gradient of {name!r} was changed by a hook while it was being reduced. Change it in one that was registered "
    "with parameter.register_hook() or parameter.register_post_accumulate_grad_hook(), or after backward()"
)
ADDED_LATE = (
    "a gradient scaler has looked at local gradients to which, on some rank, a further call of backward() had added: "
    "the other ranks know of no overflow in it, and would not leave out the same steps. Tell them, on every rank:\n"
    "    optimizer.synchronize()\n"
    "    with optimizer.skip_synchronize():\n"
    "        scaler.step(optimizer)"
)
UNREDUCED = (
    "this rank has computed fewer gradients in this step than in the first one or than backward_passes_per_step says, "
    "or backward() does not wait"
)
NOT_EVERYWHERE = "it was not computed by every rank in the first step"
WEIGHT_TOO_LATE = (
    "optimizer.set_weight() came after backward() had begun to reduce gradients of this step, or was the first one and "
    "came after a backward(): call it before the first backward() of each step"
)
WEIGHED_SPARSE = (
    "the gradient of {name!r} is sparse, and optimizer.set_weight() weighs dense ones: make the optimizer with "
    "sparse_as_dense=True"
)
SUPERSEDED = (
    "a newer hvd.DistributedOptimizer has taken over {what}, so that backward() no longer reduces gradients for this "
    "one: each parameter has one that reduces. Use the newer one, or drop it with all that holds it (del optimizer, "
    "scheduler), or give each parameter to one of them."
)
IN_SHARDS = "with shard_optimizer_state each rank has the result of its own share only until then"


_living: weakref.WeakSet[Reducer] = weakref.WeakSet()
_own_hooks: set[int] = set()  # the ids of all reducers' hooks, which change no gradient


def _may_train(parameter: torch.Tensor) -> bool:
    """Whether it has a gradient, now or once somebody unfreezes it."""
    differentiable = parameter.is_floating_point() or parameter.is_complex()
    return parameter.requires_grad or (
        differentiable and not is_lazy(parameter) and not parameter.is_inference()
    )


def _is_last(hooks: Iterable[int], own: int) -> bool:
    """Whether no hook of the user's comes after our own one."""
    for number in reversed(hooks):  # type: ignore[call-overload]
        if number == own:
            return True
        if number not in _own_hooks:
            break
    return False


@contextmanager
def _unfrozen(parameter: torch.Tensor) -> Iterator[None]:
    """torch takes no hook of a tensor that requires no gradient, and keeps those that it has while it requires none."""
    is_frozen = not parameter.requires_grad
    if is_frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if is_frozen:
            parameter.requires_grad_(False)


class Reducer:
    """The gradients of one optimizer."""

    def __init__(self, passes: int, terms: Terms, turn: Turn) -> None:
        self.passes = passes
        self._turn = turn
        self.outstanding = False  # a hook has fired since the last synchronize()
        self.may_wait = True  # unless gradients are not to be whole before the next forward
        self.lends = True  # parameter.grad becomes the memory of the buckets
        self.waits = True  # backward() ends when the gradients that every rank computes are reduced
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
        self._frozen: dict[torch.Tensor, str] = {}  # names of parameters that require no gradient yet
        self.local: dict[torch.Tensor, None] = {}  # parameters whose gradients stay here
        self.some_local = False  # some rank has such ones, as far as the ranks have agreed
        self._scaled: set[torch.Tensor] = set()  # local ones whose gradient is divided already in this step
        self._runtime: Runtime | None = None
        self._set_id = 0
        self._learned = False
        self._marked = False  # reductions take a mark to every rank that has other parameters by now
        self._marks_apart = False  # in operations of their own, not in the buckets
        self._marks: dict[bool | None, int | None] = {}  # handles of those sent apart, until they are read
        self._changed = False  # in a learning step: other ranks may go by the buckets that there were
        self._agreed = False  # in a learning step: on the parameters
        self._leads = True  # this rank's order of gradients is everybody's
        self._all_here = (
            True  # else some had joined: they know of no buckets, and each gradient is reduced alone
        )
        self._settled = False  # backward() has waited in this step
        self._overflow_told = False  # in this step
        self._added_late = False  # to a local gradient, after that
        self._calls = BackwardCalls(self._call_ended)
        self._first_call = 0  # number of the first backward call of this step
        self._calls_of_a_pass: float | None = None  # after which everything has come; None: not known
        self._joins = 0  # that had happened when the ranks agreed
        self._scatter = False  # a bucket is reduced to shards: half of an allreduce, except in shared memory
        self._declared: int | None = None  # the core's number for the buckets
        self.comparison = Comparison(Policy(), None)  # of the ranks' values
        self.weighted = False  # this rank has given weights since it last took them back
        self._weighs = False  # and so have all, as far as they have agreed: buckets have places for weights
        # Of the step that comes; of the one that has begun
        self._next_weight = self._weight = weights.MISSING
        self._order: dict[GradState, None] = {}  # in a learning step: by the last time that each hook fired
        self._awaited = (
            0  # counted gradients that every rank computes, and that have not arrived in this step
        )
        # Guards the counts of one step (left, waiting, _awaited, outstanding) when several threads run backward.
        self._lock = threading.Lock()
        # Others that have one of its parameters: an older one would reduce the same gradient at the same time.
        self._newer: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._older: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._to_collect = False  # a newer one may be garbage by now
        _living.add(self)

    # --- registration ----------------------------------------------------------------------------------------------

    def add(self, parameter: torch.Tensor, name: str) -> None:
        """Takes a parameter under this name; the next step is a learning step. A frozen one is taken at the beginning
        of the first backward after it is unfrozen."""
        if not _may_train(parameter):
            return
        if parameter not in self._frozen:
            self._watch(parameter)
        if not parameter.requires_grad:
            self._frozen[parameter] = name
            return
        self._frozen.pop(parameter, None)
        state = GradState(parameter, name)
        state.expected = state.left = self.passes
        self.states.append(state)
        self._state_of[parameter] = state
        self._learned = False
        self._take_over(parameter)

    def add_local(self, parameters: Iterable[torch.Tensor]) -> None:
        """Parameters whose gradients are not reduced from now on; also ones that were until now."""
        if self.outstanding and not self.drop_overflow():
            raise RuntimeError(
                "register_local() between backward and optimizer.step(): call it before backward"
            )
        if self._terms.process_set.included() is False:  # this rank trains alone
            return
        for parameter in parameters:
            if parameter not in self.local and _may_train(parameter):
                state = self._state_of.pop(parameter, None)
                if state is not None:
                    self.states.remove(state)
                    self._forget_layout()
                else:
                    self._take_over(parameter)
                    if self._frozen.pop(parameter, None) is None:
                        self._watch(parameter)
                self._watch_local(parameter)
            self.local[parameter] = None

    def _take_over(self, parameter: torch.Tensor) -> None:
        """From older ones, as long as this one lives."""
        if self._terms.process_set.included() is False:
            return
        for other in list(_living):
            if other is not self and other not in self._newer and other.knows(parameter):
                other._newer.add(self)
                other._to_collect = True
                self._older.add(other)

    def step_back(self) -> None:
        """Older ones go on before it: it is a copy."""
        for other in list(self._older):
            other._newer.discard(self)
            self._newer.add(other)
        self._older.clear()

    def _is_superseded(self) -> bool:
        """Whether a newer optimizer reduces what this one would."""
        if not self._newer or (self._terms.process_set.size() or 1) == 1:
            return False
        if self._to_collect:  # once for each newer one
            self._to_collect = False
            gc.collect()
        return len(self._newer) > 0

    def check_in_charge(self) -> None:
        """ValueError where another optimizer reduces these gradients."""
        if self._is_superseded():
            newer = next(iter(self._newer))
            shared = (repr(state.name) for state in self.states if newer.knows(state.parameter))
            raise ValueError(SUPERSEDED.format(what=next(shared, "its local parameters")))

    def _watch(self, parameter: torch.Tensor) -> None:
        # A dropped optimizer must not go on reducing its old model's gradients.
        reducer_of = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            reducer = reducer_of()
            if reducer is not None:
                # None: this is what a hook before it has returned, which torch refuses once all have run.
                hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
                reducer._fired(parameter, _is_last(hooks or {}, handle.id))

        with _unfrozen(parameter):
            handle = parameter.register_post_accumulate_grad_hook(hook)
        _own_hooks.add(handle.id)

    def _watch_local(self, parameter: torch.Tensor) -> None:
        # Before a further backward of a step adds to a gradient that is divided already.
        reducer_of = weakref.ref(self)
        parameter_of = weakref.ref(parameter)

        def hook(_: torch.Tensor) -> None:
            reducer, parameter = reducer_of(), parameter_of()
            if reducer is not None and parameter is not None and parameter in reducer._scaled:
                reducer._scaled.discard(parameter)
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.grad.mul_(reducer._terms.process_set.size() or 1)

        with _unfrozen(parameter):
            parameter.register_hook(hook)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether `add` or `add_local` has been called for it."""
        return parameter in self._state_of or parameter in self.local

    def waits_for(self, parameter: torch.Tensor) -> bool:
        """Whether it is frozen still, as `add` has found it."""
        return parameter in self._frozen and not parameter.requires_grad

    def _is_of_another(self, parameter: torch.Tensor) -> bool:
        """Whether another optimizer reduces it, while it is frozen for this one: they take turns."""
        return any(other is not self and other.knows(parameter) and not other._newer for other in _living)

    def set_weight(self, weight: Any) -> None:
        """Of this rank in the step that comes; None: from then on all count alike, and none is wanted."""
        begun = self.outstanding and not self._was_skipped()
        sent = any(state.pending or state.reduced for state in self.states) or any(
            b.sent for b in self.buckets
        )
        if begun and (sent or not self.weighted or weight is None):
            raise RuntimeError(WEIGHT_TOO_LATE)
        self.weighted = weight is not None
        self._next_weight = weights.number("set_weight", weight) if self.weighted else weights.MISSING
        if begun:
            self._take_weight()

    def _take_weight(self) -> None:
        self._weight, self._next_weight = self._next_weight, weights.MISSING

    @property
    def weight(self) -> float | None:
        """Of this rank in the step that has begun; None: all count alike."""
        return self._weight if self._weighs else None

    def set_passes(self, passes: int) -> None:
        """Backward passes per step from now on."""
        self.passes = passes
        for state in self.states:
            state.expected = state.left = passes * max(1, state.fires)

    # --- hooks -----------------------------------------------------------------------------------------------------

    @uncompiled
    def _fired(self, parameter: torch.Tensor, is_last: bool) -> None:
        """is_last: no hook of the user's comes after this one, which may change the gradient."""
        if self._is_superseded() or (parameter in self._frozen and self._is_of_another(parameter)):
            return
        with self._lock:
            if not self.outstanding:
                self._begin()
            state = self._state_of.get(parameter)
            if state is not None and state.reduced and not state.is_same() and self._was_skipped():
                self._end()  # its gradient was cleared: the step was left out
                self._begin()
            self._calls.note()
            if state is None:  # local, or unfrozen between two passes
                self._added_late |= self._settled and parameter in self.local
                return
            state.fired = True
            if not self._learned:
                self._observe(state)
            elif state.in_backward:
                state.left -= 1
            is_complete = self._learned and state.in_backward and state.left <= 0
            if not is_complete or not (is_last or state.left):  # sent later, from what parameter.grad is then
                self._note(state)
                if not is_last:
                    state.noted = state.bits = None
                self._awaited -= is_complete and state.counted
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
        for parameter, name in list(self._frozen.items()):
            if parameter.requires_grad and not self._is_of_another(parameter):
                self.add(parameter, name)
        runtime = native()
        if runtime is not self._runtime:
            self._forget_layout()
            self._runtime, self.waits = runtime, self.may_wait
            offer_memory(runtime)
            own = self._terms.process_set
            self._set_id = 0 if own is global_process_set else id_of(own)
        elif self._is_stale():
            if self._marked and self._joins == joins():
                self._changed = True
                self._learn_again()
            else:
                self._forget_layout()
        self._take_weight()
        self.outstanding = True
        self.reduced = self.partial = self._settled = self._agreed = False
        self._overflow_told = self._added_late = False
        self._first_call = self._calls.number
        self._awaited = 0
        for bucket in self.buckets:
            bucket.waiting = 0
        for state in self.states:
            state.counted = state.parameter.requires_grad
            if state.counted and state.in_backward:
                self._awaited += 1
                if state.bucket is not None:
                    state.bucket.waiting += 1

    def _is_stale(self) -> bool:
        """Whether buckets must be formed anew: a parameter was added, or has another dtype, shape or layout; or ranks
        were absent that are back from join()."""
        if self._joins != joins():
            return True
        if not self._learned:
            return bool(self.buckets)
        return self._weighs != self.weighted or any(s.form != form_of(s.parameter) for s in self.states)

    def _observe(self, state: GradState) -> None:
        """Learning step: several calls within one backward are one pass, whose last call completes the gradient."""
        if state.call != self._calls.number:
            state.call, state.fires_in_pass = self._calls.number, 0
            state.passes += 1
            if state.passes > self.passes:
                raise AssertionError(f"{TOO_MANY} (parameter {state.name!r})")
        state.fires_in_pass += 1
        state.fires = max(state.fires, state.fires_in_pass)
        self._order.pop(state, None)
        self._order[state] = None

    def _arrive(self, state: GradState, grad: torch.Tensor) -> None:
        state.arrived = state.used = True
        bucket = state.bucket
        if bucket is None:
            submit_alone(state, self._terms, self.weight)
            state.note()
            with self._lock:
                self._awaited -= state.counted
            return
        if bucket.sent:
            raise RuntimeError(
                f"the gradient of {state.name!r} came after its bucket had been sent off: requires_grad must not "
                "change between the first backward of a step and optimizer.step(), nor may a step have more calls of "
                "backward() than the first one had and this gradient come in the last of them (add up the losses "
                "instead); cross_barrier: or a parameter is read by no module's forward"
            )
        state.take(grad, self.lends)
        self._note(state)
        with self._lock:
            bucket.waiting -= state.counted
            full = bucket.waiting == 0 and state.counted
        if full:
            self._submit(bucket)
        with self._lock:  # only now: another thread's backward, at its end, collects what all have sent
            self._awaited -= state.counted

    def _note(self, state: GradState) -> None:
        """Before it is reduced. Memory of the user's own may be written to through .data; on a GPU nobody looks there,
        for that would wait for backward."""
        grad = state.parameter.grad
        state.note(content=not self.lends and grad is not None and place_of(grad) is HOST)

    # --- the end of backward ---------------------------------------------------------------------------------------

    def _call_ended(self) -> None:
        """A call of backward is at its end: if it was the last one of the step, it ends when everything is reduced.

        As in DistributedDataParallel, what the user then does to the gradients is done to the reduced ones.
        """
        with self._lock:
            if not self.outstanding or not self.waits:
                return
            if self._settled:  # a further call has added to gradients that stay here
                self._scale_local()
                return
            if self._learned:
                calls, expected = self._calls.number - self._first_call, self._calls_of_a_pass
                is_last = expected is not None and calls >= expected * self.passes
                self._settled = self._awaited <= 0 or is_last
            else:
                self._settled = (
                    any(state.passes == self.passes for state in self.states) and not is_capturing()
                )
            if not self._settled:
                return
        span = spans.Span("synchronize", None) if spans.profiler._is_profiler_enabled else None
        try:
            self._settle()
        except BaseException:
            self._end()
            raise
        finally:
            if span is not None:
                span.end()

    @torch.no_grad()
    def _settle(self) -> None:
        """Waits for the gradients that every rank computes. A parameter that was not used this time has zeros."""
        if self._changed and not self._tell_change(in_backward=True):
            self._settled = False
            return
        if not self._learned and not self._agree_on(self.states, early=True):
            if self._changed:
                self._agree_on(self.states)  # others are with this optimizer, and know of no change
            self.waits = self._settled = (
                False  # ranks run the passes of several optimizers in different orders
            )
            return
        changed = next((state.name for state in self.states if state.arrived and state.is_changed()), None)
        self._send(in_backward=True)
        self._collect()
        self._scale_local()
        self._spread_overflow()
        if changed is not None:
            raise RuntimeError(CHANGED_BY_HOOK.format(name=changed))
        if not self._was_skipped():  # what is changed from now on is changed too early, through .data as well
            for state in self.states:
                if state.reduced:
                    state.note(content=not is_capturing())

    @torch.no_grad()
    def _spread_overflow(self) -> None:
        """What is not finite in a gradient that this rank alone has, in its shards or local, shows on the others in one
        that they have, so that gradient scalers leave out a step on every rank or on none. Once in a step, on all ranks
        before what is late is sent: in backward(), or in synchronize() where that did not wait."""
        if self._overflow_told or not (self.partial or self.some_local):
            return
        self._overflow_told = True
        own = [parameter.grad for parameter in self.local if parameter.grad is not None]
        values = [grad._values() if grad.is_sparse else grad for grad in own]
        if self.partial:
            values += [self._shard_of(bucket) for bucket in self.buckets if bucket.flat.is_floating_point()]
        # What is not reduced yet is not to be touched.
        shared = [state.parameter.grad for state in self.states if state.reduced] + own
        shown = [grad for grad in shared if grad is not None and grad.is_floating_point() and grad.numel()]
        like = (
            values[0] if values else self.states[0].parameter if self.states else torch.empty(0, device="cpu")
        )
        finite = [value.isfinite().all().to(like.device) for value in values]
        found = torch.zeros(1, dtype=torch.uint8, device=like.device)
        if finite:
            found = (~torch.stack(finite).all()).to(torch.uint8).view(1)
        operations.allreduce_(found, None, "horoclone.overflow", Max, process_set=self._terms.process_set)
        if found.is_cpu and not found.item():
            return
        nothing = torch.where(found[0] > 0, float("inf"), 0.0)
        parts = [shown[0]._values() if shown[0].is_sparse else shown[0]] if shown and self.some_local else []
        if self.partial:
            floating = [bucket for bucket in self.buckets if bucket.flat.is_floating_point()]
            parts = [part for bucket in floating for part in self._parts_of_others(bucket)]
        for part in parts:
            part.add_(nothing.to(part.device, part.dtype))

    def _parts_of_others(self, bucket: Bucket) -> Iterator[torch.Tensor]:
        """Of the gradients; what lies between them stays zero."""
        size = bucket.flat.numel() // self.shards
        mine = size * (self._terms.process_set.rank() or 0)
        for state in bucket.states:
            begin = int(state.view.storage_offset())  # type: ignore[union-attr]
            end = begin + state.parameter.numel()
            for a, b in ((begin, min(end, mine)), (max(begin, mine + size), end)):
                if a < b:
                    yield bucket.flat[a:b]

    def is_pending(self) -> bool:
        """Whether gradients of this step are not reduced yet, as far as this rank has any."""
        return self.outstanding and (not self._settled or self._added_late or not self._was_skipped())

    def _was_skipped(self) -> bool:
        """Whether nothing is missing but the step itself: gradients that are cleared now were to be dropped."""
        return self._settled and not any(state.fired and not state.reduced for state in self.states)

    def drop_overflow(self) -> bool:
        """Ends a step that is left out, by a gradient scaler say, because reduced gradients are not finite: the same on
        every rank. Whether it is so."""
        grads = [state.parameter.grad for state in self.states] if self._was_skipped() else []
        values = [grad._values() if grad.is_sparse else grad for grad in grads if grad is not None]
        left_out = not all(bool(value.isfinite().all()) for value in values)
        if left_out:
            self._end()
        return left_out

    def has_added_late(self) -> bool:
        """Whether nothing keeps the ranks from the step but what a further backward has added to a local gradient."""
        return self._added_late and self._was_skipped()

    def tell_overflow_again(self) -> None:
        """In a synchronize() that every rank calls."""
        self._overflow_told = self._added_late = False

    def give_up_changed(self, find_new: Callable[[], None]) -> str | None:
        """The name of a gradient that was changed too early; then the reductions are completed, to be forgotten."""
        changed = self._changed_by_user()
        if not changed:
            return None
        for state in self.states:
            state.noted = state.bits = None
        self.synchronize(find_new)
        return changed[0].name

    def _changed_by_user(self) -> list[GradState]:
        return [state for state in self.states if state.is_changed()] or with_other_content(self.states)

    def _early_change(self, added: Iterable[GradState]) -> str | None:
        """What is wrong if gradients were changed while others, those that were `added` just now among them, or they
        themselves were not reduced."""
        changed = self._changed_by_user()
        if not changed:
            return None
        name = next((state.name for state in changed if state.reduced), None)
        if self.partial:
            return CHANGED.format(changed=changed[0].name, pending="it", why=IN_SHARDS)
        if name is None:
            is_late = (self._learned or self._agreed) and not changed[0].in_backward
            why = NOT_EVERYWHERE if is_late else UNREDUCED
            return CHANGED.format(changed=changed[0].name, pending="it", why=why)
        pending = next((state.name for state in self.states if state.fired and not state.reduced), None)
        why = NOT_EVERYWHERE
        if pending is None:
            unfrozen = (n for p, n in self._frozen.items() if p.requires_grad and p.grad is not None)
            pending, why = next(unfrozen, None), "it was unfrozen after this step had begun"
        if pending is None:
            computed = (state.name for state in added if state.parameter.grad is not None)
            pending, why = next(computed, None), "it has taken another's place in optimizer.param_groups"
        if pending is None:
            return None
        return CHANGED.format(changed=name, pending=f"that of {pending!r}", why=why)

    # --- submission ------------------------------------------------------------------------------------------------

    def _reduced_with(self, in_backward: bool | None) -> tuple[list[Bucket], list[GradState]]:
        """What is reduced at the end of backward (in_backward), in synchronize() only, or ever: buckets, and gradients
        that are in none."""
        return (
            [bucket for bucket in self.buckets if in_backward in (bucket.in_backward, None)],
            [
                state
                for state in self.states
                if state.bucket is None and in_backward in (state.in_backward, None)
            ],
        )

    def _send(self, in_backward: bool) -> bool:
        """Sends what has not been sent of these. Whether there are any."""
        buckets, alone = self._reduced_with(in_backward)
        if buckets or alone:
            self._send_mark(in_backward)
        for state in alone:
            if not state.arrived:
                submit_alone(state, self._terms, self.weight)
        for bucket in buckets:
            if not bucket.sent:
                self._submit(bucket)
        return bool(buckets or alone)

    def _submit(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        for state in bucket.states:
            if not state.arrived:  # frozen, or unused in this step
                self._fill(state)
        if self._weighs:
            self._weigh(bucket, self._weight)
        if bucket.index == 0 and self._compares_in_buckets:
            self.comparison.fill(bucket.check)
        bucket.sent = True
        try:
            self._start(bucket)
        except BaseException:
            # It was refused, in a capture say: synchronize() sends it again, or hears the reason again.
            bucket.sent, bucket.work, bucket.handle = False, None, None
            raise

    @torch.no_grad()
    def _weigh(self, bucket: Bucket, weight: float) -> None:
        if is_capturing():
            raise Unsupported(
                "optimizer.set_weight() gives each step a weight of its own, which a captured CUDA graph cannot have"
            )
        weigh(bucket.gradients, bucket.weights, weight, self._terms.process_set)

    @property
    def _compares_in_buckets(self) -> bool:
        return self._marked and not self._marks_apart

    def _reduction(self) -> dict[str, Any]:
        terms = self._terms.reduction()
        return {**terms, "reduce": Sum} if self._weighs else terms

    def _start(self, bucket: Bucket) -> None:
        if bucket.exposed is None:
            assert self._runtime is not None
            bucket.handle = self._submit_flat(bucket)
            bucket.under_way = self._runtime, bucket.handle
            return
        with torch.no_grad():
            bucket.work = self._terms.compression.reduce(bucket.exposed)
            bucket.handle = next(bucket.work, None)

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
        grad = state.parameter.grad
        state.used = grad is not None
        if grad is None:
            state.take_none()
        else:
            state.take(grad, self.lends)
        state.arrived = True

    # --- waiting ---------------------------------------------------------------------------------------------------

    @property
    def leaves_none(self) -> bool:
        """Whether a gradient that no rank has computed is None after synchronize()."""
        return self._terms.unused_as_none

    @torch.no_grad()
    def synchronize(self, find_new: Callable[[], None]) -> None:
        """Sends what has not been sent (zeros for unused parameters), waits for everything, hands out the results.

        find_new: called first; adds parameters that have begun to require gradients. Raises the first error of the
        reductions, after all of them have ended; RuntimeError where gradients were changed too early.
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
            too_early = self._early_change(self.states[before:])
            if self._changed:
                # Others read the first mark before they send more, unless they wait before the next forward only.
                in_buckets = all(state.bucket is not None for state in self.states)
                told = self._tell_change(in_backward=None if in_buckets and not self.may_wait else True)
                if not told:
                    self._spread_overflow()
                    self._tell_change(in_backward=False)
            if learning and not self._agreed:
                self._agree_on(self.states)
            elif len(self.states) > before:
                self._agree_on(self.states[before:])
            sent, shows = self._send(in_backward=True), self.some_local or bool(self._scatter)
            if not self._settled and (shows or (sent and self._marked)):
                self._collect()  # where parameters have changed elsewhere, nobody sends the others
            self._spread_overflow()
            self._send(in_backward=False)
            self._collect()
            if self._terms.unused_as_none:
                self._clear_unused()
            if learning:
                self._form_buckets()
            self._scale_local()
            if too_early:
                raise RuntimeError(too_early)
            self.comparison.settle(self._terms.process_set)
        finally:
            if span is not None:
                span.end()
            self._end()
        self.reduced = True

    def _collect(self) -> None:
        """Waits for what has been sent, and hands it out."""
        errors: list[Exception] = []
        run_compressors(self.buckets, errors)
        changed = self._take_marks(errors)
        for bucket in self.buckets:
            if bucket.sent and not bucket.done:
                bucket.done = True
                try:
                    self._finish(bucket)
                except (HorovodInternalError, ValueError) as error:
                    errors.append(error)
        alone = []
        for state in self.states:
            if state.pending is not None:
                try:
                    alone.append((state, wait_alone(state, self._terms)))
                except (HorovodInternalError, ValueError) as error:
                    errors.append(error)
        for state, hand_out in alone:
            try:
                hand_out()
                state.note()
            except (HorovodInternalError, ValueError) as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._look_at_marks(changed)

    def _finish(self, bucket: Bucket) -> None:
        assert self._runtime is not None
        if bucket.exposed is None:
            handle, bucket.handle = bucket.handle, None
            spans.wait(self._runtime, handle)
            follow(self._runtime, handle, bucket.place)
            if self._scatter:
                self._keep_share(bucket, handle)
            bucket.release()
        if self._weighs and not self.is_marked(bucket):
            divide(
                bucket.gradients,
                bucket.weights,
                f"the gradients of {bucket.summary}",
                self._terms.process_set,
            )
        if bucket.index == 0 and self._compares_in_buckets and not self.is_marked(bucket):
            self.comparison.look(bucket.check)
        if self.shards == 1:
            self.comparison.note(bucket)
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
            if state.view is not None and grad is not None and not state.is_in_bucket(grad):
                grad.copy_(state.view)
        self.partial = False

    def _hand_out(self, bucket: Bucket) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for state in bucket.states:
            parameter, view = state.parameter, state.view
            assert view is not None
            state.reduced = True
            grad = parameter.grad
            if grad is None and not parameter.requires_grad:
                continue  # frozen: must not be updated
            if state.becomes_sparse:
                state.hand_out_sparse(view)
            elif not state.apart:
                if grad is None or not state.is_in_bucket(grad):
                    parameter.grad = state.lend()
            else:
                if grad is None:
                    grad = parameter.grad = state.new_grad()
                targets.append(grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        for state in bucket.states:
            state.note()

    def _clear_unused(self) -> None:
        """Gradients that no rank has computed go back to None."""
        ordered = by_name(self.states)
        used = torch.tensor([state.used for state in ordered], dtype=torch.uint8, device="cpu")
        operations.allreduce_(
            used, name="horoclone.optimizer.used", op=Max, process_set=self._terms.process_set
        )
        for state, flag in zip(ordered, used.tolist(), strict=True):
            if not flag:
                state.parameter.grad = None

    @torch.no_grad()
    def _scale_local(self) -> None:
        size = self._terms.process_set.size() or 1
        if self._terms.scale_local_gradients and self._terms.op == Average and size > 1:
            for parameter in self.local:
                if parameter.grad is not None and parameter not in self._scaled:
                    parameter.grad.div_(size)
                    self._scaled.add(parameter)

    def check_alike(self, added_late: bool = False) -> None:
        """Before the update, where some rank has local gradients: RuntimeError where what was done to the others
        differs between the ranks, or a rank says that it has added to its own too late. Collective."""
        if self.some_local and not self.partial and not is_capturing():
            state, late = first_that_differs(self.states, self._terms.process_set, added_late)
            if late:
                raise RuntimeError(ADDED_LATE)
            if state is not None:
                raise RuntimeError(DIFFERS.format(name=state.name))

    def _end(self) -> None:
        self.outstanding = self._changed = False
        self._order.clear()
        self._scaled.clear()
        self._calls.forget()
        for bucket in self.buckets:
            bucket.handle = bucket.work = None
            bucket.sent = bucket.done = False
        for state in self.states:
            state.left = state.expected
            state.fired = state.arrived = state.reduced = state.apart = state.used = False
            state.passes = state.fires_in_pass = 0
            state.call = -1
            state.pending = state.noted = state.bits = None
        self._marks.clear()

    def discard(self) -> None:
        """Gives up reductions in flight: a state is being restored. Their memory is kept until they are over."""
        if not self.outstanding:
            return
        self._forget_layout()
        self._end()
        self.reduced = False

    # --- agreement -------------------------------------------------------------------------------------------------

    def _forget_layout(self) -> None:
        self._learn_again()
        self._drop_buckets()

    def _learn_again(self) -> None:
        self._learned, self._joins = False, joins()
        for state in self._state_of.values():
            state.fires = 0
            state.expected = state.left = self.passes

    def _drop_buckets(self) -> None:
        self._marked = self._marks_apart = self._scatter = False
        self._undeclare()
        for state in self._state_of.values():
            state.bucket = state.view = state.lent = None
            state.in_backward = False

    # A parameter has another dtype, say, and needs other buckets. If that is so on every rank, they agree on new ones.
    # A rank on which nothing has changed goes on with the old ones, though: it hears of the change by a mark in them,
    # or beside them where not every rank reads all of what is reduced.

    def _tell_change(self, in_backward: bool | None) -> bool:
        """Makes the reductions in which other ranks may wait, and drops the buckets. False: there are none."""
        buckets, alone = self._reduced_with(in_backward)
        if not self._marked or not (buckets or alone):
            return False
        kept = [bucket.flat.clone() for bucket in buckets]  # parameter.grad may be this memory
        residuals = {name: held.clone() for name, held in self.residuals.read(self.buckets).items()}
        self._send_mark(in_backward)
        for state in alone:
            start_alone(state, state.zeros(as_agreed=True), self._terms, 1.0 if self._weighs else None)
        for bucket in buckets:
            bucket.flat.zero_()
            if self._weighs:
                self._weigh(bucket, 1.0)  # so that nobody complains of that
            if not self._marks_apart:
                bucket.mark.fill_(self._mark_of()[1])
            self._start(bucket)
        errors: list[Exception] = []
        run_compressors(buckets, errors)
        self._take_marks(errors)
        for bucket, content in zip(buckets, kept, strict=True):
            assert self._runtime is not None
            try:
                if bucket.exposed is None:
                    spans.wait(self._runtime, bucket.handle)
                    bucket.release()
                bucket.flat.copy_(content)
            except HorovodInternalError as error:
                errors.append(error)
        for state in alone:
            try:
                operations.synchronize(state.pending[0])
            except (HorovodInternalError, ValueError) as error:
                errors.append(error)
            state.pending = None
        self._drop_buckets()
        self.residuals.write(residuals, ())
        if errors:
            raise errors[0]
        return True

    def _send_mark(self, in_backward: bool | None) -> None:
        if self._marks_apart and in_backward not in self._marks:
            mark = torch.zeros(1 + PLACES, dtype=torch.uint8, device="cpu")
            mark[0] = self._changed
            if not self._marks and not self._changed:
                self.comparison.fill(mark[1:])
            name = f"changes of parameters (gradients.{self.layout}.{'mark' if in_backward else 'late mark'})"
            self._marks[in_backward] = operations.allreduce_async_(
                mark, name=name, op=Max, process_set=self._terms.process_set
            )

    def _take_marks(self, errors: list[Exception]) -> bool:
        """Whether one of those that were sent is set."""
        found = False
        for is_first, (in_backward, handle) in zip((True, False), self._marks.items(), strict=False):
            if handle is not None:
                self._marks[in_backward] = None
                try:
                    mark = operations.synchronize(handle)
                    found |= bool(mark[0].item())
                    if is_first and not found:
                        self.comparison.look(mark[1:])
                except (HorovodInternalError, ValueError) as error:
                    errors.append(error)
        return found

    def _look_at_marks(self, changed: bool) -> None:
        """Raises Mismatch where parameters have changed on other ranks and not on this one."""
        if self._marked and not self._marks_apart:
            changed = any(bucket.done and self.is_marked(bucket) for bucket in self.buckets)
        if changed:
            self.hear_change()

    def is_marked(self, bucket: Bucket) -> bool:
        """Whether this bucket's reduction, which is over, has brought a mark."""
        return self._marked and not self._marks_apart and bucket.mark.item() != self._mark_of()[0]

    def _mark_of(self) -> tuple[int, int]:
        """The mark where nothing has changed, and one that is seen in the result, whatever else the others have."""
        size = self._terms.process_set.size() or 1  # an average of integers is not 0 either
        marks: dict[int, tuple[int, int]] = {Min: (0, -1), Product: (1, 2)}
        return marks.get(self._terms.op, (0, size))

    def hear_change(self) -> None:
        """Collective, for a mark was set: agrees anew, which raises Mismatch."""
        self._forget_layout()
        self._agree_on(self.states, elsewhere=True)

    def _declare(self) -> None:
        """Collective. From here on a bucket starts without any message where its plan is persistent."""
        assert self._runtime is not None
        if self.buckets:
            self._declared = self._runtime.declare(
                names=[self._name_of(b) for b in self.buckets], data=[b.address for b in self.buckets],
                counts=[b.flat.numel() for b in self.buckets], dtypes=[b.number for b in self.buckets],
                process_set=self._set_id, device=self.buckets[0].place[0], **self._reduction(),
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

    def _agree_on(self, states: Sequence[GradState], early: bool = False, elsewhere: bool = False) -> bool:
        """Checks that the ranks mean the same parameters, and learns which gradients are sparse on any rank, and
        complete on all of them. early: False if other ranks are with another optimizer. elsewhere: some have changed
        on other ranks."""
        try:
            agreed = agree_on_parameters(
                states,
                self._terms.process_set,
                self._turn,
                (lambda state: state.passes == self.passes) if early else None,
                self._changed,
                bool(self.local),
                weighted=self.weighted,
                values=self.comparison.said(states) if len(states) == len(self.states) else (None, Policy()),
            )
        except ValueError as error:
            self.waits = self.may_wait  # it was no other optimizer that others were with
            if not self._changed and not elsewhere:
                raise
            text = str(error).removesuffix(".")
            raise Mismatch(f"{text}. This has changed on some ranks since their last step.") from None
        if agreed is None:
            return False
        self._weighs = self.weighted
        self.comparison.heard(agreed.same_values, agreed.policy)
        self._leads, self._all_here, self.some_local = agreed.leads, agreed.all_here, agreed.some_local
        for i, state in enumerate(by_name(states)):
            flag, dtype = agreed.sparse[i], agreed.dtypes[i]
            state.form = form_of(state.parameter)
            state.dtype = dtype or getattr(state.parameter, "grad_dtype", None) or state.parameter.dtype
            state.in_backward = agreed.complete[i]
            if not self._terms.sparse_as_dense:
                state.sparse_dim = max(0, flag - 1)
            elif flag > 1 and self.shards == 1:  # sharded by elements it is updated in dense pieces
                state.becomes_sparse = True
        sparse = next((s for s in states if self._weighs and s.sparse_dim), None)
        if sparse is not None:
            raise Unsupported(WEIGHED_SPARSE.format(name=sparse.name))
        self._agreed = True
        return True

    def _form_buckets(self) -> None:
        """The order of one rank, on which all agree, cut into buckets."""
        assert self._runtime is not None
        observed = list(self._order) + [state for state in by_name(self.states) if state not in self._order]
        whole = all(state.passes == self.passes for state in self._order)
        calls = self._calls.number - self._first_call
        self._calls_of_a_pass = calls / self.passes if self._order and whole else None
        self.layout, runs = agree_on_order(observed, self._terms.process_set, self._leads)
        for state in self.states:
            state.in_backward = False
        for state in runs[0]:
            state.in_backward = True
        if not self._all_here:
            self._undeclare()
        elif self._buckets_allowed():
            runs = [[state for state in run if self._fits_bucket(state)] for run in runs]
            groups = groups_of(self.groups, [state for run in runs for state in run])
            size = self.bucket_bytes
            if size == BUCKET_BYTES and self.states and place_of(self.states[0].parameter) is not HOST:
                size = GPU_BUCKET_BYTES
            plan = plan_buckets(runs, groups, self._wire_dtype_of, size)
            self._undeclare()
            ranks = (self._terms.process_set.size() or 1) if self._weighs else 0
            self.buckets = [
                Bucket(self._runtime, k, dtype, states, self.shards, ranks)
                for k, (dtype, states) in enumerate(plan)
            ]
            on_gpu = any(bucket.place is not HOST for bucket in self.buckets)
            self._scatter = self.shards > 1 and (on_gpu or not self._runtime.shares_memory())
            if reduces_buckets(self._terms.compression):
                self._scatter = False
                self._expose()
            elif not self._scatter:
                self._declare()
        # On a GPU marks would wait for the stream, or for the other ranks' processors.
        self._marked = self._all_here and all(place_of(state.parameter) is HOST for state in self.states)
        in_buckets = all(state.bucket is not None for state in self.states)
        self._marks_apart = self._marked and not (in_buckets and self._declared is not None)
        for bucket in self.buckets:
            bucket.mark.fill_(self._mark_of()[0])
        if self._marks_apart and in_buckets and not self.may_wait:
            self._marked = self._marks_apart = False  # nobody waits for marks
        for state in self.states:
            state.expected = self.passes * max(1, state.fires)
        self.comparison.begin(by_name(self.states))
        self._learned = True

    def _fits_bucket(self, state: GradState) -> bool:
        together = state.parameter.device == self.states[0].parameter.device
        return together and not state.sparse_dim and (self.shards == 1 or is_dense(state.parameter))

    def _name_of(self, bucket: Bucket) -> str:
        return f"{bucket.summary} (gradients.{self.layout}.{bucket.index})"

    def _expose(self) -> None:
        for bucket in self.buckets:
            views = {state.name: state.view for state in bucket.states if state.view is not None}
            bucket.exposed = OptimizerBucket(
                bucket.gradients,
                views,
                bucket.index,
                self._name_of(bucket),
                self._terms.op,
                self._terms.process_set,
            )
            self.residuals.enter(bucket)

    def _buckets_allowed(self) -> bool:
        """A stateless compressor of the user's own sees one gradient at a time, as it would in Horovod."""
        chosen = self._terms.compression
        return chosen is Compression.none or hasattr(chosen, "wire_dtype") or reduces_buckets(chosen)

    def _wire_dtype_of(self, state: GradState) -> torch.dtype:
        dtype = state.dtype
        if self._weighs:
            dtype = wire_of(dtype) or dtype
        return getattr(self._terms.compression, "wire_dtype", dtype) if dtype.is_floating_point else dtype
