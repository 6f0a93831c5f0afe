"""Mixed precision: autocast, gradient scaling, clipping, and gradients that travel in 16 bits.

horoclonerun -np 2 python examples/torch_amp.py --dtype float16
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--clip", type=float, default=5.0, help="norm of the reduced gradient")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    own = torch.arange(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16 if args.dtype == "bfloat16" else hvd.Compression.fp16,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=args.dtype == "float16")
    for _ in range(args.epochs):
        for batch in own[torch.randperm(len(own))].split(args.batch_size):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=getattr(torch, args.dtype)):
                scores = model(images[batch])
            loss = F.cross_entropy(scores.float(), labels[batch])
            scaler.scale(loss).backward()
            # Clipping needs the reduced gradient, unscaled. Without clipping scaler.step(optimizer) alone is enough.
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
    with torch.no_grad():
        right = (model(images[own]).argmax(1) == labels[own]).float().mean()
    accuracy = hvd.allreduce(right, name="accuracy").item()
    if hvd.rank() == 0:
        print(f"{args.dtype}: loss scale {scaler.get_scale():g}, training accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
