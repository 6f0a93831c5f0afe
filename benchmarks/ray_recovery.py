"""How long an elastic job on Ray stands still when a worker, or a node with two, is killed and there is room elsewhere.

    .venv/engines/bin/python benchmarks/ray_recovery.py [--kills 10] [--json FILE]

A real Ray cluster on this machine: `ray.cluster_utils.Cluster`, each node with a raylet and workers of its own, and
two CPUs. "actor": one of three workers, a process, is killed by SIGKILL; a fourth CPU is free. "node": four workers on
two of three nodes; every process of one node, raylet and workers, is killed at once, and the third node is free. The
function sums an array in NumPy and commits, in steps of about 10 ms; each rank notes its steps in a file, so that Ray
has no part in the clock (CLOCK_MONOTONIC).
"others": until a rank that was not killed did a step without the lost ones. "whole": until every rank of a job of the
old size did a step. "started": until the first new worker has come to its function.

Exit codes: 0, 1 when a job failed or did not become whole within LIMIT_S.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

import machine
import ray
from ray.cluster_utils import Cluster

from horoclone.ray import RayExecutor

LIMIT_S = 60.0
CPUS = 2  # of a node
STEP_S = 0.01
SETTLE_S = 1.5  # of training between two kills


def train(path: str) -> None:
    """Until the file PATH.end is there. A line for each event: time, pid, node, generation, rank, size."""
    import numpy as np

    import horoclone as hvd
    from horoclone.elastic.generation import generation
    from horoclone.elastic.run import run
    from horoclone.elastic.state import ObjectState

    node = ray.get_runtime_context().get_node_id()
    notes = open(path, "a", buffering=1)  # noqa: SIM115 - until the process ends

    def note(*numbers: int) -> None:
        words = (time.monotonic(), os.getpid(), node, *numbers)
        notes.write(" ".join(map(str, words)) + "\n")  # one write: lines of processes do not mix

    note(0, -1, 0)  # the function has begun
    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)

    @run
    def steps(state: Any) -> None:
        noted = 0
        while True:
            over = float(os.path.exists(f"{path}.end"))
            if hvd.allreduce(np.array([over]), op=hvd.Max, name="over")[0]:
                return
            hvd.allreduce(np.ones(1000), name="gradient")
            state.step += 1
            if generation().number != noted:
                noted = generation().number
                note(noted, hvd.rank(), hvd.size())
            state.commit()
            time.sleep(STEP_S)

    steps(state)


class Line:
    """One event of train()."""

    def __init__(self, text: str) -> None:
        at, pid, self.node, generation, rank, size = text.split()
        self.at, self.pid = float(at), int(pid)
        self.generation, self.rank, self.size = int(generation), int(rank), int(size)


class Job:
    """train() on the cluster, in a thread."""

    def __init__(self, path: Path, workers: int) -> None:
        self._path, self._workers = path, workers
        path.touch()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        executor = RayExecutor(
            RayExecutor.create_settings(timeout_s=60), min_workers=1, max_workers=self._workers
        )
        try:
            executor.start()
            executor.run(train, [str(self._path)])
        except BaseException as error:
            self._error = error
        finally:
            executor.shutdown()

    def lines(self) -> list[Line]:
        return [Line(text) for text in self._path.read_text().splitlines()]

    def whole(self, after: int = 0) -> list[Line]:
        """The first step of each rank of a generation of the full size after that one, by rank."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if self._error is not None:
                raise self._error
            generations: dict[int, dict[int, Line]] = {}
            for line in self.lines():
                if line.generation > after and line.size == self._workers:
                    generations.setdefault(line.generation, {})[line.rank] = line
            for ranks in generations.values():
                if len(ranks) == self._workers:
                    return [ranks[rank] for rank in sorted(ranks)]
            time.sleep(0.02)
        raise TimeoutError(f"no generation of {self._workers} ranks within {LIMIT_S:g} s")

    def finish(self) -> None:
        Path(f"{self._path}.end").touch()
        self._thread.join(LIMIT_S)
        if self._error is not None:
            raise self._error


def loss(job: Job, kill: Callable[[list[Line]], set[int]]) -> dict[str, float]:
    """kill(first steps by rank) gives the pids of the workers that it has killed. Seconds from its call on."""
    before = job.whole()
    known = {line.pid for line in job.lines()}
    newest = max(line.generation for line in job.lines())
    before = job.whole(after=newest - 1)
    time.sleep(SETTLE_S)
    killed_s = time.monotonic()
    killed = kill(before)
    after = job.whole(after=newest)
    later = [line for line in job.lines() if line.at > killed_s]
    survivors = [line.at for line in later if line.generation > newest and line.pid not in killed]
    started = min(line.at for line in later if line.pid not in known)
    return {
        "others": min(survivors) - killed_s,
        "started": started - killed_s,
        "whole": max(line.at for line in after) - killed_s,
    }


def kill_actor(before: list[Line]) -> set[int]:
    """The second rank."""
    os.kill(before[1].pid, signal.SIGKILL)
    return {before[1].pid}


def kill_node(cluster: Cluster) -> Callable[[list[Line]], set[int]]:
    """All that runs on a node which has ranks and is not the head; another node comes for it, which stays free."""

    def kill(before: list[Line]) -> set[int]:
        used = {line.node for line in before}
        victim = next(node for node in cluster.worker_nodes if node.node_id in used)
        workers = {line.pid for line in before if line.node == victim.node_id}
        daemons = [one.process.pid for processes in victim.all_processes.values() for one in processes]
        for pid in [*daemons, *workers]:
            os.kill(pid, signal.SIGKILL)
        cluster.remove_node(victim, allow_graceful=False)  # collects what has ended
        return workers

    return kill


def measure(kind: str, kills: int, cluster: Cluster, folder: Path) -> list[dict[str, float]]:
    job = Job(folder / kind, 3 if kind == "actor" else 4)
    found = []
    for number in range(kills):
        spare = cluster.add_node(num_cpus=CPUS) if kind == "node" else None
        found.append(loss(job, kill_actor if spare is None else kill_node(cluster)))
        print(
            kind, number, " ".join(f"{name} {value:.2f} s" for name, value in found[-1].items()), flush=True
        )
    job.finish()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="of each kind (10)")
    parser.add_argument("--kinds", nargs="+", default=["actor", "node"], choices=["actor", "node"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = machine.load_before(2.0)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    cluster.add_node(num_cpus=CPUS)
    ray.init(address=cluster.address, logging_level="WARNING")
    found = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind in arguments.kinds:
                found[kind] = measure(kind, arguments.kills, cluster, Path(folder))
    except (TimeoutError, RuntimeError) as error:
        print(f"ray_recovery: {error}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
        cluster.shutdown()
    for kind, losses in found.items():
        for name in losses[0]:
            values = sorted(one[name] for one in losses)
            print(
                f"{kind} {name:8} median {statistics.median(values):5.2f} s, {values[0]:.2f} to {values[-1]:.2f} s"
            )
    print(f"before it began, others kept {load:.2f} cores busy")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine.facts(), "load": load, "found": found}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
