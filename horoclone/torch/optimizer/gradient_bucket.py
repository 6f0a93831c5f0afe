"""A bucket of gradients as a GradientCompressor sees it: memory, views, state, and operations among the same ranks."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horoclone.errors import HorovodInternalError
from horoclone.ops import Average, Sum
from horoclone.process_sets import ProcessSet
from horoclone.torch import operations
from horoclone.torch.compressor import GradientBucket
from horoclone.torch.operations.gpu import HOST, memory_beside, place_of
from horoclone.torch.optimizer.buckets import Bucket


class OptimizerBucket(GradientBucket):
    """A bucket of an optimizer, whose operations are those of its process set.

    flat: 1-d, all gradients; where there are gaps between them, zeros. views: its parts, by the gradients' names.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        views: Mapping[str, torch.Tensor],
        index: int,
        name: str,
        op: int,
        process_set: ProcessSet,
    ) -> None:
        self.flat = flat
        self.gradients = list(views.values())
        self.names = list(views)
        self.index = index
        self.state: dict[Any, Any] = {}  # the compressor's; kept from step to step
        self.size = process_set.size() or 1
        self.rank = process_set.rank() or 0  # within the process set
        self.divisor = self.size if op == Average else 1
        self.on_gpu = place_of(flat) is not HOST
        self._name, self._op, self._set = name, op, process_set
        outside = torch.ones(flat.numel(), dtype=torch.bool, device=flat.device)
        for view in self.views_of(outside):
            view.fill_(False)
        self._gaps = outside.nonzero().flatten()

    def clear_gaps(self) -> None:
        """A compressor may have written to them: of a block in which some gradient is not finite all is NaN, and what
        stays there would be sent again in each later step."""
        self.flat.index_fill_(0, self._gaps, 0)

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return (
            memory_beside(self.flat, shape, dtype)
            if self.on_gpu
            else torch.empty(shape, dtype=dtype, device="cpu")
        )

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        first = int(self.flat.storage_offset())
        return [
            flat.as_strided(one.size(), one.stride(), int(one.storage_offset()) - first)
            for one in self.gradients
        ]

    def joined(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        flat = torch.zeros(self.flat.numel(), dtype=torch.float32, device=self.flat.device)
        for name, view in zip(self.names, self.views_of(flat), strict=True):
            if name in values:
                view.copy_(values[name])
        return flat

    def allreduce(self, tensor: torch.Tensor, label: str) -> int:
        return operations.allreduce_async_(
            tensor, None, f"{self._name}.{label}", self._op, 1.0, 1.0, self._set
        )

    def allreduce_sum(self, tensor: torch.Tensor, label: str) -> int:
        return operations.allreduce_async_(tensor, None, f"{self._name}.{label}", Sum, 1.0, 1.0, self._set)

    def allgather(self, tensor: torch.Tensor, label: str) -> int:
        return operations.allgather_async(tensor, f"{self._name}.{label}", self._set)

    def alltoall(self, tensor: torch.Tensor, label: str) -> Exchange:
        return Exchange(operations.alltoall_async(tensor, None, f"{self._name}.{label}", self._set))


class Exchange:
    """Handle of an alltoall of equal shares, whose result is the tensor alone."""

    def __init__(self, handle: int) -> None:
        self.parts = (handle,)

    def __call__(self) -> torch.Tensor:
        return operations.synchronize(self.parts[0])[0]


def run_compressors(buckets: Sequence[Bucket], errors: list[Exception]) -> None:
    """Lets the compressors under way end, stage by stage through all buckets: one's arithmetic overlaps with the
    others' messages. Errors of operations are added to `errors`."""
    running = [bucket for bucket in buckets if bucket.work is not None]
    while running:
        for bucket in running:
            try:
                output = operations.synchronize(bucket.handle) if bucket.handle is not None else None
                bucket.handle = bucket.work.send(output)
            except StopIteration:
                bucket.work = None
                bucket.exposed.clear_gaps()
            except (HorovodInternalError, ValueError) as error:
                errors.append(error)
                bucket.work = None
        running = [bucket for bucket in running if bucket.work is not None]
