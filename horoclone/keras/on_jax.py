"""Gradients of Keras on JAX, under jit and outside: one call for all of them.

Groups are not kept apart here: XLA runs independent calls in an order of its own, and may delay one until another is
done, so ranks could wait for each other. A second call, where it is needed, is made to depend on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

import horoclone.jax as hvd
from horoclone.jax.call import is_tracing
from horoclone.jax.compared import Values, Watch, takes_tail
from horoclone.jax.operations import reduce_gradients
from horoclone.keras.compared import names_of

if TYPE_CHECKING:
    from horoclone.keras.compared import Watched
    from horoclone.keras.reduction import Part, Reduction
    from horoclone.process_sets import ProcessSet


def traced(value: Any) -> bool:
    """Whether the value is known only when the program runs."""
    return isinstance(value, jax.core.Tracer)


def divided(gradient: Any, process_set: ProcessSet) -> Any:
    """The gradient divided by the size."""
    return gradient / (process_set.size() or 1)


def reduce(
    parts: Sequence[Part],
    grads: Sequence[Any],
    variables: Sequence[Any],
    settings: Reduction,
    watched: Watched | None,
) -> dict[int, Any]:
    """Place in the list -> reduced gradient; a gradient that is None stays so (it is so on every rank)."""
    alike: dict[tuple[int, float, float], list[Part]] = {}
    for part in parts:
        alike.setdefault((part.op, part.prescale, part.postscale), []).append(part)
    result: dict[int, Any] = {}
    looks = []  # at what was compared, when all is under way: it may raise
    for (op, prescale, postscale), members in alike.items():
        places = [place for part in members for place in part.places if grads[place] is not None]
        if not places:
            continue
        wires = [grads[place] for place in places]
        if result:
            wires, _ = jax.lax.optimization_barrier((wires, list(result.values())))
        # In a program two optimizers may be at it at once: there the names that the binding makes are told apart.
        # They are made of the tree, in which the part's name says whose gradients these are.
        key = members[0].name
        name = key if settings.named or not is_tracing() else None
        compression = members[0].compression or hvd.Compression.none
        watch, values, dtype = None, None, takes_tail(wires)
        if watched is not None and not result and dtype is not None:
            pairs = [(label, variable.value) for label, variable in watched.values()]
            values = Values.of(watched.number(), pairs)
            watch = watched.kept.get(watched.name)
            if watch is None:
                watch = watched.kept[watched.name] = Watch(watched.own, watched.name, settings.process_set)
            wires = [*wires, watch.tail(values, dtype)]
        tree = {key: wires}
        reduced = reduce_gradients(
            tree, name, compression, op, settings.process_set, prescale, postscale, members[0].weight,
            partial(names_of, variables, places),
        )  # fmt: skip
        gradients = list(reduced[key])
        if watch is not None:
            looks.append((watch, gradients.pop(), values, places))
        result.update(zip(places, gradients, strict=True))
    for watch, received, values, places in looks:
        gradients = watch.look(received, values, [result[place] for place in places])
        result.update(zip(places, gradients, strict=True))
    return result
