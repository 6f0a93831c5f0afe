"""Spans in torch's profiler: what a thread of the program does in here, and how long it waits.

A blocking call is `horoclone.allreduce NAME`; of an asynchronous one there are `horoclone.allreduce.submit NAME` and
`horoclone.allreduce.wait NAME`. Where no profiler runs a call costs a look at one attribute; record_function would cost
about 11 us. Thread: the caller's.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd import profiler as torchs_profiler
from torch.autograd.profiler import record_function

if TYPE_CHECKING:
    from horoclone._core import Runtime

MAX_NOTED = 10_000  # handles; those that nobody waits for would stay for ever


class _NoProfiler:
    """Stands in for a torch that does not say in Python whether it profiles."""

    _is_profiler_enabled = False


# Callers look at profiler._is_profiler_enabled, which torch keeps "for fast python checks".
profiler: Any = torchs_profiler if hasattr(torchs_profiler, "_is_profiler_enabled") else _NoProfiler

# Handle -> call and name, of what was submitted under a profiler
_noted: dict[int, tuple[str, str | None]] = {}


class Span:
    """Open from its making to end()."""

    def __init__(self, call: str, name: str | None) -> None:
        # In the span's text: profiles do not show what record_function takes as its argument.
        self._record = record_function(f"horoclone.{call} {name}" if name else f"horoclone.{call}")
        self._record.__enter__()

    def end(self) -> None:
        self._record.__exit__(None, None, None)


class Submission(Span):
    """The submission of what is waited for later on."""

    def __init__(self, call: str, name: str | None) -> None:
        super().__init__(f"{call}.submit", name)
        self._of = (call, name)

    def gave(self, handle: int) -> int:
        """The span of the wait for `handle` will have the same names. Returns the handle."""
        if len(_noted) >= MAX_NOTED:
            _noted.clear()
        _noted[handle] = self._of
        return handle


def opened(call: str, name: str | None, waits: bool) -> Span | None:
    """The span of a call that begins now; None where no profiler runs."""
    if not profiler._is_profiler_enabled:
        return None
    return Span(call, name) if waits else Submission(call, name)


def waiting(handle: Any) -> Span | None:
    """The span of a wait that begins now; None for what is no handle of the core."""
    if type(handle) is not int:
        return None
    call, name = _noted.pop(handle, ("", None))
    return Span(f"{call}.wait" if call else "wait", name)


def wait(runtime: Runtime, handle: int) -> None:
    """runtime.wait(handle), which a profile shows."""
    span = waiting(handle) if profiler._is_profiler_enabled else None
    try:
        runtime.wait(handle)
    finally:
        if span is not None:
            span.end()
