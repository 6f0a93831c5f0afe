"""What graphs make hard: ops that TensorFlow folds, merges, orders or renames; many in flight; init after shutdown."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, operations, ranks

import horoclone
from horoclone import runtime

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


@ranks(2)
def test_an_op_with_constant_inputs_runs_each_time() -> None:
    """Neither folded while the function is optimised, nor merged with its like: one node is one operation."""

    @tf.function
    def constants() -> Any:
        one = tf.constant([1.0, 2.0])
        return (
            hvd.allreduce(one, op=hvd.Sum),
            hvd.allreduce(one * 2.0, op=hvd.Sum),
            hvd.allreduce(one, op=hvd.Sum, name="a"),
            hvd.allreduce(one, op=hvd.Sum, name="b"),
            hvd.allgather(one),
            hvd.broadcast(one, 0),
            hvd.grouped_allreduce([one, tf.constant(1)]),
            hvd.alltoall(one),
            hvd.reducescatter(one),
        )

    for _ in range(3):
        before = operations()
        got = constants()
        assert operations() - before == 9
        assert got[0].numpy().tolist() == got[2].numpy().tolist() == [2.0, 4.0]


@ranks(2)
def test_ops_of_one_function_do_not_wait_for_each_other() -> None:
    """Each rank has the ops in another order in its program. One after another they would wait for ever."""
    names = [f"tensor_{i}" for i in range(100)]
    order = names if hvd.rank() == 0 else names[::-1]

    @tf.function
    def all_at_once(x: Any) -> Any:
        return {name: hvd.allreduce(x * float(name.split("_")[1]), op=hvd.Sum, name=name) for name in order}

    x = tf.random.normal((1000,), seed=1)
    for _ in range(5):
        for name, got in all_at_once(tf.ones(1000)).items():
            assert (got.numpy() == 2.0 * int(name.split("_")[1])).all()
    assert x.shape == (1000,)


@ranks(2)
def test_completion_long_after_the_kernel_has_returned() -> None:
    """The callback that TensorFlow hands out lies on a stack that is gone by then: it must have been copied."""

    @tf.function
    def waits(x: Any) -> Any:
        return [hvd.allreduce(x + float(i), op=hvd.Sum, name=f"late_{i}") for i in range(20)]

    waits(tf.ones(10))
    for _ in range(10):
        if hvd.rank() == 1:  # rank 0's kernels have all returned, its threads have run other things
            tf.linalg.matmul(tf.ones((300, 300)), tf.ones((300, 300))).numpy()
        got = waits(tf.ones(10))
        assert [float(t[0]) for t in got] == [2.0 * (1 + i) for i in range(20)]


@ranks(2)
def test_an_input_that_nobody_else_needs_becomes_the_output_and_others_stay() -> None:
    x = tf.constant([1.0, 2.0, 3.0])

    @tf.function
    def reused(x: Any) -> Any:
        y = x + 1.0
        return hvd.allreduce(y, op=hvd.Sum), hvd.allreduce(x, op=hvd.Sum), x, hvd.allreduce(y * 2, op=hvd.Sum)

    for _ in range(3):
        a, b, same, c = reused(x)
        assert a.numpy().tolist() == [4.0, 6.0, 8.0] and b.numpy().tolist() == [2.0, 4.0, 6.0]
        assert same.numpy().tolist() == x.numpy().tolist() == [1.0, 2.0, 3.0]
        assert c.numpy().tolist() == [8.0, 12.0, 16.0]
    hvd.allreduce(x, op=hvd.Sum)
    assert x.numpy().tolist() == [1.0, 2.0, 3.0]


@ranks(2)
def test_conditions_loops_and_nested_functions() -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x: Any, steps: Any) -> Any:
        first, second = inner(x), inner(x + 1.0)  # one function, twice in a graph, at the same time
        total = tf.zeros_like(x)
        for _ in tf.range(steps):
            total += hvd.allreduce(x + 0.0 * total, op=hvd.Sum, name="looped")  # one after another
        if steps > 2:
            total = hvd.allreduce(total, op=hvd.Max)
        return first, second, total

    for steps in (2, 4):
        first, second, total = outer(tf.constant([1.0]), tf.constant(steps))
        assert (float(first[0]), float(second[0]), float(total[0])) == (2.0, 4.0, 2.0 * steps)

    @tf.function
    def side_by_side(rows: Any) -> Any:
        return tf.map_fn(lambda row: hvd.allreduce(row, op=hvd.Sum), rows)

    rows = tf.reshape(tf.range(40.0), (20, 2))  # more than run at once, so the ranks' order differs
    for _ in range(2):
        assert np.array_equal(side_by_side(rows * (hvd.rank() + 1)), rows * 3)

    @tf.function
    def trains(x: Any) -> Any:
        for _ in tf.range(130):
            x = hvd.allreduce(x, op=hvd.Average)
        return x

    before = horoclone.metrics()["step"]["number"]
    trains(tf.constant([1.0]))
    assert horoclone.metrics()["step"]["number"] - before >= 100  # each iteration is one


@ranks(2)
def test_names_decide_and_ignore_name_scope_shortens_them() -> None:
    me = hvd.rank()

    @tf.function
    def scoped(x: Any) -> Any:
        with tf.name_scope(f"rank_{me}"):  # differs between the ranks
            return hvd.allreduce(x, op=hvd.Sum, name="inside", ignore_name_scope=True)

    assert float(scoped(tf.constant(1.0))) == 2.0
    # Eagerly the argument is the name: two threads, opposite order, one pair of names.
    names = ["x", "y"] if me == 0 else ["y", "x"]
    results: dict[str, float] = {}

    def reduce(name: str) -> None:
        value = tf.constant(1.0 if name == "x" else 10.0)
        results[name] = float(hvd.allreduce(value, op=hvd.Sum, name=name))

    threads = [threading.Thread(target=reduce, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"x": 2.0, "y": 20.0}


@ranks(2)
def test_gradients_meet_though_static_shapes_differ() -> None:
    """TensorFlow makes one op or another of the gradient of a product, as its shapes say; ours are called after that."""
    me = hvd.rank()

    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            received, _ = hvd.alltoall(x, [1 - me, 1 + me], name="some_rows")
            loss = tf.reduce_sum(
                received * tf.fill([1 + 2 * me, 1], 2.0 + me)
            )  # one row on rank 0, three on rank 1
        return tape.gradient(loss, x)

    assert gradient(tf.ones((2, 1))).numpy().tolist() == [[[2.0], [3.0]], [[3.0], [3.0]]][me]


@ranks(2)
def test_a_captured_tensor_gives_the_same_name_on_every_rank() -> None:
    """TensorFlow names it by a number that counts what this process has made so far."""
    for _ in range(3 * hvd.rank()):
        tf.constant(1.0) + 1.0
    first, second, small = tf.fill((2, 2), hvd.rank() + 1.0), tf.ones((3,)), tf.constant(1.0)

    @tf.function
    def captures() -> Any:
        with tf.name_scope("scope"):
            scoped = hvd.allreduce(second, op=hvd.Sum)
        inner = tf.cond(tf.reduce_sum(second) > 1.0, lambda: hvd.allreduce(first), lambda: first)
        return [*hvd.grouped_allreduce([first, second], op=hvd.Sum), scoped, inner, hvd.allreduce(small)]

    for _ in range(2):
        a, b, scoped, inner, one = captures()
        assert (a.numpy() == 3).all() and (b.numpy() == 2).all() and (scoped.numpy() == 2).all()
        assert (inner.numpy() == 1.5).all() and one.numpy() == 1.0


@ranks(2, init=False)
def test_value_ops_are_read_anew_after_each_init() -> None:
    """One traced function through several lives of the runtime, with the ranks exchanged in one of them."""

    @tf.function
    def facts() -> Any:
        return (
            hvd.size_op(),
            hvd.rank_op(),
            hvd.local_size_op(),
            hvd.local_rank_op(),
            hvd.process_set_included_op(),
        )

    @tf.function
    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    for comm in (None, [1, 0], None):
        with pytest.raises(tf.errors.FailedPreconditionError, match="has not been initialized"):
            facts()
        with pytest.raises(tf.errors.FailedPreconditionError, match="has not been initialized"):
            total(tf.constant(1.0))
        hvd.init(comm)
        me = hvd.rank()
        assert [int(value) for value in facts()] == [2, me, 2, hvd.local_rank(), 1]
        assert float(total(tf.constant(me + 1.0))) == 3.0
        hvd.shutdown()
    with pytest.raises(tf.errors.FailedPreconditionError, match="has not been initialized"):
        hvd.allreduce(tf.ones(1))


@ranks(2)
def test_a_function_that_xla_compiles_is_refused_with_the_remedy() -> None:
    @tf.function(jit_compile=True)
    def compiled(x: Any) -> Any:
        return hvd.allreduce(x)

    with pytest.raises(Exception, match="jit_compile=False"):
        compiled(tf.ones(3))
    assert float(hvd.allreduce(tf.constant(1.0))) == 1.0


@ranks(2)
def test_errors_arrive_as_tensorflows_with_our_text_and_the_runtime_goes_on() -> None:
    me = hvd.rank()
    precondition, invalid = tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError
    ones = tf.ones

    def bad_splits(splits: Any) -> Any:
        return lambda: hvd.alltoall(ones(4), splits=splits)

    table = [
        (precondition, "Mismatched data types", lambda: hvd.allreduce(tf.cast(ones(3), "float32" if me else "float64"), name="a")),
        (precondition, "Mismatched allreduce tensor shapes", lambda: hvd.allreduce(ones(3 + me), name="b")),
        (precondition, "Mismatched", lambda: hvd.allreduce(ones(3), op=hvd.Sum if me else hvd.Max, name="c")),
        (precondition, "Mismatched", lambda: hvd.allreduce(ones(3), prescale_factor=1.0 + me, name="d")),
        (precondition, "root", lambda: hvd.broadcast(ones(3), root_rank=me, name="e")),
        (tf.errors.AbortedError, "Average or hvd.Sum", lambda: hvd.reducescatter(ones(4), op=hvd.Max)),
        (precondition, "Mismatched", lambda: hvd.allgather(ones((2, 3 + me)), name="f")),
        (invalid, "root rank", lambda: hvd.broadcast(ones(3), root_rank=7)),
        (invalid, "Average of bool", lambda: hvd.allreduce(tf.constant([True]))),
        (TypeError, "splits takes a list of integers", bad_splits([[2, 2]])),
        (invalid, "1D splits", bad_splits(tf.constant([[2, 2]]))),
        (invalid, "entries", bad_splits([4])),
        (invalid, "exceeds", bad_splits([4, 4])),
        (invalid, "negative", bad_splits([-1, 2])),
        (invalid, "not divisible", lambda: hvd.alltoall(ones(3))),
    ]  # fmt: skip
    for error, text, call in table:
        for run in (call, tf.function(call)):
            with pytest.raises(error, match=text):
                run()
            assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum).numpy() == 2.0
    for run in (hvd.allreduce, tf.function(hvd.allreduce)):
        for of_no_sum in (tf.constant(["text"]), tf.constant([1j]), tf.constant([1], tf.uint32)):
            with pytest.raises((TypeError, invalid), match=f"type {of_no_sum.dtype.name} is not supported"):
                run(of_no_sum)


@ranks(2)
def test_a_name_that_is_pending_is_refused_and_the_pending_one_completes() -> None:
    me = hvd.rank()
    started = threading.Event()
    outcome: list[Any] = []

    def first() -> None:
        started.set()
        outcome.append(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="twice").numpy())

    if me == 0:
        thread = threading.Thread(target=first)
        thread.start()
        started.wait()
        while "twice" not in runtime.native().describe():
            pass
        with pytest.raises(tf.errors.InvalidArgumentError, match="already pending"):
            hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="twice")
    hvd.allreduce(tf.constant(1.0), name="other")  # gets through meanwhile
    if me == 1:
        first()
    else:
        thread.join()
    assert outcome == [2.0]


@ranks(2)
def test_reference_variables_in_a_graph_of_tensorflow_1() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tf.compat.v1.variable_scope("", use_resource=False):
            reference = tf.compat.v1.Variable(float(hvd.rank()), use_resource=False)
        resource = tf.compat.v1.Variable(float(hvd.rank()), use_resource=True)
        everything = hvd.broadcast_global_variables(1)
        with pytest.raises(ValueError, match="mixed"):
            hvd.broadcast_([reference, resource], 1)
        (updated,) = hvd.broadcast_([reference], 0, name="again")
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(everything)
        assert session.run([reference, resource]) == [1.0, 1.0]
        session.run(reference.assign(5.0 + hvd.rank()))
        assert session.run(updated) == 5.0 and session.run(reference) == 5.0
        folded = hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum)
        for _ in range(2):
            before = operations()
            assert np.array_equal(session.run(folded), [2.0, 4.0]) and operations() == before + 1


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


def events_in(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and stated facts of every event in the profile that lies in `folder`."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (file,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                facts = {
                    plane.stat_metadata[stat.metadata_id].name: stat.str_value
                    or plane.stat_metadata[stat.ref_value].name
                    for stat in event.stats
                }
                found.append((plane.event_metadata[event.metadata_id].name, facts))
    return found


@ranks(2)
def test_eager_ops_have_spans_and_ops_in_graphs_their_names(tmp_path: Path) -> None:
    graph = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="in_graph"))
    hvd.allreduce(tf.ones(3), name="before")
    assert graph(tf.ones(3)).numpy().tolist() == [2.0] * 3
    folder = tmp_path / str(hvd.rank())
    tf.profiler.experimental.start(str(folder))
    hvd.allreduce(tf.ones(3), name="eager", op=hvd.Sum)
    hvd.allgather(tf.ones((1, 2)), name="rows")
    for _ in range(2):  # the last one's end may come after the profiler's
        graph(tf.ones(3))
    tf.profiler.experimental.stop()
    hvd.allreduce(tf.ones(3), name="after")
    events = events_in(folder)
    ours = {(name, facts.get("tensor", "")) for name, facts in events if name.startswith("horoclone.")}
    assert ours == {("horoclone.allreduce", "eager"), ("horoclone.allgather", "rows")}, ours
    in_graph = {name for name, facts in events if facts.get("name") == "in_graph"}
    assert in_graph >= {"ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"}, in_graph
