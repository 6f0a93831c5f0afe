"""One GPU for each rank: bfloat16 autocast, gradients reduced by NCCL while backward goes on, no wait of the host.

horoclonerun -np 2 python examples/torch_gpu_digits.py    (without a GPU it trains on the CPU and says so)
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    return parser.parse_args()


def own_device() -> torch.device:
    """The GPU with this rank's number on its machine; the first tensor must not come before."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def main() -> None:
    args = arguments()
    hvd.init()
    device = own_device()
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
    images, labels = (torch.tensor(part).to(device) for part in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    own = torch.arange(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size(), device=device)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(2048, 10)
    ).to(device)
    # Buckets lie in the GPU's memory; gradients are views of them, and a full bucket starts from the backward hook.
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    loss = torch.zeros((), device=device)
    for _ in range(args.epochs):
        for batch in own[torch.randperm(len(own), device=device)].split(args.batch_size):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                scores = model(images[batch])
            loss = F.cross_entropy(scores.float(), labels[batch])
            loss.backward()
            optimizer.step()  # the stream waits for the reductions, not this thread
    with torch.no_grad():
        right = (model(images[own]).argmax(1) == labels[own]).float().mean()
    accuracy = hvd.allreduce(right, name="accuracy").item()  # reads the value: here the host waits
    mean_loss = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU: torch sees no GPU"
        print(f"trained on {where}; loss {mean_loss:.4f}, training accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
