"""Under Horovod's name: servers of values over HTTP, at GET, PUT and DELETE /scope/key. For a cluster's own network.

Whoever reaches such a server may read and write its values, as in Horovod, so nothing that it holds is unpickled, and
horoclone's own ranks do not meet here. Thread: one for each request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from horoclone.runner.common.util.hosts import SlotInfo
from horoclone.runner.util.network import find_port
from horoclone.runner.util.threads import in_thread
from horoclone.visitors import BoundedThreads

SINGLE_REQUEST_TIMEOUT = 3  # seconds in which a request has to arrive
LARGEST_VALUE_BYTES = 64 << 20
MOST_BYTES = 512 << 20  # of all values together

OK = 200
BAD_REQUEST = 400
NOT_FOUND = 404
TIMEOUT = 408
TOO_LARGE = 413


class KVStoreHandler(BaseHTTPRequestHandler):
    """One request. A subclass may answer otherwise in _get_value(scope, key) and _put_value(scope, key, value)."""

    server: Any

    def setup(self) -> None:
        """The limit is the module's of this moment."""
        super().setup()
        self.connection.settimeout(SINGLE_REQUEST_TIMEOUT)

    def do_GET(self) -> None:
        """The value, or 404."""
        place = self._place()
        if place is None:
            return
        value = self._get_value(*place)
        if value is None:
            self.send_status_code(NOT_FOUND)
            return
        self.send_response(OK)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def do_PUT(self) -> None:
        """Keeps the body; 400 without its length, 408 when it does not arrive, 413 when it is too large."""
        place = self._place()
        length = self.headers.get("Content-Length", "")
        if place is None:
            return
        if not length.isdigit():
            self.send_status_code(BAD_REQUEST)
            return
        if int(length) > LARGEST_VALUE_BYTES or not self.server.has_room(int(length)):
            self.close_connection = True
            self.send_status_code(TOO_LARGE)
            return
        try:
            value = self.rfile.read(int(length))
        except TimeoutError:
            value = b""
        if len(value) < int(length):
            self.close_connection = True
            self.send_status_code(TIMEOUT)
            return
        try:
            self._put_value(*place, value)
        except ValueError as error:
            logging.error("the value for %s is refused: %s", self.path, error)
            self.send_status_code(BAD_REQUEST)
            return
        self.send_status_code(OK)

    def send_status_code(self, status_code: int) -> None:
        """An answer without a body."""
        self.send_response(status_code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""

    def _place(self) -> tuple[str, str] | None:
        parts = self.path.split("/")
        if len(parts) == 3 and parts[1] and parts[2]:
            return parts[1], parts[2]
        logging.error("the path %s is not /scope/key", self.path)
        self.send_status_code(BAD_REQUEST)
        return None

    def _get_value(self, scope: str, key: str) -> bytes | None:
        with self.server.cache_lock:
            return self.server.cache.get(scope, {}).get(key)  # type: ignore[no-any-return]

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        with self.server.cache_lock:
            self.server.cache.setdefault(scope, {})[key] = value


class RendezvousHandler(KVStoreHandler):
    """Values of ranks that meet: a scope of the plan is emptied when all its ranks have deleted their key."""

    def do_DELETE(self) -> None:
        """This rank is done with the scope; a key of another scope goes at once."""
        place = self._place()
        if place is not None:
            self.server.finish(*place)
            self.send_status_code(OK)


class KVStoreHTTPServer(BoundedThreads, HTTPServer):
    """cache: scope -> key -> value, guarded by cache_lock."""

    most_visitors = 256
    visit_limit_s = 60.0  # a large value on a slow network
    request_queue_size = 256

    def __init__(self, addr: tuple[str, int], handler: type[KVStoreHandler], verbose: int) -> None:
        self.verbose = verbose
        self.cache_lock = threading.Lock()
        self.cache: dict[str, dict[str, bytes]] = {}
        super().__init__(addr, handler)

    def has_room(self, size: int) -> bool:
        """Whether a value of so many bytes may come."""
        with self.cache_lock:
            used = sum(len(value) for values in self.cache.values() for value in values.values())
        return used + size <= MOST_BYTES


class RendezvousHTTPServer(KVStoreHTTPServer):
    """scope_size: scope -> how many ranks meet there; finished_list: who of them is done."""

    def __init__(self, addr: tuple[str, int], handler: type[KVStoreHandler], verbose: int) -> None:
        self.finished_list_lock = threading.Lock()
        self.finished_list: dict[str, list[str]] = {}
        self.scope_size: dict[str, int] = {}
        super().__init__(addr, handler, verbose)

    def init(self, host_alloc_plan: Iterable[SlotInfo]) -> None:
        """Forgets everything, for ranks at these places."""
        sizes = {}
        for slot in host_alloc_plan:
            sizes["global"] = slot.size
            sizes[f"local_{slot.hostname}"] = slot.local_size
            sizes[f"cross_{slot.local_rank}"] = slot.cross_size
        with self.cache_lock, self.finished_list_lock:
            self.cache.clear()
            self.finished_list.clear()
            self.scope_size = sizes

    def finish(self, scope: str, key: str) -> None:
        """See RendezvousHandler."""
        with self.cache_lock, self.finished_list_lock:
            if scope in self.scope_size:
                done = self.finished_list.setdefault(scope, [])
                if key not in done:
                    done.append(key)
                if len(done) < self.scope_size[scope]:
                    return
                del self.finished_list[scope]
                self.cache.pop(scope, None)
            elif scope in self.cache:
                self.cache[scope].pop(key, None)
                if not self.cache[scope]:
                    del self.cache[scope]

    def should_continue(self) -> bool:
        """True."""
        return True


class RendezvousServer:
    """start() listens on a free port of all interfaces, until stop(). init(plan) then says which ranks will meet."""

    def __init__(self, verbose: int = 0) -> None:
        self._verbose = verbose
        self._httpd: RendezvousHTTPServer | None = None
        self._listen_thread: threading.Thread | None = None

    @property
    def httpd(self) -> RendezvousHTTPServer:
        """The server behind it. RuntimeError before start()."""
        if self._httpd is None:
            raise RuntimeError("this RendezvousServer has not been started: call start() first")
        return self._httpd

    def start(self, handler_cls: type[KVStoreHandler] = RendezvousHandler) -> int:
        """Returns the port."""
        if self._httpd is not None:
            raise RuntimeError("this RendezvousServer has been started already")
        self._httpd, port = find_port(lambda where: RendezvousHTTPServer(where, handler_cls, self._verbose))
        self._listen_thread = in_thread(self.httpd.serve_forever, name="hc-http")
        return port

    def init(self, host_alloc_plan: Iterable[SlotInfo]) -> None:
        """Ranks at these places will meet; what the ones before have left is forgotten."""
        self.httpd.init(host_alloc_plan)

    def stop(self) -> None:
        """Once is enough; nothing happens when it was never started."""
        server, self._httpd = self._httpd, None
        if server is not None and self._listen_thread is not None:
            server.shutdown()
            self._listen_thread.join()
            server.server_close()


class KVStoreServer:
    """start_server() listens on a free port of all interfaces, until shutdown_server()."""

    def __init__(self, verbose: int = 0) -> None:
        self.verbose = verbose
        self.httpd: KVStoreHTTPServer | None = None
        self.listen_thread: threading.Thread | None = None

    def start_server(self) -> int:
        """Returns the port."""
        server, port = find_port(lambda where: KVStoreHTTPServer(where, KVStoreHandler, self.verbose))
        self.httpd = server
        self.listen_thread = in_thread(server.serve_forever, name="hc-http")
        return port

    def shutdown_server(self) -> None:
        """Once is enough."""
        server, self.httpd = self.httpd, None
        if server is not None and self.listen_thread is not None:
            server.shutdown()
            self.listen_thread.join()
            server.server_close()
