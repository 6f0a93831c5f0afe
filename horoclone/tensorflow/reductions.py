"""The reductions that users call: mpi_ops with compression, averages, tf.IndexedSlices and Horovod's older arguments.

An IndexedSlices is reduced by two allgathers, of its values and of its indices; rows may then appear several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horoclone.arguments import check_compression
from horoclone.ops import REDUCE_NAMES, Adasum, Average, ReduceOp, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set, id_of
from horoclone.tensorflow import mpi_ops
from horoclone.tensorflow.compression import Compression
from horoclone.tensorflow.mpi_ops import _as_it_is, to_tensor

SPARSE_WEIGHT = (
    "weight= is not supported with tf.IndexedSlices; make it dense with tf.convert_to_tensor(), or gradients with "
    "sparse_as_dense=True"
)


def _resolved(average: bool | None, op: int | None) -> int:
    """The reduction meant; WrongReduction for none of ours, ValueError for both arguments."""
    if op is not None and average is None and (isinstance(op, bool) or op not in range(len(REDUCE_NAMES))):
        raise mpi_ops.WrongReduction(
            None, None, f"op={op!r} is not a reduction; use one of hvd.{', hvd.'.join(REDUCE_NAMES)}."
        )
    return resolve_reduce(average, op)


@_as_it_is
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    *,
    weight: Any = None,
) -> Any:
    """Reduces a tf.Tensor, tf.Variable or tf.IndexedSlices over all ranks; the same bits on every rank.

    op: Average (the default), Sum, Min, Max, Product, Adasum; for anything else, and for Adasum of integers, an error
    that is both UnknownError (as in Horovod) and ValueError. Integers average with truncation toward zero.
    NotImplementedError for an IndexedSlices with another op than Average and Sum, with factors or a weight. weight: how
    much this rank counts in the mean, sum(weight * tensor) / sum(weight): a number of 0 or more, or a tensor, given on
    every rank or on none. tf.errors.InvalidArgumentError on every rank where one's weight is negative or not finite, or
    all are 0.
    """
    check_compression("allreduce", compression)
    reduce = _resolved(average, op)
    if isinstance(tensor, tf.IndexedSlices):
        if weight is not None:
            raise NotImplementedError(SPARSE_WEIGHT)
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError(
                "prescale_factor and postscale_factor are not supported with tf.IndexedSlices; scale the values, or "
                "make it dense with tf.convert_to_tensor()"
            )
        with tf.device(device_sparse):
            return _allreduce_sparse(tensor, reduce, name, process_set, ignore_name_scope)
    with tf.device(device_dense):
        given = to_tensor("allreduce", tensor)
        wire, context = compression.compress(given)
        if weight is not None:
            from horoclone.tensorflow import weighted  # loaded only where it is used

            weighted.check_compression("allreduce", [wire], [given])
            factors = (prescale_factor, postscale_factor)
            (reduced,) = weighted.mean(
                "allreduce", [wire], weight, reduce, factors, name, ignore_name_scope, process_set
            )
            return compression.decompress(reduced, context)
        reduced = mpi_ops._allreduce(
            wire, name, reduce, prescale_factor, postscale_factor, ignore_name_scope, process_set
        )
        return compression.decompress(reduced, context)


def _allreduce_sparse(
    slices: Any, op: int, name: str | None, process_set: ProcessSet, ignore_name_scope: bool
) -> Any:
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
            "sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Average, Sum):
        raise NotImplementedError("tf.IndexedSlices can be reduced with op=Average or op=Sum only")
    values_name, indices_name = (None, None) if name is None else (f"{name}_values", f"{name}_indices")
    values = mpi_ops.allgather(slices.values, values_name, ignore_name_scope, process_set)
    indices = mpi_ops.allgather(slices.indices, indices_name, ignore_name_scope, process_set)
    if op == Average:
        values = values / tf.cast(mpi_ops.size_op(id_of(process_set)), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@_as_it_is
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    weight: Any = None,
) -> list[Any]:
    """Reduces several tensors, of any shapes and dtypes, as one operation: none before all are ready everywhere.

    Entries that are tf.IndexedSlices are reduced one by one. weight: as for allreduce.
    """
    check_compression("grouped_allreduce", compression)
    reduce = _resolved(average, op)
    results: list[Any] = mpi_ops.group_of("grouped_allreduce", tensors)
    dense = [i for i, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    for i in set(range(len(results))) - set(dense):
        own = None if name is None else f"{name}_{i}"
        results[i] = allreduce(
            results[i], None, device_dense, device_sparse, compression, reduce, prescale_factor,
            postscale_factor, own, process_set, ignore_name_scope, weight=weight,
        )  # fmt: skip
    with tf.device(device_dense):
        given = [to_tensor("grouped_allreduce", results[i]) for i in dense]
        packed = [compression.compress(tensor) for tensor in given]
        wires = [wire for wire, _ in packed]
        if weight is None:
            reduced = mpi_ops._grouped_allreduce(
                wires, name, reduce, prescale_factor, postscale_factor, ignore_name_scope, process_set
            )
        else:
            from horoclone.tensorflow import weighted

            weighted.check_compression("grouped_allreduce", wires, given)
            factors = (prescale_factor, postscale_factor)
            reduced = weighted.mean(
                "grouped_allreduce", wires, weight, reduce, factors, name, ignore_name_scope, process_set
            )
        for i, tensor, (_, context) in zip(dense, reduced, packed, strict=True):
            results[i] = compression.decompress(tensor, context)
    return results


@_as_it_is
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces over the ranks (Average or Sum) and returns this rank's share of the rows; the first ranks get one row
    more where they cannot be shared equally. Differentiable. A tf.IndexedSlices is made dense first.

    tf.errors.AbortedError for other reductions, InvalidArgumentError (in a graph ValueError) for a scalar."""
    check_compression("reducescatter", compression)
    with tf.device(device_dense):
        wire, context = compression.compress(to_tensor("reducescatter", tensor))
        share = mpi_ops._reducescatter(
            wire, name, _resolved(None, op), ignore_name_scope, process_set, prescale_factor, postscale_factor
        )  # fmt: skip
        return compression.decompress(share, context)


@_as_it_is
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Does reducescatter on several tensors as one operation."""
    check_compression("grouped_reducescatter", compression)
    tensors = mpi_ops.group_of("grouped_reducescatter", tensors)
    with tf.device(device_dense):
        packed = [compression.compress(to_tensor("grouped_reducescatter", tensor)) for tensor in tensors]
        shares = mpi_ops._grouped_reducescatter(
            [wire for wire, _ in packed], name, _resolved(None, op), False, process_set, prescale_factor,
            postscale_factor,
        )  # fmt: skip
        return [compression.decompress(s, context) for s, (_, context) in zip(shares, packed, strict=True)]
