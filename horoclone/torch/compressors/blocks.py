"""Blocks of 8-bit integers that share a scale, by torch's own operations: for gradients on a GPU, in their stream.

The messages have the form, and the bits, that csrc/arithmetic/quantize_kernels.h gives them in host memory: every
operation here rounds once, as there.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
STEPS = 127.0  # on each side of zero


def encode(rows: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: [n, shard] float32, whole blocks. Gives the messages [n, bytes] as uint8, and what rounding has lost.

    A block with an infinity or NaN is sent as NaN and loses nothing.
    """
    count, shard = rows.shape
    blocks = rows.view(count, shard // block, block)
    top = blocks.abs().amax(2, keepdim=True)
    finite = top.isfinite()
    scale = torch.where(finite, top / STEPS, torch.full_like(top, float("nan")))
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    zeros = torch.zeros_like(blocks)
    whole = torch.where(finite, (blocks / divisor).round(), zeros)  # ties to even
    lost = torch.where(finite, blocks - whole * scale, zeros)
    scales = scale.view(count, -1).view(torch.uint8)
    integers = whole.to(torch.int8).view(count, shard).view(torch.uint8)
    return torch.cat([scales, integers], 1), lost.view(count, shard)


def decode(messages: torch.Tensor, shard: int, block: int) -> torch.Tensor:
    """[n, bytes] uint8, as encode() gives them -> [n, shard] float32."""
    count = messages.shape[0]
    width = shard // block * SCALE_BYTES
    scales = messages[:, :width].contiguous().view(torch.float32).view(count, -1, 1)
    integers = messages[:, width:].contiguous().view(torch.int8).view(count, -1, block)
    return (integers.to(torch.float32) * scales).view(count, shard)
