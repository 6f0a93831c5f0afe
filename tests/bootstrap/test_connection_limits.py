"""Servers that anybody can reach: idle connections, slow ones and garbage keep nobody out, and are bounded."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from horoclone import connection_limits
from horoclone.connection_limits import BoundedThreads, UnauthenticatedConnections, has_unread, shut_down


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_closed(one: socket.socket) -> bool:
    one.settimeout(5)
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


class Answers(BaseHTTPRequestHandler):
    slow_ones_end = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.slow_ones_end.wait(20)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Small(BoundedThreads, HTTPServer):
    max_connections = 4
    connection_limit_s = 1.0
    thread_name = "test-accepts"


class Patient(Small):
    connection_limit_s = 60.0


@pytest.fixture
def small() -> Iterator[Small]:
    yield from serving(Small)


@pytest.fixture
def patient() -> Iterator[Small]:
    yield from serving(Patient)


def serving(kind: type[Small]) -> Iterator[Small]:
    server = kind(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, name=server.thread_name, daemon=True)
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


def ask(server: HTTPServer, path: str) -> socket.socket:
    one = connect(server)
    one.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    return one


def test_who_comes_displaces_no_request_that_is_answered(patient: Small) -> None:
    Answers.slow_ones_end.clear()
    slow = ask(patient, "/slow")
    idle = [connect(patient) for _ in range(40)]
    assert is_closed(idle[0]) and is_closed(idle[30])
    Answers.slow_ones_end.set()
    assert slow.recv(100).startswith(b"HTTP/1.0 200")
    for one in (slow, *idle):
        one.close()


def test_who_comes_displaces_no_request_that_waits_for_a_thread(patient: Small) -> None:
    Answers.slow_ones_end.clear()
    slow = [ask(patient, "/slow") for _ in range(patient.max_connections + 3)]
    idle = [connect(patient) for _ in range(40)]
    assert is_closed(idle[0]) and is_closed(idle[30])
    Answers.slow_ones_end.set()
    for one in slow:
        assert one.recv(100).startswith(b"HTTP/1.0 200")
    for one in (*slow, *idle):
        one.close()


def test_requests_that_were_at_the_port_before_a_crowd_are_answered() -> None:
    server = Patient(("127.0.0.1", 0), Answers)
    crowd = [ask(server, "/x") if number % 20 == 0 else connect(server) for number in range(200)]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for one in crowd[::20]:
        one.settimeout(20)
        assert one.recv(100).startswith(b"HTTP/1.0 200")
    server.shutdown()
    thread.join()
    server.server_close()
    for one in crowd:
        one.close()


def test_who_has_said_something_new_goes_after_those_who_are_silent() -> None:
    pairs = [socket.socketpair() for _ in range(4)]
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    connections = UnauthenticatedConnections(2, 60.0, shut_down, has_unread)
    theirs[0].send(b"x")
    assert all(connections.admit(one) for one in ours)  # nobody has to have left for that
    assert is_closed(theirs[1]) and is_closed(theirs[2])
    assert ours[0].recv(1) == b"x"
    theirs[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs[0].recv(1)
    for one in (*ours, *theirs):
        one.close()


def test_whose_proof_is_read_when_somebody_comes_is_not_sent_away() -> None:
    """As the event loops use it: news are read, and who ends one has ended it."""
    proofs, ended = ["first"], []

    def has_proved(one: str) -> bool:
        if one in proofs:
            peers.gone(one)
        return one in proofs

    def end(one: str) -> None:
        ended.append(one)
        peers.gone(one)

    said: list[str] = []
    peers = UnauthenticatedConnections(2, 60.0, end, has_proved, said.append)
    assert all(peers.admit(one) for one in ("first", "second", "third"))
    assert list(peers) == ["second", "third"] and not ended
    assert peers.admit("fourth") and ended == ["second"] and len(said) == 1
    peers.most = 0  # all others have proved themselves
    assert not peers.admit("fifth") and ended == ["second", "third"]


def test_bytes_that_come_slowly_do_not_make_a_visit_longer(small: Small) -> None:
    slow = connect(small)
    began = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - began < 30:
            slow.sendall(b"X")
            time.sleep(0.1)
    assert time.monotonic() - began < 20
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


def test_a_server_without_descriptors_or_threads_answers_once_it_has_them(
    small: Small, shortage: Callable[[str, str], list[str]]
) -> None:
    left = shortage(small.thread_name, "process_request_thread")
    with pytest.raises(OSError):
        get(small)  # no thread can be started for it
    assert get(small) == 200 and not left


def test_the_kernels_lowest_descriptor_tells_how_many_are_left() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        pytest.skip("descriptors are not limited")
    assert not connection_limits.are_descriptors_short(3)
    assert connection_limits.are_descriptors_short(most - 1)
