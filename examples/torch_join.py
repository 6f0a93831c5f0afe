"""Ranks with different amounts of data: a rank that has no more batches calls join() and the others go on.

horoclonerun -np 2 python examples/torch_join.py
"""

import argparse

import torch

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batches", type=int, default=20, help="of rank 0; each further rank has as many more"
    )
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
    )
    truth = torch.tensor([1.0, -2.0, 3.0, 0.5])
    own = args.batches * (hvd.rank() + 1)
    chance = torch.Generator().manual_seed(hvd.rank())
    for _ in range(args.epochs):
        for _ in range(own):
            x = torch.randn(16, 4, generator=chance)
            optimizer.zero_grad()
            ((model(x).squeeze(1) - x @ truth) ** 2).mean().backward()
            optimizer.step()
        last = hvd.join()  # takes part in the others' reductions with zeros until everybody is here
        # Ranks that joined earlier made fewer steps: everybody goes on from the parameters of the last one.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    counts = hvd.allgather(torch.tensor([own * args.epochs]), name="steps").tolist()
    error = (model.weight.detach()[0] - truth).abs().max().item()
    if hvd.rank() == 0:
        print(f"steps per rank {counts}, last to join: rank {last}, largest error {error:.1e}")


if __name__ == "__main__":
    main()
