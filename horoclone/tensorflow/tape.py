"""DistributedGradientTape: a tf.GradientTape whose gradient() reduces over the ranks. Eagerly and in tf.function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from horoclone.ops import Average, ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.tensorflow import reduced_gradients
from horoclone.tensorflow.compression import Compression
from horoclone.tensorflow.gradient_reduction import GradientReduction
from horoclone.tensorflow.mpi_ops import _as_it_is


class _DistributedGradientTape(tf.GradientTape):
    """Shares the whole state of the tape that it was made from: either may be used to record."""

    def __init__(
        self, tape: tf.GradientTape, reduction: GradientReduction, local_layers: Sequence[Any]
    ) -> None:
        if isinstance(tape, _DistributedGradientTape):
            raise ValueError("this tape is a DistributedGradientTape already; its gradients are reduced once")
        self.__dict__ = tape.__dict__
        self._horoclone_reduction = reduction
        self._horoclone_local_layers = list(local_layers)

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self._horoclone_reduction.register_local([source])

    @_as_it_is
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The reduced gradients, in the structure of `sources`; None where a source has none (on every rank).

        use_generic_names is accepted and not needed: no name comes from a variable.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        return self._reduced(gradients, sources)

    @_as_it_is
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[Any, Any]:
        """This rank's own gradients, and those that gradient() gives; both in the structure of `sources`."""
        gradients = super().gradient(target, sources, output_gradients)
        return gradients, self._reduced(gradients, sources)

    def _reduced(self, gradients: Any, sources: Any) -> Any:
        for layer in self._horoclone_local_layers:
            self._horoclone_reduction.register_local(layer.trainable_weights)
        flat = self._horoclone_reduction.reduce(
            tf.nest.flatten(gradients), tf.nest.flatten(sources), "DistributedGradientTape_Allreduce"
        )
        reduced_gradients.mark(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, flat)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    weight: Any = None,
) -> Any:
    """Wraps a tf.GradientTape so that gradient() gives gradients reduced over the ranks.

    op: Average, Sum, Adasum, or what else allreduce knows (for dense gradients). groups: a number of groups, or lists
    of variables, whose gradients go out as one operation each; by default about 8 MiB each. gradient_predivide_factor:
    how much of the division is done before the sum. process_set: ranks outside get their own gradients. ValueError for
    options that contradict, ZeroDivisionError for a predivide factor of 0. weight: how much this rank counts in the
    mean, the number of its samples or tokens; as for allreduce.
    """
    reduction = GradientReduction(
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set, scale_local_gradients, weight=weight,
    )  # fmt: skip
    return _made(gradtape, reduction, [])


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Does what DistributedGradientTape does, except that the gradients of local_layers (one layer or several) stay
    this rank's own.

    scale_local_gradients: these are divided by the number of ranks, so that they weigh as the reduced ones do.
    """
    reduction = GradientReduction(
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    layers = [] if local_layers is None else local_layers
    return _made(gradtape, reduction, list(layers) if isinstance(layers, Iterable) else [layers])


def _made(gradtape: tf.GradientTape, reduction: GradientReduction, layers: list[Any]) -> Any:
    made = type(gradtape.__class__.__name__, (_DistributedGradientTape,), {})
    return made(gradtape, reduction, layers)
