"""DistributedOptimizer for Keras 3: the optimizer's class is replaced by a derived one that reduces before it applies.

The derived class has the name and module of the wrapped one, so a saved model names a class that Keras knows, and loads
without horoclone. All ways of training end in `apply`: fit, train_on_batch and custom loops call it or
`apply_gradients`, which calls it; the JAX trainer calls `stateless_apply`, which calls it.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from horoclone.errors import Unsupported
from horoclone.keras.aggregation import Aggregation
from horoclone.keras.flavor import keras
from horoclone.keras.reduction import Reduction

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
_classes: dict[type, type] = {}  # wrapped class -> derived class


class State:
    """What a distributed optimizer has beside its class's attributes, in one attribute that Keras does not track."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.aggregation: Aggregation | None = None  # made when the optimizer is built
        self.hidden = False  # the sums are not among `variables` for the moment
        self.handed_over = False  # a LossScaleOptimizer around it reduces


class DistributedMixin:
    """What DistributedOptimizer adds to an optimizer class of Keras 3."""

    _horoclone: State

    # --- gradients ----------------------------------------------------------------------------------------------------

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces the gradients over the ranks, then applies them as the wrapped class does (unscaling, clipping)."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if self._horoclone.handed_over or not grads:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        _refuse_inside_loss_scaling()
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
        return self._horoclone.reduction.reduce(grads, variables, self._var_key)

    def stateless_apply(
        self: Any,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """As the wrapped class; the gradients are reduced first."""
        plain = super().stateless_apply  # type: ignore[misc]
        if self._horoclone.handed_over or not isinstance(self, LossScaleOptimizer):
            return plain(optimizer_variables, grads, trainable_variables)
        return self._stateless_apply_scaled(plain, optimizer_variables, grads, trainable_variables)

    def _stateless_apply_scaled(
        self: Any, plain: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """LossScaleOptimizer does not come by `apply` here, and knows nothing of the sums."""
        state, own = self._horoclone, self._own_variables()
        if state.aggregation is None:
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

    def register_local_var(self, var: Any) -> None:
        """Takes a variable whose gradient stays this rank's own."""
        self._horoclone.reduction.local_variables.append(var)

    # --- state --------------------------------------------------------------------------------------------------------

    def build(self: Any, variables: Sequence[Any]) -> None:
        """As the wrapped class; also makes the sums of backward_passes_per_step."""
        super().build(list(variables))  # type: ignore[misc]
        self.built = True
        _aggregate(self)

    def _own_variables(self) -> list[Any]:
        return super().variables  # type: ignore[misc]

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

    # --- LossScaleOptimizer around a distributed optimizer ------------------------------------------------------------

    @property
    def loss_scale_factor(self) -> Any:
        """As in the wrapped class. Its assignment is how a LossScaleOptimizer takes an optimizer over; where the value
        stays the same, TensorFlow's tracking only reads it."""
        self._notice_loss_scaler()
        return self.__dict__.get("loss_scale_factor")

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        self.__dict__["loss_scale_factor"] = value
        self._notice_loss_scaler()

    def _notice_loss_scaler(self) -> None:
        outer = None if self._horoclone.handed_over else _loss_scaler_of_caller(self)
        if outer is not None and not isinstance(outer, DistributedMixin):
            _hand_over(self)
            distribute(outer, self._horoclone.reduction)


def distribute(optimizer: Any, reduction: Reduction) -> Any:
    """Makes an optimizer of Keras 3 a distributed one, in place; state and hyperparameters stay. Returns it."""
    if isinstance(optimizer, DistributedMixin):
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer wraps an optimizer of Keras, not {optimizer!r}")
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, DistributedMixin):
        _hand_over(inner)
    base = type(optimizer)
    # Set before the class changes: from then on every attribute's assignment goes through the derived class.
    optimizer.__dict__["_horoclone"] = State(reduction)
    optimizer.__class__ = _derived(base)
    if optimizer.built:
        _aggregate(optimizer)
    return optimizer


def _hand_over(inner: Any) -> None:
    """From now on the LossScaleOptimizer around it reduces."""
    inner._horoclone.handed_over, inner._horoclone.aggregation = True, None


def _derived(base: type) -> type:
    if base not in _classes:
        names = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
        derived = type(base.__name__, (DistributedMixin, base), names)
        _classes[base] = derived
        _give_registered_name(derived, base)
    return _classes[base]


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


def _aggregate(optimizer: Any) -> None:
    """Makes the sums of backward_passes_per_step, once the variables are known."""
    state = optimizer._horoclone
    if state.reduction.passes == 1 or state.handed_over or state.aggregation is not None:
        return
    state.aggregation = Aggregation(
        state.reduction.passes, state.reduction.average_passes, optimizer._trainable_variables, optimizer.name
    )


# --- who calls ----------------------------------------------------------------------------------------------------


def _callers(limit: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and limit:
        yield frame
        frame, limit = frame.f_back, limit - 1


def _loss_scaler_of_caller(optimizer: Any) -> Any:
    """The LossScaleOptimizer whose __init__ is taking `optimizer` over right now, or None."""
    for frame in _callers(8):
        if frame.f_code is LossScaleOptimizer.__init__.__code__:
            outer = frame.f_locals.get("self")
            return outer if getattr(outer, "inner_optimizer", None) is optimizer else None
    return None


def _refuse_inside_loss_scaling() -> None:
    """A LossScaleOptimizer that does not reduce decides on this rank alone whether a step is skipped."""
    if any(frame.f_code in _SCALED_STEPS for frame in _callers(12)):
        raise Unsupported(
            "DistributedOptimizer is inside a LossScaleOptimizer that does not reduce, so ranks may disagree on which "
            "steps to skip. Wrap the outer one: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))."
        )


_SCALED_STEPS = {
    method.__code__
    for name in ("_stateful_handle_finite_grads", "_stateless_handle_finite_grads")
    if (method := getattr(LossScaleOptimizer, name, None)) is not None
}
