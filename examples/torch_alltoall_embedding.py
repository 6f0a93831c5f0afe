"""An embedding table that is too large for one rank: rows are spread over the ranks and looked up with alltoall.

horoclonerun -np 2 python examples/torch_alltoall_embedding.py
"""

import argparse

import torch

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64, help="lookups per rank and step")
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


class ShardedEmbedding(torch.nn.Module):
    """Row i lives on rank i % size, at place i // size."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        own = (rows - hvd.rank() + hvd.size() - 1) // hvd.size()
        self.shard = torch.nn.Parameter(torch.zeros(own, width))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices: int64[n], any rows. Returns float[n, width]. The gradient goes back to the owners."""
        owner = indices % hvd.size()
        order = owner.argsort(stable=True)
        splits = owner.bincount(minlength=hvd.size()).int()
        wanted, asked = hvd.alltoall(indices[order], splits, name="indices")
        found, _ = hvd.alltoall(self.shard[wanted // hvd.size()], asked, name="rows")
        return torch.empty_like(found).index_copy(0, order, found)


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    truth = torch.randn(args.rows, args.width, generator=torch.Generator().manual_seed(1))
    chance = torch.Generator().manual_seed(10 + hvd.rank())
    table = ShardedEmbedding(args.rows, args.width)
    # Each rank updates its own rows: nothing to reduce, a plain optimizer does it.
    optimizer = torch.optim.Adam(table.parameters(), lr=0.05)
    for step in range(args.steps):
        indices = torch.randint(args.rows, (args.batch_size,), generator=chance)
        optimizer.zero_grad()
        loss = ((table(indices) - truth[indices]) ** 2).mean()
        loss.backward()
        optimizer.step()
        if step % (args.steps // 3 or 1) == 0 or step == args.steps - 1:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step}: loss {mean:.4f}", flush=True)
    sizes = hvd.allgather(torch.tensor([len(table.shard)]), name="sizes").tolist()
    if hvd.rank() == 0:
        print(f"{args.rows} rows on {hvd.size()} ranks as {sizes}, final loss {mean:.4f}")


if __name__ == "__main__":
    main()
