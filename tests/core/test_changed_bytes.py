"""A device between two hosts changes one bit and makes TCP's sum right again: an error on both, never a wrong number."""

from __future__ import annotations

import random
import secrets
import select
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest
from worker_pool import enter_namespace, say

import horoclone as hvd

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("needs_root")]
PORT = 29_518
IP, TCP = b"\x08\x00", 6


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def sum_of(data):
    """The internet checksum (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2]))
    total += data[-1] << 8 if len(data) % 2 else 0
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Device:
    """Carries frames between two hosts, which are namespaces, from a third one."""

    def __init__(self):
        tag, third = secrets.token_hex(3), secrets.randbelow(250)
        self.names = [f"hc-{tag}-{side}" for side in "abm"]
        self.addresses = [f"10.217.{third}.{host}" for host in (1, 2)]
        self.changed = []
        self._wanted = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry)

    def open(self):
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for host, address in enumerate(self.addresses):
            name, port = self.names[host], f"port{host}"
            ip(
                "-n",
                name,
                "link",
                "add",
                "cable",
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.names[2],
            )
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "gso_max_segs", "1")  # frames as a wire has them
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", self.names[2], "link", "set", port, "up")
        self._thread.start()

    def change(self, smallest, largest, skip, bit):
        """One bit of the payload that comes behind so many others of this size."""
        self._wanted = [smallest, largest, skip, bit]

    def close(self):
        self._over.set()
        if self._thread.ident:
            self._thread.join(10)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)

    def _carry(self):
        enter_namespace(self.names[2])
        ports = []
        for host in (0, 1):
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            port.bind((f"port{host}", 0))
            ports.append(port)
        while not self._over.is_set():
            for port in select.select(ports, [], [], 0.1)[0]:
                frame, where = port.recvfrom(70_000)
                if where[2] == socket.PACKET_OUTGOING:
                    continue
                if frame[12:14] == IP and frame[23] == TCP:
                    frame = self._passed(bytearray(frame))
                ports[port is ports[0]].send(frame)
        for port in ports:
            port.close()

    def _passed(self, frame):
        start = 14 + (frame[14] & 15) * 4
        end = 14 + int.from_bytes(frame[16:18], "big")
        payload = start + (frame[start + 12] >> 4) * 4
        size, wanted = end - payload, self._wanted
        ports = struct.unpack("!HH", frame[start : start + 4])
        if wanted and PORT not in ports and wanted[0] <= size <= wanted[1]:
            wanted[2] -= 1
            if wanted[2] < 0:
                self._wanted = None
                at = payload + wanted[3] // 8 % size
                frame[at] ^= 1 << wanted[3] % 8
                self.changed.append((size, at - payload, wanted[3] % 8))
        frame[start + 16 : start + 18] = b"\0\0"
        pseudo = bytes(frame[26:34]) + struct.pack("!BBH", 0, TCP, end - start)
        frame[start + 16 : start + 18] = struct.pack("!H", sum_of(pseudo + bytes(frame[start:end])))
        return bytes(frame[:end])


@pytest.fixture
def device():
    made = Device()
    try:
        made.open()
    except (subprocess.CalledProcessError, OSError) as error:
        made.close()
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    yield made
    made.close()


def reduce_until_it_fails(count):
    hvd.init()
    rank, values = hvd.rank(), np.arange(count, dtype=np.float32)
    say(running=True)
    for step in range(10_000):
        try:
            result = hvd.allreduce(values + rank, op=hvd.Sum, name="weights")
        except hvd.HorovodInternalError as error:
            say(error=str(error))
            break
        wrong = int(np.count_nonzero(result != 2 * values + 1))
        if wrong:
            say(wrong=wrong, step=step)
            break
    hvd.shutdown()


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long(6)) for seed in range(3, 30))]
)
@pytest.mark.parametrize(("what", "smallest", "largest"), [("data", 1000, 70_000), ("control", 1, 300)])
def test_a_changed_bit_is_an_error_that_names_the_hosts(worker_pool, device, what, smallest, largest, seed):
    chance = random.Random(f"{what} {seed}")
    where = [f"{device.addresses[0]}:{PORT}"]
    started = worker_pool(
        reduce_until_it_fails, 2, namespaces=device.names[:2], addresses=where, count=100_000
    )
    for rank in (0, 1):
        started.wait_for(rank, "running")
    time.sleep(0.2)
    device.change(smallest, largest, chance.randrange(20), chance.randrange(1 << 20))
    heard = [started.wait_for(rank, "error", 20) for rank in (0, 1)]
    assert not any(started.said(rank, "wrong") for rank in (0, 1)), (device.changed, started.outputs())
    assert len(device.changed) == 1
    texts = [one["error"] for one in heard]
    assert any("changed on its way" in text or "sent a damaged " in text for text in texts), (
        device.changed,
        texts,
    )
    assert all(f"rank {1 - rank} (" in texts[rank] for rank in (0, 1)), texts
