"""The two interfaces of gradient compressors that DistributedOptimizer accepts.

`Compressor` (Horovod's): stateless, one tensor in, one tensor out, the reduction between them is an allreduce.
`GradientCompressor`: one object per optimizer, keeps state, reduces a whole bucket with whatever operations it likes.
Thread: the one that runs backward (first part of `reduce`) and the one that synchronises (the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import torch

from horoclone.compression import Compressor as Compressor
from horoclone.errors import Unsupported


class GradientBucket(Protocol):
    """Gradients of one dtype that are reduced together; the same ones, in the same order, on every rank.

    flat: 1-d, all gradients; where there are gaps between them, zeros. state: the compressor's, kept from step to step.
    size, rank: within the process set. divisor: by which the sum is divided; 1 where the optimizer adds.
    """

    flat: torch.Tensor
    gradients: list[torch.Tensor]
    names: list[str]
    index: int
    state: dict[Any, Any]
    size: int
    rank: int
    divisor: int
    on_gpu: bool

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """New memory beside the gradients, for what is to be sent; not written yet."""

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients' parts of a tensor that is laid out as `flat`."""

    def joined(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Values in the gradients' shapes, by name, laid out as `flat`, in float32; zeros for what is not there."""

    def allreduce(self, tensor: torch.Tensor, label: str) -> int:
        """Starts the optimizer's reduction (Average or Sum) of a contiguous tensor, in place. Returns a handle.

        label: differs between the operations of one call of `reduce`.
        """

    def allreduce_sum(self, tensor: torch.Tensor, label: str) -> int:
        """Starts a sum, whatever the optimizer's reduction is."""

    def allgather(self, tensor: torch.Tensor, label: str) -> int:
        """Starts an allgather; the result has everybody's rows in rank order."""

    def alltoall(self, tensor: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        """Starts an exchange of equal shares of the first dimension; the result has a share from every rank."""


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
