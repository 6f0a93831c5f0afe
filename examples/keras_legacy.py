"""A script written for Horovod and Keras 2, unedited but for its data: tf_keras by TF_USE_LEGACY_KERAS=1.

Without the warm-up, which depends on the number of ranks, one process with twice the batch and the rate does the same
as two ranks (loss within a thousandth, accuracy within one of 360 images):
    horoclonerun -np 2 python examples/keras_legacy.py --warmup-epochs 0
    python examples/keras_legacy.py --batch-size 64 --learning-rate 0.02 --warmup-epochs 0
"""

import argparse
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="times the number of ranks")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--warmup-epochs", type=int, default=3)
    args = parser.parse_args()

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (images / 16.0).astype("float32"), labels, test_size=0.2, random_state=0, stratify=labels
    )
    tf.random.set_seed(1)  # all shuffle alike
    dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shuffle(len(train_x), seed=1).repeat()
    dataset = dataset.shard(hvd.size(), hvd.rank()).batch(args.batch_size)

    tf.keras.utils.set_random_seed(hvd.rank())
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(128, activation="gelu", input_shape=(64,)),
            tf.keras.layers.Dense(64, activation="gelu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    scaled_lr = args.learning_rate * hvd.size()
    opt = tf.keras.optimizers.legacy.Adam(scaled_lr, epsilon=1e-3)
    opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=scaled_lr, warmup_epochs=args.warmup_epochs, verbose=hvd.rank() == 0
        ),
    ]
    model.fit(
        dataset,
        steps_per_epoch=len(train_x) // args.batch_size // hvd.size(),
        callbacks=callbacks,
        epochs=args.epochs,
        verbose=1 if hvd.rank() == 0 else 0,
    )

    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    metrics = hvd.allgather([[loss, accuracy]]).numpy().tolist()
    if any(theirs != metrics[0] for theirs in metrics):
        raise SystemExit(f"the ranks ended with different models: {metrics}")
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks on tf_keras, identical models")
        print(f"test loss {loss:.4f}, accuracy {accuracy:.2%}")
        if accuracy < 0.93:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below 93 %")


if __name__ == "__main__":
    main()
