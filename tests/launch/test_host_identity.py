"""Which machine is behind a host's name: when it is looked at, what is told, and what a machine says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from world import ran, until

from horoclone.launch import host_identity
from horoclone.launch.host_identity import ADDRESS, MACHINE, HostIdentities, HostIdentity
from horoclone.launch.link import SshOptions
from horoclone.launch.machine import ASK, own_machine


class Network:
    """Names and what is behind them now; who was asked."""

    def __init__(self) -> None:
        self.addresses = {"node": ["10.9.9.2", "10.9.9.1"], "other": ["10.9.9.7"]}
        self.machines = {"node": "boot-1 77", "other": "boot-2 77"}
        self.asked: list[str] = []
        self.resolved: list[str] = []

    def resolve(self, name: str) -> list[str]:
        self.resolved.append(name)
        if name not in self.addresses:
            raise OSError("no such name")
        return self.addresses[name]

    def ask(self, host: str) -> str:
        self.asked.append(host)
        return self.machines.get(host, "")


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> tuple[HostIdentities, Network]:
    monkeypatch.setattr(host_identity, "is_local", lambda name: name == "localhost")
    network = Network()
    watched = HostIdentities(SshOptions(), lambda: None, network.resolve, network.ask)
    monkeypatch.setattr(watched, "_run", lambda: None)  # the test looks itself
    return watched, network


def test_a_host_is_known_by_its_address_and_only_a_closed_one_is_asked(
    one: tuple[HostIdentities, Network],
) -> None:
    watched, network = one
    watched.watch(["node", "other", "localhost"], [])
    assert watched.look(0.0) is None
    assert watched.take() == [
        HostIdentity("node", ADDRESS, "10.9.9.1 10.9.9.2"),
        HostIdentity("other", ADDRESS, "10.9.9.7"),
    ]
    watched.look(1000.0)
    assert watched.take() == [] and len(network.resolved) == 2 and not network.asked
    watched.watch(["node", "other", "localhost"], ["node", "localhost"])
    watched.look(1001.0)
    assert watched.take() == [HostIdentity("node", MACHINE, "boot-1 77")] and network.asked == ["node"]
    watched.look(1002.0)
    assert network.asked == ["node"]
    network.addresses["node"], network.machines["node"] = ["10.9.9.3"], "boot-5 77"
    watched.look(1001.0 + host_identity.LOOK_EVERY_S)
    assert watched.take() == [HostIdentity("node", ADDRESS, "10.9.9.3")]
    watched.look(1001.0 + host_identity.ASK_EVERY_S)
    assert watched.take() == [HostIdentity("node", MACHINE, "boot-5 77")]


def test_a_host_that_comes_back_is_looked_at_at_once(one: tuple[HostIdentities, Network]) -> None:
    watched, network = one
    watched.watch(["node"], ["node"])
    watched.look(0.0)
    watched.watch([], [])
    watched.look(0.1)
    network.addresses["node"], network.machines["node"] = ["10.9.9.8"], "boot-9 1"
    watched.watch(["node"], ["node"])
    watched.look(0.2)
    assert watched.take()[-2:] == [
        HostIdentity("node", ADDRESS, "10.9.9.8"),
        HostIdentity("node", MACHINE, "boot-9 1"),
    ]


def test_what_cannot_be_found_out_is_not_told(one: tuple[HostIdentities, Network]) -> None:
    watched, _ = one
    watched.watch(["alias"], ["alias"])
    watched.look(0.0)
    assert watched.take() == []


def test_the_thread_looks_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_identity, "is_local", lambda name: False)
    network, woken = Network(), []
    watched = HostIdentities(SshOptions(), lambda: woken.append(1), network.resolve, network.ask)
    watched.watch(["node"], [])
    until(lambda: woken)
    watched.close()
    assert watched.take() == [HostIdentity("node", ADDRESS, "10.9.9.1 10.9.9.2")]


def test_a_machine_says_the_same_in_both_ways() -> None:
    said = ran("sh", "-c", ASK, check=True).stdout.strip()
    assert said == own_machine() and Path("/proc/sys/kernel/random/boot_id").read_text().strip() in said


def test_what_the_machine_says_comes_over_ssh_and_silence_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\ntest $1 = slow && exec sleep 60\nexec sh -c "$2"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(host_identity, "is_local", lambda name: False)
    watched = HostIdentities(SshOptions(), lambda: None, lambda name: [])
    watched.watch(["fast", "slow"], ["fast", "slow"])
    until(lambda: watched._asking is not None and "slow" in watched._asking.args)
    assert watched.take() == [HostIdentity("fast", MACHINE, own_machine())]
    watched.close()
    assert watched._asking is not None and watched._asking.poll() is not None
