"""Under Horovod's name: notices to workers. Scripts and schedulers that bring their own send them with these.

In horoclone's own elastic jobs notices come over the connection to the launcher, and none of these services runs.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from horoclone.elastic.notice import HostUpdateResult, NoticeBoard
from horoclone.runner.common.util import network, secret
from horoclone.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES
from horoclone.runner.http.http_client import put_data_into_kvstore

__all__ = [
    "HostUpdateResult", "HostsUpdatedRequest", "WorkerNotificationClient", "WorkerNotificationManager",
    "WorkerNotificationService",
]  # fmt: skip

HOROVOD_GLOO_RENDEZVOUS_ADDR = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVOD_GLOO_IFACE = "HOROVOD_GLOO_IFACE"
HOROVOD_HOSTNAME = "HOROVOD_HOSTNAME"
HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"


class WorkerNotificationManager(NoticeBoard):
    """A notice board to which the driver of a RendezvousServer tells what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self._service: WorkerNotificationService | None = None
        self._starting = threading.Lock()

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Listens, and tells the driver where, once. What is not given is read from the variables of that name.

        In a job whose notices come from horoclone's roster, and where nobody names a server, nothing is started.
        """
        super().init()
        address = rendezvous_addr or os.environ.get(HOROVOD_GLOO_RENDEZVOUS_ADDR)
        with self._starting:
            if self._service is not None or not address or (not rendezvous_addr and self._started):
                return
            port = (
                rendezvous_port if rendezvous_port is not None else os.environ[HOROVOD_GLOO_RENDEZVOUS_PORT]
            )
            nic = nic or os.environ.get(HOROVOD_GLOO_IFACE)
            host = hostname or os.environ[HOROVOD_HOSTNAME]
            slot = local_rank if local_rank is not None else os.environ[HOROVOD_LOCAL_RANK]
            key = secret.make_secret_key()
            self._service = WorkerNotificationService(key, [nic] if nic else None, self)
            put_data_into_kvstore(
                address, int(port), PUT_WORKER_ADDRESSES, f"{host}:{slot}", (self._service.addresses(), key)
            )


class HostsUpdatedRequest:
    """Hosts came or went. timestamp: rises from one request to the next. res: a HostUpdateResult."""

    def __init__(self, timestamp: int, res: int = HostUpdateResult.no_update) -> None:
        self.timestamp = timestamp
        self.res = res


class WorkerNotificationService(network.BasicService):
    """Hands requests to a manager's handle_hosts_updated(timestamp, update), on a thread of its own."""

    NAME = "worker notification service"

    def __init__(self, key: bytes, nic: Any, manager: Any) -> None:
        self._manager = manager
        super().__init__(self.NAME, key, nic)

    def _make_wire(self, key: bytes) -> network.Wire:
        return network.PlainWire(key, [HostsUpdatedRequest])

    def _handle(self, req: Any, client_address: Any) -> Any:
        if isinstance(req, HostsUpdatedRequest):
            self._manager.handle_hosts_updated(req.timestamp, HostUpdateResult(req.res))
            return network.AckResponse()
        return super()._handle(req, client_address)


class WorkerNotificationClient(network.BasicClient):
    """Sends requests to such a service."""

    def __init__(self, addresses: Any, key: bytes, verbose: int = 0, match_intf: bool = False) -> None:
        super().__init__(WorkerNotificationService.NAME, addresses, key, verbose, match_intf=match_intf)

    def _make_wire(self, key: bytes) -> network.Wire:
        return network.PlainWire(key, [HostsUpdatedRequest])

    def notify_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Returns when the manager has been told."""
        self._send(HostsUpdatedRequest(int(timestamp), int(update_res)))
