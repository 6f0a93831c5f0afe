"""A script written for Horovod and Keras 2, unedited but for its data: tf_keras by TF_USE_LEGACY_KERAS=1.

horoclonerun -np 2 python examples/keras_legacy.py
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main() -> None:
    hvd.init()
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (images / 16.0).astype("float32"), labels, test_size=0.2, random_state=0, stratify=labels
    )
    dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y))
    dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000, seed=hvd.rank()).batch(32)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(128, activation="relu", input_shape=(64,)),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    scaled_lr = 0.001 * hvd.size()
    opt = tf.keras.optimizers.legacy.Adam(scaled_lr)
    opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=scaled_lr, warmup_epochs=3, verbose=hvd.rank() == 0
        ),
    ]
    model.fit(
        dataset,
        steps_per_epoch=len(train_x) // 32 // hvd.size(),
        callbacks=callbacks,
        epochs=12,
        verbose=1 if hvd.rank() == 0 else 0,
    )

    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    accuracies = hvd.allgather([accuracy])
    if len(set(accuracies)) != 1:
        raise SystemExit(f"the ranks ended with different models: {accuracies}")
    if hvd.rank() == 0:
        print(
            f"{hvd.size()} ranks with tf_keras, identical models; test accuracy {accuracy:.2%}, loss {loss:.4f}"
        )
        if accuracy < 0.93:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below 93 %")


if __name__ == "__main__":
    main()
