"""Bodies of test_interop.py: Ray Train, Ray Tune and Ray Client."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import ray
from cluster import wait_until
from horovod.ray import RayExecutor


def train_on(strategy: str, folder: str) -> list[Any]:
    """Two workers of a TorchTrainer, on one node or on two, which say what they have summed up."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    @ray.remote(num_cpus=0)
    class Heard:
        def __init__(self) -> None:
            self.values: list[Any] = []

        def say(self, value: Any) -> None:
            self.values.append(value)

        def all(self) -> list[Any]:
            return sorted(self.values)

    heard = Heard.remote()

    def loop(config: dict[str, Any]) -> None:
        import torch

        import horoclone.torch as hvd

        if config["nodes"] == 2:
            from horoclone.ray import share_secret

            share_secret()
        hvd.init()
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        model(torch.full((4, 3), hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        total = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum, name="total").item()
        digest = sum(p.detach().double().sum().item() for p in model.parameters())
        digests = hvd.allgather_object(digest)
        said = [hvd.rank(), hvd.size(), total, len(set(digests)), hvd.rank() == int(os.environ["RANK"])]
        ray.get(heard.say.remote(said))
        hvd.shutdown()

    scaling = ScalingConfig(num_workers=2, placement_strategy=strategy)
    config = {"nodes": 2 if strategy == "STRICT_SPREAD" else 1}
    run = RunConfig(storage_path=folder, name=strategy)
    result = TorchTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    assert result.error is None, result.error
    values = ray.get(heard.all.remote())
    ray.kill(heard)
    return list(values)


def tune_sizes(folder: str) -> list[Any]:
    """Two trials side by side, with one and with two workers in their own placement groups."""
    from ray import tune

    def trial(config: dict[str, Any]) -> None:
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=config["workers"])
        executor.start()

        def work() -> tuple[int, float, str]:
            import numpy as np

            import horoclone as hvd

            hvd.init()
            total = float(hvd.allreduce(np.float64(hvd.rank() + 1), op=hvd.Sum, name="total"))
            return hvd.size(), total, ray.util.get_current_placement_group().id.hex()

        found = executor.run(work)
        executor.shutdown()
        tune.report({"size": found[0][0], "total": found[0][1], "groups": len({one[2] for one in found})})

    def resources(config: dict[str, Any]) -> Any:
        return tune.PlacementGroupFactory([{"CPU": 0.5}] + [{"CPU": 1}] * config["workers"])

    tuner = tune.Tuner(
        tune.with_resources(trial, resources),
        param_space={"workers": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(storage_path=folder, name="sizes", verbose=0),
    )
    results = tuner.fit()
    assert not results.errors, results.errors
    return sorted([one.metrics[name] for name in ("size", "total", "groups")] for one in results)


def all_is_free() -> None:
    """cluster.py waits for that after every body."""


JOBS = ("BaseHorovodWorker", "StaticAdapter", "ElasticAdapter")


def living() -> list[str]:
    """The classes of the actors that are not dead, those placement groups that are not removed, and signs of clients."""
    from ray._private.state import actors
    from ray.experimental.internal_kv import _internal_kv_list

    there = [str(one["ActorClassName"]) for one in actors().values() if one["State"] != "DEAD"]
    groups = ray.util.placement_group_table().values()
    there += [f"group {one['placement_group_id']}" for one in groups if one["state"] != "REMOVED"]
    return there + [str(key) for key in _internal_kv_list(b"client/", namespace=b"horoclone")]


def left_of_jobs(limit_s: float) -> list[str]:
    """What there is of jobs after limit_s: nothing, as soon as that is so."""
    import time

    deadline = time.monotonic() + limit_s
    while True:
        there = [one for one in living() if one in JOBS or one.startswith(("group", "b'client"))]
        if not there or time.monotonic() > deadline:
            return there
        time.sleep(0.05)


def nothing_is_left(limit_s: float, but: list[str]) -> None:
    """but: what living() was before; Ray Train, for one, leaves actors of its own."""

    def more() -> list[str]:
        return list((Counter(living()) - Counter(but)).elements())

    wait_until(lambda: not more(), f"the end of all actors and placement groups ({more()})", limit_s)
