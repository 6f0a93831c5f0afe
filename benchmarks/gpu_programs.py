"""The short programs of `make gpu`, each for the ranks of one job: python benchmarks/gpu_programs.py NAME [--json FILE]

sums: of every dtype, compared with NumPy's. death: of three ranks one is killed while its GPU is behind. drops:
optimizers that end right behind a step. short: every kind of them, for compute-sanitizer.
trace: a step under torch's profiler, and for how much of our kernels' time backward computes. lives: --lives inits and
shutdowns. soak: training for --minutes, with other operations in between. Two ranks may share a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import horoclone.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_place import KINDS, Place, place_for

Found = dict[str, Any]
OURS = ("hc_", "nccl")  # how the names of kernels begin that communicate
LIVES = 1000
LEFT_BEHIND = 64 << 20  # bytes that a thousand lives may leave: not 64 KiB each


def sums_are_right(place: Place, count: int, dtype: torch.dtype) -> None:
    mine = ((torch.arange(count) * 7 + 3 * hvd.rank()) % 5).to(dtype)
    every = torch.stack([((torch.arange(count) * 7 + 3 * rank) % 5).double() for rank in range(hvd.size())])
    for op, expected in ((hvd.Sum, every.sum(0)), (hvd.Max, every.amax(0))):
        got = hvd.allreduce(place.put(mine), op=op).cpu().double()
        if not torch.equal(got, expected):
            worst = (got - expected).abs().max().item()
            raise SystemExit(f"{dtype} of {count} elements: a result is {worst} away from NumPy's")


def sums(arguments: argparse.Namespace, place: Place) -> Found:
    """By peers all of the arithmetic is our kernels', by NCCL its own."""
    began = time.perf_counter()
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int16, torch.uint8
    ):  # fmt: skip
        for count in (1, 1000, 300_001):
            sums_are_right(place, count, dtype)
    return {"device": place.name, "seconds": time.perf_counter() - began, "gpu": hvd.metrics()["gpu"]}


def death(arguments: argparse.Namespace, place: Place) -> Found:
    """What waits on the GPU for a rank that was killed, in two communicators that depend on each other, has an end."""
    rank, pair = hvd.rank(), hvd.add_process_set([0, 1])
    assert pair is not None
    one, other = place.put(torch.ones(1000)), place.put(torch.ones(1000))

    def both(step: str) -> None:
        if rank < 2:
            hvd.allreduce_(one, name=f"{step} of two", process_set=pair)
        hvd.allreduce_(other, name=f"{step} of all")

    both("warm")
    place.synchronize()
    hvd.barrier()
    if rank == 1:
        place.occupy(30)
    both("late")
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends what is left of such a job
    error, began = "", time.monotonic()
    try:
        hvd.allreduce(torch.ones(1), name="on the host")
    except hvd.HorovodInternalError as raised:
        error = str(raised)
    raised_s = time.monotonic() - began
    place.synchronize()
    found = {
        "names rank 1": "rank 1" in error,
        "raises after s": raised_s,
        "goes on after s": time.monotonic() - began,
    }
    arguments.json.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    return found


def drops(arguments: argparse.Namespace, place: Place) -> Found:
    """Buckets end while the GPU still uses them."""
    for _ in range(20):
        model_and_step(place)()
    sums_are_right(place, 300_001, torch.float32)
    return {"optimizers": 20}


def short(arguments: argparse.Namespace, place: Place) -> Found:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int16):
        group = [place.put(torch.ones(n, dtype=dtype)) for n in (1, 7, 1000, 33_333, 70_001)]
        for op in (hvd.Sum, hvd.Average, hvd.Min):
            hvd.grouped_allreduce(group, op=op)
        hvd.allreduce(group[3], op=hvd.Sum, prescale_factor=0.5)
    place.synchronize()
    return {}


def model_and_step(place: Place) -> Callable[[], None]:
    torch.manual_seed(0)
    width = 2048 if place.device.type == "cuda" else 64
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = place.moved(torch.nn.Sequential(*layers))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
    )
    batch = torch.randn(width, width, device=place.device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def covered(mine: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """How much of the time of the intervals `mine` lies within the intervals `others`, from 0 to 1."""
    merged: list[list[float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    whole = within = 0.0
    for start, end in mine:
        whole += end - start
        within += sum(max(0.0, min(end, b) - max(start, a)) for a, b in merged)
    return within / whole if whole else 0.0


def overlap_in(trace: Path) -> Found:
    """What a trace of torch's profiler says of kernels that communicate and those that compute."""
    events = json.loads(trace.read_text())["traceEvents"]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event.get("cat") == "kernel":
            ours = event["name"].lower().startswith(OURS)
            spans[ours].append((event["ts"], event["ts"] + event["dur"]))
    return {
        "kernels that communicate": len(spans[True]),
        "kernels that compute": len(spans[False]),
        "overlap": covered(spans[True], spans[False]),
    }


def trace(arguments: argparse.Namespace, place: Place) -> Found:
    step = model_and_step(place)
    for _ in range(5):
        step()
    place.synchronize()
    hvd.barrier()
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if place.device.type == "cuda" else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            step()
        place.synchronize()
    if hvd.rank() != 0:
        return {}
    file = arguments.json.with_name("gpu_trace.json") if arguments.json else Path("gpu_trace.json")
    profile.export_chrome_trace(str(file))
    return {"trace": str(file), **overlap_in(file)}


def lives(arguments: argparse.Namespace, place: Place) -> Found:
    tensor = place.put(torch.ones(1 << 20))

    def live() -> None:
        hvd.shutdown()
        hvd.init()
        if hvd.allreduce(tensor, op=hvd.Average)[0].item() != 1.0:
            raise SystemExit("a sum is wrong")
        place.synchronize()

    for _ in range(10):
        live()
    before = place.free_bytes() or 0
    for _ in range(arguments.lives):
        live()
    left = before - (place.free_bytes() or 0)
    if left > LEFT_BEHIND:
        raise SystemExit(f"{arguments.lives} lives have left {left} bytes of the GPU's memory in use")
    return {"lives": arguments.lives, "bytes left": left}


def soak(arguments: argparse.Namespace, place: Place) -> Found:
    steps = 0
    step = model_and_step(place)
    until = time.monotonic() + 60 * arguments.minutes
    free: list[int] = []
    while hvd.allreduce(torch.tensor(float(time.monotonic() < until)), op=hvd.Min, name="go on").item():
        for _ in range(20):
            step()
        steps += 20
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            sums_are_right(place, 300_001, dtype)
        rows = hvd.allgather(place.put(torch.full((hvd.rank() + 1, 3), hvd.rank())))
        if rows.shape[0] != hvd.size() * (hvd.size() + 1) // 2:
            raise SystemExit("an allgather has lost rows")
        place.synchronize()
        free.append(place.free_bytes() or 0)
    lost = free[len(free) // 4] - free[-1] if len(free) > 4 else 0
    if lost > LEFT_BEHIND:
        raise SystemExit(f"{steps} steps have left {lost} bytes of the GPU's memory in use")
    return {"steps": steps, "bytes lost": lost}


PROGRAMS: dict[str, Callable[[argparse.Namespace, Place], Found]] = {
    "sums": sums, "death": death, "drops": drops, "short": short, "trace": trace, "lives": lives, "soak": soak,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--json", type=Path, help="where rank 0 writes what it found")
    parser.add_argument("--device", choices=KINDS, default="cuda")
    parser.add_argument("--lives", type=int, default=LIVES)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the soak")
    arguments = parser.parse_args(argv)
    hvd.init(process_sets="dynamic")
    found = PROGRAMS[arguments.program](arguments, place_for(arguments.device, share=True))
    if hvd.rank() == 0 and arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
