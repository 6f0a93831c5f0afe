"""One rank of benchmarks/step.py: trains the model with fit() whenever it is told to, and says how long a step took.

Started as `python step_worker.py SOCKET PLAN`. PLAN is the JSON of `Plan`; commands come over the socket, a unix one.
Between two commands it sleeps, so the other contestants have the machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

import numpy as np

WARM_STEPS = 2  # of every round: the iterator starts, buffers are written again
CLASSES = 10


@dataclass(frozen=True)
class Plan:
    """One contestant. backend: "legacy" is tf_keras, "plain" is PyTorch without Keras."""

    name: str
    kind: str  # single, alone (several that do not communicate), horoclone, multiworker, ddp or ddp-view
    backend: str
    model: str  # dense, small (PyTorch) or tiny
    batch: int  # of one rank
    rank: int  # -1: the launcher says
    size: int
    workers: list[str]  # HOST:PORT of each, for those that are not horoclone's


def prepare(plan: Plan) -> None:
    """Fixes what a framework reads when it is imported. Everybody computes with one thread, without a GPU."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        TF_CPP_MIN_LOG_LEVEL="3",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="2",
        OMP_NUM_THREADS="1",
    )
    if plan.backend == "legacy":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    if plan.kind == "multiworker":
        task = {"type": "worker", "index": plan.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": plan.workers}, "task": task})


class Training:
    """The compiled model and its data, which are the same for every contestant."""

    def __init__(self, plan: Plan) -> None:
        from horoclone.keras.flavor import keras

        self.keras, self.plan, self.rank = keras, plan, plan.rank
        self.start_from_rank_0: list[Any] = []
        if plan.kind == "multiworker":
            self._compile_in_strategy()
            return
        optimizer: Any = keras.optimizers.SGD(1e-3, momentum=0.9)
        if plan.kind == "horoclone":
            import horoclone.keras as hvd

            hvd.init()
            self.rank = hvd.rank()
            optimizer = hvd.DistributedOptimizer(optimizer)
            self.start_from_rank_0 = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        self._compile(optimizer)
        self.data = self._data(plan.batch)

    def _compile_in_strategy(self) -> None:
        """The strategy comes before everything else that touches TensorFlow."""
        import tensorflow as tf

        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        with strategy.scope():
            self._compile(self.keras.optimizers.SGD(1e-3, momentum=0.9))
        # fit() divides a batch by the number of workers
        data = self._data(self.plan.batch * self.plan.size)
        own = tf.data.Options()
        own.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self.data = data.with_options(own)

    def _compile(self, optimizer: Any) -> None:
        keras = self.keras
        keras.utils.set_random_seed(1)
        width = 2048 if self.plan.model == "dense" else 64
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(6)]
        self.shape = (width,)
        model = keras.Sequential(
            [keras.layers.Input(self.shape), *hidden, keras.layers.Dense(CLASSES, activation="softmax")]
        )
        model.compile(optimizer, "sparse_categorical_crossentropy")
        self.model = model

    def _data(self, batch: int) -> Any:
        """This rank's batches for ever; those of one rank are alike, so a later step costs what the first did."""
        import tensorflow as tf

        chance = np.random.default_rng(max(self.rank, 0))
        x = chance.normal(size=(self.plan.batch, *self.shape)).astype(np.float32)
        y = chance.integers(0, CLASSES, self.plan.batch)
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch, drop_remainder=True)

    def run(self, steps: int) -> dict[str, float]:
        """Trains for WARM_STEPS + steps; wall and processor time of the latter, per step, in seconds."""
        clock = _clock(self.keras, steps)
        callbacks = [*self.start_from_rank_0, clock]
        self.start_from_rank_0 = []
        self.model.fit(
            self.data, steps_per_epoch=WARM_STEPS + steps, epochs=1, verbose=0, callbacks=callbacks
        )
        return {"wall": clock.wall_s / steps, "cpu": clock.cpu_s / steps, "loss": clock.loss}

    def outcome(self) -> dict[str, Any]:
        """The size of the model and what it has learnt."""
        return {
            "parameters": int(sum(np.prod(w.shape) for w in self.model.trainable_weights)),
            "tensors": len(self.model.trainable_weights),
            "digest": float(sum(np.abs(w, dtype=np.float64).sum() for w in self.model.get_weights())),
        }


def _clock(keras: Any, steps: int) -> Any:
    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        """Starts before the first step that counts and stops when the epoch's loss is known."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == WARM_STEPS:
                self.begun = (time.perf_counter(), time.process_time())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.loss = float(logs["loss"])
            self.wall_s = time.perf_counter() - self.begun[0]
            self.cpu_s = time.process_time() - self.begun[1]

    return Clock()


def main(argv: list[str]) -> None:
    plan = Plan(**json.loads(argv[1]))
    prepare(plan)
    training: Any
    if plan.backend == "plain":
        from torch_training import TorchTraining

        training = TorchTraining(plan)
    else:
        training = Training(plan)
    with Client(argv[0], family="AF_UNIX") as driver:
        driver.send((plan.name, training.rank))
        try:
            while (command := driver.recv()) is not None:
                driver.send(training.run(command) if isinstance(command, int) else training.outcome())
        except (EOFError, ConnectionError):
            pass  # the driver is gone, which says why


if __name__ == "__main__":
    main(sys.argv[1:])
