"""Rows of the fault table that need a machine that misbehaves: a clock that jumps, threads and memory that cannot be had.

What misbehaves is the C library of the rank: a shim, compiled here and preloaded, stands in front of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
// The clock of the wall jumps an hour ahead, then two hours back, and so on, with each quarter of a second.
static long jump(long seconds, long nanoseconds) {
  return (seconds * 4 + nanoseconds / 250000000) % 2 ? 3600 : -7200;
}
int clock_gettime(clockid_t clock, struct timespec* at) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, at);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) at->tv_sec += jump(at->tv_sec, at->tv_nsec);
  return code;
}
int gettimeofday(struct timeval* restrict at, void* restrict zone) {
  (void)zone;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""

THREADS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
// Of rank 1 no thread can be made any more once the file named by HC_NO_THREADS is there.
int pthread_create(pthread_t* thread, const pthread_attr_t* with, void* (*run)(void*), void* of) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_create");
  const char* path = getenv("HC_NO_THREADS");
  const char* rank = getenv("HOROVOD_RANK");
  if (path && rank && rank[0] == '1' && access(path, F_OK) == 0) return EAGAIN;
  return real(thread, with, run, of);
}
"""

JUMPING = """
import time
import numpy as np, horoclone as hvd
hvd.init()
seen, end = set(), time.monotonic() + 2.5
while True:
    late = hvd.allreduce(np.array([time.monotonic() > end]), op=hvd.Min, name="late")[0]
    assert hvd.allreduce(np.full(1000, 2), op=hvd.Sum, name="w").tolist() == [4] * 1000
    seen.add(int(time.time()) // 1000)
    time.sleep(0.01)
    if late:
        break
hvd.shutdown()
print("saw", len(seen), "hours")
"""

WITHOUT_THREADS = """
import os, sys
import numpy as np, horoclone as hvd
if os.environ["HOROVOD_RANK"] == "1":
    open(os.environ["HC_NO_THREADS"], "w").close()
try:
    hvd.init()
except (hvd.HorovodInternalError, RuntimeError) as error:
    print("refused:", type(error).__name__, error, flush=True)
    sys.exit(0)
print("started", flush=True)
"""


@pytest.fixture
def shim(tmp_path: Path):
    """shim(source) compiles a preloaded library and gives its path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the shims are built by the tests")

    def build(source: str) -> Path:
        code, made = tmp_path / "shim.c", tmp_path / "shim.so"
        code.write_text(source)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(code), "-ldl"], check=True, timeout=60
        )
        return made

    return build


def horoclonerun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "horoclone.launch", "-np", "2", *arguments]


@pytest.mark.parametrize("shared", ["1", pytest.param("0", marks=pytest.mark.long(6))], ids=["shared", "tcp"])
def test_a_wall_clock_that_jumps_disturbs_nothing(launch, shim, shared) -> None:
    """Every limit counts the monotonic clock: an hour ahead and two back are no Timeout and no lost rank."""
    env = {
        "HOROCLONE_SHARED_MEMORY": shared,
        "HOROCLONE_LIVENESS_PROBE_S": "0.2",
        "HOROCLONE_LIVENESS_WARN_S": "1",
        "HOROCLONE_LIVENESS_ERROR_S": "20",
    }
    library = shim(CLOCK)
    inner = ["env", f"LD_PRELOAD={library}", sys.executable, "-c", JUMPING]
    done = launch(horoclonerun(*inner), env=env, timeout_s=100)
    assert done.stdout.count("saw ") == 2 and "saw 1 hours" not in done.stdout, done.output
    assert "not responding" not in done.output, done.output


def test_a_rank_that_can_make_no_thread_says_so_and_nobody_hangs(launch, shim, tmp_path) -> None:
    library = shim(THREADS)
    inner = ["env", f"LD_PRELOAD={library}", sys.executable, "-c", WITHOUT_THREADS]
    env = {"HC_NO_THREADS": os.fspath(tmp_path / "none"), "HOROCLONE_START_TIMEOUT_S": "60"}
    done = launch(horoclonerun(*inner), env=env, timeout_s=100, check=False)
    assert "started" not in done.stdout, done.output
    assert "refused:" in done.stdout and "thread" in done.stdout, done.output
    assert done.returncode >= 0 and done.seconds < 60, done.output
