"""What benchmarks/gpu.py makes of its measurements: ratios, bounds and tables. No GPU, no torch, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# What the figures should reach; docs/performance.md says which were measured.
STEP_OF_DDP = 1.00  # world size 1
CPU_US_PER_BUCKET = 15.0
REPLAY_OF_DDP = 1.01
SHARE_OF_BOUND = 0.8  # two ranks on one GPU, from LARGE_BYTES on
TIMES_GLOO = 10.0
LARGE_BYTES = 64 << 20


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of a[i] / b[i], i being rounds that followed each other. ValueError when they are not as many."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def shared_gpu_bound_gb(copy_gb: float, ranks: int) -> float:
    """GB/s of a sum among ranks on one GPU whose copies move copy_gb GB/s, reads and writes counted.

    Every rank's tensor is read once and its result is written once: 2 * ranks bytes of traffic for each byte.
    """
    return copy_gb / (2 * ranks)


def per_second(batch: int, ranks: int, step_ms: float) -> float:
    """Images, or tokens, of all ranks together in a second."""
    return batch * ranks / step_ms * 1e3


def steps_table(steps: Mapping[str, Mapping[str, Sequence[float]]], batch: int, ranks: int, unit: str) -> str:
    """Contestants with step_ms and cpu_ms, a number for each round; the last column is the ratio to "ddp"."""
    lines = [f"{'contestant':<18}{'step ms':>10}{'CPU ms':>10}{unit:>14}{'of ddp':>10}"]
    for name, one in steps.items():
        step, cpu = statistics.median(one["step_ms"]), statistics.median(one["cpu_ms"])
        of_ddp = ratio(one["step_ms"], steps["ddp"]["step_ms"])
        lines.append(
            f"{name:<18}{step:>10.3f}{cpu:>10.3f}{per_second(batch, ranks, step):>14.0f}{of_ddp:>10.3f}"
        )
    return "\n".join(lines)


def bandwidth_table(
    rates: Mapping[str, Mapping[str, float]], bound_gb: float | None, others: str = "torch.distributed"
) -> str:
    """rates: GB/s by size in bytes and contestant. bound_gb: of ranks that share a GPU, None where they do not."""
    lines = []
    for size, of in rates.items():
        text = f"{int(size):>12} bytes  " + "  ".join(f"{name} {rate:.2f} GB/s" for name, rate in of.items())
        text += f"  ({of['horoclone'] / of[others]:.2f} times {others}"
        text += f", {of['horoclone'] / bound_gb:.2f} of the bound {bound_gb:.1f} GB/s)" if bound_gb else ")"
        lines.append(text)
    return "\n".join(lines)


def buckets_table(cpu_us: Mapping[str, Sequence[float]]) -> str:
    """cpu_us: microseconds of processor time for one bucket, a number for each round."""
    return "\n".join(
        f"{name:<18}{statistics.median(rounds):>10.2f} us of CPU for a bucket"
        for name, rounds in cpu_us.items()
    )


class Gate(NamedTuple):
    """A figure that should reach an aim; found None: this run did not measure it."""

    figure: str
    aim: str
    found: float | None
    holds: bool | None


def _gate(figure: str, aim: float, found: float | None, at_most: bool = True) -> Gate:
    holds = None if found is None else found <= aim if at_most else found >= aim
    return Gate(figure, f"{'<=' if at_most else '>='} {aim:g}", found, holds)


def gates(
    ranks: int, steps: Mapping[str, Mapping[str, Sequence[float]]], found: Mapping[str, Any]
) -> list[Gate]:
    """Every aim of a run on GPUs. steps as in steps_table; found: "buckets", "allreduce", "bound" as in the tables."""

    def of(name: str, other: str, applies: bool = True) -> float | None:
        there = applies and name in steps and other in steps
        return ratio(steps[name]["step_ms"], steps[other]["step_ms"]) if there else None

    cpu = {name: statistics.median(rounds) for name, rounds in found["buckets"].items()}
    ours, theirs = cpu.get("horoclone"), cpu.get("torch.distributed")
    bound = found["bound"]
    large = [rates for size, rates in found["allreduce"].items() if bound and int(size) >= LARGE_BYTES]
    share = min((rates["horoclone"] / bound for rates in large), default=None)
    times = min((rates["horoclone"] / rates["torch.distributed"] for rates in large), default=None)
    return [
        _gate("step at world size 1, of ddp's", STEP_OF_DDP, of("horoclone", "ddp", ranks == 1)),
        _gate("replay of a captured step, of ddp's", REPLAY_OF_DDP, of("horoclone graph", "ddp graph")),
        _gate("us of CPU for a bucket", CPU_US_PER_BUCKET, ours),
        _gate("the same, of torch.distributed's", 1.0, ours / theirs if ours and theirs else None),
        _gate("ranks on one GPU, from 64 MiB: of the bound", SHARE_OF_BOUND, share, at_most=False),
        _gate("the same, times torch.distributed", TIMES_GLOO, times, at_most=False),
    ]


def gates_table(rows: Sequence[Gate]) -> str:
    """A line for each gate."""
    words = {True: "holds", False: "MISSED", None: "not measured in this run"}
    lines = [f"{'aim':<46}{'':>8}{'found':>10}"]
    for gate in rows:
        value = "-" if gate.found is None else f"{gate.found:.3f}"
        lines.append(f"{gate.figure:<46}{gate.aim:>8}{value:>10}  {words[gate.holds]}")
    return "\n".join(lines)
