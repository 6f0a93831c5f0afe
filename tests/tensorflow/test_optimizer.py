"""DistributedOptimizer around optimizers of TensorFlow 1: in sessions, over several passes, with Adasum, eagerly."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")

v1 = later("tensorflow.compat.v1")


START = np.array([1.0, -2.0, 3.0], np.float32)


def goal(rank: int) -> np.ndarray:
    return np.array([rank, 2.0 * rank, 1.0], np.float32)


def slope(weights: np.ndarray, rank: int) -> np.ndarray:
    """Of sum((w - goal)^2)."""
    return 2 * (weights - goal(rank))


def trained(session_steps: int, wrap: Any, start: np.ndarray = START) -> list[np.ndarray]:
    """The weights after each step of a TensorFlow 1 training loop."""
    history = []
    with tf.Graph().as_default():
        weights = v1.get_variable("weights", initializer=start + hvd.rank(), use_resource=True)
        loss = tf.reduce_sum(tf.square(weights - goal(hvd.rank())))
        step = v1.train.get_or_create_global_step()
        train = wrap(v1.train.GradientDescentOptimizer(0.1)).minimize(loss, global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for expected_step in range(1, session_steps + 1):
                session.run(train)
                history.append(session.run(weights))
                assert session.run(step) == expected_step
    return history


@ranks(3)
def test_gradients_are_averaged_before_they_are_applied() -> None:
    n, w = hvd.size(), START.copy()
    for got in trained(3, hvd.DistributedOptimizer):
        w = w - 0.1 * sum(slope(w, r) for r in range(n)) / n
        assert np.allclose(got, w, rtol=1e-6)


@ranks(2)
def test_several_passes_make_one_step() -> None:
    for average in (False, True):
        w = START.copy()
        history = trained(
            6,
            lambda opt, average=average: hvd.DistributedOptimizer(
                opt, backward_passes_per_step=3, average_aggregated_gradients=average
            ),
        )
        for i, got in enumerate(history):
            if i % 3 == 2:
                mean = sum(slope(w, r) for r in range(2)) / 2
                w = w - 0.1 * mean * (1 if average else 3)
            assert np.allclose(got, w, rtol=1e-5), (i, average)


@ranks(2)
def test_adasum_reduces_the_steps() -> None:
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
        return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b

    w = START.copy()
    for got in trained(3, lambda opt: hvd.DistributedOptimizer(opt, op=hvd.Adasum)):
        w = w + combined(-0.1 * slope(w, 0), -0.1 * slope(w, 1))
        assert np.allclose(got, w, rtol=1e-5)


@ranks(2)
def test_local_variables_slots_and_eager_mode() -> None:
    shared, own = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.9))
    optimizer.register_local_var(own)

    def loss() -> Any:
        return tf.reduce_sum((shared + own) * (hvd.rank() + 1.0))

    optimizer.minimize(loss, var_list=[shared, own])
    assert shared.numpy()[0] == 1.0 - 1.5 and own.numpy()[0] == 1.0 - (hvd.rank() + 1) / 2
    assert optimizer.get_slot_names() == ["momentum"] and optimizer.get_slot(shared, "momentum") is not None
    assert isinstance(optimizer, v1.train.Optimizer) and len(optimizer.variables()) >= 2
    assert optimizer.get_name() == "DistributedMomentumOptimizer"


@ranks(2)
def test_sparse_gradients() -> None:
    for options in ({}, {"sparse_as_dense": True}, {"sparse_as_dense": True, "backward_passes_per_step": 1}):
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_variable("table", initializer=np.zeros((4, 2), np.float32), use_resource=True)
            rows = tf.nn.embedding_lookup(table, [hvd.rank(), 3])
            train = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), **options).minimize(
                tf.reduce_sum(rows)
            )
            session.run(v1.global_variables_initializer())
            session.run(train)
            assert session.run(table).tolist() == [[-0.5, -0.5], [-0.5, -0.5], [0.0, 0.0], [-1.0, -1.0]]
    with tf.Graph().as_default(), pytest.raises(ValueError, match="IndexedSlices are not supported"):
        table = v1.get_variable("table", initializer=np.zeros((4, 2), np.float32), use_resource=True)
        rows = tf.nn.embedding_lookup(table, [0])
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2).minimize(
            tf.reduce_sum(rows)
        )


@ranks(2)
def test_a_checkpoint_of_rank_0_is_where_every_rank_goes_on(tmp_path_factory_base: str) -> None:
    folder = tmp_path_factory_base if hvd.rank() == 0 else None

    def run(last_step: int) -> tuple[int, np.ndarray]:
        with tf.Graph().as_default():
            weights = v1.get_variable("weights", initializer=START + hvd.rank(), use_resource=True)
            loss = tf.reduce_sum(tf.square(weights - goal(hvd.rank())))
            step = v1.train.get_or_create_global_step()
            train = hvd.DistributedOptimizer(v1.train.AdagradOptimizer(0.01 * hvd.size())).minimize(
                loss, global_step=step
            )
            with tf.control_dependencies([train]):
                after = weights.read_value()
            hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=last_step)]
            with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
                first, value = session.run([step, weights])
                while not session.should_stop():
                    value = session.run(after)
            return int(first), value

    assert run(3)[0] == 0
    first, value = run(6)
    assert first == 3, "rank 0 has read its checkpoint, and the others got it from rank 0"
    everybody = hvd.allgather(tf.constant(value[None])).numpy()
    assert np.array_equal(everybody[0], everybody[1])
    if hvd.rank() == 0:
        assert "checkpoint" in os.listdir(folder)


@pytest.fixture
def tmp_path_factory_base(tmp_path: Any) -> str:
    return str(tmp_path)
