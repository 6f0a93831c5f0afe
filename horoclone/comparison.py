"""Whether the ranks have the same values: hashes that travel in messages which are sent anyway, and what they say.

A check is a number of 32 bits. Each of its bits has two places in the message, of which a rank sets the one that says
which bit it has; where some rank has set both places, in whatever reduction, two ranks differ. A rank that contributes
nothing, or zeros, differs from nobody. Who differs is found out by an exchange of its own, in which each rank says the
hash of each value. Thread: any.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from horoclone.errors import Mismatch
from horoclone.runtime import logs
from horoclone.runtime.native_module import core
from horoclone.settings import COMPARE, comparison

WARN, REPAIR, ERROR, OFF = range(len(COMPARE))  # where ranks were told different things, the greatest counts
PLACES = 64  # of a check
SHARES = 10  # that the values are cut into, at most
SMALL_BYTES = 256 << 10  # that a share has at least
EVERYTHING = -1  # in place of a share
FIRST = 10  # of the steps that are numbered: in it everything is compared

log = logs.logger()


class Policy(NamedTuple):
    """What to do about a difference, and in how many steps everything is compared once; 0: in the first one only."""

    action: int = OFF
    steps: int = 0


def policy(environ: Mapping[str, str] = os.environ) -> Policy:
    """As HOROCLONE_COMPARE and HOROCLONE_COMPARE_STEPS say. ValueError for anything else than they may be."""
    return Policy(*comparison(environ))


def hashes(addresses: Sequence[int], nbytes: Sequence[int]) -> list[int]:
    """Of stretches of memory, 64 bits each."""
    return core().hash_memory(list(addresses), list(nbytes))  # type: ignore[no-any-return]


def joined(parts: Sequence[int]) -> int:
    """One hash of several, 32 bits."""
    return zlib.crc32(struct.pack(f"={len(parts)}Q", *parts))


def places(check: int) -> list[int]:
    """A check as it travels: 0 or 1 in each place."""
    bits = [check >> i & 1 for i in range(PLACES // 2)]
    return [*bits, *(1 - bit for bit in bits)]


def differ(received: Sequence[float]) -> bool:
    """Whether what a reduction has made of the places tells of two ranks with different checks."""
    half = PLACES // 2
    return any(a != 0 and b != 0 for a, b in zip(received[:half], received[half:], strict=True))


class Rotation:
    """When which share is compared. sizes: of the values in bytes, the same on all ranks; steps: as in Policy."""

    def __init__(self, sizes: Sequence[int], steps: int) -> None:
        whole = sum(sizes)
        shares = max(1, min(SHARES, steps, 1 + whole // SMALL_BYTES, len(sizes)))
        self.every = max(1, steps // shares) if steps else 0  # steps from one check to the next
        self.shares: list[list[int]] = [[] for _ in range(shares)]
        begun = 0
        for i, size in enumerate(sizes):
            self.shares[min(begun * shares // max(1, whole), shares - 1)].append(i)
            begun += size
        self._count = 0

    def at(self, number: int) -> int | None:
        """As next() for steps that are numbered, from 0: everything in the step FIRST, and a share at a time. None in
        the first two, and few before FIRST: scripts broadcast after their first batch, in which they may have made
        several."""
        if number == FIRST:
            return EVERYTHING
        if number < 2 or not self.every or number % self.every:
            return None
        return number // self.every % len(self.shares)

    def next(self) -> int | None:
        """The share that is compared in the step that comes; None: none is."""
        self._count += 1
        if not self.every or self._count % self.every:
            return None
        return (self._count // self.every - 1) % len(self.shares)


class Difference(NamedTuple):
    """Of one value. groups: ranks, as positions, that have the same, the largest group first."""

    column: int
    groups: list[list[int]]

    @property
    def root(self) -> int:
        """Whose value is right, by majority; where there is none, the first rank's."""
        return self.groups[0][0] if self.has_majority else min(min(group) for group in self.groups)

    @property
    def has_majority(self) -> bool:
        return 2 * len(self.groups[0]) > sum(len(group) for group in self.groups)


def differences(table: Sequence[Sequence[int]]) -> list[Difference]:
    """Of the hashes that each rank has of each value; an empty row is that of a rank that has taken no part."""
    present = [position for position, row in enumerate(table) if row]
    found = []
    for column in range(len(table[present[0]]) if present else 0):
        groups: dict[int, list[int]] = {}
        for position in present:
            groups.setdefault(table[position][column], []).append(position)
        if len(groups) > 1:
            found.append(Difference(column, sorted(groups.values(), key=lambda group: (-len(group), group))))
    return found


def described(found: Sequence[Difference], labels: Sequence[str], ranks: Sequence[int], when: str) -> str:
    """One text for all of them. labels: of the columns. ranks: as they are called."""
    first = found[0]
    named = [[ranks[position] for position in group] for group in first.groups]
    if first.has_majority:
        others = [rank for group in named[1:] for rank in group]
        who = f"on {_ranks(sorted(others))} (against {_ranks(named[0])})"
    else:
        shown = " and ".join(_ranks(group) for group in named[:4])
        who = f"between {shown}{', ...' if len(named) > 4 else ''}, and no majority says which is right"
    more = f"; {len(found) - 1} more differ, such as {labels[found[1].column]}" if found[1:] else ""
    return f"{when} the ranks do not have the same values: {labels[first.column]} differs {who}{more}."


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


CHOICE = "HOROCLONE_COMPARE=error makes this an error, repair mends it, off ends the comparison."
DRIFTED = (
    " A change of weights, gradients or state that is not the same on all ranks does so (a norm over other threads, "
    "OMP_NUM_THREADS, another kind of processor), and so does a fault of memory."
)


def tell(action: int, text: str, is_first: bool) -> None:
    """Raises Mismatch, or warns on the first rank. is_first: this is it."""
    if action == ERROR:
        raise Mismatch(text)
    if is_first:
        log.warning("%s", text)


class Comparison:
    """Of the values of one optimizer: what is compared when, and what is said. A binding derives one that knows the
    values."""

    _choice = CHOICE

    def __init__(self, own: Policy) -> None:
        self.own = own  # this rank's
        self.agreed = Policy()
        self._rotation = Rotation([], 0)
        self._share: int | None = None  # that this step compares
        self._differs = False  # some rank has said something else than another one
        self._steps = 0  # that were made
        self._when, self._why = "", DRIFTED

    def _begin(self, sizes: Sequence[int]) -> None:
        """The values are new; sizes: in bytes."""
        self._share, self._rotation = None, Rotation(sizes, self.agreed.steps)

    def _look(self, received: Sequence[float]) -> None:
        """At what the reduction has made of the places."""
        if self._share is not None and not self._differs and differ(received):
            last = self._steps - self._rotation.every * len(self._rotation.shares)
            since = f"after step {last}" if last > 0 else "before the first one"
            self._differs, self._why = True, DRIFTED
            self._when = f"after step {self._steps}, and not yet {since},"

    def _settle(
        self,
        labels: Sequence[str],
        rows: Sequence[Sequence[int]],
        ranks: Sequence[int],
        mine: int,
        mend: Callable[[list[Difference]], str],
    ) -> None:
        """Says what differs. rows: as differences() takes them. mine: the own one. mend: copies what is right,
        collectively, and says what it has done."""
        found, action = differences(rows), self.agreed.action
        is_first = mine == next(position for position, row in enumerate(rows) if row)
        if not found:
            text = f"{self._when} a comparison of the ranks' values failed, and they are the same: a fault of memory?"
            tell(action, text, is_first)
            return
        text = described(found, labels, ranks, self._when) + self._why
        if action == REPAIR:
            text += mend(found) if all(rows) else ABSENT
        else:
            text += f" {self._choice}"
        if action == WARN:
            self.agreed = Policy()  # it is said once
        tell(action, text, is_first)


ABSENT = " They cannot be repaired while a rank has joined, or cannot read its own."
MENDED = " They were given the value of the majority, or where there is none that of the first rank."
