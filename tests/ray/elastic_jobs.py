"""Bodies of test_elastic.py: they run in the process with the cluster (cluster.py), and their functions in workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray
from cluster import another_node, here, wait_until
from horovod.ray import ElasticRayExecutor, RayExecutor
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horoclone.ray import nodes

SETTINGS = RayExecutor.create_settings(timeout_s=60)


class Board:
    """An actor: what workers say while they train, and what they are told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.is_over = False

    def say(self, line: dict[str, Any]) -> bool:
        self.lines.append(line)
        return self.is_over

    def read(self) -> list[dict[str, Any]]:
        return self.lines

    def end(self) -> None:
        self.is_over = True


def train(board: Any, pause_s: float = 0.01) -> tuple[int, int, int]:
    """Steps until the board says that it is over; each is checked. (rank, size, step) at the end."""
    import numpy as np

    import horoclone as hvd
    from horoclone.elastic.generation import generation
    from horoclone.elastic.run import run
    from horoclone.elastic.state import ObjectState

    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0)

    @run
    def steps(state: Any) -> tuple[int, int, int]:
        is_first, over = True, 0.0
        while True:
            value = hvd.allreduce(np.array([hvd.rank() + 1.0, over]), op=hvd.Sum, name="step")
            assert value[0] == hvd.size() * (hvd.size() + 1) / 2, value
            if value[1]:
                return hvd.rank(), hvd.size(), state.step
            state.step += 1
            if is_first or hvd.rank() == 0:
                line = {
                    "generation": generation().number, "rank": hvd.rank(), "size": hvd.size(), "pid": os.getpid(),
                    "step": state.step, "at": time.time(), "node": ray.get_runtime_context().get_node_id(),
                }  # fmt: skip
                over = float(ray.get(board.say.remote(line)))
                is_first = False
            state.commit()
            time.sleep(pause_s)

    return steps(state)


class Job:
    """train() on the cluster, in a thread, with its board."""

    def __init__(self, **wishes: Any) -> None:
        here_it_stays = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here_it_stays).remote()
        self.values: Any = None
        self.error: BaseException | None = None
        self._wishes = wishes
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        executor = RayExecutor(SETTINGS, **self._wishes)
        try:
            executor.start()
            self.values = executor.run(train, [self.board])
        except BaseException as error:
            self.error = error
        finally:
            executor.shutdown()

    def lines(self, after: int = 0) -> list[dict[str, Any]]:
        return [line for line in ray.get(self.board.read.remote()) if line["generation"] > after]

    def of_size(self, size: int, after: int = 0) -> dict[int, dict[str, Any]]:
        """The first line of each rank of a generation of this size after that one, when there are so many."""

        def found() -> dict[int, dict[str, Any]]:
            ranks: dict[int, dict[int, dict[str, Any]]] = {}
            for line in self.lines(after):
                if line["size"] == size:
                    ranks.setdefault(line["generation"], {}).setdefault(line["rank"], line)
            return dict(sorted(next((one for one in ranks.values() if len(one) == size), {}).items()))

        def there() -> bool:
            assert self.error is None, self.error
            return bool(found())

        wait_until(there, f"a generation of {size} ranks")
        return found()

    def finish(self) -> Any:
        ray.get(self.board.end.remote())
        self._thread.join(60)
        assert not self._thread.is_alive(), "the job did not end"
        ray.kill(self.board)
        if self.error is not None:
            raise self.error
        return self.values


def loss(first: dict[int, Any], job: Job, killed_s: float) -> dict[str, Any]:
    """How long it took from there to the first step of the others, and to a job of the old size again."""
    generation = first[0]["generation"]
    whole = job.of_size(len(first), after=generation)
    survivors = job.lines(generation)
    return {
        "others": min(line["at"] for line in survivors) - killed_s,
        "whole": min(line["at"] for line in whole.values()) - killed_s,
        "pids": [line["pid"] for line in whole.values()],
        "sizes": sorted({line["size"] for line in survivors}),
    }


def killed_actor() -> dict[str, Any]:
    """One of three workers, with a fourth place free."""
    job = Job(min_workers=2, max_workers=3)
    first = job.of_size(3)
    time.sleep(1)  # steps
    killed_s = time.time()
    os.kill(first[1]["pid"], signal.SIGKILL)
    found = loss(first, job, killed_s)
    return {**found, "before": [line["pid"] for line in first.values()], "values": job.finish()}


def time_of_death(pids: list[int]) -> float:
    """When the first of these processes is gone, a zombie counts as gone."""
    while True:
        for pid in pids:
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    return time.time()
            except OSError:
                return time.time()
        time.sleep(0.002)


def killed_node() -> dict[str, Any]:
    """Of four nodes, one of which is a spare, one goes that holds a rank."""
    with another_node(2) as third:
        job = Job(min_workers=2, max_workers=4)
        first = job.of_size(4)
        used = {line["node"] for line in first.values()}
        victim = next(one for one in here.cluster.worker_nodes if one.node_id in used)
        time.sleep(1)
        pids = [line["pid"] for line in first.values() if line["node"] == victim.node_id]
        died_s: list[float] = []  # workers notice the end of their raylet up to a second later
        watcher = threading.Thread(target=lambda: died_s.append(time_of_death(pids)))
        watcher.start()
        here.cluster.remove_node(victim, allow_graceful=False)
        watcher.join(60)
        found = loss(first, job, died_s[0])
        values = job.finish()
        if victim is not third:
            here.cluster.add_node(num_cpus=2)
    return {**found, "lost": sum(line["node"] == victim.node_id for line in first.values()), "values": values}


def grows_and_shrinks() -> dict[str, Any]:
    """A node comes; then it is drained, and its workers leave at a commit, which costs no step."""
    job = Job(min_workers=2)
    before = job.of_size(4)
    with another_node(1) as node:
        grown = job.of_size(5, after=before[0]["generation"])
        came = next(line for line in grown.values() if line["node"] == node.node_id)
        client = ray._raylet.GcsClient(address=here.cluster.gcs_address)
        reason = ray.core.generated.autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + 60) * 1000)
        assert client.drain_node(node.node_id, reason, "it is about to go", deadline_ms)[0]
        wait_until(lambda: node.node_id in nodes.draining(), "the node drains")
        shrunk = job.of_size(4, after=grown[0]["generation"])
        values = job.finish()
    steps = [line["step"] for line in job_steps(shrunk, grown)]
    return {"came": came["rank"], "pids": [
        [line["pid"] for line in one.values()] for one in (before, shrunk)
    ], "values": values, "steps": steps}  # fmt: skip


def job_steps(*generations: dict[int, Any]) -> list[Any]:
    return [one[0] for one in generations]


def failing() -> dict[str, str]:
    texts = {}

    def before_init() -> None:
        raise OSError("no such data")

    def after_init() -> None:
        import horoclone as hvd

        hvd.init()
        raise KeyError("a mistake")

    def dies() -> None:
        os._exit(9)

    for function in (before_init, after_init, dies):
        executor = RayExecutor(SETTINGS, min_workers=2, max_workers=2)
        executor.start()
        began = time.monotonic()
        try:
            executor.run(function)
        except RuntimeError as error:
            texts[function.__name__] = str(error)
            assert time.monotonic() - began < 60, function
        executor.shutdown()
    return texts


def too_few_slots() -> str:
    began = time.monotonic()
    executor = RayExecutor(SETTINGS, min_workers=9, elastic_timeout=2)
    try:
        executor.start()
    except Exception as error:
        assert time.monotonic() - began < 20
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it has started")


def busy_cluster() -> dict[str, Any]:
    """Another job holds all but one CPU: what there is is used, and more when it is free."""
    other = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=3)
    other.start()
    job = Job(min_workers=1, max_workers=2, elastic_timeout=60)
    alone = job.of_size(1)
    other.shutdown()
    both = job.of_size(2, after=alone[0]["generation"])
    return {"values": job.finish(), "sizes": [len(alone), len(both)]}


def older_executor() -> dict[str, Any]:
    def told() -> tuple[int, str]:
        from horovod.ray import ray_logger

        import horoclone as hvd

        hvd.init()
        ray_logger.log({"size": hvd.size()})
        return hvd.rank(), os.environ["MINE"]

    heard: list[Any] = []
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, timeout_s=60)
    executor = ElasticRayExecutor(settings, env_vars={"MINE": "yes"})
    executor.start()
    values = executor.run(told, callbacks=[heard.append])
    executor.shutdown()
    return {"values": values, "heard": heard}


def hidden_secret() -> int:
    """While an elastic job runs its secret is in no environment; found by what the job's server knows."""
    from horoclone.launch import supervisor

    made: list[bytes] = []
    serve = supervisor.Supervisor.serve

    def noted(self: Any, secret: bytes, *args: Any) -> Any:
        made.append(secret)
        return serve(self, secret, *args)

    supervisor.Supervisor.serve = noted  # type: ignore[method-assign]
    try:
        job = Job(min_workers=2, max_workers=2)
        job.of_size(2)
        secret = made[0]
        looked_at = 0
        for path in [*Path("/proc").glob("[0-9]*/environ"), *Path("/proc").glob("[0-9]*/cmdline")]:
            try:
                assert secret not in path.read_bytes(), path
                looked_at += 1
            except OSError:
                pass
        job.finish()
    finally:
        supervisor.Supervisor.serve = serve  # type: ignore[method-assign]
    return looked_at


def discovery() -> dict[str, Any]:
    from horovod.ray import elastic, elastic_v2

    found = {
        "all": elastic.RayHostDiscovery().find_available_hosts_and_slots(),
        "large": elastic_v2.RayHostDiscovery(cpus_per_worker=2).find_available_hosts_and_slots(),
        "too large": elastic_v2.RayHostDiscovery(cpus_per_worker=3).find_available_hosts_and_slots(),
        "gpu": elastic.RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots(),
    }
    changing = elastic.TestDiscovery(1, 2, 0.0, verbose=False)
    found["changing"] = [len(changing.find_available_hosts_and_slots()) for _ in range(20)]
    return found
