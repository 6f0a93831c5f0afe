"""The elastic state of PyTorch: models, optimizers and samplers, each through a handler, beside plain attributes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from horoclone.elastic.state import ObjectState, root_of_sync
from horoclone.objects import broadcast_object
from horoclone.runtime import rank
from horoclone.torch.elastic.sampler import ElasticSampler
from horoclone.torch.functions import (
    assign_optimizer_state,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler", "TorchState",
    "get_handler_registry", "set_handler_registry",
]  # fmt: skip


class StateHandler:
    """Saves, restores and synchronises one value of a TorchState.

    A handler of your own binds what save() keeps to attributes of itself, anew each time: the state holds on to them
    for the commit before. sync() takes the value of root_of_sync() (rank 0 where nobody has committed).
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps a copy of the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Gives the value the state of the newest copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank's value the same state. A collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another object takes the value's place; its state is saved."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """For a torch.nn.Module: its state_dict()."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """Copies the parameters and buffers, each to the device that it is on."""
        self._saved_model_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Copies them back, in place."""
        self.value.load_state_dict(self._saved_model_state)

    def sync(self) -> None:
        """Broadcasts them, and what else the state_dict holds."""
        root = root_of_sync()
        state = self.value.state_dict()
        broadcast_parameters(state, root)
        rest = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        if rest:
            rest = broadcast_object(rest, root, "hvd.elastic.model")
            self.value.load_state_dict({**state, **rest})
        self.save()


class OptimizerStateHandler(StateHandler):
    """For a torch.optim.Optimizer, wrapped by DistributedOptimizer or not: its state_dict()."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """Copies the state and the options of the parameter groups; collects what is sharded, which is a collective."""
        if self._is_sharded():
            self.value.consolidate_state_dict()
        self._saved_optimizer_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Gives them back; an optimizer that had no state then has none again. Reductions in flight are given up."""
        state = copy.deepcopy(self._saved_optimizer_state)
        self.value.load_state_dict(state)
        if not self._is_sharded():
            assign_optimizer_state(self.value, state)  # load_state_dict casts the state of 16-bit parameters

    def _is_sharded(self) -> bool:
        return getattr(self.value, "_sharding", None) is not None

    def sync(self) -> None:
        """Broadcasts them."""
        if self._is_sharded():  # the pieces belong to a world that is over; the copy is whole
            self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))
        broadcast_optimizer_state(self.value, root_of_sync())
        self._saved_optimizer_state = copy.deepcopy(self.value.state_dict())


class SamplerStateHandler(StateHandler):
    """For an ElasticSampler: which samples of the epoch are done."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """Keeps epoch and number of samples done."""
        self._saved_sampler_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Goes back to them, and shares out what is left."""
        self.value.load_state_dict(self._saved_sampler_state)

    def sync(self) -> None:
        """Broadcasts them, and shares out what is left over the ranks that there are."""
        self.value.load_state_dict(
            broadcast_object(self.value.state_dict(), root_of_sync(), "hvd.elastic.sampler")
        )
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs (class, handler): the first whose class a value has handles it."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Takes the place of the pairs, for states that are made from now on."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0): what elastic.run keeps.

    Modules, optimizers and ElasticSamplers, under whatever name, go through handlers; everything else is copied as an
    attribute. Another object that is assigned to such a name takes the place of the old one, and is saved.
    """

    _handlers: Mapping[str, StateHandler] = MappingProxyType({})

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        found = {
            name: _handler_of(value)
            for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items()
        }
        object.__setattr__(self, "_handlers", {name: one for name, one in found.items() if one is not None})
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {"model": model, "optimizer": optimizer, **kwargs}
        super().__init__(
            bcast_object=broadcast_object,
            get_rank=rank,
            **{name: value for name, value in plain.items() if name not in self._handlers},
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers and value is not getattr(self, name, None):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def restore(self) -> None:
        """Goes back to the newest copy."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Gives every rank what the rank with the newest commit has now, and saves it. A collective of all ranks."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Samplers share out what is left over the ranks there are now; optimizers give up what was on its way."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()
            give_up = getattr(handler.value, "_give_up", None)
            if give_up is not None:
                give_up()
        super().reset()

    def _save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super()._save()

    def _content(self) -> Any:
        kept = {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in self._handlers.items()
        }
        return super()._content(), kept

    def _set_content(self, content: Any) -> None:
        plain, kept = content
        super()._set_content(plain)
        for name, handler in self._handlers.items():
            vars(handler).update(kept[name])
