"""What a compressor computes and sends for the model's own buckets, found by running it without any other rank.

Its reduce() gets a bucket whose operations only note what they would have sent and give back what has the right shape.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from horoclone.plan.profile import Reduction, Sent, Stage
from horoclone.torch.compression import Compression

ROUNDS = 2  # per bucket; the first one makes residuals and factors
LIMIT_BYTES = 64 << 20  # of gradients that are compressed; further buckets are scaled by their bytes


class _Noted:
    """Handle of an operation that was not made."""

    def __init__(self, number: int, result: torch.Tensor) -> None:
        self.number, self.result = number, result


class _Bucket:
    """A GradientBucket's attributes and methods, of a rank 0 of `size` ranks that has nobody to talk to."""

    def __init__(
        self, gradients: Sequence[torch.Tensor], names: Sequence[str], index: int, size: int
    ) -> None:
        self.flat = torch.empty(sum(g.numel() for g in gradients), dtype=torch.float32)
        self.flat.normal_(generator=torch.Generator().manual_seed(index)).mul_(1e-3)
        parts = self.flat.split([g.numel() for g in gradients])
        self.gradients = [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)]
        self.names, self.index, self.size, self.rank, self.divisor = list(names), index, size, 0, size
        self.state: dict[Any, Any] = {}
        self.on_gpu = False
        self.sent: list[Sent] = []
        self.count = 0
        self._last_s = 0.0

    def begin(self) -> None:
        self.sent, self.count, self._last_s = [], 0, time.perf_counter()

    def stage(self, awaits: _Noted | None, is_over: bool) -> Stage:
        """Closes one; the clock begins anew."""
        now_s = time.perf_counter()
        made = Stage(
            tuple(self.sent), now_s - self._last_s, -1 if is_over or awaits is None else awaits.number
        )
        self.sent, self._last_s = [], time.perf_counter()
        return made

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def _note(self, op: str, tensor: torch.Tensor, result: torch.Tensor) -> _Noted:
        now_s = time.perf_counter()
        self.sent.append(Sent(now_s - self._last_s, op, float(tensor.nbytes)))
        self.count += 1
        self._last_s = time.perf_counter()
        return _Noted(self.count - 1, result)

    def allreduce(self, tensor: torch.Tensor, label: str) -> _Noted:
        return self._note("allreduce", tensor, tensor)

    allreduce_sum = allreduce

    def allgather(self, tensor: torch.Tensor, label: str) -> _Noted:
        return self._note("allgather", tensor, tensor.repeat(self.size, *[1] * (tensor.dim() - 1)))

    def alltoall(self, tensor: torch.Tensor, label: str) -> _Noted:
        return self._note("alltoall", tensor, tensor.clone())


def compressors() -> dict[str, Any]:
    """By the name in hvd.Compression with its arguments, those that are tried."""
    return {
        "int8": Compression.int8(),
        "powersgd(rank=4)": Compression.powersgd(rank=4, start_step=0),
        "powersgd(rank=2)": Compression.powersgd(rank=2, start_step=0),
        "topk(ratio=0.01)": Compression.topk(ratio=0.01),
    }


def reductions(
    buckets: Sequence[Sequence[int]], parameters: Sequence[torch.Tensor], names: Sequence[str], size: int
) -> dict[str, tuple[Reduction, ...]]:
    """Of each compressor, what it does for each bucket (numbers of its parameters), among `size` ranks."""
    found = {}
    for name, compressor in compressors().items():
        made: list[Reduction] = []
        done, last = 0.0, 0.0
        for index, members in enumerate(buckets):
            own = sum(parameters[n].numel() * 4 for n in members)
            if made and done > LIMIT_BYTES:
                made.append(_scaled(made[-1], own / max(1.0, last)))
                continue
            shaped = [torch.empty(parameters[n].shape, device="meta") for n in members]
            bucket = _Bucket(shaped, [names[n] for n in members], index, size)
            made.append(min((_once(compressor, bucket) for _ in range(ROUNDS)), key=_computing))
            done, last = done + own, own
        found[name] = tuple(made)
    return found


def _once(compressor: Any, bucket: _Bucket) -> Reduction:
    stages: list[Stage] = []
    bucket.begin()
    work = compressor.reduce(bucket)
    try:
        handle = next(work)
        while True:
            stages.append(bucket.stage(handle, False))
            handle = work.send(None if handle is None else handle.result)
    except StopIteration:
        stages.append(bucket.stage(None, True))
    return tuple(stages)


def _computing(reduction: Reduction) -> float:
    return sum(stage.compute_s + sum(one.compute_s for one in stage.sent) for stage in reduction)


def _scaled(reduction: Reduction, ratio: float) -> Reduction:
    return tuple(
        Stage(
            tuple(Sent(one.compute_s * ratio, one.op, one.size * ratio) for one in stage.sent),
            stage.compute_s * ratio,
            stage.awaits,
        )
        for stage in reduction
    )
