"""Elastic training with model.fit: callbacks commit, and fit() is called anew when ranks are lost or come.

horoclonerun -np 2 python examples/keras_elastic.py
horoclonerun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python examples/keras_elastic.py
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

import horoclone.keras as hvd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    points = np.random.default_rng(1).normal(size=(1024, 2)).astype("float32")
    labels = (np.square(points).sum(1) > 1.4).astype("int32")
    model = keras.Sequential(
        [keras.layers.Input((2,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2)]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    def on_reset() -> None:
        """Another number of ranks: the rate is for that many."""
        optimizer.learning_rate.assign(0.01 * hvd.size())
        print(f"generation {hvd.elastic.generation().number}: rank {hvd.rank()} of {hvd.size()}", flush=True)

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> None:
        # Each rank draws its own batches, so what is left of an epoch is a number of steps. A rank that begins in the
        # middle of an epoch does these first, as an epoch of their own.
        steps = len(points) // args.batch_size // hvd.size()
        shuffled = np.random.default_rng([state.epoch, hvd.rank()])
        while state.epoch < args.epochs:
            left = max(1, steps - state.batch)
            mine = shuffled.choice(len(points), left * args.batch_size)
            history = model.fit(
                points[mine],
                labels[mine],
                batch_size=args.batch_size,
                verbose=0,
                callbacks=[
                    hvd.elastic.UpdateEpochStateCallback(state),
                    hvd.elastic.UpdateBatchStateCallback(state),
                    hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
                    hvd.callbacks.MetricAverageCallback(),
                ],
            )
            if hvd.rank() == 0:
                value = history.history["loss"][-1]
                print(f"epoch {state.epoch}: loss {value:.4f}, {hvd.size()} ranks", flush=True)

    train(state)
    if hvd.rank() == 0:
        accuracy = model.evaluate(points, labels, verbose=0)[1]
        print(f"accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
