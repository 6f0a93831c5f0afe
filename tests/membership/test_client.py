"""Members and the coordinator over real connections: records, notices, what an old member or a stranger is told."""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from horoclone import errors
from horoclone.bootstrap import wire
from horoclone.bootstrap.client import Client
from horoclone.bootstrap.rendezvous import Server
from horoclone.membership import client as membership_client
from horoclone.membership.client import GenerationJob, Identity, MembershipClient, identity, rendezvous
from horoclone.membership.records import Assignment, Evicted, Limits, Loss, Stop
from horoclone.membership.service import MembershipService

SECRET = b"0123456789abcdef"


class Rendezvous:
    """A server with a coordinator, and members of it."""

    def __init__(self, **limits: object) -> None:
        self.service = MembershipService(Limits(**limits), secrets.token_bytes)  # type: ignore[arg-type]
        self.server = Server(SECRET, "job", 100, ["127.0.0.1"], self.service)
        self.links: list[MembershipClient] = []

    def started(self) -> Identity:
        id_ = secrets.token_bytes(16)
        with self.service.mutex:
            self.service.coordinator.start(id_, "here", len(self.links), time.monotonic())
        return Identity(id_, secrets.token_bytes(8), "here", 0, tuple(self.server.addresses), SECRET, "job")

    def link(self, who: Identity | None = None) -> MembershipClient:
        self.links.append(MembershipClient(who or self.started(), 10, shows=True))
        return self.links[-1]

    def dies(self, link: MembershipClient) -> None:
        link.close()
        with self.service.mutex:
            self.service.coordinator.dead(link._who.id, "it was killed", time.monotonic())
        self.server.wake()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.server.close()


@pytest.fixture
def two() -> Iterator[Rendezvous]:
    one = Rendezvous(size=2)
    yield one
    one.close()


def form(
    links: list[MembershipClient], seen: int, commits: tuple[int, ...] = (), wait_s: float = 5
) -> list[object]:
    with ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(lambda link: link.form(seen, commits, wait_s), links))


def told(answers: list[object]) -> list[Assignment]:
    found = [one for one in answers if isinstance(one, Assignment)]
    assert len(found) == len(answers), answers
    return found


def test_a_generation_is_formed_lost_and_formed_anew(two: Rendezvous) -> None:
    a, b = two.link(), two.link()
    first = told(form([a, b], 0))
    assert {one.rank for one in first} == {0, 1} and {one.number for one in first} == {1}
    assert first[0].nonce == first[1].nonce and first[0].indexes == first[1].indexes
    survivor, lost = (a, b) if first[0].rank == 1 else (b, a)
    assert survivor.form(1, (7,), 0.05) is None
    two.dies(lost)
    (second,) = told(form([survivor], 1, (6, 7)))
    assert (second.number, second.rank, second.size, second.previous) == (2, 0, 1, (1,))
    assert (second.commit, second.skip_sync) == (7, True) and second.nonce != first[0].nonce


def test_who_waits_is_told_why(two: Rendezvous) -> None:
    link = two.link()
    assert link.form(0, (), 0.1) is None and link.reason == "1 of at least 2 processes are there"


def test_a_record_that_was_not_heard_is_told_again(two: Rendezvous) -> None:
    a, b = two.link(), two.link()
    first = told(form([a, b], 0))
    a.close()
    (again,) = told(form([a], 0))
    assert again.nonce == first[0].nonce and again.number == 1


def test_a_newcomer_is_not_needed_when_a_member_has_said_that_it_has_finished(two: Rendezvous) -> None:
    a, b = two.link(), two.link()
    told(form([a, b], 0))
    late = two.link()
    assert late.form(0, (), 0.05) is None
    a.finished()
    assert late.form(0, (), 5) == Evicted(0, "the job is done")
    b.finished()
    assert two.service.coordinator.stopped is None


def test_ranks_gather_in_the_newest_generation_only_and_as_themselves(two: Rendezvous) -> None:
    a, b = two.link(), two.link()
    first = told(form([a, b], 0))
    by_rank = sorted(zip(first, (a, b), strict=True), key=lambda pair: pair[0].rank)
    jobs = [GenerationJob(rendezvous(link._who, link, True), one) for one, link in by_rank]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # MPI needs a second gather of one generation
            blobs = list(pool.map(lambda job: job.gather(b"%d" % job.rank, time.monotonic() + 5, None), jobs))
            assert blobs == [[b"0", b"1"]] * 2
    assert jobs[0].secret == jobs[1].secret != SECRET and jobs[0].name == "job/generation-1"
    with pytest.raises(errors.HorovodInternalError, match="is not rank 1 of generation 1"):
        by_rank[0][1].gather("g/1", 1, 2, b"x", 2, None, list(first[0].indexes))
    with pytest.raises(errors.HorovodInternalError, match="gather in generation 1 now; g/7 is another"):
        by_rank[0][1].gather("g/7", 0, 2, b"x", 2, None, list(first[0].indexes))
    two.dies(b)
    (second,) = told(form([a], 1))
    with pytest.raises(errors.HorovodInternalError, match="generation 2 now"):
        a.gather("g/1", 0, 2, b"x", 2, None, list(first[0].indexes))
    assert GenerationJob(rendezvous(a._who, a, True), second).secret != jobs[0].secret


def test_whoever_waits_for_a_rank_that_dies_is_told_at_once(two: Rendezvous) -> None:
    a, b = two.link(), two.link()
    first = told(form([a, b], 0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.gather, "g/1", first[0].rank, 2, b"x", 30, None, list(first[0].indexes))
        time.sleep(0.1)
        two.dies(b)
        with pytest.raises(errors.PeerLost, match="it was killed") as caught:
            waiting.result(5)
    assert caught.value.rank == first[1].rank


def test_notices_come_while_a_generation_runs(two: Rendezvous) -> None:
    a, b = two.link(), two.link()
    told(form([a, b], 0))
    watcher = two.link(a._who)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(watcher.notice, 0, 0)
        newcomer = pool.submit(two.link().form, 0, (), 5)
        notice = waiting.result(5)
        assert notice == (1, 2, 2)
        told(form([a, b], 1))
        assert isinstance(newcomer.result(5), Assignment)
    assert watcher.notice(1, 0) is None
    b.depart("SIGTERM", at_once=False)
    assert watcher.notice(1, 0) == (2, 3, 1)
    b.depart("SIGTERM", at_once=True)
    two.server.wake()


def test_a_member_that_is_silent_to_another_is_asked_at_once_and_not_given_up(
    two: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.link(), two.link()
    with ThreadPoolExecutor(2) as both:
        waiting = [both.submit(link.form, 0, (), 5.0) for link in (first, second)]
        assignments = [one.result(10) for one in waiting]
        assert all(isinstance(one, Assignment) for one in assignments)
        number, rank = assignments[0].number, assignments[1].rank
        with monkeypatch.context() as patch:
            patch.setattr(membership_client, "SLICE_S", 9.0)
            poll = both.submit(second.notice, 0, 0)
            time.sleep(0.2)
        assert first.suspect(number, rank, Loss.SILENT)
        assert poll.result(7) is None, "its poll would have lasted 9 s"
        forms = both.submit(first.form, number, (), 2.5)
        while not forms.done():
            second.notice(0, 0)
        assert forms.result(5) is None and not two.service.coordinator.fenced


def test_the_end_of_the_job_reaches_everybody(two: Rendezvous) -> None:
    a = two.link()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.form, 0, (), 5)
        time.sleep(0.1)
        with two.service.mutex:
            two.service.coordinator.stop(3, "enough")
        two.server.wake()
        assert waiting.result(5) == Stop(3, "enough")


def test_unknown_processes_and_copies_are_refused_with_a_text(two: Rendezvous) -> None:
    who = two.started()
    two.link(who).form(0, (), 0.01)
    with pytest.raises(errors.Unsupported, match="two processes say that they are member"):
        two.link(who._replace(incarnation=b"another!")).form(0, (), 0.01)
    with pytest.raises(errors.Unsupported, match="nobody has started a member of this name"):
        two.link(who._replace(id=b"x" * 16)).form(0, (), 0.01)


@pytest.mark.parametrize("frame", [
    struct.pack("<BIQB", wire.FORM, 10, 0, 0),  # before it has joined
    bytes([wire.JOIN]) + b"short",
    bytes([wire.NOTICE]),
])  # fmt: skip
def test_a_frame_that_makes_no_sense_ends_the_connection_and_nothing_else(
    two: Rendezvous, frame: bytes
) -> None:
    client = Client(two.server.addresses, SECRET, "job", 2)
    client._connect(time.monotonic() + 2)
    assert client._connection is not None
    client._connection.send(frame, 5)
    with pytest.raises(ConnectionError):
        client._connection.receive(time.monotonic() + 5)
    client.close()
    assert two.link().form(0, (), 0.01) is None


def test_too_many_commits_end_the_connection(two: Rendezvous) -> None:
    link = two.link()
    link.form(0, (), 0.01)
    assert link._connection is not None
    link._connection.send(struct.pack("<BIQBB3Q", wire.FORM, 10, 0, 1, 3, 1, 2, 3), 5)
    with pytest.raises(ConnectionError):
        link._connection.receive(time.monotonic() + 5)


def test_without_its_launcher_an_elastic_process_says_what_it_needs() -> None:
    with pytest.raises(errors.Unsupported, match="--min-np"):
        identity({"HOROCLONE_ELASTIC": "1"})
    environ = {"HOROCLONE_RENDEZVOUS": "127.0.0.1:1", "HOROCLONE_SECRET": "0" * 20, "HOROCLONE_MEMBER": "xyz"}
    with pytest.raises(errors.Unsupported, match="not 32 hex digits"):
        identity(environ)
    who = identity({**environ, "HOROCLONE_MEMBER": "ab" * 16, "HOROCLONE_LOCAL_RANK": "3"})
    assert who.id == b"\xab" * 16 and who.slot == 3 and len(who.incarnation) == 8 and os.getpid()
