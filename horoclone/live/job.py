"""The jobs of this user on this host, and their ranks' pages. Reads only; works while a job hangs.

A job of horoclonerun is found by its launcher's process: the launcher has the pages of all ranks, those of other hosts
too. Of one that mpirun, srun or torchrun has started the ranks of this host are seen, in a directory of the user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from horoclone.live.page import Page


class NoJob(LookupError):
    """There is no such job, or none at all, or it is not clear which one; the text says what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job. time: Unix seconds. kind: "stall" (a rank waits for others for longer than
    HOROVOD_STALL_CHECK_TIME_SECONDS), "resumed" (it goes on), "loss" (a process ended otherwise than it should),
    "member" (a generation of an elastic job was formed), "end" (the job ends). text: one sentence. ranks: those that it
    is about."""

    time: float
    kind: str
    text: str
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job that runs, or has just ended. id: what find() takes; the launcher's pid for a job of horoclonerun.

    command: of the ranks. started: Unix seconds. launcher: the pid of horoclonerun, or None without it.
    """

    id: str
    command: str
    started: float
    launcher: int | None
    _read_pages: Callable[[], list[Page]] = dataclasses.field(repr=False, compare=False)
    _read_events: Callable[[], list[Event]] = dataclasses.field(repr=False, compare=False)

    def pages(self) -> list[Page]:
        """One page for each rank, by rank; of a rank number that several processes have had in an elastic job, the
        newest. Empty once the job is over. A launcher keeps the page of a rank that has ended for as long as it runs."""
        return self._read_pages()

    def events(self) -> list[Event]:
        """The last events, oldest first; of a job without our launcher those that the pages show now."""
        return self._read_events()


def jobs() -> list[Job]:
    """Every job of this user that has a process on this host, the newest last. Directories that dead jobs without a
    launcher have left are removed on the way."""
    return []


def find(name: str | None = None) -> Job:
    """The job with this id, or a beginning of it that only one has; None: the only one. NoJob, naming those there are."""
    found = jobs()
    matching = [one for one in found if name is None or one.id == name]
    if not matching and name is not None:
        matching = [one for one in found if one.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    shown = "".join(f"\n  {one.id}  {one.command}" for one in found)
    if not found:
        raise NoJob("no job of yours runs on this host")
    if not matching:
        raise NoJob(f"no job {name!r} runs on this host; there are:{shown}")
    raise NoJob(f"several jobs run on this host: name one of them{shown}")
