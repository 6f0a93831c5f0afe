"""Elastic training with PyTorch: ranks may be lost and may come, and every sample is trained on once in each epoch.

horoclonerun -np 2 python examples/torch_elastic.py
horoclonerun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python examples/torch_elastic.py
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import horoclone.torch as hvd


def data() -> TensorDataset:
    """1,024 points in the plane, and on which side of a circle they lie."""
    points = torch.randn(1024, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points.square().sum(1) > 1.4).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches-per-commit", type=int, default=4)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    dataset = data()
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset, seed=3)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    def on_reset() -> None:
        """Another number of ranks: the rate is for that many."""
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * hvd.size()
        print(f"generation {hvd.elastic.generation().number}: rank {hvd.rank()} of {hvd.size()}", flush=True)

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            # The sampler has what is left of this epoch; a loader is made anew, since the length may have changed.
            for index, (points, labels) in enumerate(DataLoader(dataset, args.batch_size, sampler=sampler)):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(points), labels)
                loss.backward()
                optimizer.step()
                sampler.record_batch(index, len(points))
                if (index + 1) % args.batches_per_commit == 0:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
            mean = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {mean.item():.4f}, {hvd.size()} ranks", flush=True)

    train(state)
    points, labels = dataset.tensors
    if hvd.rank() == 0:
        print(f"accuracy {(model(points).argmax(1) == labels).float().mean().item():.2%}", flush=True)


if __name__ == "__main__":
    main()
