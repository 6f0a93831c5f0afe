"""Second derivatives through every operation, forward and backward, against the same computed in one process."""

from __future__ import annotations

import numpy as np
from world import later, ranks

jax = later("jax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


def cut(whole, size):
    return jnp.split(whole, size)


def exchanged(xs, size):
    parts = [cut(x, size) for x in xs]
    return [jnp.concatenate([part[to] for part in parts]) for to in range(size)]


# Name -> call on one rank's array, the same on everybody's, factor of the gradient.
CASES = {
    "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs, n: [sum(xs)] * n, lambda n: 1),
    "allgather": (lambda x: hvd.allgather(x), lambda xs, n: [jnp.concatenate(xs)] * n, lambda n: 1 / n),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda xs, n: [xs[1]] * n, lambda n: 1 / n),
    "reducescatter": (lambda x: hvd.reducescatter(x), lambda xs, n: cut(sum(xs) / n, n), lambda n: n),
    "reducescatter sum": (
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0), lambda xs, n: cut(2 * sum(xs), n), lambda n: n,
    ),
    "alltoall": (lambda x: hvd.alltoall(x), exchanged, lambda n: 1),
}  # fmt: skip


@ranks(2)
def test_they_are_those_of_one_process() -> None:
    size, rank = hvd.size(), hvd.rank()
    xs = [jnp.asarray(np.random.RandomState(r).randn(6, 2), jnp.float32) for r in range(size)]
    for name, (call, everybody, factor) in CASES.items():

        def first(x, call=call):
            return jax.grad(lambda x: (call(x) ** 3).sum())(x)

        def backward(grads, everybody=everybody, factor=factor):
            (found,) = jax.vjp(lambda xs: everybody(xs, size), xs)[1](list(grads))
            return [factor(size) * g for g in found]

        ys = everybody(xs, size)
        by_y = [3 * y**2 for y in ys]
        to_points = jax.grad(lambda points, b=backward: sum((g**2).sum() for g in b(points)))(by_y)
        expected = backward([6 * y * v for y, v in zip(ys, to_points, strict=True)])[rank]
        assert np.allclose(first(xs[rank]), backward(by_y)[rank], rtol=1e-3, atol=1e-3), name
        second = jax.grad(lambda x, f=first: (f(x) ** 2).sum())(xs[rank])
        assert np.allclose(second, expected, rtol=1e-3, atol=1e-2), (name, second, expected)
        # Forward over reverse: every rank pushes its own tangent, and the sums over the ranks agree with the above.
        along = jax.jvp(lambda x, f=first: (f(x) ** 2).sum(), (xs[rank],), (jnp.ones_like(xs[rank]),))[1]
        totals = [float(hvd.allreduce(v, op=hvd.Sum)) for v in (along, second.sum() / factor(size))]
        assert np.isclose(*totals, rtol=1e-3, atol=1e-2), (name, totals)
