"""A whole step of training in a CUDA graph, its reductions with it: no Python and no agreement between steps.

horoclonerun -np 2 python examples/torch_gpu_graph.py    (without a GPU for each rank: ordinary steps, and it says so)
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    return parser.parse_args()


def own_device() -> torch.device:
    """The GPU with this rank's number on its machine, if each rank has one; the first tensor must not come before."""
    if torch.cuda.device_count() < hvd.local_size():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", torch.cuda.current_device())


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """After some ordinary steps on a side stream, in which the buckets form and NCCL connects the ranks."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def main() -> None:
    args = arguments()
    hvd.init()
    device = own_device()
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
    images, labels = (torch.tensor(part).to(device) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    own = torch.arange(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size(), device=device)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(
        device
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # A graph reads and writes always the same memory: a batch is copied into it before each replay.
    batch, target = images[: args.batch_size].clone(), labels[: args.batch_size].clone()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), target).backward()
        optimizer.step()

    graph = captured(step) if device.type == "cuda" else None
    for _ in range(args.steps):
        chosen = own[torch.randint(len(own), (args.batch_size,), device=device)]
        batch.copy_(images[chosen])
        target.copy_(labels[chosen])
        if graph is None:
            step()
        else:
            graph.replay()
    with torch.no_grad():
        right = (model(images[own]).argmax(1) == labels[own]).float().mean()
    accuracy = hvd.allreduce(right, name="accuracy").item()
    if hvd.rank() == 0:
        how = "replays of one graph" if graph else "ordinary steps: there is no GPU for each rank"
        print(f"{args.steps} {how}; training accuracy {accuracy:.2%}")
    del graph  # before shutdown: it uses NCCL's communicator


if __name__ == "__main__":
    main()
