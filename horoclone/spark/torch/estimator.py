"""TorchEstimator trains a PyTorch model on a DataFrame; the TorchModel that comes of it predicts."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from pyspark import keyword_only

from horoclone.spark.common.estimator import HorovodEstimator, HorovodModel, own_threads
from horoclone.spark.common.params import Row, accessors, defaults
from horoclone.spark.common.serialization import Persistent
from horoclone.spark.data.columns import Column, check_shapes
from horoclone.spark.torch.training import Learner, train
from horoclone.spark.training import Plan

_OWN = (
    Row(
        "input_shapes",
        "InputShapes",
        "shapes of the model's inputs, -1 for the batch; default: [rows, values]",
    ),
    Row("loss_constructors", "LossConstructors", "functions that make the losses on each rank"),
    Row("train_minibatch_fn", "TrainMinibatchFn", "does a step of training: see training.minibatch"),
)
_OF_MODEL = (
    Row("optimizer", "Optimizer", "the optimizer, with the state that it had in the end"),
    Row("input_shapes", "InputShapes", "shapes of the model's inputs, -1 for the batch"),
    Row("loss", "Loss", "the loss, or losses"),
    Row("loss_constructors", "LossConstructors", "functions that make the losses"),
)


@accessors(_OWN)
class TorchEstimator(HorovodEstimator, Persistent):
    """Trains `model` with `optimizer` and `loss` on the columns of a DataFrame: fit(df) gives a TorchModel.

    All arguments are keywords, and parameters with setX() and getX(); horoclone.spark.common.params has them with what
    they mean, and docs/spark.md a table. Needed are model, optimizer, loss (or loss_constructors), store, feature_cols
    and label_cols. The model is called with one float32 tensor for each feature column, and gives a tensor, or a list
    of them, one for each label column. A loss is called as loss(output, label), with labels as float32 tensors.
    """

    _run_prefix = "pytorch"

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**defaults(_OWN))
        if kwargs.get("loss") is not None and kwargs.get("loss_constructors") is not None:
            raise ValueError(
                "TorchEstimator: loss and loss_constructors both give the losses; give one of them"
            )
        self.setParams(**kwargs)

    def _check_framework_params(self) -> None:
        name = type(self).__name__
        if not isinstance(self.getModel(), torch.nn.Module):
            raise ValueError(f"{name}: model must be a torch.nn.Module, not {type(self.getModel()).__name__}")
        if self.getOrDefault("optimizer") is None:
            raise ValueError(
                f"{name}: optimizer is missing: one of torch.optim, made for the parameters of model"
            )
        losses = self._losses()
        if not losses and not self.getLossConstructors():
            raise ValueError(f"{name}: loss is missing: a function of (output, label), or a list of them")
        for parameter, given in (("loss", losses), ("loss_weights", self.getLossWeights() or ())):
            if len(given) > 1 and len(given) != len(self.getLabelCols()):
                raise ValueError(
                    f"{name}: {parameter} has {len(given)} entries for {len(self.getLabelCols())} label columns"
                )
        if self.getCallbacks():
            warnings.warn(
                f"{name}: callbacks are for Keras; train_minibatch_fn changes a step here", stacklevel=5
            )

    def _losses(self) -> Sequence[Any]:
        loss = self.getLoss()
        return () if loss is None else list(loss) if isinstance(loss, (list, tuple)) else [loss]

    def _check_columns(self, columns: dict[str, Column]) -> None:
        check_shapes("input_shapes", self.getFeatureCols(), self.getInputShapes(), columns)
        check_shapes("label_shapes", self.getLabelCols(), self.getLabelShapes(), columns)

    def _trainer(self, plan: Plan, checkpoint: bytes | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        learner = Learner(
            model=self.getModel(),
            optimizer=self.getOrDefault("optimizer"),
            losses=self._losses(),
            loss_constructors=self.getLossConstructors(),
            loss_weights=self.getLossWeights(),
            metrics=self.getMetrics() or [],
            compression=self.getGradientCompression(),
            passes_per_step=self.getBackwardPassesPerStep(),
            minibatch=self.getTrainMinibatchFn(),
            input_shapes=self.getInputShapes(),
        )
        return train, (plan, cloudpickle.dumps(learner), checkpoint)

    def _model_of(self, value: Any, run_id: str, columns: dict[str, Column]) -> Any:
        history, content = value
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        model, optimizer = copy.deepcopy((self.getModel(), self.getOrDefault("optimizer")))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        model.eval()
        return TorchModel(
            history=history,
            model=model,
            optimizer=optimizer,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            input_shapes=self.getInputShapes(),
            run_id=run_id,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            _metadata={name: tuple(column) for name, column in columns.items()},
        )


@accessors(_OF_MODEL)
class TorchModel(HorovodModel, Persistent):
    """Predicts with a trained model: transform(df) adds a column for each label column. getModel() is the
    torch.nn.Module."""

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**defaults(_OF_MODEL))
        if kwargs.get("label_columns"):
            self.setOutputCols([f"{name}__output" for name in kwargs["label_columns"]])
        self.setParams(**kwargs)

    def _shapes(self, columns: dict[str, Column]) -> list[list[int]]:
        given = self.getInputShapes()
        return (
            [list(shape) for shape in given]
            if given
            else [_shape(columns[name]) for name in self.getFeatureColumns()]
        )

    def _output_sizes(self) -> Sequence[int]:
        columns = {name: Column(*value) for name, value in self.getOrDefault("_metadata").items()}
        shapes = self._shapes(columns)
        names = self.getFeatureColumns()
        inputs = [
            torch.zeros(1, max(1, columns[name].size)).reshape(tuple(shape))
            for name, shape in zip(names, shapes, strict=True)
        ]
        return [int(one[0].numel()) for one in outputs_of(self.getModel().eval(), inputs)]

    def _predictor(self, columns: dict[str, Column]) -> Callable[[Iterator[Any]], Iterator[Any]]:
        packed, shapes = cloudpickle.dumps(self.getModel().eval().to("cpu")), self._shapes(columns)

        def predict(batches: Iterator[Any]) -> Iterator[Any]:
            import numpy as np
            import pandas as pd

            torch.set_num_threads(own_threads())
            model = cloudpickle.loads(packed)
            for frame in batches:
                inputs = [
                    torch.from_numpy(np.array(list(frame[name]), dtype=np.float32)).reshape(tuple(shape))
                    for name, shape in zip(frame.columns, shapes, strict=True)
                ]
                outputs = outputs_of(model, inputs)
                flat = [one.reshape(len(frame), -1).double().numpy() for one in outputs]
                yield pd.DataFrame({str(index): list(values) for index, values in enumerate(flat)})

        return _annotated(predict)


def outputs_of(model: Any, inputs: Sequence[Any]) -> list[Any]:
    """The model's outputs as a list, without gradients."""
    with torch.no_grad():
        outputs = model(*inputs)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _shape(column: Column) -> list[int]:
    return [-1] if column.kind == "scalar" else [-1, column.size]


def _annotated(
    function: Callable[[Iterator[Any]], Iterator[Any]],
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """With the type hints by which Spark tells kinds of functions apart."""
    import pandas as pd

    function.__annotations__ = {"batches": Iterator[pd.DataFrame], "return": Iterator[pd.DataFrame]}
    return function
