"""The coordinator's part of the rendezvous server: takes frames from members and answers their long polls.

A connection first says which member it belongs to (JOIN). FORM waits for the next generation, NOTICE for news about it;
members repeat both about once a second, which also shows that they are alive. Thread: the server's, and the one that
started the members; one lock.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from horoclone.bootstrap import wire
from horoclone.membership.coordinator import Coordinator, JoinRejected
from horoclone.membership.records import (
    GENERATION_KEY,
    ID_BYTES,
    INCARNATION_BYTES,
    Evicted,
    Limits,
    Loss,
    Record,
    Stop,
    packed,
)

MAX_COMMITS = 2
MAX_TEXT_BYTES = 512
MAX_WAIT_MS = 5_000


class Session:
    """A connection that has joined, and what it waits for."""

    def __init__(self, id_: bytes) -> None:
        self.id = id_
        self.kind = 0  # FORM, NOTICE, or 0: nothing
        self.deadline = 0.0
        self.seq = 0


class MembershipService:
    """reply(connection, status, body) sends an answer; call it on the server's thread only."""

    def __init__(self, limits: Limits, draw: Callable[[int], bytes], open_to_all: bool = False) -> None:
        self.mutex = threading.RLock()
        self.coordinator = Coordinator(limits, draw, open_to_all)  # guarded by mutex
        # whoever started the members hears that something has changed
        self.tell: Callable[[], None] = lambda: None
        self._state: object = None
        self._sessions: dict[Any, Session] = {}
        self._is_new = True  # something has changed since everybody was looked at
        self._due = float("inf")  # when somebody has to be looked at again
        self._formed = 0
        self._gone_seen: set[bytes] = set()
        self.snapshot: Callable[[Coordinator], bytes] | None = None  # see packed()
        self._rest = (-1, b"")  # of the newest record: its number, what snapshot made of it

    # --- the server's thread

    def handle(self, connection: Any, kind: int, reader: wire.Reader) -> tuple[int, bytes] | None:
        """An answer to give at once; None: it comes by answers(). FrameError for what makes no sense."""
        now = time.monotonic()
        with self.mutex:
            self.coordinator.detector.runs(now)
            self._is_new |= kind != wire.NOTICE
            if kind == wire.JOIN:
                return self._join(connection, reader, now)
            session = self._sessions.get(connection)
            if session is None:
                raise wire.FrameError("a member's request before it has joined")
            self.coordinator.heard(session.id, now)
            if kind == wire.FORM:
                session.deadline = now + min(reader.number("I"), MAX_WAIT_MS) / 1000
                seen, is_ready, count = reader.number("Q"), bool(reader.number("B")), reader.number("B")
                if count > MAX_COMMITS:
                    raise wire.FrameError("too many commits")
                commits = [reader.number("Q") for _ in range(count)]
                session.kind = wire.FORM
                self._form(session.id, seen, commits, now, is_ready)
                return None
            if kind == wire.NOTICE:
                session.deadline = now + min(reader.number("I"), MAX_WAIT_MS) / 1000
                session.seq, commit = reader.number("Q"), reader.number("Q")
                session.kind = wire.NOTICE
                self._is_new |= self.coordinator.holds(session.id, commit)
                self._due = min(self._due, session.deadline)
                self._is_new |= self._answer(session) is not None
                return None
            if kind == wire.DEPART:
                at_once = bool(reader.number("B"))
                reason = reader.rest()[:MAX_TEXT_BYTES].decode(errors="replace")
                (self.coordinator.leave if at_once else self.coordinator.announce)(session.id, reason, now)
            elif kind == wire.FINISHED:
                self.coordinator.finished(session.id, now)
            elif kind == wire.STANDBY:
                self.coordinator.members[session.id].addresses = reader.rest()[:MAX_TEXT_BYTES].decode(
                    errors="replace"
                )
            elif kind == wire.SUSPECT:
                number, rank, how = reader.number("Q"), reader.number("I"), reader.number("B")
                if how not in list(Loss):
                    raise wire.FrameError("an unknown way to lose a rank")
                self.coordinator.suspect(number, rank, now, Loss(how))
                self._ask(self.coordinator.in_question(), now)
            return wire.OK, b""

    def _ask(self, ids: set[bytes], now: float) -> None:
        """Ends their polls: who lives begins another one at once."""
        for session in self._sessions.values():
            if session.id in ids:
                session.deadline = min(session.deadline, now)

    def _join(self, connection: Any, reader: wire.Reader, now: float) -> tuple[int, bytes]:
        id_, incarnation = reader.take(ID_BYTES), reader.take(INCARNATION_BYTES)
        slot = reader.number("I")
        host, _, build = reader.rest()[:MAX_TEXT_BYTES].decode(errors="replace").partition("\0")
        if connection in self._sessions:
            raise wire.FrameError("a connection joins once")
        try:
            index = self.coordinator.join(id_, incarnation, host, slot, now, build)
        except JoinRejected as refusal:
            return wire.REJECTED, str(refusal).encode("utf-8", "backslashreplace")
        self._sessions[connection] = Session(id_)
        return wire.OK, struct.pack("<I", index)

    def _form(self, id_: bytes, seen: int, commits: list[int], now: float, is_ready: bool) -> None:
        self.coordinator.form(id_, seen, commits, now, is_ready)

    def gathered(self, key: str) -> None:
        """Every rank has come to this gather."""
        with self.mutex:
            record = self.coordinator.record
            if record is not None and key == f"{GENERATION_KEY}{record.number}":
                self.coordinator.established(record.number)

    def dropped(self, connection: Any) -> None:
        """The connection is gone; who waited on it waits no more until it asks again."""
        with self.mutex:
            session = self._sessions.pop(connection, None)
            if session is not None:
                self._is_new = True
                if session.kind == wire.FORM:
                    self.coordinator.withdraw(session.id)
                self.coordinator.disconnected(session.id, time.monotonic())

    def answers(self, now: float) -> list[tuple[Any, int, bytes]]:
        """Whom to tell what: [(connection, status, body)]."""
        with self.mutex:
            self.coordinator.detector.runs(now)
            if not self._is_new and now < self._due:
                return []
            self._is_new = False
            self.coordinator.step(now)
            record = self.coordinator.record
            state = (record and record.number, self.coordinator.stopped, bool(self.coordinator.fenced))
            if state != self._state:
                self._state = state
                self.tell()
            found = []
            for connection, session in self._sessions.items():
                answer = self._answer(session) if session.kind else None
                if answer is None and session.kind and now >= session.deadline:
                    reason = self.coordinator.reason if session.kind == wire.FORM else ""
                    answer = wire.NOT_YET, reason.encode("utf-8", "backslashreplace")[:MAX_TEXT_BYTES]
                if answer is not None:
                    session.kind = 0
                    found.append((connection, *answer))
            waits = [session.deadline for session in self._sessions.values() if session.kind]
            self._due = min([self.coordinator.next_s(), *waits])
            return found

    def _answer(self, session: Session) -> tuple[int, bytes] | None:
        if session.kind == wire.NOTICE:
            if self.coordinator.stopped is not None:
                return _end(wire.STOP, self.coordinator.stopped)
            seq, wanted, update = self.coordinator.notice()
            return (wire.OK, struct.pack("<QQB", seq, wanted, update)) if seq > session.seq else None
        answer = self.coordinator.answer(session.id)
        if isinstance(answer, Record):
            return wire.OK, packed(answer, session.id, self._rest_of(answer))
        if isinstance(answer, Stop):
            return _end(wire.STOP, answer)
        return _end(wire.EVICTED, answer) if isinstance(answer, Evicted) else None

    def _rest_of(self, record: Record) -> bytes:
        if self.snapshot is not None and self._rest[0] != record.number:
            self._rest = record.number, self.snapshot(self.coordinator)
        return self._rest[1]

    def next_s(self) -> float:
        """When answers() has something to say, in time.monotonic()."""
        with self.mutex:
            return 0.0 if self._is_new else self._due

    def look(self) -> None:
        """Called after the coordinator has changed: checks every waiting member. Server.wake() then wakes its
        thread."""
        with self.mutex:
            self._is_new = True

    def may_gather(self, connection: Any, key: str, rank: int) -> str:
        """Why this rank may not gather under this key; empty when it may."""
        with self.mutex:
            record, session = self.coordinator.record, self._sessions.get(connection)
            if record is None or key.split(".")[0] != f"{GENERATION_KEY}{record.number}":
                newest = 0 if record is None else record.number
                return f"the ranks gather in generation {newest} now; {key} is another"
            if session is None or rank >= len(record.members) or record.members[rank] != session.id:
                return f"this process is not rank {rank} of generation {record.number}"
            return ""

    def over(self) -> str:
        """The prefix of keys that ended with the last generation, once for each; empty: none did."""
        with self.mutex:
            record = self.coordinator.record
            if record is None or record.number == self._formed:
                return ""
            before, self._formed = self._formed, record.number
            return f"{GENERATION_KEY}{before}" if before else ""

    def newly_gone(self) -> list[tuple[int, str]]:
        """Numbers of members, and how each has ended, left or been given up since the last call."""
        with self.mutex:
            found = [
                one for one in self.coordinator.members.values() if one.gone and one.id not in self._gone_seen
            ]
            self._gone_seen.update(one.id for one in found)
            return [(one.index, f"{one.host}, slot {one.slot}: {one.gone}") for one in found]


def _end(status: int, answer: Evicted | Stop) -> tuple[int, bytes]:
    return status, struct.pack("<i", answer.code) + answer.text.encode("utf-8", "backslashreplace")[-4096:]
