"""Compares values that a binding reads as bytes in host memory (horoclone/comparison.py), at steps that have numbers.

Nothing is agreed before: places are in every step's message, also of ranks that compare nothing, and settings that
differ are found as values are. Thread: the one that trains, or that on which its program calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horoclone import arrays, comparison
from horoclone.arrays import host_memory
from horoclone.comparison import DRIFTED, EVERYTHING, FIRST, MENDED, OFF, PLACES, Difference, Policy
from horoclone.ops import Max, Sum
from horoclone.process_sets import ProcessSet
from horoclone.runtime import steps

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FORGOTTEN = (
    " Give all ranks the same, before the first step or after it: hvd.broadcast_variables([*model.weights, "
    "*optimizer.variables], root_rank=0), or hvd.callbacks.BroadcastGlobalVariablesCallback(0) in model.fit()."
)


def bytes_of(array: Any) -> Bytes:
    """An array's memory, a copy where that has gaps."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class ArrayComparison(comparison.Comparison):
    """name: of the exchange where ranks differ, alike on all ranks. forgotten: what to do where they began so."""

    def __init__(self, own: Policy, name: str, process_set: ProcessSet, forgotten: str = FORGOTTEN) -> None:
        super().__init__(own)
        self._forgotten = forgotten
        self._name, self._set = name, process_set
        self._sizes: list[int] | None = None  # not known yet
        self.restart()
        steps.counted.add(self)

    def restart(self) -> None:
        """Steps are counted from here again."""
        self._steps, self.agreed = 0, self.own

    def lay_out(self, sizes: Sequence[int]) -> None:
        """How many bytes the values have; none: they cannot be read. To be called before all else, as often as one
        likes."""
        if list(sizes) != self._sizes:
            self._sizes = list(sizes)
            self._begin(self._sizes)

    @property
    def shares(self) -> list[list[int]]:
        """That the values are cut into, by number."""
        return self._rotation.shares

    @property
    def every(self) -> int:
        """Steps from one check to the next; 0: none but that of the step FIRST."""
        return self._rotation.every

    def share(self, number: int) -> list[int]:
        """The values that the step of this number compares, if any."""
        if not self._sizes:
            return []
        share = self._rotation.at(number) if self.agreed.action != OFF else None
        if share is None:
            return []
        return list(range(len(self._sizes))) if share == EVERYTHING else self._rotation.shares[share]

    def places(self, number: int, share: Sequence[Bytes]) -> list[int]:
        """What travels."""
        parts = [self.own.steps, number, len(self._sizes or ()), *hashes_of(share)]
        return comparison.places(comparison.joined(parts))

    def settle(
        self, number: int, labels: Sequence[str], hashes: Sequence[int], values: Sequence[Bytes] = ()
    ) -> dict[int, Bytes]:
        """Where a check has failed, on every rank: says what differs, and gives what is to be repaired, by place. May
        raise Mismatch. hashes: of all values; values: themselves, where these can be repaired."""
        if number in steps.held:
            return {}
        own = [self.own.steps, number, len(hashes), *hashes]
        ranks, mine = self._set.ranks or [0], self._set.rank() or 0
        # Sums, in which ranks that have joined take part: their rows stay zeros, as those of ranks that cannot read.
        length = np.array([1 + len(own)])
        arrays.allreduce_(length, op=Max, name=f"{self._name}.length", process_set=self._set)
        table = np.zeros((len(ranks), length[0]), np.int64)
        if self._sizes != []:
            signed = [bits - (1 << 64) if bits >> 63 else bits for bits in own]
            table[mine, : 1 + len(own)] = [1 + self.agreed.action, *signed]
        arrays.allreduce_(table, op=Sum, name=f"{self._name}.values", process_set=self._set)
        present = [row for row in table.tolist() if row[0]]
        self.agreed = Policy(max((row[0] - 1 for row in present), default=OFF), self.own.steps)
        if self.agreed.action == OFF:
            self.agreed = Policy()
            return {}
        shortest = 1 + len(ABOUT) + min(row[len(ABOUT)] for row in present)
        rows = [row[1:shortest] if row[0] else [] for row in table.tolist()]
        last = number - self._rotation.every * len(self._rotation.shares) if self._rotation.every else 0
        last = max(last, FIRST) if number > FIRST else last
        is_new = last > 1  # all of them have been compared before
        self._when = f"after step {number}{f', and not yet after step {last},' if is_new else ''}"
        self._why = DRIFTED if is_new else self._forgotten
        mended: dict[int, Bytes] = {}

        def mend(found: list[Difference]) -> str:
            if len({row[2] for row in rows}) > 1:
                return " They cannot be repaired."
            for difference in found:
                at = difference.column - len(ABOUT)
                if at >= 0:
                    root = ranks[difference.root]
                    mended[at] = arrays.broadcast(values[at], root, f"{self._name}.{at}", self._set)
            return MENDED

        self._settle([*ABOUT, *labels], rows, ranks, mine, mend)
        return mended


class VariableComparison(ArrayComparison):
    """Of variables that are read and written one by one, outside of programs.

    size: of a variable in bytes, or None where it cannot be read here. read: its memory. write: the same, back.
    """

    def __init__(
        self,
        own: Policy,
        name: str,
        process_set: ProcessSet,
        size: Callable[[Any], int | None],
        read: Callable[[Any], Bytes],
        write: Callable[[Any, Bytes], None],
    ) -> None:
        super().__init__(own, name, process_set)
        self._size, self._read, self._write = size, read, write

    def fill(self, variables: Callable[[], Sequence[tuple[str, Any]]]) -> list[int]:
        """Once in a step, before its reduction. variables: with what they are called in a text. What travels."""
        number, self._steps = self._steps, self._steps + 1
        if number not in (2, FIRST) and not self.share(number):  # sizes become known in these
            return NOTHING
        pairs = self.listed(variables)
        share = [self._read(pairs[i][1]) for i in self.share(number)]
        return self.places(number, share) if share else NOTHING

    def listed(self, variables: Callable[[], Sequence[tuple[str, Any]]]) -> Sequence[tuple[str, Any]]:
        """The variables, laid out; none where one cannot be read here."""
        pairs = variables()
        sizes = [self._size(variable) for _, variable in pairs]
        there = [size for size in sizes if size is not None]
        self.lay_out(there if len(there) == len(sizes) else [])
        return pairs if self._sizes else []

    def look(self, received: Sequence[float], variables: Callable[[], Sequence[tuple[str, Any]]]) -> None:
        """At what the reduction has made of it, before the update. Collective where ranks differ."""
        if not comparison.differ(received):
            return
        pairs = self.listed(variables)
        values = [self._read(variable) for _, variable in pairs]
        mended = self.settle(self._steps - 1, [label for label, _ in pairs], hashes_of(values), values)
        for at, value in mended.items():
            self._write(pairs[at][1], value)


ABOUT = ("HOROCLONE_COMPARE_STEPS", "the number of steps", "the number of values")
NOTHING = [0] * PLACES


def hashes_of(values: Sequence[Bytes]) -> list[int]:
    """64 bits each."""
    return comparison.hashes([host_memory.address(one) for one in values], [one.nbytes for one in values])
