"""This process as a member of an elastic job, for the code that trains: what it holds, what it hears, how it leaves."""

from __future__ import annotations

from collections.abc import Callable

from horoclone.runtime.lifecycle import member


def is_elastic() -> bool:
    """Whether this process belongs to an elastic job: its launcher sets HOROCLONE_ELASTIC=1 and HOROCLONE_MEMBER."""
    return member.is_elastic()


def host() -> str:
    """The launcher's name of the host that this process is on; empty outside of an elastic job."""
    return member.host()


def offer_commits(commits: tuple[int, ...]) -> None:
    """This process holds these commits, ascending, at most two; the next generation begins at one that all hold.

    ValueError for numbers that are not positive and ascending.
    """
    if len(commits) > 2 or any(one <= 0 for one in commits) or list(commits) != sorted(set(commits)):
        raise ValueError(f"offer_commits({commits}): at most two positive numbers, ascending")
    member.offered = tuple(commits)


def start_notices(listener: Callable[[int, int], None]) -> None:
    """listener(timestamp, update) is called on the thread hc-membership when another generation is wanted.

    timestamp: its number, which only rises; update: 1 somebody leaves, 2 somebody comes, 3 both. A notice that stands
    already is told at once. It is never called in a job that is not elastic.
    """
    member.listen(listener)


def leave_requested() -> str | None:
    """Why this process should leave at its next commit ("SIGTERM"); None: it need not."""
    return member.leave_requested()


def code_of_leaving() -> int:
    """With which a process ends that leaves as planned: 0, or 75 where no launcher of ours knows of it."""
    return member.code_of_leaving(is_elastic())


def leave(reason: str) -> None:
    """This process leaves the job, as planned: call shutdown() and exit with code_of_leaving() after it."""
    member.leave(reason)


def told_by_all(words: tuple[int, ...], name: str) -> list[list[int]]:
    """What each rank says, by rank. The name shows in reports of stalled ranks."""
    import numpy as np

    from horoclone import arrays

    everybody: list[list[int]] = arrays.allgather(np.array([words], np.int64), name).tolist()
    return everybody
