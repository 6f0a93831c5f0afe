"""The dashboard of an elastic job: it follows the generations."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from typing import Any

import pytest

pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")


def newest(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}events", timeout=20) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                return dict(json.loads(line[6:]))
    raise AssertionError("the stream has ended")


def test_the_dashboard_shows_the_newest_generation_and_how_it_came(elastic: Any) -> None:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package)
    run = elastic(["-np", 3, "--min-np", 1, "--dashboard"], steps=80)
    first = run.whole(1)
    run.step(5)
    url = re.search(r"dashboard: (\S+)", run.started.stderr)[1]
    assert {one["rank"]: one["pid"] for one in newest(url)["ranks"]} == first
    os.kill(first[1], signal.SIGKILL)
    again = run.of_size(3, after=1)
    run.wait(
        lambda: {one["rank"]: one["pid"] for one in newest(url)["ranks"]} == again, "the newest generation"
    )
    seen = newest(url)
    assert all(one["generation"] >= 2 and one["state"] in ("running", "waiting") for one in seen["ranks"])
    texts = [event["text"] for event in seen["events"]]
    assert any("SIGKILL" in text for text in texts) and sum("was formed" in text for text in texts) >= 2
    run.finish()
