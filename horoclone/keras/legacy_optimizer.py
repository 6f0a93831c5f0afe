"""DistributedOptimizer for tf_keras: its optimizers of 2.11 and later, and those in tf_keras.optimizers.legacy.

Both have a step in which gradients of replicas are added up: before clipping, and before a LossScaleOptimizer decides
whether they are finite. There the ranks' gradients are reduced. Whoever skips that step (skip_gradients_aggregation,
experimental_aggregate_gradients=False) has reduced by himself.
"""

# mypy: disable-error-code="no-any-return, misc"
from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
import tf_keras

from horoclone.errors import Unsupported
from horoclone.keras.reduction import Reduction

Pairs = list[tuple[Any, Any]]
_classes: dict[type, type] = {}


class State:
    """What a distributed optimizer has beside its class's attributes; Keras does not track it."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.count: Any = None
        self.sums: dict[Hashable, Any] = {}


class DistributedMixin:
    """What DistributedOptimizer adds to an optimizer class of tf_keras."""

    _horoclone: State

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Reduces over the ranks (optimizers of tf_keras 2.11 and later)."""
        return super().aggregate_gradients(self._reduced(list(grads_and_vars)))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Reduces over the ranks (tf_keras.optimizers.legacy), which hands on a list of gradients."""
        return super()._aggregate_gradients(self._reduced(list(grads_and_vars)))

    def _reduced(self, pairs: Pairs) -> Pairs:
        variables = [variable for _, variable in pairs]
        grads = self._horoclone.reduction.reduce([g for g, _ in pairs], variables, _key)
        return list(zip(grads, variables, strict=True))

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped class; with backward_passes_per_step only every so often."""
        apply = super().apply_gradients
        if self._horoclone.reduction.passes == 1:
            return apply(grads_and_vars, *args, **kwargs)
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise Unsupported(
                "backward_passes_per_step > 1 does not work in TensorFlow 1's graph mode with Keras."
            )
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        self._aggregate_over_passes(pairs, lambda summed: apply(summed, *args, **kwargs))
        return self.iterations

    def _aggregate_over_passes(self: Any, pairs: Pairs, apply: Callable[[Pairs], Any]) -> None:
        state = self._horoclone
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            if hasattr(self, "_create_all_weights"):
                self._create_all_weights(variables)
            else:
                self.build(variables)
            _make_sums(state, variables)
        sums = [state.sums[_key(variable)] for variable in variables]
        totals = [total + tf.convert_to_tensor(g) for total, (g, _) in zip(sums, pairs, strict=True)]
        factor = 1.0 / state.reduction.passes if state.reduction.average_passes else 1.0

        def finish() -> Any:
            apply([(t * tf.cast(factor, t.dtype), v) for t, v in zip(totals, variables, strict=True)])
            for total in sums:
                total.assign(tf.zeros_like(total))
            return state.count.assign(0)

        def go_on() -> Any:
            for total, value in zip(sums, totals, strict=True):
                total.assign(value)
            return state.count.assign_add(1)

        tf.cond(tf.equal(state.count, state.reduction.passes - 1), finish, go_on)

    def register_local_var(self, var: Any) -> None:
        """Takes a variable whose gradient stays this rank's own."""
        self._horoclone.reduction.local_variables.append(var)


def _key(variable: Any) -> Hashable:
    return variable.ref()


def _make_sums(state: State, variables: list[Any]) -> None:
    if state.count is None:
        state.count = tf.Variable(0, trainable=False, name="aggregated_batches")
    for variable in variables:
        if _key(variable) not in state.sums:
            zeros = tf.zeros(variable.shape, variable.dtype)
            state.sums[_key(variable)] = tf.Variable(zeros, trainable=False, name="aggregated_gradient")


def distribute(optimizer: Any, reduction: Reduction) -> Any:
    """Makes an optimizer of tf_keras a distributed one, in place; state and hyperparameters stay. Returns it."""
    kinds = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    innermost = optimizer
    while isinstance(innermost, tf_keras.mixed_precision.LossScaleOptimizer):
        innermost = innermost.inner_optimizer
    if isinstance(innermost, DistributedMixin):
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if not isinstance(innermost, kinds):
        raise ValueError(f"DistributedOptimizer wraps an optimizer of Keras, not {optimizer!r}")
    base = type(innermost)
    if base not in _classes:
        names = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
        _classes[base] = type(base.__name__, (DistributedMixin, base), names)
    innermost.__dict__["_horoclone"] = State(reduction)
    innermost.__class__ = _classes[base]
    return optimizer
