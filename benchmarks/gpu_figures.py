"""What benchmarks/gpu.py makes of its measurements: ratios, bounds and tables. No GPU, no torch, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

# What the figures should reach; docs/performance.md says which were measured.
STEP_OF_DDP = 1.00  # world size 1
CPU_US_PER_BUCKET = 15.0
REPLAY_OF_DDP = 1.01
SHARE_OF_BOUND = 0.8  # two ranks on one GPU, from 64 MiB on
TIMES_GLOO = 10.0


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
