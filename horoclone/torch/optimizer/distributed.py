"""DistributedOptimizer: an optimizer of the user's class whose gradients are reduced over the ranks before each step.

The class is made at run time (wrapping.py), with DistributedMixin in front, or AdasumMixin (adasum.py). reducer.py
handles the gradients, from the hooks of backward on. Thread: the one that trains.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from horoclone.arguments import wrong_type
from horoclone.comparison import policy
from horoclone.errors import ZeroFactor
from horoclone.ops import Adasum, Average, ReduceOp, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch import operations
from horoclone.torch.compression import Compression, checked_compression
from horoclone.torch.operations.tensors import uncompiled
from horoclone.torch.optimizer.adasum import AdasumMixin, Deltas
from horoclone.torch.optimizer.compared import Comparison
from horoclone.torch.optimizer.cross_barrier import NO_TIME_FOR, CrossBarrier, checked_modules
from horoclone.torch.optimizer.reducer import ADDED_LATE, Reducer
from horoclone.torch.optimizer.sharded_state import gather_state
from horoclone.torch.optimizer.sharding import Sharding, checked_mode
from horoclone.torch.optimizer.single import Terms
from horoclone.torch.optimizer.typed import Distributed
from horoclone.torch.optimizer.wrapping import (
    NotStarted,
    WrappedOptimizer,
    checked_passes,
    parameters_of,
    wrap,
)


class DistributedMixin(WrappedOptimizer):
    """What DistributedOptimizer adds to an optimizer class."""

    _reducer: Reducer
    _included: bool  # this rank is in the process set
    _process_set: ProcessSet
    _announced: bool  # synchronize() was called by the user since the last step
    _should_synchronize: bool
    _sharding: Sharding | None  # None: every rank keeps the whole state
    _whole_state: dict[Any, Any] | None  # sharded state that was collected, until the next step
    _barrier: CrossBarrier | None  # None: a step is over when every parameter is updated
    _own_attributes = frozenset({
        "_reducer", "_included", "_process_set", "_announced", "_should_synchronize", "_sharding", "_whole_state",
        "_barrier",
    })  # fmt: skip

    # --- gradients ----------------------------------------------------------------------------------------------------

    @uncompiled
    def synchronize(self) -> None:
        """Waits until the gradients of this step are reduced; afterwards they may be clipped or read.

        backward() has done so for those that every rank computes. Then use `with optimizer.skip_synchronize():
        optimizer.step()`. Raises the error of the first failed reduction; RuntimeError if they were changed before.
        With cross_barrier: after step(), makes the updates that are owed; RuntimeError before it.
        """
        if self._barrier is not None:
            if self._reducer.outstanding:
                raise RuntimeError(
                    NO_TIME_FOR.format("synchronized, clipped or read before optimizer.step()")
                )
            self._barrier.finish()
            return
        self._reducer.check_in_charge()
        self._reducer.tell_overflow_again()
        self._synchronize()
        self._announced = True

    def _synchronize(self, whole: bool = True) -> None:
        """whole: False where sharded gradients need not be whole, because this rank's step reads its shard only."""
        reducer = self._reducer
        if self._included and not reducer.reduced:
            if self._sharding is not None:  # buckets that are formed now are cut for the ranks there are now
                reducer.shards = self._sharding.parts
            reducer.synchronize(self._find_new)
        if whole and reducer.partial:
            reducer.gather()
        reducer.reduced = True

    def _allreduce_grad_async(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """Horovod's: starts the reduction of one gradient under the parameter's name, beside what step() reduces.

        Other libraries tell by this name that an optimizer is distributed. Returns (handle, None); the gradient holds
        the result after synchronize(handle).
        """
        terms = self._reducer._terms
        name = f"allreduce_grad.{self._name_of(parameter)}"
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        scales = terms.scales()
        handle = operations.allreduce_async_(parameter.grad, None, name, terms.op, *scales, terms.process_set)
        return handle, None

    def _find_new(self) -> None:
        for group in self.__dict__.get("param_groups", ()):
            for parameter in group["params"]:
                if not (self._reducer.knows(parameter) or self._reducer.waits_for(parameter)):
                    self._reducer.add(parameter, self._name_of(parameter))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, step() does not reduce: for steps after an explicit synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_weight(self, weight: Any) -> None:
        """How much this rank counts in the mean of the next step's gradients: sum(weight * gradient) / sum(weight).

        Call it before the first backward() of each step, on every rank: with the number of samples or tokens that the
        local loss is a mean over, 0 where there are none. None: from then on all ranks count alike. A weight that is
        negative or not finite, or that a rank has left out, is an InvalidArgument on every rank, and so are weights
        that are all 0. RuntimeError when it comes too late, ValueError with options that it does not work with.
        """
        if weight is not None:
            self._check_weighable()
        if self._included:
            self._reducer.set_weight(weight)

    def _check_weighable(self) -> None:
        terms = self._reducer._terms
        wire = getattr(terms.compression, "wire_dtype", None)
        apart = {
            "op other than Average": terms.op != Average,
            "gradient_predivide_factor": terms.predivide != 1.0,
            "compression other than Compression.bf16": terms.compression is not Compression.none
            and wire != torch.bfloat16,
            "shard_optimizer_state": self._sharding is not None,
            "cross_barrier": self._barrier is not None,
            "local parameters": self._reducer.local,
        }
        for what, is_so in apart.items():
            if is_so:
                raise ValueError(f"optimizer.set_weight() does not work together with {what}")

    def register_local(self, parameters: Any) -> None:
        """Leaves the gradients of a parameter, a module's parameters, or several of either to this rank.

        Call it before backward. A parameter that other ranks have too must be made local on all of them.
        """
        if self._barrier is not None:
            raise RuntimeError(
                "register_local() does not work with cross_barrier: make the optimizer without it"
            )
        if self._reducer.weighted:
            raise ValueError("optimizer.set_weight() does not work together with local parameters")
        local = parameters_of(parameters)
        _check_local(local, type(self)._wrapped_class)
        self._reducer.add_local(local)

    def _local_parameters(self) -> list[torch.Tensor]:
        return list(self._reducer.local)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are accumulated locally before gradients are reduced."""
        self.backward_passes_per_step = checked_passes(passes)
        self._reducer.set_passes(passes)

    # --- the optimizer's own methods ----------------------------------------------------------------------------------

    @uncompiled
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Reduces the gradients (unless done already or inside skip_synchronize); then the wrapped class's step."""
        closure = args[0] if args else kwargs.get("closure")
        if self._is_left_out_by_scaler():
            return None
        if self._barrier is not None:
            if closure is not None or not self._should_synchronize:
                raise RuntimeError(NO_TIME_FOR.format("computed by a closure or taken as they are"))
            if self.__dict__.get("_optimizer_step_pre_hooks") or self.__dict__.get(
                "_optimizer_step_post_hooks"
            ):
                raise RuntimeError(NO_TIME_FOR.format("given to the hooks of a step"))
            return self._barrier.step(lambda: self._step_now(None))
        return self._step_now(closure, *args, **kwargs)

    # Tells torch that step hooks run already: in the wrapped class's step.
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch's GradScaler, which then leaves the unscaling to step(): step() refuses it where gradients are
        not reduced yet."""
        own = self.__dict__.get("_step_supports_amp_scaling", False)
        return own or self._barrier is not None or self._reducer.is_pending()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _is_left_out_by_scaler(self) -> bool:
        """RuntimeError where ranks might not leave out the same steps."""
        if "found_inf" not in self.__dict__ or not (self._barrier or self._reducer.is_pending()):
            return False
        late = self._reducer.has_added_late()
        if late and self._reducer.drop_overflow():  # as on all ranks
            return True
        for key in ("found_inf", "grad_scale"):  # the scaler takes them back only where all goes well
            del self.__dict__[key]
        self._synchronize()
        if late:
            self._reducer.reduced = False
            self._reducer.check_alike(added_late=True)
            raise RuntimeError(ADDED_LATE)
        # Its look at them has written to memory in use: they are of no use any more
        if self._barrier is not None:
            self._reducer.reduced = False
            super().zero_grad()  # type: ignore[misc]
            raise RuntimeError(NO_TIME_FOR.format("unscaled"))
        raise RuntimeError(
            "a gradient scaler has looked at gradients that were not reduced yet, because this rank has computed "
            "others in this step than in the first one: the ranks would not leave out the same steps. Wait first:\n"
            "    optimizer.synchronize()\n"
            "    with optimizer.skip_synchronize():\n"
            "        scaler.step(optimizer)"
        )

    def _step_now(self, closure: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._reducer.check_in_charge()
        if closure is not None:
            if args:
                args = (self._reducing(closure), *args[1:])
            else:
                kwargs["closure"] = self._reducing(closure)
        if self._should_synchronize:
            if self._announced and self._reducer.reduced:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=4,
                )
            if closure is None or self._reducer.outstanding:
                self._synchronize(whole=False)
        self._announced = False
        self._reducer.reduced = False
        if self._sharding is not None:
            return self._step_of_my_share(*args, **kwargs)
        with self._last_check(closure):
            return super().step(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _last_check(self, closure: Any) -> Iterator[None]:
        """Within it the wrapped class's step begins with a look at gradients, which its hooks may have changed, too. A
        closure looks by itself."""
        if closure is not None or not (self._included and self._reducer.some_local):
            yield
            return
        hooks = self.__dict__.get("_optimizer_step_pre_hooks")
        if hooks is None:
            self._reducer.check_alike()
            yield
            return
        mark = object()
        hooks[mark] = lambda *_: self._reducer.check_alike()
        try:
            yield
        finally:
            hooks.pop(mark, None)

    def _reducing(self, closure: Any) -> Any:
        """The closure, with its gradients reduced; and for LBFGS its loss, on which every rank must decide alike."""

        def reduced_closure() -> Any:
            loss = closure()
            if self._should_synchronize and self._reducer.outstanding:
                self._synchronize(whole=False)
                self._reducer.reduced = False
            if self._included:
                self._reducer.check_alike()
            if isinstance(self, torch.optim.LBFGS) and self._included:
                place = getattr(loss, "device", "cpu")
                loss = torch.as_tensor(loss, dtype=torch.float64, device=place).detach().clone()
                weight = self._reducer.weight
                operations.allreduce_(loss, op=Average, process_set=self._process_set, weight=weight)
            return loss

        return reduced_closure

    def _step_of_my_share(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """With sharded state: updates this rank's pieces of the parameters, then exchanges them."""
        sharding, reducer = self._sharding, self._reducer
        assert sharding is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if sharding.layout != reducer.layout:
            if sharding.pieces and sharding.covers(reducer):
                sharding.move_to(reducer, self.__dict__["state"])
            else:
                self._gather_state(None)
                self._become_whole()
                sharding.lay_out(reducer)
        self._whole_state = None
        with sharding.only_mine(self.__dict__), self._last_check(closure):
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        sharding.share_parameters()
        return result if closure is None else loss

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. AssertionError between backward() and step() or synchronize()."""
        if self._reducer.outstanding:
            self._reducer.drop_overflow()
        if self._reducer.outstanding:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        if self._included:
            self._find_new()  # what has taken a parameter's place in its group
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; their gradients are reduced from the next step on."""
        if self._barrier is not None:
            raise RuntimeError("add_param_group() does not work with cross_barrier: make the optimizer anew")
        super().add_param_group(param_group)  # type: ignore[misc]
        self._name_last_group()
        if self._included and not self._reducer.outstanding:
            self._find_new()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped class; reductions in flight are given up."""
        self._give_up()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        if self._sharding is not None:
            self._whole_state = None
            self._sharding.forget()  # every rank has been given the whole state; the next step keeps its shard

    def _give_up(self) -> None:
        """Gives up reductions in flight: a state is being restored, or the world in which they began is over."""
        if self._barrier is not None:
            self._barrier.forget()
        self._reducer.discard()
        self._announced, self._should_synchronize = False, True

    # --- sharded state ------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int | None = None) -> None:
        """With shard_optimizer_state: collects the state on rank `to`, or on every rank. Every rank must call it.

        Then state_dict() works there until the next step. ValueError when `to` is not in the process set.
        """
        ranks = self._process_set.ranks or [0]
        if to is not None and to not in ranks:
            raise ValueError(f"consolidate_state_dict(to={to}): not one of the optimizer's ranks, {ranks}")
        self._gather_state(None if to is None else ranks.index(to))

    def _gather_state(self, to: int | None) -> None:
        if self._sharding is not None and self._sharding.pieces:
            self._whole_state = gather_state(self._sharding, self.__dict__["state"], to)

    def _become_whole(self, received: bool = False) -> None:
        """The collected state becomes the optimizer's own, as if it were not sharded; the next step cuts it again.

        received: another rank's state is about to replace it.
        """
        if self._sharding is None or not self._sharding.pieces:
            return
        if not received:
            with self._readable_state():
                whole = self.__dict__["state"]
            own = self.__dict__["state"]
            own.clear()
            own.update(whole)
        self._whole_state = None
        self._sharding.forget()

    @contextmanager
    def _readable_state(self) -> Iterator[None]:
        if self._barrier is not None:
            self._barrier.finish()
        own = self.__dict__["state"]
        if self._sharding is not None and self._sharding.pieces:
            if self._whole_state is None:
                raise RuntimeError(
                    "the state of this optimizer is sharded: every rank must call optimizer.consolidate_state_dict() "
                    "after the last step (to=RANK collects it on that rank only) before its state can be read here"
                )
            self.__dict__["state"] = self._whole_state
        try:
            yield
        finally:
            self.__dict__["state"] = own

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped class, of whole parameters. RuntimeError if the state is sharded and not consolidated."""
        with self._readable_state():
            return super().state_dict()  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    local_parameters: Any = (),
    scale_local_gradients: bool = True,
    unused_as_none: bool = False,
    shard_optimizer_state: bool | str = False,
    cross_barrier: Any = None,
    quorum: float | str | None = None,
    late: str = "drop",
    max_lag: int = 8,
) -> Distributed:
    """Wraps `optimizer` so that gradients are reduced over the ranks of `process_set`, while backward runs.

    named_parameters: as from model.named_parameters(); the names must be the same on all ranks. compression: the form
    of gradients on the wire. backward_passes_per_step: passes accumulated locally. op: Average or Sum (also Min, Max,
    Product for dense gradients); or Adasum, which reduces what each rank's own step has changed instead of gradients.
    gradient_predivide_factor: splits Average into 1/f before and f/size after the sum. groups (num_groups in older
    scripts): a number of groups, or lists of parameters, to be reduced together. sparse_as_dense: turns sparse
    gradients into dense ones first. local_parameters: parameters or modules whose gradients stay on this rank, divided
    by the set's size under Average unless scale_local_gradients is False. unused_as_none: a gradient that no rank has
    computed in a step is None, not zeros. shard_optimizer_state: ZeRO-1, each rank keeps the state of its shard of the
    parameters ("elements" or "parameters" say how they are cut). cross_barrier: the model; step() then returns at once,
    and each module waits before its next forward for its own parameters. quorum: a share of the ranks ("majority",
    "solo"): a round goes ahead when so many have gradients; those that come late are dropped or carried into the next
    round (late), and nobody is more than max_lag rounds behind (docs/quorum.md). docs/optimizer.md has the rest.

    Returns an instance of a class with the wrapped class's name, derived from it, which shares state and parameter
    groups with `optimizer`. Raises ValueError for wrong arguments, NotInitialized before init().
    """
    _check_arguments(optimizer, op, gradient_predivide_factor, process_set)
    compression = checked_compression(compression, op, gradient_predivide_factor)
    passes = checked_passes(backward_passes_per_step)
    groups = _checked_groups(num_groups, groups)
    local = parameters_of(local_parameters)
    options = {
        "compression": compression, "op": op, "gradient_predivide_factor": gradient_predivide_factor, "groups": groups,
        "sparse_as_dense": sparse_as_dense, "process_set": process_set, "scale_local_gradients": scale_local_gradients,
        "unused_as_none": unused_as_none, "shard_optimizer_state": shard_optimizer_state,
        "cross_barrier": cross_barrier, "quorum": quorum,
    }  # fmt: skip
    how = (passes, DistributedOptimizer, options)
    apart = (op == Adasum, local, unused_as_none, shard_optimizer_state)
    if quorum is not None:
        return _by_quorum(optimizer, named_parameters, local, (quorum, late, max_lag), how)
    _check_local(local, type(optimizer))
    modules = checked_modules(cross_barrier, type(optimizer), compression, apart)
    if op == Adasum:
        if shard_optimizer_state:
            raise ValueError(
                "shard_optimizer_state does not work with op=hvd.Adasum: every rank makes a whole step"
            )
        wrapped = wrap(optimizer, AdasumMixin, named_parameters, *how)
        return wrapped._begin(Deltas(compression, process_set, wrapped._turn), local, sparse_as_dense)
    wrapped = wrap(optimizer, DistributedMixin, named_parameters, *how)
    wrapped._process_set = process_set
    wrapped._announced, wrapped._should_synchronize = False, True
    terms = Terms(
        op, gradient_predivide_factor, compression, sparse_as_dense, unused_as_none, scale_local_gradients, process_set
    )  # fmt: skip
    wrapped._reducer = Reducer(passes, terms, wrapped._turn)
    wrapped._reducer.add_local(local)
    wrapped._reducer.groups = groups
    return _begun(wrapped, shard_optimizer_state, modules)


def _begun(wrapped: Any, shard_optimizer_state: bool | str, modules: Any) -> Any:
    """Once its reducer knows the terms: forms the buckets, where this rank takes part."""
    process_set, reducer = wrapped._process_set, wrapped._reducer
    wrapped._included = bool(process_set.included())
    wrapped._sharding = wrapped._whole_state = wrapped._barrier = None
    if shard_optimizer_state:
        mode = checked_mode(shard_optimizer_state, type(wrapped)._wrapped_class)
        if wrapped._included:
            wrapped._sharding = Sharding(mode, process_set)
            reducer.shards = wrapped._sharding.parts
    if wrapped._included:
        wrapped._find_new()
        wrapped._barrier = CrossBarrier(wrapped, reducer, modules) if modules else None
        # With a barrier weights are updated at any time.
        if wrapped._barrier is None and reducer._terms.op in (Average, Sum):
            reducer.comparison = Comparison(policy(), _state_of(wrapped))
        reducer.may_wait = wrapped._barrier is None
    return wrapped


def _state_of(wrapped: Any) -> Any:
    """Gives what the optimizer, which the reducer must not keep alive, has of its parameters; None where ranks share it
    out."""
    if wrapped._sharding is not None:
        return None
    optimizer_of = weakref.ref(wrapped)

    def state_of() -> Any:
        # One around another optimizer has a property, or nothing
        held = getattr(optimizer_of(), "state", None)
        return held if isinstance(held, MutableMapping) else {}

    return state_of


def _by_quorum(
    optimizer: Any, names: Any, local: list[torch.Tensor], terms: tuple[float | str, str, int], how: Any
) -> Any:
    from horoclone.torch.optimizer import quorum  # loaded only where it is used

    passes, _, options = how
    others = {
        "op other than Average": options["op"] != Average, "cross_barrier": options["cross_barrier"] is not None,
        "compression": options["compression"] is not Compression.none, "backward_passes_per_step": passes > 1,
        "local_parameters": local, "gradient_predivide_factor": options["gradient_predivide_factor"] != 1.0,
        "process_set": options["process_set"] is not global_process_set,
    }  # fmt: skip
    plain = ("shard_optimizer_state", "groups", "unused_as_none", "sparse_as_dense")
    quorum.refuse_beside_quorum({**others, **{name: options[name] for name in plain}})
    return wrap(optimizer, quorum.QuorumMixin, names, *how)._begin(*terms)


def _check_arguments(optimizer: Any, op: int, predivide: float, process_set: ProcessSet) -> None:
    if isinstance(optimizer, WrappedOptimizer) and not isinstance(optimizer, NotStarted):
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if not hasattr(optimizer, "param_groups"):
        raise wrong_type("DistributedOptimizer", "optimizer", optimizer, "an optimizer of torch")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if predivide == 0:
        raise ZeroFactor("gradient_predivide_factor=0: gradients are divided by it")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor={predivide} must be positive")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    resolve_reduce(None, op)


def _check_local(local: list[torch.Tensor], kind: type) -> None:
    if local and issubclass(kind, torch.optim.LBFGS):
        raise ValueError(
            "local_parameters do not work with LBFGS, whose step mixes all gradients: shared parameters would drift "
            "apart. Give the local ones an optimizer of their own, without hvd.DistributedOptimizer"
        )


def _checked_groups(num_groups: int, groups: Any) -> int | list[list[torch.Tensor]]:
    if num_groups:
        text = "Parameter `num_groups` has been replaced by `groups` and will be removed."
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        if groups is None:
            groups = num_groups
    if groups is None:
        return 0
    if isinstance(groups, int) and groups >= 0:
        return groups
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[torch.Tensor] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if parameter in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(parameter)
    return [list(group) for group in groups]


__all__ = ["DistributedOptimizer"]
