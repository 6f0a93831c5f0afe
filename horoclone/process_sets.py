"""Subsets of ranks. A set is registered by `init(process_sets=...)` or `add_process_set`, collectively.

The table of registered sets lives here, one per process; runtime.py fills it at init and clears it at shutdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from horoclone import runtime


class ProcessSet:
    """Ranks that communicate among themselves. `ranks` is sorted; `process_set_id` is None while unregistered."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank") and hasattr(ranks_or_comm, "Get_size"):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = _sorted_ranks(ranks_or_comm)

    def size(self) -> int | None:
        """How many ranks belong to it; None while it is unregistered. NotInitialized before init."""
        runtime.native()
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in it, None while it is unregistered. ValueError if this process is not in it."""
        world_rank = runtime.native().rank
        if self.process_set_id is None or self.ranks is None:
            return None
        if world_rank not in self.ranks:
            raise ValueError(f"Rank {world_rank} is not a member of {self}; ask included() first.")
        return self.ranks.index(world_rank)

    def included(self) -> bool | None:
        """Whether this process belongs to it; None while it is unregistered."""
        world_rank = runtime.native().rank
        return None if self.process_set_id is None or self.ranks is None else world_rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


def _sorted_ranks(ranks: Iterable[int]) -> list[int]:
    try:
        listed = [int(rank) for rank in ranks]
    except TypeError as error:
        raise ValueError(
            f"a process set is made of ranks or of an mpi4py communicator, not {ranks!r}"
        ) from error
    if len(set(listed)) != len(listed):
        raise ValueError(f"a process set names a rank twice: {listed}")
    if listed and min(listed) < 0:
        raise ValueError(f"a process set has a negative rank: {listed}")
    return sorted(listed)


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_registered: dict[int, ProcessSet] = {0: global_process_set}


def registered() -> dict[int, list[int]]:
    """Id -> ranks of every set that exists now, the global one (0) included."""
    return {number: list(members.ranks or []) for number, members in sorted(_registered.items())}


def id_of(process_set: ProcessSet) -> int:
    """Its id for the core. ValueError when it is not registered."""
    number = process_set.process_set_id
    if number is None or _registered.get(number) is not process_set:
        raise ValueError(
            f"{process_set} does not exist, or has not been registered. Pass it to hvd.init(process_sets=[...]) or to "
            "hvd.add_process_set()."
        )
    return number


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers one more set; every rank of the world calls it with the same ranks. Returns the set with its id.

    Needs HOROVOD_DYNAMIC_PROCESS_SETS=1 before init (or `init(process_sets="dynamic")`). ValueError otherwise, for
    ranks outside the world, and for a set that exists already.
    """
    native = runtime.native()
    if not runtime.dynamic_process_sets():
        raise ValueError(
            "add_process_set needs HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), or "
            "hvd.init(process_sets='dynamic')."
        )
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _register(native, wanted)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; every rank of the world calls it. False when it is not registered, and for the global set."""
    native = runtime.native()
    if not runtime.dynamic_process_sets():
        raise ValueError(
            "remove_process_set needs HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), or "
            "hvd.init(process_sets='dynamic')."
        )
    number = process_set.process_set_id
    if not number or _registered.get(number) is not process_set:
        return False
    native.remove_process_set(number)
    del _registered[number]
    process_set.process_set_id = None
    return True


def _register(native: Any, wanted: ProcessSet) -> None:
    if wanted.ranks is None:
        wanted.ranks = _sorted_ranks(runtime.world_ranks_of(wanted.mpi_comm))
    if wanted.ranks and wanted.ranks[-1] >= native.size:
        raise ValueError(
            f"{wanted} has a rank outside the world of {native.size} ranks (0..{native.size - 1})."
        )
    if not wanted.ranks:
        raise ValueError(f"{wanted} is empty; a process set needs at least one rank.")
    for other in _registered.values():
        if other.ranks == wanted.ranks:
            raise ValueError(f"A process set with ranks {wanted.ranks} exists already: {other}.")
    number = native.add_process_set(wanted.ranks)
    wanted.process_set_id = number
    _registered[number] = wanted


def on_init(native: Any, wanted: Sequence[ProcessSet]) -> None:
    """Called by runtime.init: fills in the global set and registers the sets that the user passed."""
    clear()
    global_process_set.ranks = list(range(native.size))
    for index, entry in enumerate(wanted):
        try:
            _register(native, entry)
        except ValueError as error:
            raise ValueError(f"process_sets[{index}]: {error}") from None


def clear() -> None:
    """Called by runtime.shutdown: every set but the global one is unregistered."""
    for number, members in list(_registered.items()):
        if number:
            members.process_set_id = None
            del _registered[number]
    global_process_set.ranks = []
