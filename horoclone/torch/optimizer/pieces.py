"""A piece of a parameter, of which one rank has the optimizer's state."""

from __future__ import annotations

import torch

from horoclone.torch.optimizer.buckets import flat_of


class Piece:
    """Elements begin..end of a parameter, in the order of its memory, and the rank of the set that owns them."""

    __slots__ = ("begin", "end", "owner", "parameter", "tensor")

    def __init__(self, parameter: torch.Tensor, begin: int, end: int, owner: int) -> None:
        self.parameter, self.begin, self.end, self.owner = parameter, begin, end, owner
        self.tensor = parameter  # what the owner's optimizer updates: the parameter, or a view of its memory

    @property
    def whole(self) -> bool:
        return self.end - self.begin == self.parameter.numel()

    def part_of(self, like: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor of the parameter's shape: its own memory where it is laid out alike."""
        if like.stride() != self.parameter.stride():
            like = torch.empty_like(self.parameter, dtype=like.dtype).copy_(like)
        return flat_of(like)[self.begin : self.end]
