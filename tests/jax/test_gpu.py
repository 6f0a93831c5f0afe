"""JAX programs on real GPUs; skipped where JAX sees none. Two ranks may share a GPU.

tests/jax/test_gpu_fake.py has the same handlers on the fakes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from world import later, run_python

jax = later("jax")


SEES = "import jax; print([d.platform for d in jax.devices()], jax.devices()[0].client.platform_version)"

PROGRAM = """
import os
import numpy as np, horoclone.jax as hvd
hvd.init()
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HC_TEST_GPUS"].split(",")[hvd.local_rank() % int(os.environ["HC_TEST_COUNT"])]
import jax, jax.numpy as jnp
me, n = hvd.rank(), hvd.size()
assert jax.devices()[0].platform == "gpu", jax.devices()
total = lambda x: hvd.allreduce(x, op=hvd.Sum)
x = jnp.arange(4.0 * n) + me
ours = [np.arange(4.0 * n) + r for r in range(n)]
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.int8, jnp.uint8):
    got = jax.jit(total)(x.astype(dtype))
    assert got.dtype == dtype and got.devices() == {jax.devices()[0]}
    assert np.array_equal(np.asarray(got, np.float64), sum(ours)), dtype
big = jax.jit(lambda x: total(jnp.sin(x) * 0 + x))(jnp.full(1 << 22, me + 1.0))
assert float(big[0]) == float(big[-1]) == n * (n + 1) / 2
group = jax.jit(lambda t: hvd.allreduce(t, op=hvd.Average))({"a": x, "b": jnp.ones((3, 3)) * me})
assert np.allclose(group["a"], sum(ours) / n) and np.allclose(group["b"], (n - 1) / 2)
assert np.array_equal(jax.jit(hvd.allgather)(x), np.concatenate(ours))
assert np.array_equal(jax.jit(lambda x: hvd.broadcast(x, n - 1))(x), ours[n - 1])
assert np.array_equal(jax.jit(lambda x: hvd.reducescatter(x, op=hvd.Sum))(x), sum(ours)[4 * me : 4 * me + 4])
assert np.array_equal(jax.jit(hvd.alltoall)(x), np.concatenate([one[4 * me : 4 * me + 4] for one in ours]))
weights = [(r + 1) * np.arange(1.0, 4 * n * n + 1) for r in range(n)]  # each rank's cotangent
def pulled(function):
    def loss(x):
        y = function(x)
        return (y * weights[me][: y.size]).sum()
    return jax.jit(jax.grad(loss))(x)
both = sum(weights)
assert np.allclose(pulled(total), both[: 4 * n])
assert np.allclose(pulled(lambda x: hvd.broadcast(x, 0)), both[: 4 * n] / n if me == 0 else 0)
assert np.allclose(pulled(hvd.allgather), both[4 * n * me : 4 * n * (me + 1)] / n)
assert np.allclose(pulled(hvd.reducescatter), np.concatenate([w[:4] for w in weights]))
assert np.allclose(pulled(hvd.alltoall), np.concatenate([w[4 * me : 4 * me + 4] for w in weights]))
end, _ = jax.jit(lambda x: jax.lax.scan(lambda c, _: (total(c) / n, None), x, None, length=20))(x)
assert np.allclose(end, sum(ours) / n)
assert hvd.allreduce(jnp.float32(me), op=hvd.Sum) == n * (n - 1) / 2  # outside of a program
assert hvd.allgather(jnp.full(me + 1, me)).shape == (n * (n + 1) // 2,)
try:
    jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x, name="other"))(jnp.ones(2 + me)))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    assert n > 1 and isinstance(hvd.horovod_error_of(error), hvd.Mismatch), error
else:
    assert n == 1
assert np.array_equal(jax.jit(total)(x), sum(ours)), "the runtime goes on"
hvd.shutdown()
print("right", flush=True)
"""


@pytest.fixture(scope="module")
def gpus() -> list[str]:
    """Asked in a process of its own: whoever looks holds memory of the GPU."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = run_python(SEES, env=env)
    count = done.stdout.count("'gpu'")
    if done.returncode != 0 or not count or "rocm" in done.stdout.lower():
        pytest.skip(f"JAX sees no NVIDIA GPU here: {(done.stdout or done.stderr).strip().splitlines()[-1:]}")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(count)]


@pytest.mark.parametrize("size", [1, 2])
def test_programs_on_gpus(launch: Any, gpus: list[str], size: int) -> None:
    env = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HC_TEST_GPUS": ",".join(gpus),
        "HC_TEST_COUNT": str(len(gpus)),
    }
    run = [sys.executable, "-m", "horoclone.launch.cli", "-np", str(size), sys.executable, "-c", PROGRAM]
    assert launch(run, env=env, timeout_s=120).stdout.count("right") == size
