"""Builds the requests to the core, by keyword, for the bindings to torch, NumPy, CuPy and JAX. No other module does.

`process_set` is the number of the set, `dtype` the core's number. `place` says where the work runs: CUDA's number of
the device, and the stream. The caller keeps the tensors alive until the operation is done. Thread: the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from horoclone.arguments import explained
from horoclone.ops import CALLS, Sum

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime

Place = tuple[int, int]
HOST: Place = (-1, 0)
# A binding may add it to the number of a dtype where the tensor is on a GPU: then host memory costs one comparison.
ON_GPU = 64


def overlap(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether some of them, each an address and a number of bytes, have memory in common."""
    end = 0
    for begin, size in sorted(spans):
        if begin < end:
            return True
        end = begin + size
    return False


class Requests:
    """Requests for one kind of tensors. address: where the elements of one begin; never 0.

    span: opens what a profiler shows of a call, which it is told with the tensor's name and whether the call waits;
    None where no profiler runs. It has end() and, for a call that does not wait, gave(handle).
    """

    def __init__(
        self, address: Callable[[Any], int], span: Callable[[str, str | None, bool], Any] | None = None
    ) -> None:
        self._address, self._span = address, span

    def submit(
        self,
        runtime: Runtime,
        op: int,
        name: str | None = None,
        *,
        source: Any = None,
        target: Any = None,
        dtype: int = 0,
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
        """Queues one operation and returns its handle. source None: only the target's form is given, or no tensor at
        all. target None: the core owns the result, if this rank gets one."""
        form = target if source is None else source
        span = self._span and self._span(CALLS[op], name, False)
        # By place: for keywords the native function compares the names of all, which takes a third of the call.
        try:
            handle = runtime.submit(
                op, name, 0 if source is None else self._address(source),
                0 if target is None else self._address(target),
                None if form is None else form.shape, dtype % ON_GPU, reduce, prescale, postscale, root, process_set,
                splits, tag, *place, priority,
            )  # fmt: skip
            return span.gave(handle) if span else handle
        except TypeError as error:
            raise explained(
                CALLS[op], error, name=name, prescale_factor=prescale, postscale_factor=postscale, root_rank=root,
                splits=splits, tag=tag, priority=priority,
            ) from None  # fmt: skip
        finally:
            if span:
                span.end()

    def submit_group(
        self,
        runtime: Runtime,
        op: int,
        name: str | None = None,
        *,
        sources: Sequence[Any],
        targets: Sequence[Any] | None,
        dtypes: Sequence[int],
        reduce: int = Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        process_set: int = 0,
        place: Place = HOST,
    ) -> int:
        """Queues several tensors as one operation and returns its handle. targets None: the core owns the results."""
        span = self._span and self._span(f"grouped_{CALLS[op]}", name, False)
        try:
            handle = runtime.submit_group(
                op, name, [self._address(source) for source in sources],
                [0] * len(sources) if targets is None else [self._address(target) for target in targets],
                [source.shape for source in sources], [dtype % ON_GPU for dtype in dtypes], reduce, prescale, postscale,
                root, process_set, *place,
            )  # fmt: skip
            return span.gave(handle) if span else handle
        except TypeError as error:
            raise explained(
                f"grouped {CALLS[op]}", error, name=name, prescale_factor=prescale, postscale_factor=postscale,
                root_rank=root,
            ) from None  # fmt: skip
        finally:
            if span:
                span.end()

    def run(
        self,
        runtime: Runtime,
        op: int,
        name: str | None = None,
        *,
        source: Any = None,
        target: Any = None,
        dtype: int = 0,
        reduce: int = Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        process_set: int = 0,
        splits: Sequence[int] | None = None,
    ) -> Result | None:
        """Submits and waits in one crossing, in host memory; gives the core's result where there is no target."""
        span = self._span and self._span(CALLS[op], name, True)
        try:
            return runtime.run(
                op, name, 0 if source is None else self._address(source),
                0 if target is None else self._address(target),
                None if source is None else source.shape, dtype, reduce, prescale, postscale, root, process_set, splits,
            )  # fmt: skip
        except TypeError as error:
            raise explained(
                CALLS[op], error, name=name, prescale_factor=prescale, postscale_factor=postscale, root_rank=root,
                splits=splits,
            ) from None  # fmt: skip
        finally:
            if span:
                span.end()
