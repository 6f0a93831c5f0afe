"""What a job costs and whom it lets in: many lives, memory across lives, too little of something, no secret."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import time

import numpy as np
import pytest
from worker_pool import say, traces

import horoclone as hvd
from horoclone import runtime
from horoclone.runtime import native_module

MODES = pytest.mark.parametrize("shared", [True, False], ids=["shared", "tcp"])
BIG = 1 << 20  # elements of 4 bytes


def mode(shared):
    return {"HOROCLONE_SHARED_MEMORY": "1" if shared else "0"}


# --- many lives


def live_often(lives):
    def numbers():
        with open("/proc/self/status") as file:
            status = dict(line.split(":", 1) for line in file)
        with open("/proc/self/maps") as file:
            maps = sum(1 for _ in file)
        return (
            len(os.listdir("/proc/self/fd")),
            int(status["Threads"]),
            maps,
            int(status["VmRSS"].split()[0]) / 1024,
        )

    took, before = [], None
    for life in range(lives):
        if life == lives // 10:
            before = numbers()
        began = time.monotonic()
        hvd.init()
        assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
        hvd.shutdown()
        took.append(time.monotonic() - began)
    say(p50=sorted(took)[len(took) // 2] * 1000, before=before, after=numbers())


@pytest.mark.long(40)
@MODES
def test_a_thousand_lives_cost_nothing_that_stays(worker_pool, shared):
    lives = 1000 if shared else 300
    team = worker_pool(live_often, 2, env=mode(shared), lives=lives)
    assert team.wait(90) == [0, 0], team.outputs()
    for rank in range(2):
        found = team.said(rank, "p50")[0]
        (fds, threads, maps, mib), after = found["before"], found["after"]
        print(f"rank {rank}: p50 {found['p50']:.1f} ms a life, {found['before']} -> {after}")
        assert after[0] <= fds and after[1] <= threads and after[2] <= maps + 4 and after[3] <= mib + 4, found


def use_memory_of_an_earlier_life():
    blocks, views = [], []
    for life in range(4):
        hvd.init()
        block = runtime.native().allocate(4 * BIG)
        blocks.append(block)
        views.append(np.frombuffer(memoryview(block), np.uint8).view(np.float32))
        for view in views:
            view[:] = hvd.rank() + life
            hvd.allreduce_(view, op=hvd.Sum, name="view")
            assert view[0] == view[-1] == 1 + 2 * life
        hvd.shutdown()
        for view in views:  # between two lives it is ordinary memory
            view[:] = 7
            assert view.sum() == 7 * BIG
        del block
        if life == 1:
            blocks[0] = None  # only the view keeps it
    pid = os.fork()
    if pid == 0:
        os._exit(0 if views[0][5] == 7 else 1)
    assert os.waitpid(pid, 0)[1] == 0


@MODES
def test_shared_memory_outlives_the_runtime_that_gave_it(worker_pool, shared):
    team = worker_pool(use_memory_of_an_earlier_life, 2, env=mode(shared))
    assert team.wait() == [0, 0], team.outputs()


# --- too little of something


def crowd():
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    hvd.init()
    hvd.barrier()
    began = time.monotonic()
    for step in range(100):
        assert hvd.allreduce(np.full(100, step), op=hvd.Sum, name="small")[0] == 8 * step
    small = time.monotonic() - began
    for _ in range(5):
        assert hvd.allreduce(np.ones(BIG // 4, np.float32), op=hvd.Sum, name="big")[-1] == 8
    say(small_us=small / 100 * 1e6, big_ms=(time.monotonic() - began - small) / 5 * 1e3)


@MODES
def test_eight_ranks_on_two_processors_make_progress(worker_pool, shared):
    team = worker_pool(crowd, 8, env=mode(shared))
    assert team.wait(60) == [0] * 8, team.outputs()
    print(team.said(0, "small_us"))


def start_with_few_descriptors(left):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    while len(os.listdir("/proc/self/fd")) <= 64 - left:  # reading it takes one
        kept.append(os.open("/dev/null", os.O_RDONLY))
    try:
        hvd.init()
    except hvd.HorovodInternalError as error:
        say(error=type(error).__name__, text=str(error))


@pytest.mark.parametrize("left", [1, 7, 8])
def test_too_few_descriptors_are_an_error_of_init_that_names_the_limit(worker_pool, left):
    team = worker_pool(start_with_few_descriptors, 8, left=left, env={"HOROCLONE_START_TIMEOUT": "10"})
    assert team.wait(30) == [0] * 8, team.outputs()
    texts = [team.said(rank, "error")[0]["text"] for rank in range(8)]
    assert all("ulimit -n" in text for text in texts) and (left < 8 or any("64" in text for text in texts)), (
        texts
    )


def work_with_a_tiny_shm():
    clone_newns, ms_rec, ms_private = 0x20000, 0x4000, 1 << 18
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(clone_newns) == 0
    assert libc.mount(None, b"/", None, ms_rec | ms_private, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k") == 0
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 65536
    hvd.init()
    assert runtime.native().shares_memory()
    block = runtime.native().allocate(64 << 20)
    view = np.frombuffer(memoryview(block), np.uint8)
    view[:] = 1
    assert hvd.allreduce_(view, op=hvd.Sum, name="x").tolist()[-1] == 2
    assert os.listdir("/dev/shm") == []
    say(right=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a file system")
def test_a_tiny_dev_shm_does_not_matter(worker_pool):
    team = worker_pool(work_with_a_tiny_shm, 2)
    assert team.wait() == [0, 0], team.outputs()


# --- unauthenticated connections


def stay(seconds):
    hvd.init()
    say(traces=traces())
    began = time.monotonic()
    while hvd.allreduce(np.array([time.monotonic() - began < seconds]), op=hvd.Min, name="w")[0]:
        time.sleep(0.01)
    say(right=True)


def pry(pid, names):
    """As nobody: everything that another user of the host can try. Says what succeeded."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    got = []
    for fd in range(64):
        try:
            os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
            got.append(f"opened descriptor {fd}")
        except OSError:
            pass
    for name in ("environ", "mem", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                file.read(1)
            got.append(f"read {name}")
        except OSError:
            pass
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(8)
    parts = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    address = ctypes.addressof(buffer)  # forked from the same image: the address exists there, too
    theirs = (ctypes.c_void_p * 2)(address, 8)
    if libc.process_vm_readv(pid, parts, 1, theirs, 1, 0) >= 0:
        got.append("read its memory")
    try:
        pidfd = os.pidfd_open(pid)
        for fd in range(64):
            if libc.syscall(438, pidfd, fd, 0) >= 0:  # pidfd_getfd
                got.append(f"took descriptor {fd}")
    except OSError:
        pass
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.settimeout(2)
            try:
                one.connect("\0" + name.lstrip("@"))
                one.sendall(b"x" * 64)
                if one.recv(1 << 16):
                    got.append(f"had an answer from {name}")
            except OSError:
                pass
    try:
        os.kill(pid, signal.SIGTERM)
        got.append("sent a signal")
    except OSError:
        pass
    say(got=got, uid=os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes another user")
def test_another_user_gets_at_nothing(worker_pool):
    team = worker_pool(stay, 2, seconds=1.5)
    held = team.wait_for(0, "traces")["traces"]
    team.wait_for(1, "traces")
    assert held["files"] and held["ports"] == []
    other = worker_pool(pry, 1, pid=team.pids[0], names=held["names"])
    assert other.wait() == [0], other.outputs()
    found = other.said(0, "got")[0]
    assert found["uid"] == 65534 and found["got"] == [], found
    assert team.wait() == [0, 0] and team.said(0, "right"), team.outputs()


GARBAGE = [
    os.urandom(1024),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + bytes(200),  # a TLS hello
    b"\xff" * 64,  # every length field at its largest, or negative
    b"\x80\x04\x95",  # how a pickle begins
    b"",  # nothing at all, for ever
]


def start_slowly(late, seconds):
    """Rank 1 holds up the start when all have gathered but nobody is connected: rank 0's listeners are open until then."""
    connect = native_module.core().Runtime.connect

    def hold_up(native, *args):
        say(listeners=traces()["ports"])
        while args[0] == 1 and not os.path.exists(late):
            time.sleep(0.01)
        return connect(native, *args)

    native_module.core().Runtime.connect = hold_up
    hvd.init()
    say(open=traces()["ports"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    while hvd.allreduce(np.array([time.monotonic() - began < seconds]), op=hvd.Min, name="w")[0]:
        assert hvd.allreduce(np.full(1000, 3), op=hvd.Sum).tolist() == [6] * 1000
    say(grown_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@MODES
def test_unauthenticated_connections_at_every_listener_of_a_job_hold_up_nobody(worker_pool, tmp_path, shared):
    late = tmp_path / "now"
    team = worker_pool(start_slowly, 2, env=mode(shared), late=str(late), seconds=1)
    host, _, port = team.server.addresses[0].rpartition(":")
    listeners = [(host, int(port))] + [
        ("127.0.0.1", port) for port in team.wait_for(0, "listeners")["listeners"]
    ]
    assert len(listeners) >= 2
    held = []

    def knock():
        for turn in range(60):
            one = socket.socket()
            one.settimeout(2)
            held.append(one)
            try:
                one.connect(listeners[turn % len(listeners)])
                one.sendall(GARBAGE[turn % len(GARBAGE)])
            except OSError:
                pass  # turned away already, or the listener is gone

    knock()
    time.sleep(0.2)
    late.touch()
    for rank in range(2):
        # No listener once all are connected, but where a connection that breaks must be made again.
        assert bool(team.wait_for(rank, "open")["open"]) == (not shared)
    knock()
    assert team.wait(20) == [0, 0], team.outputs()
    assert all(team.said(rank, "grown_kib")[0]["grown_kib"] < 8192 for rank in range(2)), team.outputs()
    for one in held:
        one.close()


class Bomb:
    def __reduce__(self):
        return (os.system, ("exit 1",))


def unpickle_nothing():
    import pickle

    import cloudpickle

    called = []

    def refuse(*args, **kwargs):
        called.append(args)
        raise AssertionError("something was unpickled")

    kept = {(m, n): getattr(m, n) for m in (pickle, cloudpickle) for n in ("load", "loads")}
    for module, name in kept:
        setattr(module, name, refuse)
    pickle.Unpickler = refuse
    hvd.init()
    bomb = np.frombuffer(pickle.dumps(Bomb()), np.uint8)
    assert hvd.broadcast(bomb, 0).tobytes() == bomb.tobytes()  # data stays data
    assert hvd.allgather(bomb[None]).shape == (2, bomb.size)
    assert hvd.alltoall(bomb, splits=[bomb.size - 1, 1])[0].size
    assert hvd.reducescatter(np.ones(4), op=hvd.Sum).tolist() == [2.0, 2.0]
    assert hvd.grouped_allreduce([np.ones(2), np.ones(3)], op=hvd.Sum)[1].tolist() == [2.0] * 3
    hvd.barrier()
    hvd.join()
    hvd.shutdown()
    hvd.init()
    hvd.shutdown()
    say(called=len(called))


@MODES
def test_nothing_that_comes_from_a_socket_is_unpickled(worker_pool, shared):
    team = worker_pool(unpickle_nothing, 2, env=mode(shared))
    assert team.wait() == [0, 0], team.outputs()
    assert [team.said(rank, "called")[0]["called"] for rank in range(2)] == [0, 0]
