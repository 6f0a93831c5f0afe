"""Batch normalisation with mean and variance of all ranks' batches. For Keras 3 and tf_keras, whichever tf.keras is.

The mean is summed first and the squared deviations from it afterwards, so nothing cancels; both sums are
differentiable, and ranks with more rows weigh more.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horoclone.ops import Sum
from horoclone.tensorflow import mpi_ops


def _global_moments(inputs: Any, axes: Any, keep_dims: bool) -> tuple[Any, Any]:
    """Mean and variance over `axes` and over all ranks, in inputs' dtype; computed in at least float32."""
    wide = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else inputs
    total = tf.reduce_sum(wide, axes, keepdims=True)
    count = tf.cast(tf.size(wide) / tf.maximum(tf.size(total), 1), wide.dtype)
    sums = mpi_ops._allreduce(tf.concat([tf.reshape(total, [-1]), tf.reshape(count, [1])], 0), op=Sum)
    count = tf.maximum(sums[-1], 1)
    mean = tf.reshape(sums[:-1], tf.shape(total)) / count
    squares = tf.reduce_sum(tf.math.squared_difference(wide, mean), axes, keepdims=True)
    variance = mpi_ops._allreduce(squares, op=Sum) / count
    results = [tf.cast(tf.ensure_shape(r, total.shape), inputs.dtype) for r in (mean, variance)]
    mean, variance = results if keep_dims else [tf.squeeze(r, axes) for r in results]
    return mean, variance


@tf.keras.utils.register_keras_serializable("horoclone")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc, name-defined]
    """Normalises as tf.keras.layers.BatchNormalization does, over the batches of all ranks. In training every rank
    calls it equally often.

    renorm corrects with the moments of all ranks. ValueError for fused=True, NotImplementedError for a mask or, in
    tf_keras, virtual_batch_size.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused or fused is None:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if kwargs.get("virtual_batch_size"):
            raise NotImplementedError("SyncBatchNormalization does not support virtual_batch_size.")
        if not hasattr(tf.keras.layers.BatchNormalization, "_calculate_mean_and_var"):  # Keras 3
            super().__init__(**kwargs)
        else:
            super().__init__(fused=False, **kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Keras 3: (inputs, mask). tf_keras: (inputs, axes, keep_dims, mask)."""
        mask = kwargs.get("mask", args[-1] if args else None)
        if mask is not None and not isinstance(mask, bool):
            raise NotImplementedError("SyncBatchNormalization does not support masks.")
        if len(args) + len(kwargs) > 1:  # tf_keras
            axes = args[0] if args else kwargs["reduction_axes"]
            keep = args[1] if len(args) > 1 else kwargs["keep_dims"]
            return _global_moments(inputs, axes, keep)
        return _global_moments(tf.convert_to_tensor(inputs), self._reduction_axes, False)
