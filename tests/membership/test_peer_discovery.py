"""Processes behind a service find their coordinator: real ones, of one process, each at a loopback address of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from horoclone import errors
from horoclone.bootstrap import service, wire
from horoclone.membership import peer_discovery
from horoclone.membership.client import HEARS, identity
from horoclone.membership.peer_discovery import PeerDiscovery
from horoclone.membership.records import Record

SIZE = 3


class Service:
    """The service `train` and its DNS: pod N is at 127.0.0.(N + 1), once it has been started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.pods: dict[int, PeerDiscovery] = {}
        self.trouble: OSError | None = None
        monkeypatch.setattr(service, "addresses", self._addresses)
        monkeypatch.setattr(
            service, "bindings", lambda port, environ: [wire.format_address(environ["BIND"], port)]
        )

    def _addresses(self, name: str) -> list[str]:
        if self.trouble is not None:
            raise self.trouble
        wanted = [number for number in self.pods if name in ("train", f"train-{number}.train")]
        return [f"127.0.0.{number + 1}" for number in sorted(wanted)]

    def start(self, number: int, secret: str = "0" * 32, **more: str) -> PeerDiscovery:
        environ = {
            "HOROCLONE_SERVICE": "train",
            "HOROCLONE_HOSTNAME": f"train-{number}",
            "HOROCLONE_SIZE": str(SIZE),
            "HOROCLONE_ELASTIC": "1",
            "HOROCLONE_SECRET": secret,
            "HOROCLONE_PORT": str(self.port),
            "BIND": f"127.0.0.{number + 1}",
            **more,
        }
        made = PeerDiscovery(identity(environ), service.place_of(environ), environ, lambda text: None)
        self.pods[number] = made
        return made

    def close(self) -> None:
        for pod in self.pods.values():
            if pod._anchor is not None:
                pod._anchor.close()
            pod._server.close()


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service(monkeypatch)
    yield made
    made.close()


def test_process_0_begins_the_job_and_who_comes_finds_it(train: Service) -> None:
    first, second = train.start(0), train.start(1)
    assert first.find(0, 5.0) and second.find(0, 5.0)
    assert second.who.addresses == first.who.own == (f"127.0.0.1:{train.port}",)
    limits = first._standby.coordinator.limits
    assert (limits.size, limits.smallest, limits.majority) == (SIZE, 2, True), (
        "more than half must come at first"
    )
    assert first._standby.coordinator.expected == ("train-0", "train-1", "train-2")
    third = train.start(2)
    assert third.find(0, 5.0) and third.who.addresses == first.who.own


def test_after_the_first_generation_the_users_smallest_size_counts(train: Service) -> None:
    first = train.start(0)
    assert first.find(0, 5.0)
    table = first._standby.coordinator
    table.record = Record(1, (), (), (), 0, 0, False, b"")
    first._relax()
    assert table.limits.smallest == 1


def test_without_process_0_the_others_say_for_whom_they_wait(train: Service) -> None:
    second, third = train.start(1), train.start(2)
    assert not second.find(0, 0.2)
    assert "no membership coordinator of job 'train' is seen, train-0.train is to begin it" in second.trouble
    assert f"127.0.0.3:{train.port} (waits as well)" in second.trouble
    assert not third._standby.is_coordinator and not second._standby.is_coordinator


def test_process_0_begins_nothing_while_another_is_in_a_job(train: Service) -> None:
    """It was started anew, and its view of the service may be older than the job's coordinator."""
    second, first = train.start(1), train.start(0)
    second._standby.state = HEARS
    assert not first.find(0, 0.2) and not first._standby.is_coordinator
    assert (
        "somebody may know another membership coordinator" in first.trouble
        and "(is in a job)" in first.trouble
    )


def test_a_coordinator_that_has_begun_nothing_yet_gives_up_for_a_job_that_there_is(train: Service) -> None:
    first = train.start(0)
    assert first.find(0, 5.0) and first._standby.is_coordinator
    second = train.start(1)
    first.look_again()
    assert first._standby.is_coordinator, "another that waits as well is no reason"
    second._standby.state = HEARS
    first.look_again()
    assert not first._standby.is_coordinator


def test_a_process_of_another_secret_is_told_so(train: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_discovery, "REFUSED_S", 0.2)
    assert train.start(0).find(0, 5.0)
    stranger = train.start(1, secret="1" * 32)
    with pytest.raises(
        errors.Unsupported, match=r"train-0\.train:\d+ refuses this process: it has another secret"
    ):
        stranger.find(0, 10.0)


def test_a_resolver_that_fails_is_told_and_asked_again(train: Service) -> None:
    first = train.start(0)
    train.trouble = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert not first.find(0, 0.2)
    assert first.trouble == "train: Temporary failure in name resolution"
    train.trouble = None
    assert first.find(0, 5.0)


def test_a_port_that_is_taken_names_the_host_and_the_setting(train: Service) -> None:
    with socket.create_server(("127.0.0.1", train.port)):
        with pytest.raises(
            errors.Unsupported, match=rf"port {train.port} is in use on host train-0.*HOROCLONE_PORT"
        ):
            train.start(0)


def test_a_coordinator_that_ends_waits_for_nobody_where_nobody_is(
    train: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = train.start(0), train.start(1)
    assert first.find(0, 5.0) and second.find(0, 5.0)
    monkeypatch.setattr(peer_discovery, "HAND_OVER_S", 60.0)
    began = time.monotonic()
    second.hand_over()  # is no coordinator
    first.hand_over()  # has formed no generation that others would have to leave
    assert time.monotonic() - began < 20
