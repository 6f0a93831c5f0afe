"""JAX's typed random keys, which are no numbers, as what they are made of, and back."""

from __future__ import annotations

from typing import Any

import jax


def is_key(leaf: Any) -> bool:
    """Whether it is one, or an array of them."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def without_keys(tree: Any) -> Any:
    """The tree with the integers of each key in its place."""
    return jax.tree_util.tree_map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def with_keys(form: Any, tree: Any) -> Any:
    """The tree with keys where `form` has them."""
    return jax.tree_util.tree_map(
        lambda leaf, value: (
            jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if is_key(leaf) else value
        ),
        form,
        tree,
    )
