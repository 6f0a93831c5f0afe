r"""Step time on GPUs: horoclone's optimizer against DistributedDataParallel with NCCL, and both against one rank alone.

One rank for each GPU:
torchrun --nproc-per-node 2 benchmarks/gpu.py --model resnet50 --bytes 65536 1048576 67108864 268435456 --buckets 16 \
    --json out/gpu-2.json
torchrun --nproc-per-node 2 benchmarks/gpu.py --model gpt --batch-size 8 --graphs --json out/gpu-2-gpt.json
Two ranks on one GPU through NCCL, from 2.30.3 on:
NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/gpu.py --bytes 67108864 \
    --json out/one-gpu-nccl.json
One rank:
python benchmarks/gpu.py --graphs --buckets 16 --json gpu.json

All contestants live in every rank and take turns in random order, a round each; the ratios are of rounds that follow
each other. --graphs adds captured steps, --buckets what a persistent bucket costs the host, --bytes plain allreduces,
for ranks on one GPU with the bound that its memory and the traffic set. --device cpu (gloo, host memory) and --device
fake (the fakes of CUDA and NCCL that the tests have) only show that the script runs: `make gpu` runs it on a GPU.
"""

from __future__ import annotations

import argparse
import functools
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
from horoclone.runtime import native
from horoclone.torch.operations import gpu as of_gpu
from horoclone.torch.operations.tensors import NUMBER_OF
from horoclone.torch.optimizer import buckets

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_figures import (
    TRAFFIC_OF_PEERS,
    bandwidth_table,
    buckets_table,
    gates,
    gates_table,
    shared_gpu_bound_gb,
    steps_table,
)
from gpu_place import KINDS, Place, place_for

HERE = Path(__file__).resolve().parent
Step = Callable[[], torch.Tensor]
CONTESTANTS = ("alone", "ddp", "ddp view", "horoclone")
GRAPHS = (
    "ddp graph",
    "ddp view graph",
    "horoclone graph",
)  # a replay of what the contestant without "graph" does
GRAPH_WARM = 11  # steps that DDP wants before a capture
COPY_BYTES = 256 << 20  # far more than a GPU's cache


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
    parser.add_argument("--graphs", action="store_true", help="also replay captured steps")
    parser.add_argument(
        "--no-steps", action="store_true", help="no training steps, only what else is asked for"
    )
    parser.add_argument("--buckets", type=int, default=0, help="also what each of so many costs the host")
    parser.add_argument("--bucket-bytes", type=int, default=16 << 20)
    parser.add_argument("--device", choices=KINDS, default="cuda")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="of DDP; gloo where ranks share a GPU")
    parser.add_argument("--json", type=Path, help="where rank 0 writes everything")
    return parser.parse_args(argv)


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


def make_model(arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    if arguments.model == "tiny":
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1000))
    if arguments.model == "gpt":
        return Gpt(arguments.length)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from torch_synthetic_benchmark import network

    return network("resnet50")


def make_batch(arguments: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1 + hvd.rank())
    count = arguments.batch_size
    if arguments.model == "gpt":
        tokens = torch.randint(50257, (count, arguments.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:].flatten()
    shape = (count, 64) if arguments.model == "tiny" else (count, 3, 224, 224)
    return torch.randn(shape, device=device), torch.randint(1000, (count,), device=device)


def make_step(name: str, arguments: argparse.Namespace, place: Place) -> Step:
    """One training step of the contestant `name` on a model of its own; equal start, equal batches."""
    model = place.moved(make_model(arguments))
    data, target = make_batch(arguments, place.device)
    forward: Any = model
    if name.startswith("ddp"):
        ids = [place.device.index] if place.device.type == "cuda" else None
        # Without broadcasts of batch norm's numbers before each forward: nobody else makes them either.
        view = name == "ddp view"
        forward = DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=view, broadcast_buffers=False
        )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if name == "horoclone":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    half = arguments.dtype == "bfloat16"

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(place.device.type, torch.bfloat16) if half else nullcontext():
            scores = forward(data)
        loss = F.cross_entropy(scores.float(), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def captured(name: str, arguments: argparse.Namespace, place: Place) -> Step:
    """The step of a contestant as a graph: the batch stays the same, so nothing is copied in before a replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # where DDP wants to be made
        step = make_step(name, arguments, place)
        for _ in range(GRAPH_WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def persistent_buckets(arguments: argparse.Namespace, place: Place) -> Callable[[], None]:
    """A round of declared buckets as the optimizer has them: the stream that fills them waits for their sums."""
    core, count = native(), arguments.bucket_bytes // 4
    like = place.zeros(1)
    memory = [buckets._allocate(core, count, torch.float32, like) for _ in range(arguments.buckets)]
    declared = core.declare(
        names=[f"bucket.{i}" for i in range(len(memory))], data=[one.data_ptr() for one in memory],
        counts=[count] * len(memory), dtypes=[NUMBER_OF[torch.float32]] * len(memory), reduce=hvd.Average,
        process_set=0, device=of_gpu.place_of(like)[0],
    )  # fmt: skip

    def round_of_buckets() -> None:
        at = of_gpu.place_of(memory[0])
        handles = [core.submit_declared(0, declared, i, at[1], 0) for i in range(len(memory))]
        for handle in handles:
            core.wait(handle)
            of_gpu.follow(core, handle, at)
            core.release(handle)

    return round_of_buckets


def cost_of_buckets(arguments: argparse.Namespace, place: Place) -> dict[str, list[float]]:
    """Microseconds of processor time that one bucket takes to be submitted and waited for, as in a step."""
    count = arguments.buckets
    if not count:
        return {}
    tensors = [torch.zeros(arguments.bucket_bytes // 4, device=place.device) for _ in range(count)]
    ours = persistent_buckets(arguments, place)

    def theirs() -> None:
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()

    ways: dict[str, Callable[[], None]] = {"torch.distributed": theirs, "horoclone": ours}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(arguments.rounds + 1):  # the first one warms
        for name, way in ways.items():
            cpu = timed(way, arguments.steps, place)[1]
            if turn:
                spent[name].append(1e3 * cpu / count)
    return spent


def bound_of_shared_gpu(place: Place) -> float | None:
    """GB/s that a sum can reach among ranks on one GPU, by a copy that rank 0 times alone; None with a GPU for each."""
    device = place.device
    if device.type != "cuda" or torch.cuda.device_count() >= hvd.local_size():
        return None
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    for turn in range(6):
        hvd.barrier()
        if hvd.rank() == 0:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                target.copy_(source)
            torch.cuda.synchronize()
            if turn:
                rates.append(20 * 2 * COPY_BYTES / 1e9 / (time.perf_counter() - began))
    return shared_gpu_bound_gb(statistics.median(rates), hvd.local_size()) if hvd.rank() == 0 else None


def timed(call: Callable[[], Any], count: int, place: Place) -> tuple[float, float, Any]:
    """Milliseconds of wall clock and of processor time for each of `count` calls, and the last one's result."""
    hvd.barrier()
    place.synchronize()
    began, cpu, last = time.perf_counter(), time.process_time(), None
    for _ in range(count):
        last = call()
    cpu = time.process_time() - cpu  # before the wait: what enqueueing costs
    place.synchronize()
    return 1e3 * (time.perf_counter() - began) / count, 1e3 * cpu / count, last


def measure(arguments: argparse.Namespace, place: Place) -> dict[str, Times]:
    steps = {} if arguments.no_steps else {name: make_step(name, arguments, place) for name in CONTESTANTS}
    if arguments.graphs and steps:
        for name in GRAPHS:
            try:
                steps[name] = captured(name.removesuffix(" graph"), arguments, place)
            except RuntimeError as error:  # the others are measured all the same
                print(f"gpu.py: {name} is left out, it cannot be captured: {error}", file=sys.stderr)
    times = {name: Times() for name in steps}
    for step in steps.values():
        timed(step, arguments.warm, place)
    order, shuffle = list(steps), random.Random(0)  # the same order on every rank
    for _ in range(arguments.rounds):
        shuffle.shuffle(order)
        for name in order:
            wall, cpu, loss = timed(steps[name], arguments.steps, place)
            times[name].step_ms.append(wall)
            times[name].cpu_ms.append(cpu)
            times[name].loss = float(loss)
    return times


def allreduces(arguments: argparse.Namespace, place: Place) -> dict[str, dict[str, float]]:
    """GB/s (bytes of the tensor by time, the median of the rounds) of in-place sums in float32."""
    found: dict[str, dict[str, float]] = {}
    for size in arguments.bytes:
        tensor = place.zeros(size // 4)
        ways: dict[str, Callable[[], Any]] = {
            "torch.distributed": functools.partial(dist.all_reduce, tensor),
            "horoclone": functools.partial(hvd.allreduce_, tensor, op=hvd.Sum, name=f"bytes.{size}"),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(arguments.rounds + 1):  # the first one warms
            for name, way in ways.items():
                wall = timed(way, arguments.steps, place)[0]
                if turn:
                    spent[name].append(wall)
        found[str(size)] = {name: size / 1e6 / statistics.median(walls) for name, walls in spent.items()}
    return found


def report(arguments: argparse.Namespace, times: dict[str, Times], found: dict[str, Any]) -> None:
    batch = arguments.batch_size * (arguments.length if arguments.model == "gpt" else 1)
    unit = "tokens/s" if arguments.model == "gpt" else "images/s"
    steps = {name: asdict(one) for name, one in times.items()}
    if steps:
        print(steps_table(steps, batch, hvd.size(), unit))
    for part in (buckets_table(found["buckets"]), bandwidth_table(found["allreduce"], found["bound"])):
        if part:
            print(part)
    if found["bound"]:
        moved = ", ".join(f"{stage} {count}" for stage, count in TRAFFIC_OF_PEERS.items())
        print(f"the bound counts the traffic of peers for each byte of a rank's tensor: {moved}")
    if arguments.device == "cuda":
        print(gates_table(gates(hvd.size(), steps, found)))
    else:
        print("in host memory: none of the aims for GPUs was measured")


def begin(arguments: argparse.Namespace) -> Place:
    """Brings up horoclone, the GPU and torch.distributed."""
    if arguments.graphs:  # as torch's notes on CUDA graphs ask of those who capture DDP
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    hvd.init()
    place = place_for(arguments.device, share=arguments.backend == "gloo" and hvd.size() > 1)
    backend = arguments.backend or ("nccl" if arguments.device == "cuda" else "gloo")
    if "RANK" in os.environ or hvd.size() > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() != hvd.rank():
        raise SystemExit(
            "gpu.py: the ranks of torch.distributed and of horoclone differ; start it with torchrun"
        )
    if arguments.graphs and arguments.device != "cuda":
        raise SystemExit("gpu.py: --graphs needs a GPU")
    return place


def facts_of(arguments: argparse.Namespace, place: Place) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": hvd.nccl_built(),
        "device": place.name,
        "ranks": hvd.size(),
        "traffic of peers": TRAFFIC_OF_PEERS,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "HOROCLONE_"))},
        "arguments": {k: str(v) for k, v in vars(arguments).items()},
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    place = begin(arguments)
    times = measure(arguments, place)
    found = {
        "allreduce": allreduces(arguments, place),
        "buckets": cost_of_buckets(arguments, place),
        "bound": bound_of_shared_gpu(place),
    }
    # Equal start and equal gradients: where the losses part, somebody reduces wrongly and the times mean nothing.
    # Graphs: other steps
    losses = [times[name].loss for name in CONTESTANTS if name != "alone" and name in times]
    agree = not losses or max(losses) - min(losses) <= 0.02 * max(1.0, abs(losses[0]))
    if hvd.rank() == 0:
        report(arguments, times, found)
        if not agree:
            print(f"gpu.py: the losses differ: {losses}", file=sys.stderr)
        if arguments.json:
            steps = {k: asdict(v) for k, v in times.items()}
            rows = (
                [gate._asdict() for gate in gates(hvd.size(), steps, found)]
                if arguments.device == "cuda"
                else []
            )
            everything = {"facts": facts_of(arguments, place), "times": steps, "gates": rows, **found}
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(everything, indent=1))
    place.synchronize()
    dist.destroy_process_group()
    hvd.shutdown()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
