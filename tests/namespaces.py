"""Hosts for tests and benchmarks: network namespaces that cables join.

They need root and the command ip (the fixture `needs_root`).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess

CLONE_NEWNET = 0x40000000


def ip(*words: str) -> str:
    """Runs the command ip; gives what it prints."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


def make(*names: str) -> None:
    """Namespaces, in each of which the loopback works."""
    for name in names:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")


def make_switch(name: str, *options: str) -> None:
    """In a namespace; connect(..., switched=True) joins others to it."""
    ip("-n", name, "link", "add", "name", "switch", "type", "bridge", *options)
    ip("-n", name, "link", "set", "switch", "up")


def lay_cable(name: str, end: str, other: str, other_end: str) -> None:
    """From one namespace to another; connect() each end."""
    ip("-n", name, "link", "add", end, "type", "veth", "peer", "name", other_end, "netns", other)


def connect(name: str, end: str, address: str = "", *settings: str, switched: bool = False) -> None:
    """One end of a cable. address: with its number of bits. settings: of `ip link set`."""
    if address:
        ip("-n", name, "addr", "add", address, "dev", end)
    ip("-n", name, "link", "set", end, *(["master", "switch"] if switched else []), *settings, "up")


def inside(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a namespace, whatever its exit code is."""
    return subprocess.run(
        ["ip", "netns", "exec", name, *words], capture_output=True, text=True, timeout=20, check=False
    )


def delete(*names: str) -> None:
    """Also those that were never made."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def enter_namespace(name: str) -> None:
    """The calling thread goes into the network namespace `ip netns add NAME` made."""
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.setns(fd, CLONE_NEWNET)
    os.close(fd)
    if failed:
        raise OSError(ctypes.get_errno(), f"setns {name}")


def set_deaf(name: str, address: str, deaf: bool = True, cable: str = "cable0") -> None:
    """Nothing that this host sends to the address arrives, as behind a switch that starts anew."""
    if deaf:
        nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"]
        ip("-n", name, "neigh", "replace", address, *nobody, "dev", cable)
    else:
        ip("-n", name, "neigh", "del", address, "dev", cable)


class Hosts:
    """Two namespaces `names`, joined by some cables, each a network of its own. addresses: [host][cable]."""

    def __init__(self, cables: int = 1) -> None:
        tag, third = secrets.token_hex(3), secrets.randbelow(250)
        self.names = [f"hc-{tag}-{side}" for side in "ab"]
        self.cables = [f"cable{number}" for number in range(cables)]
        self.addresses = [[f"10.{218 + n}.{third}.{host}" for n in range(cables)] for host in (1, 2)]

    def open(self) -> None:
        make(*self.names)
        for number, cable in enumerate(self.cables):
            lay_cable(self.names[0], cable, self.names[1], cable)
            for name, addresses in zip(self.names, self.addresses, strict=True):
                connect(name, cable, f"{addresses[number]}/30")

    def close(self) -> None:
        delete(*self.names)

    def places(self, per_host: int) -> list[str]:
        """The namespace of each rank, host by host."""
        return [name for name in self.names for _ in range(per_host)]

    def set_cable(self, state: str, number: int = 0, host: int = 0) -> None:
        """state: "up" or "down"."""
        ip("-n", self.names[host], "link", "set", self.cables[number], state)

    def set_deaf(self, host: int, deaf: bool = True, number: int = 0) -> None:
        """Nothing that this host sends over the cable arrives; what the other one sends does."""
        set_deaf(self.names[host], self.addresses[1 - host][number], deaf, self.cables[number])

    def reset(self, host: int, spared_port: int = 0) -> None:
        """The kernel gives up each connection to the other host; that one hears of it by a reset."""
        spared = [f"( dport != :{spared_port} and sport != :{spared_port} )"] if spared_port else []
        for address in self.addresses[1 - host]:
            words = ["ss", "-K", "-H", "state", "established", "dst", address, *spared]
            done = inside(self.names[host], *words)
            if done.returncode:
                import pytest

                pytest.skip(f"ss -K resets nothing here: {done.stderr}")


class Switched:
    """Up to six namespaces `names`, each behind one cable to a switch."""

    def __init__(self, hosts: int = 3) -> None:
        tag, third = secrets.token_hex(3), secrets.randbelow(250)
        self.names = [f"hc-{tag}-{side}" for side in "abcdef"[:hosts]]
        self.switch = f"hc-{tag}-switch"
        self.addresses = [f"10.217.{third}.{host}" for host in range(1, hosts + 1)]

    def open(self) -> None:
        make(*self.names, self.switch)
        make_switch(self.switch)
        for name, address in zip(self.names, self.addresses, strict=True):
            lay_cable(name, "cable0", self.switch, name)
            connect(self.switch, name, switched=True)
            connect(name, "cable0", f"{address}/29")

    def close(self) -> None:
        delete(*self.names, self.switch)
