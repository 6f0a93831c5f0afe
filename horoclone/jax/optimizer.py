"""DistributedOptimizer: an Optax gradient transformation that reduces the gradients over the ranks first.

Everything before the reduction (clipping to a rank's own norm, say) belongs in front of it and everything after it into
the wrapped transformation. Thread: whichever traces or calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from horoclone.errors import Unsupported
from horoclone.jax.compression import Compression, Compressor
from horoclone.jax.operations import allreduce
from horoclone.ops import Average, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set


class DistributedState(NamedTuple):
    """The wrapped transformation's state, and what was gathered since the last reduction."""

    inner: Any
    gathered: Any  # like the gradients; None when every pass reduces
    passes: Any  # int32: how many passes are in `gathered`


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = True,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optax.GradientTransformation: `update` reduces the whole pytree of gradients in one call, then updates.

    With backward_passes_per_step = k gradients are gathered locally (averaged, or summed with
    average_aggregated_gradients=False) and every k-th update reduces and applies them; the others return zeros.
    gradient_predivide_factor f (Average only) divides by f before the sum over the ranks and by size / f after it.
    `params` and further arguments of update() go to the wrapped transformation. Raises ValueError for wrong arguments.
    """
    import optax

    passes = int(backward_passes_per_step)
    if passes < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    reduce = resolve_reduce(None, op)
    if gradient_predivide_factor != 1.0 and reduce != Average:
        raise ValueError("gradient_predivide_factor is for op=Average only")
    wrapped = optax.with_extra_args_support(optimizer)

    def reduced(gradients: Any) -> Any:
        how: dict[str, Any] = {"op": reduce}
        if gradient_predivide_factor != 1.0:
            how = _predivided(gradient_predivide_factor, process_set)
        return allreduce(gradients, name=name, compression=compression, process_set=process_set, **how)

    def init(params: Any) -> DistributedState:
        gathered = None if passes == 1 else jax.tree_util.tree_map(jnp.zeros_like, params)
        return DistributedState(wrapped.init(params), gathered, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: DistributedState, params: Any = None, **more: Any) -> Any:
        _require_arrays(updates)
        if passes == 1:
            changes, inner = wrapped.update(reduced(updates), state.inner, params, **more)
            return changes, DistributedState(inner, None, state.passes)
        gathered = jax.tree_util.tree_map(jnp.add, state.gathered, updates)

        def finish(gathered: Any) -> Any:
            if average_aggregated_gradients:
                gathered = jax.tree_util.tree_map(lambda g: g / passes, gathered)
            changes, inner = wrapped.update(reduced(gathered), state.inner, params, **more)
            empty = jax.tree_util.tree_map(jnp.zeros_like, state.gathered)
            return _like(changes, updates), DistributedState(inner, empty, jnp.zeros((), jnp.int32))

        def go_on(gathered: Any) -> Any:
            nothing = jax.tree_util.tree_map(jnp.zeros_like, updates)
            return nothing, DistributedState(state.inner, gathered, state.passes + 1)

        # Every rank counts alike, so every rank takes the same branch.
        return jax.lax.cond(state.passes + 1 >= passes, finish, go_on, gathered)

    return optax.GradientTransformationExtraArgs(init, update)


def _predivided(factor: float, process_set: ProcessSet) -> dict[str, Any]:
    """An average as division by `factor`, sum, and the rest of the division: keeps 16-bit sums in range."""
    size = process_set.size() or 1
    return {"op": Sum, "prescale_factor": 1.0 / factor, "postscale_factor": factor / size}


def _like(changes: Any, updates: Any) -> Any:
    """Both branches of a program give the same dtypes."""
    return jax.tree_util.tree_map(lambda c, u: c.astype(u.dtype), changes, updates)


def _require_arrays(updates: Any) -> None:
    for leaf in jax.tree_util.tree_leaves(updates):
        if not hasattr(leaf, "dtype"):
            raise Unsupported(f"DistributedOptimizer: a gradient is a {type(leaf).__name__}, not an array")
