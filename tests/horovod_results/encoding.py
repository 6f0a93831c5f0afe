"""The form in which results are recorded: plain JSON with kinds, dtypes and shapes beside the values.

README.md beside this file describes the form and the inputs that `inputs` makes. Nothing here imports a framework: values are
told by the class they have.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

LONG = 64  # elements; of longer tensors only a digest is recorded


def number(value: Any) -> Any:
    """A JSON number or bool; NaN and infinities as text."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    real = float(value)
    return real if math.isfinite(real) else repr(real)


def elements(array: Any) -> Any:
    """The values in C order, or a digest of a long array."""
    array = np.asarray(array)
    if array.dtype.kind in "SUO":
        return [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
    if array.size > LONG:
        return {"sha256": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}
    return [number(item) for item in array.ravel()]


def classes_of(error: BaseException) -> list[str]:
    """The names of an error's classes, the most special first."""
    return [each.__name__ for each in type(error).__mro__ if each.__name__ not in ("BaseException", "object")]


def encode(value: Any) -> Any:
    """`value`, which a case called its result, as recorded."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin1")}
    for library, of_library in (("torch", _torch_tensor), ("tensorflow", _tensorflow_value)):
        if any(each.__module__.split(".")[0] == library for each in type(value).__mro__):
            encoded = of_library(value)
            if encoded is not None:
                return encoded
    if isinstance(value, np.ndarray):
        return {"np": str(value.dtype), "shape": list(value.shape), "v": elements(value)}
    if isinstance(value, np.generic):
        return {"np": str(value.dtype), "v": number(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: encode(item) for name, item in zip(value._fields, value, strict=True)}
        return {"namedtuple": type(value).__name__, "fields": fields}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {str(name): encode(item) for name, item in value.items()}}
    if isinstance(value, type):
        return {"class": value.__name__}
    return {"object": type(value).__name__}


def _torch_tensor(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    dtype = str(value.dtype).split(".")[1]
    if value.is_sparse:
        whole = value.coalesce()
        return {
            "torch": dtype,
            "shape": list(value.shape),
            "sparse": True,
            "indices": elements(whole.indices().numpy()),
            "values": encode(whole.values()),
        }
    plain = value.detach()
    plain = plain.float() if plain.dtype == torch.bfloat16 else plain
    return {"torch": dtype, "shape": list(value.shape), "v": elements(plain.contiguous().numpy())}


def _tensorflow_value(value: Any) -> Any:
    import tensorflow as tf

    if isinstance(value, tf.IndexedSlices):
        return {
            "IndexedSlices": True,
            "values": encode(value.values),
            "indices": encode(value.indices),
            "dense_shape": encode(value.dense_shape),
        }
    if isinstance(value, tf.Variable):
        return {"variable": encode(value.read_value())}
    if isinstance(value, tf.Tensor):
        plain = tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value
        return {"tf": value.dtype.name, "shape": list(value.shape), "v": elements(plain.numpy())}
    return None
