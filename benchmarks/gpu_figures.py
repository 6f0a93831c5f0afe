"""What benchmarks/gpu.py makes of its measurements: ratios, bounds and tables. No GPU, no torch, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# What the figures should reach; docs/performance.md says which were measured.
STEP_OF_DDP = 1.00  # world size 1; DDP with or without bucket views, whichever is faster
CPU_US_PER_BUCKET = 15.0
SHARE_OF_BOUND = 0.8  # two ranks on one GPU, from LARGE_BYTES on
TIMES_GLOO = 5.0
LARGE_BYTES = 64 << 20
OVERLAP = 0.1  # of the time of our kernels, in which kernels of backward run too

# What the way of peers moves in the GPU's memory for each byte of a rank's tensor (csrc/collective/gpu/peers.cc): it is
# packed into memory that the ranks map, reduced there (N inputs read and N outputs written, by N ranks together) and
# unpacked; each is one read and one write.
TRAFFIC_OF_PEERS = {"pack": 2, "reduce": 2, "unpack": 2}


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of a[i] / b[i], i being rounds that followed each other. ValueError when they are not as many."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def shared_gpu_bound_gb(copy_gb: float, ranks: int, traffic: Mapping[str, int] = TRAFFIC_OF_PEERS) -> float:
    """GB/s of a sum among ranks on one GPU whose copies move copy_gb GB/s, reads and writes counted.

    traffic: bytes that each stage moves for each byte of a rank's tensor. All ranks' tensors pass the same memory.
    """
    return copy_gb / (sum(traffic.values()) * ranks)


def faster(steps: Mapping[str, Mapping[str, Sequence[float]]], names: Sequence[str]) -> str | None:
    """Which of the contestants that took part has the lowest median step."""
    there = [name for name in names if name in steps]
    return min(there, key=lambda name: statistics.median(steps[name]["step_ms"]), default=None)


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
    """Every aim of a run on GPUs. steps as in steps_table; found: "buckets", "allreduce" and "bound" as
    in the tables."""

    def of_ddp(kind: str) -> float | None:
        peer = faster(steps, [f"ddp{kind}", f"ddp view{kind}"])
        there = ranks == 1 and peer is not None and f"horoclone{kind}" in steps
        return ratio(steps[f"horoclone{kind}"]["step_ms"], steps[str(peer)]["step_ms"]) if there else None

    cpu = {name: statistics.median(rounds) for name, rounds in found["buckets"].items()}
    ours, theirs = cpu.get("horoclone"), cpu.get("torch.distributed")
    bound = found["bound"]
    large = [rates for size, rates in found["allreduce"].items() if bound and int(size) >= LARGE_BYTES]
    share = min((rates["horoclone"] / bound for rates in large), default=None)
    times = min((rates["horoclone"] / rates["torch.distributed"] for rates in large), default=None)
    return [
        _gate("step at world size 1, of the faster DDP's", STEP_OF_DDP, of_ddp("")),
        _gate("the same, captured in a graph", STEP_OF_DDP, of_ddp(" graph")),
        _gate("us of CPU for a bucket", CPU_US_PER_BUCKET, ours),
        _gate("the same, of torch.distributed's", 1.0, ours / theirs if ours and theirs else None),
        _gate(
            "ranks on one GPU, from 64 MiB: of what the traffic allows", SHARE_OF_BOUND, share, at_most=False
        ),
        _gate("the same, times gloo", TIMES_GLOO, times, at_most=False),
    ]


WORDS = {True: "holds", False: "MISSED", None: "not measured in this run"}


def gates_table(rows: Sequence[Gate]) -> str:
    """A line for each gate."""
    lines = [f"{'aim':<58}{'':>8}{'found':>10}"]
    for gate in rows:
        value = "-" if gate.found is None else f"{gate.found:.3f}"
        lines.append(f"{gate.figure:<58}{gate.aim:>8}{value:>10}  {WORDS[gate.holds]}")
    return "\n".join(lines)
