"""DistributedGradientTape, broadcasts of variables and objects, SyncBatchNormalization: eagerly and in functions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from world import later, operations, ranks

from horoclone import tensor_names

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


def variables() -> list[Any]:
    """Three dense variables and an embedding; rank 0's start values everywhere."""
    chance = np.random.default_rng(7)
    shapes = [(4, 3), (3,), (3, 2), (6, 4)]
    return [tf.Variable(chance.normal(size=shape).astype(np.float32)) for shape in shapes]


def loss_of(weights: list[Any], rank: int) -> Any:
    """A small network on rows that differ between the ranks."""
    w, b, out, table = weights
    rows = tf.nn.embedding_lookup(table, [rank % 6, (rank + 1) % 6, 5])
    return tf.reduce_sum(tf.square(tf.tanh(rows @ w + b) @ out)) * (rank + 1.0)


def own_gradients(rank: int) -> list[np.ndarray]:
    weights = variables()
    with tf.GradientTape() as tape:
        loss = loss_of(weights, rank)
    return [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, weights)]


def distributed(weights: list[Any], graph: bool, local: Any = None, **options: Any) -> list[Any]:
    def run() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(weights, hvd.rank())
        tape = hvd.DistributedGradientTape(tape, **options)
        if local is not None:
            tape.register_local_source(local)
        assert isinstance(tape, tf.GradientTape) and type(tape).__name__ == "GradientTape"
        return tape.gradient(loss, weights)

    return (tf.function(run) if graph else run)()


@ranks(2)
def test_a_step_that_is_traced_once_takes_batches_of_any_size() -> None:
    table, weights = tf.Variable(tf.ones((6, 2))), tf.Variable(tf.ones((2, 1)))

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32)])
    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) @ weights)
        return hvd.DistributedGradientTape(tape).gradient(loss, [table, weights])

    for count in (1, 4, 0):
        rows = [count, count + 1]  # on rank 0 and on rank 1
        sparse, dense = step(tf.range(rows[hvd.rank()]))
        assert sparse.values.shape == (sum(rows), 2) and np.allclose(sparse.values.numpy(), 0.5)
        assert sparse.indices.numpy().tolist() == [*range(rows[0]), *range(rows[1])]
        assert np.allclose(dense.numpy(), sum(rows) / 2)
    assert step.experimental_get_tracing_count() == 1


@ranks(2)
def test_local_sources_and_local_layers_keep_their_own_gradient() -> None:
    n, weights, mine = hvd.size(), variables(), own_gradients(hvd.rank())
    mean = sum(own_gradients(r)[0] for r in range(n)) / n
    for graph in (False, True):
        got = distributed(weights, graph, local=weights[2])
        assert np.allclose(got[2].numpy(), mine[2] / n, rtol=1e-5, atol=1e-6)
        assert np.allclose(got[0].numpy(), mean, rtol=1e-5, atol=1e-6)
        got = distributed(weights, graph, local=weights[2], scale_local_gradients=False)
        assert np.allclose(got[2].numpy(), mine[2], rtol=1e-5, atol=1e-6)

    class Layer:
        trainable_weights = [weights[1]]

    for layers in (Layer(), [Layer()]):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, hvd.rank())
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers)
        own, shared = tape.get_local_and_global_gradients(loss, weights)
        assert np.allclose(own[0].numpy(), mine[0]) and np.allclose(
            shared[0].numpy(), mean, rtol=1e-5, atol=1e-6
        )
        assert np.allclose(shared[1].numpy(), mine[1] / n)


@ranks(2)
def test_structures_missing_gradients_and_a_tape_that_is_wrapped_before_it_records() -> None:
    a, b, unused = tf.Variable(2.0), tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = a * tf.reduce_sum(b) * (hvd.rank() + 1.0)
    got = tape.gradient(loss, {"a": a, "rest": [b, unused]})
    assert (
        got["a"].numpy() == 4.5 and got["rest"][0].numpy().tolist() == [3.0, 3.0] and got["rest"][1] is None
    )
    assert tape.gradient(loss, a).numpy() == 4.5
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(tape)


@ranks(2)
def test_contradicting_options_are_refused() -> None:
    v = tf.Variable(1.0)
    for options, error in (
        ({"op": 77}, ValueError),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError),
        ({"gradient_predivide_factor": 0.0}, ZeroDivisionError),
        ({"groups": -1}, ValueError),
        ({"groups": [v]}, ValueError),
        ({"groups": [[v], [v]]}, ValueError),
        ({"op": hvd.Adasum, "process_set": hvd.ProcessSet([0])}, NotImplementedError),
    ):
        with pytest.raises(error):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)


def pair_adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maleki et al., Scaling distributed training with adaptive summation (2020), for two ranks."""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


@ranks(2)
def test_adasum_of_gradients_is_per_tensor() -> None:
    first, second = own_gradients(0), own_gradients(1)
    for graph in (False, True):
        got = distributed(variables(), graph, op=hvd.Adasum, sparse_as_dense=True)
        for g, a, b in zip(got, first, second, strict=True):
            assert np.allclose(g.numpy(), pair_adasum(a, b), rtol=1e-4, atol=1e-5), graph
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        distributed(variables(), False, op=hvd.Adasum)


@ranks(2)
def test_broadcast_of_variables_of_every_dtype() -> None:
    dtypes = [
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
        "float32", "float64", "complex64", "complex128",
    ]  # fmt: skip
    for graph in (False, True):
        made = [tf.Variable(tf.cast(tf.fill((2, 3), hvd.rank() + 1), dtype)) for dtype in dtypes]
        expected = [tf.cast(tf.fill((2, 3), 2), dtype).numpy() for dtype in dtypes]

        def run(made: Any = made) -> None:
            hvd.broadcast_variables(made, root_rank=1)

        (tf.function(run) if graph else run)()
        for variable, value in zip(made, expected, strict=True):
            assert np.array_equal(variable.numpy(), value), (variable.dtype, graph)
    again = tf.Variable(hvd.rank())
    assert hvd.broadcast_([again], 1)[0].numpy() == 1 and again.numpy() == 1
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


@ranks(2)
def test_sync_batch_normalization_is_that_of_the_whole_batch() -> None:
    n, me = hvd.size(), hvd.rank()
    chance = np.random.default_rng(3)
    # Unequal batches
    parts = [chance.normal(5.0, 2.0, size=(r + 2, 4, 3)).astype(np.float32) for r in range(n)]
    pull = [chance.normal(size=part.shape).astype(np.float32) for part in parts]

    def outcome(layer: Any, x: Any, weight: Any, graph: bool) -> Any:
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * weight)
            return y, tape.gradient(loss, x)

        return [t.numpy() for t in (tf.function(run) if graph else run)(tf.constant(x))]

    for graph in (False, True):
        whole = tf.keras.layers.BatchNormalization()
        y, gradient = outcome(whole, np.concatenate(parts), np.concatenate(pull), graph)
        begin = sum(len(part) for part in parts[:me])
        mine = slice(begin, begin + len(parts[me]))
        layer = hvd.SyncBatchNormalization()
        got_y, got_gradient = outcome(layer, parts[me], pull[me], graph)
        assert np.allclose(got_y, y[mine], atol=1e-5) and np.allclose(got_gradient, gradient[mine], atol=1e-5)
        for a, b in zip(layer.get_weights(), whole.get_weights(), strict=True):
            assert np.allclose(a, b, atol=1e-6)
        assert np.allclose(layer(parts[me]), whole(parts[me]), atol=1e-5)
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    renormed, whole = (
        kind(renorm=True) for kind in (hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization)
    )
    for _ in range(3):
        assert np.allclose(
            renormed(parts[me], training=True), whole(np.concatenate(parts), training=True)[mine], atol=1e-4
        )
    half = hvd.SyncBatchNormalization(dtype="float16")
    assert half(tf.cast(parts[me], tf.float16), training=True).dtype == tf.float16


@pytest.mark.parametrize("graph", [False, True])
@ranks(2, env={"HOROCLONE_DEADLOCK_TIME_SECONDS": "0.5"})
def test_gradients_of_different_sources_never_meet(graph: bool) -> None:
    """Each rank lacks another one; they are alike in shape and number."""
    sources = [tf.Variable([1.0, 1.0]), tf.Variable([1.0, 1.0])]

    def run(used: int) -> list[Any]:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(sources[used] * (hvd.rank() + 1.0))
        return tape.gradient(loss, sources)  # type: ignore[no-any-return]

    gradients = tf.function(run) if graph else run
    with pytest.raises(tf.errors.OpError, match=r"variables\.0\.of\.2.*variables\.1\.of\.2"):
        gradients(hvd.rank())
    nothing, reduced = gradients(1)
    assert nothing is None and reduced.numpy().tolist() == [1.5, 1.5]


@ranks(2)
def test_a_gradient_list_is_few_operations() -> None:
    weights = [tf.Variable(tf.ones((50,))) for _ in range(20)]

    def run() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * w) for w in weights])
        return hvd.DistributedGradientTape(tape).gradient(loss, weights)

    for step in (run, tf.function(run)):
        step()
        before = operations()
        got = step()
        assert operations() - before == 1 and all((g.numpy() == 2).all() for g in got)
    big = [tf.Variable(tf.ones((1 << 20,))) for _ in range(5)]  # 4 MiB each

    @tf.function
    def large() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * w) for w in big])
        return hvd.DistributedGradientTape(tape).gradient(loss, big)

    large()
    before = operations()
    large()
    assert operations() - before == 3  # 8 + 8 + 4 MiB, so that they overlap with the backward pass


@ranks(2)
def test_an_error_names_the_variable_that_it_is_about() -> None:
    """Where a function runs, when the error comes to the end of the program."""
    weights = [tf.Variable(tf.ones(3), name="first"), tf.Variable(tf.ones(2 + hvd.rank()), name="second")]

    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w) for w in weights])
        with tf.name_scope("named"):  # no other program of this process has operations of this name
            return hvd.DistributedGradientTape(tape).gradient(loss, weights)

    for run in (gradients, tf.function(gradients)):
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            run()
        tensor_names.complete(caught.value)
        assert re.search(r"tensor \d \(second:0\) as float32\[3\]", str(caught.value))


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
