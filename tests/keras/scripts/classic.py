"""A script as people wrote them for Horovod and tf.keras: nothing in it knows horoclone."""

import os

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images.reshape(-1, 8, 8, 1) / 16.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(2000).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

# The rate grows with the number of ranks, and the wrapper averages gradients.
scaled_lr = 0.002 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1, verbose=1),
]
folder = os.environ.get("CHECKPOINTS", ".")
if hvd.rank() == 0:
    path = os.path.join(folder, "checkpoint-{epoch}.weights.h5")
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True))

verbose = 1 if hvd.rank() == 0 else 0
history = model.fit(
    dataset, steps_per_epoch=80 // hvd.size(), callbacks=callbacks, epochs=3, verbose=verbose
).history
