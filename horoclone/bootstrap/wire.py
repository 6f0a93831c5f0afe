"""Addresses, the mutual proof of the job secret, and length-checked frames of the rendezvous.

Nothing that a peer sends is interpreted before it has proved the secret; until then only fixed-size blocks are read.
Frames are [length u32 little-endian][payload][tag], the tag as Sealed makes it; payloads are made with struct, never
with pickle.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import resource
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping

from horoclone import errors
from horoclone.bootstrap import seal

GREETING = b"HCR3"  # server -> client, then its nonce
HELLO = b"HCC3"  # client -> server, then its nonce and its proof
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(GREETING) + NONCE_BYTES
HELLO_BYTES = len(HELLO) + NONCE_BYTES + PROOF_BYTES
REFUSED = b"\0" * PROOF_BYTES  # instead of the server's proof: your secret or job id is not mine

# Requests of a rank and the server's answers: the first byte of a frame.
(PUT, GET, GATHER, TAKEN, FAIL, HERE, WATCH, CONNECTED, GIVE_UP, WITHDRAW, LEAVE) = range(1, 12)
(JOIN, FORM, NOTICE, DEPART, SUSPECT, STANDBY, FINISHED) = range(12, 19)
OK, NOT_YET, FAILED, REJECTED, CLOSED, EVICTED, STOP, NOT_COORDINATOR = range(8)
OF_MEMBERS = range(JOIN, FINISHED + 1)  # requests of members of an elastic job: membership/service.py

MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 64 * 1024
MAX_MEMBERS = 32768  # ranks of a list that calls init
MAX_FRAME_BYTES = MAX_VALUE_BYTES + MAX_KEY_BYTES + 4 * MAX_MEMBERS + 64
_GLOBAL, _HOST = (
    0x00,
    0x10,
)  # scopes of IPv6 addresses, and flags of those that are not, or no more, to be used
_UNUSABLE = 0x08 | 0x20 | 0x40  # another host has it, deprecated, tentative
SIOCGIFADDR = 0x8915
_ELSEWHERE = "203.0.113.1"  # no host has it (RFC 5737): it lies where the default route leads
CLOSED_BY_PEER = "it closed the connection"


def proof(secret: bytes, role: bytes, job: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """HMAC-SHA-256 over role, job and both nonces. Roles differ, so a proof cannot be reflected."""
    name = os.fsencode(job)
    message = (
        b"horoclone rendezvous 1 " + role + struct.pack("<I", len(name)) + name + server_nonce + client_nonce
    )
    return hmac.new(secret, message, hashlib.sha256).digest()


def admit(peer: socket.socket, secret: bytes, job: str, limit_s: float) -> bool:
    """The server's side of the mutual proof on a connection of its own: whether the peer knows the secret of this job.

    Blocks for at most limit_s. OSError when the peer goes or is too slow.
    """
    deadline = time.monotonic() + limit_s
    server_nonce = secrets.token_bytes(NONCE_BYTES)
    peer.settimeout(limit_s)
    peer.sendall(GREETING + server_nonce)
    hello = receive_exactly(peer, HELLO_BYTES, deadline)
    nonce = hello[len(HELLO) : -PROOF_BYTES]
    expected = proof(secret, b"client", job, server_nonce, nonce)
    if not (hmac.compare_digest(hello[-PROOF_BYTES:], expected) and hello.startswith(HELLO)):
        peer.sendall(REFUSED)
        return False
    peer.sendall(proof(secret, b"server", job, server_nonce, nonce))
    return True


def receive_exactly(one: socket.socket, count: int, deadline: float) -> bytes:
    """Reads exactly count bytes. ConnectionError at the end of the stream, TimeoutError at the deadline."""
    parts = bytearray()
    while len(parts) < count:
        one.settimeout(max(0.001, deadline - time.monotonic()))
        part = one.recv(count - len(parts))
        if not part:
            raise ConnectionError(CLOSED_BY_PEER)
        parts += part
        if time.monotonic() >= deadline and len(parts) < count:
            raise TimeoutError("it answers too slowly")
    return bytes(parts)


def same_user(connection: socket.socket) -> bool:
    """Whether the other end of a unix socket runs under our user id (told by the kernel, not by the peer)."""
    return peer_uid(connection) == os.geteuid()


def peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def parse_address(text: str) -> tuple[int, str | tuple[str, int]]:
    """`unix:NAME` (abstract socket), `HOST:PORT`, `[V6]:PORT` or `HOST` (port 0) -> socket family and address."""
    if text.startswith("unix:"):
        name = text[5:]
        if not 0 < len(name.encode()) <= 100:
            raise ValueError(f"{text!r}: the name of an abstract socket has 1 to 100 bytes")
        return socket.AF_UNIX, "\0" + name
    host, colon, port_text = text.rpartition(":")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [host]:port")
        colon, port_text = rest[:1], rest[1:]
    elif not colon or ":" in host:  # no port, or a bare IPv6 address
        host, port_text = text, ""
    try:
        port = int(port_text or "0")
    except ValueError:
        port = -1
    if not host or not 0 <= port <= 65535:
        raise ValueError(f"{text!r} is neither unix:name nor host:port")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def abstract_name(*parts: str | int) -> str:
    """`unix:` address made of the parts and our user id, hashed so that it fits whatever the parts contain."""
    text = "\0".join(str(part) for part in (*parts, os.geteuid()))
    return f"unix:horoclone-{hashlib.sha256(os.fsencode(text)).hexdigest()[:40]}"


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def needs_descriptor(purpose: str) -> Iterator[None]:
    """Makes an OSError for want of descriptors one that names the limit and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise errors.HorovodInternalError(
            f"no descriptor is left to {purpose} ({error.strerror}): this process may have {limit} open; raise the "
            "limit (ulimit -n) or close some"
        ) from error


def routable_addresses(interfaces: str = "") -> list[str]:
    """Addresses of this host's interfaces that are up, that of the default route first, since those of bridges may lead
    to no other host, and loopback last; only those named in the comma list, if any. IPv6 ones of interfaces without
    IPv4, where they are named or the host has no others.

    ValueError when a named interface does not exist or has no address.
    """
    named = [name.strip() for name in interfaces.split(",") if name.strip()]
    found: dict[str, str] = {}
    with needs_descriptor("look for network interfaces"):
        interfaces_here = socket.if_nameindex()
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with probe:
        for _, name in interfaces_here:
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request, True)
            except OSError:
                continue  # no IPv4 address
            found[name] = socket.inet_ntoa(request[20:24].tobytes())
    if named or all(address.startswith("127.") for address in found.values()):
        found = {**_ipv6_addresses(), **found}
    if named:
        missing = [name for name in named if name not in found]
        if missing:
            raise ValueError(
                f"network interface {', '.join(missing)} has no address here; this host has "
                f"{', '.join(f'{name} ({address})' for name, address in found.items())}."
            )
        return [found[name] for name in named]
    first = address_towards(_ELSEWHERE)
    return sorted(found.values(), key=lambda one: 2 if is_loopback(one) else int(one != first))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def address_towards(host: str) -> str | None:
    """The address of this host from which the kernel would send to `host` (a name or address); nothing is sent. None
    where no name or route is known, or where it leads to this host itself."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        if own != place[0] and not is_loopback(own) and "%" not in own:
            return own
    return None


def _ipv6_addresses() -> dict[str, str]:
    """Interface -> an address of it that may be used, loopback's included, link-local ones not."""
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
    except OSError:  # a kernel without IPv6
        return {}
    found: dict[str, str] = {}
    for digits, _, _, scope, flags, name in rows:
        if int(scope, 16) in (_GLOBAL, _HOST) and not int(flags, 16) & _UNUSABLE:
            found.setdefault(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def loopback() -> str:
    """Where processes of this host reach each other, for a server: without any interface an abstract unix socket."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((host, 0))
                probe.connect((host, 9))  # nothing is sent; an interface that is down leads nowhere
                return host
        except OSError:
            continue
    return abstract_name("loopback", secrets.token_hex(16))


def bindings(environ: Mapping[str, str]) -> list[str]:
    """Where rank 0 listens when processes may be on other hosts."""
    names = environ.get("HOROCLONE_NETWORK_INTERFACES") or environ.get("HOROVOD_GLOO_IFACE") or ""
    if names:
        return routable_addresses(names)
    return ["::" if any(":" in address for address in routable_addresses()) else "0.0.0.0"]


def pack_key(key: str) -> bytes:
    encoded = key.encode()
    if not 0 < len(encoded) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one has {len(encoded)}: {key[:80]!r}")
    return struct.pack("<H", len(encoded)) + encoded


def pack_members(members: list[int]) -> bytes:
    """The launcher's numbers of the ranks that take part, in their order; none: everybody."""
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"{len(members)} ranks, at most {MAX_MEMBERS} are allowed in a list")
    return struct.pack(f"<{len(members) + 1}I", len(members), *members)


def check_value(value: bytes, what: str) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"{what}: {len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed")
    return value


def frame(payload: bytes) -> bytes:
    """Without a tag, for what has another protection."""
    return struct.pack("<I", len(payload)) + payload


class FrameError(Exception):
    """The peer broke the protocol; the connection is to be closed."""


class Sealed:
    """The frames of one direction of a proven connection, each with a tag: a digest of its payload and its number,
    keyed by the secret and the handshake. Nobody on the way can change a frame, put one in, repeat or leave out one.

    role: of the side that sends, as in proof(). Thread: one at a time."""

    def __init__(
        self, secret: bytes, role: bytes, job: str, server_nonce: bytes, client_nonce: bytes
    ) -> None:
        self._key = proof(secret, b"frames of the " + role, job, server_nonce, client_nonce)
        self._number = 0

    def frame(self, payload: bytes) -> bytes:
        """The next one, as it travels."""
        return struct.pack("<I", len(payload)) + payload + self._tag(payload)

    def check(self, payload: bytes, tag: bytes) -> None:
        """The next one that has come. FrameError where it is not what the other side has sent."""
        if not hmac.compare_digest(tag, self._tag(payload)):
            raise FrameError("a frame that was changed on its way")

    def _tag(self, payload: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return seal.tag_of(self._key, f"frame {number}", [payload])


class Reader:
    """Takes fields off a payload; FrameError when it is too short or holds what it may not."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def number(self, kind: str) -> int:
        size = struct.calcsize("<" + kind)
        return int(struct.unpack("<" + kind, self.take(size))[0])

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._payload):
            raise FrameError("frame too short")
        part = self._payload[self._at : end]
        self._at = end
        return part

    def key(self) -> str:
        count = self.number("H")
        if not 0 < count <= MAX_KEY_BYTES:
            raise FrameError("bad key length")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError as error:
            raise FrameError("a key that is not UTF-8") from error

    def members(self) -> list[int]:
        count = self.number("I")
        if count > MAX_MEMBERS:
            raise FrameError("too many members")
        return list(struct.unpack(f"<{count}I", self.take(4 * count)))

    def is_empty(self) -> bool:
        return self._at == len(self._payload)

    def rest(self) -> bytes:
        return self.take(len(self._payload) - self._at)
