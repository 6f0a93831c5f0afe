"""The views' ports and who has no token. That crowds keep nobody out is shown by tests/elastic/test_live_views.py."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest

HALF = b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: "


@pytest.fixture(scope="module")
def job(start_watched: Any) -> Any:
    made = start_watched(2)
    made.wait_until_calm()
    return made


def status(url: str) -> int:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return int(answer.status)


def raw(url: str, data: bytes, timeout_s: float = 5.0) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=timeout_s) as one:
        one.sendall(data)
        text = b""
        while part := one.recv(65536):
            text += part
    return text


def asked(url: str, line: str, more: str = "") -> tuple[bytes, bytes]:
    """Status line and body."""
    head, _, body = raw(
        url, f"{line} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n{more}\r\n".encode()
    ).partition(b"\r\n\r\n")
    assert b"evil.example" not in head
    return head.split(b"\r\n")[0], body


@pytest.mark.parametrize("view", ["dashboard_url", "metrics_url"])
def test_a_request_is_read_before_who_came_later_displaces_it(job: Any, view: str) -> None:
    """All of them wait at the port when the launcher comes to look."""
    parts = urlsplit(getattr(job, view))
    place = (parts.hostname, parts.port)
    sockets = []
    os.kill(job.pid, signal.SIGSTOP)
    try:
        for number in range(110):
            one = socket.create_connection(place, timeout=20)
            sockets.append(one)
            if number in (0, 20, 50):
                one.sendall(f"GET {parts.path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    finally:
        os.kill(job.pid, signal.SIGCONT)
    try:
        for number in (0, 20, 50):
            assert sockets[number].recv(65536).startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")), number
    finally:
        for one in sockets:
            one.close()


@pytest.mark.long(22)
def test_a_request_that_does_not_come_is_given_up(job: Any) -> None:
    began = time.monotonic()
    places = [(urlsplit(url).hostname, urlsplit(url).port) for url in (job.dashboard_url, job.metrics_url)]
    slow = [socket.create_connection(place, timeout=25) for place in places]
    for one in slow:
        one.sendall(HALF)
    for one in slow:
        assert one.recv(1) == b""
        one.close()
    assert 5 < time.monotonic() - began < 25


def test_whatever_lacks_the_token_gets_one_answer(job: Any) -> None:
    token = urlsplit(job.dashboard_url).path.strip("/")
    answer = asked(job.dashboard_url, "GET /wrong/")
    assert answer[0] == b"HTTP/1.1 404 Not Found"
    for line in (
        "GET /", "GET /wrong", "GET /wrong/events", "GET /wrong/ranks/0", "GET /wrong/dashboard.js",
        "GET /%ff/", "GET /%ed%a0%80/", f"GET //{token}/", f"GET /{token[:-1]}/", f"GET /{token}%00/",
        "POST /wrong/", "PUT /x/y", "DELETE /", "TRACE /x", "OPTIONS /x/", "OPTIONS *", "BREW /x"
    ):  # fmt: skip
        assert asked(job.dashboard_url, line) == answer, line
    assert asked(job.dashboard_url, "HEAD /wrong/") == (answer[0], b"")
    upgrade = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    assert asked(job.dashboard_url, "GET /wrong/", upgrade) == answer
    with_body = "Content-Length: 99999999\r\n"
    assert asked(job.dashboard_url, "POST /wrong/", with_body) == answer


def test_the_address_without_its_last_slash_leads_to_the_page(job: Any) -> None:
    assert status(job.dashboard_url.rstrip("/")) == 200
