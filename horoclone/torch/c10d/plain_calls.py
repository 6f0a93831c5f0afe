"""Operations of plain tensors in host memory: one crossing into the core.

torch says in the options of a call whether it will wait at once (asyncOp); then nobody asks for a work, and none is
made. Else the call is started here, and what has not ended by then becomes a work. What the core's fast path declines
(FastPath.collective, start_collective) goes the way of all other calls. Thread: the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horoclone import ops
from horoclone.handles import declines
from horoclone.torch.c10d.tensors import BITWISE, REDUCTIONS
from horoclone.torch.operations import handles
from horoclone.torch.operations.spans import profiler

if TYPE_CHECKING:
    from horoclone._core import Runtime

# torch's reduction -> ours, where no factor comes with it.
_PLAIN = {
    kind: ours for kind, ours in REDUCTIONS.items() if ours not in BITWISE and kind.name != "PREMUL_SUM"
}


class PlainCalls:
    """The plain operations of one group."""

    def __init__(self, runtime: Runtime, limit_s: float | None) -> None:
        self._unfinished: dict[int, Any] = {}  # handle -> tensors, of what waited and did not succeed
        self._run: Any = declines
        self._start: Any = declines
        self.end: Any = None  # of what was started: see FastPath.end_collective
        self._fast_path: Any = None
        if handles.tensor_exchange is not None:
            from horoclone._core import FastPath

            self._fast_path = FastPath(
                runtime, handles.table.kinds, handles.tensor_exchange, None, self._unfinished
            )
            self._run, self._start = self._fast_path.collective, self._fast_path.start_collective
            self.end = self._fast_path.end_collective
        self.set_limit(limit_s)

    def set_limit(self, limit_s: float | None) -> None:
        """Of calls from now on; None: they wait for as long as their ranks live."""
        if self._fast_path is not None:
            self._fast_path.set_limit(limit_s or 0.0)

    def begin(
        self, opts: Any, op: int, source: Any, target: Any, *more: Any, reduces: bool = False, root: int = 0
    ) -> tuple[bool, bool | int | None]:
        """(whether torch waits for it, None: not plain; True: done; else the handle of what is under way, or, where
        torch waits, of what did not succeed in time).

        opts: torch's, with asyncOp; reduces: with reduceOp as well; more: of an alltoall how source and target are cut.
        """
        if profiler._is_profiler_enabled:
            return False, None
        reduce = (_PLAIN.get(opts.reduceOp.op) if opts is not None else None) if reduces else ops.Sum
        if reduce is None:
            return False, None
        if getattr(opts, "asyncOp", True):
            return False, self._start(op, source, target, reduce, root, 0, *more)
        done = self._run(op, source, target, reduce, root, 0, *more)
        if done is not None and done is not True:
            self._unfinished.pop(done, None)
        return True, done

    def begin_message(self, op: int, source: Any, target: Any, peer: int, tag: int) -> bool | int | None:
        """As begin(), of a message, which torch never waits for here."""
        if profiler._is_profiler_enabled:
            return None
        started: bool | int | None = self._start(op, source, target, ops.Sum, peer, tag)
        return started
