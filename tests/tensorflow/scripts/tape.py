"""A training loop as people wrote them for Horovod and TensorFlow 2: nothing in it knows horoclone."""

import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices((tf.cast(images / 16.0, tf.float32), tf.cast(labels, tf.int64)))
dataset = dataset.repeat().shuffle(2000).batch(32)

model = tf.keras.Sequential(
    [tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10, activation="softmax")]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.002 * hvd.size())
checkpoint_dir = os.environ["CHECKPOINTS"]
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)
losses = []


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905 - as they wrote it
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(200 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    # After the first step, since only then do model and optimizer have their variables.
    if batch == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    if batch % 10 == 0:
        losses.append(float(hvd.allreduce(loss_value, name="loss")))
        if hvd.local_rank() == 0:
            print(f"Step #{batch}\tLoss: {losses[-1]:.6f}")

# Only rank 0 writes, so that nobody else spoils the file.
if hvd.rank() == 0:
    checkpoint.save(checkpoint_dir)
accuracy = float(
    hvd.allreduce(
        np.mean(np.argmax(model(images), axis=1) == labels.numpy()), name="accuracy", op=hvd.Average
    )
)
