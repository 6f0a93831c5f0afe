"""A long training as it is done on ImageNet: warm-up, step decay, checkpoints, resume, several batches per allreduce.

Data is a folder with one folder of images per class (needs Pillow), or else synthetic images.
    horoclonerun -np 2 python examples/torch_imagenet_style.py --checkpoint-dir /tmp/run
    horoclonerun -np 8 python examples/torch_imagenet_style.py --train-dir /data/train --image-size 224 --epochs 90
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import horoclone.torch as hvd

try:
    from tqdm import tqdm
except ImportError:  # a plain loop does as well

    def tqdm(batches, **_):
        return batches


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train-dir", type=Path, help="a folder per class; default: synthetic images")
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="resumes from the newest one in it; default: a new folder"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank and pass")
    parser.add_argument("--batches-per-allreduce", type=int, default=2, help="passes accumulated locally")
    parser.add_argument("--base-lr", type=float, default=0.02, help="for one rank and one pass")
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--synthetic-images", type=int, default=512)
    parser.add_argument("--workers", type=int, default=0, help="loader processes per rank")
    parser.add_argument("--fp16-allreduce", action="store_true")
    return parser.parse_args()


class SyntheticImages(Dataset):
    """Ten classes, each a fixed pattern under noise: learnable, the same on every rank."""

    def __init__(self, count: int, size: int) -> None:
        self.patterns = torch.randn(10, 3, size, size, generator=torch.Generator().manual_seed(1))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        noise = torch.randn(self.patterns[0].shape, generator=torch.Generator().manual_seed(index))
        return self.patterns[index % 10] + 1.5 * noise, index % 10


class FolderOfImages(Dataset):
    def __init__(self, folder: Path, size: int) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.size, self.classes = size, len(classes)
        self.files = [(f, label) for label, path in enumerate(classes) for f in sorted(path.iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int):
        import numpy
        from PIL import Image

        path, label = self.files[index]
        image = Image.open(path).convert("RGB").resize((self.size, self.size))
        return torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1).float() / 128 - 1, label


def network(classes: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [torch.nn.Conv2d(before, after, 3, 2, 1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, classes)
    )


def learning_rate(args: argparse.Namespace, epoch: float) -> float:
    """Goyal et al. 2017: from the rate of one rank up to that of all; divided by ten at 30, 60, 80 epochs of 90."""
    whole = args.base_lr * hvd.size() * args.batches_per_allreduce
    if epoch < args.warmup_epochs:
        return args.base_lr + (whole - args.base_lr) * epoch / args.warmup_epochs
    return whole * 0.1 ** sum(
        epoch >= share * args.epochs for share in (1 / 3, 2 / 3, 8 / 9) if args.epochs >= 9
    )


def train(args, model, optimizer, loader, sampler, epoch: int) -> tuple[float, float]:
    """One epoch. Returns loss and accuracy over all ranks."""
    model.train()
    sampler.set_epoch(epoch)
    sums = torch.zeros(3)
    for index, (images, labels) in enumerate(
        tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=hvd.rank() != 0)
    ):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, epoch + index / len(loader))
        optimizer.zero_grad()
        for start in range(0, len(images), args.batch_size):
            part, truth = images[start : start + args.batch_size], labels[start : start + args.batch_size]
            scores = model(part)
            loss = F.cross_entropy(scores, truth)
            sums += torch.tensor(
                [loss.item() * len(part), (scores.argmax(1) == truth).sum().item(), len(part)]
            )
            (loss / args.batches_per_allreduce).backward()
        optimizer.step()
    total = hvd.allreduce(sums, op=hvd.Sum, name="sums")
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    if args.train_dir:
        data: Dataset = FolderOfImages(args.train_dir, args.image_size)
        model = network(data.classes)
    else:
        data, model = SyntheticImages(args.synthetic_images, args.image_size), network(10)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    size = args.batch_size * args.batches_per_allreduce
    loader = DataLoader(data, size, sampler=sampler, num_workers=args.workers, drop_last=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.base_lr, args.momentum, weight_decay=args.weight_decay),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
    )

    # Rank 0 finds the newest checkpoint and loads it; the others get everything from rank 0.
    folder = args.checkpoint_dir or (Path(tempfile.mkdtemp(prefix="imagenet-")) if hvd.rank() == 0 else None)
    first = 0
    if hvd.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        saved = sorted(folder.glob("epoch-*.pt"))
        if saved:
            state = torch.load(saved[-1])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["epoch"]
    first = hvd.broadcast_object(first, root_rank=0, name="first epoch")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if hvd.rank() == 0 and first:
        print(f"resumed after epoch {first}")

    loss = accuracy = float("nan")
    for epoch in range(first, args.epochs):
        loss, accuracy = train(args, model, optimizer, loader, sampler, epoch)
        if hvd.rank() == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.1%}, rate {rate:.4f}", flush=True)
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / f"epoch-{epoch + 1:03}.pt")
    if hvd.rank() == 0:
        print(
            f"{hvd.size()} ranks, epochs {first + 1} to {args.epochs}, training accuracy {accuracy:.1%}; {folder}"
        )


if __name__ == "__main__":
    main()
