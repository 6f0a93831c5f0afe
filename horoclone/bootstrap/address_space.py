"""How much address space shared memory may take where the process has a limit on it (`ulimit -v`).

Every rank maps the arenas of all ranks of its machine, so each gets a part of what is left. Without a limit the core's
own default holds.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

_GIB = 1 << 30  # the smallest arena that can be asked for


def fitted(settings: Mapping[str, str], environ: Mapping[str, str], size: int) -> tuple[dict[str, str], str]:
    """(settings, what to tell the user: "" for nothing). size: of the job; how many ranks share this machine where the
    launcher has not said it."""
    found = dict(settings)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or {"HOROCLONE_ARENA_BYTES", "HOROCLONE_SHARED_MEMORY"} & found.keys():
        return found, ""
    local = environ.get("HOROCLONE_LOCAL_SIZE") or environ.get("HOROVOD_LOCAL_SIZE") or ""
    ranks = min(size, int(local)) if local.isdigit() and int(local) > 0 else size
    part = _left(limit) // 2 // ranks  # the other half is the program's
    if part < 2 * _GIB // 3:
        found["HOROCLONE_SHARED_MEMORY"] = "0"
        return found, (
            f"`ulimit -v` of {limit >> 20} MiB leaves no room for the shared memory of {ranks} ranks, so they use TCP: "
            f"raise it by {(2 * ranks * _GIB - _left(limit)) >> 20} MiB, or set it to unlimited"
        )
    found["HOROCLONE_ARENA_BYTES"] = str(max(_GIB, part))
    return found, ""


def _left(limit: int) -> int:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    return max(0, limit - used)
