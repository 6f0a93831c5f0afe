"""torch.compile: a model in an optimizer, and collectives inside a function that is compiled as one graph.

horoclonerun -np 2 python examples/torch_compile.py --backend inductor
"""

import argparse

import torch

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", default="aot_eager", help="inductor makes fast code, but compiles for long"
    )
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def contrastive_loss(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Pairs must find each other among the pairs of all ranks: the negatives come from everywhere."""
    mine, theirs = (torch.nn.functional.normalize(x) for x in (mine, theirs))
    everybody = hvd.allgather(theirs, name="negatives")
    scores = mine @ everybody.T / 0.2
    target = torch.arange(len(mine)) + hvd_rank * len(mine)
    return torch.nn.functional.cross_entropy(scores, target)


hvd_rank = 0


def main() -> None:
    global hvd_rank
    args = arguments()
    hvd.init()
    hvd_rank = hvd.rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return contrastive_loss(model(x), model(y))

    compiled = torch.compile(step_loss, fullgraph=True, backend=args.backend)
    chance = torch.Generator().manual_seed(1 + hvd.rank())
    losses, difference = [], 0.0
    for step in range(args.steps):
        x = torch.randn(16, 32, generator=chance)
        y = x + 0.5 * torch.randn(16, 32, generator=chance)
        optimizer.zero_grad()
        loss = compiled(x, y)
        if step == 0:
            with torch.no_grad():
                difference = abs(loss.item() - step_loss(x, y).item())
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    if hvd.rank() == 0:
        print(f"{args.backend}: compiled and eager loss differ by {difference:.1e}")
        print(
            f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {args.steps} steps on {hvd.size()} ranks"
        )


if __name__ == "__main__":
    main()
