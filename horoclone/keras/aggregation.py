"""backward_passes_per_step: gradients are added up on this rank for several batches, then reduced and applied once.

The sums are variables of the optimizer, because on JAX an optimizer's state is its variables, but they are not part of
the saved model: optimizer.py leaves them out. The optimizer's `iterations` counts updates, not batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horoclone.keras.flavor import backend, keras

Update = Callable[[list[Any]], None]


class Aggregation:
    """The sums of one Keras 3 optimizer and the count of batches in them."""

    def __init__(self, passes: int, average: bool, variables: Sequence[Any], name: str) -> None:
        self._passes = passes
        self._scale = 1.0 / passes if average else 1.0
        self._count = self._make((), "int32", f"{name}_aggregated_batches")
        self._sums = [self._make(v.shape, v.dtype, f"{_flat_name(v)}_aggregated_gradient") for v in variables]
        self.variables = [self._count, *self._sums]
        self._present = [False] * len(
            self._sums
        )  # torch only: elsewhere a missing gradient is always missing

    @staticmethod
    def _make(shape: Any, dtype: str, name: str) -> Any:
        return keras.Variable("zeros", shape=shape, dtype=dtype, trainable=False, name=name)

    def apply(
        self, grads: Sequence[Any], places: Sequence[int], update: Update, state: Sequence[Any]
    ) -> None:
        """Adds the gradients; with every last batch of a step calls `update` with the sums and starts again.

        places: the sums' places, one for each gradient. state: all variables that `update` changes, for JAX.
        """
        if backend() == "torch":
            self._eagerly(grads, places, update)
            return
        ops = keras.ops
        totals = [
            None if g is None else ops.add(self._sums[p], _dense(g))
            for g, p in zip(grads, places, strict=True)
        ]
        last = ops.equal(self._count, self._passes - 1)

        def finish() -> None:
            update([None if total is None else total * self._factor(total) for total in totals])
            for place, total in zip(places, totals, strict=True):
                if total is not None:
                    self._sums[place].assign(ops.zeros_like(total))
            self._count.assign(0)

        def go_on() -> None:
            for place, total in zip(places, totals, strict=True):
                if total is not None:
                    self._sums[place].assign(total)
            self._count.assign_add(1)

        if backend() == "tensorflow":
            ops.cond(last, finish, go_on)
        else:
            _jax_cond(last, finish, go_on, [*self.variables, *state])

    def _factor(self, total: Any) -> Any:
        return keras.ops.cast(self._scale, total.dtype)

    def _eagerly(self, grads: Sequence[Any], places: Sequence[int], update: Update) -> None:
        from horoclone.keras import on_torch

        for gradient, place in zip(grads, places, strict=True):
            if gradient is not None:
                on_torch.add_in_place(self._sums[place], gradient)
                self._present[place] = True
        if int(self._count.value) < self._passes - 1:
            self._count.assign_add(1)
            return
        update(
            [on_torch.scaled(self._sums[p].value, self._scale) if self._present[p] else None for p in places]
        )
        for total in self._sums:
            on_torch.clear(total)
        self._present = [False] * len(self._sums)
        self._count.assign(0)


def _flat_name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")


def _dense(gradient: Any) -> Any:
    return keras.ops.convert_to_tensor(gradient)


def _jax_cond(
    condition: Any, true: Callable[[], None], false: Callable[[], None], state: Sequence[Any]
) -> None:
    """A condition whose branches assign to `state`: under jit each branch hands out what it assigned."""
    from horoclone.keras.on_jax import traced

    if not traced(condition):
        true() if condition else false()
        return

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
