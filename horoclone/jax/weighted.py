"""Means of arrays in which each rank counts as much as its weight says, inside and outside of programs.

The weights travel behind the arrays, in the same call (horoclone/weights.py). Inside a program a weight is a value that
is known when it runs: what is wrong with it is then said by a callback of the host. Thread: whichever traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horoclone import weights


class Weights:
    """Of one call. weight: this rank's; ranks: how all are called, in the order of their positions."""

    def __init__(self, call: str, weight: Any, ranks: Sequence[int], position: int) -> None:
        self._call, self._ranks, self._position = call, list(ranks), position
        self._weight = weight if isinstance(weight, jax.core.Tracer) else weights.number(call, weight)
        if isinstance(weight, jax.core.Tracer) and (weight.shape or not _is_real(weight.dtype)):
            raise TypeError(
                f"{call}: weight={weight} cannot be used; weight takes a real number without dimensions"
            )
        self._wires: list[str] = []

    def weigh(self, leaves: Sequence[Any]) -> list[Any]:
        """What travels: the arrays times the weight, then the weights for each of their dtypes. ValueError for dtypes
        that have no mean."""
        names = [weights.wire_of(str(leaf.dtype)) for leaf in leaves]
        for leaf, wire in zip(leaves, names, strict=True):
            if wire is None:
                raise ValueError(
                    f"{self._call}: weight= is for floating-point arrays; this one is {leaf.dtype}: convert it"
                )
        self._wires = [wire for wire in names if wire is not None]
        sent = []
        for leaf, wire in zip(leaves, self._wires, strict=True):
            own = self._own(wire)
            product = leaf.astype(own.dtype) * own
            # No samples: also what is not finite is 0. Asked of the product, as XLA would make a constant of one whose
            # weight is known to be 0, and run the call before others.
            product = jnp.where((own != 0) | jnp.isfinite(product), product, 0)
            sent.append(product.astype(wire))
        return sent + [self._tail(wire) for wire in dict.fromkeys(self._wires)]

    def _own(self, wire: str) -> Any:
        wide = "float64" if wire == "float64" else "float32"
        if isinstance(self._weight, float):
            return jnp.asarray(np.asarray(weights.rounded(self._weight, wire), wide))
        given = jax.lax.stop_gradient(self._weight).astype(wide)
        return jnp.maximum(given, jnp.finfo(wide).min)  # minus infinity stands for none

    def _tail(self, wire: str) -> Any:
        own = self._own(wire)
        parts = [own]
        if wire == "bfloat16":  # by bits: XLA may leave out a conversion there and back
            parts, rest = [], own
            for _ in range(weights.places(wire)):
                bits = jax.lax.bitcast_convert_type(rest, jnp.uint32) & jnp.uint32(0xFFFF0000)
                part = jnp.where(jnp.isfinite(rest), jax.lax.bitcast_convert_type(bits, jnp.float32), rest)
                rest = jnp.where(jnp.isfinite(rest), rest - part, 0)
                parts.append(part)
        row = jnp.stack(parts).astype(wire)
        table = jnp.zeros((len(self._ranks), len(parts)), wire)
        return table.at[self._position].set(row).reshape(-1)

    def divide(self, received: Sequence[Any], leaves: Sequence[Any], name: str | None) -> list[Any]:
        """The means, in the dtypes of `leaves`. Outside of programs InvalidArgument where some weight is wrong."""
        label = f"allreduce {name!r}" if name else "unnamed allreduce"
        tails = zip(dict.fromkeys(self._wires), received[len(leaves) :], strict=True)
        wholes = {wire: self._total(tail, wire, label) for wire, tail in tails}
        means = []
        for sums, leaf, wire in zip(received, leaves, self._wires, strict=False):
            whole = wholes[wire]
            means.append((sums.astype(whole.dtype) / whole).astype(leaf.dtype))
        return means

    def _total(self, tail: Any, wire: str, label: str) -> Any:
        wide = np.dtype("float64" if wire == "float64" else "float32")
        ranks = self._ranks

        def total(tail: Any) -> Any:
            return np.asarray(weights.total(tail.astype(np.float64).tolist(), wire, label, ranks), wide)

        if not isinstance(tail, jax.core.Tracer):
            return jnp.asarray(total(np.asarray(tail)))

        # As words, which have 32 bits whatever jax_enable_x64 is in the thread that calls back.
        def total_of_words(words: Any) -> Any:
            return total(np.asarray(words).reshape(-1).view(wide)).reshape(1).view(np.uint32)

        words = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(tail).astype(wide), jnp.uint32)
        wanted = jax.ShapeDtypeStruct((wide.itemsize // 4,), jnp.uint32)
        found = jax.pure_callback(total_of_words, wanted, words)
        return jax.lax.bitcast_convert_type(found if wide.itemsize == 8 else found[0], wide)


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))


def check_wires(call: str, leaves: Sequence[Any], pressed: Sequence[Any]) -> None:
    """ValueError where compression leaves weighted arrays without their range."""
    if any(
        p.dtype != leaf.dtype and p.dtype != jnp.bfloat16 for p, leaf in zip(pressed, leaves, strict=True)
    ):
        raise ValueError(
            f"{call}: weight= works with hvd.Compression.none and hvd.Compression.bf16; weighted sums overflow in "
            "other forms"
        )
