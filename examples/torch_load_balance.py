"""Ranks of different speed: each takes as large a part of every batch as it is fast, and the mean stays exact.

horoclonerun -np 2 python examples/torch_load_balance.py
"""

import argparse
import time

import torch

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sample-ms", type=float, default=1.0, help="of a sample on rank 0; rank 1: twice that"
    )
    parser.add_argument("--batch-size", type=int, default=60, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    truth = torch.tensor([1.0, -2.0, 3.0, 0.5])
    x = torch.randn(1200, 4)
    data = torch.utils.data.TensorDataset(x, x @ truth)
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    sampler = hvd.LoadBalancedBatchSampler(data, args.batch_size, every=5)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        begun = time.perf_counter()
        for inputs, targets in loader:
            time.sleep(len(inputs) * args.sample_ms * (1 + hvd.rank()) / 1000)  # rank 1 is slower
            optimizer.zero_grad()
            optimizer.set_weight(len(inputs))
            ((model(inputs).squeeze(1) - targets) ** 2).mean().backward()
            optimizer.step()
        step_ms = 1000 * (time.perf_counter() - begun) / len(loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {step_ms:.1f} ms a step, then shares of {sampler.shares}")
    if hvd.rank() == 0:
        error = (model.weight.detach()[0] - truth).abs().max().item()
        print(f"shares {sampler.shares}, largest error {error:.1e}")


if __name__ == "__main__":
    main()
