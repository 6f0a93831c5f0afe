"""How the ranks of a save agree: collectives with names of their own, each with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from horoclone import runtime
from horoclone.checkpoint.failures import CheckpointError, WorldOver
from horoclone.objects import allgather_object
from horoclone.runtime import current


class Ranks(Protocol):
    """The ranks that save together."""

    rank: int
    size: int

    def gather(self, what: str, mine: Any, deadline: float) -> list[Any]:
        """What each rank gives, by rank. deadline: of time.monotonic()."""
        ...


class World:
    """All ranks of the job. Made in the same order on all of them: the names of its collectives count."""

    _of: Any = None  # the runtime that `_count` belongs to
    _count = 0

    def __init__(self) -> None:
        native = runtime.native()
        if World._of is not native:
            World._of, World._count = native, 0
        World._count += 1
        self.rank, self.size = runtime.rank(), runtime.size()
        self._native = native
        generation = current.job.generation if current.job is not None else 0
        # what another generation left meets nothing here
        self._name = f"hvd.checkpoint.{generation}.{World._count}"

    def gather(self, what: str, mine: Any, deadline: float) -> list[Any]:
        """CheckpointError when the deadline passes; what the runtime raises when a rank is lost."""
        if self.size == 1:
            return [mine]
        if not self.goes_on():
            raise WorldOver(
                "the job was shut down while a save was under way. Call hvd.checkpoint.wait() before hvd.shutdown()."
            )
        name = f"{self._name}.{what}"
        gathered: list[Any] = within(deadline, lambda: allgather_object(mine, name), name)
        return gathered

    def goes_on(self) -> bool:
        """Whether this is still the generation in which the save began."""
        return current.runtime is self._native

    def has_a_successor(self) -> bool:
        """Whether another generation has begun, or goes on without this process, which has left as planned."""
        return current.has_left or (current.runtime is not None and not self.goes_on())


def within(deadline: float, call: Callable[[], Any], name: str) -> Any:
    """What call() returns or raises, on a thread that is given up when the deadline passes."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="hc-checkpoint-agree", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if failure:
        raise failure[0]
    if not outcome:
        raise CheckpointError(
            f"some rank has not come to {name} in time: it has not called save(), or still writes. The report of "
            "stalled ranks names it; all ranks call save() at the same points, and timeout_s= gives them longer."
        )
    return outcome[0]
