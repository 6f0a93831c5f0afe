"""Collectives on arrays with a root: reduce and gather to one rank, scatter from one rank.

Arguments, dtypes, handles and errors as in collectives.py. root_rank is a world rank, also within a process set. None
of them can run while a rank of the process set has joined (Unsupported).
"""

from __future__ import annotations

from typing import Any

from horoclone import ops, runtime
from horoclone.arrays.adapter import Array, Operations, named
from horoclone.arrays.handles import synchronize
from horoclone.arrays.host_memory import row_counts
from horoclone.handles import ROWS
from horoclone.ops import ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set


def _reduce(name: str, doc: str, *, in_place: bool = False, waits: bool = False) -> Any:
    """One of the four reduces, as a method."""

    def reduce(
        self: Rooted[Any],
        array: Any,
        root_rank: int,
        op: ReduceOp | int = ops.Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        memory, is_root = self._memory, runtime.native().rank == root_rank
        source = memory.writable(array) if in_place else memory.readable(array)
        target = None if not is_root else source if in_place else memory.empty_like(source)
        handle = self._start(
            ops.REDUCE, name, process_set, source, target, array if in_place else target,
            reduce=ops.resolve_reduce(None, op), prescale=prescale_factor, postscale=postscale_factor, root=root_rank,
        )  # fmt: skip
        return synchronize(handle) if waits else handle

    return named(reduce, f"Rooted.{name}", doc)


class Rooted(Operations[Array]):
    """reduce, gather and scatter, over an adapter."""

    reduce = _reduce(
        "reduce",
        """Returns the reduction of everybody's array on rank root_rank, as a new array; None on the others.

        Shapes and dtypes must be the same. op: any but Adasum. Over channels partial sums travel up
        a binomial tree; in shared memory every rank reduces a slice, which the root collects.
        """,
        waits=True,
    )
    reduce_ = _reduce(
        "reduce_",
        "Overwrites rank root_rank's array with the reduction; the others' stay as they are. Returns the array.",
        in_place=True,
        waits=True,
    )
    reduce_async = _reduce("reduce_async", "Starts reduce and returns a handle at once.")
    reduce_async_ = _reduce("reduce_async_", "Starts reduce_ and returns a handle at once.", in_place=True)

    # --- gather ---

    def gather_async(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts gather and returns a handle at once."""
        output = ROWS if runtime.native().rank == root_rank else None
        source = self._memory.readable(array)
        return self._start(ops.GATHER, name, process_set, source, output=output, root=root_rank)

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
        return synchronize(self.gather_async(array, root_rank, name, process_set))  # type: ignore[no-any-return]

    # --- scatter ---

    def scatter_async(
        self,
        array: Any,
        root_rank: int,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts scatter and returns a handle at once."""
        memory, source, rows = self._memory, None, None
        if runtime.native().rank == root_rank:
            if array is None:
                raise ValueError(f"scatter: rank {root_rank} is the root and must pass the array to scatter")
            source, rows = memory.readable(array), row_counts(splits, "scatter")
        return self._start(
            ops.SCATTER, name, process_set, source, None, None, memory.arrived, root=root_rank, splits=rows
        )

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
        return synchronize(self.scatter_async(array, root_rank, splits, name, process_set))  # type: ignore[no-any-return]
