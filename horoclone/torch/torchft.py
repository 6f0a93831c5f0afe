"""ProcessGroupHoroclone: a process group for torchft, whose replicas come and go. Needs the package torchft.

torchft's Manager calls configure() whenever the replicas change: it makes a new group of the backend `horoclone` and
aborts the old one, whose members may be dead. Thread: torchft's.
"""

# mypy: disable-error-code="misc, import-not-found"
from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupWrapper

from horoclone.torch.c10d import HorocloneGroup

__all__ = ["ProcessGroupHoroclone"]


class ProcessGroupHoroclone(ProcessGroupWrapper):
    """Does what torchft.ProcessGroupGloo does, for its Manager, LocalSGD, DiLoCo and managed meshes."""

    _pg: HorocloneGroup | None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return HorocloneGroup(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:
        """Returns the name that torchft's logs show."""
        return "torchft-horoclone"

    def abort(self, errored: bool = True) -> None:
        """Fails what is pending, also what waits for a replica that is dead, and closes the group."""
        group, self._pg = self._pg, None
        if group is not None:
            group.abort()
            group.shutdown()

    def shutdown(self) -> None:
        """Finishes and closes the group."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()
