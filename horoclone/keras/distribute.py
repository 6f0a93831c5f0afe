"""Makes a distributed optimizer from the arguments of DistributedOptimizer, in whichever order an API has them."""

from __future__ import annotations

from typing import Any

from horoclone.keras.flavor import LEGACY
from horoclone.keras.reduction import Reduction, checked, layers_of
from horoclone.ops import Average, ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set

if LEGACY:
    from horoclone.keras.legacy_optimizer import distribute
    from horoclone.tensorflow.compression import Compression as _Compression
else:
    from horoclone.keras.compression import Compression as _Compression  # type: ignore[assignment]
    from horoclone.keras.optimizer import distribute

Compression: Any = _Compression
"""Holds the compressors `none`, `fp16`, `bf16`. Of TensorFlow's tensors with tf_keras, of any backend's with Keras
3."""

__all__ = ["Compression", "PartialDistributedOptimizer", "distribute", "make_distributed"]


def make_distributed(
    optimizer: Any,
    *,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
    local_layers: Any = None,
) -> Any:
    """DistributedOptimizer by keywords; local_layers as in PartialDistributedOptimizer.

    Every function of that kind passes its own arguments on as they are, `make_distributed(**locals())`: what differs
    between them is their order, which users' scripts know.
    """
    groups = checked(op, gradient_predivide_factor, backward_passes_per_step, num_groups, groups, process_set)
    reduction = Reduction(
        op=op,
        predivide=gradient_predivide_factor if op == Average else 1.0,
        compression=None if compression is Compression.none else compression,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        name=name or f"Distributed{type(optimizer).__name__}",
        named=name is not None,
        local_layers=layers_of(local_layers),
    )
    distributed = distribute(optimizer, reduction)
    reduction.turn.announce()
    return distributed


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int | list[Any] = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Does what DistributedOptimizer does, except that the gradients of local_layers (a layer or several) stay each
    rank's own.

    Where num_groups stands Horovod has groups: lists of variables are taken there, too.
    """
    arguments = locals()
    if isinstance(num_groups, list):
        arguments |= {"groups": num_groups, "num_groups": 0}
    return make_distributed(**arguments)
