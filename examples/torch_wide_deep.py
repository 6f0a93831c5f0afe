r"""Wide & Deep (Cheng et al. 2016) on a parameter server: embeddings on servers, the dense part by allreduce.

    (umask 077; openssl rand -hex 16 > secret)
    python -m horoclone.ps --register 29400 &
    horoclonerun -np 2 python -m horoclone.ps --name ads --store 127.0.0.1:29400 --secret-file secret &
    horoclonerun -np 2 python examples/torch_wide_deep.py \
        --server ads --store 127.0.0.1:29400 --secret-file secret

Without --server it is the same model in one process, with torch.nn.EmbeddingBag and torch.optim.Adagrad.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import horoclone.torch as hvd
from horoclone.ps import torch as ps

USERS, ITEMS, WIDTH = 300, 100, 16


def clicks(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids of a user and an item, whether it was clicked); few users and items make most of the visits."""
    chance = torch.Generator().manual_seed(seed)
    truth = torch.Generator().manual_seed(0)
    taste, kind = torch.randn(USERS, 2, generator=truth), torch.randn(ITEMS, 2, generator=truth)
    habit, appeal = torch.randn(USERS, generator=truth), torch.randn(ITEMS, generator=truth)
    visits = torch.rand(count, 2, generator=chance) ** 2
    user, item = (visits[:, 0] * USERS).long(), (visits[:, 1] * ITEMS).long()
    score = habit[user] + appeal[item] + 2 * (taste[user] * kind[item]).sum(1)
    clicked = torch.rand(count, generator=chance) < torch.sigmoid(score)
    return torch.stack([user, USERS + item], 1), clicked.float()


class WideDeep(torch.nn.Module):
    """`wide` has one weight for each id, `deep` a vector, and a network on top of the vectors."""

    def __init__(self, wide: torch.nn.Module, user: torch.nn.Module, item: torch.nn.Module) -> None:
        super().__init__()
        self.wide, self.user, self.item = wide, user, item
        self.tower = torch.nn.Sequential(
            torch.nn.Linear(2 * WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logit of a click for each row of ids."""
        vectors = torch.cat([self.user(ids[:, :1]), self.item(ids[:, 1:])], 1)
        return (self.wide(ids) + self.tower(vectors)).squeeze(1)


def tables(wish: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """The three embeddings, and the optimizers that they need here: none where servers have them."""
    widths, spreads = {"wide": 1, "user": WIDTH, "item": WIDTH}, {"wide": 0.0, "user": 0.1, "item": 0.1}
    if wish.server is None:
        made: list[Any] = []
        for name, width in widths.items():
            table = torch.nn.EmbeddingBag(USERS + ITEMS, width, mode="sum", sparse=True)
            torch.nn.init.normal_(table.weight, std=spreads[name])
            made.append(table)
        return made, [torch.optim.Adagrad([table.weight for table in made], lr=wish.lr)]
    servers = ps.Servers(wish.server, wish.store, secret_file=wish.secret_file)
    optimizer = ps.Adagrad(lr=wish.lr)
    return [
        ps.EmbeddingBag(
            name,
            None,
            width,
            servers,
            mode="sum",
            optimizer=optimizer,
            staleness=wish.staleness,
            spread=spreads[name],
        )
        for name, width in widths.items()
    ], []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", help="name of the parameter server; without it, one process by itself")
    parser.add_argument("--store", help="HOST:PORT of its register")
    parser.add_argument("--secret-file", help="with the secret that the servers have")
    parser.add_argument("--staleness", type=int, help="default: asynchronous; 0: rounds")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.1)
    wish = parser.parse_args()
    hvd.init()
    if wish.server is None and hvd.size() > 1:
        raise SystemExit("without --server this is one process; several need a parameter server")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    embeddings, optimizers = tables(wish)
    model = WideDeep(*embeddings)
    dense = torch.optim.Adam(model.tower.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.tower.state_dict(), root_rank=0)
    optimizers.append(hvd.DistributedOptimizer(dense, model.tower.named_parameters()))

    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    for step in range(wish.steps):
        ids, clicked = clicks(wish.batch, seed=10 + step)
        mine = slice(hvd.rank(), None, hvd.size())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model(ids[mine]), clicked[mine]).backward()
        for optimizer in optimizers:
            optimizer.step()
    hvd.barrier()
    model.eval()
    ids, clicked = clicks(4096, seed=1)
    with torch.no_grad():
        loss = loss_of(model(ids), clicked)
    if hvd.rank() == 0:
        print(f"{hvd.size()} workers, loss on clicks that nobody has seen: {loss:.4f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
