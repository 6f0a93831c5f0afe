"""Chooses the roster when the launcher is gone, with horoclonerun --survive-launcher.

Every member listens with a seat: a rendezvous server whose roster does not answer yet. A member that has lost its
roster asks all heirs of its last record (heritage.py). One of them may be the roster already; else the first heir that
can be reached takes over in its seat, once no member says any more that it hears another roster. Two rosters may exist
on the two sides of a cut network; votes (Roster.majority) ensure that only one of them forms generations.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from horoclone.bootstrap import heritage, wire
from horoclone.bootstrap.client import CONNECT_S
from horoclone.bootstrap.desk import MAX_TEXT_BYTES, Desk, Place, Told
from horoclone.bootstrap.membership import ABSENT, DECLINES, HEARS, WAITS, Identity, Membership
from horoclone.bootstrap.rendezvous import Server
from horoclone.bootstrap.roster import LOW_BITS, Limits, Roster

Key = TypeVar("Key", int, str)  # a rank, or an address

AGAIN_S = 0.2  # between two rounds of questions
SILENT_S = 10.0  # a roster that cannot be reached, and whose process has not ended, is looked for elsewhere after this


class Seat(Desk):
    """The place of a roster, empty until take(). Thread: as Desk."""

    def __init__(self, open_to_all: bool = False) -> None:
        super().__init__(Limits(1), secrets.token_bytes)
        self.heritage = heritage.packed
        self.state = HEARS  # why this is not the roster; guarded by mutex
        self._open_to_all = open_to_all  # of the rosters here
        self._first: int | None = None  # the generation with which it took over; None: it is not the roster

    def take(self, told: Told, is_whole: bool, absent: list[int]) -> None:
        """From now on this is the roster. absent: ranks at whose seats nobody listens: on this host they have ended."""
        known, now = heritage.unpacked(told.rest), time.monotonic()
        with self.mutex:
            self.roster = heritage.resumed(told, known, is_whole, secrets.token_bytes, now)
            self.roster.open_to_all = self._open_to_all
            for rank in absent:
                # Where each host has one process of the job, that nobody listens there says the same of it.
                if self._open_to_all or known.members[rank].host == known.members[told.rank].host:
                    self.roster.dead(known.members[rank].id, "its process has ended", now)
            self._first = self._formed = told.number
            self._is_new = True

    def found(self, limits: Limits, expected: tuple[str, ...]) -> None:
        """From now on this is the roster of a job that has not begun."""
        with self.mutex:
            self.roster = Roster(limits, secrets.token_bytes, self._open_to_all, expected=expected)
            self._first = 0
            self._is_new = True

    def give_up(self, state: int) -> None:
        """From now on this is not the roster; for the reason `state`."""
        with self.mutex:
            self._first, self.state, self._is_new = None, state, True

    @property
    def is_roster(self) -> bool:
        return self._first is not None

    def handle(self, connection: Any, kind: int, reader: wire.Reader) -> tuple[int, bytes] | None:
        """As Desk; who is not the roster says so."""
        with self.mutex:
            if self._first is None:
                return wire.ELSEWHERE, bytes([self.state])
            return super().handle(connection, kind, reader)

    def _form(self, id_: bytes, seen: int, commits: list[int], now: float) -> None:
        """Who has seen a generation after the one with which this roster began has another roster, which knows more."""
        first, record = self._first, self.roster.record
        assert first is not None
        has_another = record is None or (seen >> LOW_BITS != self.roster.term and record.number == first)
        if seen > first and has_another:
            self._first, self.state = None, DECLINES
        else:
            super()._form(id_, seen, commits, now)

    def _answer(self, place: Place) -> tuple[int, bytes] | None:
        if self._first is None:
            return wire.ELSEWHERE, bytes([self.state])
        return super()._answer(place)


class Succession:
    """Where this process finds its roster. Thread: any; a lock for the search, and another for what is known."""

    def __init__(
        self,
        who: Identity,
        bind_addresses: list[str],
        largest: int,
        say: Callable[[str], None],
        open_to_all: bool = False,
    ) -> None:
        self._seat = Seat(open_to_all)
        self._server = Server(who.secret, who.job, largest, bind_addresses, self._seat)
        self.who = who._replace(own=_fitting(self._server.addresses))  # its addresses are the roster's of now
        self.moves = 0  # so often has the roster changed
        self._say = say
        self._told: Told | None = None
        self._is_whole = False
        self._search, self._known = threading.Lock(), threading.Lock()
        self._anchor: Membership | None = (
            None  # from the search on there is a connection that shows that we live
        )

    def learn(self, told: Told) -> None:
        """The record of a new generation that holds this process."""
        with self._known:
            self._told, self._is_whole = told, False

    def connected(self) -> None:
        """All members of that generation are connected."""
        with self._known:
            self._is_whole = True

    def heard(self) -> None:
        """The roster has answered."""
        if self._seat.state == WAITS:
            self._seat.state = HEARS

    def find(self, moves: int, wait_s: float) -> bool:
        """Looks for another roster, so long. moves: when the caller lost its own. False: there is none yet."""
        deadline = time.monotonic() + wait_s
        with self._search:
            while self.moves == moves:
                if self._seat.state == HEARS:
                    self._seat.state = WAITS
                with self._known:
                    told, is_whole = self._told, self._is_whole
                if told is None or not told.rest:
                    found = self._look_around()
                else:
                    found = self._look(told, is_whole)
                if found:
                    self.moves += 1
                    self.heard()
                    return True
                if found is None or time.monotonic() >= deadline:
                    return False
                time.sleep(AGAIN_S)
        return True

    def _look_around(self) -> bool | None:
        """Before anybody has told this process who the others are. None: there is nothing to be done about that."""
        return None

    def hand_over(self) -> None:
        """This process is about to end."""

    def _look(self, told: Told, is_whole: bool) -> bool:
        known = heritage.unpacked(told.rest)
        heirs = known.heirs()
        links = {
            rank: Membership(
                self.who._replace(addresses=known.members[rank].addresses), CONNECT_S, shows=False
            )
            for rank in heirs
            if rank != told.rank
        }
        answers, found = ask_all(links)
        if found is not None:
            self._move(links[found], known.members[found].addresses)
            self._say(f"the launcher is gone; rank {found} of generation {told.number} is the roster now")
            return True
        if HEARS in answers.values():
            return False
        for rank in heirs:
            if rank == told.rank and self._seat.state != DECLINES:
                self._take(told, is_whole, [one for one in answers if answers[one] == ABSENT])
                return True
            if answers.get(rank) == WAITS:
                return False  # it comes before us
        return False

    def _take(self, told: Told, is_whole: bool, absent: list[int]) -> None:
        self._seat.take(told, is_whole, absent)
        self._server.ring()
        link = Membership(self.who._replace(addresses=self.who.own), CONNECT_S, shows=False)
        link.reach(CONNECT_S)
        self._move(link, self.who.own)
        self._say(f"the launcher is gone; this process is the roster now (generation {told.number})")

    def _move(self, link: Membership, addresses: tuple[str, ...]) -> None:
        before, self._anchor = self._anchor, link
        self.who = self.who._replace(addresses=addresses)
        if before is not None:
            before.close()

    def after_fork_in_child(self) -> None:
        """Closes what the child has inherited."""
        self._server.after_fork_in_child()
        if self._anchor is not None:
            self._anchor.close()


def ask_all(links: dict[Key, Membership]) -> tuple[dict[Key, int | None], Key | None]:
    """All at once, until one says that it is the roster: what each has said, by its key, and who is it."""
    answers: dict[Key, int | None] = {}
    said: queue.SimpleQueue[tuple[Key, int | None]] = queue.SimpleQueue()
    first = threading.Lock()  # taken by the connection that stays

    def ask(rank: Key) -> None:
        answer = links[rank].probe(CONNECT_S)
        if answer is None and not first.acquire(blocking=False):
            links[rank].close()
            answer = DECLINES
        said.put((rank, answer))

    for rank in links:
        threading.Thread(target=ask, args=(rank,), name="hc-succession", daemon=True).start()
    while len(answers) < len(links):
        rank, answer = said.get()
        answers[rank] = answer
        if answer is None:
            return answers, rank
    return answers, None


def _fitting(addresses: list[str]) -> tuple[str, ...]:
    """As many as a frame about them holds."""
    kept: list[str] = []
    for one in addresses:
        if len(",".join([*kept, one])) <= MAX_TEXT_BYTES:
            kept.append(one)
    return tuple(kept)
