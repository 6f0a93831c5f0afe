"""backward_passes_per_step: gradients are added up on this rank for several batches, then reduced and applied once.

The sums are variables of the optimizer, because on JAX an optimizer's state is its variables, but they are not part of
the saved model: optimizer.py leaves them out. The optimizer's `iterations` counts updates, not batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horoclone.keras.flavor import backend, keras, to_numpy

Update = Callable[[list[Any]], None]


class Aggregation:
    """The sums of one Keras 3 optimizer, and for each variable how many batches are in its sum: apply() may be called
    for some of the variables (a GAN's two halves), and each half has its batches."""

    def __init__(self, passes: int, average: bool, variables: Sequence[Any], name: str) -> None:
        self._passes = passes
        self._scale = 1.0 / passes if average else 1.0
        self._counts = self._make((len(variables),), "int32", f"{name}_aggregated_batches")
        self._sums = [self._make(v.shape, v.dtype, f"{_flat_name(v)}_aggregated_gradient") for v in variables]
        self.variables = [self._counts, *self._sums]
        self._present = [False] * len(self._sums)  # outside of programs: there was a gradient in some pass
        # Their gradients are what they become (scales of float8): of the passes, as of the ranks, the largest counts.
        self._are_set = [bool(getattr(v, "overwrite_with_gradient", False)) for v in variables]

    @staticmethod
    def _make(shape: Any, dtype: str, name: str) -> Any:
        return keras.Variable("zeros", shape=shape, dtype=dtype, trainable=False, name=name)

    def apply(
        self, grads: Sequence[Any], places: Sequence[int], update: Update, state: Sequence[Any]
    ) -> None:
        """Adds the gradients; with every last batch of a step calls `update` with the sums and starts again.

        places: the sums' places, one for each gradient. state: all variables that `update` changes, for JAX.
        """
        if not _in_a_program(self._counts):
            self._at_once(grads, places, update)
            return
        ops = keras.ops
        totals = [None if g is None else self._with(p, g) for g, p in zip(grads, places, strict=True)]
        mine = np.isin(np.arange(len(self._sums)), places).astype(np.int32)
        counts = ops.add(self._counts, mine)
        last = ops.max(ops.multiply(counts, mine)) >= self._passes

        def finish() -> None:
            update(self._scaled(totals, places))
            for place, total in zip(places, totals, strict=True):
                if total is not None:
                    self._sums[place].assign(ops.zeros_like(total))
            self._counts.assign(ops.multiply(counts, 1 - mine))

        def go_on() -> None:
            for place, total in zip(places, totals, strict=True):
                if total is not None:
                    self._sums[place].assign(total)
            self._counts.assign(counts)

        if backend() == "tensorflow":
            ops.cond(last, finish, go_on)
        else:
            _jax_cond(last, finish, go_on, [*self.variables, *state])

    def _with(self, place: int, gradient: Any) -> Any:
        join = keras.ops.maximum if self._are_set[place] else keras.ops.add
        return join(self._sums[place], _dense(gradient))

    def _scaled(self, totals: Sequence[Any], places: Sequence[int]) -> list[Any]:
        return [
            total if total is None or self._are_set[p] else total * self._scale
            for total, p in zip(totals, places, strict=True)
        ]

    def _at_once(self, grads: Sequence[Any], places: Sequence[int], update: Update) -> None:
        for gradient, place in zip(grads, places, strict=True):
            if gradient is not None:
                if self._are_set[place]:
                    self._sums[place].assign(self._with(place, gradient))
                else:
                    _add(self._sums[place], gradient)
                self._present[place] = True
        mine, counts = list(places), np.array(to_numpy(self._counts))
        counts[mine] += 1
        if counts[mine].max() >= self._passes:
            sums = [self._sums[p].value if self._present[p] else None for p in mine]
            update(self._scaled(sums, mine))
            for place in mine:
                _clear(self._sums[place])
                self._present[place] = False
            counts[mine] = 0
        self._counts.assign(counts)


def _in_a_program(counts: Any) -> bool:
    if backend() == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    if backend() == "jax":
        from horoclone.keras.on_jax import traced

        return traced(counts.value)
    return False


def _add(total: Any, gradient: Any) -> None:
    if backend() == "torch":
        from horoclone.keras import on_torch

        on_torch.add_in_place(total, gradient)
    else:
        total.assign_add(_dense(gradient))


def _clear(total: Any) -> None:
    if backend() == "torch":
        from horoclone.keras import on_torch

        on_torch.clear(total)
    else:
        total.assign(keras.ops.zeros_like(total.value))


def _flat_name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")


def _dense(gradient: Any) -> Any:
    return keras.ops.convert_to_tensor(gradient)


def _jax_cond(
    condition: Any, true: Callable[[], None], false: Callable[[], None], state: Sequence[Any]
) -> None:
    """A condition whose branches assign to `state`: each branch hands out what it assigned."""

    def values_after(branch: Callable[[], None]) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            before = [(v, v.value) for v in state]
            with keras.StatelessScope(state_mapping=before) as scope:
                branch()
            return [scope.get_current_value(v) for v in state]

        return run

    for variable, value in zip(
        state, keras.ops.cond(condition, values_after(true), values_after(false)), strict=True
    ):
        variable.assign(value)
