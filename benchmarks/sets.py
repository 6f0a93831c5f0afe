"""Sets of tensors that are reduced together, rank side: every contestant in every way it has, on the same numbers.

The ways are methods of the contestants: start_many, block_many, group_many take tensors, bucket_many takes the whole
area and the numbers of elements. All tensors of a set lie one after another in one area: one pass writes and checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from measure import Bench

WAYS = {
    "start_many": "one by one", "block_many": "blocking", "group_many": "grouped", "bucket_many": "buckets",
}  # fmt: skip
CALLS = 2  # timed, in a round


class SetTimer:
    """Times the sets of a plan: name -> numbers of elements."""

    def __init__(self, bench: Bench, sets: dict[str, list[int]]) -> None:
        self._bench, self._sets = bench, sets
        self._calls: dict[tuple[str, str, str], tuple[Callable[[], object], torch.Tensor]] = {}

    def round(self, order: random.Random) -> None:
        for name, counts in self._sets.items():
            ways = [(one, way) for one in self._bench.contestants for way in WAYS if hasattr(one, way)]
            for one, way in order.sample(ways, len(ways)):
                times = self._time(one, way, name, counts)
                self._bench.add_round(f"set.{name}", f"{one.label}, {WAYS[way]}", times)

    def _time(self, one: Any, way: str, name: str, counts: list[int]) -> list[float]:
        key = (one.label, way, name)
        if key not in self._calls:
            self._calls[key] = self._prepare(one, way, name, counts)
        call, area = self._calls[key]
        times = []
        for index in range(1 + CALLS):
            took = self._bench.time_call(call, area)
            self._bench.inputs.check(area, self._bench.iteration, True)
            if index >= 1:
                times.append(took)
        return times

    def _prepare(
        self, one: Any, way: str, name: str, counts: list[int]
    ) -> tuple[Callable[[], object], torch.Tensor]:
        label = f"{one.label}.{way}.{name}".replace(" ", "_")
        total = sum(counts)
        if way == "bucket_many":
            own = getattr(one, "allocate", None)
            area = own(4 * total) if own else self._bench.buffers[1][:total]
            return one.bucket_many(area, counts, label), area
        area = self._bench.buffers[0][:total]
        return getattr(one, way)(list(area.split(counts)), label), area

    def close(self) -> None:
        """Lets go of memory that belongs to a runtime, before that ends."""
        self._calls.clear()
