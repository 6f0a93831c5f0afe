"""What the figures depend on: kind of processor, cores, kernel, pages; and whether others use the machine.

Nothing here names the machine.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Kind of processor, cores, memory, kernel, governor and huge pages; "unknown" where the system does not say."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "virtual machine": "hypervisor" in _line_of("/proc/cpuinfo", "flags").split(),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "huge pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        # above 0: no direct copies between processes
        "ptrace scope": _read("/proc/sys/kernel/yama/ptrace_scope"),
    }


def processor() -> str:
    """The processor's name with family, model and stepping, since a virtual machine's name alone says little."""
    words = [_line_of("/proc/cpuinfo", key) for key in ("model name", "cpu family", "model", "stepping")]
    if not words[0]:
        return platform.machine() or "unknown"
    return f"{words[0]} (family {words[1]}, model {words[2]}, stepping {words[3]})"


def _line_of(path: str, key: str) -> str:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


def _chosen(text: str) -> str:
    """The word in brackets of "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0] or text


class Load:
    """Cores kept busy by everybody but this process and its children that have ended; the hypervisor's share counts."""

    def __init__(self) -> None:
        self._start = (time.monotonic(), _busy_s(), _own_s())

    def others(self) -> float | None:
        """Average since the object was made; None where there is no /proc/stat."""
        start, busy, own = self._start
        now_busy = _busy_s()
        if busy is None or now_busy is None:
            return None
        return max(0.0, (now_busy - busy - (_own_s() - own)) / (time.monotonic() - start))


def load_before(settle_s: float) -> float:
    """Cores that others use while we do nothing."""
    load = Load()
    time.sleep(settle_s)
    return load.others() or 0.0


def memory_now() -> dict[str, float]:
    """Bytes of this process: private to it, shared, proportional (a shared page by its users), and resident."""
    names = {"Private_Clean": "private", "Private_Dirty": "private", "Shared_Clean": "shared",
             "Shared_Dirty": "shared", "Pss": "proportional", "Rss": "resident"}  # fmt: skip
    now = dict.fromkeys(names.values(), 0.0)
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        name = line.split(":")[0]
        if name in names:
            now[names[name]] += int(line.split()[1]) * 1024
    return now


@contextmanager
def only_one() -> Iterator[None]:
    """One benchmark at a time on this machine; waits for its turn and says so."""
    path = Path(tempfile.gettempdir()) / f"horoclone-benchmark-{os.getuid()}.lock"
    with open(path, "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another benchmark runs; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _busy_s() -> float | None:
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total
