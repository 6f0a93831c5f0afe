"""Under Horovod's name: this host's addresses, by interface."""

from __future__ import annotations

import socket
from collections.abc import Collection


class NoValidAddressesFound(Exception):
    """None of the interfaces that were asked for has an address, or nobody answers at the addresses."""


def local_addresses(
    nics: Collection[str] | None = None, port: int | None = None
) -> dict[str, list[str]] | dict[str, list[tuple[str, int]]]:
    """Interface -> its IPv4 addresses, as (address, port) where a port is given; only of `nics` where those are given.

    NoValidAddressesFound when none of these interfaces has an address.
    """
    import psutil

    everything = psutil.net_if_addrs()
    found = {
        name: [one.address for one in entries if one.family == socket.AF_INET]
        for name, entries in everything.items()
        if not nics or name in nics
    }
    found = {name: listed for name, listed in found.items() if listed}
    if nics and not found:
        raise NoValidAddressesFound(
            f"none of the network interfaces {sorted(nics)} has an IPv4 address; there are {sorted(everything)}"
        )
    if port is None:
        return found
    return {name: [(address, port) for address in listed] for name, listed in found.items()}
