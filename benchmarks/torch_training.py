"""One rank of benchmarks/step.py in plain PyTorch: the model, its data, and who sums the gradients."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from step_worker import Plan

WARM_STEPS = 2  # of every round
CLASSES = 10
WIDTHS = {"dense": (2048, 6), "small": (64, 99), "tiny": (64, 2)}  # width and number of hidden layers


class TorchTraining:
    """Trains one batch again and again.

    kind: alone, single, single-init (hvd.init() and nothing else), horoclone, ddp or ddp-view (gradients are views of
    its buckets).
    """

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        width, hidden = WIDTHS[plan.model]
        layers = [layer for _ in range(hidden) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.forward: Any = self.model
        self.rank = plan.rank
        if plan.kind in ("horoclone", "single-init"):
            import horoclone.torch as hvd

            hvd.init()
            self.rank = hvd.rank()
        if plan.kind == "horoclone":
            hvd.broadcast_parameters(self.model.state_dict(), 0)
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters())
        elif plan.kind.startswith("ddp"):
            torch.distributed.init_process_group(
                "gloo", init_method=f"tcp://{plan.workers[0]}", rank=plan.rank, world_size=plan.size
            )
            self.forward = DistributedDataParallel(
                self.model, gradient_as_bucket_view=plan.kind == "ddp-view"
            )
        chance = torch.Generator().manual_seed(max(self.rank, 0))
        self.x = torch.randn(plan.batch, width, generator=chance)
        self.y = torch.randint(0, CLASSES, (plan.batch,), generator=chance)

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.forward(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self, steps: int) -> dict[str, float]:
        """Trains for WARM_STEPS + steps; wall and processor time of the latter, per step, in seconds."""
        for _ in range(WARM_STEPS):
            self._step()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = self._step()
        last = float(loss.detach())
        return {
            "wall": (time.perf_counter() - wall) / steps,
            "cpu": (time.process_time() - cpu) / steps,
            "loss": last,
        }

    def outcome(self) -> dict[str, Any]:
        """The size of the model and what it has learnt."""
        weights = [p.detach() for p in self.model.parameters()]
        return {
            "parameters": sum(p.numel() for p in weights),
            "tensors": len(weights),
            "digest": float(sum(p.double().abs().sum() for p in weights)),
        }
