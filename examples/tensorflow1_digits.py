"""A script in the style of TensorFlow 1: a graph, an optimizer, MonitoredTrainingSession; on scikit-learn's digits.

One process with twice the batch and the learning rate and half of the steps does what two ranks do.

horoclonerun -np 2 python examples/tensorflow1_digits.py
mpirun -n 2 python examples/tensorflow1_digits.py
python examples/tensorflow1_digits.py
"""

import argparse
import tempfile

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horoclone.tensorflow as hvd

try:
    from tqdm import tqdm
except ImportError:  # a plain loop does as well

    def tqdm(steps, **_):
        return steps


v1 = tf.compat.v1
v1.disable_eager_execution()


def network(images):
    """Logits of a small network with two hidden layers."""
    layer, width = images, 64
    for number, size in enumerate((128, 64, 10)):
        deviation = (2.0 / width) ** 0.5
        start = tf.random.truncated_normal((width, size), stddev=deviation)
        weights = v1.get_variable(f"weights_{number}", initializer=start)
        bias = v1.get_variable(f"bias_{number}", initializer=tf.zeros((size,)))
        layer, width = tf.matmul(layer, weights) + bias, size
        if size != 10:
            layer = tf.nn.relu(layer)
    return layer


def plain_run(session, tensor, feed):
    """The tensor's value, with no hook of the session called."""
    return session.run_step_fn(lambda step_context: step_context.session.run(tensor, feed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="divided by the number of ranks")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="times the number of ranks")
    parser.add_argument("--checkpoints", help="folder to write to (default: a new temporary one)")
    args = parser.parse_args()

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x = (x.astype(np.float32) for x in parts[:2])
    train_y, test_y = (y.astype(np.int32) for y in parts[2:])

    v1.set_random_seed(hvd.rank())  # the ranks start differently; the hook makes them alike
    image, label = v1.placeholder(tf.float32, (None, 64)), v1.placeholder(tf.int32, (None,))
    logits = network(image)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
    correct = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1, tf.int32), label), tf.float32))

    # Scale the learning rate, wrap the optimizer, start from rank 0's variables, divide the steps, let rank 0 save.
    optimizer = hvd.DistributedOptimizer(v1.train.AdagradOptimizer(args.learning_rate * hvd.size()))
    step = v1.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)
    last_step = args.steps // hvd.size()
    hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=last_step)]
    folder = (args.checkpoints or tempfile.mkdtemp(prefix="digits-")) if hvd.rank() == 0 else None
    all_correct = hvd.allreduce(correct, op=hvd.Sum, name="correct")
    mean_loss = hvd.allreduce(loss, name="mean_loss")

    chance = np.random.default_rng(0)  # the same on every rank, so that each can take its own part
    with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
        for number in tqdm(range(last_step), desc="training", disable=hvd.rank() != 0):
            everybody = chance.integers(0, len(train_x), args.batch_size * hvd.size())
            batch = everybody[hvd.rank() :: hvd.size()]
            feed = {image: train_x[batch], label: train_y[batch]}
            if number == last_step - 1:  # the session ends with the last step: test before it
                part = slice(hvd.rank(), None, hvd.size())
                tested = plain_run(session, all_correct, {image: test_x[part], label: test_y[part]})
                final_loss = plain_run(session, mean_loss, feed)
            session.run(train, feed)

    accuracy = float(tested) / len(test_x)
    results = hvd.allgather_object((accuracy, float(final_loss)))
    if len(set(results)) != 1:
        raise SystemExit(f"the ranks ended with different metrics: {results}")
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, identical metrics: loss {final_loss:.5f}, test accuracy {accuracy:.2%}")
        print(f"checkpoint: {tf.train.latest_checkpoint(folder)}")
        if accuracy < 0.95:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below 95 %")


if __name__ == "__main__":
    main()
