"""What is reduced and what must come out: whole numbers in closed form, exact in float32 also when summed."""

from __future__ import annotations

import random

import torch

PERIOD = 1021  # a prime, so that no chunk's border falls on the pattern's own


class Inputs:
    """Element i of rank r in iteration k is (i mod PERIOD) * (r + 1) + offset(r, k), for buffers of up to `count`."""

    def __init__(self, rank: int, size: int, count: int) -> None:
        self.rank, self.size = rank, size
        self._pattern = (torch.arange(count, dtype=torch.int32) % PERIOD).to(torch.float32)
        self._generator = random.Random(count)
        self._samples: dict[int, list[int]] = {}

    @staticmethod
    def _offset(rank: int, iteration: int) -> int:
        return 1 + (7 * rank + iteration) % 4093

    def write(self, tensor: torch.Tensor, iteration: int) -> None:
        """The owner writes all of its tensor anew, in one pass."""
        offset = torch.tensor(float(self._offset(self.rank, iteration)))
        torch.add(offset, self._pattern[: tensor.numel()], alpha=self.rank + 1, out=tensor)

    def _expected(self, iteration: int, ranks: range) -> tuple[int, int]:
        return sum(rank + 1 for rank in ranks), sum(self._offset(rank, iteration) for rank in ranks)

    def check(self, tensor: torch.Tensor, iteration: int, reduced: bool, tolerance: float = 0.0) -> None:
        """Sampled elements and the sum of all, exactly or within `tolerance` of the largest element that there can be.
        RuntimeError when a number is wrong."""
        ranks = range(self.size) if reduced else range(self.rank, self.rank + 1)
        scale, offset = self._expected(iteration, ranks)
        count = tensor.numel()
        allowed = tolerance * ((PERIOD - 1) * scale + offset)
        for index in self._samples_of(count):
            wanted = index % PERIOD * scale + offset
            if not abs(tensor[index].item() - wanted) <= allowed:
                raise RuntimeError(f"element {index} of {count} is {tensor[index].item()}, not {wanted}")
        full, rest = divmod(count, PERIOD)
        wanted = scale * (full * PERIOD * (PERIOD - 1) // 2 + rest * (rest - 1) // 2) + count * offset
        total = tensor.sum(dtype=torch.float64).item()
        if not abs(total - wanted) <= allowed * count:
            raise RuntimeError(f"the {count} elements add up to {total}, not {wanted}")

    def check_every(self, tensor: torch.Tensor, stride: int, iteration: int) -> None:
        """Each stride-th element, where only these were reduced."""
        scale, offset = self._expected(iteration, range(self.size))
        if not torch.equal(tensor[::stride], self._pattern[: tensor.numel() : stride] * scale + offset):
            raise RuntimeError("a number of the loop is wrong")

    def _samples_of(self, count: int) -> list[int]:
        if count not in self._samples:
            inner = {self._generator.randrange(count) for _ in range(6)}
            self._samples[count] = sorted({0, count - 1, *inner})
        return self._samples[count]
