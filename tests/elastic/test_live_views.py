"""The views of an elastic job: they follow the generations, and crowds at their ports disturb neither them nor the job."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from horoclone.live import job


def newest(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}events", timeout=20) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                return dict(json.loads(line[6:]))
    raise AssertionError("the stream has ended")


def test_views_show_the_newest_generation_and_how_it_came(elastic: Any) -> None:
    """The dashboard, and what everything that looks from outside reads."""
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package)
    run = elastic(["-np", 3, "--min-np", 1, "--dashboard"])
    first = run.whole(1)
    run.step(5)
    url = re.search(r"dashboard: (\S+)", run.started.stderr)[1]
    view = job.of_process(run.started.process.pid)[0]
    assert {one["rank"]: one["pid"] for one in newest(url)["ranks"]} == first
    assert {one.rank: one.pid for one in view.ranks()} == first
    os.kill(first[1], signal.SIGKILL)
    again = run.of_size(3, after=1)
    run.wait(
        lambda: {one["rank"]: one["pid"] for one in newest(url)["ranks"]} == again, "the newest generation"
    )
    seen = newest(url)
    assert all(one["generation"] >= 2 and one["state"] in ("running", "waiting") for one in seen["ranks"])
    texts = [event["text"] for event in seen["events"]]
    assert any("SIGKILL" in text for text in texts) and sum("was formed" in text for text in texts) >= 2

    def view_follows() -> bool:
        ranks = view.ranks()
        return {one.rank: one.pid for one in ranks} == again and len({one.generation for one in ranks}) == 1

    run.wait(view_follows, "the metrics of the newest generation")
    events = view.events()
    assert [event.kind for event in events if event.kind != "stall"][:2] == ["member", "loss"]
    assert sum(event.kind == "member" for event in events) >= 2
    assert any(event.kind == "loss" and "SIGKILL" in event.text for event in events)
    run.finish()
    assert view.ranks() == []


CROWD = 1200  # idle connections, more than the launcher may have descriptors
HALF = b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: "


class Crowd:
    """Connections without a request to these ports, made anew when they are closed, until it is told to go."""

    def __init__(self, places: list[tuple[str, int]]) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.made = 0
        self._places = places
        self._sockets: list[socket.socket] = []
        self._goes = threading.Event()
        self._thread = threading.Thread(target=self._come)
        self._thread.start()

    def _come(self) -> None:
        while not self._goes.is_set():
            try:
                one = socket.create_connection(self._places[self.made % len(self._places)], timeout=1)
                one.send(HALF if self.made % 2 else b"")
            except OSError:
                self._goes.wait(0.01)
                continue
            self.made += 1
            self._sockets.append(one)
            if len(self._sockets) > CROWD:
                self._sockets.pop(0).close()

    def go(self) -> None:
        self._goes.set()
        self._thread.join(30)
        for one in self._sockets:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def test_a_crowd_at_every_port_costs_neither_the_job_nor_its_views(
    launch: Any, watch: Any, tmp_path: Path
) -> None:
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package)
    flags = ["-np", "3", "--min-np", "1", "--dashboard", "--metrics-port", "0"]
    worker, end = [str(Path(__file__).with_name("steps.py")), "1000000", "0.05"], tmp_path / "end"
    limited = ["sh", "-c", 'ulimit -n 1024 && exec "$@"', "sh", sys.executable, "-m", "horoclone.launch"]
    started = launch.start([*limited, *flags, sys.executable, *worker], env={"STEPS_END": str(end)})
    run = watch(started, end)
    first = run.whole(1)
    run.step(5)
    urls = [re.search(rf"{view}: (\S+)", run.started.stderr)[1] for view in ("dashboard", "metrics")]
    of_rank = Path(f"/proc/{first[0]}/environ").read_bytes().split(b"\0")
    meeting = next(one.decode() for one in of_rank if one.startswith(b"HOROCLONE_RENDEZVOUS="))
    crowd = Crowd(
        [
            (urlsplit(url).hostname, urlsplit(url).port)
            for url in [*urls, f"http://{meeting.partition('=')[2]}"]
        ]
    )
    try:
        run.wait(lambda: crowd.made > CROWD, "the crowd")
        os.kill(first[1], signal.SIGKILL)
        run.of_size(3, after=1)
        for url in urls:
            with urllib.request.urlopen(url, timeout=20) as answer:
                assert answer.status == 200
    finally:
        crowd.go()
    run.finish(timeout_s=100)
    for server in ("the dashboard", "the metrics port"):
        assert run.started.stderr.count(f"{server}: more connections than 64 without a request") == 1
    assert "Traceback" not in run.started.stderr
