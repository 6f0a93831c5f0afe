"""Data-parallel training of a small convolutional network on scikit-learn's digits with Keras 3 and model.fit.

On any backend of Keras, under any launcher, and alone:
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
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument(
        "--learning-rate", type=float, default=0.002, help="for one rank; multiplied by the size"
    )
    parser.add_argument("--checkpoint", type=Path, help="file to write (default: in a new temporary folder)")
    return parser.parse_args()


def digits():
    """1,797 images of 8 x 8 pixels, a fifth of them for testing; the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def network():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(rank)  # the ranks start apart; the callback gives everybody rank 0's weights
    train_x, test_x, train_y, test_y = digits()
    # As many images for every rank: a gradient needs all ranks, so all do the same number of steps.
    count = len(train_x) // size
    share = slice(rank * count, (rank + 1) * count)

    model = network()
    rate = args.learning_rate * size
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    checkpoint = args.checkpoint or Path(tempfile.mkdtemp(prefix="digits-")) / "model.keras"
    model.fit(
        train_x[share],
        train_y[share],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(test_x[rank::size], test_y[rank::size]),
        verbose=1 if rank == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
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
        print(
            f"test accuracy {accuracy:.2%}, loss {loss:.4f}; best epoch's {best_accuracy:.2%}, in {checkpoint}"
        )
        if accuracy < 0.95:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below 95 %")


if __name__ == "__main__":
    main()
