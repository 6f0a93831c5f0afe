"""What the core tells of an optimizer's buckets: bytes, steps, who is late, their phase in a timeline; and autotune."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from world import ranks

import horoclone.torch as hvd
from horoclone import metrics
from horoclone.comparison import PLACES


def optimizer_of(model: torch.nn.Module, rate: float = 0.0) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), rate), model.named_parameters())


def step(optimizer: Any, model: torch.nn.Module, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("size", "on_a_node"), [(2, 1), (4, 1), (4, 2)])
def test_a_step_between_nodes_sends_no_control_message(worlds: Any, size: int, on_a_node: int) -> None:
    counted = worlds.run(size, count_control_frames, init=False, on_a_node=on_a_node)
    windows = [tuple(map(sum, zip(*window, strict=True))) for window in zip(*counted, strict=True)]
    # On a busy machine a rank that waits for long asks whether the others are alive.
    assert (0, 4 * size) in windows and all(buckets == 4 * size for _, buckets in windows), windows


def count_control_frames(on_a_node: int) -> list[tuple[int, int]]:
    """(control frames sent, persistent buckets) in each of some windows of four steps."""
    os.environ["HOROCLONE_NODE"] = str(int(os.environ["HOROCLONE_RANK"]) // on_a_node)
    hvd.init()
    model = torch.nn.Linear(300, 300)
    optimizer = optimizer_of(model)

    def window(steps: int) -> tuple[int, int]:
        before = hvd.metrics()
        for _ in range(steps):
            step(optimizer, model, torch.ones(1, 300))
        after = hvd.metrics()
        hvd.barrier()
        frames, buckets = (after[name] - before[name] for name in ("control_frames_sent", "persistent"))
        return frames, buckets

    window(3)
    return [window(4) for _ in range(4)]


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared", "tcp"])
def test_bytes_of_buckets_are_counted(worlds: Any, shared: str) -> None:
    worlds.run(2, count_bytes, env={"HOROCLONE_SHARED_MEMORY": shared}, persistent=shared == "1")


def count_bytes(persistent: bool) -> None:
    model, plans = torch.nn.Linear(1000, 10, bias=False), metrics()["persistent"]
    optimizer = optimizer_of(model)
    for number in range(13):
        if number == 3:
            before = metrics()["bytes"]
        step(optimizer, model, torch.ones(1, 1000))
    grown = metrics()["bytes"] - before
    # A bucket's end is aligned to 64 bytes; a check of the weights may travel behind it.
    assert 10 * 40_000 <= grown <= 10 * (40_064 + PLACES * 4), grown
    assert not persistent or metrics()["persistent"] >= plans + 10


@ranks(2)
def test_a_step_agrees_with_a_stopwatch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 10))
    optimizer = optimizer_of(model)
    at: list[float] = []  # the last gradient of the step, with which its only bucket is full
    model[0].weight.register_post_accumulate_grad_hook(lambda _: at.append(time.perf_counter()))
    for attempt in range(8):  # on a busy machine a thread may be kept from its core between the two
        at.clear()
        steps, before = [], metrics()["step"]["number"]
        for _ in range(6):
            time.sleep(0.02)
            step(optimizer, model, torch.ones(4, 500))
            steps.append(metrics()["step"]["seconds"])
            for _ in range(2):  # twice in each step: not what a step is
                hvd.allreduce(torch.ones(1), name="micro")
        assert attempt or metrics()["step"]["number"] - before == 6
        # The first step of all declares the buckets, and the second is the first with them.
        is_close = sum(steps[2:]) == pytest.approx(at[-1] - at[1], rel=0.05, abs=0.002)
        if hvd.allreduce(torch.tensor(float(is_close)), op=hvd.Min) == 1:
            break
    else:
        raise AssertionError((steps, at))
    assert 0 < metrics()["step"]["communication_share"] < 1


@ranks(2)
def test_the_slowest_rank_is_named() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = optimizer_of(model)
    for number in range(60):  # a busy machine makes rank 0 the late one at times
        loss = model(torch.ones(2, 8)).sum()
        optimizer.zero_grad()
        if hvd.rank() == 1:
            time.sleep(0.1)
        loss.backward()
        optimizer.step()
        facts = metrics()
        if hvd.broadcast(torch.tensor([number > 2 and facts["slowest"].get(0) == 1]), 0):
            break
    if hvd.rank() == 0:
        assert facts["persistent"] > 0 and facts["slowest"][0] == 1, facts
        assert {one["rank"]: one for one in facts["last_ready"][0]}[1]["seconds"] > 0.2, facts


def persistent_after(steps: int) -> int:
    hvd.init()
    model = torch.nn.Linear(64, 64)
    optimizer = optimizer_of(model)
    for _ in range(steps):
        step(optimizer, model, torch.ones(2, 64))
    plans = metrics()["persistent"]
    del optimizer
    hvd.shutdown()
    return int(plans)


def test_a_timeline_shows_a_phase_of_their_own(worlds: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    plans = worlds.run(2, persistent_after, init=False, env={"HOROVOD_TIMELINE": str(path)}, steps=3)
    shown = [e for e in json.loads(path.read_text()) if e.get("name") == "SHM_PERSISTENT_ALLREDUCE"]
    assert plans[0] == len(shown) > 0


def trained() -> tuple[bytes, int]:
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.ReLU(), torch.nn.Linear(200, 1))
    optimizer = optimizer_of(model, 0.01)
    torch.manual_seed(hvd.rank())
    for _ in range(150):
        step(optimizer, model, torch.randn(4, 20))
    flat, plans = torch.cat([p.detach().flatten() for p in model.parameters()]), metrics()["persistent"]
    del optimizer
    hvd.shutdown()
    return flat.numpy().tobytes(), plans


def test_autotune_leaves_the_same_bits_and_the_persistent_plan(worlds: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    env = {
        "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(log), "HOROVOD_LOG_LEVEL": "error",
    }  # fmt: skip
    plain = worlds.run(2, trained, init=False)
    tuned = worlds.run(2, trained, init=False, env=env)
    assert len({flat for flat, _ in plain + tuned}) == 1
    assert tuned[0][1] == plain[0][1] > 0
    assert [row.split(",")[1] for row in log.read_text().splitlines()[1:3]] == ["warmup", "baseline"]
