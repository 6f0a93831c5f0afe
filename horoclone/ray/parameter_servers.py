"""Servers of a parameter server as actors: Ray starts one that has died again, on another node where need be."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from horoclone.ray import nodes, secrets
from horoclone.ray.strategy import create_placement_group
from horoclone.ray.worker import Where

if TYPE_CHECKING:
    from horoclone.ps import Servers

logger = logging.getLogger(__name__)

START_S = 60.0  # for the constructor of an actor: it imports torch
REGISTER_S = 60.0  # for a server to reach the register, before its process is started anew
LEAVE_S = 5.0  # for servers to stop before they are ended


@dataclass(frozen=True)
class Address:
    """What a worker needs to reach the servers. It goes to workers as an argument, because the secret is part of it."""

    name: str
    store: str
    secret: bytes = field(repr=False)

    def connect(self, **more: Any) -> Servers:
        """The servers, in a worker's process. more: other arguments of ps.Servers, such as rank and workers."""
        from horoclone.ps import Servers

        return Servers(self.name, self.store, secret=self.secret, **more)


class _Register:
    """The actor with the register."""

    def __init__(self) -> None:
        from horoclone.ps.register import serve_store

        self._store = serve_store(0, new_s=0)  # it lives once

    def address(self) -> str:
        return f"{ray.util.get_node_ip_address()}:{self._store.port}"


class _Server:
    """The actor that is one server. In each life its constructor runs again, with the same arguments."""

    def __init__(self, address: Address, index: int, servers: int, **more: Any) -> None:
        logging.basicConfig(format="horoclone.ps: %(message)s", level=logging.INFO)
        from horoclone.ps.register import Unreachable, open_register
        from horoclone.ps.server import Server

        register = open_register(address.name, address.store, None, {}, address.secret)
        deadline = time.monotonic() + REGISTER_S
        while True:
            try:
                self._server = Server(register, index, servers, **more)
                break
            except Unreachable as error:  # raised from here it would keep Ray from starting this actor again
                if time.monotonic() > deadline:
                    logger.error("server %d: %s", index, error)
                    os._exit(1)
                time.sleep(1)
        self._is_over = False
        threading.Thread(target=self._serve, name="hc-ps-serve", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._server.run()
        except BaseException:
            logger.exception("a server of a parameter server ends, and Ray starts it again")
        if not self._is_over:
            os._exit(1)

    def where(self) -> Where:
        import socket

        here = ray.get_runtime_context().get_node_id()
        return Where(str(here), ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())

    def describe(self) -> dict[str, Any]:
        return self._server.describe()

    def stop(self) -> None:
        self._is_over = True
        self._server.stop()


class ParameterServers:
    """Runs the servers of a parameter server on a Ray cluster, one actor each, on as many nodes as there are.

    name: of the parameter server. memory: of each server for rows, in bytes; Ray sets as much aside. silence_s: a link
    that is silent for so long is given up. nics: network interfaces; None: all. timeout_s: for Ray to find room, and
    then for the servers to come up. The servers end with this object's shutdown(), or with the driver.

    A server that dies is started again and given copies by the others. The register is on the head node, without which
    there is no cluster either.

        servers = ParameterServers("ads", servers=4, memory=64 << 30)
        executor.run(train, args=[servers.address])          # train(address): ps.EmbeddingBag(..., address.connect())

    Raises TimeoutError with what each node has where there is no room, ValueError for a wrong number of copies.
    """

    def __init__(
        self,
        name: str,
        servers: int = 2,
        *,
        replicas: int = 2,
        memory: int = 1 << 30,
        cpus_per_server: float = 1,
        silence_s: float = 10.0,
        nics: Sequence[str] | None = None,
        timeout_s: float = 100.0,
    ) -> None:
        if servers < 1 or replicas not in (1, 2) or replicas > servers:
            raise ValueError(f"replicas={replicas} with servers={servers}: 1, or 2 on at least two servers")
        if memory < 1:
            raise ValueError(f"memory={memory}: bytes of each server for its rows")
        self._group: Any = None
        self._servers: list[Any] = []
        head = nodes.head()
        near = NodeAffinitySchedulingStrategy(head, soft=True) if head else "DEFAULT"
        # Started again it would know nothing, and servers that believe it would begin with empty tables.
        register = ray.remote(_Register).options(num_cpus=0, max_restarts=0, scheduling_strategy=near)
        self._register = register.remote()
        try:
            store = ray.get(self._register.address.remote(), timeout=max(START_S, timeout_s))
            self.address = Address(name, store, secrets.draw())
            resources = {"CPU": cpus_per_server, "memory": memory}
            self._group, _ = create_placement_group(resources, servers, timeout_s, "SPREAD")
            more = {
                "replicas": replicas, "memory": memory, "silence_s": silence_s, "interfaces": ",".join(nics or ()),
            }  # fmt: skip
            self._servers = [
                ray.remote(_Server)
                .options(
                    num_cpus=cpus_per_server,
                    memory=memory,
                    max_restarts=-1,
                    max_concurrency=4,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                )
                .remote(self.address, index, servers, **more)
                for index in range(servers)
            ]
            places = self._wait(max(START_S, timeout_s))
        except BaseException:
            self.shutdown()
            raise
        if replicas > 1 and len({place.node_id for place in places}) == 1:
            logger.warning(
                "all servers of %r are on node %s: both copies of its rows die with it",
                name,
                places[0].address,
            )

    def _wait(self, timeout_s: float) -> list[Where]:
        try:
            return list(ray.get([server.where.remote() for server in self._servers], timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"parameter server {self.address.name!r}: not all of {len(self._servers)} servers have come up within "
                f"{timeout_s:g} s; {nodes.described()}"
            ) from error

    def where(self) -> list[Where | None]:
        """Returns where each server runs; None for one that is being started again."""
        asked = [server.where.remote() for server in self._servers]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=2.0)
        found: list[Where | None] = []
        for reference in asked:
            try:
                found.append(ray.get(reference) if reference in ready else None)
            except ray.exceptions.RayActorError:
                found.append(None)
        return found

    def shutdown(self) -> None:
        """Ends the servers, with all rows that were not saved, and gives their resources back."""
        asked = [server.stop.remote() for server in self._servers]
        ray.wait(asked, num_returns=len(asked), timeout=LEAVE_S) if asked else None
        for actor in [*self._servers, self._register]:
            ray.kill(actor)
        self._servers = []
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def __enter__(self) -> ParameterServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
