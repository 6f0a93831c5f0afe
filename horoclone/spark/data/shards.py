"""Which rows a rank reads in an epoch. Pure: numbers go in, ranges of row groups come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Range(NamedTuple):
    """Rows [start, stop) of a row group."""

    group: int
    start: int
    stop: int


def rows_per_rank(rows: int, size: int) -> int:
    """How many rows every rank is given in an epoch: the last of some ranks is one that they had already."""
    return -(-rows // size)


def order_of(groups: int, seed: int | None, epoch: int) -> list[int]:
    """In which the row groups follow each other in this epoch, alike on all ranks. seed None: as they are stored."""
    if seed is None:
        return list(range(groups))
    return [int(one) for one in np.random.default_rng([seed, epoch]).permutation(groups)]


def shard(groups: Sequence[int], order: Sequence[int], rank: int, size: int) -> list[Range]:
    """This rank's part: a range of the rows of all groups, in this order. groups: their numbers of rows.

    Each row belongs to one rank, and the ranks' parts differ by one row at most; with fewer rows than ranks some rows
    belong to several, so that nobody has none.
    """
    rows = sum(groups)
    first = rank * rows // size
    last = max((rank + 1) * rows // size, first + 1)
    found, begin = [], 0
    for group in order:
        end = begin + groups[group]
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            found.append(Range(group, start - begin, stop - begin))
        begin = end
    return found


def chunks(ranges: Sequence[Range], most_rows: int) -> list[list[Range]]:
    """Ranges that are read together, so that their rows can be mixed: at most so many rows, or one range."""
    found: list[list[Range]] = []
    rows = 0
    for one in ranges:
        count = one.stop - one.start
        if found and rows + count <= most_rows:
            found[-1].append(one)
            rows += count
        else:
            found.append([one])
            rows = count
    return found
