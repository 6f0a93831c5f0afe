"""Calls outside of programs through host memory: arrays on the CPU are read where they lie, others are copied.

Thread: the caller's, which makes progress while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horoclone import ops, runtime
from horoclone.arrays import host_memory as memory
from horoclone.jax.call import NAMES, Call
from horoclone.process_sets import registered
from horoclone.requests import Requests

ALIGNMENT = 64  # bytes: XLA takes NumPy memory that lies so without a copy

_requests = Requests(memory.address)


def all_on_one_gpu(arrays: Sequence[Any]) -> bool:
    """Whether the arrays lie on one NVIDIA GPU of this process."""
    devices = [device for array in arrays if isinstance(array, jax.Array) for device in array.devices()]
    return bool(devices) and len(set(devices)) == 1 and is_gpu(devices[0])


def is_gpu(device: Any) -> bool:
    """JAX calls the platform of every vendor's GPUs "gpu"; the client knows which it is."""
    return device.platform == "gpu" and "rocm" not in device.client.platform_version.lower()


def run(arrays: Sequence[Any], call: Call) -> list[Any]:
    """Runs the call now and returns its results as JAX arrays on their arguments' devices."""
    if not jax.profiler.TraceAnnotation.is_enabled():
        return _run(arrays, call)
    with jax.profiler.TraceAnnotation(f"horoclone.{NAMES[call.op]}", tensor=call.name):
        return _run(arrays, call)


def _run(arrays: Sequence[Any], call: Call) -> list[Any]:
    native = runtime.native()
    arrays = [array if isinstance(array, jax.Array) else jnp.asarray(array) for array in arrays]
    sources = [memory.readable(np.asarray(array)) for array in arrays]
    owned = call.op in (ops.ALLGATHER, ops.ALLTOALL, ops.REDUCESCATTER)
    outs = [] if owned else [empty(source) for source in sources]
    handle = _requests.submit_group(
        native, call.op, call.name or None, sources=sources, targets=None if owned else outs,
        dtypes=[memory.dtype_of(source) for source in sources], reduce=call.reduce, prescale=call.prescale,
        postscale=call.postscale, root=call.root, process_set=_set_number(call.members),
    )  # fmt: skip
    try:
        native.wait(handle)
    except BaseException:
        # Interrupted while the core still reads and writes memory that would go away now: end it.
        if not native.poll(handle):
            native.abort(f"interrupted in {NAMES[call.op]}")
        raise
    try:
        done = outs or [memory.rows(native.result(handle, i), like, None) for i, like in enumerate(sources)]
    finally:
        native.release(handle)
    return jax.device_put(
        [result.view(array.dtype) for array, result in zip(arrays, done, strict=True)],
        [array.sharding for array in arrays],
        may_alias=True,
    )


def _set_number(members: str) -> int:
    if not members:
        return 0
    wanted = [int(rank) for rank in members.split(",")]
    for number, ranks in registered().items():
        if number and ranks == wanted:
            return number
    raise ValueError(f"the process set {wanted} is not registered any more")


def empty(like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Memory for a result that becomes a JAX array without a copy."""
    raw = np.empty(like.nbytes + ALIGNMENT, np.uint8)
    start = -memory.address(raw) % ALIGNMENT
    return raw[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
