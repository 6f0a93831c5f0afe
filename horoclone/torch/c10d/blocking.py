"""Blocking collectives of plain tensors in host memory: one crossing into the core, and no Work.

torch says in the options of a call whether it will wait at once (asyncOp); then nobody asks for the work. What the
core's fast path declines (FastPath.collective) goes the way of all other calls. Thread: the caller's.
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


class Blocking:
    """The blocking collectives of one group."""

    def __init__(self, runtime: Runtime, limit_s: float | None) -> None:
        self._unfinished: dict[int, Any] = {}  # handle -> tensors, of what did not succeed
        self._call: Any = declines
        self._fast_path: Any = None
        if handles.tensor_exchange is not None:
            from horoclone._core import FastPath

            self._fast_path = FastPath(
                runtime, handles.table.kinds, handles.tensor_exchange, None, self._unfinished
            )
            self._call = self._fast_path.collective
        self.set_limit(limit_s)

    def set_limit(self, limit_s: float | None) -> None:
        """Of calls from now on; None: they wait for as long as their ranks live."""
        if self._fast_path is not None:
            self._fast_path.set_limit(limit_s or 0.0)

    def run(
        self, opts: Any, op: int, source: Any, target: Any, *, reduces: bool = False, root: int = 0
    ) -> bool | int:
        """True: done. False: not plain, or the caller wants a work. Else the handle of what did not succeed in time.

        opts: torch's, with asyncOp; reduces: with reduceOp as well.
        """
        if opts is None or getattr(opts, "asyncOp", True) or profiler._is_profiler_enabled:
            return False
        reduce = _PLAIN.get(opts.reduceOp.op) if reduces else ops.Sum
        if reduce is None:
            return False
        done: bool | int | None = self._call(op, source, target, reduce, root)
        if done is None:
            return False
        if done is not True:
            self._unfinished.pop(done, None)
        return done
