"""Elastic training with JAX and Optax: the pytrees of the state are committed, restored, and given to ranks that come.

horoclonerun -np 2 python examples/jax_elastic.py
horoclonerun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python examples/jax_elastic.py
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import horoclone.jax as hvd


def logits(params: dict[str, jax.Array], points: jax.Array) -> jax.Array:
    return jax.nn.relu(points @ params["in"] + params["bias"]) @ params["out"] + params["shift"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    hvd.init()
    points = np.random.default_rng(1).normal(size=(1024, 2)).astype("float32")
    labels = (np.square(points).sum(1) > 1.4).astype("int32")
    keys = jax.random.split(jax.random.key(0))
    params = {"in": jax.random.normal(keys[0], (2, 32)), "out": 0.1 * jax.random.normal(keys[1], (32, 2))}
    params |= {"bias": jnp.zeros(32), "shift": jnp.zeros(2)}
    optimizer = hvd.DistributedOptimizer(optax.adam(0.02))
    sampler = hvd.elastic.ElasticSampler(points, seed=3)
    state = hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), sampler=sampler, epoch=0)
    state.register_reset_callbacks(
        [lambda: print(f"generation {hvd.elastic.generation().number}: {hvd.size()} ranks", flush=True)]
    )

    def loss_of(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    @hvd.elastic.run
    def train(state: hvd.elastic.JaxState) -> None:
        @jax.jit
        def step(params, opt_state, x, y):  # compiled in each generation: it holds the number of ranks
            loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        while state.epoch < args.epochs:
            mine = np.array(list(sampler))
            for index in range(0, len(mine), args.batch_size):
                batch = mine[index : index + args.batch_size]
                x, y = jnp.asarray(points[batch]), jnp.asarray(labels[batch])
                state.params, state.opt_state, loss = step(state.params, state.opt_state, x, y)
                sampler.record_batch(index, len(batch))
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {float(loss):.4f}, {hvd.size()} ranks", flush=True)

    train(state)
    if hvd.rank() == 0:
        right = jnp.argmax(logits(state.params, jnp.asarray(points)), 1) == labels
        print(f"accuracy {float(right.mean()):.2%}", flush=True)


if __name__ == "__main__":
    main()
