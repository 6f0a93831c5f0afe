"""An elastic job on two hosts, which are network namespaces: a host is lost, is cut off, and comes by discovery."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("numpy")
pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

WORKER = Path(__file__).with_name("steps.py")
RUN = [sys.executable, "-m", "horoclone.launch"]

# ssh to the second host: its words after the host, by a shell in its namespace.
SSH = """#!{python}
import os, sys
words = sys.argv[1:]
while words and words[0].startswith("-"):
    words = words[1 if words[0] == "-T" else 2:]
os.execvp("ip", ["ip", "netns", "exec", {name!r}, "sh", "-c", " ".join(words[1:])])
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Hosts(NamedTuple):
    names: list[str]
    addresses: list[str]
    path: str  # PATH with the ssh of the first host

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", "cable", "down")


@pytest.fixture
def hosts(tmp_path: Path, needs_root: None) -> Iterator[Hosts]:
    names = [f"hc-{secrets.token_hex(3)}-{side}" for side in "ab"]
    third = secrets.randbelow(250)
    addresses = [f"10.214.{third}.{host}" for host in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        peer = ["type", "veth", "peer", "name", "cable", "netns", names[1]]
        ip("-n", names[0], "link", "add", "cable", *peer)
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    script = tmp_path / "ssh"
    script.write_text(SSH.format(python=sys.executable, name=names[1]))
    script.chmod(0o755)
    yield Hosts(names, addresses, f"{tmp_path}:{os.environ['PATH']}")
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.fixture
def job(launch: Any, watch: Any, hosts: Hosts) -> Any:
    def start(*flags: object, steps: int = 60, **environment: str) -> Any:
        inside = ["ip", "netns", "exec", hosts.names[0]]
        words = [*inside, *RUN, *map(str, flags), sys.executable, WORKER, str(steps), "0.05"]
        return watch(launch.start(words, env={**environment, "PATH": hosts.path}))

    return start


@pytest.mark.netns
def test_a_rank_of_another_host_is_lost_and_comes_back(job: Any, hosts: Hosts) -> None:
    run = job("-np", 4, "--min-np", 2, "-H", ",".join(f"{one}:2" for one in hosts.addresses))
    first = run.whole(1)
    run.step(5)
    os.kill(first[2], signal.SIGKILL)
    second = run.whole(2)
    assert [second[0], second[1], second[2]] == [first[0], first[1], first[3]]
    assert run.of_size(4, after=1)[2] == first[3]
    run.finish()


@pytest.mark.netns
def test_the_side_with_the_launcher_goes_on_when_the_other_is_cut_off(job: Any, hosts: Hosts) -> None:
    run = job(
        "-np", 4, "--min-np", 2, "-H", ",".join(f"{one}:2" for one in hosts.addresses), steps=300,
        HOROCLONE_LIVENESS_ERROR_S="2", HOROCLONE_LIVENESS_WARN_S="1", HOROCLONE_LIVENESS_PROBE_S="0.5",
    )  # fmt: skip
    first = run.whole(1)
    run.step(5)
    hosts.cut()
    assert run.of_size(2, after=1) == {0: first[0], 1: first[1]}
    run.started.process.send_signal(signal.SIGTERM)
    assert run.started.finish(60).returncode == 143


@pytest.mark.netns
def test_a_host_that_the_script_finds_later_joins(job: Any, hosts: Hosts, tmp_path: Path) -> None:
    listed, script = tmp_path / "hosts", tmp_path / "find.sh"
    listed.write_text(f"{hosts.addresses[0]}:2\n")
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    run = job("-np", 2, "--min-np", 1, "--host-discovery-script", script, steps=150)
    first = run.whole(1)
    listed.write_text(f"{hosts.addresses[1]}:1\n{hosts.addresses[0]}:2\n")
    grown = run.of_size(3)
    assert (grown[0], grown[1]) == (first[0], first[1])
    run.finish()


def test_a_process_that_cannot_reach_its_roster_ends_with_75(launch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it listens, and nobody answers there
        environment = {
            "HOROCLONE_ELASTIC": "1",
            "HOROCLONE_ELASTIC_TIMEOUT": "2",
            "HOROCLONE_MEMBER": "ab" * 16,
            "HOROCLONE_SECRET": "0" * 32,
            "HOROCLONE_RENDEZVOUS": f"127.0.0.1:{silent.getsockname()[1]}",
        }
        code = "import horoclone; horoclone.init()"
        done = launch([sys.executable, "-c", code], env=environment, check=False, timeout_s=40)
    assert done.returncode == 75 and "the roster of this job cannot be reached" in done.stderr, done.output
