"""Gradients as 8-bit integers with one scale per block, with error feedback: about a quarter of float32's bytes.

A reduce-scatter by exchange of quantised shards and an allgather of the quantised sums, so integers are never added up;
in parts, so that arithmetic (csrc/arithmetic/quantize_kernels.h; blocks.py on GPUs) and messages overlap.
Error feedback after Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs" (Interspeech 2014), and Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horoclone.runtime.native_module import core
from horoclone.torch.compressor import GradientBucket, GradientCompressor
from horoclone.torch.compressors import blocks
from horoclone.torch.compressors.blocks import SCALE_BYTES

dequantize, quantize = core().dequantize, core().quantize  # without the native module the import ends here
PART_ELEMENTS = 1 << 20  # a bucket travels in parts: while one is on the wire, another is quantised


@dataclass(frozen=True)
class Part:
    """Elements [first, first + count) of a bucket; each rank sums up a shard of them, the last ones less than that."""

    number: int
    first: int
    count: int
    shard: int  # whole blocks

    def of_rank(self, rank: int) -> slice:
        begin = min(rank * self.shard, self.count)
        return slice(self.first + begin, self.first + min(begin + self.shard, self.count))


class Int8Compressor(GradientCompressor):
    """Quantises to int8: blocks of `block` elements share a float32 scale (largest magnitude / 127); nearest integer,
    127 steps a side.

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
        values = flat if flat.dtype is torch.float32 else flat.to(torch.float32)
        parts = self._parts(flat.numel(), bucket.size)
        under_way: list[Any] = []
        for part in parts:
            message = self._encode(
                values, [part.of_rank(rank) for rank in range(bucket.size)], part, "sent", bucket
            )
            under_way.append(bucket.alltoall(message, f"shards.{part.number}"))
        total = values.new_empty(parts[0].shard)
        for part, handle in zip(parts, list(under_way), strict=True):
            received = yield handle
            mine = total[: part.shard]
            for rank, row in enumerate(received):  # in rank order
                self._decode(row, mine, part.shard, bucket, add=rank > 0)
            if bucket.divisor != 1:
                mine /= bucket.divisor
            message = self._encode(mine, [slice(0, part.shard)], part, "returned", bucket)
            under_way.append(bucket.allgather(message, f"sums.{part.number}"))
        for part, handle in zip(parts, under_way[len(parts) :], strict=True):
            everybody = yield handle
            for rank, row in enumerate(everybody):
                self._decode(row, values[part.of_rank(rank)], part.shard, bucket)
        if values is not flat:
            flat.copy_(values)

    def residuals(self, bucket: GradientBucket) -> dict[str, torch.Tensor]:
        """Returns what was lost on the way to the sums, and, of this rank's shard, on the way back."""
        if not any(isinstance(key, tuple) and key[0] in ("sent", "returned") for key in bucket.state):
            return {}
        flat = torch.zeros(bucket.flat.numel(), dtype=torch.float32, device=bucket.flat.device)
        for part in self._parts(flat.numel(), bucket.size):
            sent, returned = (bucket.state.get((which, part.number)) for which in ("sent", "returned"))
            if sent is not None:
                for rank, row in enumerate(sent):
                    piece = flat[part.of_rank(rank)]
                    piece.copy_(row[: piece.numel()])
            if returned is not None:
                piece = flat[part.of_rank(bucket.rank)]
                piece.add_(returned[0, : piece.numel()], alpha=bucket.divisor)
        return dict(zip(bucket.names, bucket.views_of(flat), strict=True))

    def resume(self, bucket: GradientBucket, residuals: Mapping[str, torch.Tensor]) -> None:
        """Takes all of it as lost on the way to the sums, where it counts as much."""
        for key in [key for key in bucket.state if isinstance(key, tuple) and key[0] in ("sent", "returned")]:
            del bucket.state[key]
        if not residuals or not self.error_feedback:
            return
        flat = bucket.joined(residuals)
        for part in self._parts(flat.numel(), bucket.size):
            rows = bucket.state["sent", part.number] = torch.zeros(
                (bucket.size, part.shard), dtype=torch.float32, device=flat.device
            )
            for rank, row in enumerate(rows):
                piece = flat[part.of_rank(rank)]
                row[: piece.numel()] = piece

    def _parts(self, elements: int, size: int) -> list[Part]:
        unit = size * self.block
        step = max(1, PART_ELEMENTS // unit) * unit
        counts = [min(step, elements - first) for first in range(0, elements, step)]
        return [
            Part(number, number * step, count, -(-count // unit) * self.block)
            for number, count in enumerate(counts)
        ]

    def _encode(
        self, values: torch.Tensor, pieces: list[slice], part: Part, which: str, bucket: GradientBucket
    ) -> torch.Tensor:
        """[len(pieces), bytes]: a row for each piece of `values`, float32. Adds the residual `which` and renews it."""
        lost = None
        if self.error_feedback:
            key = (which, part.number)
            if key not in bucket.state:
                bucket.state[key] = values.new_zeros((len(pieces), part.shard))
            lost = bucket.state[key]
        if bucket.on_gpu:
            return self._encode_there(values, pieces, part, lost, bucket)
        message = torch.empty((len(pieces), self._bytes_of(part.shard)), dtype=torch.uint8, device="cpu")
        for row, piece in enumerate(pieces):
            source = values[piece]
            residual = 0 if lost is None else lost[row].data_ptr()
            quantize(
                self.block, part.shard, source.numel(), source.data_ptr(), residual, message[row].data_ptr()
            )
        return message

    def _encode_there(
        self,
        values: torch.Tensor,
        pieces: list[slice],
        part: Part,
        lost: torch.Tensor | None,
        bucket: GradientBucket,
    ) -> torch.Tensor:
        rows = values.new_zeros((len(pieces), part.shard))
        for row, piece in zip(rows, pieces, strict=True):
            row[: piece.stop - piece.start] = values[piece]
        if lost is not None:
            rows += lost
        encoded, rest = blocks.encode(rows, self.block)
        if lost is not None:
            lost.copy_(rest)
        return bucket.memory(encoded.shape, torch.uint8).copy_(encoded)

    def _bytes_of(self, shard: int) -> int:
        return shard // self.block * SCALE_BYTES + shard

    def _decode(
        self, message: torch.Tensor, into: torch.Tensor, shard: int, bucket: GradientBucket, add: bool = False
    ) -> None:
        """Writes (or adds) what a row holds into float32 memory, as many elements as that has."""
        if not bucket.on_gpu:
            dequantize(self.block, shard, into.numel(), message.data_ptr(), into.data_ptr(), add)
            return
        values = blocks.decode(message.unsqueeze(0), shard, self.block)[0, : into.numel()]
        if add:
            into.add_(values)
        else:
            into.copy_(values)
