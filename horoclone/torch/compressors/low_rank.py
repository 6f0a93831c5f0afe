"""PowerSGD: each gradient matrix as a product of two thin ones, found by one step of a warm-started power iteration.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(NeurIPS 2019), algorithms 1 and 2. Thread: see compressor.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from horoclone.torch.compressor import GradientBucket, GradientCompressor


class PowerSGDCompressor(GradientCompressor):
    """Compresses by low rank (PowerSGD): gradients of shape [n, ...] are n x m matrices, sent as (n + m) * rank
    elements; vectors are sent whole.

    A matrix that would not shrink by `min_ratio` is sent whole too, and so is everything in the first `start_step`
    steps, when gradients change too fast for a warm start. What a rank's approximation loses is added to its next
    step's gradients unless error_feedback is False. Two allreduces per bucket, works in float32. The factors are
    multiplied on every rank, so ranks have the same bits where they have the same processor, torch and thread count.
    """

    def __init__(
        self, rank: int = 4, start_step: int = 10, error_feedback: bool = True, min_ratio: float = 2.0
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank={rank} must be at least 1")
        self.rank, self.start_step, self.min_ratio = rank, start_step, min_ratio
        self.error_feedback = error_feedback

    def reduce(self, bucket: GradientBucket) -> Generator[Any, Any, None]:
        step = bucket.state["step"] = bucket.state.get("step", 0) + 1
        if bucket.size == 1:
            return
        chosen = [i for i, g in enumerate(bucket.gradients) if self._shrinks(g)]
        if step <= self.start_step or not chosen or not bucket.flat.is_floating_point():
            yield bucket.allreduce(bucket.flat, "plain")
            return
        matrices = [self._matrix(bucket, i) for i in chosen]
        right = [self._right(bucket, i, m.shape[1]) for i, m in zip(chosen, matrices, strict=True)]
        left = [m @ q for m, q in zip(matrices, right, strict=True)]
        rest = [g for i, g in enumerate(bucket.gradients) if i not in set(chosen)]
        sums = yield bucket.allreduce(_joined([*left, *rest]), "left")
        parts = _separated(sums, [*left, *rest])
        for gradient, reduced in zip(rest, parts[len(left) :], strict=True):
            gradient.copy_(reduced)
        # Orthonormal columns: only the span counts
        left = [torch.linalg.qr(p)[0] for p in parts[: len(left)]]
        own = [m.t() @ p for m, p in zip(matrices, left, strict=True)]
        sums = yield bucket.allreduce(_joined(own), "right")
        right = _separated(sums, own)
        for i, matrix, p, q_own, q in zip(chosen, matrices, left, own, right, strict=True):
            bucket.gradients[i].copy_((p @ q.t()).view(bucket.gradients[i].shape))
            self._remember(bucket, i, matrix - p @ q_own.t(), q.clone())

    def residuals(self, bucket: GradientBucket) -> dict[str, torch.Tensor]:
        found = {}
        for i, (name, gradient) in enumerate(zip(bucket.names, bucket.gradients, strict=True)):
            if ("residual", i) in bucket.state:
                found[name] = bucket.state["residual", i].view(gradient.shape)
        return found

    def resume(self, bucket: GradientBucket, residuals: Mapping[str, torch.Tensor]) -> None:
        for i, (name, gradient) in enumerate(zip(bucket.names, bucket.gradients, strict=True)):
            bucket.state.pop(("residual", i), None)
            if name in residuals and self.error_feedback:
                residual = residuals[name].to(gradient.device, torch.float32)
                bucket.state["residual", i] = residual.reshape(gradient.shape[0], -1)

    def _shrinks(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        n = gradient.shape[0]
        m = gradient.numel() // n
        return min(n, m) > self.rank and n * m >= self.min_ratio * self.rank * (n + m)

    def _matrix(self, bucket: GradientBucket, i: int) -> torch.Tensor:
        gradient = bucket.gradients[i]
        matrix = gradient.reshape(gradient.shape[0], -1).float()
        residual = bucket.state.get(("residual", i))
        return matrix.clone() if residual is None else matrix + residual

    def _right(self, bucket: GradientBucket, i: int, rows: int) -> torch.Tensor:
        """The right factor of the last step; in the first the one to start with."""
        warm = bucket.state.get(("right", i))
        return self._first(bucket, i, rows) if warm is None else warm

    def _first(self, bucket: GradientBucket, i: int, rows: int) -> torch.Tensor:
        """A random right factor, the same on every rank."""
        first = bucket.state.get(("first", i))
        if first is None:
            chance = torch.Generator().manual_seed(zlib.crc32(bucket.names[i].encode()))
            made = torch.randn(rows, self.rank, generator=chance, dtype=torch.float32, device="cpu").to(
                bucket.gradients[i].device
            )
            first = bucket.state["first", i] = made
        return first  # type: ignore[no-any-return]

    def _remember(self, bucket: GradientBucket, i: int, lost: torch.Tensor, right: torch.Tensor) -> None:
        """After an overflow it starts afresh, on every rank. Decided where the numbers are: no host waits for a GPU."""
        finite = right.isfinite().all()
        bucket.state["right", i] = torch.where(finite, right, self._first(bucket, i, right.shape[0]))
        if self.error_feedback:
            bucket.state["residual", i] = torch.where(finite, lost, torch.zeros_like(lost))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1).float() for t in tensors])


def _separated(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = joined.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
