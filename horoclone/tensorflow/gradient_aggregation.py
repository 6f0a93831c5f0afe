"""backward_passes_per_step: gradients are added up on this rank; the last pass of a step reduces and applies them.

Used by the optimizers of TensorFlow 1 and of tf_keras, under the names that Horovod has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horoclone.process_sets import ProcessSet, global_process_set, id_of
from horoclone.tensorflow import mpi_ops
from horoclone.tensorflow.gradient_reduction import key_of

Reduce = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


class GradientAggregation:
    """The sums of one optimizer, one for each variable, and how many passes are in each: a call may be for some of the
    variables (a GAN's two halves), and each half has its passes.

    reduce: takes gradients and variables, gives the reduced gradients (None where there was none). average: the sums
    are divided by `passes`. sparse: tf.IndexedSlices are made dense; ValueError where it is False. Works eagerly, in
    functions and in graphs of TensorFlow 1.
    """

    gives_sums = False  # before the last pass compute_gradients() gives what it was given

    def __init__(self, passes: int, reduce: Reduce, average: bool, sparse: bool) -> None:
        if passes < 1:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        self.average_aggregated_gradients = average
        self.sparse_as_dense = sparse
        self._reduce = reduce
        self._sums: dict[Hashable, Any] = {}
        self._counts: dict[Hashable, tuple[Any, int]] = {}  # tf.Variable of several, and which one
        self._last: Hashable = None  # one of the variables that were given last
        self._gathered: set[Hashable] = set()  # eagerly: variables that had a gradient in this step

    @mpi_ops._as_it_is
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any], reduce: bool = True) -> list[Any]:
        """Adds the gradients; the reduced sums with every last pass, else the gradients, or the sums so far.

        reduce=False: the sums are of gradients that have been reduced.
        """
        if not vars:
            return []
        gradients, keys = [self._dense(gradient) for gradient in grads], [key_of(v) for v in vars]
        now = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if tf.executing_eagerly():
            self._gathered |= {keys[i] for i in now}
        there = [i for i, key in enumerate(keys) if gradients[i] is not None or key in self._gathered]
        self._make_variables([gradients[i] for i in now], [keys[i] for i in now], keys)
        counts, self._last = self._counts_of(keys), keys[0]
        sums = [self._sums[keys[i]] for i in there]
        with tf.control_dependencies([self._sums[keys[i]].assign_add(gradients[i]) for i in now]):
            after = [_value(counter.assign_add(mine)) * mine for counter, mine in counts]
            count = tf.reduce_max([tf.reduce_max(one) for one in after])

        def finish() -> list[Any]:
            totals = [self._averaged(total.read_value()) for total in sums]
            whole = dict(zip(there, totals, strict=True))
            reduced: Sequence[Any] = [whole.get(i) for i in range(len(gradients))]
            if reduce:
                reduced = self._reduce(reduced, vars)
            with tf.control_dependencies(totals):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
                cleared += [counter.assign(counter.read_value() * (1 - mine)) for counter, mine in counts]
            self._gathered -= set(keys)
            with tf.control_dependencies([c for c in cleared if c is not None]):
                return [tf.identity(reduced[i]) for i in there]

        def go_on() -> list[Any]:
            if self.gives_sums:
                return [total.read_value() for total in sums]
            given = zip(there, sums, strict=True)
            return [tf.zeros_like(s) if gradients[i] is None else tf.identity(gradients[i]) for i, s in given]

        with tf.control_dependencies([count]):
            given = tf.cond(count >= self.backward_passes_per_step, finish, go_on) if there else []
        given = given if isinstance(given, (list, tuple)) else [given]
        result = dict(zip(there, given, strict=True))
        return [result.get(i) for i in range(len(gradients))]

    @mpi_ops._as_it_is
    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the closure after every last pass. Between, the optimizer's `iterations` and the variable global_step,
        if there are any, count one more. args: first the pairs of gradient and variable that the closure applies.
        """
        step = kwargs.get("global_step")

        def apply() -> Any:
            with tf.control_dependencies(_as_dependencies([apply_grads_closure()])):
                return tf.constant(True)

        def skip() -> Any:
            counters = [c for c in (step, getattr(optimizer, "iterations", None)) if c is not None]
            with tf.control_dependencies(_as_dependencies([c.assign_add(1) for c in counters])):
                return tf.constant(False)

        pairs = args[0] if args else ()
        counter, at = self._counts.get(next((key_of(v) for _, v in pairs), self._last), (None, 0))
        with tf.control_dependencies(_as_dependencies([g for g, _ in pairs])):
            due = tf.constant(True) if counter is None else tf.equal(counter.read_value()[at], 0)
        return tf.cond(due, apply, skip)

    def _counts_of(self, keys: Sequence[Hashable]) -> list[tuple[Any, np.ndarray]]:
        """Each tf.Variable that counts passes of some of these, with ones in their places."""
        found: dict[int, tuple[Any, np.ndarray]] = {}
        for counter, at in (self._counts[key] for key in keys):
            found.setdefault(id(counter), (counter, np.zeros(counter.shape, np.int32)))[1][at] = 1
        return list(found.values())

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        return tf.convert_to_tensor(gradient)

    def _averaged(self, total: Any) -> Any:
        return total / self.backward_passes_per_step if self.average_aggregated_gradients else total

    def _make_variables(
        self, gradients: Sequence[Any], keys: Sequence[Hashable], together: Sequence[Hashable]
    ) -> None:
        """The sums and the counts, where a variable is met for the first time. together: all that were given."""
        with tf.init_scope():
            new = [key for key in dict.fromkeys(together) if key not in self._counts]
            if new:
                counter = _local_variable(tf.zeros(len(new), tf.int32), "aggregation_counter")
                self._counts.update((key, (counter, at)) for at, key in enumerate(new))
            for gradient, key in zip(gradients, keys, strict=True):
                if key in self._sums:
                    continue
                if not gradient.shape.is_fully_defined():
                    raise ValueError("backward_passes_per_step > 1 needs gradients of known shapes")
                zeros = tf.zeros(gradient.shape, gradient.dtype)
                self._sums[key] = _local_variable(zeros, f"aggregated_gradient_{len(self._sums)}")


def _local_variable(value: Any, name: str) -> Any:
    return tf.compat.v1.Variable(
        value, trainable=False, name=name, use_resource=True,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
    )  # fmt: skip


def _value(assigned: Any) -> Any:
    return assigned if tf.is_tensor(assigned) else assigned.read_value()


def _as_dependencies(results: Sequence[Any]) -> list[Any]:
    """What an op may wait for: tensors and operations; nothing when everything has run already."""
    if tf.executing_eagerly():
        return []
    kinds = (tf.Tensor, tf.Operation, tf.IndexedSlices, tf.Variable)
    return [result for result in results if isinstance(result, kinds)]


class LocalGradientAggregationHelper(GradientAggregation):
    """Aggregates gradients over several steps, as Horovod's class of this name for optimizers in graphs.
    allreduce_func: takes gradients and variables, gives reduced gradients.

    register_local_var: a variable whose sum stays this rank's own, divided by the size of process_set with
    scale_local_gradients. rank, optimizer_type and name change nothing.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Reduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int | None = None,
        optimizer_type: str = _OPTIMIZER_TYPE_LEGACY,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(
            backward_passes_per_step, self._reduce_shared, average_aggregated_gradients, sparse_as_dense
        )
        self._allreduce_func = allreduce_func
        self._process_set = process_set
        self._scale_local_gradients = scale_local_gradients
        self._local_keys: set[Hashable] = set()

    def register_local_var(self, var: Any) -> None:
        """Takes a variable whose gradient stays this rank's own."""
        self._local_keys.add(key_of(var))

    def _reduce_shared(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        result = list(gradients)
        shared = [i for i, variable in enumerate(variables) if key_of(variable) not in self._local_keys]
        reduced = self._allreduce_func([gradients[i] for i in shared], [variables[i] for i in shared])
        for i, gradient in zip(shared, reduced, strict=True):
            result[i] = gradient
        if self._scale_local_gradients and self._local_keys:
            size = mpi_ops.size_op(id_of(self._process_set))
            for i in set(range(len(result))) - set(shared):
                if result[i] is not None:
                    result[i] /= tf.cast(size, result[i].dtype)
        return result
