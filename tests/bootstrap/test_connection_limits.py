"""Servers that anybody can reach: idle connections, slow ones and garbage keep nobody out, and are bounded."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from horoclone import connection_limits
from horoclone.connection_limits import BoundedThreads


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_closed(one: socket.socket) -> bool:
    one.settimeout(5)
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Small(BoundedThreads, HTTPServer):
    max_connections = 4
    connection_limit_s = 1.0
    request_queue_size = 64


@pytest.fixture
def small() -> Iterator[Small]:
    server = Small(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def connect(server: HTTPServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=5)


def get(server: HTTPServer, path: str = "/x") -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=5) as answer:
        return int(answer.status)


def test_who_comes_sends_away_who_came_first(small: Small) -> None:
    before = descriptors()
    idle = [connect(small) for _ in range(40)]
    assert get(small) == 200
    assert is_closed(idle[0]) and is_closed(idle[20])
    assert descriptors() - before - len(idle) <= small.max_connections
    for one in idle:
        one.close()


def test_bytes_that_come_slowly_do_not_make_a_visit_longer(small: Small) -> None:
    slow = connect(small)
    began = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - began < 10:
            slow.sendall(b"X")
            time.sleep(0.1)
    assert time.monotonic() - began < 5
    slow.close()


def test_the_last_descriptors_are_for_the_job(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 12, before[1]))
    idle = []
    try:
        for _ in range(3):
            idle.append(connect(small))
        assert all(is_closed(one) for one in idle[1:])
        os.close(os.open("/dev/null", os.O_RDONLY))  # the job's own is still to be had
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in idle:
            one.close()
    assert get(small) == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_kernels_lowest_descriptor_tells_how_many_are_left() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        pytest.skip("descriptors are not limited")
    assert not connection_limits.are_descriptors_short(3)
    assert connection_limits.are_descriptors_short(most - 1)
