"""The rendezvous: what it does for ranks, and what unauthenticated connections can do to it."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from world import ran, until

from horoclone import errors
from horoclone.bootstrap import client as bootstrap_client
from horoclone.bootstrap import rendezvous, seal, wire
from horoclone.bootstrap.failures import Failures
from horoclone.bootstrap.rendezvous import Client, Server

SECRET = b"0123456789abcdef"


@pytest.fixture(params=["tcp", "unix", "unix without a secret"])
def server(request):
    secret = b"" if "without" in request.param else SECRET
    address = "127.0.0.1" if request.param == "tcp" else f"unix:horoclone-test-{secrets.token_hex(8)}"
    one = Server(secret, "job", 4, [address])
    one.secret = secret
    yield one
    one.close()


@pytest.fixture
def tcp():
    one = Server(SECRET, "job", 4, ["127.0.0.1"])
    one.secret = SECRET
    yield one
    one.close()


def client_of(server, timeout_s=60.0, **changes):
    values = {"addresses": server.addresses, "secret": server.secret, "job": "job", **changes}
    return Client(timeout_s=timeout_s, **values)


def stranger(server):
    family, target = wire.parse_address(server.addresses[0])
    one = socket.socket(family)
    one.settimeout(10)
    one.connect(target)
    return one


def still_works(server):
    client = client_of(server)
    client.put("alive", b"yes")
    assert client.get("alive", 5) == b"yes"
    client.close()


def test_put_and_get(server):
    client = client_of(server)
    client.put("a", b"x" * wire.MAX_VALUE_BYTES)
    assert client_of(server).get("a", 5) == b"x" * wire.MAX_VALUE_BYTES
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client_of(server).get, "later", 10)
        time.sleep(0.2)
        client.put("later", b"now")
        assert waiting.result(5) == b"now"


def test_gather_gives_everybodys_blob_by_rank_again_and_again(server):
    def rank_body(rank):
        client = client_of(server)
        for generation in range(30):
            blobs = client.gather(f"world/{generation}", rank, 4, b"%d-%d" % (rank, generation), 20)
            assert blobs == [b"%d-%d" % (other, generation) for other in range(4)]
        client.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(rank_body, range(4)))
    server.close(linger_s=5)
    assert not server._gathers, "a gather that everybody has fetched is forgotten"


def test_limits_of_keys_and_values(server):
    client = client_of(server)
    for key, value in (("", b""), ("k" * 257, b""), ("k", b"x" * (wire.MAX_VALUE_BYTES + 1))):
        with pytest.raises(ValueError, match="bytes"):
            client.put(key, value)
    still_works(server)


@pytest.mark.in_turn("server")
def test_missing_ranks_and_addresses_are_named(server, monkeypatch):
    monkeypatch.setattr("horoclone.bootstrap.client.REPORT_AFTER_S", 0.3)
    heard: list[str] = []
    with pytest.raises(errors.Timeout, match="missing: ranks 0, 2, 3") as caught:
        client_of(server).gather("g", 1, 4, b"", 1.5, heard.append)
    assert server.addresses[0] in str(caught.value)
    assert "alone" not in str(caught.value)
    assert len(heard) == 1 and "ranks 0, 2, 3" in heard[0] and server.addresses[0] in heard[0]
    client = client_of(server)
    client.said_by = "X_SIZE is set"
    with pytest.raises(errors.Timeout) as caught:
        client.gather("g", 1, 4, b"", 0.4, heard.append)
    assert "4 ranks of the job (X_SIZE is set) after" in heard[1]
    assert "If this process was started alone, another job has left these variables" in str(caught.value)


def has_come(server, rank):
    until(
        lambda: server._gathers.get("g") and rank in server._gathers["g"].blobs,
        20,
        lambda: f"rank {rank} has not come",
    )


@pytest.mark.in_turn("server")
def test_who_has_given_up_waiting_is_not_missing(server):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client_of(server).gather, "g", 2, 3, b"", 3)
        has_come(server, 2)
        with pytest.raises(errors.Timeout, match="missing: rank 1;"):
            client_of(server).gather("g", 0, 3, b"", 0.3)
        with pytest.raises(errors.Timeout, match="missing: rank 1;"):
            waiting.result(10)


def test_nobody_there_is_a_timeout_that_tells_what_was_tried():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # held and not listened on, so that nobody else comes to listen there
        port = probe.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(errors.Timeout, match=rf"127\.0\.0\.1:{port} \(Connection refused\)"):
            Client([f"127.0.0.1:{port}"], SECRET, "job", 0.5).put("a", b"")
        assert time.monotonic() - started < 20


def test_a_missing_rank_that_has_failed_ends_the_wait_of_the_others(server):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client_of(server).gather, "g", 0, 4, b"", 60)
        time.sleep(0.2)
        client_of(server).report_failure(2, "ValueError: no data")
        with pytest.raises(errors.PeerLost, match="ValueError: no data") as caught:
            waiting.result(5)
    assert caught.value.rank == 2
    client_of(server).report_failure(1, "later", consequence=True)
    assert [(one.rank, one.text, one.consequence) for one in server.failures()] == [
        (2, "ValueError: no data", False),
        (1, "later", True),
    ]


def test_two_processes_with_one_rank_are_told_so(server):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(client_of(server).gather, "g", 0, 2, b"first", 20)
        has_come(server, 0)
        with pytest.raises(errors.HorovodInternalError, match="two processes say that they are rank 0"):
            client_of(server).gather("g", 0, 2, b"second", 5)
        with pytest.raises(errors.HorovodInternalError, match="the job has 3 ranks"):
            client_of(server).gather("g", 1, 3, b"second", 5)
        client_of(server).gather("g", 1, 2, b"ends the wait", 5)


def test_a_server_that_ends_is_noticed(tcp):
    client = client_of(tcp)
    client.put("a", b"")
    tcp.close()
    started = time.monotonic()
    with pytest.raises(errors.PeerLost, match="the rendezvous has ended"):
        client.gather("g", 0, 2, b"", 60)
    assert time.monotonic() - started < 10


@pytest.mark.in_turn("server")
def test_who_comes_after_the_server_has_ended_is_told_who_was_lost_first(server):
    ranks = [client_of(server, rank=rank, server_rank=0) for rank in range(3)]
    for rank in ranks:
        rank.put("there", b"")
    ranks[1].close()  # without a word, as a process that is killed
    with pytest.raises(errors.PeerLost) as caught:
        ranks[0].gather("world/2", 0, 3, b"", 60)
    assert caught.value.rank == 1
    ranks[0].leave(process_ends=True)
    server.close(process_ends=True)
    with pytest.raises(errors.PeerLost, match="rank 1 has died or left") as caught:
        ranks[2].gather("world/2", 2, 3, b"", 60)
    assert caught.value.rank == 1


@pytest.mark.parametrize("ends_too", [False, True])
def test_who_still_connects_is_told_of_the_rank_that_broke_first_not_of_one_that_left_because_of_it(
    server, ends_too
):
    ranks = [client_of(server, rank=rank, server_rank=0) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: ranks[rank].gather("world/1", rank, 3, b"", 60), range(3)))
    ranks[2].watch("world/1")
    ranks[1].close()
    server.wake()
    time.sleep(0.05)  # less than a rank has to come back
    ranks[0].leave(process_ends=True)  # it has noticed by itself
    if ends_too:
        server.close(process_ends=True)
    with pytest.raises(errors.PeerLost, match="rank 1 has died or left") as caught:
        ranks[2].hear(5)
    assert caught.value.rank == 1


@pytest.mark.parametrize("dies", ["just before", "outside of the list"])
def test_last_words_are_about_ranks_that_the_reader_waits_for(server, dies):
    ranks = [client_of(server, rank=rank, server_rank=0) for rank in range(4)]
    for rank in ranks:
        rank.put("there", b"")
    if dies == "just before":
        ranks[1].close()
        server.wake()
        time.sleep(0.05)  # less than a rank has to come back
    else:
        ranks[3].leave(process_ends=True)  # in order, and not in the list
    ranks[0].leave(process_ends=True)
    server.close(process_ends=True)
    with pytest.raises(errors.PeerLost) as caught:
        ranks[2].gather("ranks-of-a-list/1", 2, 3, b"", 60, members=[0, 1, 2])
    assert caught.value.rank == (1 if dies == "just before" else 0), caught.value


def test_last_words_are_forgotten_where_a_server_is_found_again():
    address = f"unix:horoclone-test-{secrets.token_hex(8)}"
    first = Server(b"", "job", 3, [address])
    first.secret = b""
    stays, dies = (client_of(first, rank=rank, server_rank=0) for rank in (2, 1))
    for rank in (stays, dies):
        rank.put("there", b"")
    dies.report_failure(1, "ValueError: no data")
    first.close(process_ends=True)
    second = Server(b"", "job", 3, [address])
    stays.put("there", b"")
    second.close(process_ends=True)
    with pytest.raises(errors.PeerLost, match="the rendezvous has ended") as caught:
        stays.gather("world/2", 2, 3, b"", 60)
    assert caught.value.rank == 0


def test_an_address_that_does_not_answer_does_not_delay_the_one_that_does(tcp):
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(1)
    dead = wire.format_address(*silent.getsockname())
    started = time.monotonic()
    client_of(tcp, addresses=[dead, *tcp.addresses, "127.0.0.1:1"]).put("a", b"")
    silent.close()
    assert time.monotonic() - started < bootstrap_client.HELLO_S


@pytest.mark.parametrize("proves", [False, True])
def test_a_server_that_is_stopped_costs_no_more_than_the_time_of_the_call(proves):
    """The kernel accepts for it; or it is stopped after its proof."""
    listener = socket.create_server(("127.0.0.1", 0))
    peers = []

    def prove():
        with contextlib.suppress(OSError):
            while True:
                peers.append(listener.accept()[0])
                wire.admit(peers[-1], SECRET, "job", 10)

    if proves:
        threading.Thread(target=prove, daemon=True).start()
    client = Client([wire.format_address(*listener.getsockname())], SECRET, "job", 60)
    started = time.monotonic()
    with pytest.raises(errors.Timeout):
        client.report_failure(1, "ValueError: no data", timeout_s=0.2)
    assert time.monotonic() - started < bootstrap_client.HELLO_S - 1
    for one in (*peers, listener):
        one.close()


# --- unauthenticated connections


@pytest.fixture
def soon(monkeypatch):
    """Refusals are believed after half a second, not three."""
    monkeypatch.setattr(bootstrap_client, "REFUSED_S", 0.5)


def test_a_wrong_secret_or_job_is_refused_with_a_reason(tcp, soon):
    for changes in ({"secret": b"fedcba9876543210"}, {"job": "older"}):
        with pytest.raises(errors.HorovodInternalError, match="Is the secret of this job right"):
            client_of(tcp, timeout_s=60, **changes).put("a", b"")
    still_works(tcp)


def test_the_server_refuses_a_wrong_proof_itself(tcp):
    """A client of ours would notice by the server's proof that the secrets differ; a stranger does not look."""
    one = stranger(tcp)
    one.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
    one.sendall(wire.HELLO + bytes(wire.NONCE_BYTES) + secrets.token_bytes(wire.PROOF_BYTES))
    assert one.recv(wire.PROOF_BYTES, socket.MSG_WAITALL) == wire.REFUSED
    assert one.recv(1) == b""
    still_works(tcp)


def test_without_a_secret_the_network_is_refused():
    with pytest.raises(ValueError, match="unix"):
        Server(b"", "job", 2, ["127.0.0.1"])
    with pytest.raises(ValueError, match="at least 16"):
        Server(b"short", "job", 2, ["127.0.0.1"])
    with pytest.raises(ValueError, match="needs the job secret"):
        Client(["127.0.0.1:1"], b"", "job", 1)


@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(1024),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200),
        b"\xff\xff\xff\xff" * 64,
        pickle.dumps({"a": list(range(100))}),
    ],
    ids=["random", "http", "tls", "lengths", "pickle"],
)
def test_garbage_is_dropped_at_once(server, garbage, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_S", 60.0)
    one = stranger(server)
    started = time.monotonic()
    one.sendall(garbage)
    received = b""
    try:
        while part := one.recv(4096):
            received += part
    except ConnectionResetError:
        pass
    assert time.monotonic() - started < 20
    assert len(received) <= wire.GREETING_BYTES + wire.PROOF_BYTES, (
        "unauthenticated connections get a greeting and a refusal, no more"
    )
    still_works(server)


def prove(server, one):
    """Returns what seals the frames that are sent, and what those that come are sealed with."""
    greeting = one.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
    server_nonce, nonce = greeting[4:], secrets.token_bytes(wire.NONCE_BYTES)
    one.sendall(wire.HELLO + nonce + wire.proof(server.secret, b"client", "job", server_nonce, nonce))
    assert one.recv(wire.PROOF_BYTES, socket.MSG_WAITALL) != wire.REFUSED
    return tuple(
        wire.Sealed(server.secret, role, "job", server_nonce, nonce) for role in (b"client", b"server")
    )


def is_closed(one):
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0, wire.MAX_FRAME_BYTES + 1])
def test_a_frame_of_an_impossible_length_closes_the_connection(server, length):
    one = stranger(server)
    prove(server, one)
    one.sendall(struct.pack("<I", length) + b"x")
    assert is_closed(one)
    still_works(server)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x63",
        struct.pack("<BH", wire.PUT, 60000) + b"k",
        struct.pack("<BH", wire.PUT, 2) + b"\xff\xfe",
        struct.pack("<BI", wire.GET, 5),
        struct.pack("<BI", wire.GATHER, 5),
    ],
)
def test_a_broken_frame_after_the_handshake_closes_the_connection(server, payload):
    one = stranger(server)
    sends, _ = prove(server, one)
    one.sendall(sends.frame(payload))
    assert is_closed(one)
    still_works(server)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_failures_that_came_after_a_break_wait_until_it_is_decided():
    clock = Clock()
    known = Failures(clock)
    for rank in range(4):
        known.came(rank)
    known.broke(1)
    clock.now += 0.1
    known.left(0, for_good=True)
    known.broke(2)
    clock.now += 0.1
    known.reported(0, "again", consequence=False)
    assert known.settle(clock()) == ({0}, False) and known.culprit(range(4)) is None
    assert known.next_s() == pytest.approx(100.5)
    known.came(1)  # it was no loss
    assert known.next_s() == 0.0 and known.settle(clock()) == (set(), True)
    assert known.culprit(range(4))[:2] == (0, "rank 0 has ended and does not come to this hvd.init()")
    clock.now = 101
    assert known.settle(clock()) == ({2}, True)  # and what was reported behind it
    assert [one.rank for one in known.causes()] == [0, 2, 0] and known.next_s() == float("inf")


def test_who_is_known_to_have_ended_is_not_waited_for():
    clock = Clock()
    known = Failures(clock)
    for rank in range(3):
        known.came(rank)
    known.broke(2)
    clock.now += 0.1
    known.ended(2, "killed")  # the launcher has seen it
    assert known.settle(clock()) == ({2}, True) and known.culprit({2}).at_s == 100
    known.ended(1, "killed, too")
    known.broke(1)  # its end is seen later
    assert known.settle(clock()) == ({1}, True) and known.culprit({1}).text == "killed, too"
    known.came(1)  # another process of this number
    known.broke(1)
    assert known.settle(clock()) == (set(), False) and known.next_s() < float("inf")


def test_a_gather_of_many_ranks_arrives_in_frames_that_hold_many_blobs(tcp):
    blobs = [bytes([rank]) * (30_000 * (rank % 3)) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(client_of(tcp).gather, "g", rank, 4, blobs[rank], 20) for rank in range(4)]
        assert all(call.result(20) == blobs for call in calls)


PUT_A = bytes([wire.PUT]) + wire.pack_key("a")


@pytest.mark.parametrize(
    "how", ["changed", "of nobody", "again", "left out", "in another order", "sent back"]
)
def test_who_is_between_a_rank_and_the_server_cannot_speak_for_either(tcp, how):
    one = stranger(tcp)
    sends, receives = prove(tcp, one)
    first, second = sends.frame(PUT_A + b"first"), sends.frame(PUT_A + b"second")
    if how in ("again", "sent back"):
        one.sendall(first)
        answer = one.recv(5 + seal.TAG_BYTES, socket.MSG_WAITALL)
        receives.check(answer[4:5], answer[5:])
        assert client_of(tcp).get("a", 5) == b"first"
    forged = {
        "changed": first.replace(b"first", b"other"),
        "of nobody": wire.frame(PUT_A + b"other") + bytes(seal.TAG_BYTES),
        "again": first,
        "left out": second,
        "in another order": second + first,
        "sent back": first if how != "sent back" else answer,
    }[how]
    one.sendall(forged)
    assert is_closed(one)
    if how in ("again", "sent back"):
        assert client_of(tcp).get("a", 5) == b"first"
    else:
        with pytest.raises(errors.Timeout):
            client_of(tcp).get("a", 0.1)


def test_an_answer_that_was_changed_on_its_way_is_not_believed(tcp):
    tcp_address = wire.parse_address(tcp.addresses[0])[1]
    listener = socket.create_server(("127.0.0.1", 0))
    meddles = [True]

    def carry(source, sink, changes):
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                if changes and meddles[0] and b"right" in part:
                    part, meddles[0] = part.replace(b"right", b"wrong"), False
                sink.sendall(part)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def between():
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(tcp_address)
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=between, daemon=True).start()
    client_of(tcp).put("a", b"right")
    client = client_of(tcp, addresses=[wire.format_address(*listener.getsockname())])
    assert client.get("a", 20) == b"right" and not meddles[0]  # it has asked once more
    listener.close()


def test_lengths_of_unauthenticated_connections_allocate_nothing(tcp):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        one = stranger(tcp)
        one.sendall(b"\xff" * wire.HELLO_BYTES)
        one.close()
    still_works(tcp)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


def test_a_recorded_handshake_cannot_be_replayed_nor_reflected(tcp):
    first = stranger(tcp)
    greeting = first.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    hello = wire.HELLO + nonce + wire.proof(SECRET, b"client", "job", greeting[4:], nonce)
    first.sendall(hello)
    answer = first.recv(wire.PROOF_BYTES, socket.MSG_WAITALL)
    assert answer != wire.REFUSED
    for replay in (hello, wire.HELLO + greeting[4:] + answer):
        second = stranger(tcp)
        second.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
        second.sendall(replay)
        assert second.recv(wire.PROOF_BYTES, socket.MSG_WAITALL) == wire.REFUSED


def test_a_server_that_does_not_know_the_secret_is_not_believed(soon):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)

    def impostor():
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            one.sendall(wire.GREETING + os.urandom(wire.NONCE_BYTES))
            one.recv(wire.HELLO_BYTES, socket.MSG_WAITALL)
            one.sendall(os.urandom(wire.PROOF_BYTES))
            assert one.recv(1) == b"", "nothing may be sent to it"
            one.close()

    threading.Thread(target=impostor, daemon=True).start()
    address = wire.format_address(*listener.getsockname())
    with pytest.raises(errors.HorovodInternalError, match="does not know the secret"):
        Client([address], SECRET, "job", 60).put("a", b"private")
    listener.close()


def test_slow_unauthenticated_connections_are_bounded_in_number_and_time(tcp, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_S", 1.5)
    connections = [stranger(tcp) for _ in range(300)]
    for one in connections:
        one.send(b"H")
    still_works(tcp)
    assert sum(not one.proved for one in tcp._connections.values()) <= rendezvous.MAX_HALF_OPEN
    started = time.monotonic()
    last = connections[-1]
    last.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
    try:
        while time.monotonic() - started < 10:
            last.send(b"x")  # one byte at a time never reaches the end of a hello
            time.sleep(0.2)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert time.monotonic() - started < 10, "it could go on for as long as it liked"
    still_works(tcp)


def test_a_proof_that_has_come_is_read_before_later_unauthenticated_connections_displace_it(tcp, monkeypatch):
    waits, goes_on = threading.Event(), threading.Event()
    expire = tcp._expire

    def held(now):
        waits.set()
        goes_on.wait(60)
        expire(now)

    one = stranger(tcp)
    greeting = one.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
    monkeypatch.setattr(tcp, "_expire", held)
    tcp.wake()
    assert waits.wait(20)
    crowd = [stranger(tcp) for _ in range(2 * rendezvous.MAX_HALF_OPEN)]
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    proof = wire.proof(tcp.secret, b"client", "job", greeting[4:], nonce)
    one.sendall(wire.HELLO + nonce + proof)
    goes_on.set()
    expected = wire.proof(tcp.secret, b"server", "job", greeting[4:], nonce)
    assert one.recv(wire.PROOF_BYTES, socket.MSG_WAITALL) == expected
    for other in (one, *crowd):
        other.close()
    still_works(tcp)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes another user")
def test_another_user_is_refused_at_both_ends(soon):
    name = f"unix:horoclone-test-{secrets.token_hex(8)}"
    mine = Server(b"", "job", 2, [name])
    program = (
        "import os, sys\nos.setuid(65534)\n"
        "from horoclone.bootstrap.rendezvous import Client, Server\n"
        "if sys.argv[1] == 'server':\n"
        "    Server(b'', 'job', 2, [sys.argv[2]]); print('up', flush=True); input()\n"
        "try: Client([sys.argv[2]], b'', 'job', 1.0).put('a', b'')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    # The interpreter and the package may lie where the other user cannot read, so both are loaded before setuid.
    program = "import horoclone.bootstrap.rendezvous, horoclone.errors\n" + program
    done = ran(sys.executable, "-c", program, "client", name)
    assert "refused: it belongs to user id 0" in done.stdout, done
    raw_program = (
        "import os, socket, sys\nos.setuid(65534)\none = socket.socket(socket.AF_UNIX)\n"
        "one.settimeout(5)\none.connect('\\0' + sys.argv[1][5:])\nprint(one.recv(100))"
    )
    raw = ran(sys.executable, "-c", raw_program, name)
    assert raw.stdout.strip() == "b''", "another user does not even get a greeting"
    mine.close()

    theirs = f"unix:horoclone-test-{secrets.token_hex(8)}"
    with subprocess.Popen(
        [sys.executable, "-c", program, "server", theirs], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"up\n"
        with pytest.raises(errors.HorovodInternalError, match="belongs to user id 65534"):
            Client([theirs], b"", "job", 60).put("secret", b"mine")
        other.communicate(b"\n", timeout=30)


def test_addresses():
    assert wire.parse_address("unix:abc") == (socket.AF_UNIX, "\0abc")
    assert wire.parse_address("host:80") == (socket.AF_INET, ("host", 80))
    assert wire.parse_address("host") == (socket.AF_INET, ("host", 0))
    assert wire.parse_address("[::1]:80") == (socket.AF_INET6, ("::1", 80))
    assert wire.parse_address("::1") == (socket.AF_INET6, ("::1", 0))
    for wrong in ("", "host:x", "host:70000", "[::1", "unix:", "unix:" + "x" * 200):
        with pytest.raises(ValueError, match=r"."):
            wire.parse_address(wrong)
    assert wire.abstract_name("a", 1) == wire.abstract_name("a", 1) != wire.abstract_name("a", 2)


def test_interfaces_can_be_chosen():
    everything = wire.routable_addresses()
    assert everything and everything == sorted(everything, key=lambda address: address.startswith("127."))
    assert wire.address_towards("127.0.0.1") is wire.address_towards("no-such-host.invalid") is None
    with pytest.raises(ValueError, match="nope0 has no address here"):
        wire.routable_addresses("nope0")


def test_a_server_leaves_nothing_behind():
    def numbers():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    gc.collect()  # what earlier tests have left in cycles would be closed in between
    before = numbers()
    for _ in range(20):
        one = Server(SECRET, "job", 1, ["127.0.0.1", f"unix:horoclone-test-{secrets.token_hex(8)}"])
        client = Client(one.addresses, SECRET, "job", 5)
        assert client.gather("g", 0, 1, b"x", 5) == [b"x"]
        client.close()
        one.close()
    assert numbers() == before
