"""The job's rendezvous server: a small key-value server (one thread, hc-store) that every rank can reach.

Both sides of every connection prove that they know the job secret before a byte is interpreted; on a unix socket the
kernel must also confirm that it is the same user, and with an empty secret (one host only) that is the proof. Limits
bound what an unauthenticated peer can cost: 64 connections that have proved nothing yet, 5 seconds each, no allocation
from a length that they sent. The other side is client.py.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time

from horoclone.bootstrap import seal, wire
from horoclone.bootstrap.client import HELLO_S, Client
from horoclone.bootstrap.failures import Failure, Failures
from horoclone.bootstrap.waiting import Connection, Gather, Membership, Waiter
from horoclone.connection_limits import BACKLOG, UnauthenticatedConnections, accept

__all__ = ["Client", "Failure", "Server"]

MAX_HALF_OPEN = 64
MAX_KEYS = 65536
MAX_STORED_BYTES = 512 << 20
MAX_LISTED = 64  # missing ranks named in one answer
MAX_WAIT_MS = 60_000


class Server:
    """Listens until close(). Thread: any for its methods; one thread of its own does the work.

    secret: at least 16 bytes, or empty when every address is a unix socket. bindings: "unix:NAME", "HOST",
    "HOST:PORT" (port 0: the kernel picks one); "0.0.0.0" is advertised as every address of this host.
    service: of an elastic job; then ranks gather in its generations only, and size is the largest that one may have.
    Raises OSError when an address cannot be bound.
    """

    def __init__(
        self, secret: bytes, job: str, size: int, bindings: list[str], service: Membership | None = None
    ) -> None:
        if secret and len(secret) < 16:
            raise ValueError(f"the job secret has {len(secret)} bytes; it needs at least 16")
        if not secret and not all(address.startswith("unix:") for address in bindings):
            raise ValueError("without a secret the rendezvous may only listen on unix sockets")
        self._secret, self._job, self._size = secret, job, size
        self._values: dict[str, bytes] = {}
        self._gathers: dict[str, Gather] = {}
        self._stored_bytes = 0
        self._failures = Failures()
        self._service = service
        self._arrived: set[int] = set()  # guarded by _mutex
        self._pending_takes = 0  # guarded by _mutex; complete gathers that some rank has not fetched
        self._mutex = threading.Condition()
        self._connections: dict[int, Connection] = {}
        self._unauthenticated = UnauthenticatedConnections(
            MAX_HALF_OPEN, HELLO_S, self._drop, self._has_come_in
        )
        self._listeners: list[socket.socket] = []
        self._stop = False
        self.addresses: list[str] = []
        try:
            for address in bindings:
                self._listen(address)
        except BaseException:
            for listener in self._listeners:
                listener.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup)
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self._thread = threading.Thread(target=self._serve, name="hc-store", daemon=True)
        self._thread.start()

    # --- what others call

    def failures(self) -> list[Failure]:
        """Reports of ranks that failed, in the order in which they came."""
        return self._failures.reports()

    def rank_ended(self, rank: int, text: str) -> None:
        """The launcher has seen the rank's process end, with whatever code: no other rank need wait for it any more."""
        self._failures.ended(rank, text)
        self.wake()

    def arrived(self) -> set[int]:
        """Ranks that have come to a gather at least once."""
        with self._mutex:
            return set(self._arrived)

    def close(self, linger_s: float = 0.0, process_ends: bool = True) -> None:
        """Ends the thread and closes every socket. linger_s: how long to let ranks fetch gathers that are complete.

        process_ends: a rank that comes too late to ask is told who was lost first. Else this rank only meets elsewhere,
        and the others are told that it is not lost.
        """
        with self._mutex:
            self._mutex.wait_for(lambda: self._pending_takes == 0, timeout=linger_s)
        self._stop = True
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        # whose connection has just broken does not come back to this server
        self._failures.settle(float("inf"))
        for connection in [one for one in self._connections.values() if one.rank >= 0]:
            if not process_ends:
                self._reply(connection, wire.CLOSED)
            elif self._service is None and connection.waiter is not None:
                self._answer(connection)
            elif self._service is None:
                for cause in self._failures.causes()[:MAX_LISTED]:
                    self._reply(connection, wire.FAILED, cause.packed())
        self._release()

    def wake(self) -> None:
        """The thread looks again: something is new."""
        if self._service is not None:
            self._service.look()
        try:
            self._wakeup_sender.send(b"x")
        except OSError:
            pass

    def after_fork_in_child(self) -> None:
        """Closes the inherited descriptors; the thread and the service stay with the parent."""
        self._mutex = threading.Condition()
        self._release()

    def _release(self) -> None:
        # No unregister: an epoll set is shared with the parent after a fork, closing is not.
        self._selector.close()
        for connection in self._connections.values():
            connection.socket.close()
        for one in (*self._listeners, self._wakeup, self._wakeup_sender):
            one.close()
        self._connections.clear()
        self._listeners.clear()

    # --- the thread

    def _listen(self, address: str) -> None:
        family, target = wire.parse_address(address)
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listeners.append(listener)
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        if family == socket.AF_UNIX:
            self.addresses.append(address)
            return
        host, port = listener.getsockname()[:2]
        hosts = wire.routable_addresses() if host in ("0.0.0.0", "::") else [host]
        self.addresses.extend(wire.format_address(one, port) for one in hosts)

    def _serve(self) -> None:
        while not self._stop:
            for key, events in self._selector.select(self._next_deadline_s()):
                if key.data is self._wakeup:
                    self._wakeup.recv(4096)
                    if self._stop:
                        return
                elif isinstance(key.data, socket.socket):
                    self._accept(key.data)
                elif not key.data.closing:
                    self._attend(key.data, events)
            if self._service is not None:
                self._tell_members(self._service)
            self._expire(time.monotonic())

    def _tell_members(self, service: Membership) -> None:
        for rank, text in service.newly_gone():  # whoever waits for it to gather or to connect is told
            self._failures.ended(rank, text)
        for connection, status, body in service.answers(time.monotonic()):
            self._reply(connection, status, body)
        if over := service.over():
            for key in [one for one in self._gathers if one.split(".")[0] == over]:
                self._give_gather_up(key)

    def _give_gather_up(self, key: str) -> None:
        """Its generation is over: a rank that waits in it was given up, and is told so."""
        for connection in list(self._connections.values()):
            if connection.waiter is not None and connection.waiter.key == key:
                connection.waiter = None
                self._reply(
                    connection, wire.REJECTED, b"this generation is over; the others go on in the next"
                )
        gather = self._gathers.pop(key)
        if not gather.missing():
            with self._mutex:
                self._pending_takes -= 1
                self._mutex.notify_all()

    def _next_deadline_s(self) -> float:
        deadline = min(time.monotonic() + 5.0, self._failures.next_s(), self._unauthenticated.next_s())
        if self._service is not None:
            deadline = min(deadline, self._service.next_s())
        for connection in self._connections.values():
            if connection.waiter is not None:
                deadline = min(deadline, connection.waiter.deadline)
        return max(0.0, deadline - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_HALF_OPEN // 4):  # what they say is read before the next ones could displace them
            accepted = accept(listener, self._unauthenticated)
            if accepted is None:
                return
            peer = accepted[0]
            peer.setblocking(False)
            if peer.family == socket.AF_UNIX:
                if not wire.same_user(peer):
                    peer.close()
                    continue
            else:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(peer, secrets.token_bytes(wire.NONCE_BYTES))
            self._unauthenticated.admit(connection)
            self._connections[peer.fileno()] = connection
            self._selector.register(peer, selectors.EVENT_READ, connection)
            self._send(connection, wire.GREETING + connection.nonce)

    def _has_come_in(self, connection: Connection) -> bool:
        self._attend(connection, selectors.EVENT_READ)  # its proof may have come, and not been read yet
        return connection.proved or connection.closing

    def _drop(self, connection: Connection) -> None:
        if connection.closing:
            return
        connection.closing = True
        self._unauthenticated.gone(connection)
        if connection.rank >= 0:
            self._failures.broke(connection.rank)
        if self._service is not None:
            self._service.dropped(connection)
        self._selector.unregister(connection.socket)
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()

    def _expire(self, now: float) -> None:
        self._unauthenticated.expire()
        for connection in list(self._connections.values()):
            if connection.waiter is not None and now >= connection.waiter.deadline:
                self._answer(connection, expired=True)
        gone, has_news = self._failures.settle(now)
        if gone:
            for gather in self._gathers.values():
                gather.forget(gone)
        if has_news:
            for connection in list(self._connections.values()):
                if connection.waiter is not None and connection.waiter.kind != wire.GET:
                    self._answer(connection)

    def _attend(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and not connection.closing:
                # An unauthenticated peer is never read beyond its hello, a known rank never far beyond one frame.
                room = wire.MAX_FRAME_BYTES if connection.proved else wire.HELLO_BYTES
                part = connection.socket.recv(max(1, room - len(connection.received)))
                if not part:
                    self._drop(connection)
                    return
                connection.received += part
                self._consume(connection)
        except BlockingIOError:
            pass
        except (OSError, wire.FrameError):
            self._drop(connection)

    def _consume(self, connection: Connection) -> None:
        if not connection.proved:
            if len(connection.received) < wire.HELLO_BYTES:
                return
            self._check_hello(connection)
        while not connection.closing and len(connection.received) >= 4:
            (length,) = struct.unpack_from("<I", connection.received)
            if not 0 < length <= wire.MAX_FRAME_BYTES:
                raise wire.FrameError("bad length")
            end = 4 + length + seal.TAG_BYTES
            if len(connection.received) < end:
                return
            frame = bytes(connection.received[4:end])
            del connection.received[:end]
            payload = frame[:length]
            assert connection.receives is not None
            connection.receives.check(payload, frame[length:])
            self._handle(connection, wire.Reader(payload))

    def _check_hello(self, connection: Connection) -> None:
        hello = bytes(connection.received[: wire.HELLO_BYTES])
        del connection.received[: wire.HELLO_BYTES]
        nonce = hello[len(wire.HELLO) : -wire.PROOF_BYTES]
        expected = wire.proof(self._secret, b"client", self._job, connection.nonce, nonce)
        right = hmac.compare_digest(hello[-wire.PROOF_BYTES :], expected)
        if not (right and hello.startswith(wire.HELLO)):
            self._send(connection, wire.REFUSED)
            self._drop(connection)
            return
        both = self._job, connection.nonce, nonce
        connection.receives = wire.Sealed(self._secret, b"client", *both)
        connection.sends = wire.Sealed(self._secret, b"server", *both)
        self._unauthenticated.gone(connection)
        self._send(connection, wire.proof(self._secret, b"server", *both))

    def _handle(self, connection: Connection, reader: wire.Reader) -> None:
        kind = reader.number("B")
        if kind == wire.PUT:
            key = reader.key()
            refusal = self._store(key, reader.rest())
            self._reply(
                connection, wire.REJECTED if refusal else wire.OK, refusal.encode("utf-8", "backslashreplace")
            )
            self._wake(key)
        elif kind == wire.GET:
            connection.waiter = self._waiter(reader, kind)
            self._answer(connection)
        elif kind == wire.GATHER:
            self._handle_gather(connection, reader)
        elif kind == wire.TAKEN:
            self._handle_taken(reader)
        elif kind == wire.WITHDRAW:
            self._handle_withdraw(connection, reader)
        elif kind == wire.FAIL:
            rank, consequence = reader.number("I"), bool(reader.number("B"))
            self._failures.reported(rank, reader.rest().decode(errors="replace"), consequence)
            self._reply(connection, wire.OK)
        elif self._service is not None and kind in wire.OF_MEMBERS:
            answer = self._service.handle(connection, kind, reader)
            if answer is not None:
                self._reply(connection, *answer)
        else:
            self._handle_presence(kind, connection, reader)

    def _handle_presence(self, kind: int, connection: Connection, reader: wire.Reader) -> None:
        if kind == wire.HERE:
            if connection.rank >= 0:
                raise wire.FrameError("a connection is one rank's")
            connection.rank = reader.number("I")
            self._failures.came(connection.rank)
        elif kind == wire.WATCH:
            key, members = reader.key(), reader.members()
            connection.waiter = Waiter(kind, key, float("inf"), set(members) or range(self._size))
            self._answer(connection)
        elif kind == wire.CONNECTED:
            connection.waiter = None
            self._reply(connection, wire.OK)
        elif kind == wire.GIVE_UP:
            key = reader.key()
            self._failures.gave_up(connection.rank, key, reader.rest().decode(errors="replace"))
            self._reply(connection, wire.OK)
        elif kind == wire.LEAVE and connection.rank >= 0:
            rank, connection.rank = connection.rank, -1
            self._failures.left(rank, bool(reader.number("B")))
        else:
            raise wire.FrameError("unknown request")

    def _waiter(self, reader: wire.Reader, kind: int) -> Waiter:
        wait_s = min(reader.number("I"), MAX_WAIT_MS) / 1000
        return Waiter(kind, reader.key(), time.monotonic() + wait_s)

    def _store(self, key: str, value: bytes) -> str:
        if len(value) > wire.MAX_VALUE_BYTES:
            raise wire.FrameError("value too long")
        grown = self._stored_bytes + len(value) - len(self._values.get(key, b""))
        if (key not in self._values and len(self._values) >= MAX_KEYS) or grown > MAX_STORED_BYTES:
            return f"the rendezvous is full ({len(self._values)} keys, {self._stored_bytes} bytes)"
        self._values[key] = value
        self._stored_bytes = grown
        return ""

    def _handle_gather(self, connection: Connection, reader: wire.Reader) -> None:
        rank, size = reader.number("I"), reader.number("I")
        waiter = self._waiter(reader, wire.GATHER)
        members = reader.members() or list(range(size))
        blob = reader.rest()
        if not rank < size <= self._size or len(members) != size or len(blob) > wire.MAX_VALUE_BYTES:
            self._reply(connection, wire.REJECTED, f"rank {rank} of {size} in a job of {self._size}".encode())
            return
        refusal = self._service.may_gather(connection, waiter.key, rank) if self._service is not None else ""
        if refusal:
            self._reply(connection, wire.REJECTED, refusal.encode("utf-8", "backslashreplace"))
            return
        if waiter.key not in self._gathers and len(self._gathers) >= MAX_KEYS:
            self._reply(connection, wire.REJECTED, b"too many gathers are open")
            return
        gather = self._gathers.setdefault(waiter.key, Gather(size, members))
        if gather.size != size:
            text = f"rank {rank} says that the job has {size} ranks, the others say {gather.size}"
            self._reply(connection, wire.REJECTED, text.encode("utf-8", "backslashreplace"))
            return
        if gather.blobs.get(rank, blob) != blob:
            text = f"two processes say that they are rank {rank}; was a process started with a copied environment?"
            self._reply(connection, wire.REJECTED, text.encode("utf-8", "backslashreplace"))
            return
        is_complete = rank not in gather.blobs and len(gather.blobs) == size - 1
        gather.blobs[rank] = blob
        connection.waiter = waiter
        with self._mutex:
            self._arrived.add(rank)
            self._pending_takes += is_complete
        if is_complete:
            if self._service is not None:
                self._service.gathered(waiter.key)
            self._wake(waiter.key)
        else:
            self._answer(connection)

    def _handle_taken(self, reader: wire.Reader) -> None:
        rank, key = reader.number("I"), reader.key()
        gather = self._gathers.get(key)
        if gather is None or rank not in gather.blobs or gather.missing():
            return
        gather.taken.add(rank)
        if len(gather.taken) == gather.size:
            del self._gathers[key]
            with self._mutex:
                self._pending_takes -= 1
                self._mutex.notify_all()

    def _handle_withdraw(self, connection: Connection, reader: wire.Reader) -> None:
        """A rank gives up waiting and may come again. Refused when the gather is complete: then the others count it."""
        rank, key = reader.number("I"), reader.key()
        gather = self._gathers.get(key)
        if gather is not None and not gather.missing():
            self._reply(connection, wire.REJECTED)
            return
        # Not what another process has given who claims the same rank.
        if gather is not None and gather.blobs.get(rank) == reader.rest():
            del gather.blobs[rank]
            gather.given_up.add(rank)
            if not gather.blobs:
                del self._gathers[key]
        self._reply(connection, wire.OK)

    def _wake(self, key: str) -> None:
        for connection in list(self._connections.values()):
            if connection.waiter is not None and connection.waiter.key == key:
                self._answer(connection)

    def _answer(self, connection: Connection, expired: bool = False) -> None:
        """Answers a waiting rank if there is something to say, or if its time is up."""
        waiter = connection.waiter
        if waiter is None:
            return
        expired = expired or time.monotonic() >= waiter.deadline
        failure = None
        if waiter.kind == wire.GET:
            value = self._values.get(waiter.key)
            if value is not None or expired:
                connection.waiter = None
                self._reply(connection, wire.NOT_YET if value is None else wire.OK, value or b"")
            return
        gather = self._gathers.get(waiter.key)
        if waiter.kind == wire.WATCH:
            failure = self._failures.culprit(waiter.members, waiter.key)
        elif gather is not None:
            failure = self._failures.culprit({gather.members[rank] for rank in gather.missing()})
        if failure is not None:
            self._reply(connection, wire.FAILED, failure.packed())
            connection.waiter = None
        elif waiter.kind == wire.GATHER and (
            gather is None or self._tell_gathered(connection, gather, expired)
        ):
            connection.waiter = None

    def _tell_gathered(self, connection: Connection, gather: Gather, expired: bool) -> bool:
        missing = gather.missing()
        if not missing:
            self._reply(connection, wire.OK, struct.pack("<I", gather.size))
            for part in gather.packed():
                self._reply(connection, wire.OK, part)
        elif expired:
            awaited = gather.awaited()
            listed = awaited[:MAX_LISTED]
            self._reply(connection, wire.NOT_YET, struct.pack(f"<{len(listed) + 1}I", len(awaited), *listed))
        return expired or not missing

    def _reply(self, connection: Connection, status: int, body: bytes = b"") -> None:
        if connection.sends is not None:
            self._send(connection, connection.sends.frame(bytes([status]) + body))

    def _send(self, connection: Connection, data: bytes) -> None:
        if connection.closing:
            return
        connection.unsent += data
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)
