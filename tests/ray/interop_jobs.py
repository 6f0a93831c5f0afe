"""Bodies of test_interop.py: Ray Train, Ray Tune and Ray Client."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from cluster import wait_until
from horovod.ray import RayExecutor


@ray.remote(num_cpus=0)
class Heard:
    """Collects what workers say."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def say(self, value: Any) -> None:
        self.values.append(value)

    def all(self) -> list[Any]:
        return sorted(self.values)


def train_on(strategy: str, folder: str) -> list[Any]:
    """Two workers of a TorchTrainer, on one node or on two, which say what they have summed up."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

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


def train_with_a_loss(folder: str) -> dict[str, Any]:
    """Rank 1 of two is killed once: with HorocloneConfig() Ray Train starts both anew from the checkpoint."""
    from ray.train import (
        Checkpoint,
        FailureConfig,
        RunConfig,
        ScalingConfig,
        get_checkpoint,
        get_context,
        report,
    )
    from ray.train.torch import TorchTrainer, prepare_model

    from horoclone.ray.train import HorocloneConfig

    heard = Heard.remote()

    def loop(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        import horoclone.torch as hvd

        hvd.init()
        mark = Path(config["folder"], "killed")
        place = get_context().get_world_rank(), get_context().get_local_rank(), get_context().get_world_size()
        assert place == (hvd.rank(), hvd.local_rank(), hvd.size()) and dist.get_rank() == hvd.rank()
        model = prepare_model(torch.nn.Linear(3, 1))
        step, checkpoint = 0, get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as there:
                step = int((Path(there) / "step").read_text())
        ray.get(heard.say.remote(["starts", hvd.rank(), type(model).__name__, dist.get_backend()]))
        while step < 3:
            model(torch.full((4, 3), hvd.rank() + 1.0)).sum().backward()
            if step == 1 and hvd.rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                total = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum, name="total").item()
            except hvd.PeerLost as error:
                ray.get(heard.say.remote(["loses", error.rank]))
                raise
            step += 1
            with tempfile.TemporaryDirectory() as here:
                (Path(here) / "step").write_text(str(step))
                report({"total": total}, checkpoint=Checkpoint.from_directory(here))

    run = RunConfig(storage_path=folder, name="loss", failure_config=FailureConfig(max_failures=1))
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": folder},
        torch_config=HorocloneConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run,
    ).fit()
    found = {"said": ray.get(heard.all.remote()), "total": result.metrics["total"]}
    ray.kill(heard)
    return found


def train_with_survivors(
    folder: str, what: str, min_workers: int | None = None, max_failures: int = 1
) -> dict[str, Any]:
    """Rank 0 of three has an accident once: with HorocloneConfig(elastic=True) Ray Train replaces it, and others stay.

    what: "killed" or "stopped" (SIGSTOP) in its fourth step, where the others return when its replacement is there; or
    it raises when the training is over: "raises" after the others have returned, "raises first" before that.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context, report
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from horoclone.ray.train import HorocloneConfig

    heard = Heard.remote()

    def loop(config: dict[str, Any]) -> None:
        import torch

        import horoclone.torch as hvd

        rank = get_context().get_world_rank()

        def say(what: str) -> None:
            ray.get(heard.say.remote([what, rank, os.getpid()]))

        def wait_for(count: int, what: str) -> None:
            def all_have_said() -> bool:
                return [one[0] for one in ray.get(heard.all.remote())].count(what) >= count

            wait_until(all_have_said, what, 100)

        def has_accident(*ways: str) -> bool:
            mark = Path(config["folder"], "accident")
            is_now = rank == 0 and config["what"] in ways and not mark.exists()
            if is_now:
                mark.touch()
            return is_now

        say("comes")
        hvd.init()
        state = hvd.elastic.TorchState(step=0)
        say("starts")

        @hvd.elastic.run
        def go(state: Any) -> None:
            while state.step < 6:
                hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total")
                if state.step == 3 and has_accident("killed", "stopped"):
                    os.kill(os.getpid(), signal.SIGKILL if config["what"] == "killed" else signal.SIGSTOP)
                state.step += 1
                state.commit()
                if state.step % 3 == 2 and hvd.size() == 3:
                    report({"step": state.step})

        go(state)
        if has_accident("raises", "raises first"):
            if config["what"] == "raises":
                wait_for(2, "ends")
                time.sleep(1)  # from that word to the end of the function
            raise ValueError("the model cannot be stored")
        if config["what"] != "raises":
            wait_for(4, "comes")
        say("ends")

    failures = FailureConfig(max_failures=max_failures)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": folder, "what": what},
        torch_config=HorocloneConfig(elastic=True, min_workers=min_workers),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=folder, name="survivors", failure_config=failures),
    )
    found: dict[str, Any] = {"comes": [], "starts": [], "ends": [], "error": None}
    began = time.monotonic()
    try:
        trainer.fit()
    except TrainingFailedError as error:
        found["error"] = str(error)
    print(f"fit() has taken {time.monotonic() - began:.1f} s", flush=True)
    for word, rank, pid in ray.get(heard.all.remote()):
        found[word].append([rank, pid])
    ray.kill(heard)
    return found


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
