"""Collectives on arrays, written once over an adapter; `import horoclone as hvd` gives those of NumPy.

Every function works for bool, 8- to 64-bit integers, float16, bfloat16 (with ml_dtypes), float32 and float64, and what
only moves data also for uint32, uint64, complex numbers and the small types of ml_dtypes; 0-d and empty arrays are
fine. Arrays that are not contiguous are copied; in-place functions refuse them with ValueError. `name` makes an
operation match by name on every rank; without it operations match by their order. Errors: ValueError for wrong
arguments, else those of errors.py. Handles of the `_async` functions are integers for poll() and synchronize(); they
keep their arrays alive until then.
"""

from __future__ import annotations

from typing import Any

from horoclone import ops, runtime
from horoclone.arguments import check
from horoclone.arguments import root as root_number
from horoclone.arrays.adapter import Adapter, Array, Operations
from horoclone.arrays.handles import synchronize, table
from horoclone.arrays.host_memory import row_counts
from horoclone.ops import ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set, set_id
from horoclone.runtime import steps


def scatterable(memory: Adapter, array: Any) -> Any:
    """As readable(); ValueError for an array without a first dimension."""
    source = memory.readable(array)
    if source.ndim == 0:
        raise ValueError(
            "reducescatter needs an array with a first dimension to scatter; this one is 0-d: reshape it to [1]."
        )
    return source


class Collectives(Operations[Array]):
    """The operations in which every rank has the same part."""

    def __init__(self, memory: Adapter) -> None:
        super().__init__(memory)
        self._readable, self._writable, self._empty_like = memory.readable, memory.writable, memory.empty_like

    # --- allreduce: the core's fast path, which declines what it does not know; for that, a request ---

    def allreduce(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        weight: Any = None,
    ) -> Array:
        """Reduces arrays of one shape and dtype over all ranks; the same bits on every rank. Default op: Average.

        Integers average with truncation toward zero; bool reduces with Sum and Max = or, Min and
        Product = and. And, Or and Xor take the bits of integers and bools; they are not in Horovod. weight: how much
        this rank counts in the mean, sum(weight * array) / sum(weight): a number of 0 or more, given on every rank or
        on none. Also of the other forms; InvalidArgument on every rank where one's weight is negative or not finite, or
        all are 0.
        """
        source = self._readable(array)
        out = self._empty_like(source)
        if weight is not None:
            factors = (prescale_factor, postscale_factor)
            return synchronize(self._weighted(source, out, average, name, op, factors, process_set, weight))  # type: ignore[no-any-return]
        return self._reduced(  # type: ignore[no-any-return]
            source, out, average, name, op, prescale_factor, postscale_factor, process_set
        )

    def allreduce_(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        weight: Any = None,
    ) -> Any:
        """Does allreduce with the result in the array itself, which is returned."""
        if weight is not None:
            factors = (prescale_factor, postscale_factor)
            return synchronize(self._weighted(array, array, average, name, op, factors, process_set, weight))
        return self._reduced(array, array, average, name, op, prescale_factor, postscale_factor, process_set)

    def _reduced(
        self, source: Any, out: Any, average: bool | None, name: str | None, op: int | None, prescale: float,
        postscale: float, process_set: ProcessSet,
    ) -> Any:  # fmt: skip
        plain = table.call_plain(source, out, average, name, op, prescale, postscale, process_set, 0)
        if plain is not None:
            return out if plain is out else synchronize(plain)
        target, reduce = self._writable(out), ops.resolve_reduce(average, op)
        source = target if source is out else source
        return self._run(
            ops.ALLREDUCE, name, process_set, source, target, out, reduce=reduce, prescale=prescale, postscale=postscale
        )  # fmt: skip

    def allreduce_async(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        priority: int = 0,
        weight: Any = None,
    ) -> int:
        """Starts allreduce and returns a handle at once. Do not change the array before it is done.

        priority: of what all ranks have submitted, the highest runs first (docs/priority.md).
        """
        source = self._readable(array)
        out = self._empty_like(source)
        if weight is not None:
            factors = (prescale_factor, postscale_factor)
            return self._weighted(source, out, average, name, op, factors, process_set, weight, priority)
        return self._reducing(
            source, out, average, name, op, prescale_factor, postscale_factor, process_set, priority
        )

    def allreduce_async_(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        priority: int = 0,
        weight: Any = None,
    ) -> int:
        """Starts allreduce_ and returns a handle at once. Do not touch the array before it is done. priority: as
        there."""
        if weight is not None:
            factors = (prescale_factor, postscale_factor)
            return self._weighted(array, array, average, name, op, factors, process_set, weight, priority)
        return self._reducing(
            array, array, average, name, op, prescale_factor, postscale_factor, process_set, priority
        )

    def _reducing(
        self, source: Any, out: Any, average: bool | None, name: str | None, op: int | None, prescale: float,
        postscale: float, process_set: ProcessSet, priority: int,
    ) -> int:  # fmt: skip
        plain = table.start_plain(source, out, average, name, op, prescale, postscale, process_set, priority)
        if plain is not None:
            return plain
        target, reduce = self._writable(out), ops.resolve_reduce(average, op)
        source = target if source is out else source
        return self._start(
            ops.ALLREDUCE, name, process_set, source, target, out, reduce=reduce, prescale=prescale,
            postscale=postscale, priority=priority,
        )  # fmt: skip

    def _weighted(
        self, source: Any, out: Any, average: bool | None, name: str | None, op: int | None,
        factors: tuple[float, float], process_set: ProcessSet, weight: Any, priority: int = 0,
    ) -> int:  # fmt: skip
        if priority:
            raise ValueError("allreduce: weight= does not work with priority=")
        target = self._writable(out)
        return self._start_weighted(
            "allreduce", [target if source is out else source], [target], name, ops.resolve_reduce(average, op),
            factors, process_set, weight, out,
        )  # fmt: skip

    # --- allgather, reducescatter, alltoall: results whose size only the core knows ---

    def allgather_async(
        self, array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Starts allgather and returns a handle at once."""
        return self._start(ops.ALLGATHER, name, process_set, self._readable(array))

    def allgather(
        self, array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Array:
        """Returns every rank's rows, in rank order. Shapes may differ in the first dimension only; there must be
        one."""
        return self._run(ops.ALLGATHER, name, process_set, self._readable(array))  # type: ignore[no-any-return]

    def reducescatter_async(
        self,
        array: Any,
        name: str | None = None,
        op: ReduceOp | int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Starts reducescatter and returns a handle at once."""
        return self._start(
            ops.REDUCESCATTER, name, process_set, scatterable(self._memory, array),
            reduce=ops.resolve_reduce(None, op), prescale=prescale_factor, postscale=postscale_factor,
        )  # fmt: skip

    def reducescatter(
        self,
        array: Any,
        name: str | None = None,
        op: ReduceOp | int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Array:
        """Reduces arrays of one shape and gives each rank its share of the rows, the first ranks one more if uneven."""
        return self._run(  # type: ignore[no-any-return]
            ops.REDUCESCATTER, name, process_set, scatterable(self._memory, array),
            reduce=ops.resolve_reduce(None, op), prescale=prescale_factor, postscale=postscale_factor,
        )  # fmt: skip

    def alltoall_async(
        self,
        array: Any,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts alltoall and returns a handle at once."""
        source, rows = self._readable(array), row_counts(splits, "alltoall")
        return self._start(ops.ALLTOALL, name, process_set, source, splits=rows)

    def alltoall(
        self,
        array: Any,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Sends splits[r] rows to each rank r (equal shares without splits) and gives the rows received, in rank order.

        splits: integers in host memory. With them: (rows, received), the latter integers, one for each rank (an array
        of int32 with NumPy, a list with CuPy).
        """
        source, rows = self._readable(array), row_counts(splits, "alltoall")
        return self._run(ops.ALLTOALL, name, process_set, source, splits=rows)

    # --- broadcast, barrier, join ---

    def broadcast_async(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts broadcast and returns a handle at once."""
        source, root = self._readable(array), root_number("broadcast", root_rank)
        out = self._empty_like(source)
        return self._start(ops.BROADCAST, name, process_set, source, out, out, root=root)

    def broadcast(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Returns rank root_rank's array on every rank, as a new array. root_rank is the world rank also in a process
        set."""
        source, root = self._readable(array), root_number("broadcast", root_rank)
        out = self._empty_like(source)
        return self._run(ops.BROADCAST, name, process_set, source, out, out, root=root)  # type: ignore[no-any-return]

    def broadcast_async_(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts broadcast_ and returns a handle at once."""
        target, root = self._writable(array), root_number("broadcast", root_rank)
        return self._start(ops.BROADCAST, name, process_set, target, target, array, root=root)

    def broadcast_(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Broadcasts as broadcast does, into the array itself, which is returned."""
        target, root = self._writable(array), root_number("broadcast", root_rank)
        return self._run(ops.BROADCAST, name, process_set, target, target, array, root=root)

    def join(self, device: int = -1) -> int:
        """Says that this rank has no more data: the others' allreduces go on with its identity elements, on GPU number
        `device` (-1: the current one) where arrays lie on GPUs. Returns, when every rank has joined, the rank that was
        last."""
        check("join", device=device)
        handle = self._start(
            ops.JOIN, None, global_process_set, output=None, place=self._memory.place_to_join(device),
            make=lambda native, handle: native.result(handle).join_rank,
        )  # fmt: skip
        last: int = synchronize(handle)
        steps.joined()
        return last

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Returns when every rank of the process set has called it."""
        self._requests.run(runtime.native(), ops.BARRIER, process_set=set_id(process_set))
