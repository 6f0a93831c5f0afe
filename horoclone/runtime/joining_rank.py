"""Keeps a rank that joins a running job from calling collectives before elastic.run: no other rank would match them.

The others are in elastic.run already, and synchronise. What this rank calls before (a broadcast of the model, a process
set) matches no call of theirs, and all would wait. Thread: the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from horoclone import errors
from horoclone.runtime import current

if TYPE_CHECKING:
    from horoclone._core import Runtime


class JoiningRank:
    """Stands for the native runtime until allow_collectives(): it answers questions and refuses collectives."""

    def __init__(self, runtime: Runtime, generation: int) -> None:
        self.runtime, self._generation = runtime, generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def submit(self, op: int, name: str | None = None, *rest: Any, **more: Any) -> int:
        return self._check(name).submit(op, name, *rest, **more)

    def submit_group(self, op: int, name: str | None = None, *rest: Any, **more: Any) -> int:
        return self._check(name).submit_group(op, name, *rest, **more)

    def declare(self, *rest: Any, **more: Any) -> Any:
        return self._check("gradients").declare(*rest, **more)

    def submit_declared(self, *rest: Any, **more: Any) -> Any:
        return self._check("gradients").submit_declared(*rest, **more)

    def run(self, op: int, name: str | None = None, *rest: Any, **more: Any) -> Any:
        return self._check(name).run(op, name, *rest, **more)

    def _check(self, name: str | None) -> Runtime:
        now: object = current.runtime
        if now is self:  # not: collectives are allowed since, and an optimizer still holds this
            refuse(name, self._generation, self.runtime.rank)
        return self.runtime


def refuse(name: str | None, generation: int, rank: int) -> NoReturn:
    what = f"the collective {name!r}" if name else "a collective"
    raise errors.Mismatch(
        f"rank {rank} has come to a running job (generation {generation}) and calls {what} before hvd.elastic.run: the "
        "other ranks are in hvd.elastic.run, and would never make this call. Leave it out (run gives this rank what is "
        "in the state), or make it in the function that run calls. Scripts that form generations themselves ask "
        "hvd.elastic.generation() first."
    )


def refuse_collectives(generation: int) -> None:
    """init() of a rank that comes to a running job is about to return."""
    if current.runtime is not None:
        current.runtime = JoiningRank(current.runtime, generation)  # type: ignore[assignment]


def allow_collectives() -> None:
    """The script knows what the others do: it is in elastic.run, or has asked for the generation."""
    waiting = current.runtime
    if isinstance(waiting, JoiningRank):
        current.runtime = waiting.runtime


def check(name: str | None) -> None:
    """For operations that reach the core past its Python object (TensorFlow's). Mismatch as above."""
    if isinstance(current.runtime, JoiningRank):
        current.runtime._check(name)
