"""Who is connected to a server that anybody can reach: at most a fixed number, and nobody for long without a proof.

Who comes sends away who has come first, so that idle connections keep nobody out. Descriptors are kept for the job.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

KEPT_DESCRIPTORS = 128  # none of them may have the last ones of a process; at most a quarter of all
_LEAVES_S = 1.0  # for a thread to see that its connection was closed


def are_descriptors_short(newest: int) -> bool:
    """newest: a descriptor that was just opened. The kernel gives the lowest that is free."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most != resource.RLIM_INFINITY and newest >= most - min(KEPT_DESCRIPTORS, most // 4)


def too_many(most: int) -> str:
    """What a server says of a crowd at its port."""
    return f"more connections than {most} without a request: the oldest are closed, and the job goes on"


class UnauthenticatedConnections:
    """Connections that have proved nothing yet. Any thread; the sockets are the caller's, who closes them.

    most: at a time. limit_s: for expire(); how long one may stay. tell: takes a line when there are too many, once.
    """

    def __init__(self, most: int, limit_s: float, tell: Callable[[str], None] | None = None) -> None:
        self._most, self._limit_s, self._tell = most, limit_s, tell
        self._news = threading.Condition()  # guards what follows
        self._since: dict[socket.socket, float] = {}  # the first is the oldest
        self._sent_away: set[socket.socket] = set()

    def admit(self, peer: socket.socket) -> bool:
        """Whether there is room for it; who has come first makes room. False: close it."""
        with self._news:
            if are_descriptors_short(peer.fileno()):
                self._send_oldest_away()
                return False
            if len(self._since) >= self._most:
                self._send_oldest_away()
                if not self._news.wait_for(lambda: len(self._since) < self._most, _LEAVES_S):
                    return False
            self._since[peer] = time.monotonic()
            return True

    def gone(self, peer: socket.socket) -> None:
        """It is about to be closed, or has proved that it belongs to the job: it is not counted any more."""
        with self._news:
            self._since.pop(peer, None)
            self._sent_away.discard(peer)
            self._news.notify_all()

    def expire(self) -> None:
        with self._news:
            for peer, since in self._since.items():
                if time.monotonic() - since >= self._limit_s:
                    self._send_away(peer)

    def make_room(self) -> None:
        """No descriptor was left for the next one."""
        with self._news:
            self._send_oldest_away()

    def _send_oldest_away(self) -> None:
        for peer in self._since:
            if peer not in self._sent_away:
                self._send_away(peer)
                break
        if self._tell is not None:
            self._tell(too_many(self._most))
            self._tell = None

    def _send_away(self, peer: socket.socket) -> None:
        self._sent_away.add(peer)
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)  # its thread reads the end


class BoundedThreads(socketserver.ThreadingMixIn):
    """For a server of the standard library with a thread for each connection: put it before that server's class."""

    daemon_threads = True
    max_connections = 64
    connection_limit_s = 20.0  # for a whole connection, however slowly its bytes come
    tell: Callable[[str], None] | None = None  # see UnauthenticatedConnections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.unauthenticated = UnauthenticatedConnections(
            self.max_connections, self.connection_limit_s, self.tell
        )
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        """As of a TCP server: HTTPServer would ask DNS for the name of this host, which may take long."""
        socketserver.TCPServer.server_bind(self)  # type: ignore[arg-type]
        self.server_name, self.server_port = "", self.server_address[1]  # type: ignore[attr-defined]

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts; where the process has no descriptor left, it does not try again at once."""
        try:
            return super().get_request()  # type: ignore[misc,no-any-return]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.unauthenticated.make_room()
                time.sleep(0.1)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Called with each connection before it has a thread."""
        return self.unauthenticated.admit(request)

    def shutdown_request(self, request: Any) -> None:
        """Called with each connection in the end."""
        self.unauthenticated.gone(request)
        super().shutdown_request(request)  # type: ignore[misc]

    def service_actions(self) -> None:
        """Called twice a second by serve_forever()."""
        self.unauthenticated.expire()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ends, or that is closed for another, is no event."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[misc]
