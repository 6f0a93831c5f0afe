"""What a compressor has held back of the gradients, when they are cut into other buckets. Owner: reducer.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from horoclone.torch.compressor import GradientCompressor

if TYPE_CHECKING:
    from horoclone.torch.optimizer.buckets import Bucket


class Residuals:
    """Of one rank, by the gradients' names. compression: an optimizer's; others than GradientCompressors keep none."""

    def __init__(self, compression: Any) -> None:
        self._compressor = compression if isinstance(compression, GradientCompressor) else None
        self._waiting: dict[str, torch.Tensor] = {}  # for a bucket with their gradient

    @property
    def may_exist(self) -> bool:
        """Whether the compressor may keep any."""
        return self._compressor is not None

    def read(self, buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
        """All, in the shapes of the gradients; those in a bucket are not copied."""
        found = dict(self._waiting)
        for bucket in buckets:
            if bucket.exposed is not None and self._compressor is not None:
                found.update(self._compressor.residuals(bucket.exposed))
        return found

    def leave(self, buckets: Sequence[Bucket]) -> None:
        """These buckets are given up."""
        self._waiting = self.read(buckets)

    def enter(self, bucket: Bucket) -> None:
        """A new bucket takes those of its gradients."""
        exposed = bucket.exposed
        if exposed is not None and self._compressor is not None:
            found = {name: self._waiting.pop(name) for name in exposed.names if name in self._waiting}
            self._compressor.resume(exposed, found)

    def write(self, residuals: Mapping[str, torch.Tensor], buckets: Sequence[Bucket]) -> None:
        """Takes these instead."""
        self._waiting = dict(residuals)
        for bucket in buckets:
            self.enter(bucket)
