"""DistributedOptimizer for the optimizers of TensorFlow 1 (tf.compat.v1.train); Keras's are passed on to its binding.

With Adasum each rank makes its own step, and the steps are reduced instead of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoclone.ops import Adasum, Average
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.tensorflow.compression import Compression
from horoclone.tensorflow.gradient_reduction import GradientReduction
from horoclone.tensorflow.mpi_ops import _as_it_is


class _Passes:
    """backward_passes_per_step: gradients are added up on this rank; with every last one they are reduced."""

    def __init__(self, passes: int, average: bool) -> None:
        self.passes = passes
        self._divisor = passes if average else 1
        self.counter: Any = None
        self._sums: list[Any] = []  # None for a gradient that is None

    def _make_variables(self, gradients: Sequence[Any]) -> None:
        def local(value: Any, name: str) -> Any:
            return tf.compat.v1.Variable(
                value, trainable=False, name=name, use_resource=True,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            )  # fmt: skip

        with tf.init_scope():
            self.counter = local(tf.constant(0), "aggregation_counter")
            for i, gradient in enumerate(gradients):
                if gradient is not None and not gradient.shape.is_fully_defined():
                    raise ValueError("backward_passes_per_step > 1 needs gradients of known shapes")
                zeros = None if gradient is None else tf.zeros(gradient.shape, gradient.dtype)
                self._sums.append(None if zeros is None else local(zeros, f"aggregated_gradient_{i}"))

    def add(self, gradients: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The reduced sums with every last pass, else the gradients as they are. All gradients are dense."""
        if self.counter is None:
            self._make_variables(gradients)
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        added = [self._sums[i].assign_add(gradients[i]) for i in there]
        with tf.control_dependencies(added):
            count = self.counter.assign_add(1)
            count = count if tf.is_tensor(count) else count.read_value()

        def finish() -> list[Any]:
            sums = [self._sums[i].read_value() / self._divisor for i in there]
            whole = dict(zip(there, sums, strict=True))
            reduced = reduce([whole.get(i) for i in range(len(gradients))])
            with tf.control_dependencies(sums):
                cleared = [self._sums[i].assign(tf.zeros_like(gradients[i])) for i in there]
                cleared.append(self.counter.assign(0))
            with tf.control_dependencies([c for c in cleared if c is not None]):
                return [tf.identity(reduced[i]) for i in there]

        with tf.control_dependencies([count]):
            given = tf.cond(count >= self.passes, finish, lambda: [tf.identity(gradients[i]) for i in there])
        given = given if isinstance(given, (list, tuple)) else [given]
        result = dict(zip(there, given, strict=True))
        return [result.get(i) for i in range(len(gradients))]


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer of TensorFlow 1: the gradients that it computes are reduced before it applies them."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: GradientReduction,
        passes: _Passes,
    ) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._passes = passes

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self._reduction.register_local([var])

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._reduction.reduce(gradients, variables, f"{self.get_name()}_Allreduce")

    @_as_it_is
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the wrapped optimizer's; the gradients are reduced over the ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._reduction.op == Adasum and self._passes.passes == 1:
            return list(pairs)
        if self._passes.passes == 1:
            return list(zip(self._reduce(gradients, variables), variables, strict=True))
        if any(isinstance(g, tf.IndexedSlices) for g in gradients) and not self._reduction.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        local = self._reduction.op == Adasum
        reduced = self._passes.add(dense, lambda sums: sums if local else self._reduce(sums, variables))
        return list(zip(reduced, variables, strict=True))

    @_as_it_is
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the wrapped optimizer's; while gradients are only added up, it counts the step and does nothing else."""
        pairs = list(grads_and_vars)
        if self._passes.passes == 1:
            return self._apply(pairs, global_step, name)
        gradients = [g for g, _ in pairs if g is not None]

        def apply() -> Any:
            with tf.control_dependencies([self._apply(pairs, global_step, None)]):
                return tf.constant(True)

        def skip() -> Any:
            with tf.control_dependencies([] if global_step is None else [global_step.assign_add(1)]):
                return tf.constant(False)

        with tf.control_dependencies(gradients):
            due = tf.equal(self._passes.counter.read_value(), 0)
        done = tf.cond(due, apply, skip)
        return done if tf.executing_eagerly() else tf.group(done, name=name)

    def _apply(self, pairs: list[tuple[Any, Any]], global_step: Any, name: str | None) -> Any:
        if self._reduction.op != Adasum:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        variables = [v for g, v in pairs if g is not None]
        starts = [tf.raw_ops.DeepCopy(x=v.read_value()) for v in variables]
        with tf.control_dependencies(starts):
            stepped = self._optimizer.apply_gradients(pairs, global_step=global_step)
        with tf.control_dependencies([] if stepped is None else [stepped]):
            steps = [v.read_value() - start for v, start in zip(variables, starts, strict=True)]
        reduced = self._reduce(steps, variables)
        moved = [v.assign(s + r) for v, s, r in zip(variables, starts, reduced, strict=True)]
        return None if tf.executing_eagerly() else tf.group(*moved, name=name)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that reduces gradients over the ranks before it applies them.

    optimizer: one of tf.compat.v1.train, or of Keras. ValueError for options that contradict, and for anything else as
    an optimizer.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if not callable(getattr(optimizer, "get_config", None)):
            raise ValueError(f"{optimizer!r} is neither an optimizer of tf.compat.v1.train nor one of Keras")
        from horoclone.tensorflow import keras

        return keras.DistributedOptimizer(
            optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
            sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups, groups=groups,
            process_set=process_set, scale_local_gradients=scale_local_gradients,
        )  # fmt: skip
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    reduction = GradientReduction(
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    passes = _Passes(backward_passes_per_step, average_aggregated_gradients)
    return _DistributedOptimizer(optimizer, name, use_locking, reduction, passes)
