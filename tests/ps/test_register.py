"""The register as a process of its own that is killed and started again, empty, while servers and a worker go on."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ps_cluster import Cluster
from pusher import WIDTH, ids_of

from horoclone.ps import Sum, Table
from horoclone.ps.register import GRACE_S

ROWS = 2000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guards("csrc/server", "csrc/net", "horoclone/ps"),
    pytest.mark.timeout(240),
]


class Register:
    """`python -m horoclone.ps --register`, at one port in all its lives."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "horoclone.ps", "--register", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and str(self.port) in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def register() -> Iterator[Register]:
    made = Register()
    yield made
    made.kill()


def test_what_it_forgets_is_told_again_and_nothing_is_lost(register: Register, tmp_path: Path) -> None:
    """Each time it comes back a server that was killed comes with it: the server may not take empty tables for the truth."""
    cluster = Cluster(tmp_path, 2, memory="64m", register=f"127.0.0.1:{register.port}")
    log = tmp_path / "pusher"
    pusher = None
    try:
        watcher = cluster.worker(timeout_s=GRACE_S + 60)
        cluster.wait_for_copies(watcher)
        program = Path(__file__).with_name("pusher.py")
        pusher = subprocess.Popen(
            [str(part) for part in (sys.executable, program, cluster.address, 0, 1, 5, log, ROWS)],
            env=cluster.environ,
        )

        def acknowledged() -> int:
            return log.stat().st_size if log.exists() else 0

        def wait_for_more() -> None:
            wanted, deadline = acknowledged() + 5, time.monotonic() + 90
            while acknowledged() < wanted:
                assert pusher.poll() is None, f"the worker ended by itself: {cluster.said()}"
                assert time.monotonic() < deadline, f"no push is acknowledged any more: {cluster.said()}"
                time.sleep(0.02)

        wait_for_more()
        for victim in (1, 0):
            cluster.kill(victim)
            register.kill()
            register.start()
            cluster.start(victim)
            wait_for_more()
            cluster.wait_for_copies(watcher, 90)
        register.kill()
        register.start()
        wait_for_more()
        Path(f"{log}.stop").touch()
        assert pusher.wait(60) == 0
        expected = np.zeros(ROWS)
        for step in range(acknowledged()):
            expected[ids_of(5, step, ROWS)] += 1
        found = Table(cluster.worker(timeout_s=GRACE_S + 60), "counted", WIDTH, Sum()).pull(np.arange(ROWS))
        assert expected.sum() > 1000
        np.testing.assert_array_equal(found, np.repeat(expected[:, None], WIDTH, 1))
        assert "the register was started again" in cluster.said()
    finally:
        if pusher is not None:
            pusher.kill()
        cluster.close()


def test_servers_that_start_with_it_wait_for_older_ones_and_then_begin(
    register: Register, tmp_path: Path
) -> None:
    began = time.monotonic()
    cluster = Cluster(tmp_path, 1, replicas=1, memory="64m", register=f"127.0.0.1:{register.port}")
    try:
        cluster.worker(timeout_s=GRACE_S + 60).close()
        assert time.monotonic() - began > GRACE_S / 2
    finally:
        cluster.close()
