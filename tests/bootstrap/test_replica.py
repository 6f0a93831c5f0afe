"""Commits on their way to spares: only to who knows the secret, only whole, the newest, from whoever feeds now."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horoclone.bootstrap import replica, seal, wire
from horoclone.bootstrap.client import Client
from horoclone.bootstrap.rendezvous import Server
from horoclone.bootstrap.replica import Feed, Feeder

SECRET, JOB = b"s" * 32, "job"


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server(SECRET, JOB, 4, ["127.0.0.1"])
    yield one
    one.close()


def tell(server: Server, addresses: list[str], generation: int = 1) -> None:
    client = Client(server.addresses, SECRET, JOB, 5.0)
    client.put(replica.KEY, generation.to_bytes(8, "little") + ",".join(addresses).encode())
    client.close()


@pytest.fixture
def feeder(server: Server) -> Iterator[Feeder]:
    one = Feeder(SECRET, JOB, ["127.0.0.1"], 0.0)
    tell(server, one.addresses)
    yield one
    one.close()


@pytest.fixture
def feed(server: Server) -> Iterator[Feed]:
    one = Feed(server.addresses, SECRET, JOB)
    one.start()
    yield one
    one.take()
    until(lambda: not one._thread.is_alive())


def newest(feed: Feed, commit: int) -> replica.Replica:
    return until(lambda: feed._newest if feed._newest is not None and feed._newest.commit >= commit else None)


def test_a_spare_gets_each_commit_and_keeps_the_newest(feeder: Feeder, feed: Feed) -> None:
    large = bytearray(b"ab" * 3_000_000)
    feeder.offer(3, lambda: [b"head", large, b""])
    first = newest(feed, 3)
    assert [bytes(part) for part in first.parts] == [b"head", bytes(large), b""]
    assert first.digest == feeder.digest(3) > 1 << 32 and feeder.digest(2) == 0
    feeder.offer(7, lambda: [b"x"])
    second = newest(feed, 7)
    assert second.digest == feeder.digest(7) and feeder.digest(3) == 0
    feeder.offer(8, lambda: [b"y"])
    newest(feed, 8)
    assert feed.take() is feed._newest


def test_who_comes_later_gets_what_is_there(server: Server, feeder: Feeder) -> None:
    feeder.offer(5, lambda: [b"five"])
    for _ in range(2):
        late = Feed(server.addresses, SECRET, JOB)
        late.start()
        assert bytes(newest(late, 5).parts[0]) == b"five"
        late.take()


def test_nothing_is_packed_for_nobody_and_what_cannot_be_packed_is_not_sent(
    server: Server, feeder: Feeder
) -> None:
    calls = []

    def bad() -> list[bytes]:
        calls.append(1)
        raise TypeError("a lock cannot be pickled")

    feeder.offer(1, bad)
    time.sleep(0.1)
    assert not calls
    feed = Feed(server.addresses, SECRET, JOB)
    feed.start()
    until(lambda: calls)
    feeder.offer(2, lambda: [b"good"])
    assert newest(feed, 2).commit == 2
    feed.take()


def test_a_commit_comes_no_more_often_than_it_may(server: Server) -> None:
    feeder = Feeder(SECRET, JOB, ["127.0.0.1"], 100.0)
    tell(server, feeder.addresses)
    feed = Feed(server.addresses, SECRET, JOB)
    feed.start()
    feeder.offer(1, lambda: [b"1"])
    newest(feed, 1)
    feeder.offer(2, lambda: [b"2"])
    time.sleep(0.2)
    assert feed._newest is not None and feed._newest.commit == 1
    feed.take()
    feeder.close()


@pytest.mark.parametrize("secret, job", [(b"x" * 32, f"{JOB}/replica"), (SECRET, JOB)])
def test_a_stranger_is_told_nothing(feeder: Feeder, secret: bytes, job: str) -> None:
    feeder.offer(1, lambda: [b"weights"])
    host, port = feeder.addresses[0].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        greeting = peer.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
        nonce = b"n" * wire.NONCE_BYTES
        proof = wire.proof(secret, b"client", job, greeting[len(wire.GREETING) :], nonce)
        peer.sendall(wire.HELLO + nonce + proof)
        said = peer.recv(1 << 16, socket.MSG_WAITALL)
    assert said == wire.REFUSED


def test_a_feeder_that_is_gone_is_followed_by_the_next(server: Server, feed: Feed) -> None:
    for generation in (1, 2):
        feeder = Feeder(SECRET, JOB, ["127.0.0.1"], 0.0)
        tell(server, feeder.addresses, generation)
        feeder.offer(generation * 10, lambda: [b"x"])
        newest(feed, generation * 10)
        feeder.close()


def test_a_feeder_that_is_silent_is_left_for_the_next(
    server: Server, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "LOOK_S", 0.1)
    silent = Feeder(SECRET, JOB, ["127.0.0.1"], 0.0)
    tell(server, silent.addresses)
    silent.offer(1, lambda: [b"x"])
    newest(feed, 1)
    speaks = Feeder(SECRET, JOB, ["127.0.0.1"], 0.0)
    tell(server, speaks.addresses, 2)
    speaks.offer(2, lambda: [b"y"])
    newest(feed, 2)
    silent.close()
    speaks.close()


def sent(*pieces: bytes) -> Any:
    """What _read makes of a stream that ends behind these."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: (ours.sendall(b"".join(pieces)), ours.close()))
        writer.start()
        try:
            return replica._read(theirs, lambda: False)
        finally:
            writer.join(10)


def test_what_makes_no_sense_is_refused() -> None:
    head = struct.pack("<QIQ", 4, 1, 3)
    tag = seal.tag_of(b"secret", replica.Replica(4, [], 7).context("job/replica"), [b"abc"])
    end = struct.pack("<Q", 7) + tag
    feed = replica.Feed(["127.0.0.1:1"], b"secret", "job")
    assert feed._checked(sent(head, b"abc", end)) == (4, [b"abc"], 7, tag)
    wrong = struct.pack("<Q", 8) + tag
    for content, tail, other in (
        (b"abd", end, head),
        (b"abc", wrong, head),
        (b"abc", end, struct.pack("<QIQ", 5, 1, 3)),
    ):
        with pytest.raises(ConnectionError, match="changed on its way"):
            feed._checked(sent(other, content, tail))
    with pytest.raises(ConnectionError, match="changed on its way"):
        replica.Feed(["127.0.0.1:1"], b"another", "job")._checked(sent(head, b"abc", end))
    with pytest.raises(ConnectionError, match="gone"):
        sent(head, b"ab")
    with pytest.raises(ConnectionError, match="more than this machine has"):
        sent(struct.pack("<QIQ", 4, 1, 1 << 60))
    with pytest.raises(ConnectionError, match="parts"):
        sent(struct.pack("<QI", 4, 1 << 31))


def test_a_promoted_spare_takes_the_commit_that_is_on_its_way_and_no_other(
    feeder: Feeder, feed: Feed
) -> None:
    feeder.offer(1, lambda: [b"1"])
    newest(feed, 1)
    feed.finish(2)
    feeder.offer(2, lambda: [b"2"])
    newest(feed, 2)
    until(lambda: not feed._thread.is_alive())
    feeder.offer(3, lambda: [b"3"])
    last = feed.take()
    assert last is not None and last.commit == 2


def test_a_promoted_spare_waits_for_its_commit_only_for_a_while(
    feeder: Feeder, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "LAST_S", 0.1)
    feed.finish(9)
    until(lambda: not feed._thread.is_alive())
    assert feed.take() is None


def test_a_spare_gets_in_past_strangers_that_say_nothing(server: Server, feeder: Feeder) -> None:
    host, _, port = feeder.addresses[0].rpartition(":")
    idle = [socket.create_connection((host, int(port)), timeout=5) for _ in range(2 * replica.MAX_SPARES)]
    feed = Feed(server.addresses, SECRET, JOB)
    feed.start()
    try:
        feeder.offer(1, lambda: [b"state"])
        assert newest(feed, 1)
    finally:
        feed.take()
        until(lambda: not feed._thread.is_alive())
        for one in idle:
            one.close()
