"""DistributedOptimizer for tf_keras: its optimizers of 2.11 and later, and those in tf_keras.optimizers.legacy.

Both reduce where gradients are computed (minimize and what it calls). Gradients from elsewhere are reduced in the step
that adds up those of replicas: before clipping, and before a LossScaleOptimizer checks whether they are finite. A
caller that skips that step (skip_gradients_aggregation, experimental_aggregate_gradients=False) is assumed to have
reduced them itself.
"""

# mypy: disable-error-code="no-any-return, misc"
from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer

from horoclone.errors import Unsupported
from horoclone.keras.compared import Watch
from horoclone.keras.copies import Copied, names_of, notice_marks, word_of
from horoclone.keras.flavor import assign, to_numpy
from horoclone.keras.reduction import Reduction
from horoclone.process_sets import ProcessSet
from horoclone.runtime import current
from horoclone.tensorflow import reduced_gradients
from horoclone.tensorflow.gradient_aggregation import GradientAggregation

Pairs = list[tuple[Any, Any]]
KEY, NAME, PLACE = range(3)
_PROCESS = uuid.uuid4().hex  # keys of variables mean something in their own process
_classes: dict[tuple[type, str, str], type] = {}  # wrapped class, options, module -> derived class


class State:
    """What a distributed optimizer has beside its class's attributes; Keras does not track it."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.watch = Watch()
        self.optimizer: Any = None  # whose state it is, once it reduces
        self.aggregation: GradientAggregation | None = None
        if reduction.passes > 1:
            self.aggregation = GradientAggregation(
                reduction.passes, self.reduce, reduction.average_passes, sparse=True
            )
            self.aggregation.gives_sums = True
        self.numbers: dict[Hashable, int] = {}  # of its variables, the same on every rank
        self._life: Any = None  # the runtime in which they were given
        # Eagerly: variables whose gradients were reduced and are not applied yet
        self.computed: set[Hashable] = set()
        self.scaled = False  # a LossScaleOptimizer computes gradients with it at this moment
        self.implied = False  # made from a saved configuration; DistributedOptimizer may still be called
        self.values: list[Any] | None = None  # of the original's variables, until the copy has them
        self.trained: list[Any] | None = None  # of tf_keras 2.11: what it, or the original, is built for
        self.matched: int | None = None  # how these are found: KEY, NAME or PLACE

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self.number(variables)
        watch = None if self.optimizer is None else (self.watch, self.optimizer())
        return self.reduction.reduce(grads, variables, _key, self.numbers, None, watch)

    def number(self, variables: Sequence[Any]) -> None:
        """Gives new ones their numbers, in the order in which they come. It follows from the model; that in which they
        were made differs where one rank loads the model and another builds it. Each generation of an elastic job begins
        anew, as a rank that joins does."""
        if self._life is not current.runtime:
            self._life = current.runtime
            self.numbers.clear()
        for variable in variables:
            self.numbers.setdefault(_key(variable), len(self.numbers))


class DistributedMixin(Copied):
    """What DistributedOptimizer adds to an optimizer class of tf_keras.

    Gradients are reduced where they are computed, as in Horovod, or where they are applied, if nobody has done it yet.
    """

    _HAS_AGGREGATE_GRAD = True  # asked for by older versions of Keras
    _horoclone: State
    _state = State

    @staticmethod
    def _distribute(optimizer: Any, reduction: Reduction) -> Any:
        return distribute(optimizer, reduction)

    # --- names that Horovod's class has -------------------------------------------------------------------------------

    @property
    def _agg_helper(self) -> GradientAggregation | None:
        return self._horoclone.aggregation

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        return self._horoclone.reduction.process_set

    @property
    def scale_local_gradients(self) -> bool:
        """Whether gradients of local variables are divided by the number of ranks."""
        return self._horoclone.reduction.scale_local_gradients

    @property
    def _local_vars(self) -> set[Any]:
        return {variable.ref() for variable in self._horoclone.reduction.local_variables}

    def _allreduce_grads(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        return self._horoclone.reduce(grads, vars)

    def _allreduce(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """The gradients to hand to apply_gradients: reduced; with backward_passes_per_step the sums so far."""
        state = self._horoclone
        state.optimizer = weakref.ref(self)
        if state.aggregation is None:
            result = state.reduce(grads, vars)
        elif state.reduction.all_reduced_before(grads, vars):
            return list(grads)
        else:
            _refuse_sessions()
            result = state.aggregation.compute_gradients(grads, vars)
        reduced_gradients.mark(result)
        if tf.executing_eagerly():
            state.computed |= {_key(v) for g, v in zip(result, vars, strict=True) if g is not None}
        return result

    def _computed(self, pairs: Pairs) -> Pairs:
        """Pairs of which the gradients are reduced, but for a LossScaleOptimizer: it has them reduced when it applies
        them, so that all ranks find the same infinities and keep one scale."""
        if self._horoclone.scaled:
            return pairs
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        return list(zip(self._allreduce(grads, variables), variables, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Takes a variable whose gradient stays this rank's own."""
        self._horoclone.reduction.local_variables.append(var)

    # --- applying -----------------------------------------------------------------------------------------------------

    def _reduced(self, pairs: Pairs) -> Pairs:
        """For the step of the wrapped class in which it adds up the gradients of replicas."""
        state = self._horoclone
        state.optimizer = weakref.ref(self)
        asks = tf.executing_eagerly() and state.reduction.differs_when_repeated()
        todo = [i for i, (_, v) in enumerate(pairs) if not (asks and _key(v) in state.computed)]
        grads = state.reduce([pairs[i][0] for i in todo], [pairs[i][1] for i in todo])
        for i, gradient in zip(todo, grads, strict=True):
            pairs[i] = (gradient, pairs[i][1])
        if state.aggregation is None:
            state.computed.clear()
        return pairs

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped class; with backward_passes_per_step only every so often."""
        apply = super().apply_gradients
        state, pairs = self._horoclone, list(grads_and_vars)
        state.optimizer = weakref.ref(self)
        state.number([v for _, v in pairs])
        if state.aggregation is None:
            return apply(pairs, *args, **kwargs)
        _refuse_sessions()
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        there = [_key(v) for g, v in pairs if g is not None]
        computed = tf.executing_eagerly() and bool(there) and state.computed.issuperset(there)
        if not computed and not state.reduction.all_reduced_before(grads, variables):
            aggregation = state.aggregation
            reduce_now = not _has_reduced_by_himself(kwargs)
            grads = aggregation.compute_gradients(grads, variables, reduce_now)
            reduced_gradients.mark(grads)
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        variables = [v for _, v in pairs]
        state.computed.clear()
        with tf.init_scope():  # in the conditional step below no variables can be made
            if hasattr(self, "_create_all_weights"):
                self._create_all_weights(variables)
            else:
                self.build(variables)
        done = state.aggregation.apply_gradients(lambda: apply(pairs, *args, **kwargs), self, pairs)
        return self.iterations if tf.executing_eagerly() or isinstance(self, OfTfKeras) else tf.group(done)


class OfTfKeras(DistributedMixin):
    """For the optimizers of tf_keras 2.11 and later."""

    def build(self, var_list: Any) -> None:
        """As the wrapped class."""
        self._horoclone.number(var_list)
        if not self._has_state():
            super().build(self._to_build(var_list))
            self._take_over()

    def _own_variables(self) -> list[Any]:
        return list(self.variables)  # type: ignore[attr-defined]

    def _has_state(self) -> bool:
        return bool(getattr(self, "_built", False))

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Pairs:
        """As the wrapped class, and reduced over the ranks; minimize() begins with it."""
        return self._computed(super().compute_gradients(loss, var_list, tape))

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Pairs:
        """compute_gradients under the name that it has in tf_keras.optimizers.legacy. ValueError for grad_loss."""
        if grad_loss is not None:
            raise ValueError("this optimizer takes no grad_loss; those of tf_keras.optimizers.legacy do")
        return self.compute_gradients(loss, var_list, tape)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The reduced gradients of a loss within a graph or a function."""
        params = tf.nest.flatten(params)
        return self._allreduce(tf.gradients(loss, params), params)

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Reduces over the ranks."""
        return super().aggregate_gradients(self._reduced(list(grads_and_vars)))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        return self.aggregate_gradients(grads_and_vars)


class OfLegacy(DistributedMixin):
    """For tf_keras.optimizers.legacy."""

    def _create_all_weights(self, var_list: Any) -> None:
        self._horoclone.number(var_list)
        super()._create_all_weights(var_list)
        self._take_over()

    def _own_variables(self) -> list[Any]:
        return list(self.variables())  # type: ignore[attr-defined]

    def _labels(self: Any) -> list[tuple[Any, str]]:
        """For each of its variables what tells it from the others, and its name. Those of a trained variable are made
        at its first gradient, so their number and order are the training's."""
        keys = {
            id(slot): (_PROCESS, key, name)
            for key, slots in self._slots.items()
            for name, slot in slots.items()
        }
        return [(keys.get(id(v), ("", v.name)), v.name) for v in self._own_variables()]

    def _has_state(self) -> bool:
        return bool(self._own_variables())

    def _values(self) -> list[Any]:
        own = [
            (*label, np.array(to_numpy(v)))
            for label, v in zip(self._labels(), self._own_variables(), strict=True)
        ]
        return [*own, *(self._horoclone.values or [])]

    def _take_over(self) -> None:
        """By the trained variable as long as that is the same one; else by name; by place where names cannot tell."""
        state, labels = self._horoclone, self._labels()
        if not state.values or not labels:
            return
        if state.matched is None:
            state.matched = _how_to_match(labels, state.values)
        if state.matched == PLACE:
            left = dict(enumerate(state.values))
            found = list(range(len(labels)))
        else:
            left = {value[state.matched]: value for value in state.values}
            found = [label[state.matched] for label in labels]
        for key, variable in zip(found, self._own_variables(), strict=True):
            if key in left:
                assign(variable, left.pop(key)[2])
        state.values = list(left.values())

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Pairs:
        """As the wrapped class, and reduced over the ranks; minimize() begins with it."""
        return self._computed(super()._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The reduced gradients of a loss within a graph or a function."""
        return self._allreduce(super().get_gradients(loss, params), tf.nest.flatten(params))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Reduces over the ranks, and hands on a list of gradients."""
        return super()._aggregate_gradients(self._reduced(list(grads_and_vars)))


def _how_to_match(labels: list[tuple[Any, str]], values: list[Any]) -> int:
    """How variables of a copy are matched with its original's: KEY, NAME or PLACE."""
    own, there = {key for key, _ in labels if key[0]}, {key for key, _, _ in values if key[0]}
    if own & there or not own:
        return KEY
    names, saved = [name for _, name in labels], [name for _, name, _ in values]
    if (
        len(set(saved)) == len(saved)
        and len(set(names)) == len(names)
        and {n for k, n in labels if k[0]} & set(saved)
    ):
        return NAME
    elsewhere = all(key[0] != _PROCESS for key in there)
    if len(names) == len(saved) and (elsewhere or names == saved):
        return PLACE
    return KEY


def _key(variable: Any) -> Hashable:
    return variable.ref()


def _has_reduced_by_himself(options: dict[str, Any]) -> bool:
    return bool(
        options.get("skip_gradients_aggregation") or not options.get("experimental_aggregate_gradients", True)
    )


def _refuse_sessions() -> None:
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise Unsupported(
            "backward_passes_per_step > 1 does not work in TensorFlow 1's graph mode with Keras."
        )


def distribute(optimizer: Any, reduction: Reduction) -> Any:
    """Makes an optimizer of tf_keras a distributed one, in place; state and hyperparameters stay. Returns it."""
    kinds = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    innermost = optimizer
    while isinstance(innermost, tf_keras.mixed_precision.LossScaleOptimizer):
        innermost = innermost.inner_optimizer
    if isinstance(innermost, DistributedMixin) and not innermost._horoclone.implied:
        raise ValueError("the optimizer is already a DistributedOptimizer")
    if not isinstance(innermost, kinds):
        raise ValueError(f"DistributedOptimizer wraps an optimizer of Keras, not {optimizer!r}")
    base = getattr(type(innermost), "_horoclone_base", type(innermost))
    innermost.__dict__["_horoclone"] = State(reduction)
    innermost.__class__ = _derived(base, reduction)
    return optimizer


def _derived(base: type, reduction: Reduction) -> type:
    names = names_of(base)
    key = base, word_of(reduction), names["__module__"]
    if key not in _classes:
        names |= {key: vars(base)[key] for key in _SAVED_AS if key in vars(base)}
        names |= {"_horoclone_base": base, "_horoclone_reduction": reduction.copied()}
        mixin = OfLegacy if issubclass(base, tf_keras.optimizers.legacy.Optimizer) else OfTfKeras
        _classes[key] = type(base.__name__, (mixin, base), names)
    return _classes[key]


_SAVED_AS = ("_keras_api_names", "_keras_api_names_v1")  # the names by which Keras saves its classes


def _while_it_scales(plain: Any) -> Any:
    """For methods in which a LossScaleOptimizer has the distributed optimizer inside compute gradients: these are not
    reduced there, but when they are applied, so that all ranks find the same infinities and keep one scale."""

    @functools.wraps(plain)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.inner_optimizer.__dict__.get("_horoclone")
        if state is None:
            return plain(self, *args, **kwargs)
        before, state.scaled = state.scaled, True
        try:
            return plain(self, *args, **kwargs)
        finally:
            state.scaled = before

    return compute


for _kind in (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer):
    notice_marks(_kind, DistributedMixin, State, distribute)
for _kind in list(vars(loss_scale_optimizer).values()):
    for _name in ("compute_gradients", "_compute_gradients"):
        if isinstance(_kind, type) and _name in vars(_kind) and hasattr(_kind, "inner_optimizer"):
            setattr(_kind, _name, _while_it_scales(vars(_kind)[_name]))
