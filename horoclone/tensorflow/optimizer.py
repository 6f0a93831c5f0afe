"""DistributedOptimizer for the optimizers of TensorFlow 1 (tf.compat.v1.train); Keras's are passed on to its binding.

With Adasum each rank makes its own step, and the steps are reduced instead of the gradients.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from horoclone.ops import Adasum, Average, ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.tensorflow.compression import Compression
from horoclone.tensorflow.gradient_aggregation import GradientAggregation
from horoclone.tensorflow.gradient_reduction import GradientReduction
from horoclone.tensorflow.mpi_ops import _as_it_is

_LegacyOptimizer = tf.compat.v1.train.Optimizer


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """A function of gradients and, where there are groups, variables, that gives the reduced gradients; a private name
    of Horovod's that libraries use."""
    reduction = GradientReduction(
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, 0, groups, process_set
    )  # fmt: skip

    @_as_it_is
    def allreduce_grads(
        grads: Sequence[Any], vars: Sequence[Any] | None = None, use_generic_names: bool = False
    ) -> list[Any]:
        sources = list(range(len(grads))) if vars is None else vars
        return reduction.reduce(grads, sources, f"{name}_Allreduce")

    return allreduce_grads


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer of TensorFlow 1: the gradients that it computes are reduced before it applies them."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp | int = Average,
        gradient_predivide_factor: float = 1.0,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if isinstance(optimizer, _DistributedOptimizer):
            raise ValueError("the optimizer is already a DistributedOptimizer")
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = GradientReduction(
            device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, 0, groups,
            process_set, scale_local_gradients, compares=op != Adasum,  # its variables have made their own steps
        )  # fmt: skip
        self._agg_helper: GradientAggregation | None = None
        if backward_passes_per_step > 1:
            reduce = self._reduce if op != Adasum else lambda sums, _: sums  # its steps are reduced
            self._agg_helper = GradientAggregation(
                backward_passes_per_step, reduce, average_aggregated_gradients, sparse_as_dense
            )

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
        if self._agg_helper is not None:
            reduced = self._agg_helper.compute_gradients(gradients, variables)
        elif self._reduction.op == Adasum:
            reduced = gradients
        else:
            reduced = self._reduce(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    @_as_it_is
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the wrapped optimizer's; while gradients are only added up, it counts the step and does nothing else."""
        pairs = list(grads_and_vars)
        if self._agg_helper is None:
            return self._apply(pairs, global_step, name)
        done = self._agg_helper.apply_gradients(
            lambda: self._apply(pairs, global_step, None), None, pairs, global_step=global_step
        )
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


OptimizerT = TypeVar("OptimizerT")


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> OptimizerT:
    """An optimizer that reduces gradients over the ranks before it applies them.

    optimizer: one of tf.compat.v1.train, or of Keras. ValueError for options that contradict, and for anything else as
    an optimizer.
    """
    arguments = {name: value for name, value in locals().items() if name != "use_locking"}
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if not callable(getattr(optimizer, "get_config", None)):
            raise ValueError(f"{optimizer!r} is neither an optimizer of tf.compat.v1.train nor one of Keras")
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        # By name: Keras's binding is built on this one.
        return importlib.import_module("horoclone.tensorflow.keras").DistributedOptimizer(**arguments)
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        text = "Parameter `num_groups` has been replaced by `groups` and will be removed."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    return _DistributedOptimizer(
        optimizer, name, use_locking, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, backward_passes_per_step, average_aggregated_gradients, groups, process_set,
        scale_local_gradients,
    )  # fmt: skip
