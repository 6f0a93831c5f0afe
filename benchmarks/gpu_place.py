"""Where the tensors of the GPU benchmarks lie: on this rank's GPU, in host memory, or in the memory of CUDA's fake.

The last two only show that a program runs: the fake (tests/fakes, tests/torch/gpu_fake.py) is host memory behind
threads with delays, and no figure that comes from it means anything.
"""

from __future__ import annotations

import os
from typing import Any

import shared_with_tests
import torch

import horoclone.torch as hvd

KINDS = ("cuda", "cpu", "fake")
CYCLES_PER_S = 1.5e9  # of a GPU, more or less


class Place:
    """Host memory, and what the other places do otherwise."""

    name = "cpu"
    device = torch.device("cpu")

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values, there."""
        return tensor

    def zeros(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.put(torch.zeros(count, dtype=dtype, device=self.device))

    def moved(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its parameters there."""
        return model

    def synchronize(self) -> None:
        """Returns when all that was enqueued has been done."""

    def occupy(self, seconds: float) -> None:
        """What is enqueued afterwards begins so much later."""

    def free_bytes(self) -> int | None:
        """Of the GPU's memory; None where there is none."""
        return None


class OnGpu(Place):
    """A GPU for each rank where there are enough, else they share."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SystemExit(
                "torch sees no GPU here; --device cpu and --device fake show only that this runs"
            )
        index = hvd.local_rank() % torch.cuda.device_count()
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def moved(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def occupy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.device)[0])


class OnFake(Place):
    """CPU tensors in memory that the fake has given out. share: all ranks are on its device 0."""

    name = "fake"

    def __init__(self, share: bool) -> None:
        fake = shared_with_tests.load("torch/gpu_fake.py")
        self._fake: Any = fake.Fake(0 if share else hvd.local_rank())
        self._fake.install()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fake.tensor(tensor)

    def moved(self, model: torch.nn.Module) -> torch.nn.Module:
        for parameter in model.parameters():
            parameter.data = self._fake.tensor(parameter.data)
        return model

    def synchronize(self) -> None:
        self._fake.synchronize()

    def occupy(self, seconds: float) -> None:
        self._fake.occupy(seconds)


def place_for(kind: str, share: bool) -> Place:
    """After hvd.init(). kind: one of KINDS. HC_RANKS_ARE_NCCL_HOSTS: NCCL takes several ranks on one GPU."""
    if "HC_RANKS_ARE_NCCL_HOSTS" in os.environ:
        os.environ["NCCL_HOSTID"] = f"rank {hvd.rank()}"
    return OnGpu() if kind == "cuda" else OnFake(share) if kind == "fake" else Place()
