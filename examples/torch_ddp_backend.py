"""DistributedDataParallel, unchanged, on horoclone's transports: the backend of torch.distributed.

Needs no MASTER_ADDR and no port, whatever the launcher:
    horoclonerun -np 2 python examples/torch_ddp_backend.py
    torchrun --nproc-per-node 2 examples/torch_ddp_backend.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horoclone.torch  # noqa: F401 - registers the backend


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horoclone", help="or gloo")
    parser.add_argument("--epochs", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # DDP starts everybody from rank 0's parameters
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 64, sampler=sampler)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        right = (model(images[rank::size]).argmax(1) == labels[rank::size]).sum().float()
    dist.all_reduce(right)
    weights = [torch.empty_like(model.module[0].weight) for _ in range(size)]
    dist.all_gather(weights, model.module[0].weight.detach())
    if rank == 0:
        same = all(torch.equal(weights[0], other) for other in weights)
        accuracy = right.item() / len(images)
        print(
            f"DDP on {dist.get_backend()}, {size} ranks, training accuracy {accuracy:.2%}, same parameters: {same}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
