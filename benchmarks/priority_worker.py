"""One rank of priority.py: trains a stack of layers of given sizes and lengths in the ways that the plan names.

argv: the plan as JSON, where rank 0 writes the times. Computing is real time spent in matrix products of the given
length, so that the engine's thread competes for the core as it does in training.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402

import horoclone.torch as hvd  # noqa: E402

_A = torch.ones(96, 96)


def compute(ms: float) -> None:
    """Multiplies matrices for so long."""
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        torch.mm(_A, _A)


class Work(torch.autograd.Function):
    """Passes its input on; takes `forward_ms` there and twice as long on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ms: float) -> torch.Tensor:
        ctx.ms, ctx.shape = ms, weight.shape
        compute(ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        compute(2 * ctx.ms)
        return grads[0], grads[0].sum().expand(ctx.shape).contiguous(), None


class Layer(torch.nn.Module):
    """So many float32 parameters, and so long a forward."""

    def __init__(self, elements: int, ms: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(elements))
        self.ms = ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x, self.weight, self.ms)  # type: ignore[no-any-return, no-untyped-call]


Steps = Callable[[int], list[float]]  # of so many steps the mean time of one, in microseconds


def timed(model: Any, optimizer: Any, settle: Callable[[], Any] = lambda: None) -> Steps:
    """settle: what is owed at the end belongs to the steps."""

    def steps(count: int) -> list[float]:
        hvd.barrier()
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, requires_grad=True)).sum().backward()
            optimizer.step()
        settle()
        return [(time.perf_counter() - start) / count * 1e6]

    return steps


def stack(layers: list[tuple[int, float]]) -> tuple[Any, Any]:
    """The model, and SGD over it."""
    model = torch.nn.Sequential(*[Layer(elements, ms) for elements, ms in layers])
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def reduced(layers: list[tuple[int, float]], across: bool) -> Steps:
    model, plain = stack(layers)
    optimizer: Any = hvd.DistributedOptimizer(
        plain, model.named_parameters(), cross_barrier=model if across else None
    )
    return timed(model, optimizer, optimizer.synchronize if across else lambda: None)


def rarely(layers: list[tuple[int, float]], sync_every: int, delay: int) -> Steps:
    """DiLoCo: one fragment, which is under way for `delay` steps."""
    model, inner = stack(layers)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    hvd.DiLoCo([model], inner, outer, sync_every, fragment_sync_delay=delay).__enter__()
    return timed(model, inner)


def main(plan: dict[str, Any], out: str) -> None:
    hvd.init()
    silent = [(elements, 0.0) for elements, _ in plan["layers"]]
    make = {
        "computing alone": lambda: timed(*stack(plan["layers"])),
        "communication alone": lambda: reduced(silent, False),
        "fifo": lambda: reduced(plan["layers"], False),
        "priority": lambda: reduced(plan["layers"], True),
        "diloco": lambda: rarely(plan["layers"], plan["steps"], plan["steps"] // 2),
    }
    times = {}
    for name in plan["contestants"]:
        steps = make[name]()
        steps(2)  # the first forms the buckets
        times[name] = steps(plan["steps"])
    every = hvd.allgather_object(times)
    if hvd.rank() == 0:
        Path(out).write_text(json.dumps(every), encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]), sys.argv[2])
