"""Who is connected to a server that anybody can reach: at most a fixed number, and nobody for long without a proof.

Who comes sends away who has come first and waits for nothing, so that idle connections keep nobody out, and a request
that has come is answered. Descriptors are kept for the job.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import socketserver
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

KEPT_DESCRIPTORS = 128  # none of them may have the last ones of a process; at most a quarter of all
_LEAVES_S = 1.0  # for a thread to see that its connection was closed
_PAUSE_S = 0.01  # where the process has no descriptor or thread for one more connection
_MAX_HEAD = 1 << 16  # bytes; of more the handler says that it is too long
BACKLOG = 512  # that the kernel keeps: where it has no place for one more, that one tries again seconds later


def are_descriptors_short(newest: int) -> bool:
    """newest: a descriptor that was just opened. The kernel gives the lowest that is free."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most != resource.RLIM_INFINITY and newest >= most - min(KEPT_DESCRIPTORS, most // 4)


def shut_down(peer: socket.socket) -> None:
    """Its thread reads the end."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def has_unread(peer: socket.socket) -> bool:
    """Whether it has sent what its thread has not read yet, and not ended."""
    look = select.poll()
    look.register(peer, select.POLLIN | select.POLLRDHUP)
    return any(events == select.POLLIN for _, events in look.poll(0))


Peer = TypeVar("Peer", bound=Hashable)


class UnauthenticatedConnections(Generic[Peer]):
    """Connections that have proved nothing yet, and which of them goes where there are too many. Any thread.

    most: at a time, and as many that were sent away and whose threads have not seen it yet: who accepts does not wait
    for each of them. limit_s: for expire(); how long one may stay. send_away: ends one; who closes it calls gone(),
    in send_away or later. has_news: it is passed over; an event loop reads from it here, and says whether it is gone
    for that. tell: takes a line when there are too many, once.
    """

    def __init__(
        self,
        most: int,
        limit_s: float,
        send_away: Callable[[Peer], object],
        has_news: Callable[[Peer], bool],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.most, self._limit_s, self._tell = most, limit_s, tell
        self._end, self._has_news = send_away, has_news
        self._changed = threading.Condition()  # guards what follows
        self._since: dict[Peer, float] = {}  # the first is the oldest
        self._sent_away: set[Peer] = set()

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._since)

    def admit(self, peer: Peer, newest: int = -1) -> bool:
        """Whether there is room for it; who has come first makes room. False: close it. newest: its descriptor, where
        the last ones of the process are kept for the job."""
        with self._changed:
            if are_descriptors_short(newest) and not self.make_room():
                return False
            if not self._has_room():
                self.make_room()
                if self._sent_away:
                    self._changed.wait_for(self._has_room, _LEAVES_S)
                if not self._has_room():
                    return False
            self._since[peer] = time.monotonic()
            return True

    def gone(self, peer: Peer) -> None:
        """It is about to be closed, or has proved that it belongs to the job: it is not counted any more."""
        with self._changed:
            self._since.pop(peer, None)
            self._sent_away.discard(peer)
            self._changed.notify_all()

    def make_room(self) -> bool:
        """Sends away the oldest that has no news; else the oldest. Whether one is gone already."""
        with self._changed:
            if self._tell is not None:
                self._tell(
                    f"more connections than {self.most} without a request: the oldest are closed, and the job goes on"
                )
                self._tell = None
            before = len(self._since)
            staying = [one for one in self._since if one not in self._sent_away]
            for one in staying:
                if not self._has_news(one):
                    self._send_away(one)
                    break
                if len(self._since) < before:
                    break
            else:
                for one in staying[:1]:
                    self._send_away(one)
            return len(self._since) < before

    def expire(self) -> None:
        with self._changed:
            before = time.monotonic() - self._limit_s
            for peer in [one for one, since in self._since.items() if since <= before]:
                self._send_away(peer)

    def next_s(self) -> float:
        """When expire() has something to do."""
        return next(iter(self._since.values()), float("inf")) + self._limit_s

    def _has_room(self) -> bool:
        staying = len(self._since) - len(self._sent_away)
        return staying < self.most and len(self._since) < 2 * self.most

    def _send_away(self, peer: Peer) -> None:
        self._sent_away.add(peer)
        self._end(peer)


def accept(
    listener: socket.socket, unauthenticated: UnauthenticatedConnections[Any]
) -> tuple[socket.socket, Any] | None:
    """The next connection and its address. None: look again, unless the listener was closed; there is none, or no
    descriptor for it, and then an unauthenticated one makes room."""
    try:
        return listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    except OSError:
        if not unauthenticated.make_room():
            time.sleep(_PAUSE_S)  # it would be tried again at once
        return None


def serve_in_thread(
    peer: socket.socket,
    unauthenticated: UnauthenticatedConnections[socket.socket],
    serve: Callable[[socket.socket], object],
    name: str,
) -> None:
    """Has a thread of this name call serve(peer), which closes it. It is closed at once where there is no room."""
    if not unauthenticated.admit(peer, peer.fileno()):
        peer.close()
        return
    try:
        threading.Thread(target=serve, args=(peer,), name=name, daemon=True).start()
    except RuntimeError:  # the process may have no more threads
        unauthenticated.gone(peer)
        peer.close()
        if not unauthenticated.make_room():
            time.sleep(_PAUSE_S)


class _Visit(NamedTuple):
    peer: socket.socket
    address: Any


class BoundedThreads(socketserver.ThreadingMixIn):
    """For an HTTP server of the standard library: put it before that server's class.

    The thread of serve_forever() accepts, and keeps whoever has not sent the whole head of a request; in a crowd the
    oldest of them go. A request gets a thread of its own, and nobody displaces it.
    """

    daemon_threads = True
    request_queue_size = BACKLOG
    max_connections = 64  # without a request; and as many requests that are answered
    connection_limit_s = 20.0  # for a request to come, and for its answer, however slowly bytes move
    tell: Callable[[str], None] | None = None  # see UnauthenticatedConnections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._look = select.epoll()
        self._unauthenticated = UnauthenticatedConnections(
            self.max_connections, self.connection_limit_s, self._close_silent, self._read, self.tell
        )
        self._silent: dict[int, _Visit] = {}  # the same, by descriptor
        self._whole: deque[_Visit] = deque()  # requests that wait for a thread
        self._answered: dict[socket.socket, float] = {}  # since when; their threads remove them
        self._stops, self._has_ended = False, threading.Event()
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        """As of a TCP server: HTTPServer would ask DNS for the name of this host, which may take long."""
        socketserver.TCPServer.server_bind(self)  # type: ignore[arg-type]
        self.server_name, self.server_port = "", self.server_address[1]  # type: ignore[attr-defined]

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        listener: socket.socket = self.socket  # type: ignore[attr-defined]
        listener.setblocking(False)
        self._look.register(listener, select.EPOLLIN)
        try:
            while not self._stops:
                found = {number for number, _ in self._look.poll(0.05 if self._whole else poll_interval)}
                for number in found & self._silent.keys():
                    self._read(self._silent[number])
                while self._whole and len(self._answered) < self.max_connections:
                    self._answer(self._whole.popleft())
                if len(self._whole) >= self.max_connections:
                    time.sleep(0.05)  # whoever waits at the port would end each look at once
                elif listener.fileno() in found:
                    self._accept(listener)
                self._expire()
        finally:
            self._has_ended.set()

    def shutdown(self) -> None:
        self._stops = True
        self._has_ended.wait()

    def server_close(self) -> None:
        super().server_close()
        for visit in (*self._silent.values(), *self._whole):
            visit.peer.close()
        self._look.close()

    def _accept(self, listener: socket.socket) -> None:
        """A few: what they have sent is looked at before the next ones could displace them."""
        for _ in range(max(1, self.max_connections // 4)):
            accepted = accept(listener, self._unauthenticated)
            if accepted is None:
                return
            visit, peer = _Visit(*accepted), accepted[0]
            if not self._unauthenticated.admit(visit, peer.fileno()):
                peer.close()
                continue
            peer.setblocking(False)
            self._silent[peer.fileno()] = visit
            self._look.register(peer, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def _read(self, visit: _Visit) -> bool:
        """Whether it is no silent one any more: its request is whole, or it has ended."""
        try:
            head = visit.peer.recv(_MAX_HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            head = b""
        if not head:
            self._close_silent(visit)
        elif b"\r\n\r\n" in head or b"\n\n" in head or len(head) == _MAX_HEAD:
            self._look.unregister(visit.peer)
            self._whole.append(self._silent.pop(visit.peer.fileno()))
            self._unauthenticated.gone(visit)
        return visit.peer.fileno() not in self._silent

    def _answer(self, visit: _Visit) -> None:
        visit.peer.setblocking(True)
        self._answered[visit.peer] = time.monotonic()
        try:
            self.process_request(visit.peer, visit.address)
        except RuntimeError:  # the process may have no more threads
            self.shutdown_request(visit.peer)

    def _close_silent(self, visit: _Visit) -> None:
        self._unauthenticated.gone(visit)
        del self._silent[visit.peer.fileno()]
        with contextlib.suppress(OSError):
            visit.peer.recv(_MAX_HEAD)  # bytes that nobody has taken would make the end a reset
        visit.peer.close()

    def _expire(self) -> None:
        self._unauthenticated.expire()
        before = time.monotonic() - self.connection_limit_s
        for peer, since in list(self._answered.items()):
            if since < before:
                shut_down(peer)

    def shutdown_request(self, request: Any) -> None:
        """Called with each connection that had a thread, in the end."""
        self._answered.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ends, or that is closed for another, is no event."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[misc]
