"""Sends only the largest gradients, as pairs of index and value; the rest stays in a residual.

Top-k sparsification with error feedback: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018); Aji
and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch

from horoclone.torch.compressor import GradientBucket, GradientCompressor


class TopKCompressor(GradientCompressor):
    """Sends the `ratio` largest elements of a bucket, 8 bytes each, to every rank, which adds them up in rank order.

    Elements that were not sent are added to the next step's gradients unless error_feedback is False. Infinities and
    NaN count as largest, so they arrive. The bytes grow with the number of ranks: N * ratio * 2 of float32's.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio} must be above 0 and at most 1")
        self.ratio = ratio
        self.error_feedback = error_feedback

    def reduce(self, bucket: GradientBucket) -> Generator[Any, Any, None]:
        flat = bucket.flat
        if bucket.size == 1:
            return
        if not flat.is_floating_point():
            yield bucket.allreduce(flat, "plain")
            return
        values = flat.float() if flat.dtype != torch.float32 else flat
        residual = bucket.state.get("residual")
        total = values + residual if residual is not None else values.clone()
        count = max(1, round(self.ratio * total.numel()))
        indices = torch.topk(total.abs(), count, sorted=False).indices
        chosen = total[indices]
        message = torch.stack([indices.int(), chosen.view(torch.int32)])
        everybody = yield bucket.allgather(message, "largest")
        summed = torch.zeros_like(values)
        everybody = everybody.view(bucket.size, 2, count)
        sums = everybody[:, 1].view(torch.float32)  # in the memory of what came
        for theirs, own in zip(everybody[:, 0], sums, strict=True):
            where = theirs.long()
            own.div_(bucket.divisor).add_(summed[where])
            summed[where] = own  # no index twice in a row
        if self.error_feedback:
            # After an overflow, which arrives on every rank, it starts afresh: what was not sent may not be finite.
            rest = total.index_fill_(0, indices, 0.0)
            bucket.state["residual"] = torch.where(sums.isfinite().all(), rest, 0.0)
        flat.copy_(summed)

    def residuals(self, bucket: GradientBucket) -> dict[str, torch.Tensor]:
        residual = bucket.state.get("residual")
        return {} if residual is None else dict(zip(bucket.names, bucket.views_of(residual), strict=True))

    def resume(self, bucket: GradientBucket, residuals: Mapping[str, torch.Tensor]) -> None:
        bucket.state.pop("residual", None)
        if residuals and self.error_feedback:
            bucket.state["residual"] = bucket.joined(residuals)
