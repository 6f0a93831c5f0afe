"""Collectives on arrays of one kind, over its adapter: `import horoclone as hvd` has those of NumPy.

Every function works for bool, 8- to 64-bit integers, float16, bfloat16 (with ml_dtypes), float32 and float64; 0-d and
empty arrays are fine. Arrays that are not contiguous are copied; in-place functions refuse them with ValueError. `name`
makes an operation match by name on every rank; without it operations match by their order. Errors: ValueError for wrong
arguments, else those of errors.py. Handles of the `_async` functions are integers for poll() and synchronize(); they
keep their arrays alive until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from horoclone import ops, runtime
from horoclone.arrays import handles, requests
from horoclone.arrays.adapter import Adapter
from horoclone.arrays.handles import Pending, now, remember, synchronize
from horoclone.arrays.host_memory import row_counts
from horoclone.process_sets import ProcessSet, global_process_set, set_id

if TYPE_CHECKING:
    from horoclone._core import Runtime

Array = TypeVar("Array")


class Collectives(Generic[Array]):
    """The operations in which every rank has the same part."""

    def __init__(self, memory: Adapter) -> None:
        self._memory = memory
        self._readable, self._writable, self._empty_like = memory.readable, memory.writable, memory.empty_like

    # --- requests ---

    def _start(
        self,
        op: int,
        name: str | None,
        source: Any,
        out: Any = None,
        process_set: ProcessSet = global_process_set,
        **terms: Any,
    ) -> Pending:
        """out None: rows whose number the ranks agree on; with `splits`, also how many came from each rank."""
        native, memory, place = runtime.native(), self._memory, self._memory.place_of([source])
        handle = requests.submit(
            memory, native, op, name, source=source, target=out, process_set=set_id(process_set), place=place, **terms
        )  # fmt: skip

        def finish(native: Runtime, handle: int) -> Any:
            memory.follow(native, handle, place)
            if out is not None:
                return out
            rows = self._rows(native, handle, 0, source)
            with_counts = terms.get("splits") is not None
            return (rows, memory.counts(native.result(handle).rows_from)) if with_counts else rows

        return Pending(native, handle, (source, out), finish)

    def _rows(self, native: Runtime, handle: int, index: int, like: Any) -> Any:
        result = native.result(handle, index)
        return self._memory.rows(
            result, like, lambda to, size, stream: native.copy_result(handle, index, to, size, stream)
        )

    def _start_group(
        self,
        op: int,
        name: str | None,
        sources: Sequence[Any],
        outs: Sequence[Any] | None,
        process_set: ProcessSet,
        **terms: Any,
    ) -> Pending:
        """outs None: rows whose number the ranks agree on."""
        native, memory = runtime.native(), self._memory
        if not sources:
            return Pending(native, 0, None, lambda native, handle: [])
        place = memory.place_of([*sources, *(outs or ())])
        handle = requests.submit_group(
            memory, native, op, name, sources=sources, targets=outs, process_set=set_id(process_set), place=place,
            **terms,
        )  # fmt: skip

        def finish(native: Runtime, handle: int) -> list[Any]:
            memory.follow(native, handle, place)
            if outs is not None:
                return list(outs)
            return [self._rows(native, handle, i, array) for i, array in enumerate(sources)]

        return Pending(native, handle, (sources, outs), finish)

    def _now(
        self,
        op: int,
        name: str | None,
        source: Any,
        out: Any = None,
        process_set: ProcessSet = global_process_set,
        **terms: Any,
    ) -> Any:
        """As _start, and waits."""
        memory = self._memory
        if not memory.IN_HOST_MEMORY:
            return now(self._start(op, name, source, out, process_set, **terms))
        native = runtime.native()
        result = requests.run(
            memory, native, op, name, source=source, target=out, process_set=set_id(process_set), **terms
        )
        if out is not None:
            handles.open_way(native)
            return out
        assert result is not None
        rows = memory.rows(result, source, None)
        return rows if terms.get("splits") is None else (rows, memory.counts(result.rows_from))

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
        scales = {"prescale": prescale_factor, "postscale": postscale_factor}
        return self._now(ops.ALLREDUCE, name, source, out, process_set, reduce=reduce, **scales)  # type: ignore[no-any-return]

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
        """As allreduce; returns a handle at once. Do not change the array before it is done.

        priority: of what all ranks have submitted, the highest runs first (docs/priority.md).
        """
        source, reduce = self._readable(array), ops.resolve_reduce(average, op)
        out = self._empty_like(source)
        plain = handles.start_plain(
            source, out, None, name, reduce, prescale_factor, postscale_factor, process_set, priority
        )
        if plain is not None:
            return plain
        scales = {"prescale": prescale_factor, "postscale": postscale_factor}
        return remember(
            self._start(
                ops.ALLREDUCE, name, source, out, process_set, reduce=reduce, priority=priority, **scales
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
        """As allreduce, with the result in the array itself, which is returned."""
        plain = handles.call_plain(
            array, array, average, name, op, prescale_factor, postscale_factor, process_set, 0
        )
        if plain is not None:
            return array if plain is array else synchronize(plain)
        target, reduce = self._writable(array), ops.resolve_reduce(average, op)
        scales = {"prescale": prescale_factor, "postscale": postscale_factor}
        self._now(ops.ALLREDUCE, name, target, target, process_set, reduce=reduce, **scales)
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
        """As allreduce_; returns a handle at once. Do not touch the array before it is done. priority: as there."""
        plain = handles.start_plain(
            array, array, average, name, op, prescale_factor, postscale_factor, process_set, priority
        )
        if plain is not None:
            return plain
        target, reduce = self._writable(array), ops.resolve_reduce(average, op)
        scales = {"prescale": prescale_factor, "postscale": postscale_factor}
        return remember(
            self._start(
                ops.ALLREDUCE, name, target, target, process_set, reduce=reduce, priority=priority, **scales
            )
        )

    # --- groups ---

    def grouped_allreduce_async(
        self,
        arrays: Sequence[Any],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """As grouped_allreduce; returns one handle for the group at once."""
        sources = [self._readable(array) for array in arrays]
        outs = [self._empty_like(source) for source in sources]
        reduce = ops.resolve_reduce(average, op)
        return self._reduce_group(sources, outs, name, reduce, prescale_factor, postscale_factor, process_set)

    def grouped_allreduce(
        self,
        arrays: Sequence[Any],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Array]:
        """Reduces several arrays as one operation: none of them before all are ready on every rank."""
        reduce = ops.resolve_reduce(average, op)
        handle = self.grouped_allreduce_async(
            arrays, None, name, reduce, prescale_factor, postscale_factor, process_set
        )
        return synchronize(handle)  # type: ignore[no-any-return]

    def grouped_allreduce_async_(
        self,
        arrays: Sequence[Any],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """As grouped_allreduce_; returns one handle for the group at once."""
        targets = [self._writable(array) for array in arrays]
        reduce = ops.resolve_reduce(average, op)
        return self._reduce_group(
            targets, targets, name, reduce, prescale_factor, postscale_factor, process_set
        )

    def grouped_allreduce_(
        self,
        arrays: Sequence[Any],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Array]:
        """As grouped_allreduce, with the results in the arrays themselves."""
        reduce = ops.resolve_reduce(average, op)
        handle = self.grouped_allreduce_async_(
            arrays, None, name, reduce, prescale_factor, postscale_factor, process_set
        )
        return synchronize(handle)  # type: ignore[no-any-return]

    def _reduce_group(
        self,
        sources: list[Any],
        outs: list[Any],
        name: str | None,
        reduce: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> int:
        plain = handles.start_plain_group(
            sources, outs, None, name, reduce, prescale, postscale, process_set, 0
        )
        if plain is not None:
            return plain
        scales = {"prescale": prescale, "postscale": postscale}
        return remember(
            self._start_group(ops.ALLREDUCE, name, sources, outs, process_set, reduce=reduce, **scales)
        )

    # --- allgather, reducescatter, alltoall: results whose size only the core knows ---

    def allgather_async(
        self, array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """As allgather; returns a handle at once."""
        return remember(self._start(ops.ALLGATHER, name, self._readable(array), None, process_set))

    def allgather(
        self, array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Array:
        """Every rank's rows, in rank order. Shapes may differ in the first dimension only; there must be one."""
        return self._now(ops.ALLGATHER, name, self._readable(array), None, process_set)  # type: ignore[no-any-return]

    def grouped_allgather_async(
        self, arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """As grouped_allgather; returns one handle for the group at once."""
        sources = [self._readable(array) for array in arrays]
        return remember(self._start_group(ops.ALLGATHER, name, sources, None, process_set))

    def grouped_allgather(
        self, arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[Array]:
        """allgather of several arrays as one operation."""
        return synchronize(self.grouped_allgather_async(arrays, name, process_set))  # type: ignore[no-any-return]

    def _scatterable(self, array: Any) -> Any:
        source = self._readable(array)
        if source.ndim == 0:
            raise ValueError(
                "reducescatter needs an array with a first dimension to scatter; this one is 0-d: reshape it to [1]."
            )
        return source

    def reducescatter_async(
        self,
        array: Any,
        name: str | None = None,
        op: int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """As reducescatter; returns a handle at once."""
        terms = {
            "reduce": ops.resolve_reduce(None, op),
            "prescale": prescale_factor,
            "postscale": postscale_factor,
        }
        return remember(
            self._start(ops.REDUCESCATTER, name, self._scatterable(array), None, process_set, **terms)
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
        terms = {
            "reduce": ops.resolve_reduce(None, op),
            "prescale": prescale_factor,
            "postscale": postscale_factor,
        }
        return self._now(ops.REDUCESCATTER, name, self._scatterable(array), None, process_set, **terms)  # type: ignore[no-any-return]

    def grouped_reducescatter_async(
        self,
        arrays: Sequence[Any],
        name: str | None = None,
        op: int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """As grouped_reducescatter; returns one handle for the group at once."""
        sources = [self._scatterable(array) for array in arrays]
        terms = {
            "reduce": ops.resolve_reduce(None, op),
            "prescale": prescale_factor,
            "postscale": postscale_factor,
        }
        return remember(self._start_group(ops.REDUCESCATTER, name, sources, None, process_set, **terms))

    def grouped_reducescatter(
        self,
        arrays: Sequence[Any],
        name: str | None = None,
        op: int = ops.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[Array]:
        """reducescatter of several arrays as one operation."""
        return synchronize(  # type: ignore[no-any-return]
            self.grouped_reducescatter_async(arrays, name, op, process_set, prescale_factor, postscale_factor)
        )

    def alltoall_async(
        self,
        array: Any,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """As alltoall; returns a handle at once."""
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
        """As broadcast; returns a handle at once."""
        source = self._readable(array)
        out = self._empty_like(source)
        return remember(self._start(ops.BROADCAST, name, source, out, process_set, root=int(root_rank)))

    def broadcast(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Rank root_rank's array on every rank, as a new array. root_rank is the world rank also in a process set."""
        source = self._readable(array)
        out = self._empty_like(source)
        return self._now(ops.BROADCAST, name, source, out, process_set, root=int(root_rank))  # type: ignore[no-any-return]

    def broadcast_async_(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """As broadcast_; returns a handle at once."""
        target = self._writable(array)
        return remember(self._start(ops.BROADCAST, name, target, target, process_set, root=int(root_rank)))

    def broadcast_(
        self,
        array: Any,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """As broadcast, into the array itself, which is returned."""
        target = self._writable(array)
        self._now(ops.BROADCAST, name, target, target, process_set, root=int(root_rank))
        return array

    def join(self, device: int = -1) -> int:
        """This rank has no more data: the others' allreduces go on with its neutral elements, on GPU number `device`
        (-1: the current one) where arrays lie on GPUs. Returns, when every rank has joined, the rank that was last."""
        native = runtime.native()
        handle = requests.submit_empty(native, ops.JOIN, place=self._memory.place_to_join(device))
        return now(Pending(native, handle, None, lambda native, handle: native.result(handle).join_rank))  # type: ignore[no-any-return]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    requests.run_empty(runtime.native(), ops.BARRIER, process_set=set_id(process_set))
