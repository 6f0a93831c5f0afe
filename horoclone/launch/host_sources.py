"""Hosts of an elastic job from the scheduler or the network: --host-discovery file:PATH, slurm, dns:NAME[:slots].

Each is a Source (discovery.py). Thread: hc-discovery; the job's own thread makes the first query.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from horoclone.launch.discovery import File, Source
from horoclone.launch.hosts import Host, parse_host
from horoclone.launch.usage import LaunchError

SCONTROL_S = 30.0
KINDS = "file:PATH, slurm, or dns:NAME[:slots]"
_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")

Resolve = Callable[[str], Iterable[str]]


def source_of(text: str, slots: int | None, environ: Mapping[str, str]) -> Source:
    """What --host-discovery names. slots: of a host without a number. LaunchError for what is none of KINDS."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return File(rest)
    if text == "slurm":
        return Slurm(environ, slots)
    if kind == "dns" and rest:
        host, has_slots = parse_host(rest, f"--host-discovery {text}")
        return Dns(host.name, host.slots if has_slots else slots or 1)
    raise LaunchError(f"--host-discovery {text!r}: expected {KINDS}")


class Slurm:
    """The nodes of the allocation that this process runs in. A job cannot grow beyond it, so one look is enough."""

    changes = False

    def __init__(self, environ: Mapping[str, str], slots: int | None) -> None:
        self._environ, self._slots = environ, slots

    def find(self) -> list[Host]:
        nodes = self._environ.get("SLURM_JOB_NODELIST") or self._environ.get("SLURM_NODELIST")
        if not nodes:
            raise LaunchError(
                "--host-discovery slurm: SLURM_JOB_NODELIST is not set; run this in a script of sbatch or under salloc"
            )
        names = _node_names(nodes)
        return [Host(name, count) for name, count in zip(names, self._counts(len(names)), strict=True)]

    def _counts(self, nodes: int) -> list[int]:
        if self._slots is not None:
            return [self._slots] * nodes
        for variable in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"):
            text = self._environ.get(variable)
            if text:
                counts = expanded(text)
                if len(counts) != nodes or 0 in counts:
                    raise LaunchError(
                        f"--host-discovery slurm: {variable}={text!r} does not fit {nodes} nodes; --slots-per-host N "
                        "says how many ranks a node takes"
                    )
                return counts
        raise LaunchError(
            "--host-discovery slurm: neither SLURM_TASKS_PER_NODE nor SLURM_JOB_CPUS_PER_NODE is set; "
            "--slots-per-host N says how many ranks a node takes"
        )

    def stop(self) -> None:
        pass


def _node_names(nodes: str) -> list[str]:
    """Slurm's own program knows all forms of a node list."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or f"no answer in {SCONTROL_S:g} s"
        raise LaunchError(f"--host-discovery slurm: {' '.join(command)}: {why}", 1) from None
    names = [name for line in done.stdout.splitlines() for name in line.split()]
    if done.returncode != 0 or not names:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise LaunchError(f"--host-discovery slurm: {' '.join(command)}: {said}", 1)
    return [parse_host(name, "--host-discovery slurm")[0].name for name in names]


def expanded(text: str) -> list[int]:
    """Slurm's `2(x3),1` -> 2, 2, 2, 1. Empty when it is something else."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            return []
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


class Dns:
    """The addresses of a name, as of a headless service of Kubernetes: each is a host with so many slots.

    They come in the order of the addresses, whatever the resolver's order is; a job keeps those that it knows first.
    A name that does not exist (yet, or while nothing is behind it) has no hosts.
    """

    changes = True

    def __init__(self, name: str, slots: int, resolve: Resolve | None = None) -> None:
        self._name, self._slots, self._resolve = name, slots, resolve or addresses

    def find(self) -> list[Host]:
        try:
            found = self._resolve(self._name)
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                return []
            raise LaunchError(f"--host-discovery dns:{self._name}: {error.strerror}", 1) from None
        except (OSError, UnicodeError) as error:
            raise LaunchError(f"--host-discovery dns:{self._name}: {error}", 1) from None
        return [Host(address, self._slots) for address in sorted(set(found), key=_order)]

    def stop(self) -> None:
        pass


def addresses(name: str) -> list[str]:
    """As the system's resolver gives them. OSError as of getaddrinfo."""
    return [str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


def _order(address: str) -> tuple[int, Any]:
    plain = ipaddress.ip_address(address.partition("%")[0])
    return plain.version, int(plain)
