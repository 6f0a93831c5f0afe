"""Which rank runs where: -H and hostfile texts, slots, placement host by host, and which host names mean this one.

Pure apart from name look-ups and one bind() per address.
"""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

from horoclone.launch.usage import LaunchError

MAX_SLOTS = 1 << 15  # of one host; the launcher keeps something for each
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1", "ip6-localhost")
# ssh would read a name that begins with a dash as an option; nothing else in a host name needs a shell either.
_HOST_NAME = re.compile(r"^(?:[\w.+-]+@)?(?:[A-Za-z0-9_][\w.-]*|[0-9A-Fa-f:.]+(?:%\w+)?)$")


class Host(NamedTuple):
    """One line of a host list."""

    name: str
    slots: int


class Placement(NamedTuple):
    """Where one rank runs and its numbers; `cross_*` counts the hosts that have this local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str


def _host(name: str, slots: str | None, where: str) -> Host:
    if not _HOST_NAME.match(name):
        raise LaunchError(f"{where}: {name!r} is not a host name")
    if slots is None:
        return Host(name, 1)
    if not re.fullmatch("[0-9]{1,9}", slots) or not 1 <= int(slots) <= MAX_SLOTS:
        raise LaunchError(f"{where}: slots of {name} must be a number from 1 to {MAX_SLOTS}, not {slots!r}")
    return Host(name, int(slots))


def _split_slots(text: str) -> tuple[str, str | None]:
    """'host:4' -> ('host', '4'); '[::1]:4' and bare IPv6 addresses are understood."""
    bracket = re.match(r"^((?:[\w.+-]+@)?)\[([^\]]+)\](?::(.*))?$", text)
    if bracket:
        return bracket.group(1) + bracket.group(2), bracket.group(3)
    if text.count(":") > 1:
        return text, None
    name, colon, slots = text.partition(":")
    return name, slots if colon else None


def parse_host(text: str, where: str) -> tuple[Host, bool]:
    """'host:4' -> the host, and whether slots were given (else it has one). where: begins the text of a LaunchError."""
    name, slots = _split_slots(text)
    return _host(name, slots, where), slots is not None


def _merged(hosts: list[Host]) -> list[Host]:
    """A host that is named twice has the sum of its slots, at its first place."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def parse_hosts(text: str) -> list[Host]:
    """'node-a:4,node-b:2' -> hosts in that order; a host without ':n' has one slot."""
    hosts = []
    for part in text.split(","):
        if not part.strip():
            raise LaunchError(f"-H {text!r}: an empty host name; expected host:slots,host:slots")
        name, slots = _split_slots(part.strip())
        hosts.append(_host(name, slots, f"-H {text!r}"))
    return _merged(hosts)


def parse_hostfile(path: str) -> list[Host]:
    """One host a line: `name slots=4`, `name:4` or `name`; `#` begins a comment. Open MPI and MPICH files fit."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        name, slots = _split_slots(words[0])
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not equals:
                raise LaunchError(f"{where}: {word!r} is not key=value; expected 'host slots=4' or 'host:4'")
            if key == "slots":
                slots = value
            elif key != "max_slots" and key != "max-slots":
                raise LaunchError(f"{where}: unknown key {key!r}; only slots=N has a meaning here")
        hosts.append(_host(name, slots, where))
    if not hosts:
        raise LaunchError(f"--hostfile {path}: no host in it")
    return _merged(hosts)


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, cut by the cgroup's CPU quota (at least 1)."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()[:2]
        if quota != "max":
            cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def local_devices() -> int:
    """NVIDIA devices that ranks started here would see: CUDA_VISIBLE_DEVICES, else /dev/nvidia<n>."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    try:
        return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])
    except OSError:
        return 0


def automatic_size(hosts: list[Host] | None) -> int:
    """-np auto: every slot of the given hosts; without hosts one rank per local device, else per usable core."""
    if hosts:
        return sum(host.slots for host in hosts)
    return local_devices() or usable_cores()


def place(size: int, hosts: list[Host]) -> list[Placement]:
    """Fills the hosts in order. LaunchError when there are fewer slots than ranks."""
    slots = sum(host.slots for host in hosts)
    if size > slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {size} needs {size} slots, but the hosts have {slots} ({listed}); "
            "give more hosts or slots, or a smaller -np"
        )
    used: list[Host] = []
    left = size
    for host in hosts:
        if left == 0:
            break
        used.append(Host(host.name, min(left, host.slots)))
        left -= used[-1].slots
    placements: list[Placement] = []
    for index, host in enumerate(used):
        for local_rank in range(host.slots):
            sharing = [number for number, other in enumerate(used) if other.slots > local_rank]
            placements.append(
                Placement(
                    len(placements),
                    size,
                    local_rank,
                    host.slots,
                    sharing.index(index),
                    len(sharing),
                    host.name,
                )
            )
    return placements


def _is_own_address(family: int, address: str) -> bool:
    """The kernel binds only to addresses of this host, so a bind that works is the proof."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
        return True
    except OSError:
        return False


def is_loopback(name: str) -> bool:
    """Whether `name` means every host to itself."""
    return name in _LOOPBACK_NAMES or name.startswith("127.")


def is_local(name: str) -> bool:
    """Whether `name` means this host. A name that does not resolve is left to ssh (it may be an alias of ssh's)."""
    if name in _LOOPBACK_NAMES:
        return True
    if "@" in name:
        return False
    own = socket.gethostname()
    if name == own or name == own.partition(".")[0]:
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own_address(family, str(address[0])) for family, _, _, _, address in found)
