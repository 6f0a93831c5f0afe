"""A step without a barrier: each bucket's update is made when the next forward pass is about to read its parameters.

step() returns at once; a module waits, before its forward, for the reductions of its own parameters only, which run in
the order of their first use (priorities). Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
Acceleration" (ByteScheduler, SOSP 2019). docs/decisions/priorities.md says what is exact and what is refused.
Thread: the one that trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from horoclone.torch.operations import spans
from horoclone.torch.operations.gpu import follow
from horoclone.torch.optimizer.buckets import URGENT_BUCKET_BYTES, Bucket
from horoclone.torch.optimizer.reducer import Reducer
from horoclone.torch.optimizer.single import reduces_buckets

# Each parameter's update reads its own gradient, state and group, and nothing of another parameter.
_PER_PARAMETER = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip
_APART = ("op=hvd.Adasum", "local_parameters", "unused_as_none", "shard_optimizer_state")
NO_TIME_FOR = (
    "cross_barrier=...: there is no moment at which all gradients are reduced and no parameter is updated yet, so "
    "they cannot be {}. Leave cross_barrier out, or change the gradients before they are reduced."
)


def checked_modules(
    modules: Any, kind: type, compression: Any, apart: tuple[Any, ...]
) -> list[torch.nn.Module] | None:
    """The argument cross_barrier as a list; None: it was not given. ValueError for what cannot be updated piece by
    piece. apart: the arguments that it does not go together with, in the order of _APART."""
    if modules is None:
        return None
    chosen = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
    if not chosen or not all(isinstance(module, torch.nn.Module) for module in chosen):
        raise ValueError("cross_barrier must be the model, or a list of the modules that hold the parameters")
    if kind not in _PER_PARAMETER:
        raise ValueError(
            f"cross_barrier does not work with {kind.__name__}: only optimizers of torch.optim that update each "
            f"parameter by itself ({', '.join(sorted(one.__name__ for one in _PER_PARAMETER))})"
        )
    if reduces_buckets(compression):
        raise ValueError("cross_barrier does not work with a compressor that reduces buckets itself")
    for name, value in zip(_APART, apart, strict=True):
        if value:
            raise ValueError(f"cross_barrier does not work together with {name}")
    return chosen


class CrossBarrier:
    """The updates that one optimizer still owes, and the hooks that ask for them."""

    def __init__(self, optimizer: Any, reducer: Reducer, modules: Iterable[torch.nn.Module]) -> None:
        """ValueError when a parameter of the optimizer belongs to none of the modules."""
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        reducer.bucket_bytes = URGENT_BUCKET_BYTES
        reducer.lends = False  # a change before step() must not reach memory that is being reduced
        self._owed: dict[torch.Tensor, Bucket] = {}
        self._handles: dict[Bucket, Any] = {}
        self._groups: list[dict[str, Any]] = []  # as they were at the step, without parameters
        self._places: dict[torch.Tensor, int] = {}  # parameter -> its group
        self._parent: dict[torch.nn.Module, torch.nn.Module | None] = {}
        self._reads: dict[torch.nn.Module, list[torch.Tensor]] = {}
        self._called: dict[torch.nn.Module, int] = {}  # in the order of their first forward
        self._layout = 0
        for root in modules:
            self._watch(root)
        held = {p for parameters in self._reads.values() for p in parameters}
        for group in optimizer.__dict__["param_groups"]:
            if any(p.requires_grad and p not in held for p in group["params"]):
                raise ValueError(
                    "cross_barrier: the optimizer has parameters that none of these modules holds"
                )

    def _watch(self, root: torch.nn.Module) -> None:
        barrier_of = weakref.ref(self)

        def before_forward(module: torch.nn.Module, _: Any) -> None:
            barrier = barrier_of()
            if barrier is not None:
                barrier._before_forward(module)

        def before_state(*_: Any) -> None:
            barrier = barrier_of()
            if barrier is not None:
                barrier.finish()

        self._parent.setdefault(root, None)
        for module in root.modules():
            for child in module.children():
                self._parent.setdefault(child, module)
            if module not in self._reads:
                self._reads[module] = list(module.parameters(recurse=False))
                module.register_forward_pre_hook(before_forward, prepend=True)
                module.register_state_dict_pre_hook(before_state)
                module.register_load_state_dict_pre_hook(before_state)

    # --- the step --------------------------------------------------------------------------------------------------

    def step(self, whole: Any) -> Any:
        """Sends what has not been sent, remembers what is owed and returns. The gradients are gone after it.

        whole: makes an ordinary step, for as long as there are no buckets.
        """
        optimizer: Any = self._optimizer()
        reducer = self._reducer
        self.finish()
        optimizer._find_new()
        changed = reducer.give_up_changed(optimizer._find_new)
        if changed is not None:
            self._learn()
            what = f"changed (clipped, unscaled) before optimizer.step(), as that of {changed!r} was"
            raise RuntimeError(NO_TIME_FOR.format(what))
        if not _send_rest(reducer):
            result = whole()
            for group in optimizer.__dict__["param_groups"]:
                for parameter in group["params"]:
                    parameter.grad = None
            self._learn()
            return result
        groups = optimizer.__dict__["param_groups"]
        self._groups = [_frozen(group) for group in groups]
        self._places = {p: i for i, group in enumerate(groups) for p in group["params"]}
        for bucket in reducer.buckets:
            self._handles[bucket] = bucket.handle
            self._owed.update((state.parameter, bucket) for state in bucket.states)
        reducer._end()
        for bucket in self._handles:
            bucket.sent = True  # until its update is made
        for state in reducer.states:
            state.parameter.grad = None
        return None

    def finish(self) -> None:
        """Makes every update that is owed. Raises the first error of the reductions, after all have ended."""
        if self._handles:
            self._settle(list(self._handles))

    def forget(self) -> None:
        """Drops updates that are still due, because a state is being restored. Waits for the reductions, whose memory
        is in use.
        """
        handles, self._handles, self._owed = self._handles, {}, {}
        for bucket, handle in handles.items():
            _ended(self._reducer, bucket, handle)

    # --- the modules -----------------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module) -> None:
        if self._layout == 0:
            self._called.setdefault(module, len(self._called))
        if not self._owed:
            return
        # Without gradients modules take short cuts past their children's forward.
        if not module.training or not torch.is_grad_enabled():
            self.finish()
            return
        wanted = dict.fromkeys(self._owed[p] for p in self._reads[module] if p in self._owed)
        if wanted:
            self._settle(list(wanted))

    def _learn(self) -> None:
        """After a step that has formed buckets: what is read first goes first. A module that was not called itself is
        read by the nearest one around it that was."""
        if self._reducer.layout == self._layout or not self._reducer.buckets:
            return
        self._layout = self._reducer.layout
        first: dict[torch.Tensor, int] = {}
        for module, parameters in list(self._reads.items()):
            reader: torch.nn.Module | None = module
            while reader is not None and reader not in self._called:
                reader = self._parent[reader]
            if reader is None:
                reader = next(iter(self._called), module)
            if reader is not module:
                self._reads[reader] = self._reads[reader] + parameters
            for parameter in parameters:
                first[parameter] = min(first.get(parameter, 1 << 30), self._called.get(reader, 1 << 30))
        for bucket in self._reducer.buckets:
            bucket.priority = -min(first[state.parameter] for state in bucket.states)

    # --- the updates -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _settle(self, buckets: list[Bucket]) -> None:
        """Waits for these buckets and updates their parameters; after an error nothing is owed any more."""
        for bucket in buckets:
            handle = self._handles.pop(bucket)
            for state in bucket.states:
                self._owed.pop(state.parameter, None)
            error = _ended(self._reducer, bucket, handle)
            if error is not None:
                self.forget()
                raise error
            if self._reducer.is_marked(bucket):
                self.forget()
                self._reducer.hear_change()
            self._update(bucket)

    def _update(self, bucket: Bucket) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        parts: list[dict[str, Any]] = [{**group, "params": []} for group in self._groups]
        for state in bucket.states:
            parameter, view = state.parameter, state.view
            if not parameter.requires_grad or parameter not in self._places:
                continue
            assert view is not None
            is_as_agreed = parameter.dtype == state.form[1]  # else the model was converted after backward()
            parameter.grad = (
                state.lend() if is_as_agreed and view.dtype == state.dtype else state.new_grad().copy_(view)
            )
            parts[self._places[parameter]]["params"].append(parameter)
        own = optimizer.__dict__["param_groups"]
        optimizer.__dict__["param_groups"] = [part for part in parts if part["params"]]
        try:
            if optimizer.__dict__["param_groups"]:
                type(optimizer)._wrapped_class.step(optimizer)
        finally:
            optimizer.__dict__["param_groups"] = own
            for state in bucket.states:
                state.parameter.grad = None


@torch.no_grad()
def _send_rest(reducer: Reducer) -> bool:
    """Sends the buckets that are not full, zeros for what is missing. False, nothing done: not all is in buckets."""
    alone = reducer.local or any(state.bucket is None for state in reducer.states)
    if alone or not reducer._learned or reducer.reduced:
        return False
    if not reducer.outstanding:
        reducer._begin()
        if not reducer._learned:
            return False
    for bucket in reducer.buckets:
        if not bucket.sent:
            reducer._submit(bucket)
    return True


def _frozen(group: dict[str, Any]) -> dict[str, Any]:
    """Its options now: a scheduler changes them before the update is made."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _ended(reducer: Reducer, bucket: Bucket, handle: Any) -> Exception | None:
    """Waits until the bucket is the rank's own again; the error of its reduction, if it failed."""
    bucket.sent = False
    runtime = reducer._runtime
    assert runtime is not None
    try:
        spans.wait(runtime, handle)
        follow(runtime, handle, bucket.place)
    except Exception as error:
        return error
    finally:
        bucket.release()
    return None
