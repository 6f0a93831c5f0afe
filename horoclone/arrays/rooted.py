"""Collectives on arrays with a root: reduce and gather to one rank, scatter from one rank.

Arguments, dtypes, handles and errors as in collectives.py. root_rank is a world rank, also within a process set. None
of them can run while a rank of the process set has joined (Unsupported).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horoclone import ops, runtime
from horoclone.arrays import requests
from horoclone.arrays.adapter import Array, Operations, named
from horoclone.arrays.handles import Pending, now, remember
from horoclone.arrays.host_memory import row_counts
from horoclone.process_sets import ProcessSet, global_process_set, set_id

if TYPE_CHECKING:
    from horoclone._core import Runtime


def _reduce(name: str, doc: str, settle: Callable[[Pending], Any], *, in_place: bool = False) -> Any:
    """One of the four reduces, as a method. settle: what becomes of the operation in flight."""

    def reduce(
        self: Rooted[Any],
        array: Any,
        root_rank: int,
        op: int = ops.Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        native, memory = runtime.native(), self._memory
        source = memory.writable(array) if in_place else memory.readable(array)
        place = memory.place_of([source])
        is_root = native.rank == root_rank
        target = None if not is_root else source if in_place else memory.empty_like(source)
        handle = requests.submit(
            memory, native, ops.REDUCE, name, source=source, target=target, reduce=ops.resolve_reduce(None, op),
            prescale=prescale_factor, postscale=postscale_factor, root=root_rank, process_set=set_id(process_set),
            place=place,
        )  # fmt: skip

        def finish(native: Runtime, handle: int) -> Any:
            memory.follow(native, handle, place)
            return array if in_place else target

        return settle(Pending(native, handle, (source, target), finish))

    return named(reduce, f"Rooted.{name}", doc)


class Rooted(Operations[Array]):
    """reduce, gather and scatter, over an adapter."""

    reduce = _reduce(
        "reduce",
        """Returns the reduction of everybody's array on rank root_rank, as a new array; None on the others.

        Shapes and dtypes must be the same. op: any but Adasum. Over channels partial sums travel up
        a binomial tree; in shared memory every rank reduces a slice, which the root collects.
        """,
        now,
    )
    reduce_ = _reduce(
        "reduce_",
        "Overwrites rank root_rank's array with the reduction; the others' stay as they are. Returns the array.",
        now,
        in_place=True,
    )
    reduce_async = _reduce("reduce_async", "Starts reduce and returns a handle at once.", remember)
    reduce_async_ = _reduce(
        "reduce_async_", "Starts reduce_ and returns a handle at once.", remember, in_place=True
    )

    # --- gather ---

    def _gathered(self, array: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Pending:
        native, memory = runtime.native(), self._memory
        source = memory.readable(array)
        place = memory.place_of([source])
        handle = requests.submit(
            memory, native, ops.GATHER, name, source=source, root=root_rank, process_set=set_id(process_set),
            place=place,
        )  # fmt: skip

        def finish(native: Runtime, handle: int) -> Any:
            memory.follow(native, handle, place)
            if native.rank != root_rank:
                return None
            return memory.rows(
                native.result(handle), source, lambda *where: native.copy_result(handle, 0, *where)
            )

        return Pending(native, handle, source, finish)

    def gather_async(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts gather and returns a handle at once."""
        return remember(self._gathered(array, root_rank, name, process_set))

    def gather(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array | None:
        """Returns every rank's rows, in rank order, on rank root_rank; None on the others.

        Shapes may differ in the first dimension only; there must be one.
        """
        return now(self._gathered(array, root_rank, name, process_set))  # type: ignore[no-any-return]

    # --- scatter ---

    def _scattered(
        self, array: Any, root_rank: int, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Pending:
        native, memory, source = runtime.native(), self._memory, None
        terms: dict[str, Any] = {"root": root_rank, "process_set": set_id(process_set)}
        if native.rank == root_rank:
            if array is None:
                raise ValueError(f"scatter: rank {root_rank} is the root and must pass the array to scatter")
            source = memory.readable(array)
            terms.update(splits=row_counts(splits, "scatter"), place=memory.place_of([source]))
        else:
            terms.update(place=memory.place_to_receive())
        handle = requests.submit(memory, native, ops.SCATTER, name, source=source, **terms)
        return Pending(native, handle, source, memory.arrived)

    def scatter_async(
        self,
        array: Any,
        root_rank: int,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts scatter and returns a handle at once."""
        return remember(self._scattered(array, root_rank, splits, name, process_set))

    def scatter(
        self,
        array: Any,
        root_rank: int,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Returns this rank's share of the rows of rank root_rank's array: splits[r] rows for the r-th rank of the
        process set.

        Without splits (integers in host memory) the shares are equal, the first ranks get one row more if uneven. The
        root passes the array and the splits; what the others pass is ignored (None will do), and they
        get the root's dtype. From a GPU the shares go to the others' current GPUs.
        """
        return now(self._scattered(array, root_rank, splits, name, process_set))  # type: ignore[no-any-return]
