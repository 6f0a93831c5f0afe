"""Under Horovod's name: host lists and which rank runs where. The work is done by horoclone.launch.hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horoclone.launch import hosts as launch_hosts
from horoclone.launch.usage import LaunchError


@dataclass
class HostInfo:
    """A host and how many ranks it may run."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """'node-a:4'. ValueError for anything else."""
        (host,) = parse_hosts(host_string)
        return host


@dataclass
class SlotInfo:
    """One rank's place. `cross_*` counts the hosts that have its local rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """'rank,size,local_rank,local_size,cross_rank,cross_size'."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, numbers))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_host_files(filename: str) -> str:
    """The text for -H of a hostfile: 'node-a:4,node-b:2'. ValueError for a file that is none."""
    try:
        listed = launch_hosts.parse_hostfile(filename)
    except LaunchError as error:
        raise ValueError(str(error)) from None
    return ",".join(f"{host.name}:{host.slots}" for host in listed)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """'node-a:4,node-b:2' -> hosts in that order. ValueError for a text that is no host list."""
    try:
        return [HostInfo(host.name, host.slots) for host in launch_hosts.parse_hosts(hosts_string)]
    except LaunchError as error:
        raise ValueError(f"Invalid host input: {error}") from None


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """(names in order, name -> slots) of 'node-a:4,node-b:2'."""
    listed = parse_hosts(hosts)
    return [host.hostname for host in listed], {host.hostname: host.slots for host in listed}


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """A place for every rank, host by host: as many ranks as there are slots, at most max_num_proc.

    ValueError when there are fewer slots than min_num_proc.
    """
    slots = sum(host.slots for host in hosts)
    if slots < min_num_proc:
        raise ValueError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({slots})"
        )
    size = slots if max_num_proc is None else min(slots, max_num_proc)
    placed = launch_hosts.place(size, [launch_hosts.Host(host.hostname, host.slots) for host in hosts])
    return [
        SlotInfo(one.host, one.rank, one.local_rank, one.cross_rank, one.size, one.local_size, one.cross_size)
        for one in placed
    ]
