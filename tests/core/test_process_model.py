"""The life of a process around the runtime: init, again, fork, exceptions, exits; every ending has a limit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import ranks, run_python

import horoclone as hvd
from horoclone import runtime
from horoclone.runtime import current
from horoclone.runtime.attached import attach
from horoclone.runtime.lifecycle import init, shutdown


@ranks(2)
def test_init_twice_is_one_init_and_shutdown_twice_is_one_shutdown():
    hvd.init()
    assert hvd.is_initialized() and hvd.size() == 2
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(hvd.NotInitialized, match=r"use hvd.init\(\).*hvd.allreduce\(\)"):
        hvd.allreduce(np.ones(1))
    # Also where JAX has called the package back.
    frames = {
        "horoclone.jax.eager": "def allreduce(inner): return through(inner)",
        "jax.core": "def through(f): return f()",
    }
    scopes = {module: {"__name__": module} for module in frames}
    for module, text in frames.items():
        exec(text, scopes[module])
    scopes["horoclone.jax.eager"]["through"] = scopes["jax.core"]["through"]
    with pytest.raises(hvd.NotInitialized, match=r"hvd.allreduce\(\)"):
        scopes["horoclone.jax.eager"]["allreduce"](current.native)
    with pytest.raises(ValueError, match=r"hvd.rank\(\)"):
        hvd.rank()


@ranks(2)
def test_what_was_pending_at_shutdown_fails_and_the_next_life_is_clean():
    handle = hvd.allreduce_async(np.ones(3), name=f"only on {hvd.rank()}")
    started = time.monotonic()
    hvd.shutdown()
    assert time.monotonic() - started < 14  # a rank that goes on is waited for 15 s
    with pytest.raises(hvd.HorovodInternalError):
        hvd.synchronize(handle)
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2]


def in_child(body):
    """Runs body() in a forked child; gives what it printed. The child ends without the harness's exit."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = body()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, str(text).encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 20
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the forked child hangs")
        time.sleep(0.01)
    with os.fdopen(read) as file:
        return file.read()


@ranks(2)
def test_a_forked_child_is_told_and_the_parent_goes_on():
    handle = hvd.allreduce_async(np.ones(100_000), name="across the fork", op=hvd.Sum)
    for call in (hvd.barrier, hvd.init, hvd.shutdown, lambda: hvd.allreduce(np.ones(1)), hvd.join):
        text = in_child(call)
        assert (
            text.startswith("HorovodInternalError") and "was forked from pid" in text and "spawn" in text
        ), text
    assert in_child(hvd.is_initialized) == "False"
    assert in_child(lambda: (hvd.rank(), hvd.size(), hvd.local_rank())) == str(
        (hvd.rank(), 2, hvd.local_rank())
    )
    assert hvd.synchronize(handle)[0] == 2
    for _ in range(20):
        assert hvd.allreduce(np.ones(5), op=hvd.Sum).tolist() == [2] * 5


@ranks(2)
def test_forks_while_another_thread_reduces():
    stop = threading.Event()
    done = []

    def reduce():
        for _ in range(50):
            done.append(hvd.allreduce(np.ones(1000), op=hvd.Sum)[0])
        stop.set()

    thread = threading.Thread(target=reduce)
    thread.start()
    while not stop.is_set():
        assert in_child(lambda: "fine") == "fine"
    thread.join(30)
    assert done == [2.0] * 50


@ranks(2)
def test_memory_that_a_child_inherits_is_not_written_by_the_parent():
    array = np.full(1000, float(hvd.rank()))

    def child():
        time.sleep(0.3)  # the parent reduces into its array meanwhile
        return array.tolist() == [float(seen)] * 1000

    seen = hvd.rank()
    texts = []
    forked = threading.Thread(target=lambda: texts.append(in_child(child)))
    forked.start()
    time.sleep(0.1)
    hvd.allreduce_(array, op=hvd.Sum)
    forked.join(20)
    assert array[0] == 1.0 and texts == ["True"]


# --- endings of processes of their own, so that exit codes and output are real


def leave_before_the_other_has_come():
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(2)
    handle = hvd.allreduce_async(np.ones(3) * (hvd.rank() + 1), name="a", op=hvd.Sum)
    if hvd.rank() == 0:
        print("sum", hvd.synchronize(handle).tolist())


def test_an_exit_waits_for_a_slower_rank_that_needs_what_was_submitted(worker_pool):
    team = worker_pool(leave_before_the_other_has_come, 2)
    assert team.wait() == [0, 0] and "sum [3.0, 3.0, 3.0]" in team.output(0), team.outputs()


def leave_with_work_that_never_gets_ready():
    hvd.init()
    hvd.allreduce_async(np.ones(9), name=f"only {hvd.rank()}")


@pytest.mark.long(6)
def test_an_exit_with_work_that_never_gets_ready_does_not_hang(worker_pool):
    worker_pool(leave_with_work_that_never_gets_ready, 2).wait(15)


def fork_a_child_that_exits_normally():
    hvd.init()
    if os.fork() == 0:
        sys.exit(0)  # runs the interpreter's exit functions in the child
    assert os.wait()[1] == 0
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]


def test_an_exit_without_shutdown_and_a_forked_child_that_exits_normally(worker_pool):
    team = worker_pool(fork_a_child_that_exits_normally, 2)
    assert team.wait(15) == [0, 0], team.outputs()


def interrupt_yourself():
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    try:
        hvd.barrier()
    except hvd.HorovodInternalError as error:
        print("heard", error)


def test_ctrl_c_in_one_rank_is_said_to_the_others(worker_pool):
    team = worker_pool(interrupt_yourself, 2)
    team.wait(15)
    assert "rank 1 was interrupted (Ctrl-C)" in team.output(0), team.outputs()


def be_interrupted_in_a_wait(calls):
    hvd.init()
    for _ in range(calls):  # then it is in a round of the bypass that rank 1 never enters
        hvd.allreduce(np.ones(1), name="x")
    if hvd.rank() == 0:
        try:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            hvd.allreduce(np.ones(1), name="x")
        except KeyboardInterrupt:
            os.write(1, b"interrupted\n")
    else:
        time.sleep(5)
        os.write(1, b"awake\n")
    hvd.shutdown()


@pytest.mark.parametrize("calls", [0, 40], ids=["first call", "in a loop"])
def test_ctrl_c_during_a_wait_is_served_at_once(worker_pool, calls):
    team = worker_pool(be_interrupted_in_a_wait, 2, calls=calls)
    team.wait_for_output(0, "interrupted")
    assert "awake" not in team.output(1), "the interrupt waited for the other rank"


def be_interrupted_in_loops():
    from horoclone.arrays.handles import table

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for life in range(12):
        hvd.init()
        for _ in range(40):
            hvd.allreduce(np.ones(1), name="x")
        try:
            if hvd.rank() == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.0007 * life)
            while True:
                hvd.allreduce_(np.ones(1), name="x")
                if hvd.rank() == 1:
                    time.sleep(0.0002)  # so that rank 0 waits
        except KeyboardInterrupt:
            assert not table.pending, table.pending
            assert hvd.metrics()["live_handles"] == 0
        except hvd.HorovodInternalError:
            assert hvd.rank() == 1
        hvd.shutdown()


def test_ctrl_c_at_any_moment_of_a_loop_leaves_no_operation_behind(worker_pool):
    """Also between the first look at a round and the wait: nothing is under way afterwards, and a new life begins."""
    team = worker_pool(be_interrupted_in_loops, 2)
    assert team.wait(60) == [0, 0], team.outputs()


def show_a_caught_exception_by_the_hook():
    hvd.init()
    try:
        raise ValueError("caught")
    except ValueError:
        if hvd.rank() == 0:
            sys.excepthook(*sys.exc_info())
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="goes on") == 2


def test_a_caught_exception_that_the_hook_shows_ends_nothing(worker_pool):
    team = worker_pool(show_a_caught_exception_by_the_hook, 2)
    assert team.wait() == [0, 0] and "ValueError: caught" in team.output(0), team.outputs()


def raise_with_a_hook():
    sys.excepthook = lambda kind, error, trace: print("my hook saw", error)
    hvd.init()
    raise KeyError("mine") if hvd.rank() == 0 else SystemExit(0)


def test_an_exception_hook_of_the_user_still_runs(worker_pool):
    team = worker_pool(raise_with_a_hook, 2)
    assert team.wait() == [1, 0] and "my hook saw 'mine'" in team.output(0), team.outputs()


def fail_before_the_others_have_connected():
    if os.environ["HOROCLONE_RANK"] == "1":
        time.sleep(0.3)
        hvd.init(process_sets=[3])
    try:
        hvd.init()
    except hvd.PeerLost as error:
        print("heard of rank", error.rank, error)


def test_a_failure_before_everybody_is_connected_is_told_to_those_who_wait(worker_pool):
    team = worker_pool(fail_before_the_others_have_connected, 2)
    assert team.wait() == [0, 1], team.outputs()
    assert "heard of rank 1 rank 1 failed before it was connected" in team.output(0), team.outputs()
    assert "ValueError: process_sets[0] is 3" in team.output(0), team.outputs()


def program(body):
    return f"import os, signal, sys, time\nimport numpy as np\nimport horoclone as hvd\n{body}"


def test_start_timeout_must_be_a_number():
    from horoclone import settings

    assert settings.start_timeout_s({}) == 300
    assert settings.start_timeout_s({"HOROVOD_START_TIMEOUT": "30"}) == 30
    assert settings.start_timeout_s({"HOROCLONE_START_TIMEOUT": "2.5", "HOROVOD_START_TIMEOUT": "30"}) == 2.5
    for wrong in ("soon", "-1", "0", "inf", "nan"):
        with pytest.raises(ValueError, match="START_TIMEOUT"):
            settings.start_timeout_s({"HOROCLONE_START_TIMEOUT": wrong})
    for check in (settings.start_timeout_s, lambda e: settings.seconds(e, "START_TIMEOUT", 1.0)):
        with pytest.raises(ValueError, match="^HOROVOD_START_TIMEOUT='soon'"):
            check({"HOROVOD_START_TIMEOUT": "soon"})


def test_the_secret_does_not_reach_the_core_through_its_settings():
    from horoclone import settings

    environ = {
        "HOROCLONE_SECRET": "s",
        "HOROCLONE_SECRET_FILE": "f",
        "HOROVOD_CYCLE_TIME": "1",
        "PATH": "/bin",
    }
    assert settings.settings_of(environ) == {"HOROVOD_CYCLE_TIME": "1"}


# --- a few runs under launchers that are not ours


@pytest.mark.mpi
@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["open_mpi", "mpich"])
def test_every_life_may_have_another_world_under_mpirun(launch, request, name):
    """COMM_WORLD, a duplicate, halves of a Split and lists of ranks, in turn; MPI itself is used in between."""
    mpi = request.getfixturevalue(name)
    body = """
from mpi4py import MPI
everybody, me = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
half = everybody.Split(me // 2, -me)  # {0, 1} and {2}, numbered from behind
worlds = [None, everybody, everybody.Dup(), half, [0, 1, 2], [2, 0] if me != 1 else [1]]
for life in range(42):
    comm = worlds[life % len(worlds)]
    hvd.init(comm)
    size = 3 if comm is None else len(comm) if isinstance(comm, list) else comm.size
    rank = me if comm is None else comm.index(me) if isinstance(comm, list) else comm.rank
    assert (hvd.rank(), hvd.size()) == (rank, size), (life, hvd.rank(), hvd.size())
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [size] * 2
    assert hvd.broadcast_object(me, root_rank=0) == (me if size == 1 else hvd.allgather_object(me)[0])
    assert everybody.allreduce(1) == 3
    hvd.shutdown()
os.write(1, b"\\nfine\\n")
"""
    done = launch([*mpi.command(3), sys.executable, "-c", program(body)], env=mpi.env, timeout_s=100)
    assert done.stdout.split().count("fine") == 3, done.output


@ranks(3, init=False)
def test_every_life_may_have_another_world_under_our_launcher():
    me = int(os.environ["HOROCLONE_RANK"])
    for life in range(30):
        comm = ([0, 1, 2], None, [2, 1] if me else [0], [1, 0] if me < 2 else [2], [1, 2, 0])[life % 5]
        hvd.init(comm)
        ranks_of_world = list(range(3)) if comm is None else comm
        assert (hvd.rank(), hvd.size()) == (ranks_of_world.index(me), len(ranks_of_world))
        assert hvd.allgather(np.array([me])).tolist() == ranks_of_world
        hvd.shutdown()


def test_the_example_computes_pi(launch, examples):
    """The launchers that are not ours: tests/bootstrap/test_launchers.py."""
    command = [
        sys.executable,
        "-m",
        "horoclone.launch",
        "-np",
        "2",
        sys.executable,
        str(examples / "numpy_pi.py"),
    ]
    done = launch([*command, "--samples", "10000", "--seed", "1"], timeout_s=100)
    assert "2 ranks, seed 1" in done.stdout and "3.14159265" in done.stdout, done.output
    assert done.stdout.count("alone:") == 2


IN_THE_CORE_AT_THE_END = """
import threading, time
import numpy as np
from horoclone import _core

count = 16 << 20
numbers, message = np.ones(count, np.float32), np.zeros(2 * count, np.uint8)
began = threading.Event()

def work():
    while True:
        began.set()
        _core.quantize(256, count, count, numbers.ctypes.data, 0, message.ctypes.data)

threading.Thread(target=work, daemon=True).start()
began.wait()
time.sleep(0.01)
"""


def test_a_daemon_thread_in_the_core_does_not_abort_a_process_that_ends():
    """CPython below 3.14 ends such a thread with pthread_exit, which must not unwind through our destructors."""
    for _ in range(3):
        done = run_python(IN_THE_CORE_AT_THE_END)
        assert done.returncode == 0, done.stderr


def test_a_setter_hears_of_every_life_and_of_one_that_has_begun() -> None:
    early: list[int] = []
    late: list[int] = []
    attach(early.append)
    assert early == []
    for _ in range(2):
        init()
        assert early[-1] == runtime.native().address != 0
        attach(late.append)
        assert late[-1] == early[-1]
        shutdown()
        assert early[-1] == late[-1] == 0
    assert [bool(address) for address in early] == [True, False, True, False]


SCRIPT = """
import multiprocessing as mp, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import horoclone as hvd

hvd.init()
place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.is_homogeneous()

def work(x):
    return 2 * x, place, hvd.is_initialized()

def communicate(x):
    try:
        hvd.allreduce(np.ones(1), name="of a child")
    except hvd.HorovodInternalError as error:
        return str(error)

if __name__ == "__main__":
    for how in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, mp_context=mp.get_context(how)) as pool:
            assert list(pool.map(work, range(3))) == [(2 * x, place, False) for x in range(3)]
            for text in pool.map(communicate, range(1)):
                assert f"was started by rank {hvd.rank()} " in text and "__name__" in text and "spawn" in text, text
    with mp.get_context("spawn").Pool(1) as pool:
        assert pool.map(work, [4]) == [(8, place, False)]
    with mp.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
    alone = {name: text for name, text in __import__("os").environ.items() if "HORO" not in name}
    line = "import horoclone as h; h.init(); print(h.size(), h.allreduce([1.0], op=h.Sum)[0])"
    assert subprocess.check_output([sys.executable, "-c", line], env=alone, text=True) == "1 1.0\\n"
    line = "import horoclone as h; print(h.rank(), h.size())"  # as a worker whose script calls init() in main() only
    assert subprocess.check_output([sys.executable, "-c", line], text=True) == f"{hvd.rank()} {hvd.size()}\\n"
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2
    print("well", flush=True)
"""


def test_a_started_process_knows_whose_it_is_and_communicates_not(launch: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = launch(
        [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, str(script)], timeout_s=120
    )
    assert done.stdout.count("well") == 2, done.output
