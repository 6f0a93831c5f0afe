"""Means of TensorFlow's tensors in which each rank counts as much as its weight says, eagerly and in graphs.

The weights travel behind the tensors, in the same operation (horoclone/weights.py); what is wrong with them is said by
a function of Python that the graph calls. Thread: whichever runs or traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horoclone import weights
from horoclone.errors import InvalidArgument
from horoclone.ops import Sum
from horoclone.process_sets import ProcessSet, id_of
from horoclone.tensorflow import mpi_ops


class WrongWeight(tf.errors.InvalidArgumentError, InvalidArgument):
    """Weights of which there is no mean."""


def mean(
    call: str,
    tensors: Sequence[Any],
    weight: Any,
    reduce: int,
    factors: tuple[float, float],
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
) -> list[Any]:
    """The weighted mean of dense tensors. ValueError for other reductions and dtypes, TypeError for no weight."""
    weights.check_mean(call, reduce, factors)
    if not tensors:
        return []
    wires = [_wire(call, tensor) for tensor in tensors]
    value = _value(call, weight)
    payload = [_weighed(tensor, wire, value) for tensor, wire in zip(tensors, wires, strict=True)]
    payload += [_tail(wire, value, process_set) for wire in dict.fromkeys(wires)]
    # That of the call without a weight, which must not wait for it
    if name is None and not tf.executing_eagerly():
        kind = "HorovodAllreduce" if call == "allreduce" else "HorovodGroupedAllreduce"
        name = mpi_ops._node_name(kind, tensors[0].name)
    received = mpi_ops._grouped_allreduce(payload, name, Sum, 1.0, 1.0, ignore_name_scope, process_set)
    label = f"{call} {name!r}" if name else f"unnamed {call}"
    tails = zip(dict.fromkeys(wires), received[len(tensors) :], strict=True)
    wholes = {wire: _total(tail, wire, label, process_set) for wire, tail in tails}
    means = []
    for sums, tensor, wire in zip(received, tensors, wires, strict=False):
        whole = wholes[wire]
        means.append(tf.cast(tf.cast(sums, whole.dtype) / whole, tensor.dtype))
    return means


def _wire(call: str, tensor: Any) -> str:
    wire = weights.wire_of(tensor.dtype.base_dtype.name)
    if wire is None:
        raise ValueError(
            f"{call}: weight= is for floating-point tensors; this one is {tensor.dtype}: convert it"
        )
    return wire


def _value(call: str, weight: Any) -> Any:
    """A number, or a tensor of a graph."""
    if isinstance(weight, tf.Variable):
        weight = tf.convert_to_tensor(weight)
    if tf.is_tensor(weight) and not hasattr(weight, "numpy"):
        is_real = weight.dtype.is_floating or weight.dtype.is_integer
        if weight.shape.rank not in (0, None) or not is_real:
            raise TypeError(
                f"{call}: weight={weight} cannot be used; weight takes a real number without dimensions"
            )
        return tf.stop_gradient(weight)
    if tf.is_tensor(weight):
        weight = weight.numpy()
    return weights.number(call, weight)


def _own(wire: str, value: Any) -> Any:
    wide = tf.float64 if wire == "float64" else tf.float32
    if isinstance(value, float):
        return tf.constant(weights.rounded(value, wire), wide)
    return tf.maximum(tf.cast(value, wide), wide.min)  # minus infinity stands for none


def _weighed(tensor: Any, wire: str, value: Any) -> Any:
    own = _own(wire, value)
    product = tf.cast(tensor, own.dtype) * own
    # No samples: also what is not finite is 0
    product = tf.where(tf.equal(own, 0), tf.zeros_like(product), product)
    return tf.cast(product, wire)


def _tail(wire: str, value: Any, process_set: ProcessSet) -> Any:
    own = _own(wire, value)
    parts = [own]
    if wire == "bfloat16":
        parts, rest = [], own
        for _ in range(weights.places(wire)):
            finite = tf.math.is_finite(rest)
            bits = tf.bitwise.bitwise_and(tf.bitcast(rest, tf.uint32), tf.constant(0xFFFF0000, tf.uint32))
            part = tf.where(finite, tf.bitcast(bits, tf.float32), rest)
            rest = tf.where(finite, rest - part, tf.zeros_like(rest))
            parts.append(part)
    number = id_of(process_set)  # the graph may run among other ranks than those it was made among
    mine = tf.equal(tf.range(mpi_ops.size_op(number)), mpi_ops.process_set_rank_op(number))
    row = tf.cast(tf.stack(parts), wire)[tf.newaxis]
    return tf.reshape(tf.where(mine[:, tf.newaxis], row, tf.zeros_like(row)), [-1])


def _total(tail: Any, wire: str, label: str, process_set: ProcessSet) -> Any:
    wide = tf.float64 if wire == "float64" else tf.float32

    def total(tail: Any) -> Any:
        ranks = process_set.ranks or [0]
        return np.asarray(
            weights.total(tail.astype(np.float64).tolist(), wire, label, ranks), wide.as_numpy_dtype
        )

    tail = tf.cast(tf.stop_gradient(tail), wide)
    if tf.executing_eagerly():
        try:
            return tf.constant(total(tail.numpy()))
        except InvalidArgument as error:
            raise WrongWeight(None, None, str(error)) from None
    found = tf.numpy_function(total, [tail], wide)
    found.set_shape([])
    return found


def check_compression(call: str, wires: Sequence[Any], tensors: Sequence[Any]) -> None:
    """ValueError where compression leaves weighted tensors without their range."""
    if any(w.dtype not in (t.dtype, tf.bfloat16) for w, t in zip(wires, tensors, strict=True)):
        raise ValueError(
            f"{call}: weight= works with hvd.Compression.none and hvd.Compression.bf16; weighted sums overflow in "
            "other forms"
        )
