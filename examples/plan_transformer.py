"""A model for `horoclone plan examples/plan_transformer.py:build -np 2`, and the training that the plan is for."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import horoclone.torch as hvd


def build(
    width: int = 128, layers: int = 4, batch: int = 8, length: int = 64
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor], Callable[..., torch.optim.Optimizer]]:
    """The model, the loss of one batch of this rank, the optimizer of some parameters."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(1000, width),
        torch.nn.TransformerEncoder(block, layers),
        torch.nn.Linear(width, 1000),
    )
    words = torch.randint(0, 1000, (batch, length + 1), generator=torch.Generator().manual_seed(hvd.rank()))

    def loss_of_batch() -> torch.Tensor:
        said = model(words[:, :-1])
        return torch.nn.functional.cross_entropy(said.flatten(0, 1), words[:, 1:].flatten())

    return model, loss_of_batch, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    wish = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    model, loss_of_batch, optimizer_of = build()
    # What the plan says to write:
    optimizer = hvd.DistributedOptimizer(optimizer_of(model.parameters()), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(wish.steps):
        optimizer.zero_grad()
        loss = loss_of_batch()
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach())
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {wish.steps} steps, loss {mean:.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
