"""Behaviours of Horovod that scripts rely on and that are easy to miss, one test for each.

Those of TensorFlow are with its binding; the alias has a file of its own (test_alias.py), and so have the errors.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time

import numpy as np
import pytest
from world import ranks

import horoclone as hvd
from horoclone import ops

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def wait_for(path, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody has made {path}"
        time.sleep(0.005)


@ranks(2)
def test_1_nothing_completes_inside_the_call_that_submits_it(tmp_path):
    looked = tmp_path / "rank 0 has looked"
    if hvd.rank() == 1:
        wait_for(looked)
    handles = [hvd.allreduce_async(np.full(64, i), name=f"burst{i}", op=hvd.Sum) for i in range(50)]
    if hvd.rank() == 0:
        assert [hvd.poll(handle) for handle in handles] == [False] * 50
        looked.touch()
    assert [int(hvd.synchronize(handle)[0]) for handle in handles] == [2 * i for i in range(50)]


@ranks(1)
def test_1_also_a_process_alone_is_seen_working():
    deadline = time.monotonic() + 30
    seen = set()
    while False not in seen:
        assert time.monotonic() < deadline, "every operation was done as soon as it was submitted"
        handle = hvd.allreduce_async(np.ones(100_000))
        seen.add(hvd.poll(handle))
        hvd.synchronize(handle)


@ranks(2)
def test_2_a_duplicate_name_is_refused_and_the_pending_one_completes_though_nobody_waits(tmp_path):
    done = tmp_path / "rank 0 has seen it complete"
    if hvd.rank() == 0:
        first = hvd.allreduce_async(np.ones(3), name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match="twice"):
            hvd.allreduce_async(np.ones(3), name="twice", op=hvd.Sum)
        hvd.barrier()
        deadline = time.monotonic() + 30
        while not hvd.poll(first):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        done.touch()
    else:
        hvd.barrier()
        hvd.allreduce_async(np.ones(3), name="twice", op=hvd.Sum)  # and never synchronised
        wait_for(done)
    assert hvd.allreduce(np.ones(1), name="twice", op=hvd.Sum).tolist() == [2]


@ranks(3, init=False)
def test_3_a_barrier_of_one_set_does_not_wait_for_another_sets_late_rank(tmp_path):
    late, prompt = hvd.ProcessSet([0, 2]), hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[late, prompt])
    passed = tmp_path / "the barrier of 0 and 1 is over"
    if hvd.rank() == 2:
        wait_for(passed)
        hvd.barrier(late)
    elif hvd.rank() == 0:
        pending = hvd.allreduce_async(np.ones(1), name="late", op=hvd.Sum)  # of everybody, too
        hvd.barrier(prompt)
        passed.touch()
        hvd.barrier(late)
    else:
        hvd.barrier(prompt)
    if hvd.rank() != 0:
        pending = hvd.allreduce_async(np.ones(1), name="late", op=hvd.Sum)
    assert hvd.synchronize(pending).tolist() == [3]


@ranks(2, 3)
def test_4_after_a_mismatch_every_rank_goes_on_and_unnamed_operations_still_match():
    for turn in range(5):
        with pytest.raises(hvd.Mismatch):
            hvd.allreduce(np.ones(2 if hvd.rank() else 3), name=f"bad{turn}")
        with pytest.raises(hvd.Mismatch):
            hvd.allreduce(np.ones(2 if hvd.rank() else 3))  # unnamed
        assert hvd.allreduce(np.array([turn]), op=hvd.Sum).tolist() == [turn * hvd.size()]
        assert hvd.allgather(np.array([hvd.rank()])).tolist() == list(range(hvd.size()))


def uneven_steps():
    """Rank r takes r + 2 steps; whoever has joined counts as the neutral element of each reduction."""
    me, size = hvd.rank(), hvd.size()
    value = me + 2.0
    for step in range(me + 2):
        present = [float(rank + 2) for rank in range(size) if step < rank + 2]
        expected = {
            ops.Sum: sum(present), ops.Average: sum(present) / size, ops.Min: min(present), ops.Max: max(present),
            ops.Product: float(np.prod(present)),
        }  # fmt: skip
        for op, result in expected.items():
            found = hvd.allreduce(
                np.array([value]), op=op, name=f"{op}"
            )  # one name each: cached from the second on
            assert found[0] == pytest.approx(result, rel=1e-12), (step, op, found)
            assert hvd.allreduce(np.array([-int(value)]), op=ops.Max)[0] == -min(present)  # unnamed, integers
    return hvd.join()


@pytest.mark.parametrize("capacity", ["1024", "0"])
@ranks(3, init=False)
def test_5_joined_ranks_are_neutral_and_all_learn_the_same_last_rank(capacity):
    os.environ["HOROVOD_CACHE_CAPACITY"] = capacity
    hvd.init()
    for _ in range(2):
        assert hvd.allgather(np.array([uneven_steps()])).tolist() == [2, 2, 2]
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
            hvd.allgather(np.ones(1))
        with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
            hvd.broadcast(np.ones(1), 0)
    assert hvd.join() == 0


@ranks(2, 3)
def test_6_sums_are_exact_each_scaled_integer_and_every_average_truncates_toward_zero():
    me, size = hvd.rank(), hvd.size()
    big = 2**40 + me
    assert hvd.allreduce(np.array([big]), op=hvd.Sum).tolist() == [sum(2**40 + rank for rank in range(size))]
    scaled = hvd.allreduce(np.array([10, -10], np.int32), op=hvd.Sum, prescale_factor=0.25)
    assert scaled.tolist() == [2 * size, -2 * size]  # every rank truncates its own 2.5
    negative = sum(-(rank + 1) for rank in range(size))
    assert hvd.allreduce(np.array([-(me + 1)])).tolist() == [int(negative / size)]
    halves = hvd.allreduce(
        np.full(3, 2048 + me, np.float16), op=hvd.Sum
    )  # float16 has no 2049: no step may round
    exact = np.float32(sum(float(np.float16(2048 + rank)) for rank in range(size)))
    assert halves.dtype == np.float16 and halves[0] == np.float16(exact)
    assert hvd.allreduce(np.float32([me + 0.5]), op=hvd.Sum)[0] == sum(rank + 0.5 for rank in range(size))


@ranks(2, init=False)
def test_8_ids_are_used_again_and_variables_may_be_set_between_import_and_init():
    hvd.init()
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.add_process_set([0])
    hvd.shutdown()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # horoclone was imported long ago
    hvd.init()
    one = hvd.add_process_set([0])
    two = hvd.add_process_set([1])
    assert (one.process_set_id, two.process_set_id) == (1, 2)
    assert hvd.remove_process_set(one)
    assert hvd.add_process_set([0]).process_set_id == 1
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([0, 1])


@ranks(2, init=False)
def test_8_the_timeline_variable_is_read_by_init(tmp_path):
    path = tmp_path / "trace.json"
    os.environ["HOROVOD_TIMELINE"] = str(path)
    hvd.init()
    hvd.allreduce(np.ones(4), name="traced")
    hvd.shutdown()
    if int(os.environ["HOROCLONE_RANK"]) == 0:
        assert "traced" in path.read_text()


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
for _ in range(200):
    life()
after = numbers()
assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2] + 8, (before, after)
os.write(1, b"flat\\n")
"""


@pytest.mark.parametrize("launcher", ["ours", "torchrun", "open_mpi", "mpich"])
def test_9_two_hundred_lives_in_one_process_leave_nothing_behind_under_every_launcher(
    launch, request, tmp_path, launcher
):
    script, env = tmp_path / "lives.py", {}
    script.write_text(LIVES)
    command = [sys.executable, str(script)]
    if launcher == "ours":
        command = [sys.executable, "-m", "horoclone.launch", "-np", "2", *command]
    elif launcher == "torchrun":
        pytest.importorskip("torch")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
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


@needs_torch
@ranks(2)
def test_11_the_wrapped_optimizer_has_its_classes_name_and_is_an_instance_of_it():
    import torch

    import horoclone.torch as hvd

    class Mine(torch.optim.SGD):
        def answer(self):
            return 42

    parameter = torch.nn.Parameter(torch.ones(2))
    for kind in (torch.optim.SGD, torch.optim.Adam, Mine):
        wrapped = hvd.DistributedOptimizer(kind([parameter], lr=0.1), named_parameters=[("p", parameter)])
        assert isinstance(wrapped, kind) and type(wrapped) is not kind
        assert type(wrapped).__name__ == kind.__name__ and issubclass(type(wrapped), torch.optim.Optimizer)
    assert wrapped.answer() == 42


@needs_torch
def test_12_the_alias_gives_the_same_module_objects(launch, tmp_path):
    names = [
        "torch",
        "torch.mpi_ops",
        "torch.elastic",
        "common",
        "common.util",
        "common.exceptions",
        "common.process_sets",
        "common.elastic",
        "common.basics",
        "runner",
        "data",
    ]
    program = f"""
import horoclone.horovod_alias as alias
alias.install()
import importlib, horoclone, horovod
assert horovod.__version__ == horoclone.HOROVOD_VERSION and callable(horovod.run)
for name in {names!r}:
    assert importlib.import_module("horovod." + name) is importlib.import_module("horoclone." + name), name
print("same")
"""
    assert launch([sys.executable, "-c", program]).stdout == "same\n"
