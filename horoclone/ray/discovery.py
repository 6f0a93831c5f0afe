"""Which nodes of the Ray cluster an elastic job may use; elastic.py and elastic_v2.py have it under Horovod's names."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable

from horoclone.ray import nodes
from horoclone.runner.elastic.discovery import HostDiscovery


class ClusterDiscovery(HostDiscovery):
    """Every node that is alive and not about to go, with as many slots as workers fit on it (in all, used or not)."""

    def __init__(self, use_gpu: bool, cpus: float, gpus: float | None) -> None:
        self.use_gpu = use_gpu
        self._cpus, self._gpus = cpus, (gpus or 1) * int(use_gpu)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Name of a node (its address) -> slots; nodes without any are left out."""
        leaving = nodes.draining()
        found = {
            name: nodes.slots(node, self._cpus, self._gpus)
            for name, node in nodes.named(nodes.alive()).items()
            if node.get("NodeID") not in leaving
        }
        return {name: count for name, count in found.items() if count > 0}


class ChangingDiscovery(ClusterDiscovery):
    """For tests: every change_frequency_s seconds a node is left out, or one that was left out comes back, so that
    there are min_hosts to max_hosts of them. graceful False: the node is killed by Ray's autoscaler."""

    def __init__(
        self,
        cluster: tuple[bool, float, float | None],
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        verbose: bool,
        graceful: bool,
    ) -> None:
        super().__init__(*cluster)
        self._min_hosts, self._max_hosts = min_hosts, max_hosts
        self._change_frequency_s, self.verbose, self._graceful = change_frequency_s, verbose, graceful
        self._last_reset_t: float | None = None
        self._removed_hosts: set[str] = set()

    def add_host(self, hosts: Iterable[str]) -> None:
        """One of those that are left out comes back."""
        there = sorted(self._removed_hosts & set(hosts))
        if there:
            self._removed_hosts.remove(random.choice(there))
        elif self.verbose:
            print("No hosts to add.")

    def remove_host(self, hosts: Iterable[str]) -> None:
        """One of the others is left out."""
        there = [host for host in hosts if host not in self._removed_hosts]
        if there:
            self._removed_hosts.add(random.choice(there) if self._graceful else _kill_node())

    def change_hosts(self, hosts: Iterable[str]) -> None:
        """One of both, as the limits and chance will have it."""
        listed = list(hosts)
        self._removed_hosts &= set(listed)
        now = len(listed) - len(self._removed_hosts)
        grows = now <= self._min_hosts or (now < self._max_hosts and random.random() < 0.5)
        (self.add_host if grows else self.remove_host)(listed)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Those that are not left out."""
        now, found = time.monotonic(), super().find_available_hosts_and_slots()
        if self._last_reset_t is None:
            self._last_reset_t = now
        if now - self._last_reset_t >= self._change_frequency_s:
            self.change_hosts(found)
            self._last_reset_t = now
        left = {host: count for host, count in found.items() if host not in self._removed_hosts}
        if self.verbose:
            print(f"Total hosts: {len(found)}\nRemaining hosts: {len(left)} -- {left}")
        return left


def _kill_node() -> str:
    from ray.autoscaler._private.commands import kill_node

    return str(kill_node(os.path.expanduser("~/ray_bootstrap_config.yaml"), True, False, None))
