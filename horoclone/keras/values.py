"""Collectives on values (numbers, arrays, tensors of any backend) outside of the training step.

On TensorFlow they are those of horoclone.tensorflow, and results are its tensors; on JAX and torch results are NumPy
arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horoclone import arrays, runtime
from horoclone.arguments import check_compression
from horoclone.arrays.handles import synchronize
from horoclone.keras.distribute import Compression
from horoclone.keras.flavor import LEGACY, assign, backend, to_numpy, to_tensor
from horoclone.objects import allgather_object, broadcast_object
from horoclone.ops import Average, ReduceOp, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather", "allgather_object", "allreduce", "broadcast", "broadcast_global_variables", "broadcast_object",
    "broadcast_variables", "reducescatter",
]  # fmt: skip


def _array(value: Any) -> Any:
    """The value as an array; numbers of Python as float32 and int64, as in Keras. NumPy's float64 is a float, too."""
    if type(value) in (float, int, bool):
        return np.asarray(value, np.float32 if type(value) is float else None)
    return np.asarray(to_numpy(value))


def _on_tensorflow(operation: Callable[[Any], Any]) -> Any:
    """The result of operation(horoclone.tensorflow); in TensorFlow 1's graph mode it is run in Keras's session, and an
    array."""
    import tensorflow as tf

    import horoclone.tensorflow as hvd

    result = operation(hvd)
    if LEGACY and not tf.compat.v1.executing_eagerly_outside_functions():
        return tf.compat.v1.keras.backend.get_session().run(result)
    return result


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the reduction of a value over the ranks: a tensor on TensorFlow, elsewhere a NumPy array, of its shape
    and dtype.

    Default op: Average. A number of Python is float32 or an integer (int32 on TensorFlow, elsewhere int64).
    """
    check_compression("allreduce", compression)
    if backend() == "tensorflow":
        options = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "name": name}
        return _on_tensorflow(
            lambda hvd: hvd.allreduce(to_tensor(value), average, compression=compression, op=op, **options)
        )
    reduce, factors = resolve_reduce(average, op), (prescale_factor, postscale_factor)
    if compression is Compression.none:
        return arrays.allreduce(_array(value), None, name, reduce, *factors)
    wire, context = compression.compress(to_tensor(_array(value)))
    reduced = arrays.allreduce(_array(wire), None, name, reduce, *factors)
    return _array(compression.decompress(to_tensor(reduced), context))


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns every rank's rows in rank order, as allreduce gives them; shapes may differ in the first dimension
    only."""
    if backend() == "tensorflow":
        return _on_tensorflow(lambda hvd: hvd.allgather(to_tensor(value), name))
    return arrays.allgather(_array(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of rank root_rank, as allreduce gives it. All ranks pass one of the same shape and dtype."""
    if backend() == "tensorflow":
        return _on_tensorflow(lambda hvd: hvd.broadcast(to_tensor(value), root_rank, name))
    return arrays.broadcast(_array(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Returns this rank's share of the rows of the reduction, as allreduce gives it."""
    if backend() == "tensorflow":
        return _on_tensorflow(lambda hvd: hvd.reducescatter(to_tensor(value), op=op, name=name))
    return arrays.reducescatter(_array(value), name, op)


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcasts all global variables, for scripts in TensorFlow 1's graph mode (tf_keras). RuntimeError elsewhere,
    where no global variables exist."""
    if LEGACY:
        import tensorflow as tf

        if not tf.executing_eagerly():
            return _on_tensorflow(lambda hvd: hvd.broadcast_global_variables(root_rank))
    raise RuntimeError(
        "hvd.broadcast_global_variables() needs TensorFlow 1's graph mode. Use "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in model.fit(), or in a custom loop "
        "hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)."
    )


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Gives Keras variables of any backend the values that they have on rank root_rank (a world rank).

    Works outside of compiled functions. ValueError, on every rank, when they differ in number, shape or dtype.
    """
    _check_alike([_form_of(v) for v in variables], root_rank, process_set)
    mine = runtime.rank() == root_rank
    values = [np.array(to_numpy(v), order="C") for v in variables]
    handles = [arrays.broadcast_async_(value, root_rank, None, process_set) for value in values]
    for handle in handles:
        synchronize(handle)
    if not mine:
        for variable, value in zip(variables, values, strict=True):
            assign(variable, value)


Form = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def _form_of(variable: Any) -> Form:
    dtype = variable.dtype
    name = str(getattr(variable, "path", None) or variable.name)
    return name, str(getattr(dtype, "name", dtype)), tuple(variable.shape)


def _check_alike(forms: list[Form], root_rank: int, process_set: ProcessSet) -> None:
    """The ranks compare what they are about to send: a checksum, and the whole lists only when those differ.

    Not the names: they count the layers that a process has made, which says nothing about the values.
    """
    word = zlib.crc32(repr([form[1:] for form in forms]).encode())
    words = arrays.allgather(np.array([word], np.int64), None, process_set)
    if len(set(words.tolist())) == 1:
        return
    everybody = allgather_object(forms, process_set=process_set)
    ranks = process_set.ranks or []
    root = everybody[ranks.index(root_rank)]
    for rank, theirs in zip(ranks, everybody, strict=True):
        pairs = [(a, b) for a, b in zip(theirs, root, strict=False) if a[1:] != b[1:]]
        if pairs or len(theirs) != len(root):
            what = f"{len(theirs)} there, {len(root)} on rank {root_rank}"
            if pairs:
                (name, dtype, shape), (other, kind, size) = pairs[0]
                what = f"{name!r} is {dtype}{list(shape)} there, {other!r} {kind}{list(size)} on rank {root_rank}"
            raise ValueError(
                f"the variables of rank {rank} differ from those of rank {root_rank}: {what}. "
                "Build the same model and the same optimizer on every rank."
            )
