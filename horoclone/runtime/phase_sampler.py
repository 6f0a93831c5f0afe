"""Measures where this rank's time goes between its collectives, for live/late_ranks.py (HOROCLONE_WHY=1).

A thread looks at the stack of the thread that called init() 16 times a second, and at what Linux says about it; each
look stands for the time since the one before. The training thread itself runs nothing for it, but a callback of the
garbage collector's. Once a second the figures are written behind the rank's metrics block.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import os
import random
import re
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING

from horoclone.live import rank_metrics
from horoclone.live.phases import FIGURES, PHASES, WAITING, Phases, packed

if TYPE_CHECKING:
    from horoclone._core import Runtime

PERIOD_S = 0.06  # on average: a fixed one could beat with the steps
PUBLISH_S, RECENT_S, LISTED_S = 1.0, 30.0, 10.0
_STOOD_STILL_S = 0.15  # longer than a look is ever late on its own account
_LONGEST_FAULT_S = 0.02
_LINES = 64  # of each phase, that are counted
_GENERATOR = 0x20  # CO_GENERATOR
_LIBRARY, _PROGRAM = "library", "program"
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Of ours, what calls the program, which may be installed: then all of its frames are a library's.
_CALLERS = {"elastic/run.py", "elastic/variables.py", "launch/call.py", "ray/worker.py"}
# By the file of a function, within the folder of packages: what is done there. The first that fits counts.
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"torch/serialization\.py|torch/distributed/checkpoint/|safetensors/|orbax/", "checkpoint"),
        (r"keras/(src/)?saving/|keras/(src/)?callbacks/model_checkpoint\.py", "checkpoint"),
        (r"torch/utils/data/|torchdata/|datasets/|webdataset/|petastorm/|grain/", "data"),
        (r"keras/(src/)?trainers/data_adapters/|tensorflow/python/data/|tensorflow_datasets/", "data"),
        (r"torch/autograd/(graph|__init__)\.py", "backward"),
        (r"torch/optim/|keras/(src/)?optimizers/|optax/", "optimizer"),
        (r"torch/nn/|torch/_dynamo/|torch/_inductor/", "forward"),
        (r"jax/|tensorflow/|keras/|tf_keras/", "compute"),
    )
)
# What surrounds another phase and has its time: a loader that transforms with a model, a backward that computes forward
# again, the save of a model.
_SURROUNDS = frozenset(
    (outer, inner) for outer in ("data", "checkpoint") for inner in PHASES if inner != outer
) | {("backward", "forward")}

Place = tuple[str, int, str]  # file, line, function; "" where nothing of the program's runs


class Classifier:
    """Tells from a stack what a thread does. Pure but for what it remembers of files."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        packages = {paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()}
        for name in ("torch", "tensorflow", "keras", "jax"):  # they may lie elsewhere (pip install --target)
            if file := getattr(sys.modules.get(name), "__file__", None):
                packages.add(os.path.dirname(os.path.dirname(file)))
        # Packages lie below the standard library, so they come first.
        self._packages = tuple(os.path.join(one, "") for one in packages)
        self._standard = os.path.join(paths["stdlib"], "")
        self._known: dict[str, str] = {}

    def __call__(self, frame: FrameType | None) -> tuple[str, Place]:
        """The phase, and where the program's innermost function is."""
        phase, where, makes_data = "", ("", 0, ""), False
        while frame is not None:
            code = frame.f_code
            kind = self._known.get(code.co_filename) or self._kind_of(code.co_filename)
            if kind == _PROGRAM:
                if not where[0]:
                    where = (code.co_filename, frame.f_lineno or 0, code.co_name)
                makes_data |= bool(code.co_flags & _GENERATOR)
            elif kind == WAITING:
                if not where[0] and not phase:  # nothing of the program's runs inside
                    phase = WAITING
            elif kind != _LIBRARY and (not phase or (kind, phase) in _SURROUNDS):
                phase = kind
            frame = frame.f_back
        return phase or ("data" if makes_data else "own code"), where

    def _kind_of(self, name: str) -> str:
        kind = self._known[name] = self._of_file(name)
        return kind

    def _of_file(self, name: str) -> str:
        if name.startswith(_OURS):
            if name[len(_OURS) :] in _CALLERS:
                return _LIBRARY
            return "checkpoint" if name.startswith(_OURS + "checkpoint") else WAITING
        for folder in self._packages:
            if name.startswith(folder):
                inside = name[len(folder) :]
                return next((kind for pattern, kind in _KINDS if pattern.match(inside)), _LIBRARY)
        return _LIBRARY if name.startswith((self._standard, "<frozen")) else _PROGRAM


class PhaseSampler:
    """Of one life of the runtime. publish: takes what packed() makes, from the thread of the sampler."""

    def __init__(self, runtime: Runtime, publish: Callable[[bytes], None]) -> None:
        self._runtime, self._publish = runtime, publish
        self._watched, task = threading.get_ident(), f"/proc/self/task/{threading.get_native_id()}"
        self._schedule, self._status = _Readable(f"{task}/schedstat"), _Readable(f"{task}/stat")
        self._throttling, self._links = _Throttling(), _Links()
        self._sums = dict.fromkeys(FIGURES, 0.0)
        self._lines: dict[str, collections.Counter[Place]] = {}
        self._now, self._now_since, self._now_at = WAITING, time.monotonic(), ("", 0, "")
        self._collecting_since = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hc-why", daemon=True)
        gc.callbacks.append(self._note_collection)
        self._thread.start()

    def stop(self) -> None:
        """The runtime is about to end. Waits for the thread, which looks every 60 ms."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._note_collection)
        self._ending.set()
        self._thread.join(5.0)

    def _note_collection(self, moment: str, about: Mapping[str, int]) -> None:
        if moment == "start":
            self._collecting_since = time.monotonic()
        elif self._collecting_since:
            self._sums["gc"] += time.monotonic() - self._collecting_since
            self._collecting_since = 0.0

    def _run(self) -> None:
        try:
            self._measure()
        except Exception:  # of what Linux or the interpreter shows; training does not depend on it
            if not self._ending.is_set():
                raise

    def _measure(self) -> None:
        classify, own, draw = Classifier(), _Readable("/proc/thread-self/schedstat"), random.Random()
        last_s = published_s = time.monotonic()
        ran, late = self._schedule.numbers(0, 2)
        late_myself = own.numbers(1, 1)[0]
        faults = self._status.numbers(9, 1, behind=b") ")[0]
        history = _History()
        while not self._ending.wait(PERIOD_S * draw.uniform(0.5, 1.5)):
            frame = sys._current_frames().get(self._watched)
            if frame is None:  # the thread that called init() is gone
                return
            phase, at = classify(frame)
            del frame
            now_s = time.monotonic()
            before = (ran, late, late_myself, faults)
            ran, late = self._schedule.numbers(0, 2)
            late_myself = own.numbers(1, 1)[0]
            faults = self._status.numbers(9, 1, behind=b") ")[0]
            took_s = now_s - last_s
            self._add(phase, took_s, (ran - before[0]) / 1e9, (late - before[1]) / 1e9, faults - before[3])
            idle_s = took_s - PERIOD_S - (ran - before[0] + late - before[1] + late_myself - before[2]) / 1e9
            if idle_s > _STOOD_STILL_S and faults == before[3]:
                self._sums["stopped"] += idle_s
                self._sums["stopped_waiting"] += idle_s if phase == WAITING else 0.0
            self._count_line(phase, at)
            if phase != self._now:
                self._now, self._now_since = phase, last_s
            self._now_at, last_s = at, now_s
            if now_s - published_s >= PUBLISH_S:
                published_s = now_s
                self._tell(history, now_s)

    def _add(self, phase: str, took_s: float, ran_s: float, late_s: float, faults: int) -> None:
        """What passed since the last look. A thread that pages are read in for is off its processor, and then waits to
        get it back: both are the page's fault, as long as one takes at most 20 ms."""
        self._sums["faults_major"] += faults
        if phase != WAITING:
            paging_s = min(max(0.0, took_s - ran_s), _LONGEST_FAULT_S * faults)
            self._sums[phase] += took_s
            self._sums["ran"] += ran_s
            self._sums["faults"] += paging_s
            self._sums["delayed"] += min(late_s, max(0.0, took_s - paging_s))

    def _count_line(self, phase: str, at: Place) -> None:
        if at[0]:
            lines = self._lines.setdefault(phase, collections.Counter())
            lines[at] += 1
            if len(lines) > _LINES:
                self._lines[phase] = collections.Counter(dict(lines.most_common(_LINES // 2)))

    def _tell(self, history: _History, now_s: float) -> None:
        metrics = rank_metrics.read(self._runtime.rank_metrics())
        self._sums["throttled"] = self._throttling.seconds(now_s - self._sums["elapsed"])
        self._sums["link"], self._sums["sent_bytes"], self._sums["retransmits"] = self._links.figures(now_s)
        self._sums["elapsed"], self._sums["steps"] = now_s, float(metrics.step)
        self._sums["waited"] = metrics.waited_for_peers_seconds + metrics.waited_for_transfer_seconds
        self._sums["transfer"] = metrics.waited_for_transfer_seconds
        if history.add(self._sums, sum(one.count for one in metrics.operations.values())):
            self._lines.clear()
        lines = {phase: _shown(found.most_common(1)[0][0]) for phase, found in self._lines.items() if found}
        self._publish(
            packed(
                Phases(
                    time=time.time(),
                    total=history.total(),
                    recent=history.recent(),
                    lines={phase: line for phase, line in lines.items() if phase in PHASES},
                    now=self._now,
                    now_seconds=now_s - self._now_since,
                    now_line=_shown(self._now_at),
                )
            )
        )


class _History:
    """What was measured at the ends of those seconds in which operations had ended: where nobody comes to a collective
    any more, nobody is late. It begins with the third operation, so that what comes before training is left out."""

    def __init__(self) -> None:
        self._first: dict[str, float] | None = None
        self._kept: collections.deque[dict[str, float]] = collections.deque()
        self._operations = 0

    def add(self, sums: Mapping[str, float], operations: int) -> bool:
        """Whether it begins with these."""
        if operations == self._operations:
            return False
        begins = self._operations < 3
        if begins:
            self._first = dict(sums)
            self._kept.clear()
        self._operations = operations
        self._kept.append(dict(sums))
        while len(self._kept) > 2 and self._kept[-1]["elapsed"] - self._kept[1]["elapsed"] >= RECENT_S:
            self._kept.popleft()
        return begins

    def total(self) -> dict[str, float]:
        return self._since(self._first)

    def recent(self) -> dict[str, float]:
        return self._since(self._kept[0] if self._kept else None)

    def _since(self, before: Mapping[str, float] | None) -> dict[str, float]:
        if before is None:
            return {}
        return {name: max(0.0, value - before[name]) for name, value in self._kept[-1].items()}


class _Readable:
    """Numbers of a file in /proc, which is kept open. 0 where there is none, as where the kernel does not count."""

    def __init__(self, path: str) -> None:
        self._file = None
        with contextlib.suppress(OSError):
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - for as long as this object

    def numbers(self, first: int, count: int, behind: bytes = b"") -> tuple[int, ...]:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                content = os.pread(self._file.fileno(), 1024, 0)
                words = (content.rpartition(behind)[2] if behind else content).split()
                found = tuple(int(one) for one in words[first : first + count])
                if len(found) == count:
                    return found
        return (0,) * count


class _Throttling:
    """For how long the CPU quota of this process's cgroup, or of one around it, has stopped it."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._sum = 0.0

    def seconds(self, passed_s: float) -> float:
        """passed_s: since the last call. Linux counts the time of each processor."""
        now = {folder: self._of(os.path.join(folder, "cpu.stat")) for folder in _cgroups()}
        more = max((value - self._before.get(folder, value) for folder, value in now.items()), default=0.0)
        self._sum += min(more, passed_s)
        self._before = now
        return self._sum

    def _of(self, path: str) -> float:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "throttled_usec":
                    return int(value) / 1e6
                if name == "throttled_time":  # of version 1
                    return int(value) / 1e9
        return 0.0


def _cgroups() -> list[str]:
    """The folders of this process's cgroup and of those around it, where CPU time is limited."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        for line in file:
            number, controllers, path = line.rstrip("\n").split(":", 2)
            if number == "0":
                root = "/sys/fs/cgroup"
            elif "cpu" in controllers.split(","):
                root = next(
                    filter(os.path.isdir, (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu")), ""
                )
            else:
                continue
            while root:
                if os.path.exists(folder := os.path.join(root, path.lstrip("/"))):
                    found.append(folder)
                if path in ("/", ""):
                    break
                path = os.path.dirname(path)
    return found


class _Links:
    """What the kernel says about this process's TCP connections."""

    _TCP, _TCP_INFO = 6, 11
    _RETRANSMITS, _ACKNOWLEDGED, _BUSY, _PEER_IS_FULL = 100, 120, 168, 176  # bytes into struct tcp_info
    _MOST = 64

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._sockets: list[int] = []
        self._listed_s = -LISTED_S
        self._before: dict[int, tuple[float, int, int]] = {}
        self._sums = [0.0, 0.0, 0.0]

    def figures(self, now_s: float) -> tuple[float, float, float]:
        """(seconds with unacknowledged data that the other side had room for, of the busiest connection; bytes that
        were acknowledged, and segments that were sent again, of all)."""
        if now_s - self._listed_s >= LISTED_S:
            self._listed_s, self._sockets = now_s, self._listed()
        busiest = 0.0
        for number in self._sockets:
            now = self._of(number)
            if now is None:
                continue
            before = self._before.get(number, now)
            if now[1] < before[1]:  # another connection has this number
                before = (0.0, 0, 0)
            self._before[number] = now
            busiest = max(busiest, now[0] - before[0])
            self._sums[1] += now[1] - before[1]
            self._sums[2] += now[2] - before[2]
        self._sums[0] += busiest
        return self._sums[0], self._sums[1], self._sums[2]

    def _listed(self) -> list[int]:
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                        found.append(int(name))
        return [one for one in found if self._of(one) is not None][: self._MOST]

    def _of(self, number: int) -> tuple[float, int, int] | None:
        content, length = ctypes.create_string_buffer(256), ctypes.c_uint(256)
        if self._libc.getsockopt(number, self._TCP, self._TCP_INFO, content, ctypes.byref(length)):
            return None
        if length.value < self._PEER_IS_FULL + 8:
            return None

        def word(at: int, size: int = 8) -> int:
            return int.from_bytes(content.raw[at : at + size], sys.byteorder)

        busy_s = (word(self._BUSY) - word(self._PEER_IS_FULL)) / 1e6
        return busy_s, word(self._ACKNOWLEDGED), word(self._RETRANSMITS, 4)


def _shown(at: Place) -> str:
    name, line, function = at
    return f"{os.path.basename(name)}:{line} in {function}" if name else ""
