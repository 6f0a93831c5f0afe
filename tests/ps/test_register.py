"""The register as a process of its own that is killed and started again, empty, while servers and a worker go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ps_cluster import Cluster
from pusher import WIDTH, ids_of
from world import free_port, until

from horoclone import errors
from horoclone.ps import Sum, Table
from horoclone.ps.register import NEW_S, open_register
from horoclone.ps.register import Register as Reading

ROWS = 2000
ANOTHER = """
import sys
from horoclone.ps.register import serve_store
store = serve_store(int(sys.argv[1]), float(sys.argv[2]))
print(store.port, flush=True)
sys.stdin.read()
"""

pytestmark = [pytest.mark.timeout(240), pytest.mark.long(60)]


class Register:
    """`python -m horoclone.ps --register`, at one port in all its lives. new_s: for how long the next one is new, where
    that is not the usual time."""

    def __init__(self) -> None:
        self.new_s: float | None = None
        self.port = free_port()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "horoclone.ps", "--register", str(self.port)]
        if self.new_s is not None:
            command = [sys.executable, "-c", ANOTHER, str(self.port), str(self.new_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        watcher = cluster.worker(timeout_s=60)
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
        found = Table(cluster.worker(timeout_s=60), "counted", WIDTH, Sum()).pull(np.arange(ROWS))
        assert expected.sum() > 1000
        np.testing.assert_array_equal(found, np.repeat(expected[:, None], WIDTH, 1))
        assert "the register has forgotten this server" in cluster.said()
    finally:
        if pusher is not None:
            pusher.kill()
        cluster.close()


def entries(cluster: Cluster) -> Reading:
    """What the register says, without a worker that would wait for partitions."""
    return open_register("test", cluster.address, None, cluster.environ)


def fill(cluster: Cluster) -> None:
    """Ones in every row, in two copies of which both servers know that they count."""
    table = Table(cluster.worker(), "counted", WIDTH, Sum())
    table.push(np.arange(ROWS), np.ones((ROWS, WIDTH)))
    cluster.wait_for_copies(table.servers)
    table.servers.close()
    time.sleep(1)  # for server 1 to hear that its copies count


def test_a_server_that_starts_waits_for_one_that_is_slow_to_tell(register: Register, tmp_path: Path) -> None:
    """However slow: its rows are the only ones there are."""
    cluster = Cluster(tmp_path, 2, memory="64m", register=f"127.0.0.1:{register.port}")
    try:
        fill(cluster)
        cluster.processes[1].send_signal(signal.SIGSTOP)
        cluster.kill(0)
        register.kill()
        register.start()
        cluster.start(0)
        time.sleep(NEW_S + 5)
        assert entries(cluster).get("view/0") is None and "once server 1 has come" in cluster.said()
        cluster.processes[1].send_signal(signal.SIGCONT)
        found = Table(cluster.worker(timeout_s=60), "counted", WIDTH, Sum()).pull(np.arange(ROWS))
        assert (found == 1).all(), cluster.said()
    finally:
        cluster.processes[1].send_signal(signal.SIGCONT)
        cluster.close()


def test_rows_that_die_before_the_register_knows_of_them_are_known_as_lost(
    register: Register, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, 2, memory="64m", register=f"127.0.0.1:{register.port}")
    try:
        fill(cluster)
        cluster.kill(0)
        register.kill()
        register.start()
        reading = entries(cluster)
        place = reading.wait("server/1", bool, time.monotonic() + 30, "server 1")
        assert place["copies"] == [0, 1]
        cluster.kill(1)
        for index in range(2):
            cluster.start(index)
        with pytest.raises(errors.StateLost, match=r"all copies of partitions \[0"):
            Table(cluster.worker(), "counted", WIDTH, Sum())
    finally:
        cluster.close()


def test_servers_that_start_with_it_begin_once_all_have_come(register: Register, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, memory="64m", register=f"127.0.0.1:{register.port}", start=[0])
    try:
        reading = entries(cluster)
        reading.wait("server/0", bool, time.monotonic() + 60, "server 0")
        time.sleep(1)
        assert reading.get("view/0") is None
        with pytest.raises(errors.Timeout, match=r"servers \[1\] of 2 have not come"):
            cluster.worker(timeout_s=0.5)
        cluster.start(1)
        cluster.wait_for_copies(cluster.worker())
    finally:
        cluster.close()


def test_who_waits_for_a_new_register_says_so(register: Register, tmp_path: Path) -> None:
    register.kill()
    register.new_s = 20
    register.start()
    cluster = Cluster(tmp_path, 2, memory="64m", register=f"127.0.0.1:{register.port}")
    try:
        for index in range(2):
            entries(cluster).wait(f"server/{index}", bool, time.monotonic() + 15, f"server {index}")
        with pytest.raises(errors.Timeout, match=r"all 2 servers have come, but none has begun within 0.5 s"):
            cluster.worker(timeout_s=0.5)
        cluster.wait_for_copies(cluster.worker(timeout_s=60))
        assert "once the register, which was just started" in cluster.log(0).read_text(), cluster.said()
    finally:
        cluster.close()


def forgetful(cluster: Cluster, register: Register, new_s: float | None) -> None:
    """The register is started again while the servers stand still, so that others can come before them."""
    for process in cluster.processes.values():
        process.send_signal(signal.SIGSTOP)
    register.kill()
    register.new_s = new_s
    register.start()


def come(cluster: Cluster, folder: Path, index: int, servers: int) -> Cluster:
    """A server of the same name in another layout, which the register knows of now."""
    folder.mkdir()
    other = Cluster(folder, servers, memory="64m", register=cluster.address, start=[])
    other.environ = cluster.environ
    other.start(index)
    entries(cluster).wait(f"server/{index}", bool, time.monotonic() + 60, "the other server")
    return other


def go_on(cluster: Cluster) -> None:
    for process in cluster.processes.values():
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(("index", "servers"), [(2, 3), (0, 2), (0, 1)])
def test_a_server_of_another_layout_ends_when_those_that_run_have_told_theirs(
    register: Register, tmp_path: Path, index: int, servers: int
) -> None:
    """One that would be complete by itself, and one that takes the place of a server that runs, among them."""
    running = 3 if servers == 2 else 2
    cluster = Cluster(tmp_path, running, memory="64m", register=f"127.0.0.1:{register.port}", silence_s=30)
    other = None
    try:
        fill(cluster)
        forgetful(cluster, register, 60)
        other = come(cluster, tmp_path / "other", index, servers)
        time.sleep(1)
        go_on(cluster)
        assert other.processes[index].wait(30) == 1, cluster.said()
        assert f"'servers': {running}" in other.said() and f"'servers': {servers}" in other.said()
        assert "under another --name" in other.said()
        watcher = cluster.worker(timeout_s=60)
        cluster.wait_for_copies(watcher)
        table = Table(watcher, "counted", WIDTH, Sum())
        table.push(np.arange(ROWS), np.ones((ROWS, WIDTH)))
        assert (table.pull(np.arange(ROWS)) == 2).all(), cluster.said()
    finally:
        go_on(cluster)
        if other is not None:
            other.close()
        cluster.close()


def test_an_entry_of_another_layout_is_no_sign_that_a_server_has_died(tmp_path: Path) -> None:
    """One of the others may have come into a running one's place, just before it was refused."""
    cluster = Cluster(tmp_path, 2, memory="64m")
    try:
        fill(cluster)
        cluster.processes[1].send_signal(signal.SIGSTOP)
        cluster.kill(0)
        other = {"layout": {"servers": 3, "replicas": 2}, "generation": 7, "copies": [], "had": []}
        entries(cluster).set("server/1", {**entries(cluster).get("server/1"), **other})
        before = entries(cluster).get("server/0")
        cluster.start(0)
        entries(cluster).wait("server/0", lambda place: place != before, time.monotonic() + 60, "server 0")
        time.sleep(3)
        go_on(cluster)
        watcher = cluster.worker(timeout_s=60)
        found = Table(watcher, "counted", WIDTH, Sum()).pull(np.arange(ROWS))
        assert (found == 1).all(), cluster.said()
        cluster.wait_for_copies(watcher)
    finally:
        go_on(cluster)
        cluster.close()


def test_servers_that_find_another_layout_say_so_and_go_on(register: Register, tmp_path: Path) -> None:
    """Where they came too late: all servers of the other layout had come, and the register was not new any more."""
    cluster = Cluster(tmp_path, 2, memory="64m", register=f"127.0.0.1:{register.port}", silence_s=30)
    other = None
    try:
        fill(cluster)
        table = Table(cluster.worker(), "counted", WIDTH, Sum())
        forgetful(cluster, register, 0)
        other = come(cluster, tmp_path / "other", 0, 1)
        entries(cluster).wait("view/0", bool, time.monotonic() + 30, "the other server")
        go_on(cluster)
        until(lambda: all("--name" in cluster.log(index).read_text() for index in range(2)), 30, cluster.said)
        table.push(np.arange(ROWS), np.ones((ROWS, WIDTH)))
        assert (table.pull(np.arange(ROWS)) == 2).all(), cluster.said()
        assert entries(cluster).get("view/1") is None, (
            "it is of a partition that the other layout does not have"
        )
        assert all(process.poll() is None for process in cluster.processes.values())
        assert table.save(str(tmp_path / "saved")) == ROWS
        assert entries(cluster).get("saved") is None, "what the register says is about the other layout"
        with pytest.raises(errors.HorovodInternalError, match="now speaks of"):
            table.servers.another()
        cluster.kill(0)
        with pytest.raises(errors.HorovodInternalError, match="now speaks of .*'servers': 1"):
            table.pull(np.arange(ROWS))
    finally:
        go_on(cluster)
        if other is not None:
            other.close()
        cluster.close()
