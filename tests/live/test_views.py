"""The views of a real job: a scrape, `horoclone top` in terminals, the dashboard's server; then one of its ranks is killed.

The tests of this file share one job and run in their order.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from terminal import ENTERED, LEFT, terminal
from world import ran

HOROCLONE = Path(sys.executable).with_name("horoclone")
SECRET = "swordfish-of-this-test"
AT_ONCE_S = 15  # two seconds on a machine with nothing else to do


@pytest.fixture(scope="module")
def job(start_watched: Any) -> Any:
    pytest.importorskip("rich", reason="rich is not installed: pip install '.[top]'")
    made = start_watched(2, env={"DATABASE_PASSWORD": SECRET})
    made.wait_until_calm()
    time.sleep(1.1)  # for the dashboard to look once more
    return made


def get(url: str, method: str = "GET") -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


class Stream:
    """The dashboard's events."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=15)
        self._connection.request("GET", f"{parts.path}events")
        self.answer = self._connection.getresponse()
        assert self.answer.headers["Content-Type"].startswith("text/event-stream")

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        name = ""
        for raw in self.answer:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    def close(self) -> None:
        self._connection.close()


def hello(job: Any) -> dict[str, Any]:
    stream = Stream(job.dashboard_url)
    try:
        name, message = next(stream.messages())
        assert name == "hello"
        return message
    finally:
        stream.close()


def top(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    # Another test may have left one
    own = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    return ran(HOROCLONE, "top", *words, env={**own, **(env or {})})


def test_a_scrape_says_what_the_ranks_say_themselves(job: Any) -> None:
    families = job.scrape()
    for rank in range(2):
        own = job.metrics_of(rank)["by_operation"]
        assert own["allreduce"]["count"] == 30 and own["allreduce"]["bytes"] == 30 * 4000
        for kind, numbers in own.items():
            of_this = {"rank": str(rank), "operation": kind}

            def value(name: str, sample: str, of_this: dict[str, str] = of_this, **more: str) -> float:
                found = [
                    one.value
                    for one in families[name].samples
                    if one.name == sample and {**of_this, **more}.items() <= one.labels.items()
                ]
                assert len(found) == 1, (name, found)
                return found[0]

            assert value("horoclone_operations", "horoclone_operations_total") == numbers["count"]
            assert value("horoclone_operation_bytes", "horoclone_operation_bytes_total") == numbers["bytes"]
            duration = "horoclone_operation_duration_seconds"
            assert value(duration, f"{duration}_count") == numbers["count"]
            assert value(duration, f"{duration}_sum") == pytest.approx(
                numbers["queued_seconds"] + numbers["running_seconds"]
            )
            assert value(duration, f"{duration}_bucket", le="+Inf") == sum(numbers["histogram"])
    up = {one.labels["rank"]: one.value for one in families["horoclone_rank_up"].samples}
    assert up == {"0": 1.0, "1": 1.0}
    late = {one.labels["rank"]: one.value for one in families["horoclone_rank_awaited_seconds"].samples}
    assert late["1"] > 0.1 and late["1"] > late.get("0", 0.0)  # it slept 20 ms in each of 30 steps


def test_the_dashboard_shows_what_the_ranks_say_themselves(job: Any) -> None:
    message = hello(job)
    own = [job.metrics_of(rank)["by_operation"] for rank in range(2)]
    for kind, shown in message["operations"].items():
        assert shown["count"] == sum(one[kind]["count"] for one in own)
        assert shown["bytes"] == sum(one[kind]["bytes"] for one in own)
        assert sum(count for _, count in shown["histogram"]) == shown["count"]
    assert [one["rank"] for one in message["ranks"]] == [0, 1]
    for one in message["ranks"]:
        assert one["state"] == "running" and one["bytes"] == sum(
            n["bytes"] for n in own[one["rank"]].values()
        )
        assert one["step"] == job.metrics_of(one["rank"])["step"]["number"]
    assert message["sum"]["slowest"] == 1 and message["job"] == {
        **message["job"],
        "id": str(job.pid),
        "ended": None,
    }
    status, text, _ = get(f"{job.dashboard_url}ranks/1")
    assert (
        status == 200 and json.loads(text)["operations"]["allreduce"]["bytes"] == own[1]["allreduce"]["bytes"]
    )
    assert get(f"{job.dashboard_url}ranks/2")[0] == 404


def test_the_dashboard_is_for_who_knows_the_token_and_acts_on_nothing(job: Any) -> None:
    parts = urlsplit(job.dashboard_url)
    assert parts.hostname == "127.0.0.1" and len(parts.path.strip("/")) >= 20
    root = f"http://{parts.netloc}"
    assert get(f"{root}/")[0] == get(f"{root}/{'A' * 24}/")[0] == get(f"{root}/{'A' * 24}/events")[0] == 404
    assert get(f"{job.dashboard_url}../../etc/passwd")[0] == get(f"{job.dashboard_url}server.py")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert get(job.dashboard_url, method)[0] == 405
    for port in (parts.port, urlsplit(job.metrics_url).port):
        connection = http.client.HTTPConnection("127.0.0.2", port, timeout=5)
        with pytest.raises(OSError):  # it listens on one address only
            connection.connect()
    everything = [get(job.metrics_url)[1], json.dumps(hello(job)), job.started.stderr]
    status, page, headers = get(job.dashboard_url)
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    names = re.findall(r'(?:href|src)="([^"#]+)"', page)
    assert {"dashboard.js", "dashboard.css", "uplot/uPlot.iife.min.js"} <= set(names)
    for name in names:
        status, text, _ = get(f"{job.dashboard_url}{name}")
        assert status == 200
        everything.append(text)
        assert not re.search(r"""(?:src|href|import|url\()\s*=?\s*["'(]?https?://""", text), (
            "nothing comes from elsewhere"
        )
    assert get(f"{job.dashboard_url}uplot/LICENSE")[1].startswith("The MIT License")
    assert not any(SECRET in text for text in everything)


def test_without_a_terminal_top_prints_once(job: Any) -> None:
    done = top(str(job.pid))  # other jobs may run on this machine
    assert done.returncode == 0 and not done.stderr, done
    lines = done.stdout.splitlines()
    assert str(job.pid) in lines[0] and "train.py" in lines[0] and "2 running" in lines[1]
    assert "\x1b" not in done.stdout and max(map(len, lines)) <= 120
    for rank, line in enumerate(lines[4:6]):
        assert line.split()[0] == str(rank) and "running" in line and "broadcast 'weights'" in line
    assert top(str(job.pid), "--once", env={"COLUMNS": "0"}).stdout.count("running") == 3
    done = top("nosuchjob")
    assert done.returncode == 1 and "no job 'nosuchjob'" in done.stderr and str(job.pid) in done.stderr
    narrow = top(str(job.pid), env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, narrow)) <= 80


def test_top_in_a_terminal_follows_the_job_and_obeys_keys(job: Any, tmp_path: Path) -> None:
    for columns, more in ((80, {}), (200, {"NO_COLOR": "1"})):
        with terminal(
            [HOROCLONE, "top", "--interval", "0.2", str(job.pid)],
            columns,
            24,
            {**os.environ, "PWD": str(tmp_path)},
        ) as shown:
            before = shown.modes()
            shown.wait_for(r"2 running.*\n(?s:.*) 1 \S+ .*running")
            assert ENTERED in shown.text and LEFT not in shown.text
            shown.press("\x1b[B")
            shown.wait_for(r"rank 1 on \S+: running")
            if columns == 200:
                shown.press("s")
                shown.wait_for(r"Stacks of rank 1 \(pid \d+\)(?s:.*)line \d+ in wait_for")
                shown.press(" ")
                shown.press("o")
                shown.wait_for("ordered by late")
            shown.press("q")
            assert shown.end() == 0
            assert LEFT in shown.text and shown.modes() == before, "the terminal is as it was"
            last = shown.plain.rpartition("horoclone job")[2]
            assert "2 running" in last and max(len(line) for line in last.splitlines()) <= columns + len(
                "horoclone job"
            )
            del more


def test_top_writes_flight_records_that_debug_reads(job: Any, tmp_path: Path) -> None:
    with terminal(
        ["sh", "-c", f"cd {tmp_path} && exec {HOROCLONE} top {job.pid}"], 100, 30, os.environ
    ) as shown:
        shown.wait_for("2 running")
        shown.press("r")
        shown.wait_for("2 flight records")
        shown.press("q")
        assert shown.end() == 0
    folder = tmp_path / f"horoclone-records-{job.pid}"
    done = ran(HOROCLONE, "debug", folder)
    assert done.returncode == 0 and "Records of 2 of 2 ranks" in done.stdout, done
    assert "asked for by horoclone top" in done.stdout
    assert job.started.process.poll() is None, "the job goes on"


@pytest.mark.parametrize("case", ["no width", "no colours", "dumb", "SIGTERM", "Ctrl-C"])
def test_top_in_odd_terminals_and_with_odd_ends(job: Any, case: str) -> None:
    env = {**os.environ, **{"no colours": {"NO_COLOR": "1"}, "dumb": {"TERM": "dumb"}}.get(case, {})}
    columns, lines = (0, 0) if case == "no width" else (80, 24)
    with terminal([HOROCLONE, "top", "--interval", "0.2", str(job.pid)], columns, lines, env) as shown:
        before = shown.modes()
        shown.wait_for("2 running(?s:.*)broadcast")
        if case == "dumb":  # its cursor does not move: printed once
            assert shown.end() == 0 and ENTERED not in shown.text and "\x1b[" not in shown.text
            return
        if case == "SIGTERM":
            shown.process.send_signal(signal.SIGTERM)
        else:
            shown.press("\x03" if case == "Ctrl-C" else "q")
        assert shown.end() == (143 if case == "SIGTERM" else 0)
        assert LEFT in shown.text and shown.modes() == before
        if case == "no colours":
            assert not re.search(r"\x1b\[(?:\d+;)*3[0-7]m", shown.text)


def test_browsers_that_come_and_go_do_not_disturb(job: Any) -> None:
    streams = [Stream(job.dashboard_url) for _ in range(20)]
    assert all(next(stream.messages())[0] == "hello" for stream in streams)
    for stream in streams[1:]:
        stream.close()
    names = [name for name, _ in itertools.islice(streams[0].messages(), 2)]
    streams[0].close()
    assert names == ["tick", "tick"] and hello(job)["job"]["ended"] is None


def test_two_jobs_at_once_are_told_apart(job: Any, start_watched: Any) -> None:
    other = start_watched(1)
    other.wait_until_calm()
    assert other.metrics_url != job.metrics_url and other.dashboard_url != job.dashboard_url
    done = top()
    assert done.returncode == 1 and "several jobs" in done.stderr
    assert str(job.pid) in done.stderr and str(other.pid) in done.stderr
    assert len(hello(other)["ranks"]) == 1 and len(hello(job)["ranks"]) == 2
    assert f"job {other.pid}" in top(str(other.pid)).stdout
    token = urlsplit(job.dashboard_url).path
    assert get(f"http://{urlsplit(other.dashboard_url).netloc}{token}")[0] == 404, (
        "each has a token of its own"
    )
    other.begin("on")
    other.begin("end")
    assert other.started.finish(30).returncode == 0


def test_a_killed_rank_is_lost_at_once_in_every_view_and_the_job_ends_as_without_them(
    job: Any,
) -> None:
    stream = Stream(job.dashboard_url)
    messages = stream.messages()
    assert next(messages)[0] == "hello"
    job.begin("on")
    steps = job.value("horoclone_steps", "horoclone_steps_total", rank="0")
    job.started.until(lambda: job.value("horoclone_steps", "horoclone_steps_total", rank="0") > steps + 20)
    (pid,) = [
        int(one.labels["pid"])
        for one in job.scrape()["horoclone_rank_info"].samples
        if one.labels["rank"] == "1"
    ]
    with terminal([HOROCLONE, "top", "--interval", "0.2", str(job.pid)], 80, 24, os.environ) as shown:
        shown.wait_for("2 (?:running|waiting)|1 waiting|1 running")
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        while job.value("horoclone_rank_state", rank="1", state="lost") != 1:  # each scrape is parsed
            assert time.monotonic() < killed_s + AT_ONCE_S
        for _, message in messages:
            assert time.monotonic() < killed_s + AT_ONCE_S
            (one,) = (one for one in message["ranks"] if one["rank"] == 1)
            if one["state"] == "lost":
                break
        assert one["note"] == "SIGKILL"
        shown.wait_for(r" 1 \S+ +lost .*SIGKILL", AT_ONCE_S)
        last = message
        for _, message in messages:
            last = message
        stream.close()
        done = job.started.finish(30)
        shown.wait_for("The job has ended", AT_ONCE_S)
        assert shown.end() == 0
        assert "rank 1 was killed by SIGKILL" in shown.plain.rpartition("horoclone job")[2]
    assert done.returncode == 137 and "root cause: rank 1" in done.stderr
    assert last["job"]["ended"]["exit_code"] == 137 and "root cause: rank 1" in last["job"]["ended"]["text"]
    assert [one["state"] for one in last["ranks"]] == ["ended", "lost"], "only who was killed"
    assert "dashboard" not in done.stderr.replace(f"dashboard: {job.dashboard_url}", "")
    with pytest.raises(OSError):
        urllib.request.urlopen(job.metrics_url, timeout=5)
