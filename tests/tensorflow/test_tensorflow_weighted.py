"""Weighted means of TensorFlow's tensors and of a tape's gradients, eagerly and in graphs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from world import ranks

tf = pytest.importorskip("tensorflow")
import horoclone.tensorflow as hvd  # noqa: E402

WEIGHTS = [(3, 5, 2), (1000003, 1, 0), (0.1, 0.7, 0.25)]


def _error(call: Any, kind: type[Exception] = tf.errors.InvalidArgumentError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@ranks(2, 3)
def test_the_mean_is_numpys_to_an_ulp() -> None:
    graph = tf.function(
        lambda x, w: [hvd.allreduce(x, weight=w), *hvd.grouped_allreduce([x, x[0]], weight=w)]
    )
    for seed, weights in enumerate(WEIGHTS):
        random = np.random.default_rng(seed)
        parts = [random.standard_normal((3, 4)) for _ in range(hvd.size())]
        total = math.fsum(weights[: hvd.size()])
        wanted = sum(w * x for w, x in zip(weights, parts, strict=False)) / total
        x, own = tf.constant(parts[hvd.rank()]), weights[hvd.rank()]
        found = [
            hvd.allreduce(x, name="x", weight=own),
            hvd.allreduce(x, weight=tf.constant(own, tf.float64)),
            hvd.allreduce(x, weight=tf.Variable(own, dtype=tf.float64)),
            hvd.grouped_allreduce([x, x[0]], name="g", weight=own)[0],
            *graph(x, tf.constant(own, tf.float64)),
        ]
        for mean in found:
            like = wanted if mean.shape.rank == 2 else wanted[0]
            assert mean.dtype == tf.float64
            assert np.all(np.abs(mean.numpy() - like) <= np.spacing(np.maximum(np.abs(like), 1.0)))


@ranks(2, 3)
def test_narrow_dtypes_do_not_round_the_weights() -> None:
    weights = (1000003.0, 999.0, 17.0)[: hvd.size()]
    wanted = sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)
    graph = tf.function(lambda x, w: hvd.allreduce(x, name="x", weight=w))
    for dtype in tf.float32, tf.bfloat16, tf.float16:
        x = tf.fill([3], tf.cast(hvd.rank() + 1, dtype))
        for call in (lambda x, w: hvd.allreduce(x, weight=w)), graph:
            found = call(x, tf.constant(weights[hvd.rank()]))
            assert found.dtype == dtype
            assert np.array_equal(
                found.numpy(), tf.cast(tf.fill([3], tf.constant(wanted, tf.float64)), dtype).numpy()
            )


@ranks(2, 3)
def test_wrong_weights_are_named_on_every_rank_and_the_runtime_goes_on() -> None:
    x = tf.ones(3)
    graph = tf.function(lambda w: hvd.allreduce(x, name="loss", weight=w))
    for call in (lambda w: hvd.allreduce(x, name="loss", weight=w)), graph:
        for value, why in (math.nan, "not a number"), (math.inf, "infinite"), (-2.0, "negative"):
            text = _error(lambda v=value, c=call: c(tf.constant(v if hvd.rank() == 1 else 1.0)))
            assert "allreduce 'loss': rank 1 gave the weight" in text and why in text
        assert "all ranks gave the weight 0" in _error(lambda c=call: c(tf.constant(0.0)))
        assert call(tf.constant(hvd.rank() + 1.0))[0].numpy() == 1
    for more in {"op": hvd.Sum}, {"prescale_factor": 2.0}, {"compression": hvd.Compression.fp16}:
        with pytest.raises(ValueError, match="weight="):
            hvd.allreduce(x, weight=1, **more)
    with pytest.raises(ValueError, match="floating-point"):
        hvd.allreduce(tf.ones(3, tf.int32), weight=1)
    for wrong in "3", [1], tf.ones(1), True:
        with pytest.raises(TypeError, match="weight"):
            hvd.allreduce(x, weight=wrong)
    with pytest.raises(NotImplementedError, match="weight="):
        hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2])), weight=1)


@ranks(2)
def test_a_weight_on_one_rank_only_is_a_mismatch() -> None:
    x = tf.ones(3)
    more = {"weight": 2.0} if hvd.rank() else {}
    for name in "x", None:
        for call in (
            lambda n=name: hvd.allreduce(x, name=n, **more),
            lambda n=name: tf.function(lambda y: hvd.allreduce(y, name=n, **more))(x),
        ):
            assert "give weight= where the others do" in _error(call, tf.errors.FailedPreconditionError)
    assert hvd.allreduce(x, name="x")[0].numpy() == 1


@ranks(2)
def test_a_rank_without_samples_has_no_part_and_the_gradient_is_its_share() -> None:
    x = tf.fill([2], math.nan if hvd.rank() else 5.0)
    graph = tf.function(lambda weight: hvd.allreduce(x, weight=weight))
    for found in hvd.allreduce(x, weight=1 - hvd.rank()), graph(tf.constant(1 - hvd.rank())):
        assert found.numpy().tolist() == [5.0, 5.0]
    variable = tf.Variable([1.0, 1.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(hvd.allreduce(variable, weight=1.0 + 2 * hvd.rank())) * (hvd.rank() + 1.0)
    assert np.allclose(tape.gradient(y, variable), 3 * (1 + 2 * hvd.rank()) / 4)


@ranks(3, limit_s=180)
def test_the_mean_is_over_those_who_have_not_joined() -> None:
    """As one process has it on the batches of those who took part, also where a weight is wrong in between."""
    shapes = [tf.TensorSpec([None, 5], tf.float64), tf.TensorSpec([None, 1], tf.float64), tf.TensorSpec([])]
    for compiled in False, True:
        random = np.random.default_rng(1)
        start = [random.standard_normal((5, 7)), random.standard_normal((7, 1))]
        ours, alone = [tf.Variable(v) for v in start], [tf.Variable(v) for v in start]

        def loss(p: Any, x: Any, y: Any) -> Any:
            return tf.reduce_mean((tf.tanh(x @ p[0]) @ p[1] - y) ** 2)

        def gradients(x: Any, y: Any, weight: Any, ours: Any = ours) -> Any:
            with tf.GradientTape() as tape:
                value = loss(ours, x, y)
            return hvd.DistributedGradientTape(tape, weight=weight).gradient(value, ours)

        call = tf.function(gradients, input_signature=shapes) if compiled else gradients
        for i in range(4):
            there = range(3 if i < 2 else 2)
            counts = [0 if (i, r) == (1, 1) else 2 + r for r in there]  # NaN is the loss of no samples
            parts = [(random.standard_normal((n, 5)), random.standard_normal((n, 1))) for n in counts]
            if hvd.rank() in there:
                mine = [tf.constant(one) for one in parts[hvd.rank()]]
                if i == 3:
                    for wrong, why in (
                        ((-1.0, 1.0), "rank 0 gave the weight -1"),
                        ((0.0, 0.0), "all ranks gave"),
                    ):
                        own = tf.constant(wrong[hvd.rank()])
                        text = _error(partial(call, *mine, own), tf.errors.InvalidArgumentError)
                        assert why in text
                found = call(*mine, tf.constant(float(len(mine[0]))))
                for variable, gradient in zip(ours, found, strict=True):
                    variable.assign_sub(0.05 * gradient)
            whole = [tf.constant(np.concatenate(both)) for both in zip(*parts, strict=True)]
            with tf.GradientTape() as tape:
                value = loss(alone, *whole)
            for variable, gradient in zip(alone, tape.gradient(value, alone), strict=True):
                variable.assign_sub(0.05 * gradient)
        if hvd.rank() < 2:
            for one, like in zip(ours, alone, strict=True):
                assert np.allclose(one, like, rtol=1e-13, atol=1e-14)
            x = tf.constant([hvd.rank() + 1.0], tf.float64)
            pair = hvd.grouped_allreduce([x, tf.cast(2 * x, tf.bfloat16)], weight=1 + 2 * hvd.rank())
            assert [float(one[0]) for one in pair] == [7 / 4, 7 / 2]
        hvd.join()
        if hvd.rank() < 2:
            assert float(hvd.allreduce(x)[0]) == 1  # without a weight, all of them count
        hvd.join()


@ranks(2)
def test_a_tape_says_what_weights_do_not_work_with() -> None:
    for options in {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}:
        with pytest.raises(ValueError, match="weight="):
            hvd.DistributedGradientTape(tf.GradientTape(), weight=1, **options)
    variable = tf.Variable([[1.0], [2.0]])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.gather(variable, [0]))
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        hvd.DistributedGradientTape(tape, weight=1).gradient(y, [variable])
