"""Sends commits to those who wait in init(), spares and newcomers: rank 0 of a generation feeds them through a
connection that each of them opens.

Rank 0 writes its addresses into the rendezvous; a spare reads them there, proves the job's secret (wire.py), and
receives each newest commit: [commit u64][parts u32][bytes u64 of each part], of each part [what u8] and, where it is
not as in the commit that was sent before, its bytes; then [sum u32 of each part][digest][tag]. Where training waits for
a newer one, the rest is left out (GIVEN_UP). The content is not interpreted here. A spare keeps the newest commit that
arrived completely.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from horoclone import errors
from horoclone.bootstrap import seal, wire
from horoclone.bootstrap.client import HELLO_S, SLICE_S, Client
from horoclone.connection_limits import (
    BACKLOG,
    UnauthenticatedConnections,
    accept,
    has_unread,
    serve_in_thread,
    shut_down,
)
from horoclone.runtime.native_module import core

KEY = "replica"  # [generation u64][addresses, comma-separated]
MAX_SPARES = 64  # and as many unauthenticated connections, of which the oldest goes when another comes
MAX_PARTS = 1 << 20
DIGEST_BYTES = 8
STUCK_S = 10.0  # after which a spare that takes nothing is given up
CHUNK = 1 << 20  # bytes that are sent, and summed while they are in a cache, at once
SLICE = 1 << 18  # bytes that are compared at once
PART_OF_TIME = 2  # one part of so many at most goes to packing and sending, the rest is training's alone
RETRY_S = 0.5
REACH_S = 2.0  # for the feeder to answer; it is tried again
LAST_S = 30.0  # a promoted spare that hears nothing for so long gets nothing any more
LOOK_S = 5.0  # between two looks of a spare that hears nothing whether somebody else feeds
QUIET_S = 5.0  # who hears nothing for so long does not wait to be fed any more
_HEAD = struct.Struct("<QI")
CHANGED, KEPT, GIVEN_UP = b"\0", b"\1", b"\2"

Part = bytes | bytearray | memoryview
Pack = Callable[[], Sequence[Part]]


class Replica(NamedTuple):
    """A commit as it travels: parts[0] is a pickle, the others are memory of arrays. No parts: there is such a commit,
    and it cannot be sent in this way.

    commit 0: none is there yet. digest: a number that who packed it has drawn; 0 is none. sums: of each part, see
    sum_with(); tag: see seal.tag_of().
    """

    commit: int
    parts: Sequence[Part]
    digest: int
    tag: bytes = b""
    sums: Sequence[int] = ()

    def tag_with(self, secret: bytes, job: str) -> bytes:
        """Of the pickle and of all sizes and sums. An array is data as a gradient is, and counts with its sum."""
        context = f"{job}, commit {self.commit}, {self.digest}"
        sizes = [memoryview(part).nbytes for part in self.parts]
        table = struct.pack(f"<{len(sizes)}Q{len(sizes)}I", *sizes, *self.sums)
        return seal.tag_of(secret, context, [*self.parts[:1], table])


def sum_with(chunk: Part, before: int) -> int:
    """The sum of a part up to this chunk of it; before: up to the one before, 0 for the first. All chunks but the last
    have CHUNK bytes. The core's hash, of which the CRC-32 is taken, is ten times as fast as a CRC-32 of the bytes."""
    import numpy as np  # not with the runtime, which is imported where nothing is summed

    array = np.frombuffer(chunk, np.uint8)
    hashes: list[int] = core().hash_memory([array.ctypes.data], [array.nbytes])
    return zlib.crc32(struct.pack("<Q", hashes[0]), before)


class Feeder:
    """Rank 0's side. Threads: one for each listener, one for each spare; offer() is called by the one that trains.

    bindings: where it listens, see wire.parse_address(). interval_s: the least time between two commits that
    a spare gets; it gets the newest one in the end.
    """

    def __init__(self, secret: bytes, job: str, bindings: Sequence[str], interval_s: float) -> None:
        self._secret, self._job, self._interval_s = secret, f"{job}/replica", interval_s
        self._news = threading.Condition()
        self._offered: tuple[int, Pack] | None = None
        self._hurries = False  # the newest offer is not to wait for its turn
        self._packed: Replica | None = None
        self._packed_of: tuple[int, Pack] | None = None  # the offer
        # what each spare was sent last
        self._served: dict[socket.socket, tuple[int, Pack] | None] = {}
        self._unauthenticated = UnauthenticatedConnections(MAX_SPARES, HELLO_S, shut_down, has_unread)
        self._closed = False
        self._packing = threading.Lock()
        self._listeners: list[socket.socket] = []
        self.addresses: list[str] = []
        for binding in bindings:
            family, target = wire.parse_address(binding)
            listener = socket.socket(family, socket.SOCK_STREAM)
            self._listeners.append(listener)
            listener.bind(target)
            listener.listen(BACKLOG)
            if family == socket.AF_UNIX:
                self.addresses.append(binding)
            else:
                host, port = listener.getsockname()[:2]
                hosts = wire.routable_addresses() if host in ("0.0.0.0", "::") else [host]
                self.addresses += [wire.format_address(one, port) for one in hosts]
            threading.Thread(target=self._accept, args=(listener,), name="hc-replica", daemon=True).start()

    def offer(self, commit: int, pack: Pack) -> None:
        """All ranks hold this commit. pack is called by another thread, later or never, and once: an offer of the same
        commit again is the same, and ranks compare the digest that it got."""
        with self._news:
            if self._offered is None or self._offered[0] != commit:
                self._offered, self._hurries = (commit, pack), False
                self._news.notify_all()

    def hurry(self) -> None:
        """Training stands still until the newest offer has arrived: it does not wait for its turn."""
        with self._news:
            self._hurries = True
            self._news.notify_all()

    def finish(self) -> None:
        """Waits until everybody has the newest offer, or is gone: this process may end then."""
        self.hurry()
        with self._news:
            self._news.wait_for(
                lambda: self._closed or all(one is self._offered for one in self._served.values()), LAST_S
            )

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
            accepted = accept(listener, self._unauthenticated)
            if accepted is None:
                continue
            peer = accepted[0]
            # Anybody on this host may open the name of a unix socket.
            if peer.family == socket.AF_UNIX and not wire.same_user(peer):
                peer.close()
            else:
                serve_in_thread(peer, self._unauthenticated, self._serve, "hc-replica-out")

    def _serve(self, peer: socket.socket) -> None:
        try:
            if peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not wire.admit(peer, self._secret, self._job, HELLO_S):
                return
            self._unauthenticated.gone(peer)
            if self._take(peer):
                peer.settimeout(STUCK_S)
                try:
                    self._feed(peer)
                finally:
                    with self._news:
                        del self._served[peer]
                        self._news.notify_all()
                        if not self._served and self._packed is not None:
                            # Its memory goes; its digest may still be asked for.
                            self._packed = self._packed._replace(parts=())
                            self._packed_of = None
        except (OSError, MemoryError):
            pass  # the spare has gone, or is promoted
        finally:
            self._unauthenticated.gone(peer)
            peer.close()

    def _take(self, peer: socket.socket) -> bool:
        """Whether there is room for one more that has proved to be of this job."""
        with self._news:
            if len(self._served) >= MAX_SPARES:
                return False
            self._served[peer] = None
            return True

    def _feed(self, peer: socket.socket) -> None:
        sent: Replica | None = None
        seen: tuple[int, Pack] | None = None
        next_s = 0.0
        if self._offered is None:
            self._send(peer, Replica(0, (), 0, sums=[]), None)  # there may never be one
        while True:
            with self._news:
                while not self._closed and (
                    self._offered is seen or (time.monotonic() < next_s and not self._hurries)
                ):
                    wait_s = SLICE_S if self._offered is seen else next_s - time.monotonic()
                    self._news.wait(min(max(wait_s, 0.0), SLICE_S))
                    if _has_ended(peer):
                        return
            if self._closed:
                return
            began_s = time.monotonic()
            seen, replica = self._newest()
            if not self._send(peer, replica, sent):
                continue
            sent = replica
            with self._news:
                self._served[peer] = seen
                self._news.notify_all()
            took_s = time.monotonic() - began_s
            next_s = began_s + max(self._interval_s, PART_OF_TIME * took_s)

    def _newest(self) -> tuple[tuple[int, Pack], Replica]:
        """Packed once for all spares. What cannot be packed has no parts: the spare then takes part in a sync."""
        with self._packing:
            offered = self._offered
            assert offered is not None
            if self._packed is None or self._packed_of is not offered:
                try:
                    parts = [memoryview(part).cast("B") for part in offered[1]()]
                except Exception:
                    parts = []
                self._packed = Replica(offered[0], parts, 1 + secrets.randbits(62), sums=[-1] * len(parts))
                self._packed_of = offered
            return offered, self._packed

    def _send(self, peer: socket.socket, replica: Replica, before: Replica | None) -> bool:
        """Only what has changed since the commit before, which this peer has. Sums are made once for all spares. False:
        training waits for a newer commit."""
        sizes, sums = [memoryview(part).nbytes for part in replica.parts], replica.sums
        assert isinstance(sums, list)
        peer.sendall(_HEAD.pack(replica.commit, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
        for place, part in enumerate(replica.parts):
            if self._hurries and self._offered is not None and self._offered[0] > replica.commit:
                peer.sendall(GIVEN_UP)
                return False
            old = before.parts[place] if before is not None and place < len(before.parts) else None
            if before is not None and old is not None and _are_same(part, old):
                sums[place] = before.sums[place]
                peer.sendall(KEPT)
                continue
            peer.sendall(CHANGED)
            view, total = memoryview(part), 0
            for begin in range(0, len(view), CHUNK):
                chunk = view[begin : begin + CHUNK]
                peer.sendall(chunk)
                if sums[place] < 0:
                    total = sum_with(chunk, total)  # while the other side takes it
            sums[place] = total if sums[place] < 0 else sums[place]
        tag = replica.tag_with(self._secret, self._job)
        peer.sendall(struct.pack(f"<{len(sums)}I", *sums) + struct.pack("<Q", replica.digest) + tag)
        return True


class Feed(Client):
    """A spare's side. Thread: hc-replica-in, from start() to take(), or until what finish() names is there."""

    def __init__(self, addresses: Sequence[str], secret: bytes, job: str) -> None:
        super().__init__(list(addresses), secret, job, SLICE_S)
        self._newest: Replica | None = None
        self._memory: dict[int, bytearray] = {}  # for parts of the next commit, by their places
        self._stop = False
        self._feeder = 0  # who is connected and feeds: the generation since which it does; 0: nobody
        self._heard_s = time.monotonic()  # the last bytes
        self._wanted = 0  # see finish()
        self._thread = threading.Thread(target=self._run, name="hc-replica-in", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def has_what_it_can(self) -> bool:
        """Whether a commit is there, or nothing comes."""
        return self._newest is not None or self._is_quiet()

    def has_commit(self) -> bool:
        return self._newest is not None and bool(self._newest.parts)

    def promised(self) -> tuple[Replica | None, int]:
        """The newest commit that has come whole, and who sends those behind it; see _feeder. Waits for the first; of
        who has been silent since, nothing more is expected."""
        while not self.has_commit() and self._feeder and not self._is_over() and not self._is_quiet():
            self._thread.join(SLICE_S / 10)
        # First: who has sent all that is wanted is connected no more.
        feeder = 0 if self._is_quiet() else self._feeder
        return self._newest, feeder

    def _is_quiet(self) -> bool:
        return time.monotonic() >= self._heard_s + QUIET_S

    def finish(self, commit: int) -> None:
        """This process is promoted: nothing after this commit is wanted, and that one as long as something comes."""
        self._hear()  # what comes next comes from now on
        self._wanted = commit

    def _is_over(self) -> bool:
        if not self._wanted or self._stop:
            return self._stop
        has_come = self._newest is not None and self._wanted <= self._newest.commit
        return has_come or time.monotonic() >= self._heard_s + LAST_S

    def take(self, waits: bool = True) -> Replica | None:
        """The newest commit that has come whole; no other comes after it. waits: for the one that finish() has named,
        as long as something comes."""
        if waits:
            self._hear()  # it was promised just now
        while waits and self._wanted and self._feeder and not self._is_over() and not self._is_quiet():
            self._thread.join(SLICE_S / 10)
        self._stop, self._memory = True, {}
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
            stream, before = _Stream(connection, is_over, self._hear), None  # of this feeder
            self._feeder = int.from_bytes(value[:8], "little")
            while not self._is_over():
                replica = self._checked(stream.read(before, self._memory))
                if replica is None:
                    return
                before = self._keep(replica)
        finally:
            self._feeder = 0
            source.close()

    def _keep(self, replica: Replica) -> Replica:
        """Makes it the newest. What has changed is likely to change again, and fresh memory costs more than a copy: the
        memory of the commit before is for the next one, unless it may be read now, as this process is promoted."""
        newest = self._newest
        if not self._stop:
            self._newest = replica
            if newest is None or not newest.parts:
                self._memory = {place: bytearray(len(part)) for place, part in enumerate(replica.parts)}
            for place, (part, old) in enumerate(
                zip(replica.parts, newest.parts if newest else (), strict=False)
            ):
                self._memory.pop(place, None)
                if old is not part and isinstance(old, bytearray) and not self._wanted:
                    self._memory[place] = old
        return replica

    def _hear(self) -> None:
        self._heard_s = time.monotonic()

    def _checked(self, replica: Replica | None) -> Replica | None:
        """ConnectionError for a commit that no process of this job has packed, or that was damaged on its way."""
        if replica is None:
            return None
        tag = replica.tag_with(self._secret, f"{self._job}/replica")
        if not hmac.compare_digest(replica.tag, tag):
            raise ConnectionError(seal.broken(f"commit {replica.commit}"))
        return replica


class _Source(Client):
    def open(self) -> socket.socket:
        self._connect(time.monotonic() + self._timeout_s)
        assert self._connection is not None
        return self._connection.socket


class _Stream:
    """What comes through a connection. is_over: asked when nothing has come for a while; hear: called when it does."""

    def __init__(
        self, connection: socket.socket, is_over: Callable[[], bool], hear: Callable[[], None] = lambda: None
    ) -> None:
        self._connection, self._is_over, self._hear = connection, is_over, hear
        connection.settimeout(SLICE_S)

    def read(self, before: Replica | None, memory: dict[int, bytearray]) -> Replica | None:
        """The next commit. before: the one that came before it. None when this process does not want one any more;
        OSError where the stream makes no sense."""
        try:
            while (replica := self._read_one(before, memory)) is None:
                pass
            return replica
        except _Over:
            return None

    def _read_one(self, before: Replica | None, memory: dict[int, bytearray]) -> Replica | None:
        """None: it was given up, and its memory is for the next."""
        commit, count = _HEAD.unpack(self._exactly(_HEAD.size))
        if count > MAX_PARTS:
            raise ConnectionError(f"a commit of {count} parts")
        sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
        if sum(sizes) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise ConnectionError(f"a commit of {sum(sizes)} bytes, more than this machine has")
        parts: list[Part] = []
        sums: list[int] = []
        taken: dict[int, bytearray] = {}
        for place, size in enumerate(sizes):
            what = self._exactly(1)
            if what == GIVEN_UP:
                memory.update(taken)
                return None
            if what == CHANGED:
                old = memory.pop(place, None)
                part = old if old is not None and len(old) == size else bytearray(size)
                taken[place] = part
                sums.append(self._take_in(part))
                parts.append(part)
                continue
            if before is None or place >= len(before.parts) or len(before.parts[place]) != size:
                raise ConnectionError("a part that was never sent")
            sums.append(before.sums[place])
            parts.append(before.parts[place])
        told = struct.unpack(f"<{count}I", self._exactly(4 * count))
        if list(told) != sums:
            raise ConnectionError(seal.broken(f"commit {commit}"))
        (digest,) = struct.unpack("<Q", self._exactly(DIGEST_BYTES))
        return Replica(commit, parts, digest, bytes(self._exactly(seal.TAG_BYTES)), sums)

    def _exactly(self, count: int) -> bytearray:
        part = bytearray(count)
        self._fill(memoryview(part))
        return part

    def _take_in(self, part: bytearray) -> int:
        """Reads a part and returns its sum."""
        view, total = memoryview(part), 0
        for begin in range(0, len(view), CHUNK):
            chunk = view[begin : begin + CHUNK]
            self._fill(chunk)
            total = sum_with(chunk, total)
        return total

    def _fill(self, view: memoryview) -> None:
        """Reads as many bytes as there is room for, however long they take. _Over when is_over()."""
        at = 0
        while at < len(view):
            try:
                got = self._connection.recv_into(view[at:])
            except TimeoutError:
                if self._is_over():
                    raise _Over from None
                continue
            if got == 0:
                raise ConnectionError("the feeder has gone")
            self._hear()
            at += got


class _Over(Exception):
    """This process wants nothing more."""


def _are_same(one: Part, other: Part) -> bool:
    """Compared in pieces, as bytes: two memoryviews are compared byte by byte."""
    if one is other or len(one) != len(other):
        return one is other
    return all(
        bytes(one[at : at + SLICE]) == bytes(other[at : at + SLICE]) for at in range(0, len(one), SLICE)
    )


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
