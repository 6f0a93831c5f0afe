"""Commits on their way to spares: only to who knows the secret, only whole, the newest, from whoever feeds now."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from world import until

from horoclone.bootstrap import wire
from horoclone.bootstrap.client import Client
from horoclone.bootstrap.rendezvous import Server
from horoclone.runtime import replica
from horoclone.runtime.replica import Feed, Feeder

SECRET, JOB = b"s" * 32, "job"


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
def near() -> str:
    """As on one host."""
    return f"unix:horoclone-test-{secrets.token_hex(8)}"


@pytest.fixture
def feeder(server: Server, near: str) -> Iterator[Feeder]:
    one = Feeder(SECRET, JOB, [near], 0.0)
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


def test_a_feeder_without_descriptors_or_threads_feeds_once_it_has_them(
    server: Server, near: str, shortage: Callable[[str, str], list[str]]
) -> None:
    left = shortage("hc-replica", "hc-replica-out")
    feeder = Feeder(SECRET, JOB, [near], 0.0)
    feeder.offer(5, lambda: [b"five"])
    tell(server, feeder.addresses)
    feed = Feed(server.addresses, SECRET, JOB)
    feed.start()
    assert newest(feed, 5).parts == [b"five"] and not left
    feed.take()
    feeder.close()
    until(lambda: not [one for one in threading.enumerate() if one.name == "hc-replica"])


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


@pytest.mark.parametrize("secret, job", [(b"x" * 32, f"{JOB}/replica"), (SECRET, JOB)])
@pytest.mark.parametrize("binding", ["127.0.0.1", ""])
def test_a_stranger_is_told_nothing(near: str, secret: bytes, job: str, binding: str) -> None:
    feeder = Feeder(SECRET, JOB, [binding or near], 0.0)
    feeder.offer(1, lambda: [b"weights"])
    family, target = wire.parse_address(feeder.addresses[0])
    with socket.socket(family) as peer:
        peer.settimeout(10)
        peer.connect(target)
        greeting = peer.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
        nonce = b"n" * wire.NONCE_BYTES
        proof = wire.proof(secret, b"client", job, greeting[len(wire.GREETING) :], nonce)
        peer.sendall(wire.HELLO + nonce + proof)
        said = peer.recv(1 << 16, socket.MSG_WAITALL)
    feeder.close()
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
    """What a _Stream makes of a stream that ends behind these."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: (ours.sendall(b"".join(pieces)), ours.close()))
        writer.start()
        try:
            return replica._Stream(theirs, lambda: False).read(None, {})
        finally:
            writer.join(10)


def test_what_makes_no_sense_is_refused() -> None:
    head, crc = struct.pack("<QIQ", 4, 1, 3), replica.sum_with(b"abc", 0)
    tag = replica.Replica(4, [b"abc"], 7, sums=[crc]).tag_with(b"secret", "job/replica")
    part, end = b"\0abc" + struct.pack("<I", crc), struct.pack("<Q", 7) + tag
    feed = replica.Feed(["127.0.0.1:1"], b"secret", "job")
    assert feed._checked(sent(head, part, end)) == (4, [b"abc"], 7, tag, [crc])
    forged = b"\0abd" + struct.pack("<I", replica.sum_with(b"abd", 0))
    wrong = struct.pack("<Q", 8) + tag
    for content, tail, other in (
        (forged, end, head),
        (part, wrong, head),
        (part, end, struct.pack("<QIQ", 5, 1, 3)),
    ):
        with pytest.raises(ConnectionError, match="changed on its way"):
            feed._checked(sent(other, content, tail))
    with pytest.raises(ConnectionError, match="changed on its way"):
        replica.Feed(["127.0.0.1:1"], b"another", "job")._checked(sent(head, part, end))
    with pytest.raises(ConnectionError, match="changed on its way"):
        sent(head, b"\0abd" + struct.pack("<I", crc), end)
    with pytest.raises(ConnectionError, match="never sent"):
        sent(head, b"\1")
    with pytest.raises(ConnectionError, match="gone"):
        sent(head, b"\0ab")
    with pytest.raises(ConnectionError, match="more than this machine has"):
        sent(struct.pack("<QIQ", 4, 1, 1 << 60))
    with pytest.raises(ConnectionError, match="parts"):
        sent(struct.pack("<QI", 4, 1 << 31))


def test_an_array_that_was_damaged_on_its_way_is_found() -> None:
    parts = [b"pickle", b"array"]
    sums = [replica.sum_with(one, 0) for one in parts]
    tag = replica.Replica(4, parts, 7, sums=sums).tag_with(b"secret", "job/replica")
    head, end = struct.pack("<QIQQ", 4, 2, 6, 5), struct.pack("<IIQ", *sums, 7) + tag
    feed = replica.Feed(["127.0.0.1:1"], b"secret", "job")
    whole = feed._checked(sent(head, b"\0pickle", b"\0array", end))
    assert whole is not None and [bytes(one) for one in whole.parts] == parts
    with pytest.raises(ConnectionError, match="changed on its way"):
        sent(head, b"\0pickle", b"\0arrax", end)


def test_only_what_has_changed_is_sent_again(
    feeder: Feeder, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, before, after = bytes(3_000_000), b"a" * 2_000_000, b"a" * 1_999_999 + b"b"
    feeder.offer(1, lambda: [b"one", frozen, before])
    first = newest(feed, 1)
    read: list[int] = []
    take_in = replica._Stream._take_in

    def taken_in(stream: Any, part: bytearray) -> int:
        read.append(len(part))
        return take_in(stream, part)

    monkeypatch.setattr(replica._Stream, "_take_in", taken_in)
    feeder.offer(2, lambda: [b"two", bytearray(frozen), after])
    second = newest(feed, 2)
    assert second.parts[1] is first.parts[1] and bytes(second.parts[2]) == after
    assert 2_000_000 <= sum(read) < 2_001_000
    assert bytes(first.parts[2]) == before, "what is there stays whole until the next is"
    feeder.offer(3, lambda: [b"three", frozen, before])
    third = newest(feed, 3)
    assert bytes(third.parts[2]) == before and third.parts[2] is first.parts[2], "its memory is used again"


def test_a_commit_gives_way_to_the_one_for_which_training_waits(
    feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, and what has arrived of it is not taken for a part of the next."""
    sum_with = replica.sum_with

    def sum_in_a_hurry(chunk: replica.Part, before: int) -> int:
        feeder.hurry()
        return sum_with(chunk, before)

    monkeypatch.setattr(replica, "sum_with", sum_in_a_hurry)
    feeder.offer(2, lambda: [b"c" * 9, b"d"])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not feeder._send(ours, replica.Replica(1, [b"a" * 9, b"b"], 6, sums=[-1, -1]), None)
        assert feeder._send(ours, feeder._newest()[1], None)
        memory: dict[int, bytearray] = {}
        found = replica._Stream(theirs, lambda: False).read(None, memory)
    assert found is not None and found.commit == 2 and not memory
    assert [bytes(part) for part in found.parts] == [b"c" * 9, b"d"]
    assert feeder.digest(2) == found.digest


def test_who_is_let_in_waits_for_its_commit_while_it_comes(feeder: Feeder, feed: Feed) -> None:
    feeder.offer(1, lambda: [b"1"])
    newest(feed, 1)
    feed.finish(2)
    threading.Timer(0.3, lambda: (feeder.offer(2, lambda: [b"2"]), feeder.hurry())).start()
    taken = feed.take()
    assert taken is not None and taken.commit == 2


def test_who_is_let_in_does_not_wait_for_a_feeder_that_is_gone(feeder: Feeder, feed: Feed) -> None:
    feeder.offer(1, lambda: [b"1"])
    newest(feed, 1)
    feed.finish(2)
    feeder.close()
    until(lambda: not feed._feeder)
    began = time.monotonic()
    taken = feed.take()
    assert taken is not None and taken.commit == 1 and time.monotonic() - began < replica.QUIET_S


def test_a_newcomer_hears_that_there_is_no_commit_yet(feeder: Feeder, feed: Feed) -> None:
    until(feed.has_what_it_can)
    assert not feed._is_quiet() and feed._newest == (0, [], 0, feed._newest.tag, [])
    feeder.offer(1, lambda: [b"1"])
    newest(feed, 1)


def test_a_commit_comes_no_more_often_than_it_may_unless_it_is_in_a_hurry(server: Server) -> None:
    one = Feeder(SECRET, JOB, ["127.0.0.1"], 1000.0)
    tell(server, one.addresses)
    feed = Feed(server.addresses, SECRET, JOB)
    feed.start()
    try:
        one.offer(1, lambda: [b"1"])
        newest(feed, 1)
        one.offer(2, lambda: [b"2"])
        time.sleep(0.2)
        assert feed._newest is not None and feed._newest.commit == 1
        one.hurry()
        newest(feed, 2)
    finally:
        feed.take()
        one.close()


def test_a_newcomer_to_whom_nothing_comes_is_ready_after_a_while(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "QUIET_S", 0.3)
    feed = Feed(server.addresses, SECRET, JOB)
    assert not feed.has_what_it_can()
    until(feed.has_what_it_can)


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
    taken = feed.take()
    assert taken is None or taken.commit == 0


def test_a_spare_gets_in_past_unauthenticated_connections_that_say_nothing(
    server: Server, feeder: Feeder
) -> None:
    family, target = wire.parse_address(feeder.addresses[0])
    idle = [socket.socket(family) for _ in range(2 * replica.MAX_SPARES)]
    for one in idle:
        one.settimeout(5)
        one.connect(target)
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


def test_who_is_new_hears_which_commit_it_has_and_who_sends_the_next(feeder: Feeder, feed: Feed) -> None:
    threading.Timer(0.1, lambda: feeder.offer(1, lambda: [b"1"])).start()
    until(lambda: feed._feeder)
    replica, since = feed.promised()
    assert replica is not None and replica.commit == 1 and since == 1
    feeder.offer(2, lambda: [b"2"])
    newest(feed, 2)


def test_a_commit_that_is_offered_again_while_it_is_packed_is_packed_once(
    server: Server, feeder: Feeder, feed: Feed
) -> None:
    begun, go, packs = threading.Event(), threading.Event(), []

    def pack() -> list[bytes]:
        packs.append(1)
        begun.set()
        assert go.wait(30)
        return [b"5"]

    feeder.offer(5, pack)
    assert begun.wait(30)
    feeder.offer(5, pack)  # as rank 0 does where nobody has it yet
    go.set()
    first = newest(feed, 5)
    other = Feed(server.addresses, SECRET, JOB)
    other.start()
    try:
        assert newest(other, 5).digest == first.digest == feeder.digest(5) and packs == [1]
    finally:
        other.take()


def test_nothing_more_is_expected_of_a_feeder_that_is_silent(
    feeder: Feeder, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeder.offer(1, lambda: [b"1"])
    newest(feed, 1)
    assert feed.promised()[1] == 1
    monkeypatch.setattr(replica, "QUIET_S", 0.0)
    assert feed.promised()[1] == 0


def test_memory_that_may_be_read_is_not_written_again(feeder: Feeder, feed: Feed) -> None:
    feeder.offer(1, lambda: [b"1"])
    newest(feed, 1)
    feed.finish(3)
    feeder.offer(2, lambda: [b"2"])
    examined = newest(feed, 2)
    feeder.offer(3, lambda: [b"3"])
    newest(feed, 3)
    assert bytes(examined.parts[0]) == b"2" and feed._memory.get(0) is not examined.parts[0]


def test_a_commit_that_comes_while_it_is_asked_about_is_seen() -> None:
    """Who has sent it is connected no more."""

    class Arriving(Feed):
        def has_commit(self) -> bool:
            return True

        @property
        def _newest(self) -> replica.Replica | None:  # type: ignore[override]
            self._feeder = 0
            return replica.Replica(2, [b"2"], 7)

        @_newest.setter
        def _newest(self, _: replica.Replica | None) -> None:
            pass

    feed = Arriving(["127.0.0.1:1"], SECRET, JOB)
    feed._feeder = 1
    assert feed.promised() == (replica.Replica(2, [b"2"], 7), 1)


def test_a_feeder_that_ends_lets_everybody_have_the_newest_commit(server: Server) -> None:
    one = Feeder(SECRET, JOB, ["127.0.0.1"], 1000.0)
    tell(server, one.addresses)
    one.offer(1, lambda: [b"1"])
    one.finish()  # of nobody
    feed = Feed(server.addresses, SECRET, JOB)
    feed.start()
    try:
        newest(feed, 1)
        large = bytes(30_000_000)
        one.offer(2, lambda: [large])
        one.finish()
    finally:
        one.close()
    newest(feed, 2)
    feed.take()
