"""Data-parallel training on a Ray cluster: scikit-learn's scanned digits, on as many workers as there is room for.

    python examples/ray_digits.py                    # starts a Ray on this machine, and ends it
    python examples/ray_digits.py --address auto     # on the cluster that this machine belongs to
    python examples/ray_digits.py --elastic          # goes on when a worker, or its node, is lost

Needs Ray: pip install '.[ray]' in the sources' folder.
"""

import argparse

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import horoclone.torch as hvd
from horoclone.ray import RayExecutor, ray_logger


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels; every fifth is for testing."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)
    tests = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~tests], y[~tests]), TensorDataset(x[tests], y[tests])


def train(epochs: int) -> float:
    """Runs in every worker. The accuracy on the test images."""
    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data, tests = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run  # in a job of a fixed size it only broadcasts the state
    def go(state) -> float:
        while state.epoch < epochs:
            for index, (images, labels) in enumerate(DataLoader(data, batch_size=32, sampler=sampler)):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                sampler.record_batch(index, len(labels))
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
            with torch.no_grad():
                images, labels = tests.tensors
                accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
            ray_logger.log({"epoch": state.epoch, "ranks": hvd.size(), "accuracy": accuracy})
        return accuracy

    return go(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a cluster: auto, HOST:PORT, or ray://HOST:PORT")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()

    if args.address is None:
        ray.init(num_cpus=args.workers, include_dashboard=False)
    else:
        ray.init(address=args.address)
    settings = RayExecutor.create_settings(timeout_s=60)
    if args.elastic:
        executor = RayExecutor(settings, min_workers=1, max_workers=args.workers)
    else:
        executor = RayExecutor(settings, num_workers=args.workers)
    executor.start()
    accuracies = executor.run(train, args=[args.epochs], callbacks=[print])
    executor.shutdown()
    print(f"{len(accuracies)} ranks, test accuracy {accuracies[0]:.2%}")
    if accuracies[0] < 0.93 or len(set(accuracies)) != 1:
        raise SystemExit(f"the ranks have reached {accuracies}")


if __name__ == "__main__":
    main()
