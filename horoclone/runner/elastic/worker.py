"""Under Horovod's name: notices to workers. Scripts and schedulers that bring their own send them with these.

In horoclone's own elastic jobs notices come over the connection to the launcher, and none of these services runs.
"""

from __future__ import annotations

from typing import Any

from horoclone.elastic.notice import HostUpdateResult, NoticeBoard
from horoclone.runner.common.util import network

__all__ = [
    "HostUpdateResult", "HostsUpdatedRequest", "WorkerNotificationClient", "WorkerNotificationManager",
    "WorkerNotificationService",
]  # fmt: skip

WorkerNotificationManager = NoticeBoard


class HostsUpdatedRequest:
    """Hosts came or went. timestamp: rises from one request to the next. res: a HostUpdateResult."""

    def __init__(self, timestamp: int, res: int = HostUpdateResult.no_update) -> None:
        self.timestamp = timestamp
        self.res = res


class WorkerNotificationService(network.BasicService):
    """Hands requests to a manager's handle_hosts_updated(timestamp, update), on a thread of its own."""

    NAME = "worker notification service"

    def __init__(self, key: bytes, nic: Any, manager: Any) -> None:
        super().__init__(self.NAME, key, nic)
        self._manager = manager

    def _handle(self, req: Any, client_address: Any) -> Any:
        if isinstance(req, HostsUpdatedRequest):
            self._manager.handle_hosts_updated(req.timestamp, req.res)
            return network.AckResponse()
        return super()._handle(req, client_address)


class WorkerNotificationClient(network.BasicClient):
    """Sends requests to such a service."""

    def __init__(self, addresses: Any, key: bytes, verbose: int = 0, match_intf: bool = False) -> None:
        super().__init__(WorkerNotificationService.NAME, addresses, key, verbose, match_intf=match_intf)

    def notify_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Returns when the manager has been told."""
        self._send(HostsUpdatedRequest(timestamp, update_res))
