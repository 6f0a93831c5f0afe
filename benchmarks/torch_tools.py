"""Steps of torch's FSDP2, tensor parallel and pipelining on horoclone and on gloo, in turn in the same processes.

torchrun --nproc-per-node 2 benchmarks/torch_tools.py [--width 512] [--steps 40]: prints, for each tool, the median step
of the slowest rank on both, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import horoclone.torch  # noqa: F401 - registers the backend

Step = Callable[[], None]


def layers(count: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )
    )


def trained(model: nn.Module, data: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()

    return step


def fsdp(mesh: DeviceMesh, width: int) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = layers(4, width)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, torch.ones(16, width))


def tensor_parallel(mesh: DeviceMesh, width: int) -> Step:
    from torch.distributed.tensor import parallel

    model = layers(4, width)
    for block in model:
        parallel.parallelize_module(
            block, mesh, {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        )
    return trained(model, torch.ones(16, width))


def pipeline(mesh: DeviceMesh, width: int) -> Step:
    from torch.distributed import pipelining

    rank, size = mesh.get_local_rank(), mesh.size()
    mine = layers(size, width)[rank]
    optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3)
    stage = pipelining.PipelineStage(mine, rank, size, torch.device("cpu"), group=mesh.get_group())
    schedule = pipelining.Schedule1F1B(stage, 8, loss_fn=nn.MSELoss())
    data = torch.ones(64, width)

    def step() -> None:
        optimizer.zero_grad()
        inputs = [data] if rank == 0 else []
        schedule.step(*inputs, target=data if rank == size - 1 else None)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("horoclone")
    meshes = {
        backend: DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
        for backend in ("horoclone", "gloo")
    }
    tools: list[Callable[[Any, int], Step]] = [fsdp, tensor_parallel, pipeline]
    for tool in tools:
        steps = {backend: tool(mesh, wish.width) for backend, mesh in meshes.items()}
        times: dict[str, list[float]] = {backend: [] for backend in steps}
        for number in range(wish.steps + 5):
            for backend in list(steps) if number % 2 else reversed(list(steps)):
                dist.barrier()
                begin = time.perf_counter()
                steps[backend]()
                taken = torch.tensor([time.perf_counter() - begin])
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                if number >= 5:
                    times[backend].append(taken.item() * 1e3)
        if dist.get_rank() == 0:
            ours, theirs = (statistics.median(times[backend]) for backend in ("horoclone", "gloo"))
            ratio = statistics.median(a / b for a, b in zip(times["horoclone"], times["gloo"], strict=True))
            print(
                f"{tool.__name__:16} horoclone {ours:7.2f} ms  gloo {theirs:7.2f} ms  ratio {ratio:.2f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
