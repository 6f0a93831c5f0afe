"""`horoclone sockets`: how this machine's cores lie together, what an allreduce moves over the link between
sockets, and how long it takes with and without levels (docs/decisions/levels.md). Made to be sent in from machines
that nobody here has: it prints plain text and names neither the host nor its user.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from horoclone.arguments import whole_numbers
from horoclone.runtime.native_module import core

SYSTEM = "/sys/devices/system"
SIZES = (64 << 10, 1 << 20, 16 << 20)
LIMIT_S = 600.0

# argv: CPUs by rank, sizes, seconds for a size, file for the result. Binds itself before it connects.
RANK = """
import json, os, sys, time
cpus, sizes, seconds, path = map(json.loads, sys.argv[1:])
os.sched_setaffinity(0, {cpus[int(os.environ["HOROVOD_RANK"])]})
os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import horoclone as hvd
hvd.init()
medians = []
for size in sizes:
    data = np.ones(size // 4, np.float32)
    def once():
        begin = time.perf_counter()
        hvd.allreduce_(data, op=hvd.Average, name=f"sockets.{size}")
        return time.perf_counter() - begin
    warm = max(hvd.allgather(np.array([min(once() for _ in range(3))])))
    times = [once() for _ in range(max(7, min(2000, int(seconds / warm))))]
    assert data[0] == data[-1] == 1
    medians.append(max(hvd.allgather(np.array([sorted(times)[len(times) // 2]]))))
if hvd.rank() == 0:
    open(path, "w").write(json.dumps(medians))
hvd.shutdown()
"""


class Core(NamedTuple):
    """One CPU of each core that this program may use."""

    cpu: int
    socket: int
    numa_node: int
    l3: int


def topology_folder() -> str:
    chosen = os.environ.get("HOROCLONE_TOPOLOGY", "")
    return SYSTEM if chosen in ("", "off") else chosen


def cores_of(cpus: Sequence[int], folder: str) -> list[Core]:
    """The first CPU of each core, with its place, by socket, node and cache."""
    locality = core().locality
    found, seen = [], set()
    for cpu in sorted(cpus):
        siblings = _read(f"{folder}/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        if siblings in seen:
            continue
        seen.add(siblings)
        found.append(Core(cpu, *locality([cpu], folder)))
    return sorted(found, key=lambda one: (*one[1:], one.cpu))


def spread(cores: Sequence[Core], ranks: int) -> list[Core]:
    """`ranks` of the cores, as evenly over the sockets as they come."""
    sockets: dict[int, list[Core]] = {}
    for one in cores:
        sockets.setdefault(one.socket, []).append(one)
    taken: dict[int, int] = dict.fromkeys(sockets, 0)
    for _ in range(ranks):
        free = [socket for socket, members in sockets.items() if taken[socket] < len(members)]
        taken[min(free, key=taken.__getitem__)] += 1
    return [one for socket, members in sockets.items() for one in members[: taken[socket]]]


def counts(cores: int) -> list[int]:
    """2, 4, 8 ... and all cores."""
    found, ranks = [], 2
    while ranks < cores:
        found.append(ranks)
        ranks *= 2
    return [*found, cores] if cores > 1 else []


def moved(cores: Sequence[Core], nbytes: int) -> dict[str, int]:
    """Bytes that an allreduce moves between sockets in the busiest direction, flat and levelled; levels: how many."""
    found = json.loads(core().levels_report([list(one[1:]) for one in cores], nbytes))
    busiest = {way: max(map(max, found[way])) for way in ("flat", "levelled")}
    return busiest | {"levels": len(found["levels"])}


def measure(cores: Sequence[Core], sizes: Sequence[int], seconds: float, levels: bool) -> list[float]:
    """Seconds of an allreduce of each size, the slowest rank's median. RuntimeError when the ranks failed."""
    with tempfile.TemporaryDirectory(prefix="horoclone-sockets-") as folder:
        path = Path(folder, "medians")
        words = [[one.cpu for one in cores], list(sizes), seconds, str(path)]
        environ = dict(os.environ)
        if not levels:
            environ["HOROCLONE_TOPOLOGY"] = "off"
        command = [
            sys.executable, "-m", "horoclone.launch", "-np", str(len(cores)), "-H", f"localhost:{len(cores)}"
        ]  # fmt: skip
        done = subprocess.run(
            [*command, sys.executable, "-c", RANK, *map(json.dumps, words)],
            env=environ, timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode or not path.exists():
            raise RuntimeError(f"{len(cores)} ranks failed:\n{done.stdout[-2000:]}")
        medians: list[float] = json.loads(path.read_text())
        return medians


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    """The report, a line when it is known."""
    cores = cores_of(sorted(os.sched_getaffinity(0)), topology_folder())
    build = json.loads(core().build_info())
    yield f"horoclone {build['version']}, {build['simd']}, Linux {platform.release()}, {_processor()}"
    yield f"{len(cores)} cores:"
    for socket in dict.fromkeys(one.socket for one in cores):
        mine = [one for one in cores if one.socket == socket]
        nodes, caches = len({one.numa_node for one in mine}), len({one.l3 for one in mine})
        yield f"  socket {_shown(socket)}: {len(mine)} cores, NUMA nodes: {nodes}, L3 caches: {caches}"
    ranks = [n for n in (arguments.ranks or counts(len(cores))) if 1 < n <= len(cores)]
    yield ""
    yield f"{'ranks':>6} {'bytes':>10} {'over the busiest link, one way':>32} {'time of an allreduce, us':>36}"
    yield f"{'':>6} {'':>10} {'flat':>16} {'levels':>15} {'flat':>13} {'levels':>11} {'ratio':>10}"
    for n in ranks:
        chosen = spread(cores, n)
        levelled = moved(chosen, 1 << 20)["levels"] > 0
        times = _times(chosen, arguments, levelled)
        for i, size in enumerate(arguments.sizes):
            flat, by_levels = ([run[i] for run in times[way]] for way in (False, True))
            link = moved(chosen, size)
            row = f"{n:>6} {size:>10} {link['flat']:>16} {link['levelled'] if levelled else '-':>15}"
            if flat:
                row += f" {min(flat) * 1e6:>13.1f}"
            if by_levels:
                row += f" {min(by_levels) * 1e6:>11.1f} {min(by_levels) / min(flat):>10.2f}"
            yield row
    yield ""
    yield "levels: by cache, NUMA node and socket; none where all ranks are on one NUMA node."
    yield "ratio: below 1 they are faster."


def _times(
    cores: Sequence[Core], arguments: argparse.Namespace, levelled: bool
) -> dict[bool, list[list[float]]]:
    """Runs without and with levels, in turn."""
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(0 if arguments.no_times else arguments.rounds):
        for way in (False, True) if levelled else (False,):
            times[way].append(measure(cores, arguments.sizes, arguments.seconds, way))
    return times


# fmt: off
EXAMPLES = (
    ("all numbers of ranks up to all cores", "horoclone sockets"),
    ("eight ranks, one size", "horoclone sockets --ranks 8 --sizes 1048576"),
    ("where the cores lie; starts nothing", "horoclone sockets --no-times"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("--ranks", type=whole_numbers, metavar="N,...", help="numbers of ranks (default: 2, 4 ... up to all cores)")
    add("--sizes", type=whole_numbers, default=list(SIZES), metavar="BYTES,...",
        help=f"sizes, in bytes (default {','.join(map(str, SIZES))})")
    add = parser.add_argument_group("for how long").add_argument
    add("--rounds", type=int, default=3, metavar="N",
        help="runs of each kind, of which the best counts (default %(default)s)")
    add("--seconds", type=float, default=0.5, metavar="S", help="for each size in a run (default %(default)s)")
    add("--no-times", action="store_true", help="only look and count, start no ranks")
# fmt: on


def show(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    try:
        for line in lines(arguments):
            print(line, flush=True)
    except (RuntimeError, OSError, ImportError, subprocess.TimeoutExpired) as error:
        print(f"horoclone sockets: {error}", file=sys.stderr)
        return 1
    return 0


def _shown(number: int) -> str:
    return "unknown" if number < 0 else str(number)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _processor() -> str:
    name = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return name[1] if name else platform.machine()
