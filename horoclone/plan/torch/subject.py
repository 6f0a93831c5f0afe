"""The model that FILE.py:build makes: (model, loss_of_batch) or (model, loss_of_batch, optimizer_of)."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from horoclone.plan.profile import PlanError

WANTED = (
    "build() must return (model, loss_of_batch), or (model, loss_of_batch, optimizer_of): a torch.nn.Module, a "
    "function that computes the loss of one batch of this rank, and one that makes the optimizer of some parameters"
)


class Subject:
    """A model that can be trained for a step. PlanError where build() gives something else."""

    def __init__(self, made: Any, where: str) -> None:
        if not isinstance(made, tuple) or len(made) not in (2, 3):
            raise PlanError(f"{where} returned {_kind(made)}. {WANTED}")
        self.model: torch.nn.Module = made[0]
        self.loss_of_batch: Callable[[], torch.Tensor] = made[1]
        self.is_assumed = len(made) == 2
        self.optimizer_of: Callable[[Any], torch.optim.Optimizer] = (
            torch.optim.AdamW if self.is_assumed else made[2]
        )
        if not isinstance(self.model, torch.nn.Module):
            raise PlanError(f"{where}: its model is {_kind(self.model)}. {WANTED}")
        for name, one in (("loss_of_batch", self.loss_of_batch), ("optimizer_of", self.optimizer_of)):
            if not callable(one):
                raise PlanError(f"{where}: its {name} is {_kind(one)}. {WANTED}")
        self.where = where
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self.parameters:
            raise PlanError(
                f"{where}: the model has no parameters that are trained, so there is nothing to send"
            )
        self.device = self.parameters[0].device

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = self.optimizer_of(self.parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise PlanError(
                f"{self.where}: optimizer_of(parameters) returned {_kind(made)}, not a torch optimizer"
            )
        return made

    def loss(self) -> torch.Tensor:
        """Of a batch. PlanError where it is no number to differentiate."""
        loss = self.loss_of_batch()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise PlanError(
                f"{self.where}: loss_of_batch() returned {_kind(loss)}; it takes no argument, computes the model on "
                "one batch and returns the loss, a tensor of one element that can be differentiated"
            )
        return loss

    def now_s(self) -> float:
        """A clock, behind what a GPU still has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + (
            "" if value.requires_grad else " without a gradient"
        )
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"an object of {type(value).__name__}"


def load(file: str, function: str) -> Subject:
    """Runs the file as a module of its own and calls the function. PlanError where either cannot be."""
    place = Path(file)
    sys.path.insert(0, str(place.resolve().parent))  # as for a script: modules beside it are found
    name = f"horoclone_planned_{place.stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise PlanError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except OSError as error:
        raise PlanError(f"cannot read {file} on this host: {error.strerror or error}") from None
    build = getattr(module, function, None)
    if not callable(build):
        have = sorted(
            key
            for key, one in vars(module).items()
            if callable(one) and getattr(one, "__module__", "") == name
        )
        raise PlanError(
            f"{file} has no function {function!r}; it has {', '.join(have) or 'none'}. Write {file}:NAME"
        )
    return Subject(build(), f"{function}() of {place.name}")
