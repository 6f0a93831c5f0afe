"""Gradients as 8-bit integers with one scale per block, with error feedback: about a quarter of float32's bytes.

A reduce-scatter by exchange of quantised shares and an allgather of the quantised sums, so integers are never added up.
Error feedback after Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs" (Interspeech 2014), and Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from horoclone.torch.compressor import GradientCompressor

if TYPE_CHECKING:
    from horoclone.torch.gradient_bucket import GradientBucket

SCALE_BYTES = 4


class Int8Compressor(GradientCompressor):
    """Blocks of `block` elements share a float32 scale (largest magnitude / 127); nearest integer, 127 steps a side.

    What quantising loses, on the way to the sum and on the way back, is added to the next step's gradients unless
    error_feedback is False. A block with infinities or NaN arrives as NaN. Works in float32 whatever the parameters'
    dtype; the result has the same bits on every rank, as all decode the same bytes.
    """

    def __init__(self, block: int = 256, error_feedback: bool = True) -> None:
        if block < 1:
            raise ValueError(f"block={block} must be at least 1")
        self.block = block
        self.error_feedback = error_feedback

    def reduce(self, bucket: GradientBucket) -> Generator[Any, Any, None]:
        flat = bucket.flat
        if bucket.size == 1:
            return
        if not flat.is_floating_point():
            yield bucket.allreduce(flat, "plain")
            return
        share = -(-flat.numel() // (bucket.size * self.block)) * self.block
        work = flat.new_zeros(bucket.size * share, dtype=torch.float32)
        work[: flat.numel()].copy_(flat)
        received = yield bucket.alltoall(
            self._encode(work.view(bucket.size, share), bucket, "sent"), "shares"
        )
        total = work.new_zeros((1, share))
        for row in received:  # in rank order
            total += self._decode(row.unsqueeze(0))
        total /= bucket.divisor
        everybody = yield bucket.allgather(self._encode(total, bucket, "returned"), "sums")
        flat.copy_(self._decode(everybody).view(-1)[: flat.numel()])

    def _encode(self, values: torch.Tensor, bucket: GradientBucket, which: str) -> torch.Tensor:
        """[rows, share] float32 -> [rows, bytes]: scales, then integers. Adds the residual `which` and renews it."""
        residual = bucket.state.get(which)
        if residual is not None:
            values = values + residual
        rows, share = values.shape
        blocks = values.view(rows, share // self.block, self.block)
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        whole = torch.where(scales == 0, 1.0, scales)
        integers = (blocks / whole).round_().nan_to_num_(0.0).to(torch.int8)
        if self.error_feedback:
            lost = (blocks - integers * scales).view(rows, share)
            bucket.state[which] = lost if bool(scales.isfinite().all()) else lost.nan_to_num_(0.0, 0.0, 0.0)
        message = values.new_empty((rows, self._bytes_of(share)), dtype=torch.uint8)
        cut = share // self.block * SCALE_BYTES
        message[:, :cut] = scales.view(rows, -1).view(torch.uint8)
        message[:, cut:] = integers.view(rows, share).view(torch.uint8)
        return message

    def _bytes_of(self, share: int) -> int:
        return share // self.block * SCALE_BYTES + share

    def _decode(self, message: torch.Tensor) -> torch.Tensor:
        """[rows, bytes] -> [rows, share] float32."""
        rows, length = message.shape
        count = length // (self.block + SCALE_BYTES)
        scales = message[:, : count * SCALE_BYTES].contiguous().view(torch.float32)
        integers = (
            message[:, count * SCALE_BYTES :].contiguous().view(torch.int8).view(rows, count, self.block)
        )
        return (integers * scales.unsqueeze(2)).view(rows, -1)
