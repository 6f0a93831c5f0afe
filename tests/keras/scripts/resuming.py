"""A longer script for Horovod and Keras: it looks for checkpoints, goes on from the last, and lowers the rate."""

import os

import horovod.keras as hvd
import keras
from sklearn.datasets import load_digits

hvd.init()
keras.utils.set_random_seed(17 + hvd.rank())

epochs, batch_size, momentum = int(os.environ["EPOCHS"]), 32, 0.9
checkpoint_format = os.path.join(os.environ["CHECKPOINTS"], "checkpoint-{epoch}.keras")
initial_lr = 0.02 * hvd.size()

resume_from_epoch = 0
for try_epoch in range(epochs, 0, -1):
    if os.path.exists(checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
# Only rank 0 is sure to see the folder.
resume_from_epoch = int(
    hvd.broadcast(resume_from_epoch if hvd.rank() == 0 else -1, 0, name="resume_from_epoch")
)
verbose = 1 if hvd.rank() == 0 else 0

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
train_x, train_y = images[hvd.rank() : 1400 : hvd.size()], labels[hvd.rank() : 1400 : hvd.size()]
test_x, test_y = images[1400:], labels[1400:]

if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(
        checkpoint_format.format(epoch=resume_from_epoch), compression=hvd.Compression.fp16
    )
else:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=momentum)
    opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
    model.compile(loss="sparse_categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=1, verbose=verbose),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1.0, start_epoch=1, end_epoch=3
    ),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-1, start_epoch=3),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_format))

history = model.fit(
    train_x, train_y, batch_size=batch_size, epochs=epochs, initial_epoch=resume_from_epoch, verbose=verbose,
    validation_data=(test_x, test_y), callbacks=callbacks,
).history  # fmt: skip
score = hvd.allreduce(model.evaluate(test_x, test_y, verbose=0))
if verbose:
    print("test loss", score[0], "accuracy", score[1])
