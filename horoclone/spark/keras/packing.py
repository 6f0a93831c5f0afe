"""Models, optimizers, losses and metrics of Keras as bytes, on their way to the ranks, to executors and to files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import cloudpickle

from horoclone.keras.flavor import keras

_BY_CONFIG = "horoclone.spark: by config"


def model_bytes(model: Any) -> bytes:
    """Layers and weights, as a .keras file."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path, include_optimizer=False)
        with open(path, "rb") as file:
            return file.read()


def model_from(content: bytes, custom_objects: Mapping[str, Any] | None) -> Any:
    """The model, not compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        with open(path, "wb") as file:
            file.write(content)
        return keras.models.load_model(path, custom_objects=dict(custom_objects or {}), compile=False)


def packed(value: Any) -> bytes:
    """Anything that an estimator is given: Keras's own objects by their configuration, the rest as a pickle."""
    return bytes(cloudpickle.dumps(_plain(value)))


def unpacked(content: bytes, custom_objects: Mapping[str, Any] | None = None) -> Any:
    with keras.utils.custom_object_scope(dict(custom_objects or {})):
        return _real(cloudpickle.loads(content))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(one) for one in value)
    for kind in ("optimizers", "losses", "metrics"):
        module = getattr(keras, kind)
        base = {"optimizers": "Optimizer", "losses": "Loss", "metrics": "Metric"}[kind]
        if isinstance(value, getattr(module, base)):
            return {_BY_CONFIG: kind, "config": module.serialize(value)}
    return value


def _real(value: Any) -> Any:
    if isinstance(value, dict):
        if _BY_CONFIG in value:
            return getattr(keras, value[_BY_CONFIG]).deserialize(value["config"])
        return {name: _real(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_real(one) for one in value)
    return value
