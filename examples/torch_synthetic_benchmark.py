"""Images per second of a residual network on synthetic images: Horovod's benchmark script, with its options.

horoclonerun -np 2 python examples/torch_synthetic_benchmark.py --model resnet50 --image-size 224 --batch-size 32
"""

import argparse
import statistics
import timeit

import torch
import torch.nn.functional as F

import horoclone.torch as hvd

# name -> blocks per stage, whether blocks have the narrow 3 x 3 convolution between two 1 x 1, channels
MODELS = {
    "resnet8": ((1, 1, 1), False, 16),
    "resnet18": ((2, 2, 2, 2), False, 64),
    "resnet50": ((3, 4, 6, 3), True, 64),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="resnet8")
    parser.add_argument("--image-size", type=int, default=32, help="224 for ImageNet's")
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--num-warmup-batches", type=int, default=3)
    parser.add_argument("--num-batches-per-iter", type=int, default=5)
    parser.add_argument("--num-iters", type=int, default=4)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients with Adasum")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, per rank")
    return parser.parse_args()


class Block(torch.nn.Module):
    def __init__(self, channels: int, width: int, stride: int, narrow: bool) -> None:
        super().__init__()
        out = width * 4 if narrow else width
        shapes = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        if not narrow:
            shapes = [(channels, width, 3, stride), (width, out, 3, 1)]
        layers = []
        for before, after, size, step in shapes:
            conv = torch.nn.Conv2d(before, after, size, step, size // 2, bias=False)
            layers += [conv, torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
        self.path = torch.nn.Sequential(*layers[:-1])
        self.short = torch.nn.Identity()
        if stride > 1 or channels != out:
            self.short = torch.nn.Sequential(
                torch.nn.Conv2d(channels, out, 1, stride, bias=False), torch.nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.short(x))


def network(name: str, classes: int = 1000) -> torch.nn.Module:
    stages, narrow, width = MODELS[name]
    big = name != "resnet8"
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(3, width, 7 if big else 3, 2 if big else 1, 3 if big else 1, bias=False),
        torch.nn.BatchNorm2d(width),
        torch.nn.ReLU(),
    ]
    if big:
        layers.append(torch.nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(stages):
        for block in range(count):
            layers.append(Block(channels, width << stage, 2 if stage and not block else 1, narrow))
            channels = (width << stage) * (4 if narrow else 1)
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, classes)
    )


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = network(args.model)
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * scale),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    target = torch.randint(1000, (args.batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()

    def say(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    count = sum(p.numel() for p in model.parameters())
    say(f"Model: {args.model}, {count / 1e6:.2f} million parameters")
    say(f"Batch size: {args.batch_size}\nNumber of ranks: {hvd.size()}\nRunning warmup...")
    timeit.timeit(step, number=args.num_warmup_batches)
    say("Running benchmark...")
    rates = []
    for index in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        say(f"Iter #{index}: {rates[-1]:.1f} img/sec per rank")
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    total = hvd.allreduce(torch.tensor(mean), op=hvd.Sum, name="rate").item()
    say(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} rank(s): {total:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
