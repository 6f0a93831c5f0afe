"""Two hosts on one machine: network namespaces joined by a veth cable, each end shaped by tbf, or for a long way by
wire.cc, which g++ compiles. Needs root and iproute2.

What runs in a namespace sees its own `cable` and its own `lo` and nothing else, so that no byte leaves the machine, and
no byte between the hosts can avoid the cable.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shared_with_tests
from meeting import ADDRESS, FOLDER

HERE = Path(__file__).resolve().parent
namespaces = shared_with_tests.load("namespaces.py")
CABLE = "cable"
# Credit that the shaper gives for free; what is measured must be far larger. Enough for one timer tick at 10 Gbit/s.
BURST_BYTES = 128 << 10
RAW_CHUNK_BYTES = 1 << 20
# A TUN device (linux/if_tun.h): its packets without a header.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
ROUTER_MS = 100  # of a long way's line: what would wait longer is dropped


def needs_root() -> None:
    """Ends the program where namespaces cannot be made."""
    if os.geteuid() != 0:
        print(f"{Path(sys.argv[0]).name}: network namespaces need root", file=sys.stderr)
        raise SystemExit(2)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def inside(namespace: str, call: Callable[[], Any]) -> Any:
    """What `call` returns on a thread of this namespace; its sockets, and threads that it starts, stay there."""
    result: list[Any] = []

    def run() -> None:
        try:
            namespaces.enter_namespace(namespace)
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


class Hosts:
    """A context manager: two namespaces and their cable, gone at the end with everything that runs in them."""

    def __init__(self, gbit: float, mtu: int, round_trip_ms: float = 0, lost: float = 0) -> None:
        """lost: of packets. With a round trip there is a wire in user space, and the kernel's congestion control is
        reno, as where nobody has chosen another."""
        self.gbit, self.mtu, self.round_trip_ms, self.lost = gbit, mtu, round_trip_ms, lost
        self._wire: subprocess.Popen[bytes] | None = None
        tag = secrets.token_hex(3)
        self.names = [f"hcb-{tag}-{side}" for side in "ab"]
        third = secrets.randbelow(250)
        self.addresses = [f"10.214.{third}.{host}" for host in (1, 2)]

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise RuntimeError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        namespaces.make(*self.names)
        if self.round_trip_ms:
            self._lay_wire()
            return
        namespaces.lay_cable(self.names[0], CABLE, self.names[1], CABLE)
        for name, address in zip(self.names, self.addresses, strict=True):
            namespaces.connect(name, CABLE, f"{address}/30", "mtu", str(self.mtu))
            _run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", "rate", f"{self.gbit:g}gbit",
                 "burst", str(BURST_BYTES), "latency", "20ms")  # fmt: skip
        for host in (0, 1):
            self._keep_order(host)

    def _lay_wire(self) -> None:
        ends = [inside(name, _open_tun) for name in self.names]
        for name, own, other in zip(self.names, self.addresses, reversed(self.addresses), strict=True):
            _run("ip", "-n", name, "addr", "add", own, "peer", other, "dev", CABLE)
            _run("ip", "-n", name, "link", "set", CABLE, "mtu", str(self.mtu), "txqueuelen", "5000", "up")
            _run(
                "ip",
                "netns",
                "exec",
                name,
                "sh",
                "-c",
                "echo reno > /proc/sys/net/ipv4/tcp_congestion_control",
            )
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/wire"
            _run("g++", "-O2", "-std=c++20", str(HERE / "wire.cc"), "-o", program)
            numbers = [*ends, int(self.gbit * 1e9), int(self.round_trip_ms * 500), int(self.lost * 1e6),
                       ROUTER_MS * 1000, 1]  # fmt: skip
            words = [program, *map(str, numbers)]
            self._wire = subprocess.Popen(
                words, pass_fds=ends, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        for end in ends:
            os.close(end)

    def _keep_order(self, host: int) -> None:
        """A wire does not change the order of packets, and a network card gives those of a connection to one
        processor. veth leaves them with whichever processor has sent them, so that they overtake each other and TCP
        takes them for lost: some hundred times a second at 10 Gbit/s on two cores. A kernel without RPS stays so."""
        processors = (1 << (os.cpu_count() or 1)) - 1
        words = f"echo {processors:x} > /sys/class/net/{CABLE}/queues/rx-0/rps_cpus"
        subprocess.run(self.command(host, ["sh", "-c", words]), capture_output=True, timeout=20)

    def __exit__(self, *_: object) -> None:
        if self._wire:
            self._wire.kill()
            self._wire.wait()
        namespaces.delete(*self.names)

    def command(self, host: int, words: list[str]) -> list[str]:
        """The command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def sent(self, host: int, interface: str) -> int:
        """Bytes that this interface has sent so far."""
        for line in _run(*self.command(host, ["cat", "/proc/net/dev"])).splitlines():
            if line.strip().startswith(f"{interface}:"):
                return int(line.split()[9])
        raise RuntimeError(f"host {host} has no interface {interface}")

    def inside(self, host: int, call: Callable[[], Any]) -> Any:
        """What `call` returns when a thread of this host runs it."""
        return inside(self.names[host], call)

    def run_ranks(
        self,
        program: str,
        plan: dict[str, Any],
        per_host: int,
        limit_s: float,
        more: dict[str, str] | None = None,
    ) -> Any:
        """What rank 0 of a program of this folder wrote as JSON; so many ranks on each host. It is started with the
        plan and the file's name; more: variables. RuntimeError when a rank failed."""
        from horoclone.bootstrap.rendezvous import Server

        size, secret, job = 2 * per_host, secrets.token_hex(16), f"hosts-{secrets.token_hex(4)}"
        server = self.inside(0, lambda: Server(secret.encode(), job, size, [f"{self.addresses[0]}:0"]))
        ranks: list[subprocess.Popen[bytes]] = []
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "raw.json"
            common = {
                **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE,
                "HOROCLONE_RENDEZVOUS": ",".join(server.addresses), "HOROCLONE_SECRET": secret,
                "HOROCLONE_JOB": job, ADDRESS: self.addresses[0], FOLDER: folder,
            }  # fmt: skip
            try:
                for rank in range(size):
                    words = [sys.executable, str(HERE / program), json.dumps(plan), str(out)]
                    words = self.command(rank // per_host, words)
                    env = {**common, **(more or {}), **place(rank, per_host)}
                    ranks.append(subprocess.Popen(words, env=env, start_new_session=True))
                wait(ranks, limit_s)
            finally:
                for one in ranks:
                    if one.poll() is None:
                        os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
                server.close()
            return json.loads(out.read_text(encoding="utf-8"))

    def raw_gbit(self, streams: int, seconds: float = 1.5) -> float:
        """What plain sockets carry in each direction while both are busy: the smaller direction, in Gbit/s."""
        words = [sys.executable, str(Path(__file__).resolve()), str(streams), str(seconds)]
        both = [
            subprocess.Popen(
                self.command(host, [*words, role, self.addresses[0], "39017"]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for host, role in enumerate(("listen", "connect"))
        ]
        try:
            rates = [float(one.communicate(timeout=30 + seconds)[0]) for one in both]
        finally:
            for one in both:
                if one.poll() is None:
                    one.kill()
                    one.wait()
        return min(rates)


def _open_tun() -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", CABLE.encode(), IFF_TUN | IFF_NO_PI))
    return end


def place(rank: int, per_host: int) -> dict[str, str]:
    """Of a rank, as a launcher would say it."""
    numbers = {
        "RANK": rank, "SIZE": 2 * per_host, "LOCAL_RANK": rank % per_host, "LOCAL_SIZE": per_host,
        "CROSS_RANK": rank // per_host, "CROSS_SIZE": 2,
    }  # fmt: skip
    return {f"HOROCLONE_{name}": str(number) for name, number in numbers.items()}


def wait(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until all have ended well; RuntimeError at the first that has not, and at the limit."""
    deadline = time.monotonic() + limit_s
    while any(one.poll() is None for one in ranks):
        failed = [f"rank {rank} ended with {one.poll()}" for rank, one in enumerate(ranks) if one.poll()]
        if failed or time.monotonic() > deadline:
            raise RuntimeError(
                "; ".join(failed) or f"the ranks were not done after {limit_s:.0f} s (--limit)"
            )
        time.sleep(0.1)
    if any(one.poll() for one in ranks):
        raise RuntimeError(f"the ranks ended with {[one.poll() for one in ranks]}; what they wrote is above")


# --- a process of raw_gbit -----------------------------------------------------------------------------------------


def _connections(streams: int, role: str, address: tuple[str, int]) -> list[socket.socket]:
    if role == "listen":
        with socket.create_server(address) as listener:
            listener.settimeout(20)
            return [listener.accept()[0] for _ in range(streams)]
    deadline = time.monotonic() + 20
    made: list[socket.socket] = []
    while len(made) < streams:
        try:
            made.append(socket.create_connection(address, timeout=5))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    return made


def _measure(streams: int, seconds: float, role: str, address: tuple[str, int]) -> float:
    """Gbit/s received, from a third of the time on: windows have grown by then and the burst is used up."""
    connections = _connections(streams, role, address)
    end = time.monotonic() + seconds
    begin = end - seconds * 2 / 3
    received = [0] * streams
    payload = bytes(RAW_CHUNK_BYTES)

    def send(connection: socket.socket) -> None:
        connection.settimeout(10)
        while time.monotonic() < end:
            connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)

    def receive(index: int, connection: socket.socket) -> None:
        place = memoryview(bytearray(RAW_CHUNK_BYTES))
        connection.settimeout(10)
        while got := connection.recv_into(place):
            if begin <= time.monotonic() < end:
                received[index] += got

    threads = [threading.Thread(target=send, args=(one,)) for one in connections]
    threads += [threading.Thread(target=receive, args=pair) for pair in enumerate(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(received) * 8 / (end - begin) / 1e9


if __name__ == "__main__":
    _streams, _seconds, _role, _host, _port = sys.argv[1:6]
    print(_measure(int(_streams), float(_seconds), _role, (_host, int(_port))))
