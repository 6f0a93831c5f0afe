"""The disk as the last resort of an elastic state: some commits are saved, and the newest is read when no rank is left.

Thread: the one that trains.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from horoclone import optional, runtime
from horoclone.objects import broadcast_object


class Kept(Protocol):
    """A state that can go to the disk and come back."""

    _commit_number: int

    def _on_disk(self) -> dict[str, Any]: ...
    def _from_disk(self, found: dict[str, Any]) -> None: ...


class Disk:
    """Saves of a state below `path`: of every commit whose number `every` divides, of which `keep` stay.

    timeout_s: for one save.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, keep: int, timeout_s: float) -> None:
        if every < 1 or keep < 1:
            raise ValueError(f"every={every}, keep={keep}: both are at least 1")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: seconds, more than 0")
        self.path, self.every, self.keep, self._timeout_s = os.fspath(path), every, keep, timeout_s
        self._checkpoint = optional.load("checkpoint")

    def committed(self, state: Kept) -> None:
        """All ranks have made this commit, so all of them save it or none."""
        if state._commit_number % self.every == 0:
            self._checkpoint.save(self.path, state._on_disk(), keep=self.keep, timeout_s=self._timeout_s)

    def save(self, state: Kept) -> None:
        """Saves what is committed now, on all ranks, and waits until that is complete."""
        self._checkpoint.save(self.path, state._on_disk(), keep=self.keep)
        self.wait()

    def wait(self) -> None:
        """Until the save that is under way is complete. Raises what it failed with."""
        self._checkpoint.wait()

    def begin(self, state: Kept, root: int) -> bool:
        """Where the rank whose state counts holds no commit, it takes the newest save; whether it has. A collective.

        CheckpointError or ValueError, on every rank, for a save that cannot be loaded or is another job's.
        """
        found, problem = False, ""
        if runtime.rank() == root and not state._commit_number:
            try:
                if self._checkpoint.saves(self.path):
                    state._from_disk(self._checkpoint.load(self.path))
                    found = True
            except Exception as error:  # the others wait, and must hear of it, whatever it is
                problem = f"rank {root} could not go on from the disk: {error}"
        found, problem = broadcast_object((found, problem), root, "hvd.elastic.disk")
        if problem:
            raise self._checkpoint.CheckpointError(problem)
        return bool(found)
