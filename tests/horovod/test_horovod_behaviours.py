"""Behaviours of Horovod that scripts rely on and that are easy to miss, one test for each.

Those of TensorFlow are with its binding; the alias has a file of its own (test_alias.py), and so have the errors.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
from world import ranks

import horoclone as hvd


@ranks(1)
def test_1_also_a_process_alone_is_seen_working():
    deadline = time.monotonic() + 30
    seen = set()
    while False not in seen:
        assert time.monotonic() < deadline, "every operation was done as soon as it was submitted"
        handle = hvd.allreduce_async(np.ones(100_000))
        seen.add(hvd.poll(handle))
        hvd.synchronize(handle)


LIVES = """
import os, sys
import numpy as np
import horoclone as hvd

def numbers():
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return len(os.listdir("/proc/self/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]) // 1024

def life():
    hvd.init()
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
    hvd.shutdown()

for _ in range(20):
    life()
before = numbers()
for _ in range(int(sys.argv[1])):
    life()
after = numbers()
assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2] + 8, (before, after)
os.write(1, b"flat\\n")
"""


# Memory that a life leaves shows after many; how ranks meet, which alone depends on the launcher, leaves descriptors and threads.
@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("launcher", "lives"), [("ours", 200), ("torchrun", 30), ("open_mpi", 30), ("mpich", 30)]
)
def test_9_two_hundred_lives_in_one_process_leave_nothing_behind_under_every_launcher(
    launch, request, tmp_path, launcher, lives
):
    script, env = tmp_path / "lives.py", {}
    script.write_text(LIVES)
    words = [str(script), str(lives)]
    command = [sys.executable, *words]
    if launcher == "ours":
        command = [sys.executable, "-m", "horoclone.launch", "-np", "2", *command]
    elif launcher == "torchrun":
        pytest.importorskip("torch")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words]
    else:
        mpi = request.getfixturevalue(launcher)
        command, env = [*mpi.command(2), *command], mpi.env
    done = launch(command, env=env, timeout_s=150)
    assert done.stdout.split().count("flat") + done.stdout.split().count("[0]flat") == 2, done.output


PLACEMENT = """
import os
import horoclone as hvd
assert "HOROVOD_RANK" not in os.environ
hvd.init()
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
size = os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE"))
assert (hvd.rank(), hvd.size()) == (int(rank), int(size)), (hvd.rank(), rank)
assert hvd.local_rank() == int(rank) and hvd.local_size() == 2 and hvd.cross_size() == 1
assert hvd.mpi_built() is True and hvd.mpi_enabled() is True and hvd.gloo_built() is True
assert hvd.gloo_enabled() is False and hvd.mpi_threads_supported() in (True, False)
os.write(1, b"placed\\n")
"""


@pytest.mark.mpi
@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["open_mpi", "mpich"])
def test_10_under_mpirun_rank_and_size_are_those_of_mpi(launch, request, name):
    pytest.importorskip("mpi4py")
    mpi = request.getfixturevalue(name)
    done = launch([*mpi.command(2), sys.executable, "-c", PLACEMENT], env=mpi.env, timeout_s=60)
    assert done.stdout.split().count("placed") == 2, done.output


@ranks(2)
def test_10_without_mpi_the_same_functions_say_so():
    assert hvd.mpi_enabled() is False and hvd.gloo_enabled() is True and hvd.gloo_built() is True
    with pytest.raises(ValueError, match="MPI is not in use"):
        hvd.mpi_threads_supported()
