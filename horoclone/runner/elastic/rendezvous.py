"""Under Horovod's name: the HTTP requests with which a worker asks an ElasticDriver for its rank."""

from __future__ import annotations

from typing import Any

from horoclone.runner.http.http_client import decode
from horoclone.runner.http.http_server import RendezvousHandler

GET_RANK_AND_SIZE = "rank_and_size"
PUT_WORKER_ADDRESSES = "worker_addresses"


def create_rendezvous_handler(driver: Any) -> type[RendezvousHandler]:
    """The handler for RendezvousServer.start().

    GET /rank_and_size/host:local_rank says that the worker is ready, and is answered with its place in the next
    rendezvous when all workers have said something. PUT /worker_addresses/host:local_rank tells where the worker
    listens to notices. Everything else is a value, as in RendezvousHandler.
    """

    class ElasticRendezvousHandler(RendezvousHandler):
        def _get_value(self, scope: str, key: str) -> bytes | None:
            if scope != GET_RANK_AND_SIZE:
                return super()._get_value(scope, key)
            try:
                host, local_rank = _slot(key)
                driver.record_ready(host, local_rank)
            except (ValueError, RuntimeError):  # no name of a slot, or its worker is lost
                return None
            return driver.get_slot_info(host, local_rank).to_response_string().encode()  # type: ignore[no-any-return]

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope == PUT_WORKER_ADDRESSES:
                host, local_rank = _slot(key)
                driver.register_worker_server(host, local_rank, *_addresses(value))
            super()._put_value(scope, key, value)

    return ElasticRendezvousHandler


def _slot(key: str) -> tuple[str, int]:
    host, _, local_rank = key.rpartition(":")
    return host, int(local_rank)


def _addresses(value: bytes) -> tuple[dict[str, list[tuple[str, int]]], bytes]:
    """({interface: [(address, port)]}, key). ValueError for anything else."""
    try:
        addresses, key = decode(value)
        found = {
            str(nic): [(str(where), int(port)) for where, port in listed] for nic, listed in addresses.items()
        }
    except (TypeError, AttributeError) as error:
        raise ValueError(f"these are no addresses of a worker: {error}") from None
    if not isinstance(key, bytes):
        raise ValueError("the key of a worker's addresses is no bytes")
    return found, key
