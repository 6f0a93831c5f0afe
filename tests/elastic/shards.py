"""A worker of the tests of what only one rank has: sharded Adam, a loader's position, random numbers, a local layer.

`python shards.py STEPS COMMIT_EVERY PAUSE_S`. Every rank trains on the same samples, so that the result is that of one
process which never lost anything; the last lines say whether it is. SHARDS_ONCE: a folder; a slot gets one worker only.
SHARDS_DIES: "RANK COMMIT", the rank ends in the middle of sending its shard of that commit. SHARDS_DISK: a file to go
on from where shards are lost. SHARDS_END: a file whose appearance ends the training.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

import horoclone.torch as hvd
from horoclone.elastic import peers

STEPS, COMMIT_EVERY, PAUSE_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def out(*words: object) -> None:
    print(*words, flush=True)


def a_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(24, 50), torch.nn.Tanh(), torch.nn.Linear(50, 7))


def an_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


def train_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step)).square().sum().backward()
    optimizer.step()


def reference(steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = a_model()
    optimizer = an_adam(model)
    for step in range(steps):
        train_step(model, optimizer, step)
    return contents(model, optimizer.state_dict())


def contents(model: torch.nn.Module, state: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    moments = [
        value for number in sorted(state["state"]) for _, value in sorted(state["state"][number].items())
    ]
    return [p.detach() for p in model.parameters()], moments


def die_while_sending(rank: int, commit: int) -> None:
    """In the middle of the shard: half of its messages are out."""
    inner, count = peers._isend, [0]

    def isend(part: Any, to: int, tag: int) -> int:
        count[0] += 1
        if hvd.rank() == rank and count[0] == (commit - 1) * peers.PARTS + peers.PARTS // 2:
            time.sleep(0.2)
            os.kill(os.getpid(), 9)
        return inner(part, to, tag)

    peers._isend = isend


def main() -> None:
    started_as = int(os.environ["HOROVOD_RANK"])
    if "SHARDS_ONCE" in os.environ:
        Path(os.environ["SHARDS_ONCE"], str(started_as)).touch(exist_ok=False)
    hvd.init()
    if "SHARDS_DIES" in os.environ:
        die_while_sending(*map(int, os.environ["SHARDS_DIES"].split()))
    model = a_model()
    optimizer = hvd.DistributedOptimizer(
        an_adam(model), named_parameters=model.named_parameters(), shard_optimizer_state=True
    )
    is_new = hvd.elastic.generation().number > 1
    stream = 9000 + hvd.rank() if is_new else 100 + hvd.rank()
    random.seed(stream)
    state = hvd.elastic.TorchState(
        model,
        optimizer,
        loader=hvd.elastic.Owned({"stream": stream, "at": 0}),
        numbers=hvd.elastic.RandomStates(random.Random, torch),
        step=0,
    )
    disk = os.environ.get("SHARDS_DISK")

    @hvd.elastic.run
    def train(state: Any) -> None:
        now = hvd.elastic.generation()
        out("generation", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
            "new", list(now.newcomers), "commit", now.commit, "skip", now.skip_sync)  # fmt: skip
        out("pieces of", now.number, [one["stream"] for one in state.pieces("loader")])
        while state.step < STEPS and not (is_over() and state.step % COMMIT_EVERY == 0):
            train_step(model, optimizer, state.step)
            state.loader.value["at"] += 1
            check_the_numbers(state.loader.value, random.random())
            state.step += 1
            out("step", state.step, "of", now.number, f"at {time.time():.4f}")
            if state.step % COMMIT_EVERY == 0:
                state.commit()
            if disk and state.step == 6 and not os.path.exists(disk):
                optimizer.consolidate_state_dict()
                if hvd.rank() == 0:
                    torch.save([model.state_dict(), optimizer.state_dict(), state.step], disk + ".part")
                    os.rename(disk + ".part", disk)
            time.sleep(PAUSE_S)

    def is_over() -> bool:
        """Asked only where SHARDS_END is set: all ranks must see the file at once."""
        return "SHARDS_END" in os.environ and bool(
            hvd.broadcast_object(os.path.exists(os.environ["SHARDS_END"]))
        )

    def check_the_numbers(at: dict[str, int], drawn: float) -> None:
        """The generator is where the loader is, and both are where this rank's or its predecessor's commit was."""
        if at["stream"] >= 9000:
            return
        expected = random.Random(at["stream"])
        for _ in range(at["at"]):
            number = expected.random()
        assert drawn == number, (at, drawn, number)

    while True:
        try:
            train(state)
            break
        except hvd.elastic.StateLost as lost:
            out("state lost:", lost)
            if disk is None:
                raise
            weights, moments, state.step = torch.load(disk)
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            random.seed(stream)
            state.loader.value = {"stream": stream, "at": 0}
    optimizer.consolidate_state_dict()
    mine, (weights, moments) = contents(model, optimizer.state_dict()), reference(state.step)
    theirs = [*zip(mine[0], weights, strict=True), *zip(mine[1], moments, strict=True)]
    equal = all(torch.equal(a, b) for a, b in theirs)
    near = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in theirs)
    out("finished", hvd.rank(), "of", hvd.size(), "loader", state.loader.value, "equal", equal, "near", near)


main()
