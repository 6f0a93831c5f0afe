"""ZeRO-1: each rank keeps its share of the optimizer state; a checkpoint is whole, and goes on sharded or not.

horoclonerun -np 2 python examples/torch_zero.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--width", type=int, default=512, help="of the hidden layers")
    parser.add_argument("--whole", action="store_true", help="keep the whole state on every rank, to compare")
    return parser.parse_args()


def build(width: int, shard: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), shard_optimizer_state=shard
    )
    return model, optimizer


def train(model, optimizer, images, labels, batches) -> float:
    """One pass over this rank's batches. Returns the mean loss of all ranks."""
    total = torch.zeros(())
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()  # updates this rank's share of the parameters; the ranks exchange them
        total += loss.detach()
    return hvd.allreduce(total / len(batches), name="loss").item()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    own = torch.arange(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())
    batches = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))].split(args.batch_size)
    model, optimizer = build(args.width, not args.whole)
    for epoch in range(1, args.epochs + 1):
        loss = train(model, optimizer, images, labels, batches)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)

    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    bytes_here = hvd.allgather(torch.tensor([sum(v.nbytes for v in state)]), name="bytes").tolist()
    bytes_whole = 2 * sum(p.nbytes for p in model.parameters())

    optimizer.consolidate_state_dict(to=0)  # every rank takes part; rank 0 gets the whole state
    checkpoint = None
    if hvd.rank() == 0:
        checkpoint = Path(tempfile.mkdtemp(prefix="zero-")) / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    checkpoint = hvd.broadcast_object(checkpoint, name="path")

    # It is an ordinary checkpoint: here it goes on unsharded, beside the sharded optimizer that wrote it.
    whole_model, whole = build(args.width, False)
    saved = torch.load(checkpoint, weights_only=True)
    whole_model.load_state_dict(saved["model"])
    whole.load_state_dict(saved["optimizer"])
    losses = [train(m, o, images, labels, batches) for m, o in ((model, optimizer), (whole_model, whole))]
    if hvd.rank() == 0:
        each = " and ".join(f"{100 * b / bytes_whole:.0f}%" for b in bytes_here)
        print(f"{bytes_whole / 1e6:.2f} MB of state, of which the ranks keep {each}")
        print(f"loss {losses[0]:.4f} sharded, {losses[1]:.4f} unsharded from its checkpoint")


if __name__ == "__main__":
    main()
