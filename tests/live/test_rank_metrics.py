"""The metrics of a rank as bytes, and the places where it lies: nothing here needs the core."""

from __future__ import annotations

import itertools
import mmap
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from world import until

from horoclone.launch.hosts import Placement
from horoclone.launch.job_metrics import JobMetrics
from horoclone.live import job, job_segment, rank_metrics, runtime_directory
from horoclone.live.processes import ProcessIdentity, is_stopped, lives, own_identity, start_of
from horoclone.live.rank_metrics import Origin, Seen

ROOT = Path(__file__).resolve().parents[2]


def origin(rank: int = 2, process: ProcessIdentity | None = None) -> Origin:
    return Origin(rank, 4, 1, "some.host", "train.py --fast", process or own_identity())


def whole(rank: int = 2, process: ProcessIdentity | None = None) -> bytearray:
    return bytearray(rank_metrics.initial(origin(rank, process)).ljust(rank_metrics.BYTES, b"\0"))


def put(content: bytearray, at: int, value: int, size: int = 8) -> None:
    content[at : at + size] = value.to_bytes(size, "little")


@pytest.fixture
def runtime_dir(tmp_path, monkeypatch):
    """A folder of ours on memory, as XDG_RUNTIME_DIR."""
    place = Path("/dev/shm") / f"hc-live-{os.getpid()}-{time.monotonic_ns()}"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    yield place
    subprocess.run(["rm", "-rf", str(place)], check=True)


# ---- bytes


def test_the_layout_is_the_cores() -> None:
    text = (ROOT / "csrc/engine/rank_metrics/layout.h").read_text()
    asserted = dict(re.findall(r"offsetof\(RankMetricsLayout, (\w+)\) == (\d+)", text))
    assert {name: int(at) for name, at in asserted.items()} == {
        "rank": rank_metrics._IDENTITY_AT,
        "step": rank_metrics._STEPS_AT,
        "for_peers_ns": rank_metrics._WAITS_AT,
        "last_done": rank_metrics._LAST_AT,
        "awaited": rank_metrics._STALL_AT,
        "late": rank_metrics._LATE_AT,
        "elastic_began": rank_metrics._ELASTIC_AT,
        "stalled_ms": rank_metrics._STALLED_AT,
        "operations": rank_metrics._OPERATIONS_AT,
        "recent": rank_metrics._RECENT_AT,
    }
    assert (
        f"kRecentCalls = {(rank_metrics._NOTES_AT - rank_metrics._CALLS_AT) // rank_metrics._CALL.size};"
        in text
    )
    assert f'kRankMetricsMagic[9] = "{rank_metrics.MAGIC.decode()}"' in text
    assert f"kLatencyBuckets = {rank_metrics.BUCKETS};" in text
    core = (ROOT / "csrc/base/dtype.h").read_text()
    names = re.search(r"name_of\(Op op\) \{.*?\{(.*?)\}", core, re.DOTALL)
    assert names is not None and tuple(re.findall(r'"(\w+)"', names[1])) == rank_metrics.KINDS


def test_a_page_that_nobody_has_written_yet_is_starting() -> None:
    one = rank_metrics.read(whole())
    assert (one.rank, one.size, one.local_rank, one.host) == (2, 4, 1, "some.host")
    assert one.program == "train.py --fast" and one.pid == os.getpid()
    assert one.state == "starting" and one.step == 0 and not one.operations and one.last_operation is None
    assert rank_metrics.identity_of(bytes(whole())) == own_identity()


def test_the_last_calls_of_a_loop_are_counted_before_the_core_has_added_them_up(tmp_path: Path) -> None:
    content = whole()
    put(content, 72, 1, 4)  # running
    broadcasts = (
        rank_metrics._OPERATIONS_AT + rank_metrics.KINDS.index("broadcast") * rank_metrics._OPERATION.size
    )
    put(content, broadcasts, 7)
    put(content, rank_metrics._STEPS_AT, 20)
    put(content, rank_metrics._RECENT_AT + 8, 100)
    put(content, rank_metrics._RECENT_AT + 16, rank_metrics.KINDS.index("broadcast"), 4)
    # (submitted, started, done) as the core notes them: in the last two, clocks of two kinds disagree.
    for number, moments in enumerate(
        ((5_000, 5_500, 7_600), (9_000, 8_000, 9_500), (12_000, 13_500, 13_000))
    ):
        for word, moment in enumerate(moments):
            put(content, rank_metrics._CALLS_AT + 24 * number + 8 * word, moment)
    # The core has added them up: nothing is left.
    assert rank_metrics.read(content).operations["broadcast"].count == 7
    put(content, rank_metrics._RECENT_AT, 3)
    put(content, 8, 9)
    assert rank_metrics.read(content).operations["broadcast"].count == 7  # it died while it did
    put(content, 8, 8)
    (tmp_path / "book").write_bytes(bytes(rank_metrics.BYTES))
    descriptor = os.open(tmp_path / "book", os.O_RDWR)
    rank_metrics.replace_in_file(descriptor, 0, bytes(content))
    passed_on = rank_metrics.copy_from_file(descriptor, 0)
    os.close(descriptor)
    for copy in (bytes(content), passed_on):
        one = rank_metrics.read(copy)
        done = one.operations["broadcast"]
        assert (done.count, done.bytes, done.histogram[:3]) == (10, 300, (1, 1, 1))
        assert (done.queued_seconds, done.running_seconds) == (1.5e-6, 2.6e-6)
        assert one.communication_seconds == 4.1e-6
        assert (one.waited_for_peers_seconds, one.waited_for_transfer_seconds) == (1.5e-6, 2.6e-6)
        assert one.step == 20
        assert one.last_operation is not None and one.last_operation.kind == "broadcast"
        assert one.last_operation.bytes == 100
    put(content, rank_metrics._RECENT_AT + 20, 1, 4)  # each of them begins a step
    assert rank_metrics.read(content).step == 23
    put(content, 8, 9)
    (tmp_path / "book").write_bytes(bytes(rank_metrics.BYTES))
    descriptor = os.open(tmp_path / "book", os.O_RDWR)
    rank_metrics.replace_in_file(descriptor, 0, bytes(content))
    assert rank_metrics.read(rank_metrics.copy_from_file(descriptor, 0)).operations["broadcast"].count == 7
    os.close(descriptor)


def test_states_follow_from_what_the_core_says_and_from_the_process() -> None:
    content = whole()
    put(content, 72, 1, 4)  # running
    assert rank_metrics.read(content).state == "running"
    assert rank_metrics.read(content, Seen(lives=False)).state == "lost"
    assert rank_metrics.read(content, Seen(is_stopped=True)).stalled_on.startswith("the process is stopped")
    put(content, rank_metrics._STEPS_AT + 56, 1000)  # something is under way since long ago
    put(content, 64, time.time_ns() - 20 * 10**9)  # the last sign of life
    assert (
        rank_metrics.read(content).state == "stalled"
        and "no sign of life for 20 s" in rank_metrics.read(content).stalled_on
    )
    content = whole()
    put(content, 72, 1, 4)
    put(content, rank_metrics._WAITS_AT + 32, 1)
    put(content, rank_metrics._WAITS_AT + 40, 1)
    put(content, 56, time.time_ns() - 10**9)
    assert rank_metrics.read(content).state == "waiting"
    put(content, 76, 1, 4)
    content[rank_metrics._STALL_AT : rank_metrics._STALL_AT + 15] = b"allreduce 'x'\0\0"
    put(content, rank_metrics._STALL_AT + 128, 1, 4)
    put(content, rank_metrics._STALL_AT + 132, 3, 4)
    one = rank_metrics.read(content)
    assert (
        one.state == "stalled"
        and one.is_stalled
        and rank_metrics.stall_text(one) == "rank 2 waits: allreduce 'x', for rank 3"
    )
    put(content, 72, 2, 4)
    assert rank_metrics.read(content, Seen(lives=False)).state == "ended"


def test_a_process_that_a_launcher_saw_end_is_ended_or_lost() -> None:
    for said, code, state in (
        (1, 0, "ended"),
        (1, -9, "lost"),
        (1, 1, "lost"),
        (2, 1, "lost"),
        (2, 0, "ended"),
    ):
        content = whole()
        put(content, 72, said, 4)  # running, or shut down before the process ended
        at, notes = rank_metrics.notes(0, 0, code)
        content[at : at + len(notes)] = notes
        one = rank_metrics.read(content)
        assert (one.state, one.exit_code, one.is_consequence) == (state, code, False)


def test_a_page_of_another_host_is_read_by_its_own_clock() -> None:
    content = whole(process=ProcessIdentity(1, 1, 1))
    put(content, 72, 1, 4)
    hour = 3600 * 10**9
    started = time.time_ns() - hour - 5 * 10**9  # there it is an hour earlier
    put(content, 56, started)
    put(content, rank_metrics._LAST_AT, 2 * 10**9)
    at, notes = rank_metrics.notes(time.time_ns(), time.time_ns() - hour, None)
    content[at : at + len(notes)] = notes
    one = rank_metrics.read(content)
    assert one.started == pytest.approx(time.time() - 5, abs=1)
    assert one.last_operation is not None and one.last_operation.age_seconds == pytest.approx(3, abs=0.5)
    assert rank_metrics.is_of_another_host(content)


def test_what_is_no_page_is_refused_and_a_writer_that_died_in_the_middle_is_read() -> None:
    for wrong in (b"", b"x" * rank_metrics.BYTES, bytes(rank_metrics.BYTES), rank_metrics.MAGIC):
        with pytest.raises(ValueError, match="not a metrics block"):
            rank_metrics.read(wrong)
    content = whole()
    put(content, 8, 7)  # odd for ever
    assert rank_metrics.read(content).rank == 2


def test_a_writer_may_die_at_any_moment_while_its_page_is_read(tmp_path: Path) -> None:
    """Whatever it was writing: readers get a page, whole where the writer was between two updates."""
    for life in range(5):
        memory = mmap.mmap(-1, rank_metrics.BYTES)
        memory[:] = bytes(whole())
        writer = os.fork()
        if writer == 0:
            for number in itertools.count(4, 4):
                memory[8:16] = (number + 1).to_bytes(8, "little")
                for at in (rank_metrics._OPERATIONS_AT, rank_metrics._OPERATIONS_AT + 8):
                    memory[at : at + 8] = number.to_bytes(8, "little")
                memory[8:16] = (number + 4).to_bytes(8, "little")
        deadline = time.monotonic() + 0.02 + 0.01 * life
        try:
            while time.monotonic() < deadline or "allreduce" not in rank_metrics.read(memory).operations:
                assert rank_metrics.read(memory).rank == 2
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        left = rank_metrics.read(memory, Seen(lives=False)).operations["allreduce"]
        assert left.count == left.bytes or memory[8] % 2 == 1


# ---- processes


def test_a_process_is_told_from_another_with_its_number() -> None:
    process = own_identity()
    assert lives(process) and not lives(process._replace(started=process.started + 1))
    assert lives(process._replace(namespace=1, pid=1 << 22))  # of another namespace nobody here can tell
    child = subprocess.Popen(["sleep", "60"])
    its = ProcessIdentity(child.pid, start_of(child.pid), process.namespace)
    assert lives(its) and not is_stopped(its)
    child.kill()
    until(lambda: not lives(its), 5)
    child.wait()


# ---- a folder of the user


def test_pages_lie_in_private_folders_and_go_with_their_process(runtime_dir) -> None:
    created = runtime_directory.create(os.environ, "job1", rank_metrics.initial(origin()))
    assert created is not None
    descriptor, path = created
    for place in (runtime_dir / "horoclone", runtime_dir / "horoclone" / "job1"):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and os.path.getsize(path) == rank_metrics.BLOCK_BYTES
    found = job.find("job1")
    assert [one.rank for one in found.ranks()] == [2] and found.launcher is None
    runtime_directory.remove(path)
    os.close(descriptor)
    assert not os.listdir(runtime_dir / "horoclone") and found.ranks() == []


def test_what_killed_processes_have_left_is_removed_when_no_rank_of_their_job_lives(runtime_dir) -> None:
    dead = own_identity()._replace(pid=1 << 22)
    place = runtime_dir / "horoclone"
    for name, rank, process in (("dead", 0, dead), ("half", 0, own_identity()), ("half", 1, dead)):
        (place / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / name / f"{rank}.metrics").write_bytes(whole(rank, process))
    (place / "empty").mkdir()
    # Beside jobs of other tests
    assert {one.id for one in job.jobs()} & {"dead", "half", "empty"} == {"half"}
    assert sorted(os.listdir(place)) == ["half"]
    assert [one.state for one in job.find("half").ranks()] == ["starting", "lost"]
    assert [event.kind for event in job.find("half").events()] == ["loss"]


@pytest.mark.parametrize(
    "kind", ["missing", "a file", "relative", "a link to nowhere", "somebody's", "on a disk"]
)
def test_a_bad_runtime_folder_gives_no_page_and_no_error(kind, tmp_path, monkeypatch) -> None:
    place = tmp_path / "runtime"
    if kind == "a file":
        place.write_text("")
    elif kind == "relative":
        place = Path("runtime")
    elif kind == "a link to nowhere":
        place.symlink_to(tmp_path / "nowhere")
    elif kind == "somebody's":
        if os.getuid() != 0:
            pytest.skip("needs root")
        place.mkdir()
        os.chown(place, 12345, 12345)
    elif kind == "on a disk":
        place.mkdir()
        monkeypatch.setattr(runtime_directory, "_ON_MEMORY", ())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    assert runtime_directory.create(os.environ, "job", rank_metrics.initial(origin())) is None
    assert isinstance(job.jobs(), list)


def test_without_xdg_runtime_dir_it_is_the_systems_folder_or_none(monkeypatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    usual = f"/run/user/{os.getuid()}"
    assert runtime_directory.place(os.environ) == (f"{usual}/horoclone" if os.path.isdir(usual) else None)
    # Has no such folder: no session, as in a container or a cron job
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert (
        runtime_directory.place(os.environ) is None
        and runtime_directory.create(os.environ, "job", rank_metrics.initial(origin())) is None
    )
    assert isinstance(job.jobs(), list)


def test_a_full_file_system_gives_no_page_and_leaves_nothing(runtime_dir, needs_root) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "none", str(runtime_dir)], check=True)
    try:
        (runtime_dir / "full").write_bytes(b"x" * 4096)
        assert runtime_directory.create(os.environ, "job", rank_metrics.initial(origin())) is None
        assert not list((runtime_dir / "horoclone").glob("*/*"))
    finally:
        subprocess.run(["umount", str(runtime_dir)], check=True)


# ---- a launcher's book


def placement(rank: int, host: str = "here") -> Placement:
    return Placement(rank, 3, rank, 3, 0, 1, host)


def test_a_launchers_book_is_found_by_its_process_and_tells_who_is_lost() -> None:
    metrics = JobMetrics([sys.executable, "train.py", "a b"])
    try:
        for rank in range(3):
            metrics.add(rank, placement(rank))
        metrics.started(0, os.getpid(), True)
        [found] = [one for one in job.of_process(os.getpid()) if "train.py" in one.command]
        assert found.id in {one.id for one in job.jobs()} and found.command.endswith("train.py 'a b'")
        assert found.launcher == os.getpid() and found.started == pytest.approx(time.time(), abs=5)
        assert [(one.rank, one.state, one.host) for one in found.ranks()] == [
            (rank, "starting", "here") for rank in range(3)
        ]
        metrics.ended(1, -9, False)
        metrics.ended(2, 0, False)
        assert [one.state for one in found.ranks()] == ["starting", "lost", "ended"]
        [event] = found.events()
        assert (event.kind, event.ranks) == ("loss", (1,)) and "SIGKILL" in event.text
        metrics.add(3, placement(3))  # a block more than when it was mapped
        assert [one.rank for one in found.ranks()] == [0, 1, 2, 3]
        with pytest.warns(DeprecationWarning, match=r"Job\.ranks\(\)"):
            assert [one.rank for one in found.pages()] == [0, 1, 2, 3]
    finally:
        metrics.close()
    assert found.ranks() == [] and found.id not in {one.id for one in job.jobs()}


def test_a_reader_sees_later_blocks_though_the_descriptor_it_came_by_is_closed():
    writer = job_segment.Writer({"id": "x"})
    another_readers = os.dup(writer.descriptor)
    reader = job_segment.Reader(f"/proc/self/fd/{another_readers}")
    os.close(another_readers)
    assert list(reader.blocks()) == []
    writer.add_block(b"first")
    assert [bytes(block[:5]) for block in reader.blocks()] == [b"first"]
    descriptor = reader._descriptor
    del reader
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    writer.close()


def test_a_segment_that_lacks_what_is_said_about_a_job_hides_no_other() -> None:
    writer, metrics = job_segment.Writer({"id": "x"}), JobMetrics(["train"])
    try:
        assert "train" in {one.command for one in job.jobs()}
        assert [one.command for one in job.of_process(os.getpid())] == ["train"]
    finally:
        metrics.close()
        writer.close()


def test_the_last_events_are_kept_and_long_ones_are_cut() -> None:
    writer = job_segment.Writer({"id": "x"})
    reader = job_segment.Reader(f"/proc/self/fd/{writer.descriptor}")
    assert reader.events() == []
    for number in range(500):
        writer.add_event(
            job_segment.Event(float(number), "stall", f"é{number} " + "ü" * 400, tuple(range(200)))
        )
    events = reader.events()
    assert [event.time for event in events] == [float(number) for number in range(500 - len(events), 500)]
    assert len(events) == 120 and events[-1].text.startswith("é499 ü") and events[-1].ranks[:3] == (0, 1, 2)
    writer.close()
    assert reader.is_over


def test_pages_travel_between_hosts_and_rubbish_is_dropped() -> None:
    there, here = JobMetrics(["there"]), JobMetrics(["here"])
    try:
        there.add(1, placement(1, "there"))
        here.add(1, placement(1, "there"))
        there.started(1, os.getpid(), True)
        [mine] = [one for one in job.of_process(os.getpid()) if one.command == "here"]
        [(rank, packed)] = there.news()
        assert rank == 1 and len(packed) < 300
        assert list(there.news()) == []  # once a second
        here.take(1, packed)
        here.take(1, b"")
        here.take(1, packed[:20])
        here.take(1, packed[:8] + bytes(100))
        here.take(9, packed)
        [one] = mine.ranks()
        assert one.pid == os.getpid() and one.host == "there" and one.state == "starting"
        here.ended(1, -15, True)
        here.take(1, packed)  # the last one of a rank that has ended
        [one] = mine.ranks()
        assert (one.state, one.exit_code, one.is_consequence) == ("lost", -15, True)
    finally:
        there.close()
        here.close()


def test_the_places_of_workers_that_are_gone_are_used_again() -> None:
    metrics = JobMetrics(["elastic"])
    try:
        for worker in range(20):
            metrics.add(worker, placement(worker % 2))
            metrics.formed(worker + 1, 2)
            metrics.ended(worker, 1, False)
        assert metrics._segment is not None and metrics._segment._blocks <= 3
    finally:
        metrics.close()


def test_a_launcher_without_a_descriptor_runs_without_a_book(monkeypatch) -> None:
    def none(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    metrics = JobMetrics(["x"])
    metrics.add(0, placement(0))
    assert metrics.passed(0) is None
    metrics.started(0, 1, True)
    metrics.take(0, b"")
    metrics.look(1.0, True)
    metrics.ended(0, 1, False)
    assert list(metrics.news()) == []
    metrics.close()


def test_control_characters_in_names_do_not_reach_a_terminal():
    assert rank_metrics.printable(b"a\x1b[2J\n\xc2\x9bgr\xc3\xbcn\xff") == "a\\x1b[2J\\x0a\\x9bgrün\ufffd"
