"""Models for planning.py: layers with the sizes of VGG-16, whose computing is a fixed number of matrix products.

36 MB of gradients and about 300 ms of computing in a step (PLANNED_MB, PLANNED_MS), as in priority.py; but what
computes is work, not time, so that whatever takes the processor makes it longer. PLANNED_SLEEP=1: it sleeps instead, as
where an accelerator computes, so that other users of the processors do not matter much.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402

from horoclone.simulate import LAYERS  # noqa: E402

_A = torch.ones(96, 96)
PER_MS_ASLEEP = 1000.0


@cache
def products_per_ms() -> float:
    """The best of several tries: what a rank computes while nobody disturbs it."""
    if os.environ.get("PLANNED_SLEEP") == "1":
        return PER_MS_ASLEEP
    best = 0.0
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(200):
            torch.mm(_A, _A)
        best = max(best, 200 / (1e3 * (time.perf_counter() - begun)))
    return best


def compute(products: int) -> None:
    if os.environ.get("PLANNED_SLEEP") == "1":
        time.sleep(products / PER_MS_ASLEEP / 1e3)
        return
    for _ in range(products):
        torch.mm(_A, _A)


class Work(torch.autograd.Function):
    """Passes its input on; computes in forward, and twice as much on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, products: int) -> torch.Tensor:
        ctx.products, ctx.shape = products, weight.shape
        compute(products)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        compute(2 * ctx.products)
        return grads[0], grads[0].sum().expand(ctx.shape).contiguous(), None


class Layer(torch.nn.Module):
    """So many float32 parameters, a matrix, and so much to compute in forward."""

    def __init__(self, elements: int, products: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(max(1, elements // 512), 512))
        self.products = products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x, self.weight, self.products)  # type: ignore[no-any-return, no-untyped-call]


def build() -> tuple[torch.nn.Module, Callable[[], torch.Tensor], Callable[..., torch.optim.Optimizer]]:
    torch.set_num_threads(1)
    elements = float(os.environ.get("PLANNED_MB", "36")) * 1e6 / 4
    ms = float(os.environ.get("PLANNED_MS", "300"))
    layers = [
        Layer(int(size * elements), round(share * ms / 3 * products_per_ms()))
        for size, share in LAYERS["vgg16"]
    ]
    model = torch.nn.Sequential(*layers)
    return (
        model,
        lambda: model(torch.ones(1, requires_grad=True)).sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
