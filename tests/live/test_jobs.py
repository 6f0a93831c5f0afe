"""Real jobs, seen from outside: with our launcher on one host and on two, and without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horoclone.live import job
from horoclone.live.rank_metrics import RankMetrics

RUN = [sys.executable, "-m", "horoclone.launch"]
WORKER = """
    import os, signal, sys, time
    import numpy as np
    import horoclone as hvd

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher waits a while for it, and the test can look
    hvd.init()
    weights = np.ones(1000, np.float32)
    for step in range(100_000):
        hvd.allreduce_(weights, op=hvd.Max, name="weights")
        time.sleep(0.01)
        if step == int(sys.argv[1]) and hvd.rank() == 1:
            time.sleep(3)
"""

_SSH = """#!{python}
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[1 if words[0] == "-T" else 2:]
keep = {{name: text for name, text in os.environ.items() if name in ("PATH", "HOROCLONE_TEST_RUN")}}
os.execve("/bin/sh", ["sh", "-c", " ".join(words[1:])], {{**keep, "HOME": "/"}})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(WORKER))
    return script


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    place = Path("/dev/shm") / f"hc-live-{os.getpid()}-{time.monotonic_ns()}"
    place.mkdir(mode=0o700)
    yield place
    subprocess.run(["rm", "-rf", str(place)], check=True)


def job_of(started: Any) -> job.Job:
    return started.until(lambda: job.of_process(started.process.pid))[0]


def all_step(found: job.Job, ranks: int, least: int) -> list[RankMetrics] | None:
    pages = found.ranks()
    return pages if len(pages) == ranks and all(one.step >= least for one in pages) else None


def test_a_job_is_seen_while_it_runs_stalls_and_loses_a_rank(launch: Any, worker: Path) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    started = launch.start([*RUN, "-np", "2", sys.executable, worker, "150"], env=env)
    found = job_of(started)
    assert found.launcher == started.process.pid and str(worker) in found.command
    assert job.find(found.id).id == found.id

    pages = started.until(lambda: all_step(found, 2, 30))
    began, before = time.perf_counter(), pages[0].step
    started.until(lambda: all_step(found, 2, 100))
    now = found.ranks()[0]
    took = (time.perf_counter() - began) / (now.step - before)
    # Of the last few steps, and each sleeps for 10 ms; test_measurements.py compares the two exactly.
    assert 0.01 <= now.step_seconds_smoothed < 10 * took
    assert [one.rank for one in pages] == [0, 1] and {one.state for one in pages} <= {"running", "waiting"}
    assert now.program.startswith("train.py") and now.generation == 1 and now.size == 2
    done = now.operations["allreduce"]
    assert done.count >= 100 and done.bytes == 4000 * done.count and sum(done.histogram) == done.count
    assert now.last_operation is not None
    assert (now.last_operation.kind, now.last_operation.name, now.last_operation.bytes) == (
        "allreduce", "weights", 4000,
    )  # fmt: skip
    assert 0 <= now.last_operation.age_seconds < 60 and abs(time.time() - now.heartbeat) < 60

    stalled = started.until(lambda: [one for one in found.ranks() if one.state == "stalled"])
    assert [(one.rank, one.stalled_on, one.stalled_for) for one in stalled] == [
        (0, "allreduce 'weights'", (1,))
    ]
    started.until(lambda: any(event.kind == "resumed" for event in found.events()))
    assert [event.ranks for event in found.events() if event.kind == "stall"] == [(0,)]

    started.until(lambda: all_step(found, 2, 160))
    started.until(lambda: [(one.rank, one.seconds > 2) for one in found.ranks()[0].late[:1]] == [(1, True)])
    os.kill(found.ranks()[1].pid, signal.SIGKILL)
    lost = started.until(lambda: [one for one in found.ranks() if one.state == "lost"])
    assert [one.rank for one in lost] == [1]
    event = started.until(lambda: [event for event in found.events() if event.kind == "loss"])[0]
    assert event.ranks == (1,) and "SIGKILL" in event.text
    started.process.send_signal(signal.SIGKILL)
    started.process.wait(10)
    started.until(lambda: not found.ranks() and not job.of_process(started.process.pid))


def test_a_stopped_rank_is_stalled(launch: Any, worker: Path) -> None:
    started = launch.start([*RUN, "-np", "1", sys.executable, worker, "-1"])
    found = job_of(started)
    [one] = started.until(lambda: all_step(found, 1, 5))
    os.kill(one.pid, signal.SIGSTOP)
    started.until(lambda: found.ranks()[0].stalled_on.startswith("the process is stopped"), 5)
    os.kill(one.pid, signal.SIGCONT)
    started.until(lambda: found.ranks()[0].state == "running", 5)


def test_the_launcher_has_the_pages_of_other_hosts(launch: Any, worker: Path, tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(_SSH.format(python=sys.executable))
    ssh.chmod(0o755)
    env = {"PATH": f"{ssh.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    hosts = "localhost:1,host-b.invalid:1"
    started = launch.start([*RUN, "-np", "2", "-H", hosts, sys.executable, worker, "-1"], env=env)
    found = job_of(started)
    pages = started.until(lambda: all_step(found, 2, 20))
    assert pages[1].operations["allreduce"].bytes >= 20 * 4000
    first = pages[1]
    later = started.until(lambda: [one for one in found.ranks() if one.rank == 1 and one.step > first.step])[
        0
    ]
    assert later.pid == first.pid and abs(later.heartbeat - time.time()) < 60
    os.kill(first.pid, signal.SIGKILL)
    started.until(lambda: [one.rank for one in found.ranks() if one.state == "lost"] == [1], 5)


def alone(launch: Any, worker: Path, place: Path | str) -> Any:
    return launch.start([sys.executable, worker, "-1"], env={"XDG_RUNTIME_DIR": str(place)})


def test_without_a_launcher_pages_lie_in_the_users_folder(
    launch: Any, worker: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    first = alone(launch, worker, runtime_dir)
    found = first.until(lambda: [one for one in job.jobs() if one.launcher is None])[0]
    [one] = first.until(lambda: all_step(found, 1, 5))
    assert one.pid == first.process.pid and one.program.startswith("train.py") and one.local_rank == 0
    left = runtime_dir / "horoclone" / found.id
    assert [name.split("-")[1] for name in os.listdir(left)] == [f"{first.process.pid}.metrics"]
    first.process.kill()
    first.process.wait()
    assert os.listdir(left) and found.ranks() == []  # nobody has come to remove it

    second = alone(launch, worker, runtime_dir)
    second.until(lambda: not left.exists() and len(os.listdir(runtime_dir / "horoclone")) == 1)
    again = second.until(lambda: [one for one in job.jobs() if one.launcher is None])[0]
    assert again.id != found.id
    second.until(lambda: all_step(again, 1, 1))
    second.process.send_signal(signal.SIGINT)  # an exception in Python: it ends in order
    second.process.wait(20)
    assert os.listdir(runtime_dir / "horoclone") == []


def test_a_bad_folder_does_not_disturb_the_job(launch: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "file"
    wrong.write_text("")
    program = "import horoclone as hvd; hvd.init(); print(hvd.metrics()['step'], hvd.size())"
    for place in (str(wrong), "/proc/nowhere", "relative"):
        done = launch([sys.executable, "-c", program], env={"XDG_RUNTIME_DIR": place})
        said = [line for line in done.stderr.splitlines() if "HOROCLONE_TEST_RUN" not in line]
        assert "'number': 0" in done.stdout and not said


@pytest.mark.mpi
def test_ranks_of_mpirun_are_one_job(
    launch: Any, open_mpi: Any, worker: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    env = {**open_mpi.env, "XDG_RUNTIME_DIR": str(runtime_dir)}
    started = launch.start([*open_mpi.command(2), sys.executable, worker, "-1"], env=env)
    found = started.until(lambda: [one for one in job.jobs() if one.launcher is None])[0]
    pages = started.until(lambda: all_step(found, 2, 10))
    assert [one.rank for one in pages] == [0, 1] and len({one.pid for one in pages}) == 2
    os.kill(pages[1].pid, signal.SIGKILL)
    started.until(lambda: [one.state for one in found.ranks()][1:] in (["lost"], []))
    started.kill()
    # Rank 0 has said that it ends while its process is still there; who looks after that removes what is left.
    folder = runtime_dir / "horoclone" / found.id
    started.until(lambda: all(one.id != found.id for one in job.jobs()) and not folder.exists())
