"""Callbacks for model.fit: the same start everywhere, metrics of all ranks, learning rates for large batches.

For Keras 3 on any backend and for tf_keras. Put them before callbacks that read metrics (ReduceLROnPlateau,
EarlyStopping, ModelCheckpoint). All but BestModelCheckpoint and MetricsCallback communicate, so every rank needs the
same ones.
"""

# mypy: disable-error-code="no-any-return, misc"
from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from horoclone import runtime
from horoclone.elastic.member import is_elastic
from horoclone.errors import Unsupported
from horoclone.keras import learning_rate as rates
from horoclone.keras.compared import native_of, slots_of
from horoclone.keras.flavor import LEGACY, backend, keras, to_numpy
from horoclone.keras.values import allgather_object, broadcast_variables
from horoclone.runtime import steps
from horoclone.tracking import Log, MetricsLog

__all__ = [
    "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "MetricAverageCallback", "MetricsCallback",
]  # fmt: skip

JIT_COMPILE = (
    "jit_compile=True compiles the training step with XLA, which cannot run the reduction of gradients on the "
    "TensorFlow backend. Use model.compile(..., jit_compile=False)."
)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank, before the first step, the weights and the optimizer's state of rank `root_rank`.

    The optimizer is built for that. A model that tf_keras builds in its first step is sent after that step. Random
    seeds and metrics stay each rank's own, and so do `local_variables`. ValueError, on every rank, when the models
    or the numbers of batches differ between the ranks, or at an epoch's begin their learning rates. device has no
    effect. Where on_batch_end is replaced, on an object or in a class, everything is sent when it is called after
    the first batch, as in Horovod, so that it may register local variables before.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = list(local_variables or ())
        self._sent = False

    def register_local_var(self, var: Any) -> None:
        """Takes a variable that every rank keeps as it is."""
        self._local.append(var)

    def set_model(self, model: Any) -> None:
        """Called by Keras before it makes the training step: the last moment to switch XLA off."""
        super().set_model(model)
        if backend() == "tensorflow" and (runtime.size() > 1 or is_elastic()):
            _without_xla(model)
            _warn_of_own_statistics(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Builds the optimizer and broadcasts, if the model is built."""
        self._sent = False
        self._epochs = 0  # begun in this fit()
        batches = self.params.get("steps") if self.params else None
        everybody = allgather_object(batches)
        if len(set(everybody)) > 1:
            raise ValueError(
                f"the ranks have {everybody} batches per epoch, and every gradient needs all of them. Give each rank "
                "as much data, or pass the same steps_per_epoch to fit() on all."
            )
        model = self.model
        has_optimizer = bool(getattr(getattr(model, "optimizer", None), "built", False))
        ready = bool(model.built) and not self._is_replaced()
        everywhere = allgather_object((ready, _is_whole(model), has_optimizer))
        is_whole = all(whole for _, whole, _ in everywhere)
        if model.built and (is_whole or any(built for _, _, built in everywhere)):
            self._build_optimizer(model)
        if all(ready for ready, _, _ in everywhere):
            self._send(model)
            self._sent = is_whole  # else once more, with what the first step builds
        if not self._sent:
            steps.restart()
            steps.held = _steps_of_the_first_batch(model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Raises ValueError, on every rank, when the ranks have different learning rates. Not in the first epoch of a
        fit(), whose callbacks may set the rate only then."""
        self._epochs += 1
        if self._epochs == 1:
            return
        rates_there = allgather_object(rates.learning_rate_if_known(getattr(self.model, "optimizer", None)))
        if len(set(map(repr, rates_there))) > 1:  # as texts: NaN equals itself
            raise ValueError(
                f"the ranks have different learning rates, {dict(enumerate(rates_there))}, so their weights drift "
                "apart. Where a callback like ReduceLROnPlateau sets them by this rank's own metrics, put "
                "hvd.callbacks.MetricAverageCallback() before it; else set the same rate on every rank."
            )

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts what did not exist before the first batch. Called by Keras's on_train_batch_end."""
        if not self._sent:
            self._send(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raises RuntimeError when nothing has been sent: a replaced on_batch_end that does not call the original."""
        if not self._sent and self.model.built:
            raise RuntimeError(
                "BroadcastGlobalVariablesCallback has sent nothing, as its on_batch_end was replaced by one that does "
                "not call it. Call the original on_batch_end(batch, logs) in it."
            )

    def _is_replaced(self) -> bool:
        mine = {
            "on_batch_end": BroadcastGlobalVariablesCallback,
            "on_train_batch_end": keras.callbacks.Callback,
        }
        return any(
            getattr(getattr(self, name), "__func__", None) is not getattr(kind, name)
            for name, kind in mine.items()
        )

    @staticmethod
    def _build_optimizer(model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None:
            return
        if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
            optimizer._create_all_weights(model.trainable_variables)
        elif LEGACY or not optimizer.built:
            optimizer.build(model.trainable_variables)

    def _send(self, model: Any) -> None:
        local = {id(native_of(variable)) for variable in self._local}
        optimizer, own = (
            getattr(model, "optimizer", None),
            [v for v in model.trainable_variables if id(native_of(v)) in local],
        )
        if optimizer is not None:  # what it keeps for them is as local as they are
            local |= {id(native_of(slot)) for slots in slots_of(optimizer, own) for slot in slots}
        variables = [v for v in _state_of(model) if id(native_of(v)) not in local]
        broadcast_variables(variables, self.root_rank)
        self._sent = True
        if steps.held:
            steps.restart()


def _is_whole(model: Any) -> bool:
    """Whether all weights of a model that is built exist. On TensorFlow model.build() may leave layers of a subclass to
    the first step, which also those are that no call reaches."""
    layers = model._flatten_layers() if backend() == "tensorflow" and not LEGACY else ()
    return all(layer.built for layer in layers)


def _state_of(model: Any) -> list[Any]:
    """Weights (also the moving averages of normalisation) and the optimizer's variables, each once."""
    optimizer = getattr(model, "optimizer", None)
    variables = [] if optimizer is None else optimizer.variables
    found = [*model.weights, *(variables() if callable(variables) else variables)]
    return list({id(variable): variable for variable in found}.values())


def _steps_of_the_first_batch(model: Any) -> range:
    """Their numbers: it may hold several."""
    many = getattr(model, "_steps_per_execution" if LEGACY else "steps_per_execution", None)
    made = getattr(model.optimizer, "iterations", 0) if backend() == "jax" else 0  # there it counts them
    first = int(to_numpy(made))
    return range(first, first + int(to_numpy(1 if many is None else many)))


def _without_xla(model: Any) -> None:
    """XLA has no kernel for the reduction: what Keras switched on by itself is switched off again."""
    config = getattr(model, "_compile_config", None)
    wanted = (getattr(config, "config", None) or {}).get("jit_compile", "auto")
    jit = getattr(model, "_jit_compile", None) if LEGACY else getattr(model, "jit_compile", None)
    if not jit:
        return
    if wanted is True:
        raise Unsupported(JIT_COMPILE)
    warnings.warn(
        'jit_compile="auto" chose XLA, which cannot run the reduction of gradients on the TensorFlow backend; '
        "training goes on with jit_compile=False.",
        stacklevel=2,
    )
    model.jit_compile = False
    model.train_function = None


def _warn_of_own_statistics(model: Any) -> None:
    found = [
        layer.name
        for layer in getattr(model, "_flatten_layers", tuple)()
        if isinstance(layer, keras.layers.BatchNormalization) and getattr(layer, "synchronized", False)
    ]
    if found:
        warnings.warn(
            f"BatchNormalization(synchronized=True), as {found[0]!r}, takes together the replicas of a tf.distribute "
            "strategy, and each rank its own batch. Over the batches of all ranks: "
            "horoclone.tensorflow.SyncBatchNormalization().",
            stacklevel=2,
        )


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces, at the end of each epoch, the metrics in `logs` by their averages over the ranks, also arrays of them
    (one for each class).

    ValueError, on every rank, when the ranks have different metrics, or of different shapes. device has no effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages; logs is changed in place, for the callbacks that come after this one."""
        values = {key: np.asarray(to_numpy(value)) for key, value in (logs or {}).items()}
        mine = {key: value.astype(np.float64) for key, value in values.items() if value.dtype.kind in "biufV"}
        everybody = allgather_object(mine)
        forms = [{key: metrics[key].shape for key in sorted(metrics)} for metrics in everybody]
        if any(form != forms[0] for form in forms):
            raise ValueError(
                f"the ranks have different metrics: {dict(enumerate(forms))}. Compile the same ones on all, "
                "and validate on all or on none."
            )
        means = {key: np.mean([metrics[key] for metrics in everybody], axis=0) for key in mine}
        if logs is not None:
            logs.update({key: mean if mean.ndim else float(mean) for key, mean in means.items()})


class MetricsCallback(keras.callbacks.Callback):
    """Logs hvd.metrics() every `every` batches and after the last one: bytes, operations, waiting, who is late, ...

    to: a folder for TensorBoard's event files, or a function of a dictionary of numbers and a step, like wandb.log,
    mlflow.log_metrics and print. The step counts batches over all epochs. all_ranks: every rank logs, into
    FOLDER/rank3 or under names with its rank; otherwise rank 0 alone does. Names: see hvd.flat_metrics().
    """

    def __init__(self, to: str | os.PathLike[str] | Log, every: int = 100, all_ranks: bool = False) -> None:
        super().__init__()
        self._log = MetricsLog(to, every, all_ranks)
        self._steps = 0
        self._before_epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where the epoch begins; a training that goes on at a later epoch counts the batches before it."""
        if self._steps == 0:
            self._steps = epoch * ((self.params or {}).get("steps") or 0)
        self._before_epoch = self._steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Logs, if it is due. With steps_per_execution=k Keras calls this for every k-th batch only."""
        self._steps = self._before_epoch + batch + 1
        self._log.at(self._steps)

    def on_train_end(self, logs: Any = None) -> None:
        """Logs what came since."""
        self._log.now(self._steps)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr * multiplier(epoch) from start_epoch up to, not including, end_epoch.

    multiplier: a function of the epoch, or a number m, which means m ** (epoch - start_epoch). staircase: once per
    epoch; otherwise before every batch with a fractional epoch, which needs steps_per_epoch or a data set whose length
    is known. momentum_correction: where the optimizer has momentum, what it has gathered is rescaled with the rate
    (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 3), as if the next step alone had the momentum
    m * new/old. ValueError without initial_lr.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.staircase = staircase
        self.multiplier = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the number of batches in an epoch, where it is needed."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to "
                f"{type(self).__name__}()."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate, if it is due."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._adjust(epoch)
        else:
            self._adjust(epoch + batch / float(self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the rate into logs["lr"]."""
        if logs is not None:
            logs["lr"] = rates.learning_rate_of(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        # On JAX, reading self.model brings the state back from the training step
        optimizer = self.model.optimizer
        new = self.initial_lr * self.multiplier(epoch)
        old = rates.learning_rate_of(optimizer)
        if new == old:
            return
        rates.set_learning_rate(optimizer, new)
        if self.momentum_correction and old > 0:
            rates.rescale_momentum(optimizer, new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr, batch by batch, over the first warmup_epochs.

    initial_lr is the rate for all ranks together (the one of a single rank times the size, by the linear scaling rule
    of Goyal et al. 2017). verbose: rank 0 or every rank that sets it prints the rate reached.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            done = epoch + 1.0 / float(self.steps_per_epoch or 1)  # reached at the end of this batch
            size = runtime.size()
            return (done * (size - 1) / warmup_epochs + 1.0) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Says that the warm-up is over, after its last epoch."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = rates.learning_rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model as ModelCheckpoint(save_best_only=True) does, and writes on rank 0 only. Set `filepath`
    before fit().

    MetricAverageCallback, put before it, makes rank 0 judge by everybody's metrics. ValueError without a filepath.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | None = None,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=filepath or f"best{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that there is a filepath."""
        if not self.filepath:
            raise ValueError(
                "BestModelCheckpoint: set its attribute filepath before fit(), as in callback.filepath = ..."
            )
        super().on_train_begin(logs)

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if not runtime.is_initialized() or runtime.rank() == 0:
            super()._save_model(*args, **kwargs)
