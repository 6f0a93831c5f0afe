"""A model cut in three ways with torch's own tools: stages of a pipeline, shards of parameters, parts of matrices.

horoclonerun -np 8 python examples/torch_parallel.py: 2 stages x 2 shards (FSDP2) x 2 parts (tensor parallel). With
fewer ranks some of the ways have one part. The loss is that of one process.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import horoclone.torch  # noqa: F401 - registers the backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    wish = parser.parse_args()
    dist.init_process_group("horoclone")
    size = dist.get_world_size()
    stages = 2 if size % 2 == 0 else 1
    shards = 2 if size % 4 == 0 else 1
    shape = (stages, shards, size // stages // shards)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("stage", "data", "tensor"))

    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(wish.width, 4 * wish.width), nn.ReLU(), nn.Linear(4 * wish.width, wish.width))
        for _ in range(4)
    ]
    stage = mesh["stage"].get_local_rank()
    each = 4 // stages
    mine = nn.Sequential(*blocks[stage * each : (stage + 1) * each])
    for block in mine:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(mine, mesh=mesh["data"])
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)

    data, target = torch.randn(2, 64, wish.width, generator=torch.Generator().manual_seed(1))
    part = mesh["data"].get_local_rank()
    data, target = data.chunk(shards)[part], target.chunk(shards)[part]
    pipeline = Schedule1F1B(
        PipelineStage(mine, stage, stages, torch.device("cpu"), group=mesh["stage"].get_group()),
        n_microbatches=4,
        loss_fn=nn.MSELoss(),
    )
    is_last = stage == stages - 1
    for step in range(wish.steps):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        pipeline.step(
            *([data] if stage == 0 else []), **({"target": target, "losses": losses} if is_last else {})
        )
        optimizer.step()
        if step in (0, wish.steps - 1):
            loss = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
            dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh["data"].get_group())
            dist.all_reduce(loss, op=dist.ReduceOp.MAX)  # the last stage has it
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.4f} on {' x '.join(map(str, shape))} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
