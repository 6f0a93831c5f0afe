"""KerasEstimator trains a Keras model on a DataFrame; the KerasModel that comes of it predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from pyspark import keyword_only

from horoclone.keras.flavor import LEGACY, backend, keras, to_numpy
from horoclone.spark.common.estimator import HorovodEstimator, HorovodModel
from horoclone.spark.common.params import Row, accessors, defaults
from horoclone.spark.common.serialization import Persistent
from horoclone.spark.data.columns import Column, check_shapes
from horoclone.spark.keras.packing import model_bytes, model_from, packed, unpacked
from horoclone.spark.keras.training import Learner, shape_of, train
from horoclone.spark.training import Plan

_OWN = (
    Row("custom_objects", "CustomObjects", "name -> class or function that the model is made of", {}),
    Row(
        "checkpoint_callback",
        "CheckpointCallback",
        "a ModelCheckpoint that decides which epoch's model is kept",
    ),
    Row("backend_env", "BackendEnv", "variables for the ranks", {}),
)
_OF_MODEL = (
    Row("custom_objects", "CustomObjects", "name -> class or function that the model is made of", {}),
    Row("_floatx", "", "Keras's default float type when it was trained"),
)


class _Packed(Persistent):
    """The model is saved as a .keras file, other objects of Keras by their configuration."""

    @staticmethod
    def _pack(name: str, value: Any) -> bytes:
        return model_bytes(value) if name == "model" else packed(value)

    @classmethod
    def _unpacked(cls, given: dict[str, bytes]) -> dict[str, Any]:
        objects = unpacked(given["custom_objects"]) if "custom_objects" in given else {}
        return {
            name: model_from(content, objects) if name == "model" else unpacked(content, objects)
            for name, content in given.items()
        }


@accessors(_OWN)
class KerasEstimator(HorovodEstimator, _Packed):
    """Trains `model` with `optimizer` and `loss` on the columns of a DataFrame: fit(df) gives a KerasModel.

    All arguments are keywords, and parameters with setX() and getX(); horoclone.spark.common.params has them with what
    they mean, and docs/spark.md a table. Needed are model (built, with inputs and outputs), loss, store, feature_cols
    and label_cols, and optimizer unless the model is compiled. Keras 3 on TensorFlow, JAX or PyTorch, or tf_keras.
    """

    _run_prefix = "keras"

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**defaults(_OWN))
        self.setParams(**kwargs)

    def _check_framework_params(self) -> None:
        name, model = type(self).__name__, self.getModel()
        if not isinstance(model, keras.Model):
            raise ValueError(
                f"{name}: model must be a {keras.__name__}.Model, not {type(model).__module__}.{type(model).__name__}"
            )
        if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
            raise ValueError(
                f"{name}: model has no inputs and outputs yet: give its first layer a shape, or build it"
            )
        if not self.getLoss():
            raise ValueError(f"{name}: loss is missing: a loss of Keras, its name, or a list of them")
        if self.getOptimizer() is None and getattr(model, "optimizer", None) is None:
            raise ValueError(f"{name}: optimizer is missing, and model is not compiled with one")

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the shapes of the model's inputs and outputs, -1 for the batch."""
        model = self.getModel()
        return [list(shape_of(one)) for one in model.inputs], [list(shape_of(one)) for one in model.outputs]

    def _check_columns(self, columns: dict[str, Column]) -> None:
        inputs, outputs = self.get_model_shapes()
        check_shapes("feature_cols", self.getFeatureCols(), inputs, columns)
        if len(outputs) != len(self.getLabelCols()):
            raise ValueError(
                f"label_cols: {len(self.getLabelCols())} columns for the {len(outputs)} outputs of the model"
            )
        check_shapes("label_shapes", self.getLabelCols(), self.getLabelShapes(), columns)

    def _environment(self) -> dict[str, str]:
        own = {"TF_USE_LEGACY_KERAS": "1"} if LEGACY else {"KERAS_BACKEND": backend()}
        return {**own, **(self.getBackendEnv() or {})}

    def _trainer(self, plan: Plan, checkpoint: bytes | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model, optimizer = self.getModel(), self.getOptimizer()
        learner = Learner(
            model=model_bytes(model),
            optimizer=packed(model.optimizer if optimizer is None else optimizer),
            loss=packed(self.getLoss()),
            loss_weights=self.getLossWeights(),
            metrics=packed(self.getMetrics() or None),
            callbacks=packed(self.getCallbacks()),
            checkpoint_callback=packed(self.getCheckpointCallback()),
            custom_objects=self.getCustomObjects() or {},
            compression=self.getGradientCompression(),
            passes_per_step=self.getBackwardPassesPerStep(),
            floatx=keras.backend.floatx(),
        )
        return train, (plan, learner, checkpoint)

    def _model_of(self, value: Any, run_id: str, columns: dict[str, Column]) -> Any:
        history, content = value
        return KerasModel(
            history=history,
            model=model_from(content, self.getCustomObjects()),
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            custom_objects=self.getCustomObjects(),
            run_id=run_id,
            _metadata={name: tuple(column) for name, column in columns.items()},
            _floatx=keras.backend.floatx(),
        )


@accessors(_OF_MODEL)
class KerasModel(HorovodModel, _Packed):
    """Predicts with a trained model: transform(df) adds a column for each label column. getModel() is the Keras model,
    not compiled."""

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**defaults(_OF_MODEL))
        if kwargs.get("label_columns"):
            self.setOutputCols([f"{name}__output" for name in kwargs["label_columns"]])
        self.setParams(**kwargs)

    def _output_sizes(self) -> Sequence[int]:
        return [abs(int(np.prod(shape_of(one)))) for one in self.getModel().outputs]

    def _predictor(self, columns: dict[str, Column]) -> Callable[[Iterator[Any]], Iterator[Any]]:
        import pandas as pd

        content, objects = model_bytes(self.getModel()), self.getCustomObjects()
        floatx, wanted = self.getOrDefault("_floatx") or "float32", backend()

        def predict(batches: Iterator[Any]) -> Iterator[Any]:
            if backend() != wanted:
                raise RuntimeError(
                    f"Keras runs on {backend()} here and on {wanted} in the driver; set KERAS_BACKEND alike for "
                    "executors: spark.executorEnv.KERAS_BACKEND"
                )
            keras.backend.set_floatx(floatx)
            model = model_from(content, objects)
            shapes = [shape_of(one) for one in model.inputs]
            for frame in batches:
                inputs = [
                    np.array(list(frame[name]), dtype=floatx).reshape(shape)
                    for name, shape in zip(frame.columns, shapes, strict=True)
                ]
                outputs = model.predict_on_batch(inputs[0] if len(inputs) == 1 else inputs)
                outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
                flat = [
                    np.asarray(to_numpy(one), dtype=np.float64).reshape(len(frame), -1) for one in outputs
                ]
                yield pd.DataFrame({str(index): list(values) for index, values in enumerate(flat)})

        predict.__annotations__ = {"batches": Iterator[pd.DataFrame], "return": Iterator[pd.DataFrame]}
        return predict
