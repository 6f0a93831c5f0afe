"""What an adapter is: the functions through which the operations on arrays handle one kind of array.

They tell where an array lies and what form it has, and make arrays for results. A module with these functions is an
adapter: host_memory.py for NumPy, horoclone/cupy/memory.py for CuPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime

Place = tuple[int, int]  # CUDA's number of the device, and the stream on which the work was submitted
HOST: Place = (-1, 0)
Copy = Callable[
    [int, int, int], None
]  # of a core-owned result: to that address, so many bytes, on that stream


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
        self._memory = memory

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
