"""The rendezvous of ranks on one host: an abstract unix socket under a name that each of them can derive.

Any process may take a name first. With a secret, the name is derived from it. Without one there are several names: a
other users may hold some, which the kernel reveals, and rank 0 takes the next. The ranks try all of them.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable

from horoclone import errors
from horoclone.bootstrap import wire
from horoclone.bootstrap.rendezvous import Server

NAMES = 8
BIND_PATIENCE_S = 10.0  # for a name that a process of an older run still holds
LISTEN_PATIENCE_S = 0.5  # for who has bound a name to listen there


def addresses(secret: bytes, *parts: str) -> list[str]:
    """The names that these parts lead to, in rank 0's order. With a secret nobody guesses them."""
    known = hmac.new(secret, b"horoclone names", hashlib.sha256).hexdigest() if secret else ""
    return [
        wire.abstract_name(*parts, *([known] if known else []), *([n] if n else [])) for n in range(NAMES)
    ]


def serve(make: Callable[[str], Server], names: list[str], deadline: float) -> Server:
    """A server under the first name that no other user holds. HorovodInternalError when there is none."""
    give_up = min(deadline, time.monotonic() + BIND_PATIENCE_S)
    holders: list[str] = []
    for address in names:
        server, holder = _bind(make, address, give_up)
        if server is not None:
            return server
        if holder == os.geteuid():
            raise errors.HorovodInternalError(
                f"rank 0: another process of yours holds {address} for {BIND_PATIENCE_S:.0f} s already. Is an older "
                "run of this job alive, or do two processes have rank 0?"
            )
        holders.append("somebody who does not listen" if holder < 0 else f"user id {holder}")
    who = ", ".join(sorted(set(holders)))
    raise errors.HorovodInternalError(
        f"rank 0: others hold all {len(names)} names for the rendezvous ({who}; the first is {names[0]}). "
        "Put a random text of at least 16 bytes into a file that only you can read and set HOROCLONE_SECRET_FILE to "
        "it: then nobody can guess the names. Or start the job with horoclonerun."
    )


def _bind(make: Callable[[str], Server], address: str, give_up: float) -> tuple[Server | None, int]:
    """The server, or the user id of the process that holds the name: our own after the patience, -1 if none answers."""
    silent_since = 0.0
    while True:
        try:
            return make(address), -1
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        now, holder = time.monotonic(), _holder(address)
        silent_since = (silent_since or now) if holder < 0 else 0.0
        foreign = holder >= 0 and holder != os.geteuid()
        if foreign or now >= give_up or (silent_since and now - silent_since >= LISTEN_PATIENCE_S):
            return None, holder
        time.sleep(0.05)


def _holder(address: str) -> int:
    family, target = wire.parse_address(address)
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as one:
        one.setblocking(False)  # its queue may be full on purpose
        try:
            one.connect(target)
            return wire.peer_uid(one)
        except OSError:
            return -1
