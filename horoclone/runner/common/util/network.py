"""Under Horovod's name: small services that answer requests of those who hold a key. For a cluster's own network.

Objects travel by cloudpickle, after their digest was found right: whoever holds the key may run code in the other
process. horoclone's own ranks and launcher never speak this.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import shutil
import socket
import socketserver
import struct
import threading
from collections.abc import Mapping, Sequence
from encodings.utf_8 import StreamReader, StreamWriter
from typing import Any

from horoclone.runner.common.util import secret
from horoclone.runner.common.util.address import NoValidAddressesFound as NoValidAddressesFound
from horoclone.runner.common.util.address import local_addresses
from horoclone.runner.util.network import find_port
from horoclone.runner.util.threads import in_thread

Address = tuple[str, int]
_LENGTH = struct.Struct("i")
LARGEST_BYTES = 1 << 30  # of one object
NONCE_BYTES = 32
PROOF_S = 10.0  # without a byte, before a connection has sent its request
MOST_UNPROVEN = 64  # connections of which that is not known yet: the oldest makes room


class PingRequest:
    """Who is there?"""


class PingResponse:
    """service_name: who answers. source_address: the address from which the service saw the question come."""

    def __init__(self, service_name: str, source_address: str) -> None:
        self.service_name = service_name
        self.source_address = source_address


class AckResponse:
    """An answer that says nothing else."""


class AckStreamResponse:
    """The answer is followed by a text, until the connection ends."""


class Wire:
    """One object: its length (4 bytes, the host's order) with a digest (32 bytes), and itself with another.

    So nothing is read of whoever does not hold the key but its first 36 bytes. Each connection has a nonce, which the
    service chooses and both put into their digests: what was recorded of another connection is refused.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, obj: Any, wfile: Any, nonce: bytes = b"") -> None:
        """Sends an object. ValueError when it is too large."""
        import cloudpickle

        self._send(cloudpickle.dumps(obj), wfile, nonce)

    def _send(self, message: bytes, wfile: Any, nonce: bytes) -> None:
        if len(message) > LARGEST_BYTES:
            raise ValueError(
                f"an object of {len(message)} bytes is too large; at most {LARGEST_BYTES} can be sent"
            )
        length = _LENGTH.pack(len(message))
        wfile.write(length + self._digest(nonce, length) + self._digest(nonce, length + message) + message)
        wfile.flush()

    def _digest(self, nonce: bytes, content: bytes) -> bytes:
        return secret.compute_digest(self._key, nonce + content)

    def stream(self, stream: Any, wfile: Any) -> None:
        """Sends what is left of a text stream."""
        shutil.copyfileobj(stream, StreamWriter(wfile))
        wfile.flush()

    def read(self, rfile: Any, nonce: bytes = b"") -> Any:
        """The next object. EOFError when the other side has gone, PermissionError when it does not hold the key."""
        import cloudpickle

        return cloudpickle.loads(self._receive(rfile, nonce))

    def _receive(self, rfile: Any, nonce: bytes) -> bytes:
        head = _exactly(rfile, _LENGTH.size)
        self._check(nonce + head, _exactly(rfile, secret.DIGEST_LENGTH))
        (length,) = _LENGTH.unpack(head)
        if not 0 <= length <= LARGEST_BYTES:
            raise PermissionError("Security error: this is no message of ours.")
        digest = _exactly(rfile, secret.DIGEST_LENGTH)
        message = _exactly(rfile, length)
        self._check(nonce + head + message, digest)
        return message

    def _check(self, content: bytes, digest: bytes) -> None:
        if not secret.check_digest(self._key, content, digest):
            raise PermissionError("Security error: digest did not match the message.")


class PlainWire(Wire):
    """The same for objects of a few known classes, as JSON: who holds the key can send nothing else.

    kinds: the classes, by their names; their attributes are numbers, texts or booleans.
    """

    def __init__(self, key: bytes, kinds: Sequence[type]) -> None:
        super().__init__(key)
        self._kinds = {kind.__name__: kind for kind in (PingRequest, PingResponse, AckResponse, *kinds)}

    def write(self, obj: Any, wfile: Any, nonce: bytes = b"") -> None:
        """Sends an object. TypeError for one of another class."""
        if self._kinds.get(type(obj).__name__) is not type(obj):
            raise TypeError(f"{type(obj).__name__} cannot be sent here; {sorted(self._kinds)} can")
        self._send(json.dumps([type(obj).__name__, vars(obj)]).encode(), wfile, nonce)

    def read(self, rfile: Any, nonce: bytes = b"") -> Any:
        """The next object. EOFError when the other side has gone, PermissionError for what is no message of ours."""
        message = self._receive(rfile, nonce)
        try:
            name, attributes = json.loads(message)
            found: Any = object.__new__(self._kinds[name])
            vars(found).update(attributes)
        except (ValueError, TypeError, KeyError):
            raise PermissionError("Security error: this is no message of ours.") from None
        return found


def _exactly(rfile: Any, count: int) -> bytes:
    data = bytes(rfile.read(count))
    if len(data) < count:
        raise EOFError(f"the connection ended after {len(data)} of {count} bytes")
    return data


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._unproven: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._unproven) >= MOST_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
            self._unproven[request] = None
        super().process_request(request, client_address)

    def proven(self, request: socket.socket) -> None:
        """Its sender holds the key, and may take its time from here on."""
        with self._lock:
            self._unproven.pop(request, None)
        request.settimeout(None)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._unproven.pop(request, None)
        super().shutdown_request(request)


class BasicService:
    """Answers requests in threads of its own until shutdown(). A subclass answers more in _handle()."""

    def __init__(self, service_name: str, key: bytes, nics: Sequence[str] | None) -> None:
        """nics: interfaces whose addresses are told. Where that is one address, it listens there only, and else on all.
        NoValidAddressesFound when they have none."""
        self._service_name = service_name
        self._wire = self._make_wire(key)
        hosts: set[Any] = {host for listed in local_addresses(nics).values() for host in listed}
        host = hosts.pop() if len(hosts) == 1 else ""
        self._server, self._port = find_port(
            lambda address: _Server((host, address[1]), self._make_handler())
        )
        self._addresses: Any = local_addresses(nics, self._port)
        self._thread = in_thread(self._server.serve_forever)

    def _make_wire(self, key: bytes) -> Wire:
        return Wire(key)

    def _make_handler(self) -> type[socketserver.StreamRequestHandler]:
        service = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = PROOF_S

            def handle(self) -> None:
                nonce = secrets.token_bytes(NONCE_BYTES)
                try:
                    self.wfile.write(nonce)
                    request = service._wire.read(self.rfile, nonce + b"request")
                    service._server.proven(self.request)
                except (EOFError, OSError):
                    return  # a stranger, or one who went away
                answer = service._handle(request, self.client_address)
                answer, text = answer if isinstance(answer, tuple) else (answer, None)
                try:
                    service._wire.write(answer, self.wfile, nonce + b"answer")
                    if text is not None:
                        service._wire.stream(text, self.wfile)
                except OSError:
                    pass

        return Handler

    def _handle(self, req: Any, client_address: Address) -> Any:
        """The answer to a request: an object, or a tuple of one and a text stream that follows it."""
        if isinstance(req, PingRequest):
            return PingResponse(self._service_name, client_address[0])
        raise NotImplementedError(f"{self._service_name} does not know {type(req).__name__}")

    def addresses(self) -> dict[str, list[Address]]:
        """Interface -> (address, port) at which it answers."""
        return dict(self._addresses)

    def get_port(self) -> int:
        """The port on which it listens."""
        return int(self._port)

    def shutdown(self) -> None:
        """Stops listening. Requests that are being answered are finished."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class BasicClient:
    """Asks the service of that name and key at the first of its addresses where it answers."""

    def __init__(
        self,
        service_name: str,
        addresses: Mapping[str, Sequence[Address]],
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        probe_timeout: float = 20.0,
        attempts: int = 3,
    ) -> None:
        """match_intf: only addresses that are reached over an interface of the same name here. probe_timeout: seconds
        for one attempt to reach an address. NoValidAddressesFound when the service answers nowhere."""
        self._service_name = service_name
        self._wire = self._make_wire(key)
        self._match_intf = match_intf
        self._probe_timeout_s = probe_timeout
        self._attempts = attempts
        self._addresses = self._probe(addresses)
        if not self._addresses:
            raise NoValidAddressesFound(
                f"{service_name} answers at none of these addresses: {dict(addresses)}. Either it is gone, or a "
                "firewall is between, or its key is another one."
            )

    def _make_wire(self, key: bytes) -> Wire:
        return Wire(key)

    def _probe(self, addresses: Mapping[str, Sequence[Address]]) -> dict[str, list[Address]]:
        answers: queue.SimpleQueue[tuple[str, Address]] = queue.SimpleQueue()
        threads = [
            in_thread(self._probe_one, (interface, address, answers))
            for interface, listed in addresses.items()
            for address in listed
        ]
        for thread in threads:
            thread.join()
        found: dict[str, list[Address]] = {}
        while not answers.empty():
            interface, address = answers.get()
            found.setdefault(interface, []).append(address)
        return found

    def _probe_one(self, interface: str, address: Address, answers: queue.SimpleQueue[Any]) -> None:
        for _ in range(self._attempts):
            try:
                answer = self._ask(address, PingRequest(), None, self._probe_timeout_s)
            except (OSError, EOFError):
                continue
            here = local_addresses().get(interface, [])
            if answer.service_name == self._service_name and (
                not self._match_intf or answer.source_address in here
            ):
                answers.put((interface, address))
            return

    def _ask(self, address: Address, request: Any, stream: Any, timeout_s: float | None) -> Any:
        with socket.create_connection((address[0], address[1]), timeout_s) as connection:
            with connection.makefile("rb") as rfile, connection.makefile("wb") as wfile:
                nonce = _exactly(rfile, NONCE_BYTES)
                self._wire.write(request, wfile, nonce + b"request")
                answer = self._wire.read(rfile, nonce + b"answer")
                if stream is not None and isinstance(answer, AckStreamResponse):
                    shutil.copyfileobj(StreamReader(rfile), stream)
                return answer

    def _send(self, req: Any, stream: Any = None) -> Any:
        """The answer to a request; a text that follows it goes to `stream`. It raises what the last attempt raised:
        a request must bear being repeated."""
        address = next(iter(self._addresses.values()))[0]
        for left in reversed(range(self._attempts)):
            try:
                return self._ask(address, req, stream, None)
            except (OSError, EOFError):
                if not left:
                    raise
        raise ValueError("attempts must be at least 1")

    def addresses(self) -> dict[str, list[Address]]:
        """Interface -> addresses at which the service has answered."""
        return self._addresses
