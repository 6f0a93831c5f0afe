"""A worker of test_fakes.py: sums on the fakes of CUDA and NCCL, each with its ranks, whoever is lost or comes.

python on_fakes.py STEPS MARK: the process that starts as rank 1 is killed once, at step 5, while the device works.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np

import horoclone as hvd
from horoclone.arrays.host_memory import dtype_of
from horoclone.elastic.generation import generation
from horoclone.elastic.run import run
from horoclone.elastic.state import ObjectState
from horoclone.runtime import native

STEPS, MARK, COUNT = int(sys.argv[1]), Path(sys.argv[2]), 50_000
hvd.init()
device = int(os.environ["HOROVOD_RANK"])
cuda = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
nccl = ctypes.CDLL(os.environ["HOROCLONE_NCCL_LIBRARY"])
context, stream, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
assert cuda.cuCtxPushCurrent_v2(context) == 0
assert cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 * COUNT)) == 0
data = np.frombuffer((ctypes.c_float * COUNT).from_address(memory.value), np.float32)
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0)


@run
def train(state: ObjectState) -> None:
    now = generation()
    print("generation", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
          "new", list(now.newcomers), "commit", now.commit, "skip", now.skip_sync, flush=True)  # fmt: skip
    while state.step < STEPS:
        cuda.cuStreamSynchronize(stream)
        data[:] = now.rank + 1.0
        core = native()
        handle = core.submit(
            hvd.ops.ALLREDUCE, "x", memory.value, memory.value, (COUNT,), dtype_of(data), hvd.Sum,
            device=device, stream=stream.value,
        )  # fmt: skip
        if os.environ["HOROVOD_RANK"] == "1" and state.step == 5 and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), 9)
        core.wait(handle)
        core.stream_wait(handle, stream.value)
        cuda.cuStreamSynchronize(stream)
        if not np.all(data == now.size * (now.size + 1) / 2):
            # Undefined, where a rank is lost while the result is on its way (docs/gpu.md); the next call must say so.
            hvd.barrier()
            raise AssertionError(f"a wrong sum, and no rank is lost: {data[:3]}")
        state.total += float(data[0]) / now.size
        state.step += 1
        print("step", state.step, "of", now.number, "", flush=True)
        state.commit()
        time.sleep(0.02)
    print("communicators", nccl.hc_fake_communicators(), flush=True)


train(state)
print("done", hvd.rank(), hvd.size(), state.step, f"{state.total:.3f}", flush=True)
hvd.shutdown()
print("left", nccl.hc_fake_communicators(), flush=True)
