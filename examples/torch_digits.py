"""Data-parallel training of a small convolutional network on scikit-learn's scanned digits.

Runs alike under any launcher, and alone:
    horoclonerun -np 2 python examples/torch_digits.py
    mpirun -n 2 python examples/torch_digits.py
    torchrun --nproc-per-node 2 examples/torch_digits.py
    python examples/torch_digits.py
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horoclone.torch as hvd

try:
    from tqdm import tqdm
except ImportError:  # a plain loop does as well

    def tqdm(batches, **_):
        return batches


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument(
        "--learning-rate", type=float, default=2e-3, help="for one rank; multiplied by the size"
    )
    parser.add_argument("--checkpoint", type=Path, help="file to write (default: in a new temporary folder)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--accuracy", type=float, default=0.97, help="what the test must reach at the end")
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels, a fifth of them for testing; the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) for x in parts[:2])
    train_y, test_y = (torch.tensor(y) for y in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Dropout(0.25),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 4 * 4, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


def train_epoch(model, optimizer, schedule, batches, epoch: int) -> float:
    """One pass over this rank's share of the data. Returns the loss averaged over batches and ranks."""
    model.train()
    total = torch.zeros(())
    for images, labels in tqdm(batches, desc=f"epoch {epoch}", leave=False, disable=hvd.rank() != 0):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach()
    return hvd.allreduce(total / len(batches), name="train_loss").item()


@torch.no_grad()
def test_accuracy(model, data: TensorDataset) -> float:
    """Every rank tests its own share; the counts are added up."""
    model.eval()
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data.tensors)
    right = (model(images).argmax(dim=1) == labels).sum().float()
    counts = hvd.allreduce(
        torch.stack([right, torch.tensor(float(len(labels)))]), name="accuracy", op=hvd.Sum
    )
    return (counts[0] / counts[1]).item()


def digest(model: torch.nn.Module) -> str:
    """Of all parameters, bit by bit."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().numpy().tobytes())
    return whole.hexdigest()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # dropout differs between ranks; the parameters are rank 0's
    torch.set_num_threads(1)
    train, test = digits()

    # Shard the data, scale the learning rate, wrap the optimizer, start from rank 0's state: the four steps.
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    batches = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = network()
    learning_rate = args.learning_rate * hvd.size()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, args.epochs * len(batches))

    folder = Path(tempfile.mkdtemp(prefix="digits-")) if hvd.rank() == 0 and not args.checkpoint else None
    checkpoint = args.checkpoint or (folder / "model.pt" if folder else None)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, schedule, batches, epoch)
        accuracy = test_accuracy(model, test)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.2%}", flush=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)

    digests = hvd.allgather_object(digest(model))
    if len(set(digests)) != 1:
        raise SystemExit(f"the ranks ended with different parameters: {digests}")
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, identical parameters ({digests[0][:12]}); checkpoint: {checkpoint}")
        if accuracy < args.accuracy:
            raise SystemExit(f"test accuracy {accuracy:.2%} is below {args.accuracy:.0%}")


if __name__ == "__main__":
    main()
