"""Results that are Horovod's and that one would not guess: gradients outside a process set, averages of gathered
gradients, classes of errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


def both_ways(call: Any) -> list[Any]:
    """Run eagerly and in a function."""
    return [call, tf.function(call)]


def gradient(make: Any, x: Any, weight: float) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = sum(tf.reduce_sum(y) for y in tf.nest.flatten(make(x))) * tf.cast(weight, x.dtype)
    return tape.gradient(loss, x)


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_a_rank_outside_the_process_set_keeps_its_own_gradients() -> None:
    pair, me = hvd.add_process_set([0, 2]), hvd.rank()
    table, w, local = tf.Variable(tf.ones((4, 2))), tf.Variable(tf.ones(2)), tf.Variable(1.0)

    def run() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [me]) * w) * local * (me + 1.0)
        tape = hvd.DistributedGradientTape(tape, process_set=pair)
        tape.register_local_source(local)
        return tape.gradient(loss, [table, w, local])

    for step in both_ways(run):
        rows, dense, own = step()
        assert isinstance(rows, tf.IndexedSlices)
        assert rows.indices.numpy().tolist() == ([1] if me == 1 else [0, 2])
        assert dense.numpy().tolist() == [2.0, 2.0]
        # 2 (me + 1), divided by the size of the set within it
        assert own.numpy() == (4.0 if me == 1 else (me + 1.0))
    for passes in (1, 2):
        for op in (hvd.Average, hvd.Sum):
            v = tf.Variable(0.0)
            descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            optimizer = hvd.DistributedOptimizer(
                descent, process_set=pair, op=op, backward_passes_per_step=passes
            )
            for _ in range(passes):
                optimizer.minimize(lambda v=v: v * (me + 1.0), var_list=[v])
            expected = 2.0 if me == 1 or op == hvd.Average else 4.0
            assert v.numpy() == -expected * passes
    with pytest.raises(ValueError, match="has not been registered"):
        with tf.GradientTape() as tape:
            loss = w * 1.0
        hvd.DistributedGradientTape(tape, process_set=hvd.ProcessSet([0])).gradient(loss, w)


@ranks(2)
def test_reducescatter_makes_sparse_tensors_dense() -> None:
    me = hvd.rank()
    slices = tf.IndexedSlices(tf.fill((2, 2), me + 1.0), tf.constant([me, me + 1]), tf.constant([4, 2]))
    for run in both_ways(lambda: hvd.reducescatter(slices, op=hvd.Sum)):
        assert run().numpy().tolist() == ([[1, 1], [3, 3]] if me == 0 else [[2, 2], [0, 0]])
    for run in both_ways(lambda: hvd.grouped_reducescatter([slices, tf.ones(2)], op=hvd.Sum)):
        assert [share.numpy().tolist()[0] for share in run()] == ([[1, 1], 2] if me == 0 else [[2, 2], 2])


@ranks(2)
def test_a_gather_while_a_rank_has_joined_is_an_error() -> None:
    if hvd.rank() == 0:
        with pytest.raises(tf.errors.FailedPreconditionError, match="not supported with Join"):
            hvd.allgather(tf.ones(2))
    hvd.join()


@ranks(2)
def test_the_classes_of_errors() -> None:
    """Where Horovod's scripts catch an error of the arguments; the runtime goes on."""
    errors, one, four = tf.errors, tf.constant(1.0), tf.ones(4)
    table: list[tuple[Any, Any, Any]] = [  # eagerly, in a function, the call
        (errors.FailedPreconditionError, ValueError, lambda: hvd.allgather(one)),
        (errors.FailedPreconditionError, ValueError, lambda: hvd.grouped_allgather([four, one])),
        (errors.InvalidArgumentError, ValueError, lambda: hvd.reducescatter(one)),
        (errors.InvalidArgumentError, ValueError, lambda: hvd.grouped_reducescatter([one])),
        (errors.InvalidArgumentError, ValueError, lambda: hvd.alltoall(one)),
        (
            errors.InvalidArgumentError,
            TypeError,
            lambda: hvd.alltoall(four, splits=tf.constant([2, 2], tf.int64)),
        ),
        (errors.UnknownError, errors.UnknownError, lambda: hvd.allreduce(four, op=77)),
        (ValueError, ValueError, lambda: hvd.allreduce(four, op=77)),
        (errors.UnknownError, errors.UnknownError, lambda: hvd.allreduce(tf.constant([1]), op=hvd.Adasum)),
    ]
    for eagerly, in_a_function, call in table:
        for error, run in zip((eagerly, in_a_function), both_ways(call), strict=True):
            with pytest.raises(error):
                run()
    assert hvd.alltoall(four, splits=np.array([2, 2], np.int64))[1].numpy().tolist() == [2, 2]
    assert hvd.allreduce(one, op=hvd.Sum).numpy() == 2.0
