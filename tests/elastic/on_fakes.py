"""A worker of test_fakes.py: sums on the fakes of CUDA and NCCL, each with its ranks, whoever is lost or comes.

python on_fakes.py STEPS MARK: the process that starts as rank 1 is killed once, at step 5, while the device works.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "torch")]

from test_gpu_fake import Fake  # noqa: E402

import horoclone.torch as hvd  # noqa: E402

STEPS, MARK = int(sys.argv[1]), Path(sys.argv[2])
hvd.init()
fake = Fake(int(os.environ["HOROVOD_RANK"]))
fake.install()
nccl = ctypes.CDLL(os.environ["HOROCLONE_NCCL_LIBRARY"])
state = hvd.elastic.TorchState(step=0, total=0.0)


@hvd.elastic.run
def train(state: Any) -> None:
    now = hvd.elastic.generation()
    print("generation", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
          "new", list(now.newcomers), "commit", now.commit, "skip", now.skip_sync, flush=True)  # fmt: skip
    while state.step < STEPS:
        data = fake.tensor(torch.full((50_000,), now.rank + 1.0))
        handle = hvd.allreduce_async_(data, name="x", op=hvd.Sum)
        if os.environ["HOROVOD_RANK"] == "1" and state.step == 5 and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), 9)
        hvd.synchronize(handle)
        if not torch.all(data == now.size * (now.size + 1) / 2):
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
