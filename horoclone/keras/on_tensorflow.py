"""Gradients of Keras on TensorFlow: one grouped operation per group; inside functions several of about 8 MiB each.

Sparse gradients (tf.IndexedSlices) are gathered; a row that two ranks touched is then in the result twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horoclone.keras.compared import names_of
from horoclone.process_sets import ProcessSet, id_of
from horoclone.tensorflow import reduced_gradients
from horoclone.tensorflow.compared import Watch, takes_tail
from horoclone.tensorflow.gradient_reduction import cut_by_bytes
from horoclone.tensorflow.mpi_ops import naming, size_op
from horoclone.tensorflow.reductions import allreduce, grouped_allreduce

if TYPE_CHECKING:
    from horoclone.keras.compared import Watched
    from horoclone.keras.reduction import Part, Reduction


def divided(gradient: Any, process_set: ProcessSet) -> Any:
    """The gradient divided by the size, which a function reads each time it runs."""
    size = tf.cast(size_op(id_of(process_set)), gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
    return gradient / size


def reduced_before(grads: Sequence[Any], variables: Sequence[Any], by_variable: bool) -> list[bool]:
    """For each gradient whether a DistributedGradientTape, or the optimizer itself, has reduced it already."""
    return reduced_gradients.are_reduced(grads, variables, by_variable)


def reduce(
    parts: Sequence[Part],
    grads: Sequence[Any],
    variables: Sequence[Any],
    settings: Reduction,
    watched: Watched | None,
) -> dict[int, Any]:
    """Place in the list -> reduced gradient; a gradient that is None stays so (it is so on every rank)."""
    result: dict[int, Any] = {}
    watch: Any = None
    values: Any = None
    if watched is not None:
        if watched.name not in watched.kept:
            watched.kept[watched.name] = Watch(watched.own, watched.name, settings.process_set)
        watch, values = watched.kept[watched.name], watched.values
    looks: list[Any] = []  # at what was compared, when all is under way: it may raise
    for part in parts:
        places = [place for place in part.places if grads[place] is not None]
        sparse = [place for place in places if isinstance(grads[place], tf.IndexedSlices)]
        if settings.sparse_as_dense:
            sparse = []
        dense = [place for place in places if place not in sparse]
        options: dict[str, Any] = {"op": part.op, "process_set": settings.process_set}
        if part.weight is not None:
            options["weight"] = part.weight
        if part.compression is not None:
            options["compression"] = part.compression
        for place in sparse:
            result[place] = allreduce(grads[place], name=f"{part.name}.{place}", **options)
        cut = part.divisible and not tf.executing_eagerly()
        for number, group in enumerate(cut_by_bytes(dense, grads) if cut else [dense]):
            if not group:
                continue
            wires = [tf.convert_to_tensor(grads[place]) for place in group]
            takes = watch is not None and not looks and takes_tail(wires, part.op)
            if takes:
                wires.append(watch.tail(values, wires[0].dtype))
            name = part.name if number == 0 else f"{part.name}.{number}"
            with naming(name, partial(names_of, variables, group)):
                reduced = grouped_allreduce(
                    wires,
                    name=name,
                    prescale_factor=part.prescale,
                    postscale_factor=part.postscale,
                    **options,
                )
            if takes:
                *reduced, received = reduced
                looks.append((group, received))
            result.update(zip(group, reduced, strict=True))
    for group, received in looks:
        reduced = watch.look(received, values, [result[place] for place in group])
        result.update(zip(group, reduced, strict=True))
    return result
