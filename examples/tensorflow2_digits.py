"""A training loop of one's own in TensorFlow 2, data-parallel, on scikit-learn's scanned digits.

Every rank takes its part of each global batch, so any number of ranks does what one does with the whole batch.

    horoclonerun -np 2 python examples/tensorflow2_digits.py
    mpirun -n 2 python examples/tensorflow2_digits.py
    python examples/tensorflow2_digits.py
"""

import argparse
import hashlib

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horoclone.tensorflow as hvd

try:
    from tqdm import tqdm
except ImportError:  # a plain loop does as well

    def tqdm(batches, **_):
        return batches


def digits():
    """1,797 images of 8 x 8 pixels, a fifth of them for testing; the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
    shape = (-1, 8, 8, 1)
    train_x, test_x = (part.reshape(shape).astype(np.float32) for part in parts[:2])
    return train_x, parts[2], test_x, parts[3]


class Network(tf.Module):
    """One convolution and two dense layers, in plain TensorFlow."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        shapes = [(3, 3, 1, 32), (16 * 32, 64), (64, 10)]
        chance = np.random.default_rng(seed)
        starts = [chance.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape) for shape in shapes]
        self.weights = [tf.Variable(start, dtype=tf.float32) for start in starts]
        self.biases = [tf.Variable(tf.zeros(shape[-1])) for shape in shapes]

    def __call__(self, images):
        kernel, first, second = self.weights
        x = tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME") + self.biases[0])
        x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "SAME"), (-1, 16 * 32))
        return tf.nn.relu(x @ first + self.biases[1]) @ second + self.biases[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    args = parser.parse_args()

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    train_x, train_y, test_x, test_y = digits()
    network = Network(seed=hvd.rank())  # the ranks start differently; the broadcast makes them alike
    variables = [*network.weights, *network.biases]
    velocities = [tf.Variable(tf.zeros_like(variable)) for variable in variables]
    hvd.broadcast_variables([*variables, *velocities], root_rank=0)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = network(images)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape)  # its gradients are averaged over the ranks
        for variable, velocity, gradient in zip(
            variables, velocities, tape.gradient(loss, variables), strict=True
        ):
            velocity.assign(0.9 * velocity + gradient)
            variable.assign_sub(args.learning_rate * velocity)
        return hvd.allreduce(loss, name="loss")

    chance = np.random.default_rng(0)  # the same order on every rank
    for epoch in range(1, args.epochs + 1):
        order = chance.permutation(len(train_x))
        starts = range(0, len(order) - args.global_batch_size + 1, args.global_batch_size)
        for start in tqdm(starts, desc=f"epoch {epoch}", leave=False, disable=hvd.rank() != 0):
            mine = order[start + hvd.rank() : start + args.global_batch_size : hvd.size()]
            loss = train_step(train_x[mine], train_y[mine])
        part = slice(hvd.rank(), None, hvd.size())
        right = tf.reduce_sum(tf.cast(tf.argmax(network(test_x[part]), 1) == test_y[part], tf.float32))
        accuracy = float(hvd.allreduce(right, op=hvd.Sum, name="right")) / len(test_x)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {float(loss):.5f}, test accuracy {accuracy:.2%}", flush=True)

    bits = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in variables)).hexdigest()
    results = hvd.allgather_object((bits, float(loss), accuracy))
    if len(set(results)) != 1:
        raise SystemExit(f"the ranks ended differently: {results}")
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, identical parameters ({bits[:12]}) and metrics")
        if accuracy < 0.96:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below 96 %")


if __name__ == "__main__":
    main()
