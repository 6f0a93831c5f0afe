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
from horoclone.comparison import DRIFTED, EVERYTHING, MENDED, OFF, PLACES, Difference, Policy
from horoclone.process_sets import ProcessSet
from horoclone.runtime import current

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
        self._sizes: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Steps are counted from here again."""
        self._steps, self.agreed = 0, self.own

    def lay_out(self, sizes: Sequence[int]) -> None:
        """How many bytes the values have; to be called before all else, as often as one likes."""
        if list(sizes) != self._sizes:
            self._sizes = list(sizes)
            self._begin(self._sizes)

    @property
    def shares(self) -> list[list[int]]:
        """That the values are cut into, by number."""
        return self._rotation.shares

    @property
    def every(self) -> int:
        """Steps from one check to the next; 0: none but that of the second step."""
        return self._rotation.every

    def share(self, number: int) -> list[int]:
        """The values that the step of this number compares, if any."""
        share = self._rotation.at(number) if self.agreed.action != OFF and self._sizes else None
        if share is None:
            return []
        return list(range(len(self._sizes))) if share == EVERYTHING else self._rotation.shares[share]

    def places(self, number: int, share: Sequence[Bytes]) -> list[int]:
        """What travels."""
        parts = [self.own.steps, number, len(self._sizes), *hashes_of(share)]
        return comparison.places(comparison.joined(parts))

    def settle(
        self, number: int, labels: Sequence[str], hashes: Sequence[int], values: Sequence[Bytes] = ()
    ) -> dict[int, Bytes]:
        """Where a check has failed, on every rank: says what differs, and gives what is to be repaired, by place. May
        raise Mismatch. hashes: of all values; values: themselves, where these can be repaired."""
        compares = self.agreed.action != OFF
        own = [self.own.steps, number, len(hashes), *hashes]
        signed = [bits - (1 << 64) if bits >> 63 else bits for bits in own]
        # Of one row each: ranks that differ in what they have have rows of different lengths.
        sent = np.array([len(own) + 3, compares, self.own.action, *signed], np.int64)
        received = arrays.allgather(sent, f"{self._name}.values", self._set).tolist()
        rows: list[list[int]] = []
        while received:
            rows.append(received[1 : received[0]])
            received = received[received[0] :]
        self.agreed = Policy(max(row[1] for row in rows), self.own.steps) if compares else Policy()
        if self.agreed.action == OFF:
            self.agreed = Policy()
            return {}
        shortest = min(len(row) for row in rows)
        table = [row[2:shortest] if row[0] else [] for row in rows]
        ranks, mine = self._set.ranks or [0], self._set.rank() or 0
        last = number - self._rotation.every * len(self._rotation.shares)
        self._when = f"after step {number}"
        if number > 1:
            self._when += f", and not yet {f'after step {last}' if last > 1 else 'in the first steps'},"
        self._why = DRIFTED if number > 1 else self._forgotten
        mended: dict[int, Bytes] = {}

        def mend(found: list[Difference]) -> str:
            if len({row[4] for row in rows}) > 1:
                return " They cannot be repaired."
            for difference in found:
                at = difference.column - len(ABOUT)
                if at >= 0:
                    root = ranks[difference.root]
                    mended[at] = arrays.broadcast(values[at], root, f"{self._name}.{at}", self._set)
            return MENDED

        self._settle([*ABOUT, *labels], table, ranks, mine == 0, mend)
        return mended


class VariableComparison(ArrayComparison):
    """Of variables that are read and written one by one, outside of programs.

    read: a variable's memory, or None where it cannot be read here. write: the same, back.
    """

    def __init__(
        self,
        own: Policy,
        name: str,
        process_set: ProcessSet,
        read: Callable[[Any], Bytes | None],
        write: Callable[[Any, Bytes], None],
    ) -> None:
        super().__init__(own, name, process_set)
        self._read, self._write = read, write
        self._variables: list[tuple[str, Any]] = []
        self._life: Any = None  # the runtime in which steps are counted

    def fill(self, variables: Callable[[], Sequence[tuple[str, Any]]]) -> list[int]:
        """Once in a step, before its reduction. variables: with what they are called in a text. What travels."""
        if self._life is not current.runtime:
            self._life = current.runtime
            self.restart()
        number, self._steps = self._steps, self._steps + 1
        if number == 1 or self.share(number):
            self._variables = list(variables())
            read = [self._read(variable) for _, variable in self._variables]
            there = [one for one in read if one is not None]
            self.lay_out([one.nbytes for one in there] if len(there) == len(read) else [])
        share = [self._read(self._variables[i][1]) for i in self.share(number)]
        there = [one for one in share if one is not None]
        return self.places(number, there) if there else NOTHING

    def look(self, received: Sequence[float]) -> None:
        """At what the reduction has made of it, before the update. Collective where ranks differ."""
        if not comparison.differ(received):
            return
        values = [self._read(variable) for _, variable in self._variables]
        there = [np.empty(0, np.uint8) if one is None else one for one in values]
        labels = [label for label, _ in self._variables]
        mended = self.settle(self._steps - 1, labels, hashes_of(there), there)
        for at, value in mended.items():
            self._write(self._variables[at][1], value)


ABOUT = ("HOROCLONE_COMPARE_STEPS", "the number of steps", "the number of values")
NOTHING = [0] * PLACES


def hashes_of(values: Sequence[Bytes]) -> list[int]:
    """64 bits each."""
    return comparison.hashes([host_memory.address(one) for one in values], [one.nbytes for one in values])
