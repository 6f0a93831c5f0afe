"""Sends commits to spares: rank 0 of a generation feeds them through a connection that each spare opens.

Rank 0 writes its addresses into the rendezvous; a spare reads them there, proves the job's secret (wire.py), and
receives each newest commit: [commit u64][parts u32][bytes u64 of each part][parts][digest][tag]. The content is not
interpreted here. A spare keeps the newest commit that arrived completely.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from horoclone import errors
from horoclone.bootstrap import seal, wire
from horoclone.bootstrap.client import HELLO_S, SLICE_S, Client
from horoclone.connection_limits import BACKLOG, UnauthenticatedConnections

KEY = "replica"  # [generation u64][addresses, comma-separated]
MAX_SPARES = 64  # and as many unauthenticated connections, of which the oldest goes when another comes
MAX_PARTS = 1 << 20
DIGEST_BYTES = 8
STUCK_S = 10.0  # a spare that takes nothing for so long is given up
CHUNK = 1 << 20
PART_OF_TIME = 2  # one part of so many at most goes to packing and sending, the rest is training's alone
RETRY_S = 0.5
REACH_S = 2.0  # for the feeder to answer; it is tried again
LAST_S = 30.0  # for the commit that is on its way when a spare is promoted
LOOK_S = 5.0  # so often does a spare that hears nothing look whether somebody else feeds
_HEAD = struct.Struct("<QI")

Part = bytes | bytearray | memoryview
Pack = Callable[[], Sequence[Part]]


class Replica(NamedTuple):
    """A commit as it travels. digest: a number that who packed it has drawn; 0 is none. tag: see seal.tag_of()."""

    commit: int
    parts: Sequence[Part]
    digest: int
    tag: bytes = b""

    def context(self, job: str) -> str:
        """For the tag."""
        return f"{job}, commit {self.commit}, {self.digest}"


class Feeder:
    """Rank 0's side. Threads: one that waits for spares, one for each spare; offer() is called by the one that trains.

    bindings: where it listens. interval_s: a spare gets a commit at most so often, and the newest one in the end.
    """

    def __init__(self, secret: bytes, job: str, bindings: Sequence[str], interval_s: float) -> None:
        self._secret, self._job, self._interval_s = secret, f"{job}/replica", interval_s
        self._news = threading.Condition()
        self._offered: tuple[int, Pack] | None = None
        self._packed: Replica | None = None
        self._spares = 0
        self._strangers = UnauthenticatedConnections(MAX_SPARES, HELLO_S)
        self._closed = False
        self._packing = threading.Lock()
        self._listeners = [
            socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
            )
            for host in bindings
        ]
        self.addresses: list[str] = []
        for listener in self._listeners:
            host, port = listener.getsockname()[:2]
            hosts = wire.routable_addresses() if host in ("0.0.0.0", "::") else [host]
            self.addresses += [wire.format_address(one, port) for one in hosts]
            threading.Thread(target=self._accept, args=(listener,), name="hc-replica", daemon=True).start()

    def offer(self, commit: int, pack: Pack) -> None:
        """All ranks hold this commit. pack is called by another thread, later or never."""
        with self._news:
            self._offered = commit, pack
            self._news.notify_all()

    def digest(self, commit: int) -> int:
        """Of a commit that was sent; 0: it was not, or is not the newest."""
        packed = self._packed
        return packed.digest if packed is not None and packed.commit == commit else 0

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            if not self._strangers.admit(peer):
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), name="hc-replica-out", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if wire.admit(peer, self._secret, self._job, HELLO_S) and self._take():
                self._strangers.gone(peer)
                peer.settimeout(STUCK_S)
                try:
                    self._feed(peer)
                finally:
                    with self._news:
                        self._spares -= 1
        except (OSError, MemoryError):
            pass  # the spare has gone, or is promoted
        finally:
            self._strangers.gone(peer)
            peer.close()

    def _take(self) -> bool:
        """Whether there is room for one more that has proved to be of this job."""
        with self._news:
            if self._spares >= MAX_SPARES:
                return False
            self._spares += 1
            return True

    def _feed(self, peer: socket.socket) -> None:
        sent, next_s = 0, 0.0
        while True:
            with self._news:
                while not self._closed and (self._offered is None or self._offered[0] <= sent):
                    self._news.wait(SLICE_S)
                    if _has_ended(peer):
                        return
            if self._closed:
                return
            time.sleep(max(0.0, next_s - time.monotonic()))
            began_s = time.monotonic()
            replica = self._newest()
            if replica is None or replica.commit <= sent:
                next_s = began_s + max(self._interval_s, RETRY_S)
                continue
            sent = replica.commit
            sizes = [memoryview(part).nbytes for part in replica.parts]
            peer.sendall(_HEAD.pack(replica.commit, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
            for part in replica.parts:
                view = memoryview(part).cast("B")
                for begin in range(0, len(view), CHUNK):
                    peer.sendall(view[begin : begin + CHUNK])
            peer.sendall(struct.pack("<Q", replica.digest) + replica.tag)
            took_s = time.monotonic() - began_s
            next_s = began_s + max(self._interval_s, PART_OF_TIME * took_s)

    def _newest(self) -> Replica | None:
        """Packed once for all spares. What cannot be packed is not sent: the spare then takes part in a sync."""
        with self._packing:
            offered = self._offered
            if offered is None or (self._packed is not None and self._packed.commit == offered[0]):
                return self._packed
            try:
                parts = offered[1]()
            except Exception:
                return self._packed
            packed = Replica(offered[0], parts, 1 + secrets.randbits(62))
            tag = seal.tag_of(self._secret, packed.context(self._job), parts)
            self._packed = packed._replace(tag=tag)
            return self._packed


class Feed(Client):
    """A spare's side. Thread: hc-replica-in, from start() to take(), or until what finish() names is there."""

    def __init__(self, addresses: Sequence[str], secret: bytes, job: str) -> None:
        super().__init__(list(addresses), secret, job, SLICE_S)
        self._newest: Replica | None = None
        self._stop = False
        self._wanted, self._until_s = 0, float("inf")
        self._thread = threading.Thread(target=self._run, name="hc-replica-in", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, commit: int) -> None:
        """This process is promoted: nothing after this commit is wanted, and that one not for long."""
        self._wanted, self._until_s = commit, time.monotonic() + LAST_S

    def _is_over(self) -> bool:
        has_come = self._newest is not None and 0 < self._wanted <= self._newest.commit
        return self._stop or has_come or time.monotonic() >= self._until_s

    def take(self) -> Replica | None:
        """The newest commit that has come whole; no other comes after it."""
        self._stop = True
        return self._newest

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._receive_from(self.get(KEY, SLICE_S))
            except (errors.HorovodInternalError, OSError, ValueError, MemoryError):
                pass
            if not self._is_over():
                time.sleep(RETRY_S)
        self.close()

    def _receive_from(self, value: bytes) -> None:
        looked_s = time.monotonic()

        def is_over() -> bool:
            """Also when another rank 0 feeds: the one before may be silent, and its connection does not end."""
            nonlocal looked_s
            if not self._is_over() and time.monotonic() >= looked_s + LOOK_S:
                looked_s = time.monotonic()
                return self.get(KEY, SLICE_S) != value
            return self._is_over()

        addresses = [one for one in value[8:].decode().split(",") if one]
        source = _Source(addresses, self._secret, f"{self._job}/replica", REACH_S)
        try:
            connection = source.open()
            while not self._is_over():
                replica = self._checked(_read(connection, is_over))
                if replica is None:
                    return
                if not self._stop:
                    self._newest = replica
        finally:
            source.close()

    def _checked(self, replica: Replica | None) -> Replica | None:
        """ConnectionError for a commit that no process of this job has packed, or that was damaged on its way."""
        if replica is None:
            return None
        context = replica.context(f"{self._job}/replica")
        if not seal.is_right(replica.tag, self._secret, context, replica.parts):
            raise ConnectionError(seal.broken(f"commit {replica.commit}"))
        return replica


class _Source(Client):
    def open(self) -> socket.socket:
        self._connect(time.monotonic() + self._timeout_s)
        assert self._connection is not None
        return self._connection


def _read(connection: socket.socket, is_over: Callable[[], bool]) -> Replica | None:
    """The next commit. None when this process does not want one any more; OSError where the stream makes no sense."""
    head = _exactly(connection, _HEAD.size, is_over)
    if head is None:
        return None
    commit, count = _HEAD.unpack(head)
    if count > MAX_PARTS:
        raise ConnectionError(f"a commit of {count} parts")
    table = _exactly(connection, 8 * count, is_over)
    if table is None:
        return None
    sizes = struct.unpack(f"<{count}Q", table)
    if sum(sizes) > _memory_bytes():
        raise ConnectionError(f"a commit of {sum(sizes)} bytes, more than this machine has")
    parts: list[bytearray] = []
    for size in sizes:
        part = _exactly(connection, size, is_over)
        if part is None:
            return None
        parts.append(part)
    told = _exactly(connection, DIGEST_BYTES + seal.TAG_BYTES, is_over)
    if told is None:
        return None
    (digest,) = struct.unpack("<Q", told[:DIGEST_BYTES])
    return Replica(commit, parts, digest, bytes(told[DIGEST_BYTES:]))


def _exactly(connection: socket.socket, count: int, is_over: Callable[[], bool]) -> bytearray | None:
    """Reads exactly that many bytes, however long they take. None when is_over()."""
    part = bytearray(count)
    view, at = memoryview(part), 0
    connection.settimeout(SLICE_S)
    while at < count:
        try:
            got = connection.recv_into(view[at : at + CHUNK])
        except TimeoutError:
            if is_over():
                return None
            continue
        if got == 0:
            raise ConnectionError("the feeder has gone")
        at += got
    return part


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _has_ended(peer: socket.socket) -> bool:
    """A spare says nothing after its hello: what can be read is its end."""
    try:
        peer.setblocking(False)
        return peer.recv(1) is not None
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            peer.settimeout(STUCK_S)
