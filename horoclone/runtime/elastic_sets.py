"""The process sets of an elastic job, which a generation takes over from the one before where all their ranks are left.

Thread: init() and shutdown(), with current.lock held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from horoclone import process_sets
from horoclone.process_sets import ProcessSet
from horoclone.runtime.current import say

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.membership.records import Assignment


class ElasticProcessSets:
    """The one of a process; lifecycle.py owns it. dropped: ids of those that lost a rank and do not exist any more."""

    def __init__(self) -> None:
        self.dropped: tuple[int, ...] = ()
        self._kept: dict[int, tuple[ProcessSet, list[int]]] = {}  # by id; with the ranks of now
        self._lost: set[int] = set()
        self._are_registered = False  # those of this generation

    def renumber(self, assignment: Assignment) -> None:
        """A generation was formed: the sets have new ranks, or none where a member is gone."""
        previous = assignment.previous
        if previous[assignment.rank] < 0:  # it comes, perhaps again: the numbers of its sets mean nothing
            self._kept.clear()
        for number, (one, ranks) in list(self._kept.items()):
            if one.mpi_comm is None and set(ranks) <= set(previous):
                self._kept[number] = (one, sorted(previous.index(rank) for rank in ranks))
            else:
                del self._kept[number]
                self._lost.add(number)

    def register(self, runtime: Runtime, passed: Sequence[ProcessSet], assignment: Assignment) -> None:
        """The ranks are connected. passed: to init(), by the user; they count in the first generation of a process."""
        if all(rank < 0 for rank in assignment.previous):
            process_sets.on_init(runtime, passed)
        else:
            survives = assignment.previous[assignment.rank] >= 0
            wanted = self._kept if survives else _by_number(passed)
            if not process_sets.on_next_generation(runtime, list(wanted.values())):
                self._lost.update(self._kept)
            self.dropped = tuple(sorted(self._lost))
            if self.dropped and assignment.rank == 0:
                say(
                    f"process sets {', '.join(map(str, self.dropped))} are gone: not all of their ranks are left"
                )
        self._are_registered = True

    def not_connected(self, passed: Sequence[ProcessSet]) -> None:
        """The generation was lost first: this process has the sets that it would have had, as who got through."""
        self._kept = self._kept or _by_number(passed)

    def keep(self) -> None:
        """The generation ends: its sets are remembered for the next one."""
        if self._are_registered:
            self._lost.clear()
            declared = process_sets.declared()
            self._kept = {number: (one, list(one.ranks or [])) for number, one in declared.items()}
        self._are_registered = False


def _by_number(passed: Sequence[ProcessSet]) -> dict[int, tuple[ProcessSet, list[int]]]:
    return {number: (one, list(one.ranks or [])) for number, one in enumerate(passed, 1)}
