"""A rank leaves or dies: the others hear it as tf.errors.UnknownError, and go on after a new init where they can."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


def sum_of_all(x: Any) -> Any:
    return hvd.allreduce(x, op=hvd.Sum)


@ranks(2)
def test_graphs_outlive_a_rank_that_left_and_a_new_init() -> None:
    me, total = hvd.rank(), tf.function(sum_of_all)
    assert float(total(tf.constant(1.0))) == 2.0
    if me == 1:
        hvd.shutdown()
    else:
        for run in (total, hvd.allreduce):
            with pytest.raises(tf.errors.UnknownError, match="rank 1"):
                run(tf.constant(1.0))
        with tf.Graph().as_default():
            number = tf.compat.v1.placeholder(tf.float32, ())
            reduced = hvd.allreduce(number)
            with (
                tf.compat.v1.train.MonitoredTrainingSession() as session,
                pytest.raises(tf.errors.UnknownError, match="rank 1"),
            ):
                session.run(reduced, {number: 1.0})  # it does not start over and over again
        hvd.shutdown()
    hvd.init()
    assert hvd.rank() == me and float(total(tf.constant(2.0))) == 4.0


@ranks(2, dies=(1,))
def test_a_rank_that_dies_is_named_while_its_peer_waits() -> None:
    total = tf.function(sum_of_all)
    gradients = tf.Variable(tf.ones((1000,)))
    assert float(total(gradients)[0]) == 2.0
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(tf.errors.UnknownError, match="rank 1"):
        total(gradients)
    assert float(tf.reduce_sum(gradients)) == 1000.0, "TensorFlow itself goes on"
    hvd.shutdown()
    with pytest.raises(tf.errors.FailedPreconditionError, match="has not been initialized"):
        total(gradients)
