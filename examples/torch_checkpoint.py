"""Checkpoints beside training: all ranks write, no step waits for the disk, and a second start goes on where one ended.

horoclonerun -np 2 python examples/torch_checkpoint.py --path /tmp/circle
"""

from __future__ import annotations

import argparse
import tempfile

import torch

import horoclone.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", help="a directory that all machines share; default: a new one")
    parser.add_argument("--steps", type=int, default=200, help="in this start")
    parser.add_argument("--steps-per-save", type=int, default=50)
    args = parser.parse_args()

    hvd.init()
    path = args.path or hvd.broadcast_object(tempfile.mkdtemp(prefix="circle-") if hvd.rank() == 0 else None)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = 0
    if hvd.checkpoint.saves(path):
        saved = hvd.checkpoint.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    first, last = step, step + args.steps
    while step < last:
        generator = torch.Generator().manual_seed(step * hvd.size() + hvd.rank())
        points = torch.randn(64, 2, generator=generator)
        labels = (points.square().sum(1) > 1.4).long()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        step += 1
        if step % args.steps_per_save == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            hvd.checkpoint.save(path, state, keep=2)
    hvd.checkpoint.wait()
    if hvd.rank() == 0:
        print(
            f"steps {first} to {last}: loss {loss.item():.4f}; saves {hvd.checkpoint.saves(path)} in {path}"
        )


if __name__ == "__main__":
    main()
