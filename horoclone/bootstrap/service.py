"""A job without a launcher, whose processes stand behind one DNS name: pods behind a headless service of Kubernetes.

HOROCLONE_SERVICE is that name. Each process knows its own number (JOB_COMPLETION_INDEX of an Indexed Job, or the number
at the end of its host's name, as in a StatefulSet), and with it the host name of process 0, where all of them meet.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from horoclone import errors
from horoclone.bootstrap import launchers, wire
from horoclone.settings import flag, seconds

Environment = Mapping[str, str]

NAME_AND_NUMBER = re.compile(r"(.*\D)(\d{1,7})")
_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)
_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an Indexed Job


@dataclass(frozen=True)
class Place:
    """One process behind a service. size: HOROCLONE_SIZE; in an elastic job that of the first generation."""

    service: str
    host: str
    index: int
    size: int
    job: str

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def first(self) -> str:
        """The DNS name of process 0: its host's name, which differs from ours in the number only, and the service."""
        return f"{self.host_of(0)}.{self.service}"

    def host_of(self, index: int) -> str:
        """The host name of another process of the job."""
        return re.sub(r"\d+$", str(index), self.host)

    def port(self, environ: Environment) -> int:
        """Where every process of the job listens: HOROCLONE_PORT, or one that follows from the job's name. Not from the
        secret: who has another one shall be refused, and not search in another place."""
        text = environ.get("HOROCLONE_PORT", "").strip()
        if not text:
            return launchers.derived_ports(b"a service", self.job)[0]
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise errors.Unsupported(f"HOROCLONE_PORT={text!r} is not the number of a port (1 to 65535).")
        return int(text)


@dataclass(frozen=True)
class Bounds:
    """How an elastic job of a service forms generations; see coordinator.Limits."""

    smallest: int
    largest: int | None
    timeout_s: float
    majority: bool


def is_set(environ: Environment) -> bool:
    """Whether this process is told a service, and no launcher has started it."""
    return bool(environ.get("HOROCLONE_SERVICE")) and not environ.get("HOROCLONE_RENDEZVOUS")


def is_elastic(environ: Environment) -> bool:
    return is_set(environ) and flag(environ, "ELASTIC")


def why(place: Place) -> str:
    return f"HOROCLONE_SERVICE={place.service} is set, and this is process {place.index} of {place.size}"


def place_of(environ: Environment) -> Place:
    """Unsupported when the number or the size is missing or contradicts something."""
    name = environ["HOROCLONE_SERVICE"].strip().rstrip(".")
    host = environ.get("HOROCLONE_HOSTNAME") or socket.gethostname().partition(".")[0]
    said = f"HOROCLONE_SERVICE={name} says that the processes of this job find each other by DNS"
    match = NAME_AND_NUMBER.fullmatch(host)
    if match is None:
        raise errors.Unsupported(
            f"{said}, but this host's name, {host!r}, does not end in the number of this process. Pods of an Indexed "
            "Job, a JobSet and a StatefulSet have such names; elsewhere set HOROCLONE_HOSTNAME to NAME-NUMBER."
        )
    index, source = int(match.group(2)), f"host {host}"
    if environ.get(_INDEX):
        index = _whole(environ, _INDEX)
        if index != int(match.group(2)):
            raise errors.Unsupported(
                f"{_INDEX}={index}, but this host is {host}: one of them is another process's. Do not set {_INDEX} in "
                "the manifest; Kubernetes sets it."
            )
        source = f"{_INDEX}={index}"
    if not environ.get("HOROCLONE_SIZE"):
        raise errors.Unsupported(
            f"{said}, but HOROCLONE_SIZE is not set: to how many processes? It is the number of completions of an "
            "Indexed Job, or of replicas."
        )
    size = _whole(environ, "HOROCLONE_SIZE")
    if size < 1 or (index >= size and not flag(environ, "ELASTIC")):
        raise errors.Unsupported(
            f"{source} is not below HOROCLONE_SIZE={size}: set it to the number of processes (completions, replicas), "
            "or HOROCLONE_ELASTIC=1 where their number may change."
        )
    return Place(name, host, index, size, environ.get("HOROCLONE_JOB") or name)


def rendezvous_of(environ: Environment) -> tuple[str, list[int]]:
    """The name of process 0's host, and the port there, where the ranks of a job of a fixed size meet."""
    place = place_of(environ)
    return place.first, [place.port(environ)]


def bounds_of(place: Place, environ: Environment) -> Bounds:
    """Of an elastic job. Unsupported for numbers that do not fit together."""
    smallest = _whole(environ, "HOROCLONE_MIN_NP") if environ.get("HOROCLONE_MIN_NP") else 1
    largest = _whole(environ, "HOROCLONE_MAX_NP") if environ.get("HOROCLONE_MAX_NP") else None
    if not 1 <= smallest <= place.size or (largest is not None and largest < place.size):
        raise errors.Unsupported(
            f"1 <= HOROCLONE_MIN_NP ({smallest}) <= HOROCLONE_SIZE ({place.size}) <= HOROCLONE_MAX_NP "
            f"({'not set' if largest is None else largest}) does not hold."
        )
    quorum = environ.get("HOROCLONE_ELASTIC_QUORUM", "")
    if quorum not in ("", "majority", "any"):
        raise errors.Unsupported(f"HOROCLONE_ELASTIC_QUORUM={quorum!r} is neither majority nor any.")
    timeout_s = seconds(environ, "ELASTIC_TIMEOUT", 600.0)
    return Bounds(smallest, largest, timeout_s, quorum != "any")


def secret_of(place: Place, environ: Environment) -> bytes:
    """The job secret, without which nobody meets over a network. Unsupported when there is none."""
    secret = launchers.shared_secret(environ)
    if not secret:
        raise errors.Unsupported(
            f"{why(place)}, and the processes share no secret. Mount one (kubectl create secret generic NAME "
            "--from-file=secret=FILE, at least 16 random bytes) and set HOROCLONE_SECRET_FILE to its path."
        )
    return secret


def addresses(name: str) -> list[str]:
    """The IPv4 addresses behind a DNS name, in order; none while nobody is there. OSError when that cannot be told."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_NAME:
            return []
        raise
    return sorted({str(one[4][0]) for one in found})


def bindings(port: int, environ: Environment) -> list[str]:
    return [wire.format_address(host, port) for host in wire.bindings(environ)]


def _whole(environ: Environment, name: str) -> int:
    text = environ[name].strip()
    if not text.isdigit() or len(text) > 7:
        raise errors.Unsupported(f"{name}={text!r} is not a whole number.")
    return int(text)
