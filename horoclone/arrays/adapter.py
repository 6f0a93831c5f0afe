"""What an adapter is: the functions through which the operations on arrays handle one kind of array.

They tell where an array lies and what form it has, and make arrays for results. A module with these functions is an
adapter: host_memory.py for NumPy, horoclone/cupy/memory.py for CuPy. Operations has the way from arrays to the core.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from horoclone import ops, runtime
from horoclone.arrays.handles import synchronize, table
from horoclone.errors import Unsupported
from horoclone.handles import ROWS
from horoclone.process_sets import ProcessSet, set_id
from horoclone.requests import HOST as HOST
from horoclone.requests import Place as Place
from horoclone.requests import Requests

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime

# Of a core-owned result: to that address, so many bytes, on that stream
Copy = Callable[[int, int, int], None]


class Adapter(Protocol):
    """How the core reads and writes one kind of array."""

    # A blocking call waits in the core, in one crossing, and then the result is there for the host.
    IN_HOST_MEMORY: bool

    def readable(self, array: Any) -> Any:
        """As a contiguous array of this kind; a copy only where that needs one. ValueError for what cannot be one."""

    def writable(self, array: Any) -> Any:
        """As an array of this kind over the same memory. ValueError where an operation cannot write into it."""

    def empty_like(self, array: Any) -> Any:
        """New memory of the same form."""

    def address(self, array: Any) -> int:
        """Where its elements begin."""

    def dtype_of(self, array: Any) -> int:
        """The core's number of its dtype; ValueError for those that the core does not have."""

    def place_of(self, arrays: Sequence[Any]) -> Place:
        """Where work on these arrays runs. ValueError where they lie on several devices."""

    def place_to_receive(self) -> Place:
        """Where a message from another rank may be placed."""

    def place_to_join(self, device: int) -> Place:
        """Where a rank that has joined takes part; device -1: the current one."""

    def follow(self, native: Runtime, handle: int, place: Place) -> None:
        """After wait(): what the caller does next with the result comes behind it."""

    def rows(self, result: Result, like: Any, copy: Copy | None) -> Any:
        """A core-owned result as an array whose rows are shaped like those of `like`. copy None: in host memory."""

    def arrived(self, native: Runtime, handle: int) -> Any:
        """What another rank sent, in its dtype and shape."""

    def counts(self, rows_from: list[int]) -> Any:
        """How many rows of an alltoall came from each rank, as the caller gets it."""


Array = TypeVar("Array")


class Operations(Generic[Array]):
    """Base class of operations over an adapter; a bound method of it is a public function."""

    def __init__(self, memory: Adapter) -> None:
        self._memory, self._requests = memory, Requests(memory.address)

    def _start(
        self,
        op: int,
        name: str | None,
        process_set: ProcessSet,
        source: Any = None,
        target: Any = None,
        output: Any = ROWS,
        make: Callable[[Runtime, int], Any] | None = None,
        *,
        place: Place | None = None,
        **terms: Any,
    ) -> int:
        """Submits and returns the handle of `output`, or of what `make` makes of the core's result.

        target None: none on this rank, or the core's own. terms: as for Requests.submit; with `splits` how many rows
        have come from each rank belongs to the output.
        """
        native, memory = runtime.native(), self._memory
        form = target if source is None else source
        if place is None:
            place = memory.place_to_receive() if form is None else memory.place_of((form,))
        handle = self._requests.submit(
            native, op, name, source=source, target=target, dtype=0 if form is None else memory.dtype_of(form),
            process_set=set_id(process_set), place=place, **terms,
        )  # fmt: skip
        has_counts = op == ops.ALLTOALL and terms["splits"] is not None

        def rows(native: Runtime, handle: int) -> Any:
            memory.follow(native, handle, place)
            made = self._rows(native, handle, 0, source)
            return (made, memory.counts(native.result(handle).rows_from)) if has_counts else made

        make = rows if output is ROWS else make or self._behind(output, place)
        return table.remember(native, handle, output, (source, target), make)

    def _run(
        self,
        op: int,
        name: str | None,
        process_set: ProcessSet,
        source: Any = None,
        target: Any = None,
        output: Any = ROWS,
        *,
        reduce: int = ops.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: list[int] | None = None,
    ) -> Any:
        """As _start, and waits. Every term by its own name, because a small call feels the making of a dict."""
        memory = self._memory
        if not memory.IN_HOST_MEMORY:
            return synchronize(
                self._start(
                    op, name, process_set, source, target, output, reduce=reduce, prescale=prescale,
                    postscale=postscale, root=root, splits=splits,
                )
            )  # fmt: skip
        native = runtime.native()
        try:
            result = self._requests.run(
                native, op, name, source=source, target=target, dtype=memory.dtype_of(source), reduce=reduce,
                prescale=prescale, postscale=postscale, root=root, process_set=set_id(process_set), splits=splits,
            )  # fmt: skip
        except BaseException as error:
            table.keep_if_broken_off(error, (source, target))
            raise
        if output is not ROWS:
            table.open_fast_path(native)
            return output
        assert result is not None
        rows = memory.rows(result, source, None)
        return rows if splits is None else (rows, memory.counts(result.rows_from))

    def _start_group(
        self,
        op: int,
        name: str | None,
        process_set: ProcessSet,
        sources: Sequence[Any],
        targets: Sequence[Any] | None = None,
        **terms: Any,
    ) -> int:
        """As _start, for several arrays at once. targets None: rows whose number the ranks agree on."""
        native, memory = runtime.native(), self._memory
        if not sources:
            return table.settled([])
        place = memory.place_of([*sources, *(targets or ())])
        handle = self._requests.submit_group(
            native, op, name, sources=sources, targets=targets, dtypes=[memory.dtype_of(one) for one in sources],
            process_set=set_id(process_set), place=place, **terms,
        )  # fmt: skip

        def rows(native: Runtime, handle: int) -> list[Any]:
            memory.follow(native, handle, place)
            return [self._rows(native, handle, i, source) for i, source in enumerate(sources)]

        make = rows if targets is None else self._behind(targets, place)
        return table.remember(native, handle, targets, (sources, targets), make)

    def _start_weighted(
        self, call: str, sources: Sequence[Any], targets: Sequence[Any], name: str | None, reduce: int,
        factors: tuple[float, float], process_set: ProcessSet, weight: Any, output: Any,
    ) -> int:  # fmt: skip
        """Starts the weighted mean of several arrays, or of one; its output is `output`."""
        if not self._memory.IN_HOST_MEMORY:
            raise Unsupported(f"{call}: weight= is for arrays in host memory: pass cupy.asnumpy(array)")
        from horoclone.arrays import weighted  # loaded only where it is used

        return weighted.start(
            self._start_group, call, sources, targets, name, reduce, factors, process_set, weight, output
        )

    def _rows(self, native: Runtime, handle: int, index: int, like: Any) -> Any:
        return self._memory.rows(
            native.result(handle, index), like, lambda *where: native.copy_result(handle, index, *where)
        )

    def _behind(self, output: Any, place: Place) -> Callable[[Runtime, int], Any] | None:
        """The maker of an output in memory that the caller gave; None: it is there when wait() returns."""
        memory = self._memory
        if memory.IN_HOST_MEMORY:
            return None

        def make(native: Runtime, handle: int) -> Any:
            memory.follow(native, handle, place)
            return output

        return make

    def __reduce__(self) -> Any:
        """So that public functions can be pickled, as functions can: an adapter is a module, known by its name."""
        return _over, (type(self), self._memory.__name__)  # type: ignore[attr-defined]


def _over(kind: type[Operations[Any]], adapter: str) -> Operations[Any]:
    memory: Any = importlib.import_module(adapter)
    return kind(memory)


def named(method: Callable[..., Any], qualified: str, doc: str) -> Callable[..., Any]:
    """A method that a function made, with the name and the docstring by which users find it: `Class.name`."""
    method.__qualname__, method.__name__, method.__doc__ = qualified, qualified.partition(".")[2], doc
    return method
