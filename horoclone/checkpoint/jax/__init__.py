"""Checkpoints with JAX's arrays in them: `hvd.checkpoint`. See docs/checkpoints.md."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horoclone.checkpoint.failures import CheckpointError
from horoclone.checkpoint.leaves import NUMPY, Bytes, Form, format_name, register


class _Arrays:
    name = "jax"

    def owns(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def form(self, value: jax.Array) -> Form:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise TypeError("random keys cannot be saved; pass jax.random.key_data(key)")
        if not value.is_fully_addressable:
            raise TypeError(
                "arrays that lie partly in other processes cannot be saved; wrap this process's shards in Owned"
            )
        return Form(format_name(value.dtype.name), tuple(value.shape))

    def copy(self, value: jax.Array, into: Bytes) -> None:
        # The view of an array on a CPU would lose its memory where the array is donated.
        NUMPY.copy(np.asarray(value), into)

    def made(self, form: Form, data: Bytes, like: Any | None) -> jax.Array:
        values = NUMPY.made(form, data, None)
        array = jnp.asarray(values) if like is None else jax.device_put(values, like.sharding)
        if array.dtype != values.dtype:
            raise CheckpointError(
                f"the save has arrays of {values.dtype}, which this JAX makes {array.dtype}: set jax_enable_x64 as it "
                "was when they were saved."
            )
        return array


register(_Arrays())
