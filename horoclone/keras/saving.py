"""load_model: loads a model saved with Keras and makes its optimizer a distributed one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horoclone.keras.distribute import Compression, make_distributed
from horoclone.keras.flavor import keras


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a compiled model and makes its optimizer, with the state that it was saved with, a DistributedOptimizer.

    filepath: as for keras.models.load_model. custom_optimizers: the user's optimizer classes. custom_objects: other
    classes and functions by name. legacy_opts: accepted; a saved legacy optimizer is recognised.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        make_distributed(model.optimizer, compression=compression)
    return model
