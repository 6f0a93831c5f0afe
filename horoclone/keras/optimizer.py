"""DistributedOptimizer for Keras 3: the optimizer's class is replaced by a derived one that reduces before it applies.

The derived class has the name of the wrapped one, and Keras saves it as that one, so a saved model loads without
horoclone (copies.py says how copies know that they are some). All ways of training end in `apply`: fit, train_on_batch
and custom loops call it or `apply_gradients`, which calls it; the JAX trainer calls `stateless_apply`, which does too.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from horoclone.errors import HostsUpdatedInterrupt, Unsupported
from horoclone.keras.aggregation import Aggregation
from horoclone.keras.compared import Watch
from horoclone.keras.copies import Copied, names_of, notice_marks, word_of
from horoclone.keras.flavor import backend, keras
from horoclone.keras.reduction import Reduction

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
_FEWER = (
    "this LossScaleOptimizer is a copy of one that has trained, for fewer variables, or in another order. On JAX that "
    "is possible for the optimizer inside it alone: build the copy for the variables of the original, or make a new "
    "optimizer, without state."
)
_classes: dict[tuple[type, str, str], type] = {}  # wrapped class, options, module -> derived class


class State:
    """What a distributed optimizer has beside its class's attributes, in one attribute that Keras does not track."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.aggregation: Aggregation | None = None  # made when the optimizer is built
        self.hidden = False  # the sums are not among `variables` for the moment
        self.handed_over = False  # a LossScaleOptimizer or MultiOptimizer around it reduces
        self.implied = False  # made from a saved configuration; DistributedOptimizer may still be called
        self.values: list[Any] | None = None  # of the original's variables, until the copy has them
        self.trained: list[Any] | None = None  # the variables that it, or the original, is built for
        self.weight: Any = None  # of this rank in the mean of the next update's gradients
        self.given: list[Any] | None = None  # to build(), where a copy is given fewer than that
        self.watch = Watch()


class DistributedMixin(Copied):
    """What DistributedOptimizer adds to an optimizer class of Keras 3."""

    _horoclone: State
    _state = State

    @staticmethod
    def _distribute(optimizer: Any, reduction: Reduction) -> Any:
        return distribute(optimizer, reduction)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces the gradients over the ranks, then applies them as the wrapped class does (unscaling, clipping)."""
        grads = list(grads)
        if trainable_variables is None:
            trainable_variables = self._given(len(grads))
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if self._horoclone.handed_over or not grads:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if not self.built and trainable_variables is not None:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        reduction = self._horoclone.reduction
        if reduction.passes == 1:
            super().apply(self._reduced(grads, variables), trainable_variables)  # type: ignore[misc]
            return
        if reduction.all_reduced_before(grads, variables):  # by a tape: there is nothing to wait for
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        apply = super().apply  # type: ignore[misc]

        def update(sums: list[Any]) -> None:
            apply(self._reduced(sums, variables), trainable_variables)

        places = [self._get_variable_index(v) for v in variables]
        state = [*self._own_variables(), *self._trainable_variables]
        self._horoclone.aggregation.apply(grads, places, update, state)

    def _reduced(self: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        weight, self._horoclone.weight = self._horoclone.weight, None
        state = self._horoclone
        return state.reduction.reduce(
            grads, variables, self._var_key, self._trainable_variables_indices, weight, (state.watch, self)
        )

    def stateless_apply(
        self: Any,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """As the wrapped class; the gradients are reduced first. Unsupported for a LossScaleOptimizer that is a copy
        for fewer variables than its original."""
        plain = super().stateless_apply  # type: ignore[misc]
        if (given := self._given(len(trainable_variables))) is not None:
            if isinstance(self, LossScaleOptimizer):
                raise Unsupported(_FEWER)
            mapping = [*zip(given, trainable_variables, strict=True)]
            mapping += zip(self.variables, optimizer_variables, strict=True)
            with keras.StatelessScope(state_mapping=mapping) as scope:
                self.apply(grads, given)
            after = [[scope.get_current_value(v) for v in group] for group in (given, self.variables)]
            return after[0], after[1]
        if self._horoclone.handed_over or not isinstance(self, LossScaleOptimizer):
            return plain(optimizer_variables, grads, trainable_variables)
        return self._stateless_apply_scaled(plain, optimizer_variables, grads, trainable_variables)

    def _stateless_apply_scaled(
        self: Any, plain: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """LossScaleOptimizer does not come by `apply` here, and knows nothing of the sums."""
        state, own = self._horoclone, self._own_variables()
        if state.aggregation is None:
            known = [*zip(own, optimizer_variables, strict=True)]
            known += zip(self._trainable_variables, trainable_variables, strict=True)
            with keras.StatelessScope(state_mapping=known):  # what is compared are the values of this step
                reduced = self._reduced(list(grads), self._trainable_variables)
            return plain(optimizer_variables, reduced, trainable_variables)
        everything = [*own, *state.aggregation.variables, *self._trainable_variables]
        values = [*optimizer_variables, *trainable_variables]

        def update(sums: list[Any]) -> None:
            reduced = self._reduced(sums, self._trainable_variables)
            state.hidden = True
            try:
                new = plain([v.value for v in own], reduced, [v.value for v in self._trainable_variables])
            finally:
                state.hidden = False
            for variables, after in zip((self._trainable_variables, own), new, strict=True):
                for variable, value in zip(variables, after, strict=True):
                    variable.assign(value)

        with keras.StatelessScope(state_mapping=list(zip(everything, values, strict=True))) as scope:
            places = range(len(self._trainable_variables))
            state.aggregation.apply(list(grads), places, update, [*own, *self._trainable_variables])
        count = len(optimizer_variables)
        after = [scope.get_current_value(v) for v in everything]
        return after[count:], after[:count]

    def set_weight(self, weight: Any) -> None:
        """How much this rank counts in the mean of the gradients of the next update: the number of samples or tokens
        that the loss is a mean over, a number or a tensor. Call it before each update, on every rank, in the function
        that makes the update."""
        if self._horoclone.handed_over:
            raise ValueError(
                "set_weight(): call it of the LossScaleOptimizer around this optimizer, which reduces"
            )
        self._horoclone.reduction.check_weighable()
        self._horoclone.weight = weight

    def register_local_var(self, var: Any) -> None:
        """Takes a variable whose gradient stays this rank's own."""
        self._horoclone.reduction.local_variables.append(var)

    def finalize_variable_values(self, var_list: Any) -> None:
        """As the wrapped class, which gives the model the moving averages of use_ema when fit() ends. On JAX fit() does
        so when an exception ends it, too: after an interrupt training goes on from the weights themselves, and after a
        step that failed there are none, since they were donated to it."""
        if backend() != "jax":
            super().finalize_variable_values(var_list)  # type: ignore[misc]
            return
        interrupted = isinstance(sys.exc_info()[1], HostsUpdatedInterrupt)
        if interrupted or any(map(_is_gone, [*var_list, *self.variables])):
            return
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        if any(getattr(one, "use_ema", False) for one in (self, *_inside(self))):
            # Keras leaves averages and weights in one memory, which the next fit() cannot donate.
            for variable in var_list:
                variable.assign(keras.ops.copy(variable.value))

    # --- state --------------------------------------------------------------------------------------------------------

    def build(self: Any, variables: Sequence[Any]) -> None:
        """As the wrapped class; also makes the sums of backward_passes_per_step."""
        all_of_them = self._to_build(variables)
        if [id(v) for v in all_of_them] != [id(v) for v in variables]:
            self._horoclone.given = list(variables)
        super().build(all_of_them)  # type: ignore[misc]
        _hand_over(self, self._horoclone.reduction)
        self.built = True
        self._take_over()
        _aggregate(self)

    def _given(self, count: int) -> list[Any] | None:
        """The variables that gradients without variables are for, if not those for which the state is."""
        given = self._horoclone.given
        return given if given is not None and len(given) == count else None

    def _own_variables(self) -> list[Any]:
        return super().variables  # type: ignore[misc]

    def _has_state(self) -> bool:
        return bool(getattr(self, "built", False))

    @property
    def variables(self) -> list[Any]:
        """The wrapped class's variables, then the sums of backward_passes_per_step."""
        state = self._horoclone
        extra = [] if state.aggregation is None or state.hidden else state.aggregation.variables
        return [*self._own_variables(), *extra]

    def save_own_variables(self, store: Any) -> None:
        """As the wrapped class: a saved optimizer is a plain one."""
        self._as_plain(super().save_own_variables, store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """As the wrapped class, from what a plain optimizer saved."""
        self._as_plain(super().load_own_variables, store)  # type: ignore[misc]

    def _as_plain(self, method: Any, store: Any) -> None:
        self._horoclone.hidden = True
        try:
            method(store)
        finally:
            self._horoclone.hidden = False

    def _is_marked(self) -> bool:
        return not self._horoclone.handed_over


def distribute(optimizer: Any, reduction: Reduction) -> Any:
    """Makes an optimizer of Keras 3 a distributed one, in place; state and hyperparameters stay. Returns it."""
    if isinstance(optimizer, DistributedMixin) and not optimizer._horoclone.implied:
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer wraps an optimizer of Keras, not {optimizer!r}")
    _hand_over(optimizer, reduction)
    base = getattr(type(optimizer), "_horoclone_base", type(optimizer))
    # Set before the class changes: from then on every attribute's assignment goes through the derived class.
    optimizer.__dict__["_horoclone"] = State(reduction)
    optimizer.__class__ = _derived(base, reduction)
    if optimizer._has_state():
        optimizer._horoclone.trained = list(optimizer._trainable_variables)
        _aggregate(optimizer)
    return optimizer


def _hand_over(optimizer: Any, reduction: Reduction) -> None:
    """It reduces from now on, and not what is inside it. ValueError where that would have reduced otherwise."""
    handed = [one for one in _inside(optimizer) if isinstance(one, DistributedMixin)]
    for inner in handed:
        state = inner._horoclone
        if not (state.handed_over or state.implied) and _differs(state.reduction, reduction):
            raise ValueError(
                f"the {type(inner).__name__} inside the {type(optimizer).__name__} is a DistributedOptimizer with "
                "another op, gradient_predivide_factor, compression, process_set, backward_passes_per_step or other "
                "local variables, and only the outer one reduces: give the options to that, and plain optimizers to it"
            )
    for inner in handed:
        inner._horoclone.handed_over, inner._horoclone.aggregation = True, None


def _differs(inner: Reduction, outer: Reduction) -> bool:
    """Whether gradients would become something else by the inner one's options."""
    options = "op", "predivide", "compression", "process_set", "passes", "average_passes"
    kept = {id(one) for one in (*outer.local_variables, *outer.local_layers)}
    return any(getattr(inner, name) != getattr(outer, name) for name in options) or any(
        id(one) not in kept for one in (*inner.local_variables, *inner.local_layers)
    )


def _inside(optimizer: Any) -> list[Any]:
    """What a LossScaleOptimizer or a MultiOptimizer is made of."""
    inner, several = getattr(optimizer, "inner_optimizer", None), getattr(optimizer, "optimizers", None)
    found = [*([] if inner is None else [inner]), *(several if isinstance(several, (list, tuple)) else ())]
    return found + [deeper for one in found for deeper in _inside(one)]


def _is_gone(variable: Any) -> bool:
    """On JAX: the value was donated to a step that has not come back; fit() has taken it out of the variable first."""
    return variable._value is None or variable._value.is_deleted()


def _derived(base: type, reduction: Reduction) -> type:
    names = names_of(base)
    key = base, word_of(reduction), names["__module__"]
    if key not in _classes:
        names |= {"_horoclone_base": base, "_horoclone_reduction": reduction.copied()}
        _classes[key] = derived = type(base.__name__, (DistributedMixin, base), names)
        _give_registered_name(derived, base)
    return _classes[key]


def _give_registered_name(derived: type, base: type) -> None:
    """Keras saves its own classes, and those that users have registered, under a name that it looks up by class."""
    for module, table in (
        ("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES"),
        ("keras.src.api_export", "REGISTERED_OBJS_TO_NAMES"),
    ):
        try:
            names = getattr(importlib.import_module(module), table)
        except (ImportError, AttributeError):
            continue  # another Keras: the class is then found by its module and name
        if base in names:
            names[derived] = names[base]
        elif table == "REGISTERED_OBJS_TO_NAMES" and base.__module__.startswith(
            "keras."
        ):  # of the torch backend
            names[derived] = f"{base.__module__}.{base.__name__}"


def _aggregate(optimizer: Any) -> None:
    """Makes the sums of backward_passes_per_step, once the variables are known."""
    state = optimizer._horoclone
    if state.reduction.passes == 1 or state.handed_over or state.aggregation is not None:
        return
    state.aggregation = Aggregation(
        state.reduction.passes, state.reduction.average_passes, optimizer._trainable_variables, optimizer.name
    )


# --- LossScaleOptimizer around a distributed optimizer ----------------------------------------------------------------


def _after_construction(plain: Any) -> Any:
    """A LossScaleOptimizer that is put around a distributed optimizer reduces in its place: all ranks must agree on
    which steps to skip."""

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        inner = self.inner_optimizer
        if not isinstance(inner, DistributedMixin):
            return
        if isinstance(self, DistributedMixin):
            _hand_over(self, self._horoclone.reduction)
        else:
            distribute(self, inner._horoclone.reduction)._horoclone.implied = inner._horoclone.implied

    return __init__


def _before_a_step(plain: Any) -> Any:
    """A LossScaleOptimizer that does not reduce would decide on this rank alone whether a step is skipped."""

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, DistributedMixin) and not one._horoclone.handed_over for one in _inside(self)):
            raise Unsupported(
                "DistributedOptimizer is inside a LossScaleOptimizer that does not reduce, so ranks may disagree on "
                "which steps to skip. Wrap the outer one: "
                "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))."
            )
        return plain(self, *args, **kwargs)

    return step


notice_marks(keras.optimizers.Optimizer, DistributedMixin, State, distribute)
LossScaleOptimizer.__init__ = _after_construction(LossScaleOptimizer.__init__)
LossScaleOptimizer.apply = _before_a_step(LossScaleOptimizer.apply)
LossScaleOptimizer.stateless_apply = _before_a_step(LossScaleOptimizer.stateless_apply)
