"""JAX programs through the handlers for GPUs, on the fakes of CUDA and NCCL: no GPU takes part.

XLA:CPU builds and runs the programs; xla_on_fake.cc puts their arguments into the fake's device memory and calls the
handlers for GPUs with the fake's stream. What XLA for GPUs itself would do is looked at in what is lowered for it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import world
from worker_pool import warm_processes
from world import later, run_python

from horoclone import runtime

jax = later("jax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")
eager, native, primitives = (later(f"horoclone.jax.{name}") for name in ("eager", "native", "primitives"))


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET = "horoclone_on_fake"


@pytest.fixture(scope="module")
def on_fake(fakes: Path, on_fakes: dict[str, str]) -> Iterator[Any]:
    """on_fake(body, size=2, **more): runs the body on ranks whose programs use the handlers for GPUs."""
    shim = fakes / "xla_on_fake.so"
    source = HERE / "xla_on_fake.cc"
    if not shim.exists() or shim.stat().st_mtime < source.stat().st_mtime:
        command = [
            "g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}"
        ]  # fmt: skip
        built = shim.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, str(source), "-o", str(built), "-ldl"], check=True, timeout=300)
        built.rename(shim)
    env = {
        **on_fakes,
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HC_FAKE_DELAY_US": "50",
        "HC_TEST_XLA_ON_FAKE": str(shim),
    }
    whole = {**os.environ, "OMP_NUM_THREADS": "1"}
    pool = world.Worlds(env, lambda folder: warm_processes(folder, whole))

    def run(body: Any, size: int = 2, **more: Any) -> list[Any]:
        return pool.run(size, body, **more)

    yield run
    pool.end()


_started = False


def start() -> Any:
    """Once in a process: programs for the CPU call the handlers for GPUs. Gives the fake's library."""
    global _started
    cuda = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
    if _started:
        return cuda
    native.load()
    shim = ctypes.CDLL(os.environ["HC_TEST_XLA_ON_FAKE"])
    product = ctypes.CDLL(str(native.LIBRARY))
    handles = (ctypes.c_void_p(cuda._handle), ctypes.c_void_p(product._handle))
    shim.xla_on_fake_start(*handles, device())
    native.register(shim, "cpu", "xla_on_fake_", TARGET, "horoclone_call_site_on_fake")
    primitives.mlir.register_lowering(primitives.collective_p, primitives.lowering(TARGET), platform="cpu")
    _started = True
    return cuda


def device() -> int:
    return 0 if "HC_TEST_ONE_GPU" in os.environ else int(runtime.local_rank())


def operations() -> None:
    with jax.enable_x64(True):
        of_every_dtype(start(), hvd.rank(), hvd.size())


def of_every_dtype(cuda: Any, me: int, n: int) -> None:
    types = [jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.int64, jnp.float16, jnp.bfloat16,
             jnp.float32, jnp.float64]  # fmt: skip
    ours = [[(np.arange(2 * n * 3).reshape(2 * n, 3) * 7 + 3 * r) % 5 for r in range(n)] for _ in types]
    tree = [jnp.asarray(of[me], dtype) for of, dtype in zip(ours, types, strict=True)]
    wide = [np.stack([one.astype(np.float64) for one in of]) for of in ours]
    sums = jax.jit(lambda t: hvd.allreduce(t, op=hvd.Sum))(tree)
    for got, of, dtype in zip(sums, wide, types, strict=True):
        expected = (of.sum(0) != 0) if dtype is jnp.bool_ else of.sum(0)
        assert got.dtype == dtype and np.array_equal(np.asarray(got, np.float64), expected), dtype
    floats = tree[6:]
    for got, of in zip(jax.jit(lambda t: hvd.allreduce(t, op=hvd.Max))(floats), wide[6:], strict=True):
        assert np.array_equal(np.asarray(got, np.float64), of.max(0))
    gathered, sent, scattered = jax.jit(
        lambda t: (hvd.allgather(t), hvd.broadcast(t, n - 1), hvd.reducescatter(t, op=hvd.Sum))
    )(tree[4:])
    for i, of in enumerate(wide[4:]):
        assert np.array_equal(np.asarray(gathered[i], np.float64), of.reshape(-1, 3))
        assert np.array_equal(np.asarray(sent[i], np.float64), of[n - 1])
        assert np.array_equal(np.asarray(scattered[i], np.float64), of.sum(0)[2 * me : 2 * me + 2])
    rows = jax.jit(hvd.alltoall)(tree[8])
    assert np.array_equal(rows, np.concatenate([one[2 * me : 2 * me + 2] for one in wide[8]]))
    keys = jax.jit(lambda k: hvd.broadcast(k, 0))(jnp.arange(3, dtype=jnp.uint32) + me)
    assert keys.dtype == jnp.uint32 and keys.tolist() == [0, 1, 2]
    empty, scalar = jax.jit(lambda t: hvd.allreduce(t, op=hvd.Sum))([jnp.zeros((0, 3)), jnp.float32(me + 1)])
    assert empty.shape == (0, 3) and scalar == n * (n + 1) / 2
    assert jax.jit(lambda x: hvd.allgather(x))(jnp.zeros((0, 2))).shape == (0, 2)
    scaled = jax.jit(lambda x: hvd.allreduce(x, prescale_factor=2.0))(jnp.float32(me))
    assert scaled == n - 1
    assert cuda.hc_fake_count(b"events", device()) > 0, "the fake's stream was waited for"
    assert cuda.hc_fake_count(b"pinned", device()) == 0, "nothing went through host memory"


def test_fake_every_operation_and_dtype_in_programs(on_fake: Any) -> None:
    on_fake(operations)


def test_fake_ranks_that_share_a_gpu(on_fake: Any) -> None:
    on_fake(shared)


def shared() -> None:
    hvd.shutdown()
    os.environ["HOROCLONE_GPU_OPERATIONS"] = "peers"
    try:
        hvd.init()
        operations()
    finally:
        del os.environ["HOROCLONE_GPU_OPERATIONS"]


def of_another_file(path: str, name: str) -> None:
    """A test of programs on the CPU, whose calls go to the handlers for GPUs here."""
    start()
    module = world.load(path, f"{Path(path).stem}_on_fake")
    getattr(module, name).body()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("test_programs.py", "test_gradients_are_horovods"),
        ("test_programs.py", "test_derivatives_of_trees_with_integers_forward_and_twice"),
        ("test_programs.py", "test_in_scan_cond_while_checkpoint_and_under_vmap"),
        ("test_programs.py", "test_one_function_called_at_many_places_of_a_program"),
        ("test_programs.py", "test_donated_memory_is_used_for_the_result_and_the_values_are_right"),
        ("test_programs.py", "test_a_mismatch_raises_with_our_text_and_the_runtime_goes_on"),
        ("test_programs.py", "test_unequal_rows_under_jit_raise_with_the_way_out"),
        ("test_optimizer.py", "test_equals_one_process_with_the_whole_batch"),
        ("test_optimizer.py", "test_backward_passes_per_step_reduces_every_kth_time_only"),
    ],
)
def test_fake_programs_do_what_they_do_on_the_cpu(on_fake: Any, file: str, name: str) -> None:
    on_fake(of_another_file, path=str(HERE / file), name=name)


def waits_for_a_dead_rank() -> None:
    start()
    total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="total"))
    assert total(jnp.ones(3)).tolist() == [2.0] * 3
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(total(jnp.ones(3)))
    error = hvd.horovod_error_of(caught.value)
    assert isinstance(error, hvd.PeerLost) and error.rank == 1, error


def test_fake_a_program_whose_peer_dies_ends_with_its_name(on_fake: Any) -> None:
    on_fake(waits_for_a_dead_rank, dies=[1])


def lowers() -> None:
    def loss(x: Any) -> Any:
        rows = hvd.allgather(hvd.broadcast(hvd.allreduce({"a": x, "b": 2 * x}, op=hvd.Sum), 0))
        return (hvd.alltoall(hvd.reducescatter(rows["a"])) ** 2).sum() + rows["b"].sum()

    def lowered(function: Any, platform: str) -> str:
        traced = jax.jit(function).trace(jax.ShapeDtypeStruct((4, 2), jnp.float32))
        return str(traced.lower(lowering_platforms=(platform,)).as_text())

    calls = re.findall(r"custom_call @(\w+)", lowered(jax.grad(loss), "cuda"))
    assert calls.count(native.TARGET) == 10, calls  # five, and their gradients
    with pytest.raises(hvd.Unsupported, match="CPU and for NVIDIA's GPUs"):
        lowered(loss, "tpu")


def test_fake_every_operation_and_its_gradient_is_lowered_for_cuda(on_fake: Any) -> None:
    on_fake(lowers)


def eager_calls() -> None:
    """Arrays on a GPU outside of programs: each call is a program, but for those to which ranks may give other sizes."""
    start()
    eager.all_on_one_gpu = lambda arrays: True
    programs = primitives._program_for.cache_info().currsize
    me, n = hvd.rank(), hvd.size()
    assert hvd.allreduce(jnp.float32(me), op=hvd.Sum) == n - 1  # unnamed
    assert hvd.allreduce({"a": jnp.ones(2)}, op=hvd.Sum, name="named")["a"].tolist() == [n] * 2
    assert hvd.broadcast(jnp.arange(3) + me, 1).tolist() == [1, 2, 3]
    assert hvd.reducescatter(jnp.ones((n, 2)), op=hvd.Sum).tolist() == [[n, n]]
    assert primitives._program_for.cache_info().currsize == programs + 4
    assert hvd.allgather(jnp.full(me + 1, me)).tolist() == [0, 1, 1]
    with pytest.raises(hvd.Mismatch, match="'other'"):
        hvd.allreduce(jnp.ones(2 + me), name="other")


def test_fake_calls_outside_of_programs(on_fake: Any) -> None:
    on_fake(eager_calls)


REGISTERS = """
import ctypes, functools
import jax, horoclone.jax
from horoclone.jax import native
from jax._src.lib import xla_client
from jax_cuda13_plugin import cuda_plugin_extension as extension
import jax_plugins.xla_cuda13 as plugin
native.load()
api = xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin._get_library_path()))
taken = []
def take(name, *arguments, **options):
    extension.register_custom_call_target(api, name, *arguments, **options)
    taken.append(name)
xla_client.register_custom_type_handler("CUDA", functools.partial(extension.register_custom_type, api))
xla_client.register_custom_call_handler("CUDA", take)
assert native.TARGET in taken, taken
library = ctypes.CDLL(str(native.LIBRARY))
library.hc_jax_cuda_call_site_type.restype = ctypes.c_void_p
assert ctypes.c_int64.from_address(library.hc_jax_cuda_call_site_type()).value > 0
"""


def test_jaxs_plugin_for_cuda_takes_the_handlers() -> None:
    """The real plugin, which is loaded here and sees no GPU: it asks the handlers for their version."""
    pytest.importorskip("jax_cuda13_plugin", reason="pip install jax-cuda13-plugin jax-cuda13-pjrt")
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = run_python(REGISTERS, env=env)
    assert done.returncode == 0, done.stderr
