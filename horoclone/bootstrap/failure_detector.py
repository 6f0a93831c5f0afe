"""Who can still be heard: the ranks of a rendezvous server (by number), and the members of an elastic job (by name).

It knows when somebody was heard last, how many connections each has, and whom others have lost, and it has the
limits after which silence counts. Pure: times come in as arguments. failures.py and membership/coordinator.py ask it.

Whom others cannot hear is asked, by its own connection: its silence is too long after ANSWER_S without an answer. That
time does not run while this process itself does not (runs()).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

RECONNECT_S = 0.5  # for a rank to make a broken connection again
SUSPECT_TIMEOUT_S = 5.0  # for a member that another one has lost to be heard again
SILENT_TIMEOUT_S = 2.0  # for one that is silent to others as well; nobody is who was heard later
ANSWER_S = 0.2  # for it to answer, once it was asked
POLL_S = 1.5  # each member says something more often
LOOK_EVERY_S = 0.1  # between two looks while somebody is asked
HEARTBEAT_TIMEOUT_S = 30.0  # for a member that nobody has lost; it may compute. It says something each second

Who = TypeVar("Who", int, bytes)


class FailureDetector(Generic[Who]):
    """Thread: one at a time."""

    def __init__(self) -> None:
        self._heard_s: dict[Who, float] = {}
        self._connections: Counter[Who] = Counter()
        self._broken_s: dict[Who, float] = {}  # since when somebody has no connection any more
        self._suspected: set[Who] = set()
        self._asked_s: dict[Who, float] = {}  # since when, by this process's own time, it has not answered
        self._ran_s = float("inf")

    def runs(self, now: float) -> None:
        """This process is not stopped, and has the processor: before what has come in meanwhile is looked at. Where it
        had not, the others are given their time anew."""
        pause_s, self._ran_s = now - self._ran_s, now
        if pause_s > ANSWER_S:
            self._asked_s = dict.fromkeys(self._asked_s, now)
        if pause_s > POLL_S:
            self._heard_s = {who: heard_s + pause_s for who, heard_s in self._heard_s.items()}

    def heard(self, who: Who, now: float) -> None:
        self._heard_s[who] = now
        self._asked_s.pop(who, None)

    def connected(self, who: Who, now: float) -> None:
        """One more connection; a new one may come before the end of the old one is seen."""
        self._connections[who] += 1
        self._broken_s.pop(who, None)
        self.heard(who, now)

    def disconnected(self, who: Who, now: float, is_planned: bool = False) -> None:
        """A connection has ended. is_planned: its owner has said so, and gone() does not tell of it."""
        self._connections[who] -= 1
        if not self._connections[who] and not is_planned:
            self._broken_s[who] = now

    def suspect(self, who: Who) -> None:
        """Somebody else has lost it."""
        self._suspected.add(who)

    def ask(self, who: Who, now: float) -> None:
        """It is silent to somebody else, and is asked now whether it is there."""
        self._asked_s.setdefault(who, now)

    def is_asked(self, who: Who) -> bool:
        return who in self._asked_s

    def ask_nobody(self) -> None:
        self._asked_s.clear()

    def look_s(self) -> float:
        """When runs() is to be called again, as somebody is asked."""
        return self._ran_s + LOOK_EVERY_S if self._asked_s else float("inf")

    def trust(self, who: Who) -> None:
        """It has met the others again."""
        self._suspected.discard(who)

    def is_connected(self, who: Who) -> bool:
        return self._connections[who] > 0

    def is_suspected(self, who: Who) -> bool:
        return who in self._suspected

    def is_lost(self, who: Who) -> bool:
        """Nobody can hear it: others have lost it, and it has no connection here."""
        return self.is_suspected(who) and not self.is_connected(who)

    def silent_s(self, who: Who, is_suspected: bool, beside: Iterable[Who] = ()) -> float:
        """When its silence will have been too long. is_suspected: it, or another one that fails with it, is. beside:
        those who are silent with it."""
        heard_s = self._heard_s[who]
        until_s = heard_s + (SUSPECT_TIMEOUT_S if is_suspected else HEARTBEAT_TIMEOUT_S)
        for one in beside:
            if one in self._asked_s:
                until_s = min(until_s, max(heard_s + SILENT_TIMEOUT_S, self._asked_s[one] + ANSWER_S))
        return until_s

    def lost(self, who: Who) -> float | None:
        """Somebody knows that it does not come back. Since when it has no connection, where it was still waited for."""
        return self._broken_s.pop(who, None)

    def in_doubt_since_s(self) -> float:
        """The earliest of the broken connections that may still be made again; infinite where there is none."""
        return min(self._broken_s.values(), default=float("inf"))

    def gone(self, now: float) -> dict[Who, float]:
        """Who has not come back since its connection broke, and since when; each is told once."""
        found = {who: since for who, since in self._broken_s.items() if now >= since + RECONNECT_S}
        for who in found:
            del self._broken_s[who]
        return found

    def next_s(self) -> float:
        """When gone() will have something to tell."""
        return self.in_doubt_since_s() + RECONNECT_S
