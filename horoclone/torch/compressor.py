"""The two interfaces of gradient compressors that DistributedOptimizer accepts.

`Compressor` (Horovod's): stateless, one tensor in, one tensor out, the reduction between them is an allreduce.
`GradientCompressor`: one object per optimizer, keeps state, reduces a whole bucket with whatever operations it likes.
Thread: the one that runs backward (first part of `reduce`) and the one that synchronises (the rest).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from horoclone.compression import Compressor as Compressor
from horoclone.errors import Unsupported

if TYPE_CHECKING:
    from horoclone.torch.optimizer.gradient_bucket import GradientBucket


class GradientCompressor:
    """Base class of compressors that replace the allreduce of a gradient bucket.

    `reduce` is a generator. It is entered as soon as the bucket's gradients are complete, while backward goes on; it
    starts an operation (`bucket.allreduce(...)`, `bucket.allgather(...)`, `bucket.alltoall(...)`), yields its handle,
    and is resumed with the result. When it returns, `bucket.flat` must hold the reduced gradients, the same bits on
    every rank: the sum of the ranks' gradients divided by `bucket.divisor`, or an approximation of that.
    What it wants to remember (residuals, for instance) it keeps in `bucket.state`, which lives as long as the bucket.
    """

    def reduce(self, bucket: GradientBucket) -> Generator[Any, Any, None]:
        """Reduces `bucket.flat` in place."""
        raise NotImplementedError

    def residuals(self, bucket: GradientBucket) -> dict[str, torch.Tensor]:
        """Returns what this rank has kept back of its gradients, by their names and in their shapes; {}: nothing.

        It goes with the parameters into other buckets, and in an elastic job to who goes on for a lost rank.
        """
        return {}

    def resume(self, bucket: GradientBucket, residuals: Mapping[str, torch.Tensor]) -> None:
        """Sets what residuals() gives; of gradients without one nothing has been kept back."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise Unsupported(
            f"{type(self).__name__} reduces an optimizer's buckets: pass it to "
            "hvd.DistributedOptimizer(compression=...). Single operations take Compression.none, fp16 or bf16."
        )
