"""DistributedOptimizer: an Optax gradient transformation that reduces the gradients over the ranks first.

Everything before the reduction (clipping to a rank's own norm, say) belongs in front of it and everything after it into
the wrapped transformation. Thread: whichever traces or calls.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from horoclone.comparison import policy
from horoclone.errors import Unsupported
from horoclone.gradient_names import Turn
from horoclone.jax.call import paths_and_leaves
from horoclone.jax.compared import Values, Watch, takes_tail
from horoclone.jax.compression import Compression, Compressor
from horoclone.jax.operations import reduce_gradients
from horoclone.ops import Average, ReduceOp, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set

FORGOTTEN = (
    " Give all ranks the same, before the first step or after it: params, state = hvd.broadcast((params, state), "
    "root_rank=0)."
)


class DistributedState(NamedTuple):
    """The wrapped transformation's state, and what was gathered since the last reduction."""

    inner: Any
    gathered: Any  # like the gradients; None when every pass reduces
    passes: Any  # int32: how many there have been; the rest of their division by k is in `gathered`


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = True,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optax.GradientTransformation: `update` reduces the whole pytree of gradients in one call, then updates.

    With backward_passes_per_step = k gradients are gathered locally (averaged, or summed with
    average_aggregated_gradients=False) and every k-th update reduces and applies them; the others return zeros.
    gradient_predivide_factor f (Average only) divides by f before the sum over the ranks and by size / f after it: that
    keeps 16-bit sums in range.
    `params` and further arguments of update() go to the wrapped transformation, but for weight: how much this rank
    counts in the mean of the gradients (see allreduce), given in every update on every rank. Raises ValueError for
    wrong arguments.
    """
    import optax

    passes = int(backward_passes_per_step)
    if passes < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    reduce = resolve_reduce(None, op)
    if gradient_predivide_factor != 1.0 and reduce != Average:
        raise ValueError("gradient_predivide_factor is for op=Average only")
    wrapped = optax.with_extra_args_support(optimizer)
    turn = Turn((name, None if process_set is global_process_set else tuple(process_set.ranks or ())))
    turn.announce()

    own_policy, watches = policy(), dict[Any, Watch]()

    def reduced(gradients: Any, weight: Any, params: Any, inner: Any, number: Any) -> Any:
        def labels() -> list[str]:
            return paths_and_leaves(gradients)[0]

        how: dict[str, Any] = {"op": reduce, "weight": weight, "labels": labels}
        if weight is not None and (passes > 1 or gradient_predivide_factor != 1.0):
            raise ValueError(
                "update(weight=...) does not work with backward_passes_per_step and gradient_predivide_factor"
            )
        if gradient_predivide_factor != 1.0:
            # Not divided by the size here: a program may run in another world than that in which it was traced.
            how |= {
                "prescale_factor": 1.0 / gradient_predivide_factor,
                "postscale_factor": gradient_predivide_factor,
            }
        own = turn.name()
        called = None if name is None else f"{name}{own}"  # by the paths in the tree, where it has no name
        leaves, form = jax.tree_util.tree_flatten(gradients)
        dtype, values = takes_tail(leaves), _values(gradients, params, inner, number)
        sent = {own: gradients} if own else gradients
        if dtype is None:
            received = reduce_gradients(sent, called, compression, process_set=process_set, **how)
            return received[own] if own else received
        tree = own, form, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        watch = watches.get(tree)
        if watch is None:
            # A program may compare two trees at the same time.
            forms = zlib.crc32(repr((labels(), tree[2])).encode())
            exchange = f"{name or 'jax.gradients'}{own}.{forms:08x}"
            watch = watches[tree] = Watch(own_policy, exchange, process_set, FORGOTTEN)
        sent = (sent, watch.tail(values, dtype))
        received, tail = reduce_gradients(sent, called, compression, process_set=process_set, **how)
        found = jax.tree_util.tree_leaves(received[own] if own else received)
        return form.unflatten(watch.look(tail, values, found))

    def init(params: Any) -> DistributedState:
        gathered = None if passes == 1 else jax.tree_util.tree_map(_wide_zeros, params)
        return DistributedState(wrapped.init(params), gathered, jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: DistributedState, params: Any = None, *, weight: Any = None, **more: Any
    ) -> Any:
        _require_arrays(updates)
        if passes == 1:
            gradients = reduced(updates, weight, params, state.inner, state.passes)
            changes, inner = wrapped.update(gradients, state.inner, params, **more)
            return changes, DistributedState(inner, None, state.passes + 1)
        gathered = _added(state.gathered, updates)

        def finish(gathered: Any) -> Any:
            whole = _like(gathered, updates, passes if average_aggregated_gradients else 1)
            gradients = reduced(whole, weight, params, state.inner, state.passes // passes)
            changes, inner = wrapped.update(gradients, state.inner, params, **more)
            empty = jax.tree_util.tree_map(jnp.zeros_like, gathered)
            return changes, DistributedState(inner, empty, state.passes + 1)

        changes, after = jax.eval_shape(finish, gathered)

        def go_on(gathered: Any) -> Any:
            nothing = jax.tree_util.tree_map(lambda c: jnp.zeros(c.shape, c.dtype), changes)
            return nothing, DistributedState(_formed(state.inner, after.inner), gathered, state.passes + 1)

        # Every rank counts alike, so every rank takes the same branch.
        return jax.lax.cond((state.passes + 1) % passes == 0, finish, go_on, gathered)

    return optax.GradientTransformationExtraArgs(init, update)


def _values(gradients: Any, params: Any, inner: Any, number: Any) -> Values:
    """What ranks have alike before a step: parameters, where they are given, and the wrapped transformation's state.
    Nothing where some parameter has no gradient, as one that is a rank's own has none."""
    found: list[tuple[str, Any]] = []
    given = jax.tree_util.tree_leaves(gradients, is_leaf=lambda leaf: leaf is None)
    if all(leaf is not None for leaf in given):
        for what, tree in ("parameter", params), ("optimizer's state", inner):
            paths, leaves, _ = paths_and_leaves(tree)
            found += [(f"the {what} {path}", leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return Values.of(number, found)


def _wide_zeros(parameter: Any) -> Any:
    """Where gradients are gathered: 16-bit floats in 32 bits, as a sum of several passes needs."""
    dtype = jnp.asarray(parameter).dtype
    return jnp.zeros(
        jnp.shape(parameter), jnp.promote_types(dtype, jnp.float32) if _is_short(dtype) else dtype
    )


def _is_short(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def _formed(state: Any, after: Any) -> Any:
    """A state in the form of that after a step: a first step may widen it (float32 gradients of bfloat16 parameters),
    or drop what it has for a parameter without a gradient."""
    return jax.tree_util.tree_map(
        lambda a, s: None if a is None else jnp.asarray(s, a.dtype), after, state, is_leaf=lambda a: a is None
    )


def _added(gathered: Any, updates: Any) -> Any:
    """What was gathered with `updates`, which may have no gradient (None, or optax's MaskedNode) of a parameter."""
    leaves, form = jax.tree_util.tree_flatten(gathered)
    pairs = zip(leaves, form.flatten_up_to(updates), strict=True)
    return form.unflatten([jnp.add(g, u) if hasattr(u, "dtype") else g for g, u in pairs])


def _like(gathered: Any, updates: Any, divisor: int) -> Any:
    """What was gathered, divided, in the tree and the dtypes that the gradients of this pass have."""
    leaves, form = jax.tree_util.tree_flatten(gathered)
    pairs = zip(leaves, form.flatten_up_to(updates), strict=True)
    return form.unflatten([(g / divisor).astype(u.dtype) if hasattr(u, "dtype") else u for g, u in pairs])


def _require_arrays(updates: Any) -> None:
    for leaf in jax.tree_util.tree_leaves(updates):
        if not hasattr(leaf, "dtype"):
            raise Unsupported(f"DistributedOptimizer: a gradient is a {type(leaf).__name__}, not an array")
