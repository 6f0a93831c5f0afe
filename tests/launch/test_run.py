"""horoclone.launch.api.run: a function on every rank, one value per rank, errors with their rank."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from horoclone.errors import Unsupported
from horoclone.launch.api import RunError, run
from horoclone.launch.hosts import Placement
from horoclone.launch.job import Job, Member

pytest.importorskip("cloudpickle")

PRELUDE = "import os, sys, time\nfrom horoclone.launch.api import run, RunError\n"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("HOROCLONE_", "HOROVOD_")) and name != "HOROCLONE_TEST_RUN":
            monkeypatch.delenv(name)
    # The user's memory of what init measured stays as it is
    monkeypatch.setenv("HOROCLONE_SELECTION", "fixed")


def test_values_come_back_by_rank_with_arguments_and_closures():
    offset = 5

    def numbers(factor, plus=0):
        import os

        return int(os.environ["HOROVOD_RANK"]) * factor + plus + offset, int(os.environ["HOROCLONE_SIZE"])

    assert run(numbers, (10,), {"plus": 1}, np=3) == [(6, 3), (16, 3), (26, 3)]


def test_one_rank_is_the_default_and_large_values_pass():
    [value] = run(lambda: b"x" * (20 << 20))
    assert len(value) == 20 << 20


def test_a_value_that_comes_from_another_host_in_parts_is_not_copied_for_each():
    job = Job.__new__(Job)
    member = Member(Placement(0, 1, 0, 1, 0, 1, "there"), {})
    job._members = {0: member}
    value = member.result
    for part in (b"V", b"al", b"ue"):
        job.result(0, part)
    assert member.result is value and value == b"Value"


def test_the_exception_of_a_rank_is_the_cause_and_the_rank_is_named():
    def fail():
        import os
        import time

        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("boo")
        time.sleep(0.5)

    with pytest.raises(RunError, match=r"rank 1 .*KeyError") as caught:
        run(fail, num_proc=2)
    assert caught.value.rank == 1 and caught.value.exit_code == 1
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.__cause__.args == ("boo",)


def test_an_exception_that_cannot_be_pickled_is_still_reported():
    def fail():
        error = ValueError("odd")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(RunError, match="ValueError: odd") as caught:
        run(fail)
    assert caught.value.rank == 0 and caught.value.__cause__ is None


def test_a_rank_that_dies_or_leaves_without_a_value_is_an_error():
    with pytest.raises(RunError, match="SIGKILL") as caught:
        run(lambda: os.kill(os.getpid(), 9), np=1)
    assert caught.value.exit_code == 137
    with pytest.raises(RunError, match="left no value"):
        run(lambda: os._exit(0), np=1)
    with pytest.raises(RunError, match="exit code 3"):
        run(lambda: sys.exit(3), np=1)


def test_wrong_and_unsupported_arguments_are_refused_before_anything_starts():
    for wrong in (
        {"num_proc": 2, "np": 3},
        {"np": 3, "hosts": "localhost:2"},
        {"hosts": "localhost", "hostfile": "x"},
        {"use_mpi": True, "use_gloo": True},
        {"env": {"SEED": 5}},
        {"env": {"A=B": "x"}},
    ):
        with pytest.raises(ValueError):
            run(print, **wrong)
    with pytest.raises(ValueError, match="callable"):
        run("print")  # type: ignore[arg-type]
    for wrong in (
        {"min_np": 3, "np": 2},
        {"np": 2, "max_num_proc": 1},
        {"np": 2, "slots": 2},
        {"np": 2, "min_np": 2, "cooldown_range": (0, 9)},
        {"host_discovery_script": "x", "hosts": "localhost"},
    ):
        with pytest.raises(ValueError):
            run(print, **wrong)
    with pytest.raises(Unsupported, match="without use_mpi"):
        run(print, np=2, min_np=1, use_mpi=True)


WHOLE = [
    "num_proc", "np", "min_num_proc", "min_np", "max_num_proc", "max_np", "slots", "reset_limit", "spares",
    "ssh_port"
]  # fmt: skip
SECONDS = ("elastic_timeout", "start_timeout", "grace")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [2.5, 2.0, float("nan"), "2", True, -1, 10**40, [2]])
def test_a_number_of_something_is_a_whole_number_or_refused_by_name(name, value):
    with pytest.raises((TypeError, ValueError), match=rf"run\(\): {name} must be"):
        run(print, **{"np": 1, "min_np": 1} | {name: value})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "2", True, 1e12])
def test_seconds_are_a_number_or_refused_by_name(name, value):
    with pytest.raises((TypeError, ValueError), match=rf"run\(\): {name} must be"):
        run(print, **{"np": 1, "min_np": 1, name: value})


@pytest.mark.parametrize("value", [5, (5,), (5, 2.5), "59", (True, 5), (-1, 5), (5, 4000)])
def test_a_range_of_cooldown_is_two_numbers(value):
    with pytest.raises((TypeError, ValueError), match="cooldown"):
        run(print, np=1, min_np=1, cooldown_range=value)


@pytest.mark.parametrize("pair", [("np", "num_proc"), ("min_np", "min_num_proc"), ("max_np", "max_num_proc")])
def test_two_names_for_one_number_say_the_same(pair):
    with pytest.raises(ValueError, match=r"are the same thing; give one of them"):
        run(print, **dict(zip(pair, (2, 3), strict=True)))


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert run(number, np=numpy.int64(1)) == [10]
    with pytest.raises(TypeError, match="np must be a whole number"):
        run(number, np=numpy.float64(1))


def test_an_elastic_run_gives_the_values_of_the_first_ranks_though_one_was_lost(tmp_path):
    pytest.importorskip("numpy")
    pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

    def work():
        import numpy as np

        import horoclone as hvd

        hvd.init()
        first = not (tmp_path / "killed").exists()
        for step in range(20):
            try:
                value = hvd.allreduce(np.ones(4), op=hvd.Sum, name="step")
                if first and step == 3 and hvd.rank() == 1:
                    (tmp_path / "killed").touch()
                    os.kill(os.getpid(), 9)
            except hvd.HorovodInternalError:
                hvd.shutdown()
                hvd.init()
                return hvd.rank(), hvd.size()
        return hvd.rank(), value.tolist()

    assert run(work, np=3, max_np=3, min_np=2, reset_limit=5) == [(0, 2), (1, 2)]


def number() -> int:
    return 10 + int(os.environ["HOROVOD_RANK"])


def early() -> object:
    if os.environ["HOROVOD_RANK"] == "0":
        return "early"
    import horoclone as hvd

    hvd.init()
    return hvd.size()


def test_an_elastic_run_of_a_function_that_never_calls_init_gives_its_values():
    import horovod

    assert run(number, min_num_proc=2, max_num_proc=2) == [10, 11]
    assert horovod.run(number, np=2, min_num_proc=2) == [10, 11]
    assert run(number, np=2, min_num_proc=1, max_num_proc=3) == [10]

    def late():
        time.sleep(0.5 * int(os.environ["HOROVOD_RANK"]))
        return number()

    assert run(late, min_num_proc=3, max_num_proc=3) == [10, 11, 12]


def test_an_elastic_run_in_which_one_fails_and_nobody_calls_init_names_it():
    def one_fails():
        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError("bad batch 17")

    with pytest.raises(RunError, match="rank 1 .*ValueError: bad batch 17") as caught:
        run(one_fails, min_num_proc=2, max_num_proc=2)
    assert isinstance(caught.value.__cause__, ValueError)


def test_who_calls_init_does_not_wait_for_those_who_have_returned():
    pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")
    assert run(early, np=2, min_num_proc=1, max_num_proc=2) == [1]
    said = "1 of at least 2 processes are left: the others ended with success and had not called"
    with pytest.raises(RunError, match=said):
        run(early, min_num_proc=2, max_num_proc=2)


def test_run_works_in_a_thread_and_outlives_it(tmp_path):
    values = []
    thread = threading.Thread(target=lambda: values.extend(run(lambda: os.environ["HOROVOD_SIZE"], np=2)))
    thread.start()
    thread.join(60)
    assert values == ["2", "2"]


def test_a_function_of_a_module_beside_the_script_is_found(launch, tmp_path):
    (tmp_path / "beside.py").write_text(
        "import os\ndef rank():\n    return int(os.environ['HOROVOD_RANK'])\n"
    )
    script = tmp_path / "script.py"
    root = Path(__file__).resolve().parents[2]
    script.write_text(
        f"import sys; sys.path.append({str(root)!r})\n{PRELUDE}import beside\nprint(run(beside.rank, np=2))\n"
    )
    assert launch([sys.executable, script], cwd=tmp_path).stdout == "[0, 1]\n"


def test_output_is_prefixed_and_control_c_is_a_keyboard_interrupt(launch):
    import signal

    body = PRELUDE + (
        "def work():\n    import time\n    print('up', flush=True)\n    time.sleep(60)\n"
        "try: run(work, np=2)\nexcept KeyboardInterrupt: print('caught', flush=True)\n"
    )
    started = launch.start([sys.executable, "-c", body])
    started.wait_for("[0] up")
    started.wait_for("[1] up")
    os.kill(started.process.pid, signal.SIGINT)
    done = started.finish(30)
    assert done.returncode == 0 and done.stdout.endswith("caught\n") and not started.left_over(5)


def test_a_killed_caller_leaves_no_rank(launch):
    import signal

    body = (
        PRELUDE
        + "def work():\n    import time\n    print('up', flush=True)\n    time.sleep(60)\nrun(work, np=2)\n"
    )
    started = launch.start([sys.executable, "-c", body])
    started.wait_for("[0] up")
    started.wait_for("[1] up")
    os.kill(started.process.pid, signal.SIGKILL)
    assert not (left := started.left_over(10)), left


def test_two_runs_in_a_row_leave_no_descriptor_or_thread():
    run(lambda: None, np=1)
    before, threads = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        run(lambda: None, np=2)
    assert sorted(os.listdir("/proc/self/fd")) == before and threading.active_count() == threads
