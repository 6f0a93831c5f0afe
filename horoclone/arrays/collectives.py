"""Collectives on arrays, written once over an adapter; `import horoclone as hvd` gives those of NumPy.

Every function works for bool, 8- to 64-bit integers, float16, bfloat16 (with ml_dtypes), float32 and float64, and what
only moves data also for uint32, uint64, complex numbers and the small types of ml_dtypes; 0-d and empty arrays are
fine. Arrays that are not contiguous are copied; in-place functions refuse them with ValueError. `name` makes an
operation match by name on every rank; without it operations match by their order. Errors: ValueError for wrong
arguments, else those of errors.py. Handles of the `_async` functions are integers for poll() and synchronize(); they
keep their arrays alive until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horoclone import ops, runtime
from horoclone.arguments import check
from horoclone.arguments import root as root_number
from horoclone.arrays import handles, requests
from horoclone.arrays.adapter import Adapter, Array, Operations
from horoclone.arrays.handles import Pending, now, remember, synchronize
from horoclone.arrays.host_memory import row_counts
from horoclone.process_sets import ProcessSet, global_process_set, set_id

if TYPE_CHECKING:
    from horoclone._core import Runtime

Scales = tuple[float, float]  # before and after the reduction
UNSCALED: Scales = (1.0, 1.0)


def rows_of(memory: Adapter, native: Runtime, handle: int, index: int, like: Any) -> Any:
    """A result whose number of rows the ranks have agreed on."""
    result = native.result(handle, index)
    return memory.rows(result, like, lambda *where: native.copy_result(handle, index, *where))


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

    # --- requests: every term by its own name, because a small call feels the making of a dict ---

    def _start(
        self,
        op: int,
        name: str | None,
        source: Any,
        out: Any = None,
        process_set: ProcessSet = global_process_set,
        *,
        reduce: int = ops.Sum,
        scales: Scales = UNSCALED,
        root: int = 0,
        splits: list[int] | None = None,
        priority: int = 0,
    ) -> Pending:
        """out None: rows whose number the ranks agree on; with `splits`, also how many came from each rank."""
        native, memory = runtime.native(), self._memory
        place = memory.place_of((source,))
        handle = requests.submit(
            memory, native, op, name, source=source, target=out, reduce=reduce, prescale=scales[0], postscale=scales[1],
            root=root, process_set=set_id(process_set), splits=splits, place=place, priority=priority,
        )  # fmt: skip

        def finish(native: Runtime, handle: int) -> Any:
            memory.follow(native, handle, place)
            if out is not None:
                return out
            rows = rows_of(memory, native, handle, 0, source)
            return rows if splits is None else (rows, memory.counts(native.result(handle).rows_from))

        return Pending(native, handle, (source, out), finish)

    def _now(
        self,
        op: int,
        name: str | None,
        source: Any,
        out: Any = None,
        process_set: ProcessSet = global_process_set,
        *,
        reduce: int = ops.Sum,
        scales: Scales = UNSCALED,
        root: int = 0,
        splits: list[int] | None = None,
    ) -> Any:
        """As _start, and waits."""
        memory = self._memory
        if not memory.IN_HOST_MEMORY:
            return now(
                self._start(
                    op, name, source, out, process_set, reduce=reduce, scales=scales, root=root, splits=splits
                )
            )
        native = runtime.native()
        result = requests.run(
            memory, native, op, name, source=source, target=out, reduce=reduce, prescale=scales[0], postscale=scales[1],
            root=root, process_set=set_id(process_set), splits=splits,
        )  # fmt: skip
        if out is not None:
            handles.open_fast_path(native)
            return out
        assert result is not None
        rows = memory.rows(result, source, None)
        return rows if splits is None else (rows, memory.counts(result.rows_from))

    # --- allreduce ---

    def allreduce(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Reduces arrays of one shape and dtype over all ranks; the same bits on every rank. Default op: Average.

        Integers average with truncation toward zero; bool reduces with Sum and Max = or, Min and
        Product = and. And, Or and Xor take the bits of integers and bools; they are not in Horovod.
        """
        source = self._readable(array)
        out, reduce = self._empty_like(source), ops.resolve_reduce(average, op)
        plain = handles.call_plain(
            source, out, None, name, reduce, prescale_factor, postscale_factor, process_set, 0
        )
        if plain is not None:
            return out if plain is out else synchronize(plain)  # type: ignore[no-any-return]
        scales = (prescale_factor, postscale_factor)
        return self._now(ops.ALLREDUCE, name, source, out, process_set, reduce=reduce, scales=scales)  # type: ignore[no-any-return]

    def allreduce_async(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        priority: int = 0,
    ) -> int:
        """Starts allreduce and returns a handle at once. Do not change the array before it is done.

        priority: of what all ranks have submitted, the highest runs first (docs/priority.md).
        """
        source, reduce = self._readable(array), ops.resolve_reduce(average, op)
        out = self._empty_like(source)
        plain = handles.start_plain(
            source, out, None, name, reduce, prescale_factor, postscale_factor, process_set, priority
        )
        if plain is not None:
            return plain
        scales = (prescale_factor, postscale_factor)
        return remember(
            self._start(
                ops.ALLREDUCE, name, source, out, process_set, reduce=reduce, priority=priority, scales=scales
            )
        )

    def allreduce_(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Does allreduce with the result in the array itself, which is returned."""
        plain = handles.call_plain(
            array, array, average, name, op, prescale_factor, postscale_factor, process_set, 0
        )
        if plain is not None:
            return array if plain is array else synchronize(plain)
        target, reduce = self._writable(array), ops.resolve_reduce(average, op)
        scales = (prescale_factor, postscale_factor)
        self._now(ops.ALLREDUCE, name, target, target, process_set, reduce=reduce, scales=scales)
        return array

    def allreduce_async_(
        self,
        array: Any,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        priority: int = 0,
    ) -> int:
        """Starts allreduce_ and returns a handle at once. Do not touch the array before it is done. priority: as
        there."""
        plain = handles.start_plain(
            array, array, average, name, op, prescale_factor, postscale_factor, process_set, priority
        )
        if plain is not None:
            return plain
        target, reduce = self._writable(array), ops.resolve_reduce(average, op)
        scales = (prescale_factor, postscale_factor)
        return remember(
            self._start(
                ops.ALLREDUCE,
                name,
                target,
                target,
                process_set,
                reduce=reduce,
                priority=priority,
                scales=scales,
            )
        )

    # --- allgather, reducescatter, alltoall: results whose size only the core knows ---

    def allgather_async(
        self, array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Starts allgather and returns a handle at once."""
        return remember(self._start(ops.ALLGATHER, name, self._readable(array), None, process_set))

    def allgather(
        self, array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Array:
        """Returns every rank's rows, in rank order. Shapes may differ in the first dimension only; there must be
        one."""
        return self._now(ops.ALLGATHER, name, self._readable(array), None, process_set)  # type: ignore[no-any-return]

    def reducescatter_async(
        self,
        array: Any,
        name: str | None = None,
        op: int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Starts reducescatter and returns a handle at once."""
        reduce, scales = ops.resolve_reduce(None, op), (prescale_factor, postscale_factor)
        return remember(
            self._start(
                ops.REDUCESCATTER,
                name,
                scatterable(self._memory, array),
                None,
                process_set,
                reduce=reduce,
                scales=scales,
            )
        )

    def reducescatter(
        self,
        array: Any,
        name: str | None = None,
        op: int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Array:
        """Reduces arrays of one shape and gives each rank its share of the rows, the first ranks one more if uneven."""
        reduce, scales = ops.resolve_reduce(None, op), (prescale_factor, postscale_factor)
        return self._now(
            ops.REDUCESCATTER,
            name,
            scatterable(self._memory, array),
            None,
            process_set,
            reduce=reduce,
            scales=scales,
        )  # type: ignore[no-any-return]

    def alltoall_async(
        self,
        array: Any,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts alltoall and returns a handle at once."""
        source, rows = self._readable(array), row_counts(splits, "alltoall")
        return remember(self._start(ops.ALLTOALL, name, source, None, process_set, splits=rows))

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
        return self._now(ops.ALLTOALL, name, source, None, process_set, splits=rows)

    # --- broadcast, barrier, join ---

    def broadcast_async(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts broadcast and returns a handle at once."""
        source = self._readable(array)
        out = self._empty_like(source)
        return remember(
            self._start(
                ops.BROADCAST, name, source, out, process_set, root=root_number("broadcast", root_rank)
            )
        )

    def broadcast(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Returns rank root_rank's array on every rank, as a new array. root_rank is the world rank also in a process
        set."""
        source = self._readable(array)
        out = self._empty_like(source)
        return self._now(
            ops.BROADCAST, name, source, out, process_set, root=root_number("broadcast", root_rank)
        )  # type: ignore[no-any-return]

    def broadcast_async_(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts broadcast_ and returns a handle at once."""
        target = self._writable(array)
        return remember(
            self._start(
                ops.BROADCAST, name, target, target, process_set, root=root_number("broadcast", root_rank)
            )
        )

    def broadcast_(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Broadcasts as broadcast does, into the array itself, which is returned."""
        target = self._writable(array)
        self._now(ops.BROADCAST, name, target, target, process_set, root=root_number("broadcast", root_rank))
        return array

    def join(self, device: int = -1) -> int:
        """Says that this rank has no more data: the others' allreduces go on with its identity elements, on GPU number
        `device` (-1: the current one) where arrays lie on GPUs. Returns, when every rank has joined, the rank that was
        last."""
        check("join", device=device)
        native = runtime.native()
        handle = requests.submit_empty(native, ops.JOIN, place=self._memory.place_to_join(device))
        return now(Pending(native, handle, None, lambda native, handle: native.result(handle).join_rank))  # type: ignore[no-any-return]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    requests.run_empty(runtime.native(), ops.BARRIER, process_set=set_id(process_set))
