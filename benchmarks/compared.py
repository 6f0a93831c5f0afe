"""What the comparison of values costs: `horoclonerun -np 2 python benchmarks/compared.py [megabytes] [SGD or Adam]`.

Two optimizers of equal models, one that compares and one that does not, take turns of one round of the comparison each
on the same ranks. Also says what the comparison's own calls take, which a busy machine disturbs less.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import torch

import horoclone.torch as hvd
from horoclone.torch.optimizer.compared import Comparison

LAYERS, STEPS, ROUNDS = 10, 100, 5
own_s = 0.0


def timed(plain: Any) -> Any:
    """The method, whose time is added up."""

    def method(self: Any, *args: Any) -> Any:
        global own_s
        began = time.perf_counter()
        result = plain(self, *args)
        own_s += time.perf_counter() - began
        return result

    return method


def training(action: str, width: int, kind: str) -> Any:
    """A step, as a function."""
    os.environ["HOROCLONE_COMPARE"] = action
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    plain = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(prefix=action))
    batch = torch.ones(1, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    hvd.init()
    for name in ("fill", "look", "note", "settle"):
        setattr(Comparison, name, timed(getattr(Comparison, name)))
    megabytes, kind = float(sys.argv[1] if sys.argv[1:] else 100), sys.argv[2] if sys.argv[2:] else "SGD"
    width = int((megabytes * 1e6 / 4 / LAYERS) ** 0.5)
    steps = {action: training(action, width, kind) for action in ("off", "warn")}
    times: dict[str, list[float]] = {action: [] for action in steps}
    shares = []
    for number in range(ROUNDS + 1):
        for action, step in steps.items():
            began, own_s = time.perf_counter(), 0.0
            for _ in range(STEPS):
                step()
            if number:
                times[action].append((time.perf_counter() - began) / STEPS * 1e3)
                shares += [own_s / STEPS * 1e3] if action == "warn" else []
    if hvd.rank() == 0:
        off, on = (statistics.median(times[action]) for action in ("off", "warn"))
        own = statistics.median(shares)
        print(
            f"{megabytes:g} MB, {kind}: a step {off:.3f} ms without, {on:.3f} ms with ({on / off - 1:+.1%});"
        )
        print(f"the comparison's own calls {own:.4f} ms a step ({own / off:.2%})")
