"""Data-parallel training with JAX and Optax on scikit-learn's scanned digits.

Runs alike under any launcher, and alone; the batch of all ranks together is the same, so are the results:
    horoclonerun -np 2 python examples/jax_optax_digits.py
    mpirun -n 2 python examples/jax_optax_digits.py
    python examples/jax_optax_digits.py
"""

import argparse
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horoclone.jax as hvd

try:
    from tqdm import tqdm
except ImportError:  # a plain loop does as well

    def tqdm(batches, **_):
        return batches


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def network(key) -> dict:
    """Weights of two hidden layers for 64 pixels and 10 digits."""
    sizes = [64, 128, 64, 10]
    keys = jax.random.split(key, len(sizes) - 1)
    return {
        f"layer{i}": {"w": jax.random.normal(k, (a, b)) * np.sqrt(2 / a), "b": jnp.zeros(b)}
        for i, (k, a, b) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True))
    }


def logits(weights: dict, images):
    for i in range(len(weights)):
        layer = weights[f"layer{i}"]
        images = images @ layer["w"] + layer["b"]
        if i + 1 < len(weights):
            images = jax.nn.relu(images)
    return images


def loss_of(weights: dict, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, images), labels).mean()


def main() -> None:
    args = arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if args.batch_size % size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {size} ranks")
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x = (jnp.asarray(x, jnp.float32) for x in parts[:2])
    train_y, test_y = (jnp.asarray(y) for y in parts[2:])

    steps = len(train_x) // args.batch_size
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.epochs * steps)
    optimizer = hvd.DistributedOptimizer(optax.adam(schedule))
    weights = hvd.broadcast_parameters(network(jax.random.key(args.seed + rank)), root_rank=0)
    state = optimizer.init(weights)

    @jax.jit
    def train_step(weights, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(weights, images, labels)
        # Reduces over the ranks: one call, inside jit
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, loss

    @jax.jit
    def test_step(weights):
        """Every rank tests its own share; the sums are added up."""
        mine = slice(rank, None, size)
        scores = logits(weights, test_x[mine])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, test_y[mine])
        right = scores.argmax(axis=1) == test_y[mine]
        sums = {"loss": losses.sum(), "right": right.sum(), "all": jnp.array(len(right))}
        sums = hvd.allreduce(sums, op=hvd.Sum, name="test")
        return sums["loss"] / sums["all"], sums["right"] / sums["all"]

    share = args.batch_size // size
    chance = np.random.default_rng(args.seed)  # the same shuffle on every rank
    for epoch in range(1, args.epochs + 1):
        order = chance.permutation(len(train_x))[: steps * args.batch_size].reshape(steps, size, share)
        for batch in tqdm(order[:, rank], desc=f"epoch {epoch}", leave=False, disable=rank != 0):
            weights, state, loss = train_step(weights, state, train_x[batch], train_y[batch])
        if rank == 0 and epoch % 5 == 0:
            print(f"epoch {epoch}: loss of this rank's last batch {loss:.4f}", flush=True)

    test_loss, accuracy = (float(x) for x in test_step(weights))
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(weights))
    digests = hvd.allgather_object(hashlib.sha256(bits).hexdigest())
    metrics = hvd.allgather_object((test_loss, accuracy))
    if len(set(digests)) != 1 or len(set(metrics)) != 1:
        raise SystemExit(f"the ranks ended differently: {digests}, {metrics}")
    if rank == 0:
        print(f"{size} ranks, identical parameters ({digests[0][:12]})")
        print(f"test loss {test_loss:.4f}, accuracy {accuracy:.2%}")
        if accuracy < 0.96:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below 96 %")


if __name__ == "__main__":
    main()
