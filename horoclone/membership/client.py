"""A member's side of the coordinator (service.py): joins, waits for a generation, hears notices; and the job of one
generation.

Thread: one at a time for each MembershipClient; a process has one for init() and one for notices.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from horoclone import errors, failpoints
from horoclone.bootstrap import exchange, launchers, service, wire
from horoclone.bootstrap.client import CONNECT_S, GONE, HELLO_S, SLICE_S, Client, Stream
from horoclone.membership.records import (
    GENERATION_KEY,
    ID_BYTES,
    INCARNATION_BYTES,
    Assignment,
    Evicted,
    Loss,
    RescaleNotice,
    Stop,
)

Say = Callable[[str], None]

# What a member says who could be the coordinator and is not. HEARS: it hears another one. WAITS: it looks for one, too.
# ABSENT: nobody listens there any more. FRESH: it was in no generation yet. FOREIGN: whoever is there has another
# secret, or is of another job. SILENT: nobody answers. REFUSES: it is the coordinator, and does not let this process
# in.
HEARS, WAITS, DECLINES, ABSENT, FRESH, FOREIGN, SILENT, REFUSES = range(8)


class NotCoordinator(errors.HorovodInternalError):
    """Who was asked is not the coordinator. state: HEARS, WAITS or DECLINES."""

    def __init__(self, body: bytes) -> None:
        super().__init__("this process is not the membership coordinator of the job now")
        self.state = body[0] if body else DECLINES


class Identity(NamedTuple):
    """Who this process is, and where its coordinator is."""

    id: bytes
    incarnation: bytes
    host: str
    slot: int
    addresses: tuple[str, ...]
    secret: bytes
    job: str
    build: str = ""  # of horoclone: what all members must have alike
    own: tuple[str, ...] = ()  # where this process would be the coordinator


def identity(environ: Mapping[str, str]) -> Identity:
    """From the launcher's variables. Unsupported when this process was not started for an elastic job."""
    if service.is_elastic(environ):
        return _identity_behind(service.place_of(environ), environ)
    address, name = environ.get("HOROCLONE_RENDEZVOUS"), environ.get("HOROCLONE_MEMBER")
    secret = launchers.shared_secret(environ)
    if not address or not name or not secret:
        raise errors.Unsupported(
            "HOROCLONE_ELASTIC=1 without HOROCLONE_RENDEZVOUS, HOROCLONE_MEMBER and a secret: the launcher's "
            "environment did not arrive whole. Start the job with horoclonerun -np N --min-np M."
        )
    try:
        id_ = bytes.fromhex(name)
    except ValueError:
        id_ = b""
    if len(id_) != ID_BYTES:
        raise errors.Unsupported(f"HOROCLONE_MEMBER={name!r} is not {2 * ID_BYTES} hex digits.")
    slot = environ.get("HOROCLONE_LOCAL_RANK", "0")
    return Identity(
        id_,
        secrets.token_bytes(INCARNATION_BYTES),
        environ.get("HOROCLONE_HOSTNAME") or socket.gethostname(),
        int(slot) if slot.isdigit() else 0,
        tuple(part for part in address.split(",") if part),
        secret,
        environ.get("HOROCLONE_JOB", ""),
    )


def _identity_behind(place: service.Place, environ: Mapping[str, str]) -> Identity:
    """Of a process that nobody has announced. slot: its number in the whole job. Who the coordinator is shows later."""
    secret = service.secret_of(place, environ)
    drawn = secrets.token_bytes(ID_BYTES), secrets.token_bytes(INCARNATION_BYTES)
    return Identity(*drawn, place.host, place.index, (), secret, place.job)


class MembershipClient(Client):
    """shows: whether its connection is this process's presence while ranks connect."""

    def __init__(self, who: Identity, timeout_s: float, shows: bool) -> None:
        super().__init__(list(who.addresses), who.secret, who.job, timeout_s)
        self._who, self._shows = who, shows
        self.reason = ""  # why form() has to wait

    def _introduce(self, connection: Stream) -> None:
        who = self._who
        name = (
            who.id + who.incarnation + struct.pack("<I", who.slot) + os.fsencode(f"{who.host}\0{who.build}")
        )
        connection.send(bytes([wire.JOIN]) + name, HELLO_S)
        status, body = connection.receive(time.monotonic() + HELLO_S)
        if status == wire.NOT_COORDINATOR:
            raise NotCoordinator(body)
        if status == wire.REJECTED:
            raise errors.Unsupported(
                f"the membership coordinator refuses this process: {body.decode(errors='replace')}"
            )
        if status != wire.OK or len(body) != 4:
            raise ConnectionError(wire.CLOSED_BY_PEER)
        if who.own:
            connection.send(bytes([wire.STANDBY]) + ",".join(who.own).encode(), HELLO_S)
            if connection.receive(time.monotonic() + HELLO_S)[0] != wire.OK:
                raise ConnectionError(wire.CLOSED_BY_PEER)
        if self._shows:
            self._rank = struct.unpack("<I", body)[0]
            super()._introduce(connection)

    def probe(self) -> int | None:
        """One attempt to join. None: this is the coordinator, and the connection stays; else what NotCoordinator
        says."""
        try:
            self._connection = self._one_round(time.monotonic() + CONNECT_S + HELLO_S)
            if self._connection is None:
                texts = self.tried.values()
                if any(text.startswith("refused") for text in texts):
                    return FOREIGN
                return ABSENT if all(text in GONE for text in texts) else SILENT
            self._introduce(self._connection)
            self._met = True
            return None
        except NotCoordinator as error:
            self.close()
            return error.state
        except errors.Unsupported:
            self.close()
            return REFUSES
        except (OSError, errors.HorovodInternalError):
            self.close()
            return DECLINES

    def form(
        self, seen: int, commits: tuple[int, ...], wait_s: float, is_ready: bool = True
    ) -> Assignment | Evicted | Stop | None:
        """Waits that long for the generation after `seen`; None: not yet. is_ready: not for a newcomer that is still
        being given a commit. Timeout when the coordinator cannot be reached."""
        failpoints.reach("membership.form")
        request = struct.pack("<BIQBB", wire.FORM, int(wait_s * 1000), seen, is_ready, len(commits))
        request += struct.pack(f"<{len(commits)}Q", *commits)
        status, body = self._ask(request, time.monotonic() + wait_s + self._timeout_s, wait_s)
        self.reason = body.decode(errors="replace") if status == wire.NOT_YET else ""
        return Assignment(body) if status == wire.OK else _end(status, body)

    def notice(self, seq: int, commit: int) -> RescaleNotice | Stop | None:
        """The next notice after this one; None: there is none yet. commit: the newest that this process holds."""
        failpoints.reach("membership.notice")
        request = struct.pack("<BIQQ", wire.NOTICE, int(SLICE_S * 1000), seq, commit)
        status, body = self._ask(request, time.monotonic() + self._timeout_s, SLICE_S)
        if status == wire.OK:
            return RescaleNotice(*struct.unpack("<QQB", body))
        end = _end(status, body)
        return end if isinstance(end, Stop) else None

    def depart(self, reason: str, at_once: bool) -> None:
        """Tells the coordinator that this process will leave at the next commit, or leaves at once. Best effort."""
        failpoints.reach("membership.leave")
        self._tell_coordinator(bytes([wire.DEPART, at_once]) + reason.encode(errors="replace")[:512])

    def finished(self) -> None:
        """Tells the coordinator that this process has done its work, where it stays and nobody sees it end. Best
        effort."""
        self._tell_coordinator(bytes([wire.FINISHED]))

    def suspect(self, number: int, rank: int, how: Loss) -> bool:
        """Tells the coordinator that this process has lost a rank of this generation. Whether it could be told."""
        failpoints.reach("membership.suspect")
        return self._tell_coordinator(struct.pack("<BQIB", wire.SUSPECT, number, rank, how))

    def _tell_coordinator(self, payload: bytes) -> bool:
        try:
            self._ask(payload, time.monotonic() + HELLO_S)
            return True
        except (OSError, errors.HorovodInternalError):
            return False  # it hears of our end from the launcher


def _end(status: int, body: bytes) -> Evicted | Stop | None:
    if status == wire.NOT_YET:
        return None
    if status == wire.NOT_COORDINATOR:
        raise NotCoordinator(body)
    if status not in (wire.EVICTED, wire.STOP) or len(body) < 4:
        raise errors.HorovodInternalError(
            f"the membership coordinator answered {body.decode(errors='replace')!r}"
        )
    code, text = struct.unpack_from("<i", body)[0], body[4:].decode(errors="replace")
    return Evicted(code, text) if status == wire.EVICTED else Stop(code, text)


class GenerationJob(exchange.Job):
    """The world of one generation. Its number is in the name of the job and its nonce in the secret of every handshake
    between ranks, so that a process of another generation is refused whatever it knows."""

    def __init__(self, rendezvous: exchange.Rendezvous, assignment: Assignment) -> None:
        super().__init__(
            rendezvous,
            assignment.rank,
            assignment.size,
            f"generation-{assignment.number}",
            None,
            list(assignment.indexes),
        )
        self.generation = assignment.number
        self._number, self._gathered = assignment.number, 0
        label = b"horoclone generation " + struct.pack("<Q", assignment.number) + assignment.nonce
        self._own_secret = hmac.new(rendezvous.secret, label, hashlib.sha256).digest()

    @property
    def secret(self) -> bytes:
        return self._own_secret

    def gather(self, blob: bytes, deadline: float, say: Say | None) -> list[bytes]:
        """Everybody's blob by rank. Errors as Client.gather."""
        client = self.rendezvous.client
        self._gathered += 1
        if self.size == 1 or client is None:
            return [blob]
        timeout_s = max(0.1, deadline - time.monotonic())
        return client.gather(self._key, self.rank, self.size, blob, timeout_s, say, self._members)

    @property
    def _key(self) -> str:
        return f"{GENERATION_KEY}{self._number}" + (f".{self._gathered}" if self._gathered > 1 else "")


def rendezvous(who: Identity, client: MembershipClient, one_host: bool) -> exchange.Rendezvous:
    """The rendezvous of all generations; `client` stays connected between them."""
    key = ("elastic", os.getpid())
    return exchange.Rendezvous(key, who.job, who.secret, False, client, one_host=one_host)
