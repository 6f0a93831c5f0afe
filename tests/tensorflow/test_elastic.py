"""hvd.elastic of TensorFlow: variables and Keras models, and lost collectives in graphs."""

from __future__ import annotations

import os
from typing import Any

import pytest
from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")
elastic = later("horoclone.tensorflow.elastic")


@ranks(2)
def test_variables_are_restored_and_synchronised() -> None:
    weight, count = tf.Variable([1.0 + hvd.rank()] * 3), tf.Variable(hvd.rank(), dtype=tf.int64)
    state = hvd.elastic.TensorFlowState([weight, count], epoch=hvd.rank())
    state.sync()
    assert weight.numpy().tolist() == [1.0] * 3 and count.numpy() == 0 and state.epoch == 0
    weight.assign([5.0] * 3)
    state.restore()
    assert weight.numpy().tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="pass the list of variables"):
        hvd.elastic.TensorFlowState()


@ranks(2)
def test_variables_of_a_session_too() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("w", initializer=float(hvd.rank() + 1), use_resource=True)
        session.run(tf.compat.v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, epoch=0)
        state.sync()
        assert session.run(weight) == 1.0
        weight.load(4.0, session)
        state.restore()
        assert session.run(weight) == 1.0
        state.session = None
        state.save()  # the default session


@ranks(2)
def test_variables_and_modules_beside_them_stay_the_same() -> None:
    """A compiled function refers to them."""

    class Rate(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = tf.Variable(1.0 + hvd.rank())

    weight, count, rate = tf.Variable([1.0]), tf.Variable(float(hvd.rank())), Rate()

    class Decay:
        def __init__(self) -> None:
            self.weight, self.rate, self.steps = weight, rate, 0

    decay = Decay()
    state = hvd.elastic.TensorFlowState([weight], count=count, rates=[rate], decay=decay)
    state.sync()
    assert count.numpy() == 0 and rate.value.numpy() == 1

    @tf.function
    def step() -> Any:
        count.assign_add(1.0)
        rate.value.assign(rate.value * 0.5)
        return rate.value

    step()
    decay.steps += 1
    state.commit()
    step()
    decay.steps += 1
    state.restore()
    assert (count.numpy(), rate.value.numpy(), decay.steps) == (1, 0.5, 1)
    assert state.count is count and state.rates == [rate] and state.decay is decay and decay.weight is weight
    assert step().numpy() == 0.25


@ranks(2)
def test_a_keras_model_and_its_optimizer() -> None:
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    state.sync()
    kept = model.get_weights()
    optimizer.apply([tf.ones_like(v.value) for v in model.trainable_variables], model.trainable_variables)
    assert int(optimizer.iterations.numpy()) == 1 and model.get_weights()[1] != kept[1]
    state.restore()
    assert int(optimizer.iterations.numpy()) == 0 and (model.get_weights()[0] == kept[0]).all()


@ranks(1)
def test_only_our_ops_unknown_errors_are_lost_collectives() -> None:
    ours = tf.errors.UnknownError(None, None, "rank 1 is gone [Op:HorovodGroupedReducescatter]")
    assert isinstance(elastic.horovod_error_of(ours), hvd.HorovodInternalError)
    for other in (
        tf.errors.UnknownError(None, None, "disk"),
        tf.errors.AbortedError(None, None, "HorovodAllreduce"),
    ):
        assert elastic.horovod_error_of(other) is None
    wrong = hvd.mpi_ops.WrongReduction(None, None, "HorovodAllreduce: no such reduction")
    assert elastic.horovod_error_of(wrong) is None


def survives() -> str:
    weight = tf.Variable(1.0)
    state = hvd.elastic.TensorFlowState([weight], steps=0)
    seen = []

    @tf.function
    def step() -> Any:
        return weight.assign_add(hvd.allreduce(tf.constant(1.0)))

    def train(state: Any) -> int:
        while state.steps < 6:
            if hvd.rank() == 1 and state.steps == 3:
                os._exit(3)
            step()
            state.steps += 1
            state.commit()
        return hvd.size()

    def alone() -> None:
        seen.append(1)
        hvd.shutdown()
        hvd.init(comm=[0])

    from horoclone.elastic.run import run_fn
    from horoclone.elastic.variables import converting

    assert run_fn(converting(train, elastic.horovod_error_of), alone)(state) == 1
    assert len(seen) == 1 and weight.numpy() == 7.0
    return "done"


def test_a_survivor_goes_on_after_a_loss_in_a_graph(worlds: Any) -> None:
    assert worlds.run(2, survives, dies=[1])[0] == "done"
