"""Chooses the coordinator when the launcher is gone, with horoclonerun --survive-launcher.

Every member listens with a standby: a rendezvous server whose coordinator does not answer yet. A member that has lost
its coordinator asks all failover candidates of its last record (snapshot.py). One of them may be the coordinator
already; else the first candidate that can be reached takes over in its standby, once no member says any more that it
hears another coordinator. Two coordinators may exist on the two sides of a cut network; votes (Coordinator.majority)
ensure that only one of them forms generations.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from horoclone.bootstrap import wire
from horoclone.bootstrap.client import CONNECT_S
from horoclone.bootstrap.rendezvous import Server
from horoclone.membership import snapshot
from horoclone.membership.client import ABSENT, DECLINES, HEARS, WAITS, Identity, MembershipClient
from horoclone.membership.coordinator import Coordinator
from horoclone.membership.records import LOW_BITS, Assignment, Limits
from horoclone.membership.service import MAX_TEXT_BYTES, MembershipService, Session
from horoclone.membership.timeouts import ASK_AGAIN_S

Key = TypeVar("Key", int, str)  # a rank, or an address


class StandbyService(MembershipService):
    """The place of a coordinator, empty until take(). Thread: as MembershipService."""

    def __init__(self, open_to_all: bool = False) -> None:
        super().__init__(Limits(1), secrets.token_bytes)
        self.snapshot = snapshot.packed
        self.state = HEARS  # why this is not the coordinator; guarded by mutex
        self._open_to_all = open_to_all  # of the coordinators here
        # the generation with which it took over; None: it is not the coordinator
        self._first: int | None = None

    def take(self, assignment: Assignment, is_whole: bool, absent: list[int]) -> None:
        """From now on this is the coordinator. absent: ranks at whose standbys nobody listens: on this host they have
        ended."""
        known, now = snapshot.unpacked(assignment.rest), time.monotonic()
        with self.mutex:
            self.coordinator = snapshot.resumed(assignment, known, is_whole, secrets.token_bytes, now)
            self.coordinator.open_to_all = self._open_to_all
            for rank in absent:
                # Where each host has one process of the job, that nobody listens there says the same of it.
                if self._open_to_all or known.members[rank].host == known.members[assignment.rank].host:
                    self.coordinator.dead(known.members[rank].id, "its process has ended", now)
            self._first = self._formed = assignment.number
            self._is_new = True

    def found(self, limits: Limits, expected: tuple[str, ...]) -> None:
        """From now on this is the coordinator of a job that has not begun."""
        with self.mutex:
            self.coordinator = Coordinator(limits, secrets.token_bytes, self._open_to_all, expected=expected)
            self._first = 0
            self._is_new = True

    def give_up(self, state: int) -> None:
        """From now on this is not the coordinator; for the reason `state`."""
        with self.mutex:
            self._first, self.state, self._is_new = None, state, True

    @property
    def is_coordinator(self) -> bool:
        return self._first is not None

    def handle(self, connection: Any, kind: int, reader: wire.Reader) -> tuple[int, bytes] | None:
        """As MembershipService; who is not the coordinator says so."""
        with self.mutex:
            if self._first is None:
                return wire.NOT_COORDINATOR, bytes([self.state])
            return super().handle(connection, kind, reader)

    def _form(self, id_: bytes, seen: int, commits: list[int], now: float, is_ready: bool) -> None:
        """Who has seen a generation after the one with which this coordinator began has another coordinator, which
        knows more."""
        first, record = self._first, self.coordinator.record
        assert first is not None
        has_another = record is None or (seen >> LOW_BITS != self.coordinator.term and record.number == first)
        if seen > first and has_another:
            self._first, self.state = None, DECLINES
        else:
            super()._form(id_, seen, commits, now, is_ready)

    def _answer(self, session: Session) -> tuple[int, bytes] | None:
        if self._first is None:
            return wire.NOT_COORDINATOR, bytes([self.state])
        return super()._answer(session)


class Failover:
    """Where this process finds its coordinator. Thread: any; a lock for the search, and another for what is known."""

    def __init__(
        self,
        who: Identity,
        bind_addresses: list[str],
        largest: int,
        say: Callable[[str], None],
        open_to_all: bool = False,
    ) -> None:
        self._standby = StandbyService(open_to_all)
        self._server = Server(who.secret, who.job, largest, bind_addresses, self._standby)
        # its addresses are the coordinator's of now
        self.who = who._replace(own=_fitting(self._server.addresses))
        self.moves = 0  # how often the coordinator has changed
        self._say = say
        self._assignment: Assignment | None = None
        self._is_whole = False
        self._search, self._known = threading.Lock(), threading.Lock()
        # from the search on there is a connection that shows that we live
        self._anchor: MembershipClient | None = None

    def learn(self, assignment: Assignment) -> None:
        """The record of a new generation that holds this process."""
        with self._known:
            self._assignment, self._is_whole = assignment, False

    def connected(self) -> None:
        """All members of that generation are connected."""
        with self._known:
            self._is_whole = True

    def heard(self) -> None:
        """The coordinator has answered."""
        if self._standby.state == WAITS:
            self._standby.state = HEARS

    def find(self, moves: int, wait_s: float) -> bool:
        """Looks for another coordinator, so long. moves: when the caller lost its own. False: there is none yet."""
        deadline = time.monotonic() + wait_s
        with self._search:
            while self.moves == moves:
                if self._standby.state == HEARS:
                    self._standby.state = WAITS
                with self._known:
                    assignment, is_whole = self._assignment, self._is_whole
                if assignment is None or not assignment.rest:
                    found = self._look_around()
                else:
                    found = self._look(assignment, is_whole)
                if found:
                    self.moves += 1
                    self.heard()
                    return True
                if found is None or time.monotonic() >= deadline:
                    return False
                time.sleep(ASK_AGAIN_S)
        return True

    def _look_around(self) -> bool | None:
        """Before anybody has told this process who the others are. None: there is nothing to be done about that."""
        return None

    def hand_over(self) -> None:
        """This process is about to end."""

    def _look(self, assignment: Assignment, is_whole: bool) -> bool:
        known = snapshot.unpacked(assignment.rest)
        failover_candidates = known.failover_candidates()
        links = {
            rank: MembershipClient(
                self.who._replace(addresses=known.members[rank].addresses), CONNECT_S, shows=False
            )
            for rank in failover_candidates
            if rank != assignment.rank
        }
        answers, found = ask_all(links)
        if found is not None:
            self._move(links[found], known.members[found].addresses)
            self._say(
                f"the launcher is gone; rank {found} of generation {assignment.number} is the membership "
                "coordinator now"
            )
            return True
        if HEARS in answers.values():
            return False
        for rank in failover_candidates:
            if rank == assignment.rank and self._standby.state != DECLINES:
                self._take(assignment, is_whole, [one for one in answers if answers[one] == ABSENT])
                return True
            if answers.get(rank) == WAITS:
                return False  # it comes before us
        return False

    def _take(self, assignment: Assignment, is_whole: bool, absent: list[int]) -> None:
        self._standby.take(assignment, is_whole, absent)
        self._server.wake()
        link = MembershipClient(self.who._replace(addresses=self.who.own), CONNECT_S, shows=False)
        link.reach(CONNECT_S)
        self._move(link, self.who.own)
        self._say(
            f"the launcher is gone; this process is the membership coordinator now (generation {assignment.number})"
        )

    def _move(self, link: MembershipClient, addresses: tuple[str, ...]) -> None:
        before, self._anchor = self._anchor, link
        self.who = self.who._replace(addresses=addresses)
        if before is not None:
            before.close()

    def after_fork_in_child(self) -> None:
        """Closes what the child has inherited."""
        self._server.after_fork_in_child()
        if self._anchor is not None:
            self._anchor.close()


def ask_all(links: dict[Key, MembershipClient]) -> tuple[dict[Key, int | None], Key | None]:
    """All at once, until one says that it is the coordinator: what each has said, by its key, and who is it."""
    answers: dict[Key, int | None] = {}
    said: queue.SimpleQueue[tuple[Key, int | None]] = queue.SimpleQueue()
    first = threading.Lock()  # taken by the connection that stays

    def ask(rank: Key) -> None:
        # also where asking fails in a way of its own: somebody waits for each answer
        answer: int | None = DECLINES
        try:
            answer = links[rank].probe()
            if answer is None and not first.acquire(blocking=False):
                answer = DECLINES
                links[rank].close()
        finally:
            said.put((rank, answer))

    for rank in links:
        threading.Thread(target=ask, args=(rank,), name="hc-failover", daemon=True).start()
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
