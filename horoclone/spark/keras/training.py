"""A rank of a KerasEstimator: compiles the model that it was sent, fits it to its rows. Rank 0 keeps checkpoints."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import horoclone.keras as hvd
from horoclone.keras.flavor import assign, keras, to_numpy
from horoclone.spark.data.reading import Batch
from horoclone.spark.keras.packing import model_bytes, model_from, unpacked
from horoclone.spark.training import Epochs, Plan


@dataclass
class Learner:
    """model: a .keras file. The bytes of the others are packing.packed()."""

    model: bytes
    optimizer: bytes
    loss: bytes
    loss_weights: Any
    metrics: bytes
    callbacks: bytes
    checkpoint_callback: bytes
    custom_objects: Mapping[str, Any]
    compression: Any
    passes_per_step: int
    floatx: str


def train(plan: Plan, learner: Learner, checkpoint: bytes | None) -> tuple[dict[str, Any], bytes]:
    """checkpoint: to go on from. Rank 0's value is (history, the model as a .keras file)."""
    hvd.init()
    keras.backend.set_floatx(learner.floatx)
    if plan.is_seeded:
        keras.utils.set_random_seed(plan.seed)
    _pin_gpu(plan)
    saved = {} if checkpoint is None else _unsealed(checkpoint)
    model = model_from(saved["model"].tobytes() if saved else learner.model, learner.custom_objects)
    optimizer = _optimizer(learner, model, saved)
    model.compile(
        optimizer=optimizer,
        loss=unpacked(learner.loss, learner.custom_objects),
        loss_weights=learner.loss_weights,
        metrics=unpacked(learner.metrics, learner.custom_objects),
    )
    with tempfile.TemporaryDirectory() as folder:
        best = _best_of(learner, folder)
        history = _fit(plan, learner, model, best)
        if hvd.rank() != 0:
            return {}, b""
        if best is not None and os.path.exists(best.filepath):
            _take(model, best)
        return history, model_bytes(model)


def _optimizer(learner: Learner, model: Any, saved: Mapping[str, Any]) -> Any:
    given = unpacked(learner.optimizer, learner.custom_objects)
    optimizer = keras.optimizers.get(given)
    if isinstance(given, str):
        optimizer = (
            keras.optimizers.get({"class_name": given, "config": {}}) if optimizer is None else optimizer
        )
    if saved:
        optimizer.build(model.trainable_variables)
        for number, variable in enumerate(_variables(optimizer)):
            assign(variable, saved[f"optimizer.{number}"])
    rate = float(saved["rate"]) if "rate" in saved else _rate(optimizer)
    if rate is None:
        warnings.warn(
            "the optimizer has a learning rate schedule: it is not scaled by the number of ranks",
            stacklevel=2,
        )
    else:
        optimizer.learning_rate = rate * hvd.size()
    wrap = {} if learner.compression is None else {"compression": learner.compression}
    return hvd.DistributedOptimizer(optimizer, backward_passes_per_step=learner.passes_per_step, **wrap)


def _rate(optimizer: Any) -> float | None:
    try:
        if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
    except AttributeError:
        pass
    return float(to_numpy(optimizer.learning_rate))


def _variables(optimizer: Any) -> list[Any]:
    found = optimizer.variables
    return list(found() if callable(found) else found)


def _fit(plan: Plan, learner: Learner, model: Any, best: Any) -> dict[str, Any]:
    rank, size = hvd.rank(), hvd.size()
    train_rows, val_rows = plan.train_rows(rank, size), plan.val_rows(rank, size)
    training = Epochs(train_rows, plan.batch_size, plan.steps)
    validating = None if val_rows is None else Epochs(val_rows, plan.val_batch_size, plan.val_steps)
    feeder = _Feeder(plan, model)
    more: dict[str, Any] = {}
    if validating is not None:
        more = {"validation_data": feeder.stream(validating), "validation_steps": validating.steps}
    history = model.fit(
        feeder.stream(training),
        steps_per_epoch=training.steps,
        epochs=plan.epochs,
        callbacks=_callbacks(plan, learner, best),
        verbose=plan.verbose if rank == 0 else 0,
        **more,
    )
    return {name: [float(one) for one in values] for name, values in history.history.items()}


class _Feeder:
    """Rows as the model takes them: (inputs, labels), or (inputs, labels, weights)."""

    def __init__(self, plan: Plan, model: Any) -> None:
        self._plan = plan
        self._inputs = [(shape_of(one), str(getattr(one.dtype, "name", one.dtype))) for one in model.inputs]
        self._outputs = [shape_of(one) for one in model.outputs]

    def stream(self, epochs: Epochs) -> Iterator[Any]:
        epoch = 0
        while True:
            for batch in epochs.batches(epoch):
                yield self._shaped(batch)
            epoch += 1

    def _shaped(self, batch: Batch) -> Any:
        plan = self._plan
        inputs = [
            np.asarray(batch[name], dtype=dtype).reshape(shape)
            for name, (shape, dtype) in zip(plan.features, self._inputs, strict=True)
        ]
        labels = [self._label(batch[name], at) for at, name in enumerate(plan.labels)]
        whole = (_one_or_all(inputs), _one_or_all(labels))
        if plan.weight is None:
            return whole
        weights = np.asarray(batch[plan.weight], dtype=np.float32)
        return (*whole, _one_or_all([weights] * len(labels)))

    def _label(self, values: Any, at: int) -> Any:
        shapes = self._plan.label_shapes
        values = values if values.dtype.kind in "iub" else values.astype(keras.backend.floatx())
        if shapes is not None:
            return values.reshape(tuple(shapes[at]))
        shape, count = self._outputs[at], values.size // len(values)
        return values.reshape(shape) if count == abs(int(np.prod(shape))) else values


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of an input or an output of a model, -1 for the batch."""
    return tuple(-1 if one is None else int(one) for one in tensor.shape)


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _callbacks(plan: Plan, learner: Learner, best: Any) -> list[Any]:
    found = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    for callback in unpacked(learner.callbacks, learner.custom_objects) or ():
        if isinstance(callback, keras.callbacks.TensorBoard):
            if hvd.rank() != 0:
                continue
            folder = plan.store.get_logs_path(plan.run_id)
            if folder is not None and folder.startswith("file://"):
                callback.log_dir = callback._log_write_dir = plan.store.get_localized_path(folder)
        found.append(callback)
    if best is not None:
        found.append(best)
    if hvd.rank() == 0 and plan.checkpoint_path is not None:
        found.append(_Keeper(plan))
    return found


class _Keeper(keras.callbacks.Callback):  # type: ignore[misc]
    """Rank 0 writes model and optimizer into the store behind each epoch."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self._plan.checkpoint_path is not None
        self._plan.store.write(self._plan.checkpoint_path, _sealed(self.model))


def _sealed(model: Any) -> bytes:
    """A checkpoint: the model as a file, and what the optimizer has, with the learning rate of one rank."""
    rate = _rate(model.optimizer)
    parts = {f"optimizer.{number}": to_numpy(one) for number, one in enumerate(_variables(model.optimizer))}
    parts["model"] = np.frombuffer(model_bytes(model), dtype=np.uint8)
    if rate is not None:  # a schedule is the optimizer's own
        parts["rate"] = np.float64(rate / hvd.size())
    content = io.BytesIO()
    np.savez(content, **parts)
    return content.getvalue()


def _unsealed(content: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(content), allow_pickle=False) as parts:
        return dict(parts)


def _best_of(learner: Learner, folder: str) -> Any:
    """The caller's ModelCheckpoint, on rank 0, which decides what the trained model is."""
    best = unpacked(learner.checkpoint_callback, learner.custom_objects)
    if best is not None:
        only_weights = getattr(best, "save_weights_only", False)
        best.filepath = os.path.join(folder, "best.weights.h5" if only_weights else "best.keras")
    return best if hvd.rank() == 0 else None


def _take(model: Any, best: Any) -> None:
    if getattr(best, "save_weights_only", False):
        model.load_weights(best.filepath)
    else:
        with open(best.filepath, "rb") as file:
            model.set_weights(model_from(file.read(), None).get_weights())


def _pin_gpu(plan: Plan) -> None:
    """One GPU for each rank, where TensorFlow sees some; none where use_gpu is off."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    mine = [gpus[hvd.local_rank() % len(gpus)]] if gpus and plan.use_gpu else []
    for gpu in mine:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(mine, "GPU")
