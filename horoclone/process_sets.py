"""Subsets of ranks. A set is registered by `init(process_sets=...)` or `add_process_set`, collectively.

The table of registered sets lives here, one per process; runtime/lifecycle.py fills it at init and clears it at
shutdown.
"""

from __future__ import annotations

import array
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from horoclone import errors, ops
from horoclone.runtime import current


class ProcessSet:
    """A set of ranks that communicate among themselves. `ranks` is sorted; `process_set_id` is None while unregistered.

    A set is its ranks: one with the ranks of a registered set is equal to it and can be passed in its place. A copy is
    the set itself, and so is what a pickle gives in a process where these ranks are registered. Elsewhere it gives an
    unregistered set, which works as soon as one with its ranks is registered there.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank") and hasattr(ranks_or_comm, "Get_size"):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = _sorted_ranks(ranks_or_comm)

    def size(self) -> int | None:
        """Returns how many ranks belong to the set; None while it is unregistered. NotInitialized before init."""
        current.native()
        return None if _number_of(self) is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns this process's rank in the set, None while it is unregistered. ValueError if this process is not in
        it."""
        world_rank = current.native().rank
        if _number_of(self) is None or self.ranks is None:
            return None
        if world_rank not in self.ranks:
            raise ValueError(f"Rank {world_rank} is not a member of {self}; ask included() first.")
        return self.ranks.index(world_rank)

    def included(self) -> bool | None:
        """Returns whether this process is one of the set's ranks, registered or not; None while its ranks are not
        known."""
        world_rank = current.native().rank
        return None if self.ranks is None else world_rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        if self is other:
            return True
        if self is global_process_set or other is global_process_set:
            return False
        return self.ranks is not None and self.ranks == other.ranks

    def __hash__(self) -> int:  # not of the ranks, which are others in the next generation of an elastic job
        return hash(ProcessSet)

    def __copy__(self) -> ProcessSet:
        return self

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self is global_process_set:
            return _pickled, (None,)
        if self.ranks is None:
            raise TypeError(
                "a process set that was made of an MPI communicator can be pickled once it is registered: before that "
                "its ranks are not known. Call hvd.add_process_set() first."
            )
        return _pickled, (self.ranks,)


def _pickled(ranks: list[int] | None) -> ProcessSet:
    """What a pickle of a set gives; None stands for the global one."""
    if ranks is None:
        return global_process_set
    made = ProcessSet(ranks)
    number = _number_of(made)
    return made if number is None else _registered[number]


def _sorted_ranks(ranks: Iterable[int]) -> list[int]:
    try:
        listed = [operator.index(rank) for rank in ranks]
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
"""All ranks of the job; the default of every `process_set=`."""
global_process_set.process_set_id = 0

_registered: dict[int, ProcessSet] = {0: global_process_set}


def registered() -> dict[int, list[int]]:
    """Id -> ranks of every set that exists now, the global one (0) included."""
    return {number: list(members.ranks or []) for number, members in sorted(_registered.items())}


def _number_of(process_set: ProcessSet) -> int | None:
    """Its id if it, or a set with its ranks, is registered. The global set's ranks are no set of their own."""
    number = process_set.process_set_id
    if number is not None and _registered.get(number) is process_set:
        return number
    if not process_set.ranks:
        return None
    return next((n for n, other in _registered.items() if n and other.ranks == process_set.ranks), None)


def id_of(process_set: ProcessSet) -> int:
    """Its id for the core. TypeError when it is something else, UnregisteredSet when it is not registered."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set={process_set!r}: it takes a ProcessSet, for example what hvd.add_process_set([0, 1]) returns"
        )
    number = _number_of(process_set)
    if number is None:
        there = ", ".join(str(ranks) for n, ranks in registered().items() if n) or "none"
        raise errors.UnregisteredSet(
            f"{process_set} does not exist, or has not been registered. Pass it to hvd.init(process_sets=[...]) or to "
            f"hvd.add_process_set(). Registered besides the global set: {there}."
        )
    return number


def set_id(process_set: ProcessSet) -> int:
    """As id_of(), and fast for the global set."""
    return 0 if process_set is global_process_set else id_of(process_set)


def by_id(number: int) -> ProcessSet | None:
    """The set that has this id now, None when there is none."""
    return _registered.get(number)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers one more set; every rank of the world calls it. Returns the set with its id.

    process_set: the same ranks on every rank, or an mpi4py communicator, which may differ from rank to rank as after
    COMM_WORLD.Split(): then all of them are registered, and each rank gets its own.
    Needs HOROVOD_DYNAMIC_PROCESS_SETS=1 before init (or `init(process_sets="dynamic")`). ValueError otherwise, for
    ranks outside the world, and for a set that exists already; Mismatch when the ranks do not add the same set. All
    ranks raise alike, and nothing was added then.
    """
    native = _dynamic("add_process_set")
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _register(native, wanted)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; every rank of the world calls it. False when it is not registered, and for the global set.

    Its id may be given to a later set. A set that was made of communicators is removed with those of the other ranks.
    Mismatch when the ranks do not remove the same set; nothing was removed then.
    """
    native = _dynamic("remove_process_set")
    number = process_set.process_set_id
    if not number or _registered.get(number) is not process_set:
        return False
    theirs = _exchange("remove", [number, int(process_set.mpi_comm is not None)])
    numbers = {number for number, _ in theirs}
    if len(numbers) > 1 and not all(from_comm for _, from_comm in theirs):
        raise _different(
            "remove_process_set",
            [f"process set {number}" for number, _ in theirs],
            "Every rank must remove the same set.",
        )
    for one in sorted(numbers):
        native.remove_process_set(one)
        _registered.pop(one).process_set_id = None
    return True


_KINDS = ("ranks", "communicator", "foreign communicator")


def _dynamic(call: str) -> Any:
    native = current.native()
    if not current.dynamic:
        raise ValueError(
            f"{call} needs HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), or hvd.init(process_sets='dynamic')."
        )
    return native


def _exchange(call: str, mine: list[int]) -> list[list[int]]:
    """Every rank's list, by rank: what is registered or removed is agreed on before anything changes."""
    values = array.array("q", [len(mine), *mine])
    gathered = current.native().run(
        op=ops.ALLGATHER,
        name=f"horoclone.process_set.{call}",
        data_in=values.buffer_info()[0],
        data_out=0,
        shape=(len(values),),
        dtype=ops.DTYPES["int64"],
    )
    assert gathered is not None
    everything = memoryview(gathered).cast("q").tolist()
    lists, at = [], 0
    while at < len(everything):
        end = at + 1 + everything[at]
        lists.append(everything[at + 1 : end])
        at = end
    return lists


def _different(call: str, by_rank: list[str], advice: str) -> errors.Mismatch:
    other = next(rank for rank, text in enumerate(by_rank) if text != by_rank[0])
    return errors.Mismatch(
        f"{call}: rank 0 passed {by_rank[0]}, rank {other} passed {by_rank[other]}. {advice}"
    )


def _register(native: Any, wanted: ProcessSet, may_be_all: bool = False) -> None:
    """may_be_all: those who are left of a larger world may be just the members of a set."""
    kind, mine, foreign = "ranks", list(wanted.ranks or []), None
    if wanted.mpi_comm is not None:
        kind = "communicator"
        try:
            mine = current.world_ranks_of(wanted.mpi_comm)
        except ValueError as error:  # the others are told before it is raised: they would wait
            kind, mine, foreign = "foreign communicator", [], error
    theirs = _exchange("add", [_KINDS.index(kind), *mine])
    if foreign is not None:
        raise foreign
    lists_to_add = _agreed([_KINDS[number] for number, *_ in theirs], [ranks for _, *ranks in theirs])
    for ranks in lists_to_add:
        _check(native, ranks, may_be_all)
    for ranks in lists_to_add:
        own = wanted if len(lists_to_add) == 1 or native.rank in ranks else ProcessSet(ranks)
        number = native.add_process_set(ranks)
        own.ranks, own.process_set_id = ranks, number
        _registered[number] = own


def _agreed(kinds: list[str], lists: list[list[int]]) -> list[list[int]]:
    """The sets to add, from what every rank has passed: one, or those of the communicators. The same on every rank."""
    if "foreign communicator" in kinds:
        culprit = kinds.index("foreign communicator")
        raise ValueError(f"rank {culprit} passed a communicator with members outside the world of init()")
    if all(kind == "communicator" for kind in kinds):
        return _of_communicators(lists)
    texts = [f"{kind} {ranks}" for kind, ranks in zip(kinds, lists, strict=True)]
    if any(text != texts[0] for text in texts):
        advice = (
            "Every rank must add the same set; for sets that differ from rank to rank pass communicators."
        )
        raise _different("add_process_set", texts, advice)
    return lists[:1]


def _of_communicators(lists: list[list[int]]) -> list[list[int]]:
    """The different sets among every rank's communicator, by their first rank. An empty list is MPI.COMM_NULL."""
    found = sorted({tuple(sorted(ranks)) for ranks in lists if ranks})
    outside = [rank for rank, ranks in enumerate(lists) if not ranks]
    if outside and len(found) > 1:
        raise ValueError(
            f"rank {outside[0]} passed MPI.COMM_NULL, while the others' communicators make {len(found)} sets: which of "
            "them its object stands for cannot be told. Give that rank a communicator of its own (a colour)."
        )
    return [list(ranks) for ranks in found]


def _check(native: Any, ranks: list[int], may_be_all: bool = False) -> None:
    if not ranks:
        raise ValueError("a process set needs at least one rank; this one is empty.")
    if ranks[-1] >= native.size:
        raise ValueError(
            f"the process set {ranks} has a rank outside the world of {native.size} ranks (0..{native.size - 1})."
        )
    for number, other in _registered.items():
        if other.ranks == ranks and (number or not may_be_all):
            raise ValueError(f"A process set with ranks {ranks} exists already: {other}.")


def on_init(native: Any, wanted: Sequence[ProcessSet]) -> None:
    """Called by init(): fills in the global set and registers the sets that the user passed."""
    clear()
    global_process_set.ranks = list(range(native.size))
    for index, entry in enumerate(wanted):
        try:
            _register(native, entry)
        except (ValueError, errors.Mismatch) as error:
            text = f"process_sets[{index}]: {error}"
            same = [
                n for n, other in enumerate(wanted[:index]) if other is entry or other.ranks == entry.ranks
            ]
            if same and isinstance(error, ValueError):
                text = f"process_sets[{index}] has the same ranks as process_sets[{same[0]}]: {entry}."
            raise type(error)(text) from None


def on_next_generation(native: Any, wanted: Sequence[tuple[ProcessSet, list[int]]]) -> bool:
    """Called by init() in a later generation of an elastic job: registers sets under these ranks of the new world.

    False, and nothing is registered, unless every rank names the same: survivors those that they had, newcomers those
    that they passed to init().
    """
    clear()
    global_process_set.ranks = list(range(native.size))
    flat = [value for _, ranks in wanted for value in (len(ranks), *ranks)]
    if any(theirs != flat for theirs in _exchange("generation", flat)):
        return False
    for members, ranks in wanted:
        members.ranks = list(ranks)
        _register(native, members, may_be_all=True)
    return True


def declared() -> dict[int, ProcessSet]:
    """Id -> set of all that are registered now, but for the global one."""
    return {number: members for number, members in sorted(_registered.items()) if number}


def clear() -> None:
    """Called by shutdown(): every set but the global one is unregistered."""
    for number, members in list(_registered.items()):
        if number:
            members.process_set_id = None
            del _registered[number]
    global_process_set.ranks = []
