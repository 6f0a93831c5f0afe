"""How much address space shared memory may take where the process has a limit on it (`ulimit -v`).

Every rank maps the arenas of all ranks of its machine, so each gets a part of what is left; a rank that has no room for
those of the others uses TCP, which the core finds out and says. Without a limit the core's own default holds.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

_GIB = 1 << 30  # the smallest arena that can be asked for


def fitted(settings: Mapping[str, str], environ: Mapping[str, str], size: int) -> dict[str, str]:
    """`settings`, with HOROCLONE_ARENA_BYTES where there is a limit.

    size: of the job; so many ranks share this machine where the launcher has not said how many.
    """
    found = dict(settings)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or {"HOROCLONE_ARENA_BYTES", "HOROCLONE_SHARED_MEMORY"} & found.keys():
        return found
    local = environ.get("HOROCLONE_LOCAL_SIZE") or environ.get("HOROVOD_LOCAL_SIZE") or ""
    ranks = min(size, int(local)) if local.isdigit() and int(local) > 0 else size
    # the other half is the program's
    found["HOROCLONE_ARENA_BYTES"] = str(max(_GIB, _left(limit) // 2 // ranks))
    return found


def _left(limit: int) -> int:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    return max(0, limit - used)
