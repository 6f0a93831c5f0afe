"""DistributedOptimizer(op=Adasum): every rank makes its own step, and the changes that the steps made are reduced.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021), in the form that takes any
optimizer: parameters = start + adasum over the ranks of (parameters after the local step - start). Gradients and the
optimizer's state stay on their rank. Thread: the one that trains; hooks run on the threads of backward.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from horoclone.comparison import PLACES, policy
from horoclone.errors import HorovodInternalError, Mismatch
from horoclone.gradient_names import Turn
from horoclone.ops import Adasum, Max
from horoclone.process_sets import ProcessSet
from horoclone.runtime import native, size
from horoclone.runtime.steps import joins
from horoclone.torch import operations
from horoclone.torch.operations.gpu import HOST, memory_beside, place_of
from horoclone.torch.operations.grouped import grouped_allreduce_async_
from horoclone.torch.operations.tensors import uncompiled
from horoclone.torch.optimizer.agreement import agree_on_order, agree_on_parameters, by_name
from horoclone.torch.optimizer.backward_calls import BackwardCalls
from horoclone.torch.optimizer.buckets import BUCKET_BYTES, GradState, flat_of, form_of, is_dense, summary_of
from horoclone.torch.optimizer.compared import Comparison
from horoclone.torch.optimizer.reducer import TOO_MANY
from horoclone.torch.optimizer.wrapping import WrappedOptimizer, checked_passes, parameters_of


class Deltas:
    """The reduction: remembers where parameters were, and moves them by the Adasum of everybody's differences."""

    def __init__(self, compression: Any, process_set: ProcessSet, turn: Turn) -> None:
        self._turn = turn
        self._compression = compression
        self._set = process_set
        self._runtime: Any = None
        self._joins = 0  # that had happened when the ranks agreed
        self._known: list[torch.Tensor] = []  # in the order of param_groups
        self._named: Sequence[tuple[str, torch.Tensor]] = []
        self._layout = 0  # number of the agreed layout, in the names of the operations
        self._parts: list[list[torch.Tensor]] = []  # one operation each, the same ones on every rank
        self._summaries: list[str] = []  # the parameters of each, in its name
        self._starts: dict[torch.Tensor, torch.Tensor] = {}
        self._forms: list[Any] = []
        self._places = torch.zeros(0)  # of a check that travels
        self._comparison = Comparison(policy(), None)  # of the ranks' parameters; their states are their own
        self._was_told = False  # some rank has other parameters now than when the ranks agreed

    def is_stale(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether this rank has other parameters now than when the ranks agreed."""
        if not self._known or native() is not self._runtime:
            return False
        same = len(parameters) == len(self._known) and all(
            a is b for a, b in zip(parameters, self._known, strict=True)
        )
        return not same or self._forms != [form_of(p) for p in parameters]

    def forget(self) -> None:
        """The next step agrees anew, on every rank."""
        self._known, self._was_told = [], True

    @torch.no_grad()
    def begin(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Before the local step. Collective where the parameters or the runtime are new."""
        parameters = [parameter for _, parameter in named]
        changed = len(parameters) != len(self._known) or any(
            a is not b for a, b in zip(parameters, self._known, strict=True)
        )
        self._named = named
        is_new = native() is not self._runtime or self._joins != joins()  # to ranks that may be there now
        if changed or is_new:
            if self._known and not is_new:
                self._tell_change()
            self._lay_out(named)
            self._known, self._runtime, self._joins = parameters, native(), joins()
        if parameters:
            torch._foreach_copy_([self._starts[p] for p in parameters], parameters)
            self._comparison.fill(self._places)

    def _lay_out(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        states = [GradState(parameter, name) for name, parameter in named]
        try:
            values = self._comparison.said(states)
            agreed = agree_on_parameters(states, self._set, self._turn, values=values)
        except ValueError as error:
            if not self._was_told:
                raise
            text = f"{str(error).removesuffix('.')}. This has changed on some ranks since their last step."
            raise Mismatch(text) from None
        self._forms, self._was_told = [form_of(parameter) for _, parameter in named], False
        assert agreed is not None
        self._comparison.heard(agreed.same_values, agreed.policy)
        self._comparison.begin(by_name(states))
        self._layout, runs = agree_on_order(states, self._set, agreed.leads)
        parts: list[list[GradState]] = [[]]
        filled = 0
        for state in (state for run in runs for state in run):
            if filled > BUCKET_BYTES:
                parts.append([])
                filled = 0
            parts[-1].append(state)
            filled += state.parameter.nbytes
        self._parts = [[state.parameter for state in part] for part in parts]
        self._summaries = [summary_of([state.name for state in part]) for part in parts if part]
        self._starts = {
            p: torch.empty_like(p, requires_grad=False) for p in (state.parameter for state in states)
        }
        if states:
            self._places = self._beside(PLACES).zero_()

    def _beside(self, count: int) -> torch.Tensor:
        """Numbers that travel with the first part."""
        first = self._starts[self._parts[0][0]]
        on_host = place_of(first) is HOST
        return (
            torch.empty(count, dtype=torch.float32, device="cpu")
            if on_host
            else memory_beside(first, (count,), torch.float32)
        )

    @torch.no_grad()
    def reduce(self) -> None:
        """After the local step. Raises the first error, after everything has ended; parameters are then as before."""
        if not self._known:
            return
        reduced, errors, changed = self._exchange(map(self._moved, self._parts), changed=False)
        if not errors and not changed:
            for part, deltas in zip(self._parts, reduced, strict=True):
                torch._foreach_add_([self._starts[p] for p in part], deltas)
        torch._foreach_copy_(self._known, [self._starts[p] for p in self._known])
        if errors:
            raise errors[0]
        if changed:
            self.forget()
            self._lay_out(self._named)
        self._comparison.settle(self._set)

    def _moved(self, part: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters of a part, which become what the step has added to them."""
        torch._foreach_sub_(part, [self._starts[p] for p in part])
        return part

    @torch.no_grad()
    def _tell_change(self) -> None:
        """The others may go by the layout that there was: makes its reductions, with nothing but a mark in them."""
        nothing = ([torch.zeros_like(self._starts[p]) for p in part] for part in self._parts)
        _, errors, _ = self._exchange(nothing, changed=True)
        self.forget()
        if errors:
            raise errors[0]

    def _exchange(
        self, parts: Iterable[list[torch.Tensor]], changed: bool
    ) -> tuple[list[list[torch.Tensor]], list[Exception], bool]:
        """What the parts are reduced to, and whether some rank has other parameters by now. One part's arithmetic
        overlaps with the messages of the others."""
        errors: list[Exception] = []
        running: list[tuple[int, list[tuple[torch.Tensor, Any]]]] = []
        mark = self._beside(1).fill_(float(changed))
        if changed:
            self._places.zero_()
        for index, part in enumerate(parts):
            wires = [self._on_the_wire(p) for p in part]
            flat = [flat_of(wire) for wire, _ in wires]
            try:
                name = f"{self._summaries[index]} (deltas.{self._layout}.{index})"
                tensors = flat if index else [*flat, mark, self._places]
                handle = grouped_allreduce_async_(tensors, name=name, op=Adasum, process_set=self._set)
                running.append((handle, wires))
            except (HorovodInternalError, ValueError) as error:
                errors.append(error)
        reduced: list[list[torch.Tensor]] = []
        for handle, wires in running:
            try:
                operations.synchronize(handle)
                reduced.append([self._compression.decompress(wire, ctx) for wire, ctx in wires])
            except (HorovodInternalError, ValueError) as error:
                errors.append(error)
        marked = not errors and bool(mark.item())
        if not errors and not marked:
            self._comparison.look(self._places)
        return reduced, errors, marked

    def _on_the_wire(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A tensor without gaps, and what decompress needs. Without compression: the parameter's own memory."""
        wire, ctx = self._compression.compress(parameter.detach())
        return (wire if is_dense(wire) else wire.contiguous()), ctx


class AdasumMixin(WrappedOptimizer):
    """What DistributedOptimizer(op=Adasum) adds to an optimizer class."""

    _deltas: Deltas
    _local: dict[torch.Tensor, None]
    _sparse_as_dense: bool
    _watched: dict[torch.Tensor, None]  # reduced; in the order in which they were first seen
    _passes: dict[torch.Tensor, tuple[int, int]]  # since the last step: passes, and number of the last call
    _calls: BackwardCalls
    _overflow_agreed: bool  # since the last step
    _stepping: bool  # a closure may clear and compute gradients as often as it likes
    _own_attributes = frozenset({
        "_deltas", "_local", "_sparse_as_dense", "_watched", "_passes", "_stepping", "_calls", "_overflow_agreed",
    })  # fmt: skip

    def _begin(self, deltas: Deltas, local: Iterable[torch.Tensor], sparse_as_dense: bool) -> Any:
        self._deltas, self._sparse_as_dense = deltas, sparse_as_dense
        self._local = dict.fromkeys(local)
        self._watched, self._passes, self._stepping = {}, {}, False
        self._calls, self._overflow_agreed = BackwardCalls(self._call_ended), False
        self._watch_new()
        return self

    def _local_parameters(self) -> list[torch.Tensor]:
        return list(self._local)

    # --- hooks -----------------------------------------------------------------------------------------------------

    def _watch_new(self) -> None:
        optimizer_of = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            optimizer = optimizer_of()
            if optimizer is not None and parameter in optimizer._watched and not optimizer._stepping:
                optimizer._count(parameter)

        for group in self.__dict__["param_groups"]:
            for parameter in group["params"]:
                known = parameter in self._watched or parameter in self._local
                if parameter.requires_grad and not known:
                    self._watched[parameter] = None
                    parameter.register_post_accumulate_grad_hook(hook)

    @uncompiled
    def _count(self, parameter: torch.Tensor) -> None:
        """Several calls within one backward are one pass (reentrant checkpoints make several)."""
        self._calls.note()
        passes, last = self._passes.get(parameter, (0, -1))
        if last != self._calls.number:
            passes += 1
            if passes > self.backward_passes_per_step:
                raise AssertionError(f"{TOO_MANY} (parameter {self._name_of(parameter)!r})")
        self._passes[parameter] = (passes, self._calls.number)

    def _call_ended(self) -> None:
        """The last pass is over: the ranks agree on whether any of them has an overflow, so that with a gradient scaler
        all make the step or none does."""
        if any(passes == self.backward_passes_per_step for passes, _ in self._passes.values()):
            self._agree_on_overflow()

    # --- what DistributedOptimizer has besides the optimizer's own methods -------------------------------------------

    def synchronize(self) -> None:
        """Nothing: gradients stay on their rank and may be read or clipped at any time."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """AssertionError with several ranks: the reduction is a part of the step."""
        if size() > 1:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        return nullcontext()

    def register_local(self, parameters: Any) -> None:
        """Leaves a parameter, a module's parameters, or several of either to this rank: they are updated here only."""
        for parameter in parameters_of(parameters):
            self._watched.pop(parameter, None)
            self._passes.pop(parameter, None)
            self._local[parameter] = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes one step may accumulate."""
        self.backward_passes_per_step = checked_passes(passes)

    # --- the optimizer's own methods ---------------------------------------------------------------------------------

    @uncompiled
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped class's step on this rank's gradients, then the Adasum of what it has changed on every rank.

        Raises the error of a failed reduction; parameters are then as before the step, the state is one step on.
        """
        self._watch_new()
        self._agree_on_overflow()
        self._overflow_agreed = False
        self._passes.clear()
        self._calls.forget()
        if self._sparse_as_dense:
            self._make_dense()
        alone = size() == 1
        if not alone:
            self._deltas.begin([(self._name_of(p), p) for p in self._watched])
        self._stepping = True
        try:
            with self._post_hooks_later() as run_post_hooks:
                result = super().step(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._stepping = False
        if not alone:
            self._deltas.reduce()
        run_post_hooks((self, *args), kwargs)
        return result

    # Tells torch that step hooks run already: in the wrapped class's step, and here.
    step.hooked = True  # type: ignore[attr-defined]

    @contextmanager
    def _post_hooks_later(self) -> Iterator[Any]:
        """The step's own post hooks are left out, for they must see the parameters that all ranks have."""
        hooks = self.__dict__.get("_optimizer_step_post_hooks", {})
        self.__dict__["_optimizer_step_post_hooks"] = OrderedDict()

        def run(args: Any, kwargs: Any) -> None:
            for hook in list(hooks.values()):
                hook(self, args, kwargs)

        try:
            yield run
        finally:
            self.__dict__["_optimizer_step_post_hooks"] = hooks

    def _make_dense(self) -> None:
        for parameter in self._watched:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. AssertionError between backward() and step()."""
        if self._passes:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; what a step changes in them is reduced from the next step on."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._name_last_group()
        self._watch_new()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped class. The state is this rank's own: ranks that load one file get one rank's state."""
        self._passes.clear()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    @torch.no_grad()
    def _agree_on_overflow(self) -> None:
        if size() == 1 or self._overflow_agreed:
            return
        self._overflow_agreed = True
        gradients = [p.grad for p in self._watched if p.grad is not None]
        values = [g._values() if g.is_sparse else g for g in gradients]
        found = not all(bool(v.isfinite().all()) for v in values)
        said = torch.tensor(
            [found, self._deltas.is_stale(list(self._watched))], dtype=torch.uint8, device="cpu"
        )
        anywhere, changed = operations.allreduce(said, name="horoclone.overflow", op=Max).tolist()
        if changed:
            self._deltas.forget()
        if anywhere:
            self._passes.clear()  # a gradient scaler leaves this step out
            if not found and values:
                values[0].fill_(float("inf"))
