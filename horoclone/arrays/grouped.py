"""Operations on several arrays at once: all or nothing, one agreement, one handle. Otherwise as in collectives.py."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from horoclone import ops
from horoclone.arguments import wrong_type
from horoclone.arrays.adapter import Array, Operations, named
from horoclone.arrays.collectives import scatterable
from horoclone.arrays.handles import synchronize, table
from horoclone.ops import ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.requests import overlap


def listed(call: str, arrays: Sequence[Any]) -> Sequence[Any]:
    """The arrays of a group. TypeError for what is no sequence of them."""
    if isinstance(arrays, (str, bytes)) or not hasattr(arrays, "__iter__"):
        raise wrong_type(call, "arrays", arrays, "a list or tuple of arrays")
    return arrays


def _allreduce(name: str, doc: str, *, in_place: bool = False, waits: bool = False) -> Any:
    """One of the four grouped allreduces, as a method."""

    def grouped_allreduce(
        self: Grouped[Any],
        arrays: Sequence[Any],
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        weight: Any = None,
    ) -> Any:
        memory, reduce, scales = (
            self._memory,
            ops.resolve_reduce(average, op),
            (prescale_factor, postscale_factor),
        )
        arrays = listed("grouped_allreduce", arrays)
        if in_place:
            sources = outs = [memory.writable(array) for array in arrays]
            if weight is None and overlap([(memory.address(one), one.nbytes) for one in sources]):
                # What some have in common would be reduced twice there.
                apart = self._start_group(
                    ops.ALLREDUCE, name, process_set, sources, [memory.empty_like(one) for one in sources],
                    reduce=reduce, prescale=scales[0], postscale=scales[1],
                )  # fmt: skip
                apart = table.copied_back(
                    apart, outs, lambda target, result: operator.setitem(target, ..., result)
                )
                return synchronize(apart) if waits else apart
        else:
            sources = [memory.readable(array) for array in arrays]
            outs = [memory.empty_like(source) for source in sources]
        if weight is not None:
            means = self._start_weighted(
                "grouped_allreduce", sources, outs, name, reduce, scales, process_set, weight, outs
            )
            return synchronize(means) if waits else means
        handle = table.start_plain_group(sources, outs, None, name, reduce, *scales, process_set, 0)
        if handle is None:
            handle = self._start_group(
                ops.ALLREDUCE, name, process_set, sources, outs, reduce=reduce, prescale=scales[0], postscale=scales[1]
            )  # fmt: skip
        return synchronize(handle) if waits else handle

    return named(grouped_allreduce, f"Grouped.{name}", doc)


class Grouped(Operations[Array]):
    """Grouped allreduce, allgather and reducescatter, over an adapter."""

    grouped_allreduce = _allreduce(
        "grouped_allreduce",
        "Reduces several arrays as one operation: none of them before all are ready on every rank.",
        waits=True,
    )
    grouped_allreduce_ = _allreduce(
        "grouped_allreduce_",
        "Reduces as grouped_allreduce does, with the results in the arrays themselves.",
        in_place=True,
        waits=True,
    )
    grouped_allreduce_async = _allreduce(
        "grouped_allreduce_async", "Starts grouped_allreduce and returns one handle for the group at once."
    )
    grouped_allreduce_async_ = _allreduce(
        "grouped_allreduce_async_",
        "Starts grouped_allreduce_ and returns one handle for the group at once. Arrays that share memory get their "
        "results in synchronize(), also where poll() says that they are done.",
        in_place=True,
    )

    def grouped_allgather_async(
        self, arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Starts grouped_allgather and returns one handle for the group at once."""
        sources = [self._memory.readable(array) for array in listed("grouped_allgather", arrays)]
        return self._start_group(ops.ALLGATHER, name, process_set, sources)

    def grouped_allgather(
        self, arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[Array]:
        """Gathers several arrays over the ranks as one operation; see allgather."""
        return synchronize(self.grouped_allgather_async(arrays, name, process_set))  # type: ignore[no-any-return]

    def grouped_reducescatter_async(
        self,
        arrays: Sequence[Any],
        name: str | None = None,
        op: ReduceOp | int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Starts grouped_reducescatter and returns one handle for the group at once."""
        sources = [scatterable(self._memory, array) for array in listed("grouped_reducescatter", arrays)]
        return self._start_group(
            ops.REDUCESCATTER, name, process_set, sources, reduce=ops.resolve_reduce(None, op),
            prescale=prescale_factor, postscale=postscale_factor,
        )  # fmt: skip

    def grouped_reducescatter(
        self,
        arrays: Sequence[Any],
        name: str | None = None,
        op: ReduceOp | int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[Array]:
        """Does reducescatter on several arrays as one operation."""
        return synchronize(  # type: ignore[no-any-return]
            self.grouped_reducescatter_async(arrays, name, op, process_set, prescale_factor, postscale_factor)
        )
