"""Every TensorFlow op, for every dtype, against what NumPy computes from all ranks' inputs; eagerly and in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, load, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
EVERY_DTYPE = ["bool", *INTEGERS, *FLOATS]
OPS = ("Sum", "Average", "Min", "Max", "Product")


def values(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Small whole numbers: exact in every dtype, sums of four included. The same for the same arguments."""
    low, high = (0 if dtype in ("bool", "uint8", "uint16") else -3), (2 if dtype == "bool" else 4)
    chance = np.random.default_rng(1000 * seed + rank)
    return chance.integers(low, high, shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def everybody(shape: tuple[int, ...], dtype: str, seed: int = 0) -> list[np.ndarray]:
    return [values(r, shape, dtype, seed) for r in range(hvd.size())]


def reduced(parts: list[np.ndarray], op: int) -> np.ndarray:
    """The reduction in int64 or float64, cast back."""
    dtype = parts[0].dtype
    whole = np.issubdtype(dtype, np.integer) or dtype.kind == "b"
    wide = np.stack([part.astype(np.int64 if whole else np.float64) for part in parts])
    if dtype.kind == "b":
        return wide.any(0) if op in (hvd.Sum, hvd.Max) else wide.all(0)
    if op == hvd.Average:
        total = wide.sum(0)
        return (np.trunc(total / len(parts)) if whole else total / len(parts)).astype(dtype)
    done = {hvd.Sum: wide.sum, hvd.Min: wide.min, hvd.Max: wide.max, hvd.Product: wide.prod}[op](axis=0)
    return np.asarray(done).astype(dtype)


def same(got: Any, expected: np.ndarray, what: Any, tolerance: float = 0.0) -> None:
    array = got.numpy() if hasattr(got, "numpy") else got
    assert array.dtype == expected.dtype and array.shape == expected.shape, (what, array, expected)
    if tolerance:
        assert np.allclose(array.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=0), (
            what
        )
    else:
        assert np.array_equal(array, expected), (what, array, expected)


def tolerance_of(dtype: str, op: int) -> float:
    """Average multiplies by 1/N, which may round otherwise than a division."""
    if op != hvd.Average or dtype not in FLOATS:
        return 0.0
    return {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 3e-7, "float64": 1e-15}[dtype]


@ranks(3)
def test_a_graph_of_all_reductions_and_dtypes_at_once() -> None:
    inputs = {dtype: tf.constant(values(hvd.rank(), (3, 5), dtype)) for dtype in EVERY_DTYPE}

    @tf.function
    def everything(inputs: Any) -> Any:
        return {
            (dtype, name): hvd.allreduce(tensor, op=getattr(hvd, name))
            for dtype, tensor in inputs.items()
            for name in OPS
            if not (dtype == "bool" and name == "Average")
        }

    for _ in range(3):  # the first call traces, the later ones only run
        for (dtype, name), got in everything(inputs).items():
            op = getattr(hvd, name)
            same(got, reduced(everybody((3, 5), dtype), op), (dtype, name), tolerance_of(dtype, op))


@ranks(3)
def test_scale_factors_work_in_full_precision() -> None:
    mine = tf.constant([1.0, 2.0, -3.0], tf.float64)
    got = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=1 / 3, postscale_factor=0.7)
    expected = sum(np.array([1.0, 2.0, -3.0]) * (1 / 3) for _ in range(hvd.size())) * 0.7
    assert np.allclose(got.numpy(), expected, rtol=1e-15, atol=0)  # a float32 factor would be 1e-8 off
    whole = hvd.allreduce(tf.constant([8, -8], tf.int32), op=hvd.Sum, prescale_factor=0.5)
    assert np.array_equal(whole.numpy(), [4 * hvd.size(), -4 * hvd.size()])
    with tf.GradientTape() as tape:
        tape.watch(mine)
        share = hvd.reducescatter(mine, postscale_factor=0.3)
    assert np.allclose(tape.gradient(share, mine).numpy(), 0.3, rtol=1e-15, atol=0)


@ranks(3)
def test_static_shapes_keep_what_is_known() -> None:
    shapes: dict[str, Any] = {}

    @tf.function(input_signature=[tf.TensorSpec((None, 3)), tf.TensorSpec(None)])
    def trace(rows: Any, anything: Any) -> Any:
        shapes["allreduce"] = hvd.allreduce(rows).shape.as_list()
        shapes["allgather"] = hvd.allgather(rows).shape.as_list()
        shapes["broadcast"] = hvd.broadcast(rows, 0).shape.as_list()
        output, received = hvd.alltoall(rows, splits=[1] * hvd.size())
        shapes["alltoall"], shapes["received"] = output.shape.as_list(), received.shape.as_list()
        shapes["reducescatter"] = hvd.reducescatter(rows).shape.as_list()
        shapes["unknown"] = [hvd.allreduce(anything).shape.rank, hvd.allgather(anything).shape.rank]
        shapes["grouped"] = [t.shape.as_list() for t in hvd.grouped_allgather([rows, rows])]
        return hvd.allgather(rows), hvd.allgather(anything)

    for count in (1, 4):  # the same trace, other sizes; other sizes on other ranks, too
        whole, anything = trace(tf.ones((count + hvd.rank(), 3)), tf.ones((hvd.rank(), 2)))
        assert whole.shape == (sum(count + r for r in range(hvd.size())), 3)
        assert anything.shape == (sum(range(hvd.size())), 2)
    assert trace.experimental_get_tracing_count() == 1
    for name in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
        assert shapes[name] == [None, 3], name
    assert shapes["received"] == [None] and shapes["unknown"] == [None, None]
    assert shapes["grouped"] == [[None, 3], [None, 3]]


@ranks(2)
def test_a_reduction_that_is_not_linear_has_no_gradient() -> None:
    x = tf.ones(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        largest = hvd.allreduce(x, op=hvd.Max)
    with pytest.raises(LookupError, match="no gradient"):
        tape.gradient(largest, x)


@ranks(2)
def test_a_mask_is_not_lost_in_silence() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    for call in (
        hvd.allreduce,
        hvd.allgather,
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.grouped_allreduce([x]),
    ):
        with pytest.raises(ValueError, match="its mask would be lost"):
            call(masked)


@ranks(2)
def test_compression_and_older_arguments() -> None:
    x = tf.constant([1.5, -2.0, 0.25]) * (hvd.rank() + 1)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        got = hvd.allreduce(x, compression=compression, op=hvd.Sum)
        assert got.dtype == tf.float32 and np.array_equal(got.numpy(), [4.5, -6.0, 0.75])
        pair = hvd.grouped_allreduce([x, tf.constant([3])], compression=compression, op=hvd.Sum)
        assert np.array_equal(pair[0].numpy(), [4.5, -6.0, 0.75]) and pair[1].numpy().tolist() == [6]
        share = hvd.reducescatter(tf.stack([x, x]), compression=compression)
        assert share.dtype == tf.float32 and np.allclose(share.numpy(), [[2.25, -3.0, 0.375]])
    with pytest.warns(DeprecationWarning):
        assert np.array_equal(hvd.allreduce(x, average=False).numpy(), [4.5, -6.0, 0.75])
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    variable = tf.Variable(x)
    assert np.array_equal(hvd.allreduce(variable, op=hvd.Sum).numpy(), [4.5, -6.0, 0.75])


@ranks(3)
def test_join_gives_neutral_elements_and_the_last_rank() -> None:
    n, me = hvd.size(), hvd.rank()
    for step in range(2 * me):  # rank 0 joins first, the last rank last
        alive = [r for r in range(n) if step < 2 * r]
        got = hvd.allreduce(tf.constant([2.0, -1.0]), op=hvd.Max, name=f"max.{step}")
        assert np.array_equal(got.numpy(), [2.0, -1.0])
        got = hvd.allreduce(tf.constant([1.0]), op=hvd.Sum, name=f"sum.{step}")
        assert got.numpy().tolist() == [len(alive)]
    last = hvd.join() if me % 2 else tf.function(hvd.join)()
    assert last.dtype == tf.int32 and int(last) == n - 1
    assert hvd.allreduce(tf.constant(1), op=hvd.Sum).numpy() == n


ONLY_MOVED = [
    "uint32", "uint64", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e4m3b11fnuz", "float8_e5m2fnuz",
]  # fmt: skip


def bits(rank: int, rows: int, dtype: str) -> np.ndarray:
    """Any bits, NaNs included; the same for the same arguments."""
    kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    raw = np.random.default_rng([rank, rows]).bytes(rows * 3 * kind.itemsize)
    return np.frombuffer(raw, kind).reshape(rows, 3)


def known(dtype: str) -> bool:
    try:
        return bool(tf.as_dtype(dtype))
    except TypeError:
        return False


@ranks(2)
def test_what_is_only_moved_keeps_its_bits_and_is_not_reduced() -> None:
    me = hvd.rank()
    for dtype in filter(known, ONLY_MOVED):
        mine, everyone = (
            bits(me, 2 + 3 * me, dtype),
            bits(0, 2, dtype).tobytes() + bits(1, 5, dtype).tobytes(),
        )
        found, _ = hvd.alltoall(tf.constant(mine), [1, 1 + 3 * me])
        parts = [bits(rank, 2 + 3 * rank, dtype) for rank in (0, 1)]
        assert found.numpy().tobytes() == b"".join((p[1:] if me else p[:1]).tobytes() for p in parts), dtype

        def moved(rows: Any, other: Any) -> Any:
            return hvd.allgather(rows), hvd.grouped_allgather([rows, rows])[1], hvd.broadcast(other, 1)

        for function in (moved, tf.function(moved)):
            one, two, root = function(tf.constant(mine), tf.constant(bits(me, 4, dtype)))
            assert one.dtype.name == dtype and one.numpy().tobytes() == two.numpy().tobytes() == everyone, (
                dtype
            )
            assert root.numpy().tobytes() == bits(1, 4, dtype).tobytes(), dtype
        if not dtype.endswith("fnuz"):  # of which TensorFlow has no variables
            variable = tf.Variable(bits(me, 4, dtype))
            hvd.broadcast_variables([variable], 1)
            assert variable.numpy().tobytes() == bits(1, 4, dtype).tobytes(), dtype
        for reduction in (hvd.allreduce, hvd.reducescatter):
            with pytest.raises((tf.errors.InvalidArgumentError, TypeError, ValueError), match=dtype):
                reduction(tf.constant(bits(me, 4, dtype)), op=hvd.Sum)
    for call in (hvd.allgather, tf.function(hvd.allgather), lambda t: hvd.grouped_allgather([tf.ones(1), t])):
        for error in (tf.errors.InvalidArgumentError, TypeError):
            with pytest.raises(error, match="allgather: Tensor type string is not supported"):
                call(tf.constant(["a"]))
    assert hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy().tolist() == [2.0] * 3


@ranks(2)
def test_tensors_and_variables_of_tensorflow_are_counted() -> None:
    mine = tf.gather(tf.range(11, dtype=tf.float32), hvd.EvaluationSampler(range(11))[:])
    found = hvd.metric_mean({"loss": tf.reduce_mean(mine), "same": tf.Variable(2.0)}, count=len(mine))
    assert found == {"loss": 5.0, "same": 2.0}
    assert hvd.metric_sum(tf.fill([3], hvd.rank() + 1)).tolist() == [3, 3, 3]
    assert hvd.metric_sum(tf.constant(0.5, tf.bfloat16)) == 1.0


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def growth(calls: int, first: int = 0) -> float:
    """Bytes for each call, under names, with sizes and with factors that were never used before."""
    import tensorflow as tf

    import horoclone.tensorflow as hvd

    before = resident()
    for number in range(first, first + calls):
        tensor = tf.fill([1 + number % 97], 1.0)
        assert float(hvd.allreduce(tensor, name=f"metric_{number}", op=hvd.Sum)[0]) == hvd.size()
        factor = number + 3.0
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            scaled = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=factor, postscale_factor=factor)
        assert float(scaled[0]) == hvd.size() * factor**2
        assert float(tape.gradient(scaled, tensor)[0]) == hvd.size() * factor**2
        hvd.broadcast(tensor, 0, name=f"state_{number}")
        hvd.allgather(tensor, name=f"row_{number}")
    return (resident() - before) / (5 * calls)


@ranks(2, limit_s=240, env={"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""})
def test_new_names_and_factors_cost_no_memory() -> None:
    """It was 31 KB for each. What is left is the core's, which remembers 8,192 names at most."""
    growth(100)
    assert growth(150, 100) < 6000


shared = load(Path(__file__).parents[1] / "argument_types.py", "argument_types")

TENSORFLOW = {
    "allreduce": (*shared.REDUCTION, "compression"), "grouped_allreduce": (*shared.REDUCTION, "compression", "tensors"),
    "allgather": ("name", "process_set"), "grouped_allgather": ("name", "process_set", "tensors"),
    "broadcast": shared.ROOTED, "alltoall": ("splits", "name", "process_set"), "reducescatter": (*shared.SHARE, "compression"),
    "grouped_reducescatter": (*shared.SHARE, "compression", "tensors"),
}  # fmt: skip


@ranks(2)
def test_operations_on_tensorflow_tensors() -> None:
    def tensor() -> dict[str, Any]:
        return {"tensor": tf.ones(4)}

    given = {
        "": tensor, "grouped": lambda: {"tensors": [tf.ones(4), tf.ones(2)]},
        "broadcast": lambda: {**tensor(), "root_rank": hvd.rank()},
    }  # fmt: skip
    shared.check(hvd, TENSORFLOW, given)
    for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
        with pytest.raises((TypeError, ValueError), match=rf"{name}: tensor=<Odd> .*tf.Tensor"):
            getattr(hvd, name)(shared.Odd())
    for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
        with pytest.raises(TypeError, match="a list or tuple of tensors"):
            getattr(hvd, name)(tf.ones((3, 2)))
    assert hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy().tolist() == [2.0] * 3
