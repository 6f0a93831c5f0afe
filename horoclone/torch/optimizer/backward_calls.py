"""Tells the user's calls of backward apart, and when each of them ends. Thread: any on which hooks run."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from horoclone.torch.operations.tensors import uncompiled


class BackwardCalls:
    """Of one optimizer. A reentrant checkpoint makes calls of its own, which are parts of the user's."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """ended: a bound method, to be called at the end of each; what it raises, backward raises."""
        self.number = 0  # how many have ended
        self._ended = weakref.WeakMethod(ended)
        self._watched: set[int] = set()  # by autograd's numbers, of which a reentrant call has one of its own

    def note(self) -> None:
        """In a hook: the call to which it belongs is one of them."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._watched:
            self._watched.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._over(task))

    @uncompiled
    def _over(self, task: int) -> None:
        self._watched.discard(task)
        around = torch._C._current_autograd_node()
        if around is not None:
            self._look_at_next(around)
            return
        self.number += 1
        ended = self._ended()
        if ended is not None:
            ended()

    def _look_at_next(self, node: Any) -> None:
        """A reentrant call has ended: the one around it goes on, with what follows the node that made it."""
        handles: list[Any] = []

        def look(_: Any) -> None:
            while handles:
                handles.pop().remove()
            self.note()

        handles += [next_node.register_prehook(look) for next_node, _ in node.next_functions if next_node]

    def forget(self) -> None:
        """A step is over: calls that ended with an error do not come to an end any more."""
        self._watched.clear()
