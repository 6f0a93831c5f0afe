"""Two models trained at once, each by its own half of the ranks, which never wait for the other half.

horoclonerun -np 2 python examples/torch_process_sets.py
"""

import argparse

import torch

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    ranks = list(range(hvd.size()))
    halves = [ranks[0::2], ranks[1::2]] if hvd.size() > 1 else [ranks]
    # A set that is the whole world exists already; the others are registered by all ranks, in the same order.
    sets = [hvd.global_process_set if half == ranks else hvd.add_process_set(half) for half in halves]
    mine = next(index for index, half in enumerate(halves) if hvd.rank() in half)
    group = sets[mine]

    # Each half learns another function; its members learn from different samples of it.
    truth = torch.randn(10, generator=torch.Generator().manual_seed(mine))
    chance = torch.Generator().manual_seed(100 + hvd.rank())
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(10, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=group
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=halves[mine][0], process_set=group)
    for _ in range(args.steps):
        x = torch.randn(args.batch_size, 10, generator=chance)
        optimizer.zero_grad()
        ((model(x).squeeze(1) - x @ truth) ** 2).mean().backward()
        optimizer.step()

    error = (model.weight.detach()[0] - truth).norm()
    mean = hvd.allreduce(error, name="error", process_set=group).item()
    reports = hvd.allgather_object((mine, halves[mine], mean))
    if hvd.rank() == 0:
        for model_index, members, distance in sorted({(m, tuple(r), d) for m, r, d in reports}):
            print(
                f"model {model_index}: trained by ranks {list(members)}, distance from the truth {distance:.1e}"
            )
        print(f"{len(sets)} process sets, largest distance {max(d for _, _, d in reports):.1e}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
