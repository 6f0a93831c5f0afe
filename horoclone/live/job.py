"""The jobs of this user on this host, and their ranks' metrics. Reads only; works while a job hangs.

A job of horoclonerun is found by its launcher's process: the launcher has the metrics of all ranks, those of other
hosts too (job_segment.py). Of one that mpirun, srun or torchrun has started the ranks of this host are seen, in the
runtime directory (runtime_directory.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator

from horoclone.live import processes, rank_metrics, runtime_directory
from horoclone.live.job_segment import NAME, Event, Reader
from horoclone.live.rank_metrics import RankMetrics, Seen

__all__ = ["Event", "Job", "NoJob", "find", "jobs", "of_process"]


class NoJob(LookupError):
    """There is no such job, or none at all, or it is not clear which one; the text says what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job that runs, or has just ended. id: what find() takes; the launcher's pid for a job of horoclonerun.

    command: of the ranks. started: Unix seconds. launcher: the pid of horoclonerun, or None without it.
    """

    id: str
    command: str
    started: float
    launcher: int | None
    _read_ranks: Callable[[], list[RankMetrics]] = dataclasses.field(repr=False, compare=False)
    _read_events: Callable[[], list[Event]] = dataclasses.field(repr=False, compare=False)

    def ranks(self) -> list[RankMetrics]:
        """The metrics of each rank, by rank; in an elastic job those of the newest generation, and of processes that
        are still to join it. Empty once the job is over. Those of a rank that has ended stay for as long as the job."""
        return self._read_ranks()

    def pages(self) -> list[RankMetrics]:
        """Deprecated: the former name of ranks()."""
        warnings.warn("Job.pages() is called Job.ranks()", DeprecationWarning, stacklevel=2)
        return self.ranks()

    def events(self) -> list[Event]:
        """The last events, oldest first; of a job without our launcher those that the metrics show now."""
        return self._read_events()


def jobs() -> list[Job]:
    """Every job of this user that has a process on this host, the newest last. Directories that dead jobs without a
    launcher have left are removed on the way."""
    runtime_directory.remove_dead(os.environ)
    found = [*_with_launcher(_own_processes()), *_without_launcher()]
    return sorted(found, key=lambda one: one.started)


def of_process(pid: int) -> list[Job]:
    """The jobs that this process has started: for the launcher itself, and whoever has just started it."""
    return [one for one in _with_launcher([pid]) if one.launcher == pid]


def find(name: str | None = None) -> Job:
    """The job with this id, or with an id that begins so; None: the only one there is. NoJob, with those there are."""
    found = jobs()
    matching = [one for one in found if name is None or one.id == name]
    if not matching and name is not None:
        matching = [one for one in found if one.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    shown = "".join(
        f"\n  {one.id}  since {time.strftime('%H:%M:%S', time.localtime(one.started))}  {one.command}"
        for one in found
    )
    if not found:
        raise NoJob(
            "no job of yours runs on this host. Jobs of horoclonerun are seen on the launcher's host; those of mpirun, "
            "srun and torchrun on every host where XDG_RUNTIME_DIR names a folder of yours that they see, too"
        )
    if not matching:
        raise NoJob(f"no job {name!r} runs on this host; there are:{shown}")
    raise NoJob(f"several jobs run on this host: name one of them{shown}")


# ---- of our launcher


def _own_processes() -> Iterator[int]:
    user = os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    yield int(name)


FACTS = {
    "id",
    "command",
    "started",
    "pid",
    "process_start",
    "namespace",
}  # that a launcher says about its job


def _with_launcher(pids: Iterable[int]) -> list[Job]:
    """A metrics segment is open in the launcher and in its ranks, which may survive it, and in who reads it; the
    launcher's is preferred."""
    readers: dict[int, Reader] = {}
    for pid in pids:
        for path in _segments(pid):
            with contextlib.suppress(OSError, ValueError):
                reader = Reader(path)
                if not reader.about.keys() >= FACTS:
                    continue  # another version wrote it
                if reader.inode not in readers or reader.about["pid"] == pid:
                    readers[reader.inode] = reader
    found = [_job_of(reader) for reader in readers.values() if not reader.is_over]
    return [one for one in found if one.launcher is not None or one.ranks()]


def _segments(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path) == f"/memfd:{NAME} (deleted)":
                    yield path


def _job_of(reader: Reader) -> Job:
    about = reader.about
    launcher = processes.ProcessIdentity(about["pid"], about["process_start"], about["namespace"])

    def ranks() -> list[RankMetrics]:
        if reader.is_over:
            return []
        goes_on = processes.lives(launcher)
        found = _read(reader.blocks(), with_other_hosts=goes_on)
        return _newest(found) if goes_on or any(map(_is_up, found)) else []

    return Job(
        id=about["id"],
        command=about["command"],
        started=about["started"],
        launcher=about["pid"] if processes.lives(launcher) else None,
        _read_ranks=ranks,
        _read_events=reader.events,
    )


# ---- without it


def _without_launcher() -> list[Job]:
    by_job: dict[str, list[str]] = {}
    for job, path in runtime_directory.block_paths(os.environ):
        by_job.setdefault(job, []).append(path)
    found = []
    for job in by_job:
        if made := _job_in_folder(job):
            found.append(made)
    return found


def _job_in_folder(job: str) -> Job | None:
    def ranks() -> list[RankMetrics]:
        paths = [path for of_job, path in runtime_directory.block_paths(os.environ) if of_job == job]
        found = _read(runtime_directory.contents(paths))
        return _newest(found) if any(map(_is_up, found)) else []

    now = ranks()
    if not now:
        return None
    return Job(
        id=job,
        command=now[0].program,
        started=min(one.started for one in now),
        launcher=None,
        _read_ranks=ranks,
        _read_events=lambda: _seen_now(ranks()),
    )


def _seen_now(ranks: list[RankMetrics]) -> list[Event]:
    now = time.time()
    found = []
    for one in ranks:
        if one.state == "stalled":
            found.append(Event(now, "stall", rank_metrics.stall_text(one), (one.rank,)))
        elif one.state == "lost":
            found.append(
                Event(one.heartbeat, "loss", f"rank {one.rank} (pid {one.pid}) is gone", (one.rank,))
            )
    return found


# ---- both


def read_blocks(blocks: Iterable[memoryview | bytes]) -> list[RankMetrics]:
    """The metrics of the ranks that count, by rank, out of all blocks of one job."""
    return _newest(_read(blocks))


def _read(memories: Iterable[memoryview | bytes], with_other_hosts: bool = True) -> list[RankMetrics]:
    """with_other_hosts: somebody still passes their pages on."""
    found = []
    for memory in memories:
        with contextlib.suppress(ValueError):
            copy = rank_metrics.consistent_copy(memory)
            seen, is_elsewhere = Seen(), rank_metrics.is_of_another_host(copy)
            if is_elsewhere and not with_other_hosts:
                continue
            if not is_elsewhere:
                process = rank_metrics.identity_of(copy)
                seen = Seen(processes.lives(process), processes.is_stopped(process))
            found.append(rank_metrics.decode(copy, time.time(), seen))
    return found


def _is_up(one: RankMetrics) -> bool:
    return one.state not in ("ended", "lost")


def _newest(ranks: list[RankMetrics]) -> list[RankMetrics]:
    """Of the metrics that a rank number has had those that count."""
    newest = max((one.generation for one in ranks), default=0)
    chosen: dict[int, RankMetrics] = {}
    for one in ranks:
        if one.generation != newest and not _is_up(one):
            continue  # it has left, or was lost, before the others went on
        other = chosen.get(one.rank)
        if other is None or (one.generation, one.started) > (other.generation, other.started):
            chosen[one.rank] = one
    return [chosen[rank] for rank in sorted(chosen)]
