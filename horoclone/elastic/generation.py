"""Which generation of the job this process is in: who is new, whose state counts, and whether a sync is needed."""

from __future__ import annotations

from dataclasses import dataclass

from horoclone.runtime import joining_rank, topology
from horoclone.runtime.lifecycle import elastic_sets, member


@dataclass(frozen=True)
class Generation:
    """A generation of an elastic job. number: from 1. newcomers: the ranks that were not in the one before, all in the
    first.

    commit: the newest commit that every survivor holds, 0: none. commit_root: the rank whose state is taken by sync.
    skip_sync: nobody is new, and all survivors hold the same commit. dropped_sets: ids of the process sets of the
    generation before that had a member which is gone.
    """

    number: int
    rank: int
    size: int
    newcomers: tuple[int, ...]
    commit_root: int
    commit: int
    skip_sync: bool
    dropped_sets: tuple[int, ...]


ALONE = Generation(1, 0, 1, (0,), 0, 0, False, ())


def generation() -> Generation:
    """Returns the newest generation that holds this process; in a job that is not elastic number 1, in which everybody
    is new.

    NotInitialized before init().
    """
    joining_rank.allow_collectives()
    assignment = member.assignment
    if assignment is None:
        size = topology.size()
        return Generation(1, topology.rank(), size, tuple(range(size)), 0, 0, False, ())
    newcomers = tuple(rank for rank, before in enumerate(assignment.previous) if before < 0)
    return Generation(
        assignment.number,
        assignment.rank,
        assignment.size,
        newcomers,
        assignment.commit_root,
        assignment.commit,
        assignment.skip_sync,
        elastic_sets.dropped,
    )
