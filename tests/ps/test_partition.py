"""Two servers and a worker with the register in network namespaces of their own: cables are cut, one primary goes on."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from namespaces import connect, ip, lay_cable, make, make_switch
from ps_cluster import SILENCE_S, Cluster
from world import load, until

from horoclone.ps import Servers, Sum, Table
from horoclone.runtime import native_module

pytestmark = [
    pytest.mark.netns,
    pytest.mark.usefixtures("needs_root"),
    pytest.mark.timeout(300),
    pytest.mark.long(90),
]
ROWS = 500


def benchmarks_hosts() -> Any:
    """The module of the benchmarks for namespaces and what runs in them."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "hosts.py"
    sys.path.insert(0, str(path.parent))  # for what it imports
    try:
        return load(path, "benchmarks_hosts")
    finally:
        sys.path.remove(str(path.parent))


hosts = benchmarks_hosts()


class Network:
    """A hub with a bridge, for the worker and the register, and a host for each server."""

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.names = [f"hcps-{tag}-{part}" for part in ("hub", "a", "b")]
        third = secrets.randbelow(250)
        self.addresses = [f"10.215.{third}.{host}" for host in (1, 2, 3)]

    def make(self) -> None:
        make(*self.names)
        hub = self.names[0]
        make_switch(hub)
        for host, port in ((1, "to-a"), (2, "to-b")):
            lay_cable(hub, port, self.names[host], "cable")
            connect(hub, port, switched=True)
            connect(self.names[host], "cable", f"{self.addresses[host]}/24")
        ip("-n", hub, "addr", "add", f"{self.addresses[0]}/24", "dev", "switch")

    def cut_off(self, host: int, cut: bool) -> None:
        """A host from everybody, without a word."""
        ip("-n", self.names[0], "link", "set", ("", "to-a", "to-b")[host], "down" if cut else "up")

    def cut_between(self, one: int, other: int, cut: bool) -> None:
        """Two hosts from each other: what `one` sends to `other` goes nowhere."""
        verb = "add" if cut else "del"
        ip("-n", self.names[one], "route", verb, "blackhole", f"{self.addresses[other]}/32")

    def inside(self, host: int, call: Callable[[], Any]) -> Any:
        """What call() returns on a thread of this host; threads that it starts are of this host as well."""
        return hosts.inside(self.names[host], call)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.make()
        yield made
    finally:
        made.remove()


class CutCluster(Cluster):
    """Server 0 on host a, server 1 on host b."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.network = network
        super().__init__(folder, 2, host=network.addresses[0])

    def command_of(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self.network.names[1 + index]]

    def roles(self, servers: Servers, index: int) -> list[str]:
        """Of each partition, asked on the server's own host: no cut stands between."""
        place = servers.register.get(f"server/{index}")

        def ask() -> Any:
            client = native_module.core().ParameterClient(
                9, secrets.randbits(60) | 1, 1, servers.register.secret, "ps:test", SILENCE_S
            )
            client.connect(bytes.fromhex(place["endpoint"]), index, place["generation"], 10.0)
            answer = json.loads(client.ask(index, json.dumps({"what": "describe"}), 10.0))
            client.close()
            return [one["role"] for one in answer["partitions"]]

        return self.network.inside(1 + index, ask)


def pushed_while(servers: Servers, table: Table, steps: int, counted: np.ndarray[Any, Any]) -> float:
    """Pushes ones and counts what is acknowledged; the longest push in seconds."""
    longest = 0.0
    for _ in range(steps):
        ids = np.unique(np.random.default_rng().integers(0, ROWS, 50))
        start = time.monotonic()
        table.push(ids, np.ones((len(ids), 4)))
        longest = max(longest, time.monotonic() - start)
        counted[ids] += 1
    return longest


def settled(
    cluster: CutCluster, servers: Servers, wanted: Callable[[list[list[str]]], bool]
) -> list[list[str]]:
    def look() -> list[list[str]] | None:
        roles = [cluster.roles(servers, index) for index in (0, 1)]
        return roles if wanted(roles) else None

    return until(look, 40, cluster.said)


def both_copies(roles: list[list[str]]) -> bool:
    return all(sorted(pair) == ["backup", "primary"] for pair in zip(*roles, strict=True))


def test_one_primary_goes_on_and_every_acknowledged_push_is_there(network: Network, tmp_path: Path) -> None:
    def body() -> None:
        cluster = CutCluster(tmp_path, network)
        try:
            servers = cluster.worker()
            cluster.wait_for_copies(servers)
            table, counted = Table(servers, "counted", 4, Sum()), np.zeros(ROWS)
            pushed_while(servers, table, 20, counted)

            network.cut_off(1, True)
            longest = pushed_while(servers, table, 50, counted)
            assert longest < 6 * SILENCE_S + 10
            roles = settled(cluster, servers, lambda roles: roles[1] == ["primary", "primary"])
            # The other one knows nothing of that, and does not pretend to.
            assert "primary" not in roles[0], roles
            network.cut_off(1, False)
            settled(cluster, servers, both_copies)
            pushed_while(servers, table, 20, counted)

            network.cut_between(1, 2, True)
            longest = pushed_while(servers, table, 50, counted)
            roles = settled(
                cluster,
                servers,
                lambda roles: [r.count("primary") for r in zip(*roles, strict=True)] == [1, 1],
            )
            network.cut_between(1, 2, False)
            settled(cluster, servers, both_copies)
            pushed_while(servers, table, 20, counted)
            np.testing.assert_array_equal(table.pull(np.arange(ROWS)), np.repeat(counted[:, None], 4, 1))
            servers.close()
        finally:
            cluster.close()

    network.inside(0, body)
