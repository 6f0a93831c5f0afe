"""Under Horovod's name: addresses and interfaces of this host, and free ports."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horoclone.runner.util import threads

_ATTEMPTS = 64


def _addresses() -> dict[str, list[str]]:
    """Interface -> its IPv4 addresses."""
    import psutil

    return {
        name: [one.address for one in entries if one.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


@functools.cache
def get_local_host_addresses() -> set[str]:
    """Every IPv4 address of this host."""
    return {address for listed in _addresses().values() for address in listed}


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Interfaces with the address 127.0.0.1, or only `nic` where it is one of them."""
    return {
        name for name, listed in _addresses().items() if "127.0.0.1" in listed and (not nic or name == nic)
    }


def resolve_host_address(host_name: str) -> str | None:
    """The IPv4 address of a host, None when its name cannot be resolved."""
    try:
        return socket.gethostbyname(host_name)
    except (OSError, UnicodeError):
        return None


def filter_local_addresses(all_host_names: Sequence[str]) -> list[str]:
    """Those of the hosts that are not this one, in order; names that cannot be resolved are among them."""
    found = threads.execute_function_multithreaded(resolve_host_address, [[name] for name in all_host_names])
    own = get_local_host_addresses()
    return [name for place, name in enumerate(all_host_names) if (found or {})[place] not in own]


def find_port(server_factory: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    """(server_factory(("", port)), port) for a free port. RuntimeError with its last error when it never works."""
    last: BaseException | None = None
    for _ in range(_ATTEMPTS):
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        try:
            return server_factory(("", port)), port
        except OSError as error:  # somebody else was quicker
            last = error
    raise RuntimeError(f"no server could be started on {_ATTEMPTS} free ports: {last}") from last


def get_driver_ip(nics: Iterable[str]) -> str:
    """The IPv4 address of the first of these interfaces. RuntimeError when it has none."""
    nic = next(iter(nics))
    listed = _addresses().get(nic)
    if not listed:
        raise RuntimeError(f"the interface {nic} has no IPv4 address, or is not there")
    return listed[-1]
