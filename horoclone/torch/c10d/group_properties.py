"""What torch.distributed asks a process group about itself: backend, rank, size, names, devices. See group.py."""

# mypy: disable-error-code="misc, no-untyped-call, override, assignment"
from __future__ import annotations

import torch
import torch.distributed as dist

from horoclone.torch.operations.tensors import never_compiled

BACKEND = "horoclone"


@never_compiled
class GroupProperties(dist.ProcessGroup):
    """torch's own process groups keep this in their backends. Ours is the backend of every device itself."""

    supports_coalescing = supports_splitting = supports_time_estimate = supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """No memory of the backend's own: torch takes its own then."""
        return False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._name = self._description = ""

    def getBackendName(self) -> str:
        """Read by DDP's logger."""
        return BACKEND

    _get_backend_name = getBackendName

    def getRank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def getSize(self) -> int:
        """How many ranks the group has."""
        return self._size

    rank, size, name = getRank, getSize, getBackendName

    def setGroupName(self, name: str) -> None:
        """Called by torch when the group is made."""
        self._name = name

    def setGroupDesc(self, text: str) -> None:
        """Called by torch when the group is made."""
        self._description = text

    def getGroupName(self) -> str:
        """The name by which compiled code finds the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """What init_process_group or new_group was given."""
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> GroupProperties:
        """Asked what it supports, by batch_isend_irecv of torch 2.15 also in a group of Python's."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
