"""Every operation on pytrees of JAX arrays, under jit and outside, against what NumPy computes from all ranks' inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, load, ranks

from horoclone import tensor_names

jax = later("jax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
EVERY_DTYPE = ["bool", *INTEGERS, *FLOATS]
ONLY_MOVED = [
    "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu",
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (3, 2), (2, 0, 3)]


def values(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Small whole numbers: exact in every dtype, sums of four included. The same for the same arguments."""
    chance = np.random.default_rng(1000 * seed + rank)
    low = 0 if dtype == "bool" or dtype.startswith("u") else -3
    return np.asarray(chance.integers(low, 2 if dtype == "bool" else 4, shape)).astype(jnp.dtype(dtype))


def tree_of(rank: int, dtype: str) -> dict[str, Any]:
    return {
        "layers": [values(rank, shape, dtype, i) for i, shape in enumerate(SHAPES)],
        "one": (values(rank, (4,), dtype, 9),),
    }


def reduced(parts: list[np.ndarray[Any, Any]], op: int) -> np.ndarray[Any, Any]:
    """The reduction in int64 or float64, cast back."""
    dtype = parts[0].dtype
    if dtype.kind == "b":
        return np.any(parts, 0) if op in (hvd.Sum, hvd.Max) else np.all(parts, 0)
    wide = np.stack([p.astype(np.int64 if dtype.kind in "iu" else np.float64) for p in parts])
    if op == hvd.Average:
        total = wide.sum(0)
        return np.asarray(np.trunc(total / len(parts)) if dtype.kind in "iu" else total / len(parts)).astype(
            dtype
        )
    done = {hvd.Sum: wide.sum, hvd.Min: wide.min, hvd.Max: wide.max, hvd.Product: wide.prod}[op](0)
    return np.asarray(done).astype(dtype)


def same(tree: Any, expected: Any, exactly: bool = True) -> None:
    got, wanted = jax.tree_util.tree_leaves(tree), jax.tree_util.tree_leaves(expected)
    assert jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(expected)
    for a, b in zip(got, wanted, strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
        x, y = np.asarray(a), np.asarray(b)
        if exactly:
            assert np.array_equal(x, y), (x, y)
        else:
            eps = float(jnp.finfo(x.dtype).eps)
            assert np.allclose(x.astype(np.float64), y.astype(np.float64), rtol=2 * eps, atol=2 * eps), (x, y)


def both(function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results outside of jit and inside."""
    return [function(*args), jax.jit(function)(*args)]


def trees_of(dtypes: list[str]) -> list[dict[str, Any]]:
    """Every rank's tree with a branch for each dtype."""
    return [{dtype: tree_of(rank, dtype) for dtype in dtypes} for rank in range(hvd.size())]


@ranks(1, 3)
def test_allreduce_of_a_tree_of_every_dtype_and_reduction() -> None:
    with jax.enable_x64(True):
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            for dtypes in (FLOATS, INTEGERS if op == hvd.Average else ["bool", *INTEGERS]):
                trees = trees_of(dtypes)
                expected = jax.tree_util.tree_map(lambda *parts, op=op: reduced(list(parts), op), *trees)
                exactly = op != hvd.Average or dtypes is not FLOATS  # thirds: sum * (1/N) may round otherwise
                for out in both(lambda t, op=op: hvd.allreduce(t, op=op), trees[hvd.rank()]):
                    same(out, expected, exactly)


@ranks(2)
def test_without_x64_wide_arrays_are_narrowed_as_everywhere_in_jax() -> None:
    tree = {"f": np.ones(3), "i": np.ones(3, np.int64)}
    for out in both(lambda t: hvd.allreduce(t, op=hvd.Sum), tree):
        same(out, {"f": np.full(3, 2, np.float32), "i": np.full(3, 2, np.int32)})


@ranks(2)
def test_a_tree_of_mixed_dtypes_goes_out_as_one_call() -> None:
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16), "c": jnp.array(3), "d": None, "e": []}
    text = jax.jit(hvd.allreduce).lower(tree).as_text()
    assert text.count("horoclone_collective") == 1
    for out in both(lambda t: hvd.allreduce(t, op=hvd.Sum), tree):
        assert out["d"] is None and out["e"] == []
        same(out, jax.tree_util.tree_map(lambda x: np.asarray(x + x), tree))
    assert hvd.allreduce({}) == {}


@ranks(3)
def test_scales_and_compression() -> None:
    ones = {"w": jnp.full((5,), 2.0), "n": jnp.full((3,), 10)}
    n = hvd.size()
    for out in both(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), ones):
        assert out["w"].tolist() == [3.0 * n] * 5 and out["n"].tolist() == [15 * n] * 3
    for press, eps in ((hvd.Compression.fp16, 2**-10), (hvd.Compression.bf16, 2**-7)):
        mine = {"w": jnp.linspace(0, 1, 50) + hvd.rank(), "n": jnp.arange(4)}
        for out in both(lambda t, press=press: hvd.allreduce(t, compression=press, op=hvd.Sum), mine):
            assert out["w"].dtype == jnp.float32 and out["n"].tolist() == [0, n, 2 * n, 3 * n]
            exact = n * np.linspace(0, 1, 50) + sum(range(n))
            assert np.allclose(out["w"], exact, rtol=2 * eps, atol=0)
        text = jax.jit(lambda t, press=press: hvd.allreduce(t, compression=press)).lower(mine).as_text()
        assert ("bf16" if press is hvd.Compression.bf16 else "f16") in text.split("horoclone_collective")[1]


@ranks(1, 3)
def test_broadcast_of_a_tree_from_every_root() -> None:
    with jax.enable_x64(True):
        trees = trees_of([*EVERY_DTYPE, "uint32", "uint64"])
        for root in range(hvd.size()):
            for out in both(lambda t, root=root: hvd.broadcast_parameters(t, root), trees[hvd.rank()]):
                same(out, trees[root])


def bits(rank: int, rows: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Any bits, NaNs included; the same for the same arguments."""
    chance = np.random.default_rng([rank, rows])
    return np.frombuffer(chance.bytes(rows * 3 * dtype.itemsize), dtype).reshape(rows, 3)


@ranks(2)
def test_random_keys_become_the_roots() -> None:
    me = hvd.rank()
    tree = {
        "key": jax.random.key(me),
        "keys": jax.random.split(jax.random.key(me, impl="rbg"), 3),
        "w": jnp.ones(2) * me,
    }
    for found in (hvd.broadcast_parameters(tree, 1), jax.jit(lambda t: hvd.broadcast(t, 1))(tree)):
        assert found["key"].dtype == tree["key"].dtype and found["w"].tolist() == [1.0, 1.0]
        assert jax.random.bits(found["key"]) == jax.random.bits(jax.random.key(1))
        expected = jax.random.key_data(jax.random.split(jax.random.key(1, impl="rbg"), 3))
        assert (jax.random.key_data(found["keys"]) == expected).all()


@ranks(2)
def test_what_is_only_moved_keeps_its_bits_and_is_not_reduced() -> None:
    me = hvd.rank()
    with jax.enable_x64(True):
        for dtype in map(jnp.dtype, ONLY_MOVED):
            both_ranks = [bits(rank, 4, dtype) for rank in (0, 1)]
            mine = jnp.asarray(both_ranks[me])
            for out in both(lambda t: hvd.broadcast_parameters(t, 1), mine):
                assert out.dtype == dtype and np.asarray(out).tobytes() == both_ranks[1].tobytes(), dtype
            for out in both(hvd.allgather, mine):
                assert np.asarray(out).tobytes() == b"".join(part.tobytes() for part in both_ranks), dtype
            halves = b"".join(part[2 * me : 2 * me + 2].tobytes() for part in both_ranks)
            for out in both(hvd.alltoall, mine):
                assert np.asarray(out).tobytes() == halves, dtype
            uneven = hvd.allgather(jnp.asarray(bits(me, 1 + me, dtype)))
            assert np.asarray(uneven).tobytes() == bits(0, 1, dtype).tobytes() + bits(1, 2, dtype).tobytes()
            rows, _ = hvd.alltoall(mine, splits=[1, 3])
            parts = [part[1:] if me else part[:1] for part in both_ranks]
            assert np.asarray(rows).tobytes() == b"".join(part.tobytes() for part in parts), dtype
            for reduction in (hvd.allreduce, hvd.reducescatter, jax.jit(hvd.allreduce)):
                with pytest.raises(ValueError, match=f"{dtype.name}.*Accepted: bfloat16"):
                    reduction(mine)
    assert hvd.allreduce(jnp.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


@ranks(1, 3)
def test_allgather_reducescatter_and_alltoall() -> None:
    me, n = hvd.rank(), hvd.size()
    moved = ["bool", "int16", "uint32", "int64", "bfloat16", "float64"]
    summed = ["uint8", "int32", "int64", "float16", "bfloat16", "float64"]
    with jax.enable_x64(True):
        parts = [{d: [values(r, (2, 3), d), values(r, (1,), d, 1)] for d in moved} for r in range(n)]
        for out in both(hvd.allgather, parts[me]):
            same(out, jax.tree_util.tree_map(lambda *rows: np.concatenate(rows), *parts))
        for dtype in ("bool", "uint64", "bfloat16"):
            sent = [values(r, (2 * n, 3), dtype) for r in range(n)]
            for out in both(hvd.alltoall, sent[me]):
                same(out, np.concatenate([part[2 * me : 2 * me + 2] for part in sent]))
        uneven = [{d: values(r, (2 * n + 1, 3), d) for d in summed} for r in range(n)]
        whole = jax.tree_util.tree_map(lambda *rows: reduced(list(rows), hvd.Sum), *uneven)
        mine = slice(0, 3) if me == 0 else slice(2 * me + 1, 2 * me + 3)
        for out in both(lambda t: hvd.reducescatter(t, op=hvd.Sum), uneven[me]):
            same(out, jax.tree_util.tree_map(lambda rows: rows[mine], whole))


@ranks(3)
def test_unequal_rows_outside_of_jit() -> None:
    me, n = hvd.rank(), hvd.size()
    out = hvd.allgather(jnp.full((me, 2), me))
    assert out.shape == (sum(range(n)), 2) and out[:, 0].tolist() == [r for r in range(n) for _ in range(r)]
    many = (1 << 31) + 5  # more rows than an int32 says, and no memory
    _, received = hvd.alltoall(jnp.zeros((many, 0)), splits=[many] + [0] * (n - 1))
    assert received.tolist() == [many if me == 0 else 0] * n
    rows, received = hvd.alltoall(jnp.arange(n + 1), splits=[2] + [1] * (n - 1))
    assert received.tolist() == [2 if me == 0 else 1] * n and received.dtype == jnp.int32
    assert rows.tolist() == ([0, 1] * n if me == 0 else [me + 1] * n)


@ranks(2)
def test_eager_results_are_the_memory_that_the_core_wrote() -> None:
    """Zero copies on the CPU: argument read where it lies, result adopted."""
    big = jnp.arange(1 << 16, dtype=jnp.float32)
    assert np.asarray(big).__array_interface__["data"][0] == big.unsafe_buffer_pointer()
    before = np.array(big)
    out = hvd.allreduce(big, op=hvd.Sum)
    assert np.array_equal(big, before) and np.array_equal(out, 2 * before)
    from horoclone.jax import eager

    made = eager.empty(before)
    made[:] = before
    adopted = jax.device_put(made, may_alias=True)
    assert adopted.unsafe_buffer_pointer() == made.__array_interface__["data"][0]


@ranks(2)
def test_objects_barrier_and_facts() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    hvd.barrier()
    assert hvd.is_initialized() and hvd.local_size() == 2


def program(x: Any) -> Any:
    return hvd.allreduce(x, op=hvd.Sum)


def shutdown_and_init_between_calls() -> list[Any]:
    compiled, out = jax.jit(program), []
    for _ in range(3):
        hvd.init()
        out.append(float(compiled(jnp.float32(hvd.rank() + 1))))
        hvd.shutdown()
        # JAX's dispatch in C++ raises ValueError where its dispatch in Python raises JaxRuntimeError.
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="has not been initialized"):
            jax.block_until_ready(compiled(jnp.float32(1)))
    assert compiled._cache_size() == 1
    return out


def sets_of_two_lives() -> list[float]:
    out, pair = [], hvd.ProcessSet([0, 1])
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair))
    for others in ([], [hvd.ProcessSet([1, 2])]):  # the pair has another number in each life
        hvd.init(process_sets=[*others, pair])
        if hvd.rank() < 2:
            out.append(float(program(jnp.float32(hvd.rank() + 1))))
        hvd.shutdown()
    return out


def test_a_compiled_program_finds_its_process_set_in_the_next_life(worlds: Any) -> None:
    assert worlds.run(3, sets_of_two_lives, init=False) == [[3.0, 3.0], [3.0, 3.0], []]


def test_a_compiled_program_survives_shutdown_and_init(worlds: Any) -> None:
    assert worlds.run(2, shutdown_and_init_between_calls, init=False) == [[3.0] * 3] * 2


@ranks(2)
def test_integers_that_jax_would_cut_are_refused() -> None:
    """Without jax_enable_x64 its own conversion makes 0 of 2**40."""
    tree = {"step": np.array([2**40 + hvd.rank()])}
    with pytest.raises(OverflowError, match=r"broadcast: the array at \['step'\] is int64.*jax_enable_x64"):
        hvd.broadcast(tree, 0)
    with jax.enable_x64(True):
        assert hvd.broadcast(tree, 0)["step"].tolist() == [2**40]
    assert hvd.broadcast({"step": np.array([7 + hvd.rank()])}, 0)["step"].tolist() == [7]


@ranks(2)
def test_an_error_names_the_leaf_that_it_is_about() -> None:
    tree = {"b": {"k": jnp.ones(2 + hvd.rank())}, "w": jnp.ones(3)}
    named = r"tensor 0 \(\['b'\]\['k'\]\) as float32\[3\]"
    with pytest.raises(hvd.Mismatch, match=named):
        hvd.allreduce(tree)
    program = jax.jit(lambda tree: hvd.allreduce(tree, name="a tree"))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        jax.block_until_ready(program(tree))
    assert re.search(named, str(hvd.horovod_error_of(caught.value)))
    tensor_names.complete(caught.value)
    assert re.search(named, str(caught.value))


@ranks(2)
def test_arrays_of_jax_are_counted() -> None:
    mine = jnp.arange(11.0)[hvd.EvaluationSampler(range(11))[:]]
    found = hvd.metric_mean({"loss": mine.mean(), "half": mine.astype(jnp.bfloat16).mean()}, count=len(mine))
    assert found == {"loss": 5.0, "half": 5.0}
    assert hvd.metric_sum(jnp.full(3, hvd.rank() + 1)).tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="rank 0 gave a value that is not a number"):
        hvd.metric_sum(jnp.complex64(1j))


shared = load(Path(__file__).parents[1] / "argument_types.py", "argument_types")

JAX = {
    "allreduce": (*shared.REDUCTION, "compression"), "allgather": ("name", "process_set"), "broadcast": shared.ROOTED,
    "alltoall": ("splits", "name", "process_set"), "reducescatter": shared.SHARE, "barrier": ("process_set",),
}  # fmt: skip


@ranks(2)
def test_operations_on_jax_arrays() -> None:
    def tree() -> dict[str, Any]:
        return {"tree": {"w": jnp.ones(4)}}

    given = {
        "": tree, "alltoall": lambda: {"array": jnp.ones(4)}, "barrier": dict,
        "broadcast": lambda: {**tree(), "root_rank": hvd.rank()},
    }  # fmt: skip
    shared.check(hvd, JAX, given)
    for name in ("allreduce", "allgather", "broadcast", "reducescatter"):
        function = getattr(hvd, name)
        with pytest.raises(
            TypeError, match=rf"{name}: tree=<Odd> .* at \['w'\] cannot be used; it takes an array"
        ):
            function({"v": jnp.ones(2), "w": shared.Odd()})
        with pytest.raises(TypeError, match=rf"{name}: tree='abc' \(a str\) cannot be used"):
            function("abc")
        with pytest.raises(TypeError, match=rf"{name}: name=3 \(an int\)"):  # while a program is built, too
            jax.jit(lambda x, function=function: function(x, name=3))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"alltoall: array=<Odd>"):
        hvd.alltoall(shared.Odd())
    with pytest.raises(TypeError, match=r"alltoall: array=\[.*one array, not a tree of 2"):
        hvd.alltoall([jnp.ones(2), jnp.ones(2)])
    assert hvd.allreduce(jnp.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
