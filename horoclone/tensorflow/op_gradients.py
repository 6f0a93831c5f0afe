"""The gradients of our ops, registered with TensorFlow when this module is imported.

The rules are Horovod's: those of allgather and broadcast are averages over the ranks, those of a sum are sums. In a
graph a gradient is called after its op, which the ranks have matched already: what TensorFlow computes the gradient of
depends on static shapes, so its names may differ between ranks.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horoclone import process_sets
from horoclone.ops import REDUCE_NAMES, Average, Sum
from horoclone.tensorflow import mpi_ops

__all__: list[str] = []


def _process_set(op: Any) -> process_sets.ProcessSet:
    number = op.get_attr("process_set_id")
    registered = process_sets.by_id(number)
    if registered is None:
        raise ValueError(f"the gradient of {op.type}: process set {number} does not exist any more")
    return registered


def _same(op: Any) -> dict[str, Any]:
    output = op.outputs[0]
    name = None if hasattr(output, "numpy") else f"{output.op.name.rpartition('/')[2]}_grad"
    scope = op.get_attr("ignore_name_scope")
    return {"name": name, "ignore_name_scope": scope, "process_set": _process_set(op)}


def _scaled(op: Any) -> dict[str, Any]:
    pre, post = mpi_ops.factors_of(op)
    return {**_same(op), "prescale_factor": pre, "postscale_factor": post}


def _linear_reduction(op: Any) -> int:
    """Average or Sum; LookupError for the others, which have no gradient."""
    number: int = op.get_attr("reduce_op")
    if number not in (Average, Sum):
        raise LookupError(f"{op.type} with op={REDUCE_NAMES[number]} has no gradient; use Average or Sum.")
    return number


def _dense(gradients: Any) -> list[Any]:
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


@tf.RegisterGradient("HorovodAllreduce")
def _of_allreduce(op: Any, gradient: Any) -> list[Any]:
    return [mpi_ops._allreduce(gradient, op=_linear_reduction(op), **_scaled(op)), None]


@tf.RegisterGradient("HorovodGroupedAllreduce")
def _of_grouped_allreduce(op: Any, *gradients: Any) -> list[Any]:
    reduced = mpi_ops._grouped_allreduce(_dense(gradients), op=_linear_reduction(op), **_scaled(op))
    return [*reduced, None]


def _my_rows(op: Any, tensor: Any, gradient: Any) -> Any:
    """The part of an allgather's (reduced) gradient that belongs to this rank's rows."""
    counts = mpi_ops.allgather(tf.shape(tensor)[:1], **_same(op))
    place = mpi_ops.process_set_rank_op(op.get_attr("process_set_id"))
    begin = tf.reduce_sum(counts[:place])
    return gradient[begin : begin + counts[place]]


@tf.RegisterGradient("HorovodAllgather")
def _of_allgather(op: Any, gradient: Any) -> list[Any]:
    return [_my_rows(op, op.inputs[0], mpi_ops._allreduce(gradient, op=Average, **_same(op))), None]


@tf.RegisterGradient("HorovodGroupedAllgather")
def _of_grouped_allgather(op: Any, *gradients: Any) -> list[Any]:
    reduced = mpi_ops._grouped_allreduce(_dense(gradients), op=Average, **_same(op))
    tensors = op.inputs[:-1]
    return [*(_my_rows(op, t, g) for t, g in zip(tensors, reduced, strict=True)), None]


def _for_root(op: Any, gradients: list[Any]) -> list[Any]:
    is_root = tf.equal(mpi_ops.rank_op(), op.get_attr("root_rank"))
    return [tf.where(is_root, gradient, tf.zeros_like(gradient)) for gradient in gradients]


@tf.RegisterGradient("HorovodBroadcast")
def _of_broadcast(op: Any, gradient: Any) -> list[Any]:
    return [*_for_root(op, [mpi_ops._allreduce(gradient, op=Average, **_same(op))]), None]


@tf.RegisterGradient("HorovodGroupedBroadcast")
def _of_grouped_broadcast(op: Any, *gradients: Any) -> list[Any]:
    return [*_for_root(op, mpi_ops._grouped_allreduce(_dense(gradients), op=Average, **_same(op))), None]


@tf.RegisterGradient("HorovodAlltoall")
def _of_alltoall(op: Any, gradient: Any, _: Any) -> list[Any]:
    returned, _counts = mpi_ops.alltoall(gradient, splits=op.outputs[1], **_same(op))
    return [returned, None, None]


def _for_share(op: Any, gradients: list[Any]) -> list[Any]:
    """Times the size for Sum, as in Horovod, and the op's own factors."""
    pre, post = mpi_ops.factors_of(op)
    factor: Any = tf.constant(pre * post, tf.float64)
    if _linear_reduction(op) == Sum:
        factor *= tf.cast(mpi_ops.size_op(op.get_attr("process_set_id")), tf.float64)
    return [_summed_back(gradient * tf.cast(factor, gradient.dtype), op) for gradient in gradients]


def _summed_back(gradient: Any, op: Any) -> Any:
    """The gradient of an allgather is an average, as in Horovod. That of this one is the sum, or second derivatives
    would not be those of the first."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def same(values: Any) -> Any:
        size = tf.cast(mpi_ops.size_op(op.get_attr("process_set_id")), values.dtype)
        return tf.identity(values), lambda back: back * size

    return same(gradient)


@tf.RegisterGradient("HorovodReducescatter")
def _of_reducescatter(op: Any, gradient: Any) -> list[Any]:
    return [mpi_ops.allgather(_for_share(op, [gradient])[0], **_same(op)), None]


@tf.RegisterGradient("HorovodGroupedReducescatter")
def _of_grouped_reducescatter(op: Any, *gradients: Any) -> list[Any]:
    return [*mpi_ops.grouped_allgather(_for_share(op, _dense(gradients)), **_same(op)), None]


for _name in ("Join", "Size", "Rank", "LocalSize", "LocalRank", "ProcessSetIncluded", "Guard"):
    tf.no_gradient(f"Horovod{_name}")
