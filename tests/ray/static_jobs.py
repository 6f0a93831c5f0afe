"""Bodies of test_executor.py: they run in the process with the cluster (cluster.py), and their functions in workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
from cluster import another_node, here, wait_until
from horovod.ray import RayExecutor

from horoclone import errors
from horoclone.ray import strategy as strategies
from horoclone.ray.worker import BaseHorovodWorker

SETTINGS = RayExecutor.create_settings(timeout_s=60, placement_group_timeout_s=60)


def sums(start: int, by: int = 1) -> tuple[int, int, float]:
    import numpy as np

    import horoclone as hvd

    hvd.init()
    total = float(hvd.allreduce(np.float64(start + by * hvd.rank()), op=hvd.Sum, name="total"))
    return hvd.rank(), hvd.size(), total


class Counter:
    """An executable: lives in the worker from one call to the next."""

    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    def count(self) -> tuple[int, str, str]:
        self.value += self.step
        return self.value, os.environ["MINE"], os.environ["HOROVOD_RANK"]


def everything() -> None:
    executor = RayExecutor(SETTINGS, num_workers=3)
    for _ in range(2):  # start() may follow shutdown()
        executor.start(Counter, [10], {"step": 5}, extra_env_vars={"MINE": 7})
        assert executor.run(sums, [10], {"by": 2}) == [(rank, 3, 36.0) for rank in range(3)]
        assert executor.run(sums, kwargs={"start": 0}) == [(rank, 3, 3.0) for rank in range(3)], (
            "init() again"
        )
        assert executor.execute(Counter.count) == [(15, "7", str(rank)) for rank in range(3)]
        assert executor.execute_single(Counter.count) == (20, "7", "0")
        refs = executor.run_remote(sums, [1])
        assert [total for _, _, total in ray.get(refs)] == [6.0] * 3
        executor.shutdown()
    try:
        executor.run(sums, [0])
    except RuntimeError as error:
        assert "call start() first" in str(error)
    else:
        raise AssertionError("it ran after shutdown()")


def told(values: int) -> list[Any]:
    """What callbacks are called with."""

    def train() -> None:
        from horovod.ray import ray_logger

        for value in range(values):
            ray_logger.log({"value": value, "rank": os.environ["HOROVOD_RANK"]})
        ray_logger.log({"everybody": 1}, chief_only=False)

    heard: list[Any] = []
    executor = RayExecutor(SETTINGS, num_workers=2)
    executor.start()
    executor.run(train, callbacks=[heard.append])
    executor.run(train)  # nobody listens, and nothing fails
    executor.shutdown()
    return heard


def where() -> tuple[str, str, int, int]:
    import horoclone as hvd

    hvd.init()
    return (
        ray.get_runtime_context().get_node_id(),
        os.environ["HOROVOD_LOCAL_RANK"],
        int(os.environ["HOROVOD_CROSS_SIZE"]),
        hvd.rank(),
    )


def colocated() -> None:
    executor = RayExecutor(SETTINGS, num_hosts=2, num_workers_per_host=2)
    executor.start()
    found = executor.run(where)
    executor.shutdown()
    nodes = [node for node, *_ in found]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3], "ranks of a node follow each other"
    assert [local for _, local, _, _ in found] == ["0", "1", "0", "1"] and {
        size for *_, size, _ in found
    } == {2}


def in_the_callers_group() -> None:
    """Inside of a placement group workers are placed there, or in one of their own where that is asked for."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    ray.get(group.ready())

    @ray.remote(num_cpus=0)
    def caller(mine: bool) -> list[Any]:
        executor = RayExecutor(SETTINGS, num_workers=2, use_current_placement_group=mine)
        executor.start()
        try:
            return executor.run(lambda: ray.util.get_current_placement_group().id.hex())
        finally:
            executor.shutdown()

    inside = caller.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0))
    assert set(ray.get(inside.remote(True))) == {group.id.hex()}
    other = set(ray.get(inside.remote(False)))
    assert len(other) == 1 and other != {group.id.hex()}
    remove_placement_group(group)


def gpus_of_a_node() -> None:
    with another_node(2, num_gpus=2):
        executor = RayExecutor(SETTINGS, num_workers=2, use_gpu=True)
        executor.start()
        found = executor.run(lambda: (os.environ["CUDA_VISIBLE_DEVICES"], ray.get_gpu_ids()))
        executor.shutdown()
    assert {seen for seen, _ in found} == {",".join(str(own[0]) for _, own in found)}, found


def hidden_secret() -> int:
    """The job's secret is in no environment and no command line of any process of this machine."""
    executor = RayExecutor(SETTINGS, num_workers=2)
    executor.start()
    executor.run(sums, [0])
    secret = executor.adapter.coordinator.secret
    looked_at = 0
    for path in [*Path("/proc").glob("[0-9]*/environ"), *Path("/proc").glob("[0-9]*/cmdline")]:
        try:
            content = path.read_bytes()
        except OSError:
            continue
        looked_at += 1
        assert secret not in content, path
    variables = executor.run(lambda: dict(os.environ))
    assert all(secret.decode() not in value for one in variables for value in one.values())
    executor.shutdown()
    return looked_at


def killed_actor() -> dict[str, Any]:
    """Rank 1 is killed while rank 0 waits for it: what is raised, and how long that takes."""

    def train(path: str) -> None:
        import numpy as np

        import horoclone as hvd

        hvd.init()
        hvd.allreduce(np.ones(3), name="first")
        if hvd.rank() == 1:
            Path(path).write_text("")
            time.sleep(600)
        hvd.allreduce(np.ones(3), name="second")

    path = Path(f"/tmp/hc-ray-actor-{os.getpid()}")
    executor = RayExecutor(SETTINGS, num_workers=2)
    executor.start()
    place = executor.adapter.strategy.places[1]
    refs = executor.run_remote(train, [str(path)])
    wait_until(path.exists, "the start of the victim")
    path.unlink()
    began = time.monotonic()
    os.kill(place.pid, signal.SIGKILL)
    try:
        executor.adapter._calls.results(refs)
    except errors.PeerLost as error:
        found = {"text": str(error), "rank": error.rank, "cause": type(error.__cause__).__name__}
    found |= {"seconds": time.monotonic() - began, "place": [place.address, place.node_id[:8], place.pid]}
    try:
        executor.run(sums, [0])
    except RuntimeError as error:
        found["after"] = str(error)
    executor.shutdown()
    return found


def killed_node() -> dict[str, Any]:
    """The node of the last rank goes."""

    def train(path: str) -> None:
        import numpy as np

        import horoclone as hvd

        hvd.init()
        hvd.allreduce(np.ones(3), name="first")
        if hvd.rank() == 0:
            Path(path).write_text("")
        while True:
            hvd.allreduce(np.ones(3), name="again")

    path = Path(f"/tmp/hc-ray-node-{os.getpid()}")
    with another_node() as node:
        executor = RayExecutor(SETTINGS, num_hosts=3)
        executor.start()
        places = executor.adapter.strategy.places
        rank = [place.node_id for place in places].index(node.node_id)
        refs = executor.run_remote(train, [str(path)])
        wait_until(path.exists, "the first step")
        began = time.monotonic()
        here.cluster.remove_node(node, allow_graceful=False)
        try:
            executor.adapter._calls.results(refs)
        except errors.PeerLost as error:
            seconds, text, culprit = time.monotonic() - began, str(error), error.rank
        executor.shutdown()
    path.unlink(missing_ok=True)
    return {"text": text, "rank": culprit, "killed": rank, "seconds": seconds, "node": node.node_id[:8]}


def half_dead_group() -> dict[str, Any]:
    """A node goes when the group is reserved and the workers have not started; another node can take its place."""
    made: list[str] = []
    create = strategies.create_placement_group

    def with_a_loss(*args: Any) -> Any:
        found = create(*args)
        made.append(found[0].id.hex())
        if len(made) == 1:
            here.cluster.remove_node(node, allow_graceful=False)
            here.cluster.add_node(num_cpus=2)
        return found

    settings = RayExecutor.create_settings(timeout_s=10, placement_group_timeout_s=60)
    before = set(here.cluster.worker_nodes)
    with another_node() as node:
        executor = RayExecutor(settings, num_hosts=3)
        strategies.create_placement_group = with_a_loss
        try:
            began = time.monotonic()
            executor.start()
            seconds = time.monotonic() - began
            sizes = [size for _, size, _ in executor.run(sums, [0])]
            executor.shutdown()
        finally:
            strategies.create_placement_group = create
            for one in set(here.cluster.worker_nodes) - before:
                here.cluster.remove_node(one)
    return {"groups": len(set(made)), "sizes": sizes, "seconds": seconds}


def stopped_worker() -> dict[str, Any]:
    """Worker 1 is stopped, as by a debugger, when it has started and has not heard its place."""
    wait_for = strategies._wait_for
    stopped: list[Any] = []

    def with_a_stop(workers: Any, limit_s: float) -> Any:
        places = wait_for(workers, limit_s)
        stopped.append(places[1])
        os.kill(places[1].pid, signal.SIGSTOP)
        return places

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=10), num_workers=2)
    strategies._wait_for = with_a_stop
    text = ""
    try:
        executor.start()
    except TimeoutError as error:
        text = str(error)
    finally:
        strategies._wait_for = wait_for
        for place in stopped:
            os.kill(place.pid, signal.SIGCONT)
    executor = RayExecutor(SETTINGS, num_workers=1)
    executor.start()
    assert executor.run(sums, [5]) == [(0, 1, 5.0)], "the cluster works after that"
    executor.shutdown()
    return {"text": text, "pid": stopped[0].pid}


def too_few_resources() -> list[str]:
    texts = []
    settings = RayExecutor.create_settings(timeout_s=10, placement_group_timeout_s=2)
    for size in ({"num_workers": 9}, {"num_hosts": 3}):
        executor = RayExecutor(settings, **size)
        began = time.monotonic()
        try:
            executor.start()
        except TimeoutError as error:
            texts.append(str(error))
            assert time.monotonic() - began < 20
    executor = RayExecutor(SETTINGS, num_workers=1)
    executor.start()
    assert executor.run(sums, [5]) == [(0, 1, 5.0)], "the cluster works after that"
    executor.shutdown()
    return texts


def failing_functions() -> dict[str, str]:
    def all_fail() -> None:
        raise ValueError("a mistake on every rank")

    def one_fails() -> None:
        import numpy as np

        import horoclone as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("only rank 1")
        hvd.allreduce(np.ones(2), name="alone")

    def before_init() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            os._exit(3)
        sums(0)

    def ends() -> None:
        raise SystemExit(4)

    class Broken:
        def __init__(self) -> None:
            raise OSError("no such data")

    texts: dict[str, str] = {}

    def raised(name: str, kind: type[BaseException], call: Any) -> None:
        began = time.monotonic()
        try:
            call()
        except kind as error:
            texts[name] = " ".join([str(error), *getattr(error, "__notes__", ())])
            assert time.monotonic() - began < 30, name
        else:
            raise AssertionError(f"{name}: nothing was raised")

    executor = RayExecutor(SETTINGS, num_workers=2)
    raised("constructor", OSError, lambda: executor.start(Broken))
    executor.start()
    raised("all", ValueError, lambda: executor.run(all_fail))
    raised("generator", TypeError, lambda: executor.run(lambda: (value for value in (5, 6))))
    assert executor.run(sums, [0]) == [(0, 2, 1.0), (1, 2, 1.0)], "the workers can be used after that"
    raised("exit", RuntimeError, lambda: executor.run(ends))
    raised("one", KeyError, lambda: executor.run(one_fails))
    raised("after one", RuntimeError, lambda: executor.run(sums, [0]))
    executor.shutdown()
    executor.start()
    raised("before init", errors.PeerLost, lambda: executor.run(before_init))
    executor.shutdown()
    return texts


def two_jobs() -> None:
    """At once, of different sizes; and a third that has to wait for their resources."""
    first, second = RayExecutor(SETTINGS, num_workers=3), RayExecutor(SETTINGS, num_workers=1)
    first.start()
    second.start()
    refs = first.run_remote(sums, [1]), second.run_remote(sums, [1])
    assert [len(ray.get(one)) for one in refs] == [3, 1]
    settings = RayExecutor.create_settings(timeout_s=30, placement_group_timeout_s=1)
    third = RayExecutor(settings, num_workers=2)
    try:
        third.start()
    except TimeoutError:
        pass
    first.shutdown()
    second.shutdown()
    SETTINGS_LONGER = RayExecutor.create_settings(timeout_s=60, placement_group_timeout_s=60)
    third = RayExecutor(SETTINGS_LONGER, num_workers=2)
    third.start()
    assert len(third.run(sums, [1])) == 2
    third.shutdown()


def names() -> None:
    from horovod.ray import adapter, elastic, elastic_v2, ray_logger, runner, strategy, utils, worker

    import horoclone.ray

    assert runner.RayExecutor is RayExecutor is horoclone.ray.RayExecutor
    assert (
        worker.BaseHorovodWorker is BaseHorovodWorker and strategy.PGStrategy and strategy.ColocatedStrategy
    )
    assert elastic.ElasticRayExecutor and elastic.TestDiscovery and elastic_v2.TestDiscovery
    assert adapter.Adapter and ray_logger.log and utils.map_blocking and runner.MiniSettings
    coordinator = runner.Coordinator(SETTINGS)
    assert coordinator.world_size == 0 and coordinator.hostnames == set()
    for rank, node in enumerate("aabbbc"):
        coordinator.register(f"host-{node}", node, rank)
    assert coordinator.world_size == 6 and coordinator.node_id_string == "a:2,b:3,c:1"
    info = coordinator.finalize_registration()
    assert [one["HOROVOD_LOCAL_RANK"] for one in info.values()] == [0, 1, 0, 1, 2, 0]
    assert [one["HOROVOD_CROSS_SIZE"] for one in info.values()] == [3, 2, 3, 2, 1, 3]
    assert [one["HOROVOD_CROSS_RANK"] for one in info.values()] == [0, 0, 1, 1, 0, 2]
    variables = coordinator.establish_rendezvous(one_host=True)
    assert variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(coordinator.global_rendezv_port)
    assert not any(coordinator.secret.decode() in value for value in variables.values())
    coordinator.close()
