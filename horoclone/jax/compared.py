"""Compares parameters and the optimizer's state of the ranks in the call that reduces the gradients, inside and outside
of programs (horoclone/comparison.py).

An optimizer of JAX is a function: what is compared and the number of the step are its arguments. A program hashes
memory by a call of the library, in the steps that compare something; where ranks differ it calls the host back, which
tells. A function cannot repair its arguments: repair is an error here. On GPUs nothing is compared: such a rank, as one
that was told not to look, says so in one place more, and nobody calls back. Thread: whichever traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from horoclone.arrays.compared import FORGOTTEN, ArrayComparison
from horoclone.comparison import ERROR, FIRST, OFF, PLACES, REPAIR, Policy
from horoclone.jax import native
from horoclone.jax.operations import MOVABLE
from horoclone.process_sets import ProcessSet

_HALF = PLACES // 2


class Values(NamedTuple):
    """What one step compares. number: of the step, from 0; an array, or a number."""

    number: Any
    labels: list[str]
    arrays: list[Any]

    @classmethod
    def of(cls, number: Any, found: Sequence[tuple[str, Any]]) -> Values:
        """Of arrays, with what they are called; random keys are no numbers, and are left out."""
        plain = [
            (label, one) for label, one in found if isinstance(one, jax.Array) and str(one.dtype) in MOVABLE
        ]
        return cls(number, [label for label, _ in plain], [one for _, one in plain])


def takes_tail(leaves: Sequence[Any]) -> Any:
    """The dtype of the places behind these gradients; None where they do not travel: one array alone is sent without a
    copy, which it should not have to take."""
    floating = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return floating[0] if len(leaves) > 1 and floating else None


class _Unrepairable(ArrayComparison):
    _choice = (
        "HOROCLONE_COMPARE=error makes this an error, off ends the comparison; what a program was given cannot be "
        "repaired."
    )


class Watch:
    """Of one reduction. name: alike on all ranks."""

    def __init__(self, own: Policy, name: str, process_set: ProcessSet, forgotten: str = FORGOTTEN) -> None:
        self._looks = own.action != OFF and jax.default_backend() == "cpu"
        own = own._replace(action=ERROR) if own.action == REPAIR else own
        self._comparison = _Unrepairable(own, name, process_set, forgotten)
        if self._looks:
            native.register_hash()

    def tail(self, values: Values, dtype: Any) -> Any:
        """What travels behind the gradients."""
        nothing = jnp.zeros((PLACES + 1,), dtype)
        if not self._looks:
            return nothing.at[PLACES].set(1)
        arrays = [jax.lax.stop_gradient(array) for array in values.arrays]
        self._comparison.lay_out([array.nbytes for array in arrays])
        if not arrays:
            return nothing

        def places(share: Sequence[int]) -> Any:
            words = _hashes([arrays[i] for i in share]).reshape(-1)
            about = [self._comparison.own.steps, values.number, len(arrays)]
            words = jnp.concatenate([jnp.stack([jnp.asarray(one, jnp.uint32) for one in about]), words])
            bits = _joined(words) >> jnp.arange(_HALF, dtype=jnp.uint32) & 1
            return jnp.concatenate([bits, 1 - bits, jnp.zeros((1,), bits.dtype)]).astype(dtype)

        if not isinstance(values.number, jax.core.Tracer):
            share = self._comparison.share(int(values.number))
            return places(share) if share else nothing
        number, every = values.number, self._comparison.every
        shares = self._comparison.shares
        which = jnp.int32(0)
        if every:
            is_due = (number > 1) & (number % every == 0)
            which = jnp.where(is_due, 2 + number // every % len(shares), which)
        which = jnp.where(number == FIRST, 1, which)
        arms: list[Callable[[], Any]] = [lambda: nothing, lambda: places(range(len(arrays)))]
        arms += [partial(places, share) for share in shares] if every else []
        return jax.lax.switch(which, arms)

    def look(self, received: Any, values: Values, reduced: list[Any]) -> list[Any]:
        """The reduced gradients, which wait for what is to be said. received: what has become of the tail."""
        if not self._looks:
            return reduced
        # Of this trace: the same optimizer may see another tree next.
        settle = partial(self._settle, values.labels)
        ones, zeros, looks_not = jnp.split(jax.lax.stop_gradient(received), (_HALF, PLACES))
        differs = jnp.any((ones != 0) & (zeros != 0)) & (looks_not[0] == 0)
        arrays = [jax.lax.stop_gradient(array) for array in values.arrays]
        if not isinstance(differs, jax.core.Tracer):
            if differs:
                settle(differs, values.number, _hashes(arrays))
            return reduced

        def said() -> Any:
            found = jax.ShapeDtypeStruct((), np.bool_)
            number = jnp.asarray(values.number, jnp.int32)
            return jax.pure_callback(
                settle, found, differs, number, _hashes(arrays), vmap_method="sequential"
            )

        is_fine = jax.lax.cond(differs, said, lambda: jnp.asarray(True))
        # A selection, or XLA would leave out a call whose result nobody needs. All of them: what is hashed is copied
        # where its update does not wait, as a donated buffer is overwritten.
        return [jnp.where(is_fine, one, jnp.zeros_like(one)) for one in reduced]

    def _settle(self, labels: Sequence[str], differs: Any, number: Any, words: Any) -> Any:
        """differs: under vmap a branch that is not taken runs as well. After a warning the program goes on to look."""
        if differs and self._comparison.agreed.action != OFF:
            hashes = np.ascontiguousarray(words).view(np.uint64).reshape(-1).tolist()
            self._comparison.settle(int(number), labels, hashes)
        return np.bool_(True)


def _hashes(arrays: Sequence[Any]) -> Any:
    """64 bits of each, as two words of 32."""
    result = jax.ShapeDtypeStruct((len(arrays), 2), np.uint32)
    return jax.ffi.ffi_call(native.HASH_TARGET, result, vmap_method="sequential")(*arrays)


def _joined(words: Any) -> Any:
    """One word of several: each is mixed with its place before they are added up."""
    places = jnp.arange(1, words.shape[0] + 1, dtype=jnp.uint32)
    mixed = words * jnp.uint32(0x85EBCA6B) ^ places * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0x27D4EB2F)):
        mixed = (mixed ^ mixed >> shift) * jnp.uint32(factor)
    return jnp.sum(mixed, dtype=jnp.uint32)
