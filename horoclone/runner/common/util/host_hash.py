"""Under Horovod's name: a text that is the same for all processes that may share this host's memory."""

from __future__ import annotations

import hashlib
import os
import socket


def _hash(string: str) -> str:
    return hashlib.sha256(string.encode()).hexdigest()[:32]


def _namespaces() -> list[str]:
    """Containers of one host have namespaces of their own, and do not see each other's memory."""
    found = []
    for name in ("ipc", "mnt", "net", "pid", "user", "uts"):
        try:
            found.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            pass
    return found


def host_hash(salt: str | None = None) -> str:
    """`<short host name>-<32 hexadecimal digits>` of host name, namespaces and salt (any text; None: none)."""
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    parts = [name, *_namespaces(), *([str(salt)] if salt else [])]
    return f"{name.split('.')[0]}-{_hash('-'.join(parts))}"
