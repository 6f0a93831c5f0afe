"""Under Horovod's name: the service of a launcher that asks other hosts for their interfaces, and the answer to that.

horoclonerun needs no such question: ranks try all addresses of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horoclone.runner.common.service import driver_service
from horoclone.runner.common.util.address import local_addresses
from horoclone.runner.util import lsf, network


class HorovodRunDriverService(driver_service.BasicDriverService):
    """For one task on each of num_hosts hosts."""

    NAME = "horovod driver service"

    def __init__(self, num_hosts: int, key: bytes, nics: Sequence[str] | None) -> None:
        super().__init__(num_hosts, self.NAME, key, nics)


class HorovodRunDriverClient(driver_service.BasicDriverClient):
    """Speaks to such a service."""

    def __init__(self, driver_addresses: Any, key: bytes, verbose: int = 0, match_intf: bool = False) -> None:
        super().__init__(HorovodRunDriverService.NAME, driver_addresses, key, verbose, match_intf=match_intf)


def get_local_interfaces(settings: Any) -> set[str]:
    """Interfaces with the address 127.0.0.1, of settings.nics where those are given. ValueError when there is none."""
    found = {nic for nic in network.get_local_intfs() if not settings.nics or nic in settings.nics}
    if not found:
        raise ValueError("No interface is found for address 127.0.0.1.")
    return found


def get_common_interfaces(
    settings: Any,
    all_host_names: Sequence[str],
    remote_host_names: Sequence[str] | None = None,
    fn_cache: Any = None,
) -> set[str] | None:
    """Interfaces for the ranks of these hosts: settings.nics, or those of this host that lead to others.

    Where all are this host, its loopback interface; within LSF None, as in Horovod. No other host is asked, so
    fn_cache is not needed. ValueError when this host has no such interface.
    """
    if lsf.LSFUtils.using_lsf():
        return None
    if remote_host_names is None:
        remote_host_names = network.filter_local_addresses(all_host_names)
    if not remote_host_names:
        return get_local_interfaces(settings)
    if settings.nics:
        return set(settings.nics)
    found = {
        nic
        for nic, listed in local_addresses().items()
        if any(not str(address).startswith("127.") for address in listed)
    }
    if not found:
        raise ValueError(f"this host has no address at which {', '.join(remote_host_names)} could reach it")
    return found
