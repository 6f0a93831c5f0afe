"""Second derivatives through the operations and SyncBatchNormalization, against the same computed in one process."""

from __future__ import annotations

import numpy as np
from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


def second(call, x):
    """Of sum((d sum(call(x)^3) / dx)^2), eagerly and in a function."""

    def compute(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                value = tf.reduce_sum(call(x) ** 3)
            penalty = tf.reduce_sum(inner.gradient(value, x) ** 2)
        return outer.gradient(penalty, x)

    found = compute(tf.constant(x)).numpy()
    assert np.allclose(found, tf.function(compute)(tf.constant(x)).numpy())
    return found


@ranks(2)
def test_they_are_those_of_one_process() -> None:
    size, rank = hvd.size(), hvd.rank()
    xs = [np.random.RandomState(r).randn(4, 2) for r in range(size)]
    x, total, whole = xs[rank], sum(xs), np.concatenate(xs)
    # With y = A x and the gradient f A^T g, where f is Horovod's factor: f A^T (6 y * 2 f^2 A A^T 3 y^2).
    assert np.allclose(second(lambda x: hvd.allreduce(x, op=hvd.Sum), x), 2 * 3 * 6 * size**3 * total**3)
    mine = whole[4 * rank : 4 * rank + 4]
    assert np.allclose(second(hvd.allgather, x), 2 * 3 * 6 * mine**3 / size)  # f = 1 / size
    shared = [total, total / size]
    for op, y in zip((hvd.Sum, hvd.Average), shared, strict=True):
        gain = 1.0 if op == hvd.Sum else 1 / size  # A A^T = size * gain^2, f = size
        wanted = 2 * 3 * 6 * size**3 * gain * size * gain**2 * y**3
        for call in (hvd.reducescatter, lambda x, op: hvd.grouped_reducescatter([x, x], op=op)[0]):
            assert np.allclose(second(lambda x, c=call, op=op: c(x, op=op), x), wanted), op
    wanted = 2 * 3 * 6 * xs[1] ** 3 / size * (rank == 1)
    assert np.allclose(second(lambda x: hvd.broadcast(x, 1), x), wanted)


@ranks(2)
def test_a_penalty_on_the_gradient_through_sync_batch_normalization() -> None:
    xs = [np.random.RandomState(r).randn(4 + r, 3) for r in range(hvd.size())]
    kinds = (hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization)
    layers = [kind(dtype="float64") for kind in kinds]
    found = second(lambda x: layers[0](x, training=True) + 0.5, xs[hvd.rank()])
    wanted = second(lambda x: layers[1](x, training=True) + 0.5, np.concatenate(xs))
    first = sum(len(x) for x in xs[: hvd.rank()])
    assert np.allclose(found, wanted[first : first + len(found)], rtol=1e-6, atol=1e-6)
