"""Data-parallel training of a small convolutional network on scikit-learn's digits with Keras 3 and model.fit.

On any backend of Keras, under any launcher, and alone. The batch of all ranks together is the same, so is the result:
on 1 or 2 ranks the test loss comes out equal to a thousandth, the accuracy to one of 360 images: the network is smooth,
and Adam's epsilon is large, so that nothing amplifies the rounding of sums in another order.
    KERAS_BACKEND=tensorflow horoclonerun -np 2 python examples/keras_fit.py
    KERAS_BACKEND=jax mpirun -n 2 python examples/keras_fit.py
    KERAS_BACKEND=torch python examples/keras_fit.py
"""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path

if "KERAS_BACKEND" not in os.environ:  # Keras would take TensorFlow, whether it is there or not
    there = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]
    os.environ["KERAS_BACKEND"] = there[0]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horoclone.keras as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--learning-rate", type=float, default=0.015, help="for such a batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="file to write (default: in a new temporary folder)")
    return parser.parse_args()


def digits():
    """1,797 images of 8 x 8 pixels, a fifth of them for testing; the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


class MyShare(keras.utils.PyDataset):
    """This rank's part of every batch. All ranks shuffle alike, and all do the same number of steps."""

    def __init__(self, images, labels, batch_size: int, seed: int) -> None:
        super().__init__()
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.chance = np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __getitem__(self, index: int):
        batch = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        mine = batch[hvd.rank() :: hvd.size()]
        return self.images[mine], self.labels[mine]

    def on_epoch_end(self) -> None:
        self.order = self.chance.permutation(len(self.images))


def network():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if args.batch_size % size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {size} ranks")
    keras.utils.set_random_seed(args.seed + rank)  # the ranks start apart; all get rank 0's weights
    train_x, test_x, train_y, test_y = digits()

    model = network()
    # Adam's usual epsilon, 1e-7, makes whole steps of the rounding in gradients that are nearly zero
    optimizer = keras.optimizers.Adam(args.learning_rate, epsilon=1e-3)
    model.compile(
        optimizer=hvd.DistributedOptimizer(optimizer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    checkpoint = args.checkpoint or Path(tempfile.mkdtemp(prefix="digits-")) / "model.keras"
    warm_up = hvd.callbacks.LearningRateScheduleCallback(
        args.learning_rate, lambda epoch: min(1.0, (epoch + 0.1) / 2), end_epoch=3, staircase=False
    )
    model.fit(
        MyShare(train_x, train_y, args.batch_size, args.seed),
        epochs=args.epochs,
        shuffle=False,  # fit() would take the batches in an order of each rank's own; MyShare shuffles
        validation_data=(test_x[rank::size], test_y[rank::size]),
        verbose=1 if rank == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            warm_up,
            hvd.callbacks.BestModelCheckpoint(filepath=str(checkpoint)),
        ],
    )

    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    everybody = hvd.allgather_object((loss, accuracy, [w.tobytes() for w in model.get_weights()]))
    if any(theirs != everybody[0] for theirs in everybody):
        raise SystemExit("the ranks ended with different models")
    if rank == 0:
        best = keras.models.load_model(checkpoint)  # a plain Keras model: horoclone is not needed to load it
        best_accuracy = np.mean(best.predict(test_x, verbose=0).argmax(axis=1) == test_y)
        print(f"{size} ranks on {keras.backend.backend()}, identical models")
        print(f"best epoch's test accuracy {best_accuracy:.2%}, in {checkpoint}")
        print(f"test loss {loss:.4f}, accuracy {accuracy:.2%}")
        if accuracy < 0.95:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below 95 %")


if __name__ == "__main__":
    main()
