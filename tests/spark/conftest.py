"""Spark applications for the tests: a driver process of the environment .venv/engines, which runs functions of cases.py.

One application serves all tests of a file, since to start one takes some 10 s.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("cases.py")
REPLY = "REPLY "


def obstacle() -> str:
    """Why there can be no application; empty: there can."""
    home = os.environ.get("JAVA_HOME", "")
    if shutil.which("java") is None and not (home and (Path(home) / "bin" / "java").exists()):
        return "no java on PATH (Debian: apt-get install openjdk-17-jre-headless)"
    return ""


def spark_environment(python: Path) -> dict[str, str]:
    """Variables with which an application uses loopback and this Python only, and its JVMs start in half of the time."""
    return {
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }


class Application:
    """ask(case, ...) calls the function of cases.py in the driver, and gives its value."""

    def __init__(self, started: Any) -> None:
        self.started = started
        self._numbers = itertools.count()

    def begin(self, case: str, **arguments: Any) -> int:
        number = next(self._numbers)
        line = json.dumps({"number": number, "case": case, "arguments": arguments})
        self.started.process.stdin.write(line.encode() + b"\n")
        self.started.process.stdin.flush()
        return number

    def end(self, number: int, timeout_s: float = 240) -> Any:
        """The value; a failure of the test with the driver's output where the case raised, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while (reply := self._reply(number)) is None:
            ended = self.started.process.poll() is not None
            if time.monotonic() > deadline or (ended and self._reply(number) is None):
                pytest.fail(f"no answer from the driver\n{self.started.stdout}\n{self.started.stderr}")
            time.sleep(0.05)
        if "error" in reply:
            pytest.fail(f"{reply['error']}\n{self.started.stderr[-6000:]}")
        return reply["value"]

    def _reply(self, number: int) -> Any:
        for line in self.started.stdout.splitlines():
            at = line.find(f'{REPLY}{{"number": {number},')
            if at >= 0:
                return json.loads(line[at + len(REPLY) :])
        return None

    def ask(self, case: str, timeout_s: float = 240, **arguments: Any) -> Any:
        return self.end(self.begin(case, **arguments), timeout_s)

    def close(self) -> None:
        self.started.process.stdin.close()
        try:
            self.started.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        left = self.started.left_over(10.0)
        self.started.close()
        assert not left, f"processes outlived the application:\n{left}"


@pytest.fixture(scope="module")
def application(request: pytest.FixtureRequest, engines: Path) -> Iterator[Callable[[str], Application]]:
    """application(master) gives the file's application, which is started by its first test."""
    if reason := obstacle():
        pytest.skip(reason)
    shared = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    starter = shared.Launch()
    running: dict[str, Application] = {}

    def give(master: str) -> Application:
        if master not in running:
            command = [engines, CASES, master]
            running[master] = Application(
                starter.start(command, env=spark_environment(engines), stdin=subprocess.PIPE)
            )
        return running[master]

    yield give
    try:
        for one in running.values():
            one.close()
    finally:
        starter.close()


@pytest.fixture(scope="module")
def cluster(application: Callable[[str], Application]) -> Application:
    """Two executors, each a JVM of its own with one core."""
    return application("local-cluster[2,1,1024]")


@pytest.fixture(scope="module")
def local(application: Callable[[str], Application]) -> Application:
    """Two cores in the driver's JVM."""
    return application("local[2]")
