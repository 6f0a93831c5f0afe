"""One rank's side of the rendezvous (rendezvous.py): connects to whichever address answers and proves the secret.

Every call has a deadline. A lost connection is made again, because every request may be repeated without harm. Thread:
one at a time, except report_failure, which uses a connection of its own.
"""

from __future__ import annotations

import errno
import functools
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

from horoclone import errors
from horoclone.bootstrap import seal, wire

CONNECT_S = 3.0  # one round over all addresses
HELLO_S = 5.0  # for the other side to prove itself, or to answer what it can answer at once
SLICE_S = 1.0  # longest single wait at the server, so that reports come in time
REPORT_AFTER_S = 10.0
REPORT_EVERY_S = 30.0
REFUSED_S = 3.0  # everybody who answers must have refused us before we believe it
NO_ANSWER = "no answer"
SILENT = "it accepts connections and says nothing"
FOREIGN = "refused: it belongs to user id"  # one name of several may be another user's
GONE_S = 0.5  # without anybody who listens where the server was
GONE = (*map(os.strerror, (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)), wire.CLOSED_BY_PEER)
TELL_S = 1.0  # for a word to the server: that this rank gives up, leaves or watches
VERDICT_S = 1.0  # for the server to find out who was lost first
# After what says that this is one of several processes, where they do not come.
LEFT_OVER = (
    "If this process was started alone, another job has left these variables in the shell: unset them."
)

Say = Callable[[str], None]
T = TypeVar("T")


class Refused(Exception):
    """The server answered, and does not accept our secret or job id."""


class Stream:
    """A connection on which both sides have proved the secret. socket: for what has frames of its own. Thread: one at a
    time. OSError where it is of no use."""

    def __init__(self, connection: socket.socket, sends: wire.Sealed, receives: wire.Sealed) -> None:
        self.socket, self._sends, self._receives = connection, sends, receives

    def send(self, payload: bytes, limit_s: float) -> None:
        self.socket.settimeout(limit_s)
        self.socket.sendall(self._sends.frame(payload))

    def receive(self, deadline: float) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        (length,) = struct.unpack("<I", wire.receive_exactly(self.socket, 4, deadline))
        if not 0 < length <= wire.MAX_FRAME_BYTES:
            raise ConnectionError(f"a frame of {length} bytes")
        received = wire.receive_exactly(self.socket, length + seal.TAG_BYTES, deadline)
        payload = received[:length]
        try:
            self._receives.check(payload, received[length:])
        except wire.FrameError as error:
            raise ConnectionError(str(error)) from error
        return payload[0], payload[1:]

    def readable(self, wait_s: float) -> bool:
        """Whether something has come, or the connection has ended."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return bool(poller.poll(wait_s * 1000))

    def close(self) -> None:
        self.socket.close()


class Client:
    """addresses: as Server.addresses. timeout_s bounds finding the server in one call; it is the default of get.

    rank: whose presence the connection is, as the launcher numbers it; -1: nobody's. server_rank: the rank in which the
    server lives; -1: the launcher.
    """

    def __init__(
        self,
        addresses: list[str],
        secret: bytes,
        job: str,
        timeout_s: float,
        rank: int = -1,
        server_rank: int = -1,
    ) -> None:
        if not addresses:
            raise ValueError("the rendezvous has no address")
        for address in addresses:
            wire.parse_address(address)
            if not secret and not address.startswith("unix:"):
                raise ValueError(f"a rendezvous over the network ({address}) needs the job secret")
        self.addresses = list(addresses)
        self._secret, self._job, self._timeout_s = secret, job, timeout_s
        self._rank, self._server_rank = rank, server_rank
        self._members: list[int] = []  # of the last gather, as the launcher numbers them; empty: everybody
        self.said_by = ""  # by which variables there are so many ranks; empty: our launcher says so
        self.verdict: errors.PeerLost | None = None  # what the server has said last about a lost rank
        # who was lost, as the server said before it ended, the cause first
        self._last_words: list[bytes] = []
        self._connection: Stream | None = None
        self.tried: dict[str, str] = {}  # address -> what happened there last
        self._met = False  # the server has been there once; if nobody listens any more, its process has ended

    # --- requests

    def put(self, key: str, value: bytes) -> None:
        """Stores at most 64 KiB. Timeout when the server cannot be reached, ValueError when it refuses."""
        payload = bytes([wire.PUT]) + wire.pack_key(key) + wire.check_value(value, f"put {key!r}")
        status, body = self._ask(payload, time.monotonic() + self._timeout_s)
        if status != wire.OK:
            raise ValueError(f"put {key!r}: {body.decode(errors='replace')}")

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Waits until somebody has put the key. Timeout after timeout_s."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            wait_ms = int(1000 * max(0.0, min(SLICE_S, deadline - time.monotonic())))
            request = struct.pack("<BI", wire.GET, wait_ms) + wire.pack_key(key)
            status, body = self._ask(request, deadline + SLICE_S, wait_ms / 1000)
            if status == wire.OK:
                return body
            if time.monotonic() >= deadline:
                raise errors.Timeout(f"nobody has put {key!r} at {self.where()} within {limit_s:g} s.")

    def gather(
        self,
        prefix: str,
        rank: int,
        size: int,
        blob: bytes,
        timeout_s: float,
        say: Say | None = None,
        members: list[int] | None = None,
    ) -> list[bytes]:
        """Gives `blob` and returns everybody's, by rank. After 10 s `say` hears who is missing.

        members: the launcher's numbers of the ranks, where not all of its ranks take part. Timeout after timeout_s,
        naming the missing ranks; PeerLost when a missing rank is known to be lost; HorovodInternalError when ranks
        disagree on the size or two claim one rank. After any of them the gather is as if this rank had not come, and
        may be called again; unless everybody else has its blob already: then the error has `counted` set.
        """
        self._members = list(members or [])
        body = wire.pack_key(prefix) + wire.pack_members(self._members)
        body += wire.check_value(blob, f"gather {prefix!r}")
        try:
            return self._gather(prefix, rank, size, body, timeout_s, say)
        except BaseException as error:
            error.counted = not self._withdraw(prefix, rank, blob)  # type: ignore[attr-defined]
            raise

    def _gather(
        self, prefix: str, rank: int, size: int, body: bytes, timeout_s: float, say: Say | None
    ) -> list[bytes]:
        started = time.monotonic()
        deadline, report_at = started + timeout_s, started + REPORT_AFTER_S
        missing, said_by = "no rank has reported yet", f" ({self.said_by})" if self.said_by else ""
        while True:
            until = min(deadline, report_at)
            wait_ms = int(1000 * max(0.0, min(SLICE_S, until - time.monotonic())))
            request = struct.pack("<BIII", wire.GATHER, rank, size, wait_ms) + body
            try:
                status, answer = self._ask(request, until + SLICE_S, wait_ms / 1000)
                if status == wire.OK:
                    return self._take(prefix, rank, size, answer, deadline)
            except errors.Timeout:
                if time.monotonic() >= deadline:
                    raise
                status, answer, missing = wire.NOT_YET, b"", f"the rendezvous does not answer: {self.where()}"
            except OSError as error:  # while it answered; what was asked may be asked again
                self._broken(error)
                if time.monotonic() < deadline:
                    continue
                status, answer, missing = wire.NOT_YET, b"", f"the rendezvous does not answer: {self.where()}"
            if status == wire.REJECTED:
                raise errors.HorovodInternalError(answer.decode(errors="replace"))
            if answer:
                missing = f"missing: {_ranks(answer)}; they were expected at {self.where()}"
            now = time.monotonic()
            if now >= deadline:
                look = f"{LEFT_OVER} Else look" if self.said_by else "Look"
                raise errors.Timeout(
                    f"rank {rank} waited {timeout_s:.0f} s for the {size} ranks of the job{said_by}; {missing}. {look} "
                    "at the logs of those ranks; HOROCLONE_START_TIMEOUT (seconds) gives slow starts more time."
                )
            if now >= report_at:
                report_at = now + REPORT_EVERY_S
                if say is not None:
                    say(
                        f"still waiting for the {size} ranks of the job{said_by} after {now - started:.0f} s; {missing}"
                    )

    # --- while the ranks of a gather connect

    def watch(self, prefix: str) -> None:
        """From now on the server tells when a rank of the last gather is lost; look() hears it."""
        self._connect(time.monotonic() + TELL_S)
        assert self._connection is not None
        try:
            request = bytes([wire.WATCH]) + wire.pack_key(prefix) + wire.pack_members(self._members)
            self._connection.send(request, HELLO_S)
        except OSError as error:
            self._broken(error)

    def look(self, prefix: str) -> None:
        """PeerLost when a rank of the gather is lost, or the server with the rank in which it lives."""
        if not self.hear(0.0):
            try:
                self.watch(prefix)
            except errors.Timeout:
                pass  # it cannot be reached; what is known of it comes through the links between the ranks

    def hear(self, wait_s: float) -> bool:
        """PeerLost when the server says within wait_s that a rank is lost. False when the server itself is."""
        if self._connection is None or not self._connection.readable(wait_s):
            return True
        try:
            status, answer = self._receive(time.monotonic() + HELLO_S)
        except OSError as error:
            self._broken(error)
            return False
        if status == wire.FAILED and (verdict := self._lost(answer)).rank >= 0:
            self.verdict = verdict
            raise verdict
        if status == wire.CLOSED:
            self.close()
        return True

    def connected(self, stays: bool) -> None:
        """The ranks are connected. stays: the connection does, too, so that an end of this process is noticed."""
        if self._connection is None:
            return
        try:
            self._connection.send(bytes([wire.CONNECTED]), HELLO_S)
            while self._receive(time.monotonic() + HELLO_S)[0] != wire.OK:
                pass  # what it had said before
        except OSError:
            self.close()
        if not stays:
            self.leave(False)

    def give_up(self, prefix: str, text: str) -> None:
        """Tells the ranks that still connect that this one does not any more. Never raises."""
        self._tell(bytes([wire.GIVE_UP]) + wire.pack_key(prefix) + text.encode(errors="replace")[-4096:])

    def leave(self, process_ends: bool) -> None:
        """Closes the connection, with a word, so that nobody takes this rank for lost while it only meets elsewhere."""
        if self._connection is not None and self._rank >= 0:
            try:
                self._connection.send(bytes([wire.LEAVE, process_ends]), TELL_S)
            except OSError:
                pass
        self.close()

    def _withdraw(self, prefix: str, rank: int, blob: bytes) -> bool:
        """Takes the own blob back. False when everybody else has it already."""
        payload = struct.pack("<BI", wire.WITHDRAW, rank) + wire.pack_key(prefix) + blob
        return self._tell(payload) != wire.REJECTED

    def _tell(self, payload: bytes) -> int:
        """Through a new connection: the old one may be in the middle of an answer. The status; OK where nobody is."""
        if not self._met:
            return wire.OK
        self.close()
        try:
            return self._ask(payload, time.monotonic() + TELL_S)[0]
        except (OSError, errors.HorovodInternalError):
            return wire.OK

    def _lost(self, answer: bytes) -> errors.PeerLost:
        rank, text = struct.unpack_from("<I", answer)[0], answer[4:].decode(errors="replace")
        if text.endswith("ended with exit code 0"):
            text += ". Every rank has to call hvd.init()"
        return errors.PeerLost(
            f"rank {self._ours(rank)} failed before it was connected:\n{text}", self._ours(rank)
        )

    def _ours(self, rank: int) -> int:
        """The number in the last gather of a rank as the launcher numbers it."""
        if not self._members or rank < 0:
            return rank
        return self._members.index(rank) if rank in self._members else -1

    def reach(self, timeout_s: float) -> bool:
        """Whether the server answers within this time."""
        try:
            self._connect(time.monotonic() + timeout_s)
        except errors.HorovodInternalError:
            return False
        return True

    def report_failure(self, rank: int, text: str, consequence: bool = False, timeout_s: float = 2.0) -> None:
        """Tells the server why this rank ends. Uses a connection of its own; Timeout when nobody listens."""
        other = Client(self.addresses, self._secret, self._job, timeout_s)
        try:
            body = text.encode(errors="replace")[-wire.MAX_VALUE_BYTES :]
            other._ask(struct.pack("<BIB", wire.FAIL, rank, consequence) + body, time.monotonic() + timeout_s)
        finally:
            other.close()

    def where(self) -> str:
        """The addresses, each with what happened there last."""
        return ", ".join(f"{one} ({self.tried.get(one, 'not tried')})" for one in self.addresses)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- one request, one answer

    def _take(self, prefix: str, rank: int, size: int, answer: bytes, deadline: float) -> list[bytes]:
        (count,) = struct.unpack("<I", answer)
        if count != size or self._connection is None:
            raise errors.HorovodInternalError(f"the rendezvous answered with {count} of {size} ranks")
        blobs: list[bytes] = []
        while len(blobs) < size:
            part = wire.Reader(self._receive(max(deadline, time.monotonic() + HELLO_S))[1])
            while not part.is_empty():
                blobs.append(part.take(part.number("I")))
        try:
            self._connection.send(struct.pack("<BI", wire.TAKEN, rank) + wire.pack_key(prefix), HELLO_S)
        except OSError as error:
            # we have what we want; whether the server is there shows when it is asked again
            self._broken(error)
        return blobs

    def _ask(self, payload: bytes, deadline: float, wait_s: float = 0.0) -> tuple[int, bytes]:
        """wait_s: the server may wait before it answers. What comes after the deadline is lost."""
        while True:
            self._drain(deadline)
            self._connect(deadline)
            assert self._connection is not None
            try:
                self._connection.send(payload, max(0.001, min(HELLO_S, deadline - time.monotonic())))
                status, answer = self._receive(min(deadline, time.monotonic() + wait_s + HELLO_S))
                if status == wire.CLOSED:
                    self._met = False
                    raise ConnectionError(wire.CLOSED_BY_PEER)
                if status != wire.FAILED:
                    return status, answer
                lost = self._lost(answer)
                if lost.rank >= 0:
                    raise lost
                self._last_words.append(answer)  # of a rank with which this one has nothing to do
            except OSError as error:
                self._broken(error)
                if time.monotonic() >= deadline:
                    raise errors.Timeout(f"the rendezvous does not answer: {self.where()}") from error

    def _drain(self, deadline: float) -> None:
        """What lies there before anything is asked: the connection's end, that the server moves, or why it ends."""
        while self._connection is not None and self._connection.readable(0.0):
            try:
                status, answer = self._receive(min(deadline, time.monotonic() + HELLO_S))
                if status == wire.FAILED:
                    self._last_words.append(answer)
                elif status == wire.CLOSED:
                    self._met = False  # its process lives and will listen again
                    self.close()
            except OSError as error:
                self._broken(error)

    def _broken(self, error: OSError) -> None:
        self.close()
        self.tried = dict.fromkeys(self.addresses, f"connection lost: {error}")

    def _receive(self, deadline: float) -> tuple[int, bytes]:
        assert self._connection is not None
        return self._connection.receive(deadline)

    # --- connecting

    def _connect(self, deadline: float) -> None:
        pause_s, refused_since, gone_since = 0.01, 0.0, 0.0
        while self._connection is None:
            self.tried = {}
            self._connection = self._one_round(deadline)
            if self._connection is not None:
                self._met, self._last_words = True, []
                try:
                    self._introduce(self._connection)
                except OSError as error:
                    self._broken(error)
                    continue
                return
            now = time.monotonic()
            texts = self.tried.values()
            believed = [text for text in texts if not text.startswith(FOREIGN)]
            if NO_ANSWER not in texts and (
                not believed or any(text.startswith("refused") for text in believed)
            ):
                refused_since = refused_since or now
            else:
                refused_since = 0.0
            if refused_since and now - refused_since >= REFUSED_S:
                raise errors.HorovodInternalError(
                    f"no rendezvous accepts us. Tried: {self.where()}. Is the secret of this job right "
                    "(HOROCLONE_SECRET, HOROCLONE_SECRET_FILE), and is no older job left at that address?"
                )
            gone = all(text in GONE or text.startswith(FOREIGN) for text in texts)
            gone_since = (gone_since or now) if gone and self._met else 0.0
            if gone_since and now - gone_since >= GONE_S:
                raise self._who_ended()
            if now >= deadline:
                raise errors.Timeout(f"no rendezvous can be reached. Tried: {self.where()}.")
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(pause_s * 1.5, 0.5)

    def _who_ended(self) -> errors.PeerLost:
        """Nobody listens any more: the rank of which the server said so, or the server's."""
        for lost in map(self._lost, self._last_words):
            if lost.rank not in (-1, self._ours(self._rank)):
                return lost
        rank = self._ours(self._server_rank)
        host = "the launcher" if self._server_rank < 0 else f"rank {rank}"
        text = (
            f"the rendezvous has ended, and with it {host}; its own log has the cause. Tried: {self.where()}."
        )
        return errors.PeerLost(text, rank)

    def _introduce(self, connection: Stream) -> None:
        """The first word on a new connection: whose presence it is."""
        if self._rank >= 0:
            connection.send(struct.pack("<BI", wire.HERE, self._rank), HELLO_S)

    def _one_round(self, deadline: float) -> Stream | None:
        """Tries every address at once; the first that proves the secret wins.

        Nobody is waited for alone: who accepts a connection and says nothing would keep us from the one that answers.
        A connection has CONNECT_S to come about, then HELLO_S to say something, and all of it ends at the deadline.
        """
        end = min(deadline, time.monotonic() + CONNECT_S)
        waiting: dict[int, tuple[str, socket.socket]] = {}
        connected: set[int] = set()  # of those who wait: for the greeting
        poller = select.poll()
        try:
            for address in self.addresses:
                one = self._begin(address)
                if one is not None:
                    waiting[one.fileno()] = (address, one)
                    poller.register(one, select.POLLOUT)
            while waiting:
                ready = poller.poll(max(0.0, (end - time.monotonic()) * 1000))
                if not ready:
                    for descriptor, (address, _) in waiting.items():
                        self.tried[address] = SILENT if descriptor in connected else NO_ANSWER
                    return None
                for descriptor, _ in ready:
                    address, one = waiting[descriptor]
                    if descriptor not in connected and self._attempt(address, one, self._look_at):
                        connected.add(descriptor)
                        poller.modify(descriptor, select.POLLIN)
                        end = min(deadline, time.monotonic() + HELLO_S)
                        continue
                    del waiting[descriptor]
                    poller.unregister(descriptor)
                    prove = functools.partial(
                        self._handshake, deadline=min(deadline, time.monotonic() + HELLO_S)
                    )
                    stream = self._attempt(address, one, prove) if descriptor in connected else None
                    if stream is not None:
                        self.tried[address] = "connected"
                        return stream
            return None
        finally:
            for _, one in waiting.values():
                one.close()

    def _begin(self, address: str) -> socket.socket | None:
        family, target = wire.parse_address(address)
        with wire.needs_descriptor("reach the rendezvous"):
            one = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        one.setblocking(False)
        try:
            one.connect(target)
        except BlockingIOError:
            pass
        except OSError as error:
            self.tried[address] = error.strerror or str(error)
            one.close()
            return None
        return one

    def _attempt(self, address: str, one: socket.socket, step: Callable[[socket.socket], T]) -> T | None:
        """What the step gives. None: the socket is closed, and why is known of its address."""
        try:
            return step(one)
        except (OSError, Refused) as error:
            self.tried[address] = getattr(error, "strerror", None) or str(error)
            one.close()
            return None

    @staticmethod
    def _look_at(one: socket.socket) -> bool:
        """Of a connection that is made, or has failed. True."""
        failure = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        if one.family == socket.AF_UNIX:
            if not wire.same_user(one):
                raise Refused(f"{FOREIGN} {wire.peer_uid(one)}, not to ours")
        else:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    def _handshake(self, one: socket.socket, deadline: float) -> Stream:
        greeting = wire.receive_exactly(one, wire.GREETING_BYTES, deadline)
        if not greeting.startswith(wire.GREETING):
            raise ConnectionError("something else than a rendezvous of this version answers there")
        server_nonce = greeting[len(wire.GREETING) :]
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        both = self._job, server_nonce, nonce
        one.sendall(wire.HELLO + nonce + wire.proof(self._secret, b"client", *both))
        answer = wire.receive_exactly(one, wire.PROOF_BYTES, deadline)
        if answer == wire.REFUSED:
            raise Refused(f"refused our secret or job id {self._job!r}")
        if not hmac.compare_digest(answer, wire.proof(self._secret, b"server", *both)):
            raise Refused("refused by us: it does not know the secret")
        sealed = (wire.Sealed(self._secret, role, *both) for role in (b"client", b"server"))
        return Stream(one, *sealed)


def _ranks(answer: bytes) -> str:
    """A list of missing ranks for humans: [total][some of them ...]."""
    total, *listed = struct.unpack(f"<{len(answer) // 4}I", answer)
    text = ", ".join(str(rank) for rank in listed)
    more = f" and {total - len(listed)} more" if total > len(listed) else ""
    return f"rank{'s' if total != 1 else ''} {text}{more}"
