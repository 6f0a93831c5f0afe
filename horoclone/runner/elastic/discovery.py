"""Under Horovod's name: which hosts there are, which of them may be used, and in which order.

Thread: any; a HostManager is asked by one thread and told of failures by others.
"""

from __future__ import annotations

import math
import random
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from horoclone.elastic.notice import HostUpdateResult
from horoclone.launch.discovery import Source
from horoclone.launch.elastic_policy import Cooldown
from horoclone.launch.hosts import Host
from horoclone.launch.usage import LaunchError


class HostDiscovery:
    """What can say which hosts there are."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Host -> how many ranks it may run, in the order in which ranks are placed."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """A program that prints `host` or `host:slots` in each line. slots: for lines that do not say how many."""

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = discovery_script
        self._slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """RuntimeError when the program fails, or a line is no host; hosts keep the order of the lines."""
        done = subprocess.run(
            self._script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"Failed to execute discovery script: {self._script}. Exit code: {done.returncode}"
            )
        found: dict[str, int] = {}
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            name, colon, slots = line.rpartition(":")
            count = int(slots) if colon and slots.isdigit() else self._slots
            if count is None:
                raise RuntimeError(
                    f"the discovery script {self._script} does not say how many slots {line!r} has"
                )
            found[name if colon and slots.isdigit() else line] = count
        return found


class FixedHosts(HostDiscovery):
    """Hosts that are told rather than found."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self.set(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Those of the last set()."""
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """From now on these."""
        self._host_slots = dict(host_slots)


class HostState:
    """Whether a host may be used. cooldown_range: seconds after which a failed host may be used again; None: never.

    The n-th failure costs the lower bound times 2**n and by chance up to one lower bound more, at most the upper bound.
    ValueError for a range that is none, or not within 1 and 3600.
    """

    def __init__(self, cooldown_range: Sequence[int] | None = None) -> None:
        try:
            self._cooldown = Cooldown(
                (cooldown_range[0], cooldown_range[1]) if cooldown_range else None, lambda: random.random()
            )
        except ValueError as error:
            raise ValueError(f"cooldown range {cooldown_range}: {error}") from None
        self._event = threading.Event()
        self._blacklisted = False
        self._count = 0
        self._until_s = -math.inf

    def get_event(self) -> threading.Event:
        """Set when the host is not to be used any more; after a cooldown there is a new one."""
        if self._event.is_set() and not self._blacklisted:
            self._event = threading.Event()
        return self._event

    def set_event(self) -> None:
        """Tells those who wait for it."""
        self._event.set()

    def blacklist(self) -> None:
        """The host has failed. While it cools down another failure changes nothing."""
        if not self.is_blacklisted():
            self._blacklisted = True
            self._count += 1
            self._until_s = time.monotonic() + self._cooldown.delay_s(self._count)
        self.set_event()

    def whitelist(self) -> None:
        """The host may be used again."""
        self._blacklisted = False

    def is_blacklisted(self) -> bool:
        """Whether it has failed and has not cooled down."""
        if self._blacklisted and time.monotonic() >= self._until_s:
            self.whitelist()
        return self._blacklisted


class DiscoveredHosts:
    """host_slots: host -> slots. host_assignment_order: the hosts that may be used, those known longest first."""

    def __init__(self, host_slots: Mapping[str, int], host_assignment_order: Sequence[str]) -> None:
        self._host_slots = dict(host_slots)
        self._order = list(host_assignment_order)

    @property
    def host_slots(self) -> dict[str, int]:
        """Of every host that was found."""
        return dict(self._host_slots)

    @property
    def available_hosts(self) -> set[str]:
        """Those that may be used."""
        return set(self._order)

    @property
    def host_assignment_order(self) -> list[str]:
        """In which ranks are placed: rank 0 stays on the host that has been there longest."""
        return list(self._order)

    def get_slots(self, host: str) -> int:
        """Of one host; 0 when it is not known."""
        return self._host_slots.get(host, 0)

    def has_host(self, host: str) -> bool:
        """Whether it may be used."""
        return host in self._order

    def count_available_slots(self) -> int:
        """Of all hosts that may be used."""
        return sum(self.get_slots(host) for host in self._order)


class HostManager:
    """What a HostDiscovery finds, without the hosts that have failed."""

    def __init__(self, discovery: HostDiscovery, cooldown_range: Sequence[int] | None = None) -> None:
        HostState(cooldown_range)  # a wrong range is refused here
        self._discovery = discovery
        self._range = cooldown_range
        self._mutex = threading.Lock()
        self._states: dict[str, HostState] = {}
        self._current = DiscoveredHosts({}, [])

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """As of the last update_available_hosts(), without what has failed since."""
        with self._mutex:
            order = [host for host in self._current.host_assignment_order if not self._is_out(host)]
            return DiscoveredHosts(self._current.host_slots, order)

    @current_hosts.setter
    def current_hosts(self, hosts: DiscoveredHosts) -> None:
        with self._mutex:
            self._current = hosts

    @staticmethod
    def order_available_hosts(
        available_hosts: Iterable[str], prev_host_assignment_order: Sequence[str]
    ) -> list[str]:
        """Those known before come first and keep their order; new ones follow in theirs."""
        available = list(available_hosts)
        old = [host for host in prev_host_assignment_order if host in available]
        return old + [host for host in available if host not in old]

    def update_available_hosts(self) -> int:
        """Looks which hosts there are now. Returns a HostUpdateResult; raises what the discovery raises."""
        found = dict(self._discovery.find_available_hosts_and_slots())
        with self._mutex:
            before = self._current
            change = int(HostUpdateResult.no_update)
            for host, slots in before.host_slots.items():
                if found.get(host, 0) < slots:
                    change |= HostUpdateResult.removed
                    if host not in found and host in self._states:
                        self._states[host].set_event()
            for host, slots in found.items():
                state = self._states.setdefault(host, HostState(self._range))
                if slots > before.get_slots(host) and not state.is_blacklisted():
                    change |= HostUpdateResult.added
            old = before.host_assignment_order
            usable = [host for host in found if not self._is_out(host)]
            order = self.order_available_hosts(usable, old)
            if set(order) - set(old):  # also one that has cooled down
                change |= HostUpdateResult.added
            self._current = DiscoveredHosts(found, order)
            return change

    def blacklist(self, host: str) -> None:
        """It has failed: it is not used until it has cooled down."""
        with self._mutex:
            self._states.setdefault(host, HostState(self._range)).blacklist()
            order = [one for one in self._current.host_assignment_order if one != host]
            self._current = DiscoveredHosts(self._current.host_slots, order)

    def is_blacklisted(self, host: str) -> bool:
        """Whether it has failed and has not cooled down."""
        with self._mutex:
            return self._is_out(host)

    def get_host_event(self, host: str) -> threading.Event:
        """Set when the host fails or goes."""
        with self._mutex:
            return self._states.setdefault(host, HostState(self._range)).get_event()

    def _is_out(self, host: str) -> bool:
        return host in self._states and self._states[host].is_blacklisted()


class _Asked:
    """A HostDiscovery as a source of the launcher."""

    changes = True

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery = discovery

    def find(self) -> list[Host]:
        """LaunchError when the discovery fails."""
        try:
            found = self._discovery.find_available_hosts_and_slots()
        except RuntimeError as error:
            raise LaunchError(str(error), 1) from error
        return [Host(name, slots) for name, slots in found.items() if slots > 0]

    def stop(self) -> None:
        """Nothing of it can be ended from here."""


def source_of(discovery: HostDiscovery) -> Source:
    """For an elastic job of horoclone.launch, which asks it every second."""
    return _Asked(discovery)
