"""Step time on GPUs: horoclone's optimizer against DistributedDataParallel with NCCL, and both against one rank alone.

torchrun --nproc-per-node 2 benchmarks/gpu.py --model resnet50 --json gpu.json    (one rank for each GPU)

All contestants live in every rank and take turns in random order, a round each; the ratios are of rounds that follow
each other. --device cpu (gloo, host memory) only shows that the script runs. No figure of it was measured on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import horoclone.torch as hvd

Step = Callable[[], torch.Tensor]
CONTESTANTS = ("alone", "ddp", "ddp view", "horoclone")


@dataclass
class Times:
    """Of one contestant on this rank, a number for each round."""

    step_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # processor time of the process, for each step
    loss: float = 0.0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("resnet50", "gpt", "tiny"), default="resnet50")
    parser.add_argument("--batch-size", type=int, default=64, help="images or sequences of one rank")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (gpt)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--warm", type=int, default=5, help="steps before the first round")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of autocast")
    parser.add_argument("--bytes", type=int, nargs="*", default=[], help="also time allreduces of such sizes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="of DDP; gloo where ranks share a GPU")
    parser.add_argument("--json", type=Path, help="where rank 0 writes everything")
    return parser.parse_args(argv)


def place(arguments: argparse.Namespace) -> torch.device:
    if arguments.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("gpu.py: torch sees no GPU here; --device cpu shows only that the script runs")
    index = hvd.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class Gpt(torch.nn.Module):
    """GPT-2's smallest shape: 12 blocks of 768 numbers, 50,257 words, causal attention."""

    def __init__(self, length: int, words: int = 50257, width: int = 768, blocks: int = 12) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.places = torch.nn.Parameter(torch.zeros(length, width))
        block = torch.nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, words, bias=False)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed = self.blocks(self.words(tokens) + self.places, mask=self.mask, is_causal=True)
        return self.head(mixed).flatten(0, 1)


def make_model(arguments: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    if arguments.model == "tiny":
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1000)).to(
            device
        )
    if arguments.model == "gpt":
        return Gpt(arguments.length).to(device)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from torch_synthetic_benchmark import network

    return network("resnet50").to(device)


def make_batch(arguments: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1 + hvd.rank())
    count = arguments.batch_size
    if arguments.model == "gpt":
        tokens = torch.randint(50257, (count, arguments.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:].flatten()
    shape = (count, 64) if arguments.model == "tiny" else (count, 3, 224, 224)
    return torch.randn(shape, device=device), torch.randint(1000, (count,), device=device)


def make_step(name: str, arguments: argparse.Namespace, device: torch.device) -> Step:
    """One training step of the contestant `name` on a model of its own; equal start, equal batches."""
    model = make_model(arguments, device)
    data, target = make_batch(arguments, device)
    forward: Any = model
    if name.startswith("ddp"):
        ids = [device.index] if device.type == "cuda" else None
        forward = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=name == "ddp view")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if name == "horoclone":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    half = arguments.dtype == "bfloat16"

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            scores = forward(data)
        loss = F.cross_entropy(scores.float(), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], count: int, device: torch.device) -> tuple[float, float, Any]:
    """Milliseconds of wall clock and of processor time for each of `count` calls, and the last one's result."""
    hvd.barrier()
    drain(device)
    began, cpu, last = time.perf_counter(), time.process_time(), None
    for _ in range(count):
        last = call()
    cpu = time.process_time() - cpu  # before the wait: what enqueueing costs
    drain(device)
    return 1e3 * (time.perf_counter() - began) / count, 1e3 * cpu / count, last


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Times]:
    steps = {name: make_step(name, arguments, device) for name in CONTESTANTS}
    times = {name: Times() for name in CONTESTANTS}
    for step in steps.values():
        timed(step, arguments.warm, device)
    order, shuffle = list(CONTESTANTS), random.Random(0)  # the same order on every rank
    for _ in range(arguments.rounds):
        shuffle.shuffle(order)
        for name in order:
            wall, cpu, loss = timed(steps[name], arguments.steps, device)
            times[name].step_ms.append(wall)
            times[name].cpu_ms.append(cpu)
            times[name].loss = float(loss)
    return times


def allreduces(arguments: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """GB/s (bytes of the tensor by time, the median of the rounds) of in-place sums in float32."""
    found: dict[str, dict[str, float]] = {}
    for size in arguments.bytes:
        tensor = torch.zeros(size // 4, device=device)
        ways: dict[str, Callable[[], Any]] = {
            "torch.distributed": lambda t=tensor: dist.all_reduce(t),
            "horoclone": lambda t=tensor, n=size: hvd.allreduce_(t, op=hvd.Sum, name=f"bytes.{n}"),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(arguments.rounds + 1):  # the first one warms
            for name, way in ways.items():
                wall = timed(way, arguments.steps, device)[0]
                if turn:
                    spent[name].append(wall)
        found[str(size)] = {name: size / 1e6 / statistics.median(walls) for name, walls in spent.items()}
    return found


def report(arguments: argparse.Namespace, times: dict[str, Times], bandwidth: dict[str, Any]) -> None:
    per_step = arguments.batch_size * hvd.size() * (arguments.length if arguments.model == "gpt" else 1)
    unit = "tokens/s" if arguments.model == "gpt" else "images/s"
    print(f"{'contestant':<12}{'step ms':>10}{'CPU ms':>10}{unit:>14}{'of ddp':>10}")
    for name, one in times.items():
        step = statistics.median(one.step_ms)
        ratio = statistics.median(
            a / b for a, b in zip(one.step_ms, times["ddp"].step_ms, strict=True)
        )  # below 1: faster than DDP
        cpu = statistics.median(one.cpu_ms)
        print(f"{name:<12}{step:>10.3f}{cpu:>10.3f}{per_step / step * 1e3:>14.0f}{ratio:>10.3f}")
    for size, rates in bandwidth.items():
        print(
            f"{int(size):>12} bytes  " + "  ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
        )


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    hvd.init()
    device = place(arguments)
    backend = arguments.backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend)
    if dist.get_rank() != hvd.rank():
        raise SystemExit(
            "gpu.py: the ranks of torch.distributed and of horoclone differ; start it with torchrun"
        )
    times, bandwidth = measure(arguments, device), allreduces(arguments, device)
    # Equal start and equal gradients: where the losses part, somebody reduces wrongly and the times mean nothing.
    losses = [times[name].loss for name in CONTESTANTS if name != "alone"]
    agree = max(losses) - min(losses) <= 0.02 * max(1.0, abs(losses[0]))
    if hvd.rank() == 0:
        report(arguments, times, bandwidth)
        if not agree:
            print(f"gpu.py: the losses differ: {losses}", file=sys.stderr)
        if arguments.json:
            facts = {
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "nccl": hvd.nccl_built(),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "ranks": hvd.size(),
                "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "HOROCLONE_"))},
                "arguments": {k: str(v) for k, v in vars(arguments).items()},
            }
            everything = {
                "facts": facts,
                "times": {k: asdict(v) for k, v in times.items()},
                "allreduce": bandwidth,
            }
            arguments.json.write_text(json.dumps(everything, indent=1))
    dist.destroy_process_group()
    hvd.shutdown()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
