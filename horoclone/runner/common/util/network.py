"""Under Horovod's name: small services that answer requests of those who hold a key. For a cluster's own network.

Objects travel by cloudpickle, after their digest was found right: whoever holds the key may run code in the other
process. horoclone's own ranks and launcher never speak this.
"""

from __future__ import annotations

import json
import queue
import shutil
import socket
import socketserver
import struct
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
LARGEST_BYTES = 1 << 30  # of one object: a length is read before anything is known of its sender


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
    """One object: its digest (32 bytes), its length (4 bytes, the host's order), itself."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, obj: Any, wfile: Any) -> None:
        """Sends an object. ValueError when it is too large."""
        import cloudpickle

        self._send(cloudpickle.dumps(obj), wfile)

    def _send(self, message: bytes, wfile: Any) -> None:
        if len(message) > LARGEST_BYTES:
            raise ValueError(
                f"an object of {len(message)} bytes is too large; at most {LARGEST_BYTES} can be sent"
            )
        wfile.write(secret.compute_digest(self._key, message) + _LENGTH.pack(len(message)) + message)
        wfile.flush()

    def stream(self, stream: Any, wfile: Any) -> None:
        """Sends what is left of a text stream."""
        shutil.copyfileobj(stream, StreamWriter(wfile))
        wfile.flush()

    def read(self, rfile: Any) -> Any:
        """The next object. EOFError when the other side has gone, PermissionError when it does not hold the key."""
        import cloudpickle

        return cloudpickle.loads(self._receive(rfile))

    def _receive(self, rfile: Any) -> bytes:
        digest = _exactly(rfile, secret.DIGEST_LENGTH)
        (length,) = _LENGTH.unpack(_exactly(rfile, _LENGTH.size))
        if not 0 <= length <= LARGEST_BYTES:
            raise PermissionError("Security error: this is no message of ours.")
        message = _exactly(rfile, length)
        if not secret.check_digest(self._key, message, digest):
            raise PermissionError("Security error: digest did not match the message.")
        return message


class PlainWire(Wire):
    """The same for objects of a few known classes, as JSON: who holds the key can send nothing else.

    kinds: the classes, by their names; their attributes are numbers, texts or booleans.
    """

    def __init__(self, key: bytes, kinds: Sequence[type]) -> None:
        super().__init__(key)
        self._kinds = {kind.__name__: kind for kind in (PingRequest, PingResponse, AckResponse, *kinds)}

    def write(self, obj: Any, wfile: Any) -> None:
        """Sends an object. TypeError for one of another class."""
        if self._kinds.get(type(obj).__name__) is not type(obj):
            raise TypeError(f"{type(obj).__name__} cannot be sent here; {sorted(self._kinds)} can")
        self._send(json.dumps([type(obj).__name__, vars(obj)]).encode(), wfile)

    def read(self, rfile: Any) -> Any:
        """The next object. EOFError when the other side has gone, PermissionError for what is no message of ours."""
        message = self._receive(rfile)
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


class BasicService:
    """Answers requests in threads of its own until shutdown(). A subclass answers more in _handle()."""

    def __init__(self, service_name: str, key: bytes, nics: Sequence[str] | None) -> None:
        """nics: interfaces whose addresses are told; it listens on all. NoValidAddressesFound when they have none."""
        self._service_name = service_name
        self._wire = self._make_wire(key)
        self._server, self._port = find_port(lambda address: _Server(address, self._make_handler()))
        try:
            self._addresses: Any = local_addresses(nics, self._port)
        except NoValidAddressesFound:
            self._server.server_close()
            raise
        self._thread = in_thread(self._server.serve_forever)

    def _make_wire(self, key: bytes) -> Wire:
        return Wire(key)

    def _make_handler(self) -> type[socketserver.StreamRequestHandler]:
        service = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    request = service._wire.read(self.rfile)
                except (EOFError, OSError):
                    return  # a stranger, or one who went away
                answer = service._handle(request, self.client_address)
                answer, text = answer if isinstance(answer, tuple) else (answer, None)
                try:
                    service._wire.write(answer, self.wfile)
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
                self._wire.write(request, wfile)
                answer = self._wire.read(rfile)
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
