"""Builds the requests to the core for arrays, by keyword, over an adapter. No other module of the binding does.

`process_set` is the number of the set, `place` says where the work runs. The caller keeps the arrays alive until the
operation is done. Thread: the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from horoclone.arguments import explained
from horoclone.arrays.adapter import HOST, Adapter, Place
from horoclone.ops import CALLS, Sum

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime


def submit(
    memory: Adapter,
    native: Runtime,
    op: int,
    name: str | None = None,
    *,
    source: Any = None,
    target: Any = None,
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    splits: Sequence[int] | None = None,
    tag: int = 0,
    place: Place = HOST,
    priority: int = 0,
) -> int:
    """Queues one operation and returns its handle. source None: only the target's form is given, or no array at all.
    target None: the core owns the result, if this rank gets one."""
    form = target if source is None else source
    # By place: for keywords the native function compares the names of all arguments, which takes a third of the call.
    dtype = 0 if form is None else memory.dtype_of(form)
    try:
        return native.submit(
            op, name, 0 if source is None else memory.address(source), 0 if target is None else memory.address(target),
            None if form is None else form.shape, dtype, reduce, prescale, postscale, root, process_set, splits, tag,
            *place, priority,
        )  # fmt: skip
    except TypeError as error:
        raise explained(
            CALLS[op], error, name=name, prescale_factor=prescale, postscale_factor=postscale, root_rank=root,
            splits=splits, tag=tag, priority=priority,
        ) from None  # fmt: skip


def submit_empty(native: Runtime, op: int, *, place: Place = HOST) -> int:
    """Queues an operation that has no arrays (join) and returns its handle."""
    return native.submit(op, None, 0, 0, (), 0, Sum, 1.0, 1.0, 0, 0, None, 0, *place)


def submit_group(
    memory: Adapter,
    native: Runtime,
    op: int,
    name: str | None = None,
    *,
    sources: Sequence[Any],
    targets: Sequence[Any] | None,
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    place: Place = HOST,
) -> int:
    """Queues several arrays as one operation and returns its handle. targets None: the core owns the results."""
    dtypes = [memory.dtype_of(array) for array in sources]
    try:
        return native.submit_group(
            op, name, [memory.address(array) for array in sources],
            [0] * len(sources) if targets is None else [memory.address(array) for array in targets],
            [array.shape for array in sources], dtypes, reduce, prescale, postscale, root, process_set, *place,
        )  # fmt: skip
    except TypeError as error:
        raise explained(
            f"grouped {CALLS[op]}", error, name=name, prescale_factor=prescale, postscale_factor=postscale,
            root_rank=root,
        ) from None  # fmt: skip


def run(
    memory: Adapter,
    native: Runtime,
    op: int,
    name: str | None = None,
    *,
    source: Any,
    target: Any = None,
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    splits: Sequence[int] | None = None,
) -> Result | None:
    """Submits and waits in one crossing, in host memory; gives the core's result where there is no target."""
    dtype = memory.dtype_of(source)
    try:
        return native.run(
            op, name, memory.address(source), 0 if target is None else memory.address(target), source.shape, dtype,
            reduce, prescale, postscale, root, process_set, splits,
        )  # fmt: skip
    except TypeError as error:
        raise explained(
            CALLS[op], error, name=name, prescale_factor=prescale, postscale_factor=postscale, root_rank=root,
            splits=splits,
        ) from None  # fmt: skip


def run_empty(native: Runtime, op: int, *, process_set: int = 0) -> None:
    """Submits an operation that has no arrays (a barrier), and waits for it."""
    native.run(op, None, 0, 0, (), 0, Sum, 1.0, 1.0, 0, process_set)
