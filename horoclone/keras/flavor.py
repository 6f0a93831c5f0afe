"""Which Keras this process trains with: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS=1 makes it tf.keras.

It is fixed at import, as in TensorFlow. Everything else in this folder asks here.
"""

from __future__ import annotations

import os
from typing import Any

LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # TensorFlow's own reading of it

keras: Any
if LEGACY:
    try:
        import tf_keras
    except ImportError as error:
        raise ImportError(
            "TF_USE_LEGACY_KERAS=1 asks for tf_keras, which is not installed: pip install tf_keras, or unset it."
        ) from error
    keras = tf_keras
else:
    try:
        import keras as keras_3
    except ImportError as error:
        raise ImportError(
            "horoclone.keras needs Keras 3: pip install keras, and a backend for it."
        ) from error
    if not keras_3.__version__.startswith("3."):
        raise ImportError(
            f"keras {keras_3.__version__} is installed. horoclone.keras is made for Keras 3 (pip install keras>=3), "
            "or for tf_keras with TF_USE_LEGACY_KERAS=1."
        )
    keras = keras_3


def backend() -> str:
    """ "tensorflow", "jax" or "torch"; tf_keras is "tensorflow". Unsupported for the others that Keras knows."""
    name = "tensorflow" if LEGACY else str(keras.backend.backend())
    if name not in ("tensorflow", "jax", "torch"):
        from horoclone.errors import Unsupported

        raise Unsupported(
            f"KERAS_BACKEND={name}: gradients are reduced on the backends tensorflow, jax and torch. Set KERAS_BACKEND "
            "to one of them before Keras is imported."
        )
    return name


def to_numpy(value: Any) -> Any:
    """A tensor, variable or number of any backend as a NumPy array (bfloat16 of torch becomes float32)."""
    if LEGACY:
        return tf_keras.backend.get_value(value) if hasattr(value, "dtype") else value
    return keras.ops.convert_to_numpy(value)


def to_tensor(value: Any) -> Any:
    """An array as a tensor of the backend."""
    if LEGACY:
        import tensorflow as tf

        return tf.convert_to_tensor(value)
    return keras.ops.convert_to_tensor(value)


def assign(variable: Any, value: Any) -> None:
    """Sets a variable of a model or an optimizer, outside of compiled functions."""
    if LEGACY:
        tf_keras.backend.set_value(variable, value)
    else:
        variable.assign(value)
