"""The roster's part of the rendezvous server: takes frames from members and answers their long polls.

A connection first says which member it belongs to (JOIN). FORM waits for the next generation, NOTICE for news about it;
members repeat both about once a second, which also shows that they are alive. Thread: the server's, and the one that
started the members; one lock.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horoclone.bootstrap import wire
from horoclone.bootstrap.roster import ID_BYTES, NONCE_BYTES, Out, Record, Refusal, Roster, Stop

if TYPE_CHECKING:
    from horoclone.bootstrap.roster import Limits, Member

INCARNATION_BYTES = 8
MAX_COMMITS = 2
MAX_TEXT_BYTES = 512
MAX_WAIT_MS = 5_000
KINDS = (wire.JOIN, wire.FORM, wire.NOTICE, wire.DEPART, wire.SUSPECT, wire.STANDBY)
GENERATION_KEY = "g/"  # ranks of a generation gather under this and its number

_HEAD = struct.Struct(f"<QIIQIB{NONCE_BYTES}s")


def packed(record: Record, id_: bytes, rest: bytes = b"") -> bytes:
    """What one member is told: [number, size, rank, commit, root, skip_sync, nonce][index, previous] by rank, the rest.

    rest: what a member needs to be the roster itself (succession.py); empty where none ever is.
    """
    size = len(record.members)
    head = _HEAD.pack(
        record.number,
        size,
        record.members.index(id_),
        record.commit,
        record.commit_root,
        record.skip_sync,
        record.nonce,
    )
    pairs = (number for pair in zip(record.indexes, record.previous, strict=True) for number in pair)
    return head + struct.pack(f"<{2 * size}i", *pairs) + rest


class Told:
    """A generation as one of its members knows it; previous: the rank of each rank in the generation before, or -1."""

    def __init__(self, body: bytes) -> None:
        try:
            number, size, rank, commit, root, skips, nonce = _HEAD.unpack_from(body)
            numbers = struct.unpack_from(f"<{2 * size}i", body, _HEAD.size)
        except struct.error as error:
            raise ConnectionError(f"a record of a generation that makes no sense: {error}") from error
        self.number, self.size, self.rank = int(number), int(size), int(rank)
        self.commit, self.commit_root, self.skip_sync = int(commit), int(root), bool(skips)
        self.nonce = bytes(nonce)
        self.rest = body[_HEAD.size + 8 * self.size :]
        self.indexes, self.previous = numbers[::2], numbers[1::2]


class Place:
    """A connection that has joined, and what it waits for."""

    def __init__(self, id_: bytes) -> None:
        self.id = id_
        self.kind = 0  # FORM, NOTICE, or 0: nothing
        self.deadline = 0.0
        self.seq = 0


class Desk:
    """reply(connection, status, body) sends an answer; call it on the server's thread only."""

    def __init__(self, limits: Limits, draw: Callable[[int], bytes], open_to_all: bool = False) -> None:
        self.mutex = threading.RLock()
        self.roster = Roster(limits, draw, open_to_all)  # guarded by mutex
        self.tell: Callable[[], None] = lambda: (
            None
        )  # whoever started the members hears that something has changed
        self._state: object = None
        self._places: dict[Any, Place] = {}
        self._is_new = True  # something has changed since everybody was looked at
        self._due = float("inf")  # when somebody has to be looked at again
        self._formed = 0
        self._gone_seen: set[bytes] = set()
        self.heritage: Callable[[Roster], bytes] | None = None  # see packed()
        self._rest = (-1, b"")  # of the newest record: its number, what heritage made of it

    # --- the server's thread

    def handle(self, connection: Any, kind: int, reader: wire.Reader) -> tuple[int, bytes] | None:
        """An answer to give at once; None: it comes by answers(). FrameError for what makes no sense."""
        now = time.monotonic()
        with self.mutex:
            self._is_new |= kind != wire.NOTICE
            if kind == wire.JOIN:
                return self._join(connection, reader, now)
            place = self._places.get(connection)
            if place is None:
                raise wire.FrameError("a member's request before it has joined")
            self.roster.heard(place.id, now)
            if kind == wire.FORM:
                place.deadline = now + min(reader.number("I"), MAX_WAIT_MS) / 1000
                seen, count = reader.number("Q"), reader.number("B")
                if count > MAX_COMMITS:
                    raise wire.FrameError("too many commits")
                commits = [reader.number("Q") for _ in range(count)]
                place.kind = wire.FORM
                self._form(place.id, seen, commits, now)
                return None
            if kind == wire.NOTICE:
                place.deadline = now + min(reader.number("I"), MAX_WAIT_MS) / 1000
                place.seq, commit = reader.number("Q"), reader.number("Q")
                place.kind = wire.NOTICE
                self._is_new |= self.roster.holds(place.id, commit)
                self._due = min(self._due, place.deadline)
                self._is_new |= self._answer(place) is not None
                return None
            if kind == wire.DEPART:
                at_once = bool(reader.number("B"))
                reason = reader.rest()[:MAX_TEXT_BYTES].decode(errors="replace")
                (self.roster.leave if at_once else self.roster.announce)(place.id, reason, now)
            elif kind == wire.STANDBY:
                self.roster.members[place.id].addresses = reader.rest()[:MAX_TEXT_BYTES].decode(
                    errors="replace"
                )
            elif kind == wire.SUSPECT:
                self.roster.suspect(reader.number("Q"), reader.number("I"), now)
            return wire.OK, b""

    def _join(self, connection: Any, reader: wire.Reader, now: float) -> tuple[int, bytes]:
        id_, incarnation = reader.take(ID_BYTES), reader.take(INCARNATION_BYTES)
        slot = reader.number("I")
        host, _, build = reader.rest()[:MAX_TEXT_BYTES].decode(errors="replace").partition("\0")
        if connection in self._places:
            raise wire.FrameError("a connection joins once")
        try:
            index = self.roster.join(id_, incarnation, host, slot, now, build)
        except Refusal as refusal:
            return wire.REJECTED, str(refusal).encode("utf-8", "backslashreplace")
        self._places[connection] = Place(id_)
        return wire.OK, struct.pack("<I", index)

    def _form(self, id_: bytes, seen: int, commits: list[int], now: float) -> None:
        self.roster.form(id_, seen, commits, now)

    def gathered(self, key: str) -> None:
        """Every rank has come to this gather."""
        with self.mutex:
            record = self.roster.record
            if record is not None and key == f"{GENERATION_KEY}{record.number}":
                self.roster.established(record.number)

    def dropped(self, connection: Any) -> None:
        """The connection is gone; who waited on it waits no more until it asks again."""
        with self.mutex:
            place = self._places.pop(connection, None)
            if place is not None:
                self._is_new = True
                if place.kind == wire.FORM:
                    self.roster.withdraw(place.id)
                self.roster.disconnected(place.id, time.monotonic())

    def answers(self, now: float) -> list[tuple[Any, int, bytes]]:
        """Whom to tell what: [(connection, status, body)]."""
        with self.mutex:
            if not self._is_new and now < self._due:
                return []
            self._is_new = False
            self.roster.step(now)
            record = self.roster.record
            state = (record and record.number, self.roster.stopped, bool(self.roster.given_up))
            if state != self._state:
                self._state = state
                self.tell()
            found = []
            for connection, place in self._places.items():
                answer = self._answer(place) if place.kind else None
                if answer is None and place.kind and now >= place.deadline:
                    answer = wire.NOT_YET, b""
                if answer is not None:
                    place.kind = 0
                    found.append((connection, *answer))
            waits = [place.deadline for place in self._places.values() if place.kind]
            self._due = min([self.roster.next_s(), *waits])
            return found

    def _answer(self, place: Place) -> tuple[int, bytes] | None:
        if place.kind == wire.NOTICE:
            if self.roster.stopped is not None:
                return _end(wire.STOP, self.roster.stopped)
            seq, wanted, update = self.roster.notice()
            return (wire.OK, struct.pack("<QQB", seq, wanted, update)) if seq > place.seq else None
        answer = self.roster.answer(place.id)
        if isinstance(answer, Record):
            return wire.OK, packed(answer, place.id, self._rest_of(answer))
        if isinstance(answer, Stop):
            return _end(wire.STOP, answer)
        return _end(wire.OUT, answer) if isinstance(answer, Out) else None

    def _rest_of(self, record: Record) -> bytes:
        if self.heritage is not None and self._rest[0] != record.number:
            self._rest = record.number, self.heritage(self.roster)
        return self._rest[1]

    def next_s(self) -> float:
        """When answers() has something to say, in time.monotonic()."""
        with self.mutex:
            return 0.0 if self._is_new else self._due

    def look(self) -> None:
        """Called after the roster has changed: checks every waiting member. Server.ring() then wakes its thread."""
        with self.mutex:
            self._is_new = True

    def may_gather(self, connection: Any, key: str, rank: int) -> str:
        """Why this rank may not gather under this key; empty when it may."""
        with self.mutex:
            record, place = self.roster.record, self._places.get(connection)
            if record is None or key.split(".")[0] != f"{GENERATION_KEY}{record.number}":
                newest = 0 if record is None else record.number
                return f"the ranks gather in generation {newest} now; {key} is another"
            if place is None or rank >= len(record.members) or record.members[rank] != place.id:
                return f"this process is not rank {rank} of generation {record.number}"
            return ""

    def over(self) -> str:
        """The prefix of keys that ended with the last generation, once for each; empty: none did."""
        with self.mutex:
            record = self.roster.record
            if record is None or record.number == self._formed:
                return ""
            before, self._formed = self._formed, record.number
            return f"{GENERATION_KEY}{before}" if before else ""

    def newly_gone(self) -> list[Member]:
        """Members that have ended, left or been given up since the last call."""
        with self.mutex:
            found = [
                one for one in self.roster.members.values() if one.gone and one.id not in self._gone_seen
            ]
            self._gone_seen.update(one.id for one in found)
            return found


def _end(status: int, answer: Out | Stop) -> tuple[int, bytes]:
    return status, struct.pack("<i", answer.code) + answer.text.encode("utf-8", "backslashreplace")[-4096:]
