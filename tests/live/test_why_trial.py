"""Twelve causes for a late rank, injected on one of four ranks that train with torch, and clean runs, without any."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from namespaces import Switched, inside
from worker_pool import say

import horoclone as hvd

pytest.importorskip("torch")

LOST_S = 0.03
CAUSES = (
    "data", "forward", "backward", "optimizer", "own code", "checkpoint", "gc", "faults", "throttled", "delayed",
    "stopped", "link",
)  # fmt: skip
LONGEST_S = 60.0


def train(cause, culprit, folder, seconds):
    """Trains a small network until every rank was measured for so many seconds; then rank 0 says who is late and why,
    and each rank what the measuring has cost."""
    import torch

    import horoclone.torch as hvt

    torch.set_num_threads(1)
    hvd.init()
    mine = cause if hvd.rank() == culprit else ""

    class Samples(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                if mine == "data":
                    time.sleep(LOST_S / 4)
                yield torch.randn(64)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            # Some milliseconds of computing in a step; of little, nobody takes much away.
            self.times = {"link": 0, "delayed": 25}.get(cause, 2)
            wide = 512 if cause == "link" else 64
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, wide), torch.nn.Linear(wide, 512))
            self.work = torch.randn(400, 400)

        def forward(self, x):
            if mine == "forward":
                time.sleep(LOST_S)
            for _ in range(self.times):
                self.work @ self.work
            return self.layers(x).square().mean()

    net = Net()
    if mine == "backward":
        net.layers[0].weight.register_hook(lambda grad: time.sleep(LOST_S))
    inner = torch.optim.SGD(net.parameters(), lr=0.001)
    if mine == "optimizer":
        inner.register_step_post_hook(lambda *_: time.sleep(LOST_S))
    optimizer = hvt.DistributedOptimizer(inner, net.named_parameters())
    if mine == "optimizer":
        optimizer.register_step_post_hook(lambda *_: time.sleep(LOST_S))
    hvt.broadcast_parameters(net.state_dict(), 0)
    kept = [[] for _ in range(300_000)] if mine == "gc" else None
    cold = None
    if mine == "faults":
        file = open(f"{folder}/cold", "rb")  # noqa: SIM115 - until this process ends
        cold = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        cold.madvise(mmap.MADV_RANDOM)
    say(pid=os.getpid())
    began, step, at = time.monotonic(), 0, 0
    for batch in torch.utils.data.DataLoader(Samples(), batch_size=4):
        optimizer.zero_grad()
        net(batch).backward()
        optimizer.step()
        step += 1
        if mine == "own code":
            time.sleep(LOST_S)
        elif mine == "checkpoint":
            torch.save(torch.ones(4_000_000), f"{folder}/saved")
        elif mine == "gc":
            gc.collect()
        elif cold is not None:
            cold.madvise(mmap.MADV_DONTNEED)  # what is mapped would stay in memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for _ in range(200):
                at = (at + 1_234_567 * 4096) % len(cold)
                assert cold[at] == 120
        over = time.monotonic() - began > seconds
        if step % 5 == 0 and hvd.allreduce(int(over), name="over", op=hvd.Sum) == hvd.size():
            break
    del kept
    if hvd.rank() == 0:
        say(why=hvd.metrics()["why"], steps=step)
    (thread,) = (one.native_id for one in threading.enumerate() if one.name == "hc-why")
    ticks = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(") ")[2].split()[11:13]
    say(cost=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began))
    hvd.barrier()  # so that the metrics of all were there
    hvd.shutdown()


@contextlib.contextmanager
def injected(cause, pids, culprit, hosts):
    """What is done to a rank from outside."""
    with contextlib.ExitStack() as stack:
        if cause == "throttled":
            stack.enter_context(_quota(pids[culprit], 0.04))
        elif cause == "delayed":
            for rank, pid in enumerate(pids):
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(task), {0 if rank == culprit else 1})
            for _ in range(24):  # more than three ranks take from one another on the other processor
                busy = subprocess.Popen(
                    ["taskset", "-c", "0", "sh", "-c", "while :; do :; done"],
                    start_new_session=True,  # Linux shares processors among sessions first
                )
                stack.callback(busy.wait)
                stack.callback(busy.kill)
        elif cause == "stopped":
            over = threading.Event()

            def stop_now_and_then():
                while not over.wait(0.6):
                    os.kill(pids[culprit], signal.SIGSTOP)
                    time.sleep(0.4)
                    os.kill(pids[culprit], signal.SIGCONT)

            thread = threading.Thread(target=stop_now_and_then)
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
        elif cause == "link":
            shaper = [
                "tc",
                "qdisc",
                "add",
                "dev",
                "cable0",
                "root",
                "tbf",
                "rate",
                "100mbit",
                "burst",
                "64k",
                "latency",
                "200ms",
            ]
            done = inside(hosts.names[culprit], *shaper)
            if done.returncode:
                pytest.skip(f"no cable can be made slow here: {done.stderr}")
        yield


@contextlib.contextmanager
def _quota(pid, share):
    """The process may have this share of a processor, by a cgroup of version 2 or 1."""
    two = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folder = Path("/sys/fs/cgroup" if two else "/sys/fs/cgroup/cpu", f"hc-{os.getpid()}")
    period_us = 100_000
    try:
        folder.mkdir()
        if two:
            (folder / "cpu.max").write_text(f"{int(share * period_us)} {period_us}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(period_us))
            (folder / "cpu.cfs_quota_us").write_text(str(int(share * period_us)))
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"no cgroup with a CPU quota can be made here: {error}")
    try:
        yield
    finally:
        (folder.parent / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


def measured(pool, opened, folder, runtime_dir, cause="", culprit=-1, seconds=9.0):
    """(what rank 0 says, the dearest rank's cost as a share of its time)."""
    env = {"HOROCLONE_WHY": "1", "XDG_RUNTIME_DIR": str(runtime_dir), "OMP_NUM_THREADS": "1"}
    hosts, places, addresses = None, None, ["127.0.0.1:0"]
    if cause == "link":
        hosts = opened(Switched(4))
        places, addresses = hosts.names, [f"{hosts.addresses[0]}:0"]
    arguments = {"cause": cause, "culprit": culprit, "folder": str(folder), "seconds": seconds}
    team = pool(train, 4, env=env, namespaces=places, addresses=addresses, **arguments)
    pids = [team.wait_for(rank, "pid", LONGEST_S)["pid"] for rank in range(4)]
    with injected(cause, pids, culprit, hosts):
        said = team.wait_for(0, "why", LONGEST_S)["why"]
    return said, max(team.wait_for(rank, "cost", LONGEST_S)["cost"] for rank in range(4))


@pytest.fixture
def runtime_dir():
    made = Path("/dev/shm", f"hc-why-{os.getpid()}")
    made.mkdir(mode=0o700)
    yield made
    subprocess.run(["rm", "-rf", made], check=True)


@pytest.mark.long(260)
@pytest.mark.timeout(1200)
@pytest.mark.netns
def test_of_twelve_injected_causes_at_least_eleven_are_named(
    torch_worker_pool, opened, tmp_path, runtime_dir
):
    with open(tmp_path / "cold", "wb") as file:
        for _ in range(256):
            file.write(b"x" * (1 << 20))
        file.flush()
        os.fsync(file.fileno())
    named, chosen = {}, os.environ.get("HC_WHY_CAUSES", "").split(",")
    for number, cause in enumerate(CAUSES):
        if chosen == [""] or cause in chosen:
            culprit = (number + 1) % 4
            said, _ = measured(torch_worker_pool, opened, tmp_path, runtime_dir, cause, culprit)
            named[cause] = [(one["rank"], one["cause"]) for one in said] == [(culprit, cause)] or said
            print(cause, culprit, [(one["rank"], one["text"]) for one in said], flush=True)
    wrong = {cause: said for cause, said in named.items() if said is not True}
    assert len(wrong) <= 1, wrong


@pytest.mark.long(260)
@pytest.mark.timeout(1200)
def test_of_twenty_clean_runs_none_is_called_late_and_measuring_costs_little(
    torch_worker_pool, tmp_path, runtime_dir
):
    costs = []
    for number in range(int(os.environ.get("HC_WHY_RUNS", "20"))):
        said, cost = measured(torch_worker_pool, None, tmp_path, runtime_dir)
        print(number, said, f"{cost:.3%}", flush=True)
        assert said == [], number
        costs.append(cost)
    assert sorted(costs)[len(costs) // 2] < 0.005, costs
