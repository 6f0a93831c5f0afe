"""What a step's name says of the optimizer and of the variables whose gradients are sent. Without it those of different
optimizers, or of different variables on ranks that lack different ones, would be added up where they are alike in shape
and number.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from horoclone.runtime import current
from horoclone.runtime.lifecycle import member

MAX_NUMBERS = 40  # characters that list variables


def named_by(sent: Sequence[int], count: int) -> str:
    """The end of a name: "" where the gradients of all `count` variables are sent, else the numbers of those that are,
    which are given in rising order."""
    if len(sent) == count or not sent:
        return ""
    cuts = [0, *(i for i in range(1, len(sent)) if sent[i] != sent[i - 1] + 1), len(sent)]
    runs = [(sent[a], sent[b - 1]) for a, b in pairwise(cuts)]
    text = "_".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    if len(text) > MAX_NUMBERS:
        text = f"{text[:MAX_NUMBERS]}.{zlib.crc32(text.encode()):08x}"
    return f".variables.{text}.of.{count}"


class Turn:
    """Tells an optimizer from others of its kind, alike on every rank: where ranks begin with different ones, their
    gradients must not be added up because they are alike in shape.

    When it first reduces something, it counts those that were made before it and have not begun. These counts, from
    the first one that is not 0 on, say in which order all have begun; names have a checksum of them. The mere order in
    which they were made would differ where one rank makes some more for itself later. From the second generation of an
    elastic job on nobody is told apart: what a newcomer has made by then cannot be compared with what others have.
    """

    _made = itertools.count()
    _there: ClassVar[dict[Hashable, set[int]]] = {}  # made in this life
    # After how many joins, those that have begun since, and the checksum.
    _begun: ClassVar[dict[Hashable, tuple[int, set[int], int]]] = {}
    _life: ClassVar[Any] = None  # None: before the first one

    def __init__(self, kind: Hashable) -> None:
        """kind: what is equal for optimizers that could be taken for each other."""
        self._kind, self._number = kind, next(self._made)
        self._begun_in: Any = None
        self._joins = 0
        self._name = ""

    def announce(self) -> None:
        """From now on later ones count it: the script has made it, and it is no copy."""
        self._see(current.runtime)
        self._there.setdefault(self._kind, set()).add(self._number)

    def withdraw(self) -> None:
        """It was a copy."""
        self._there.get(self._kind, set()).discard(self._number)

    def name(self, begins: bool = True, joins: int = 0) -> str:
        """The end of a name: "" as long as optimizers begin in the order in which they were made. begins: False for
        what it would be now. joins: given where all begin anew after hvd.join(), before which ranks may have lacked
        the first batch."""
        life = current.runtime
        if member.number() > 1:
            return ""
        if self._begun_in is life and self._joins == joins:
            return self._name
        self._see(life)
        since, begun, order = self._begun.get(self._kind, (joins, set[int](), 0))
        if since != joins:
            begun, order = set(), 0
        waiting = self._there.get(self._kind, set()) - begun
        count = sum(number < self._number for number in waiting)
        order = zlib.crc32(f"{len(begun)}.{count}".encode(), order) if order or count else 0
        name = f".order.{len(begun) + 1}.{order:08x}" if order else ""
        if begins:
            self._begun[self._kind] = joins, begun | {self._number}, order
            self._name, self._begun_in, self._joins = name, life, joins
        return name

    @classmethod
    def _see(cls, life: Any) -> None:
        if life is not None and life is not cls._life:
            if cls._life is not None:
                cls._there.clear()
            cls._begun.clear()
            cls._life = life
