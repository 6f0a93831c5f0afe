"""Runs a strategy for some steps on these ranks, to compare what it takes with what was predicted."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

import horoclone.torch as hvd
from horoclone.plan.torch.subject import Subject

WARM_STEPS = 3  # the first one forms the buckets
POWERSGD_WARM_STEPS = 12  # its first ten send everything


def run(subject: Subject, kind: str, options: dict[str, Any], steps: int) -> float:
    """Seconds of a step on this rank: the median, but the mean over whole periods of what is periodic, and on a GPU,
    where to look at each step would change it. Collective; between init and shutdown.

    kind: a Strategy's, or "alone" for a training without communication.
    """
    every = int(options.get("sync_every", 1))
    count = -(-steps // every) * every
    with _way(subject, kind, options) as (optimizer, settle):
        warm = every if every > 1 else WARM_STEPS
        if str(options.get("compression", "")).startswith("powersgd"):
            warm = POWERSGD_WARM_STEPS
        _train(subject, optimizer, warm)
        settle()
        hvd.barrier()
        begun_s = subject.now_s()
        ended_s = _train(subject, optimizer, count)
        settle()
        if every > 1 or subject.device.type != "cpu":
            return (subject.now_s() - begun_s) / count
        return statistics.median(after - before for before, after in pairwise([begun_s, *ended_s]))


def _train(subject: Subject, optimizer: Any, steps: int) -> list[float]:
    """When each step ended, without waiting for a GPU."""
    ended_s = []
    for _ in range(steps):
        optimizer.zero_grad()
        subject.loss().backward()
        optimizer.step()
        ended_s.append(time.perf_counter())
    return ended_s


@contextlib.contextmanager
def _way(subject: Subject, kind: str, options: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(what steps, what waits for all that is under way)."""
    model = subject.model
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        fully_shard(model)
        subject.parameters = [p for p in model.parameters() if p.requires_grad]
        yield subject.make_optimizer(), lambda: None
        return
    plain = subject.make_optimizer()
    if kind == "alone":
        yield plain, lambda: None
        return
    hvd.broadcast_parameters(model.state_dict(), 0)
    if kind == "diloco":
        outer = torch.optim.SGD(subject.parameters, lr=0.7, momentum=0.9, nesterov=True)
        every, delay = options["sync_every"], options["delay"]
        with hvd.DiLoCo([model], plain, outer, every, fragment_sync_delay=delay):
            yield plain, lambda: None
        return
    if kind == "local":
        with hvd.LocalSGD(model, plain, options["sync_every"]):
            yield plain, lambda: None
        return
    made: Any = hvd.DistributedOptimizer(plain, model.named_parameters(), **_arguments(model, options))
    if "quorum" in options:
        yield made, lambda: None
        made.join()
    elif "cross_barrier" in options:
        yield made, made.synchronize
    else:
        yield made, lambda: None


def _arguments(model: torch.nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Of DistributedOptimizer."""
    given = dict(options)
    if "compression" in given:
        name, _, rest = given["compression"].partition("(")
        arguments = dict(pair.split("=") for pair in rest.rstrip(")").split(",")) if rest else {}
        chosen = getattr(hvd.Compression, name)
        given["compression"] = (
            chosen(**{key: float(value) if "." in value else int(value) for key, value in arguments.items()})
            if arguments
            else chosen
        )
    if given.pop("cross_barrier", False):
        given["cross_barrier"] = model
    return given
