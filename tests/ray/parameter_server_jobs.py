"""Bodies of test_parameter_servers.py: servers on the cluster, of which processes and nodes are killed under a worker."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import ray
from cluster import CPUS, another_node, here, wait_until
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horoclone.ps import Servers, Sum, Table
from horoclone.ray import ParameterServers, nodes
from horoclone.ray.worker import Where

ROWS, WIDTH, IDS = 1000, 4, 100
SILENCE_S = 5.0
PUSH_S = 120.0  # for a push whose server is gone, on a machine that does other things as well


class Pushing:
    """A thread that pushes ones to random rows, and what was acknowledged."""

    def __init__(self, table: Table) -> None:
        self.acknowledged, self.pushes = np.zeros(ROWS), 0
        self.error: BaseException | None = None
        self._table, self._over = table, threading.Event()
        self._thread = threading.Thread(target=self._push, daemon=True)
        self._thread.start()

    def _push(self) -> None:
        random = np.random.default_rng(7)
        try:
            while not self._over.is_set():
                ids = np.unique(random.integers(0, ROWS, IDS))
                self._table.push(ids, np.ones((len(ids), WIDTH)))
                self.acknowledged[ids] += 1
                self.pushes += 1
        except BaseException as error:
            self.error = error

    def wait_for_more(self, pushes: int = 5) -> None:
        wanted = self.pushes + pushes

        def there() -> bool:
            assert self.error is None, self.error
            return self.pushes >= wanted

        wait_until(there, f"{pushes} more pushes", PUSH_S)

    def end(self) -> np.ndarray:
        self._over.set()
        self._thread.join(PUSH_S)
        assert not self._thread.is_alive() and self.error is None, self.error
        return self.acknowledged


def wait_for_copies(servers: ParameterServers, client: Servers) -> list[Where]:
    """Until both partitions have a primary and a backup, each in the life that the register knows. Where they then are."""
    places: list[Where] = []

    def whole() -> bool:
        for partition in range(2):
            view = client.register.get(f"view/{partition}")
            if view is None or view["backup"] is None:
                return False
            for index, generation in (view["primary"][:2], view["backup"][:2]):
                place = client.register.get(f"server/{index}")
                if place is None or place["generation"] != generation:
                    return False
        places[:] = [place for place in servers.where() if place is not None]
        return len(places) == 2

    wait_until(whole, "second copies of all partitions", 120)
    return places


def connected(servers: ParameterServers) -> Servers:
    return servers.address.connect(rank=0, workers=1, timeout_s=PUSH_S, silence_s=SILENCE_S)


def two_nodes() -> list[str]:
    """The ids of two nodes that live; one is started where a body before this one has lost it."""
    if not here.cluster.worker_nodes:
        here.cluster.add_node(num_cpus=CPUS)

    def living() -> list[str]:  # Ray calls a killed node alive for another 30 s
        return [str(node["NodeID"]) for node in nodes.alive() if nodes.answers(node)]

    wait_until(lambda: len(living()) >= 2, "the start of the second node")
    return living()[:2]


def killed_processes() -> dict[str, Any]:
    """Both servers in turn, by kill -9, while a worker pushes."""
    with ParameterServers("ads", 2, memory=1 << 26, silence_s=SILENCE_S) as servers:
        client = connected(servers)
        wait_for_copies(servers, client)
        table = Table(client, "counted", WIDTH, Sum())
        pushing = Pushing(table)
        lives = []
        for index in (0, 1):
            pushing.wait_for_more()
            # Once more: a server that was slow for SILENCE_S has lost its place as the second copy.
            pid = wait_for_copies(servers, client)[index].pid
            os.kill(pid, signal.SIGKILL)
            pushing.wait_for_more()
            lives.append(wait_for_copies(servers, client)[index].pid != pid)
        acknowledged = pushing.end()
        found = table.pull(np.arange(ROWS))
        client.close()
        return {
            "lives": lives,
            "acknowledged": int(acknowledged.sum()),
            "exact": bool((found == acknowledged[:, None]).all()),
        }


def killed_node() -> dict[str, Any]:
    """The node of one server dies; the server is started again on another node."""
    try:
        with another_node():
            return while_its_node_dies()
    finally:
        two_nodes()  # the other bodies want them


def while_its_node_dies() -> dict[str, Any]:
    with ParameterServers("ads", 2, memory=1 << 26, silence_s=SILENCE_S) as servers:
        client = connected(servers)
        wait_for_copies(servers, client)
        table = Table(client, "counted", WIDTH, Sum())
        pushing = Pushing(table)
        pushing.wait_for_more()
        places = wait_for_copies(servers, client)
        spread = len({place.node_id for place in places})
        # The cluster's head node stays: it is the cluster. Of the servers one is elsewhere.
        index, victim = next((i, p) for i, p in enumerate(places) if p.node_id != nodes.head())
        doomed = next(one for one in here.cluster.worker_nodes if one.node_id == victim.node_id)
        here.cluster.remove_node(doomed, allow_graceful=False)

        def moved() -> bool:  # its processes notice up to a second later that the node is gone
            after = servers.where()[index]
            return after is not None and after.node_id != victim.node_id

        # Ray takes a node for dead once it has missed its health checks for half a minute, and on a busy machine it takes a
        # while to start a process that imports torch.
        wait_until(moved, "another life of the server, on another node", 240)
        pushing.wait_for_more()
        moved_to = wait_for_copies(servers, client)[index].node_id
        acknowledged = pushing.end()
        found = table.pull(np.arange(ROWS))
        client.close()
        return {
            "spread": spread,
            "moved": moved_to != victim.node_id,
            "exact": bool((found == acknowledged[:, None]).all()),
        }


def pull_sum(address: Any, rank: int) -> float:
    """In a task: the address has come as its argument."""
    client = address.connect(rank=rank, workers=2)
    table = Table(client, "shared", 2, Sum())
    table.push(np.array([5]), np.full((1, 2), rank + 1.0))
    client.close()
    return float(rank)


def tasks_share_a_table() -> dict[str, Any]:
    """Tasks on both nodes push into one table; the secret is in no environment and in no text."""
    with ParameterServers("ads", 1, replicas=1, memory=1 << 26, cpus_per_server=0.5) as servers:
        told = ray.put(servers.address)
        strategies = [NodeAffinitySchedulingStrategy(id_, soft=False) for id_ in two_nodes()]
        asked = [
            ray.remote(pull_sum).options(num_cpus=0.5, scheduling_strategy=strategy).remote(told, rank)
            for rank, strategy in enumerate(strategies)
        ]
        ray.get(asked)
        client = servers.address.connect(rank=0, workers=2)
        row = Table(client, "shared", 2, Sum()).pull(np.array([5]))[0]
        client.close()
        return {"row": row.tolist(), "text": repr(servers.address), "secret": servers.address.secret.decode()}


def wrong_wishes() -> dict[str, str]:
    """What there is no room for, and what cannot be."""
    said = {}
    wishes: dict[str, dict[str, Any]] = {
        "copies": {"servers": 1, "replicas": 2},
        "memory": {"memory": 0},
        "room": {"servers": 2, "cpus_per_server": 50, "timeout_s": 3.0},
    }
    for name, wish in wishes.items():
        try:
            ParameterServers("ads", **wish).shutdown()
        except (ValueError, TimeoutError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
