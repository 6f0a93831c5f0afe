"""Two hosts that speak through WireGuard, as docs/launching.md says: between them nothing of the job can be read."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest
from namespaces import enter_namespace
from worker_pool import say

import horoclone as hvd

pytestmark = pytest.mark.netns
PORT = 51_820
UDP = 17
INSIDE = ("10.219.0.1", "10.219.0.2")
VALUE = np.float32(1.2345678)
# /run/wireguard is where the two, which are one host's in truth, would meet.
TUNNEL = """
mount -t tmpfs none /run/wireguard && wireguard-go -f wg0 >/dev/null 2>&1 &
until wg set wg0 listen-port {port} private-key {key} peer {peer} allowed-ips {other}/32 endpoint {at}:{port} 2>/dev/null
do sleep 0.02; done
ip addr add {own}/24 dev wg0 && ip link set wg0 up && echo up
wait
"""


@pytest.fixture
def tunnel(changing_device, tmp_path):
    """The two hosts' namespaces, joined by a tunnel wg0 through the cable."""
    if not all(map(shutil.which, ("wireguard-go", "wg"))):
        pytest.skip("no wireguard-go (Debian: apt-get install wireguard-go wireguard-tools)")
    os.makedirs("/run/wireguard", exist_ok=True)
    public = []
    for host in (0, 1):
        key = subprocess.run(["wg", "genkey"], check=True, capture_output=True, timeout=20).stdout
        (tmp_path / f"key{host}").write_bytes(key)
        public.append(
            subprocess.run(["wg", "pubkey"], input=key, check=True, capture_output=True, timeout=20).stdout
        )
    started = []
    try:
        for host in (0, 1):
            script = TUNNEL.format(
                port=PORT, key=tmp_path / f"key{host}", peer=public[1 - host].decode().strip(), own=INSIDE[host],
                other=INSIDE[1 - host], at=changing_device.addresses[1 - host],
            )  # fmt: skip
            command = ["ip", "netns", "exec", changing_device.names[host], "sh", "-c", script]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        for one in started:
            assert select.select([one.stdout], [], [], 30)[0] and one.stdout.readline() == b"up\n"
        yield changing_device.names[:2]
    finally:
        for one in started:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait(10)


def train():
    hvd.init()
    say(connected=True)
    for step in range(20):
        mine = np.full(100_000, VALUE * (1 + hvd.rank()), np.float32)
        assert (hvd.allreduce(mine, op=hvd.Sum, name=f"gradient {step}") == np.float32(3 * VALUE)).all()
    assert hvd.broadcast_object("a word to all", 0) == "a word to all"
    hvd.shutdown()
    say(over=True)


def test_what_travels_between_two_hosts_is_encrypted(worker_pool, changing_device, tunnel):
    seen = []

    def cable():
        """A socket in the middle of it: for that a thread goes there."""
        enter_namespace(changing_device.names[2])
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        port.bind(("port0", 0))
        port.settimeout(0.2)
        seen.append(port)

    thread = threading.Thread(target=cable)
    thread.start()
    thread.join(10)
    [port] = seen
    env = {"HOROCLONE_NETWORK_INTERFACES": "wg0"}
    team = worker_pool(train, 2, namespaces=tunnel, addresses=[f"{INSIDE[0]}:0"], env=env)
    frames, limit = [], time.monotonic() + 60
    while not all(team.said(rank, "over") for rank in (0, 1)):
        assert time.monotonic() < limit, team.outputs()
        try:
            frames.append(port.recv(70_000))
        except TimeoutError:
            pass
    port.close()
    assert team.wait() == [0, 0]
    whole = b"".join(frames)
    assert len(whole) > 4 * 100_000  # it has gone this way
    for word in (
        struct.pack("<2f", VALUE, VALUE),
        struct.pack("<2f", 2 * VALUE, 2 * VALUE),
        b"gradient",
        b"a word",
    ):
        assert word not in whole
    transports = {(one[23], one[36:38]) for one in frames if one[12:14] == b"\x08\x00"}
    assert transports == {(UDP, struct.pack("!H", PORT))}
