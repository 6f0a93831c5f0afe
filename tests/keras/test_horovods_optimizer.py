"""What the wrapped optimizers of tf_keras have from Horovod's class: where they reduce, what they count, their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

On = Callable[..., list[Any]]
KINDS = ["new", "legacy"]


def sgd(kind: str, rate: float = 1.0, which: str = "SGD", **options: Any) -> Any:
    import tf_keras

    module = tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy
    return getattr(module, which)(rate, **options)


def a_loss(variables: list[Any], factor: Any) -> Any:
    """Its gradient is factor for the first variable, and for the others."""
    import tensorflow as tf

    return tf.add_n([tf.reduce_sum(v) for v in variables]) * factor


# --- what the ranks run ----------------------------------------------------------------------------------------------


def reduces_where_it_computes(kind: str) -> None:
    """With Sum, so that a second reduction would show: directly, in a function, and with a tape that reduces itself."""
    import tensorflow as tf

    import horoclone.tensorflow as core
    import horoclone.tensorflow.keras as hvd

    mine = hvd.rank() + 1.0
    for function in (False, True):
        variable = tf.Variable([0.0, 0.0])
        optimizer = hvd.DistributedOptimizer(sgd(kind), op=hvd.Sum)
        getattr(optimizer, "build", lambda _: None)([variable])

        def step(variable: Any = variable, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                loss = a_loss([variable], mine)
            pairs = optimizer._compute_gradients(loss, [variable], tape=tape)
            optimizer.apply_gradients(pairs)
            return pairs[0][0]

        run = tf.function(step) if function else step
        for number in (1, 2):
            assert run().numpy().tolist() == [3.0, 3.0]
            assert variable.numpy().tolist() == [-3.0 * number] * 2
    variable = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(sgd(kind), op=hvd.Sum)
    with tf.GradientTape() as tape:
        loss = variable * mine
    optimizer.minimize(loss, [variable], tape=core.DistributedGradientTape(tape, op=hvd.Sum))
    assert variable.numpy() == -3.0
    optimizer.apply_gradients([(tf.constant(mine), variable)])  # of which nobody has reduced anything
    assert variable.numpy() == -6.0
    (pair,) = optimizer._aggregate_gradients([(tf.constant(mine), variable)])
    assert float(pair[0] if isinstance(pair, tuple) else pair) == 3.0
    averaging = hvd.DistributedOptimizer(sgd(kind))
    with tf.GradientTape() as tape:
        loss = variable * mine
    averaging._compute_gradients(loss, [variable], tape=tape)  # to look at; others are applied
    averaging.apply_gradients([(tf.constant(mine), variable)])
    assert variable.numpy() == -7.5


def has_the_names(kind: str) -> None:
    import tensorflow as tf

    import horoclone.tensorflow as core
    import horoclone.tensorflow.keras as hvd

    plain, summing = (hvd.DistributedOptimizer(sgd(kind), backward_passes_per_step=n) for n in (1, 3))
    assert plain._agg_helper is None and summing._agg_helper.backward_passes_per_step == 3
    assert (
        plain.process_set is hvd.global_process_set
        and plain.scale_local_gradients
        and plain._HAS_AGGREGATE_GRAD
    )
    own = tf.Variable(0.0)
    plain.register_local_var(own)
    assert plain._local_vars == {own.ref()}
    reduced = plain._allreduce([tf.constant(hvd.rank() + 1.0), tf.constant(2.0)], [tf.Variable(0.0), own])
    assert [float(g) for g in reduced] == [1.5, 1.0]
    assert [
        float(g) for g in plain._allreduce_grads([tf.constant(1.0), None], [own, tf.Variable(0.0)])[:1]
    ] == [0.5]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v = tf.compat.v1.get_variable("v", initializer=[1.0, 2.0], use_resource=True)
        (gradient,) = hvd.DistributedOptimizer(sgd(kind)).get_gradients(a_loss([v], hvd.rank() + 1.0), [v])
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(gradient).tolist() == [1.5, 1.5]
    helper = core.LocalGradientAggregationHelper(2, lambda grads, _: [10 * g for g in grads], False, True)
    a, b = tf.Variable(0.0), tf.Variable(0.0)
    helper.register_local_var(b)
    first, second = (helper.compute_gradients([tf.constant(g), tf.constant(g)], [a, b]) for g in (1.0, 3.0))
    assert [float(g) for g in first] == [1.0, 1.0] and [float(g) for g in second] == [20.0, 2.0 / hvd.size()]
    with pytest.raises(ValueError, match="IndexedSlices"):
        helper.compute_gradients(
            [tf.IndexedSlices(tf.ones((1, 2)), [0], [2, 2])], [tf.Variable(tf.ones((2, 2)))]
        )
    from horoclone.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

    eager = LocalGradientAggregationHelperEager(2, lambda grads, _: grads, False, False)
    done: list[int] = []
    for expected in ([1.0], [2.0]):
        sums = eager.compute_gradients([tf.constant(1.0)], [a])
        assert [float(g) for g in sums] == expected
        eager.apply_gradients(lambda: done.append(1), plain, list(zip(sums, [a], strict=True)))
    assert done == [1] and int(plain.iterations) == 1


def counts_batches(kind: str, function: bool, average: bool) -> None:
    """iterations counts every batch, as Adam's correction then does; sparse, local and missing gradients."""
    import tensorflow as tf

    import horoclone.tensorflow.keras as hvd

    def start() -> list[Any]:
        return [
            tf.Variable([1.0, 2.0]),
            tf.Variable([[1.0], [2.0], [3.0]]),
            tf.Variable(1.0),
            tf.Variable(5.0),
        ]

    def loss(variables: list[Any], x: Any) -> Any:
        return (
            tf.reduce_sum(variables[0] * x)
            + tf.reduce_sum(tf.gather(variables[1], [0, 2]) * x)
            + variables[2] * x
        )

    ours, plain = start(), start()
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
    optimizer = hvd.DistributedOptimizer(sgd(kind, 0.125, "Adam"), **options)
    optimizer.register_local_var(ours[2])
    reference = sgd(kind, 0.125, "Adam")
    for one, variables in ((optimizer, ours), (reference, plain)):
        getattr(one, "build", lambda _: None)(variables[:3])

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(ours, x)
        optimizer.minimize(value, ours[:3], tape=tape)

    run = tf.function(step) if function else step
    for batch in range(1, 5):
        run(tf.constant(batch * (hvd.rank() + 1.0)))
        assert int(optimizer.iterations) == batch
        if batch % 2 == 0:
            mean, mine = [
                (2 * batch - 1) * f / (2 if average else 1) for f in (1.5, (hvd.rank() + 1.0) / hvd.size())
            ]
            reference.iterations.assign(batch - 1)
            table = tf.constant([[mean], [0.0], [mean]])
            reference.apply_gradients(
                zip([tf.fill((2,), mean), table, tf.constant(mine)], plain[:3], strict=True),
            )
        for a, b in zip(ours, plain, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5)


def skips_infinite_sums(kind: str, function: bool) -> None:
    """A LossScaleOptimizer around it, two passes: an infinity on one rank leaves that batch out on all."""
    import tensorflow as tf
    import tf_keras

    import horoclone.tensorflow.keras as hvd

    variable = tf.Variable([0.0])
    inner = hvd.DistributedOptimizer(sgd(kind), op=hvd.Sum, backward_passes_per_step=2)
    getattr(inner, "build", lambda _: None)([variable])
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)
    optimizer.iterations  # noqa: B018 - made here, not in the function

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * x)
            scaled = None if kind == "new" else optimizer.get_scaled_loss(loss)
        if kind == "new":
            optimizer.minimize(loss, [variable], tape=tape)
        else:
            gradients = tape.gradient(scaled, [variable])
            optimizer.apply_gradients(
                zip(optimizer.get_unscaled_gradients(gradients), [variable], strict=True)
            )

    run, mine = (tf.function(step) if function else step), hvd.rank() + 1.0
    for _ in range(2):
        run(tf.constant(mine))
    assert variable.numpy().tolist() == [-6.0] and float(optimizer.loss_scale) == 4.0
    for pause in (0, 1):
        for _ in range(pause):
            run(tf.constant(mine))
        run(tf.constant(np.inf if hvd.rank() == 1 else 1.0))
        assert variable.numpy().tolist() == [-6.0] and float(optimizer.loss_scale) == 2.0 - pause
    run(tf.constant(mine))
    assert variable.numpy().tolist() == [-12.0]


def trains_with_fit(kind: str, eagerly: bool) -> None:
    """model.fit with an embedding and a layer of each rank's own: the shared weights stay alike, the own ones do not."""
    import tf_keras

    import horoclone.keras as hvd

    tf_keras.utils.set_random_seed(3)
    own = tf_keras.layers.Dense(2, name="own")
    model = tf_keras.Sequential([
        tf_keras.layers.Embedding(7, 3, input_length=2), tf_keras.layers.Flatten(), own, tf_keras.layers.Dense(1),
    ])  # fmt: skip
    model.build((None, 2))
    optimizer = hvd.PartialDistributedOptimizer(
        sgd(kind, 0.01, "Adam"),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
        local_layers=own,
    )
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    chance = np.random.default_rng(hvd.rank())
    x = chance.integers(0, 7, (24, 2))
    before = [w.copy() for w in model.get_weights()]
    model.fit(x, x.sum(axis=1), batch_size=4, epochs=1, verbose=0)
    assert int(optimizer.iterations) == 6
    assert all(not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    # By position: a number in a layer's name counts the layers of that name that the process has had.
    everybody = hvd.allgather_object([v.numpy().tobytes() for v in model.trainable_variables])
    for variable, on_0, on_1 in zip(model.trainable_variables, *everybody, strict=True):
        assert (on_0 == on_1) != variable.name.startswith("own/"), variable.name


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn("kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [reduces_where_it_computes, has_the_names], ids=lambda body: body.__name__)
def test_it_is_as_horovods(on: On, kind: str, body: Any) -> None:
    on("legacy", body, kind=kind)


@pytest.mark.in_turn("kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [False, True])
def test_iterations_count_batches(on: On, kind: str, function: bool) -> None:
    for average in (False, True):
        on("legacy", counts_batches, kind=kind, function=function, average=average)


@pytest.mark.in_turn("kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [False, True])
def test_an_infinity_in_any_pass_is_everybodys(on: On, kind: str, function: bool) -> None:
    on("legacy", skips_infinite_sums, kind=kind, function=function)


@pytest.mark.in_turn("kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eagerly", [False, True])
def test_fit(on: On, kind: str, eagerly: bool) -> None:
    on("legacy", trains_with_fit, kind=kind, eagerly=eagerly)
