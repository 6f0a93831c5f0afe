"""The elastic state of PyTorch: models, optimizers and samplers, each through a handler, beside plain attributes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch

from horoclone.elastic.alike import check_alike
from horoclone.elastic.attributes import Named, keep_in_place, parts_of_module
from horoclone.elastic.member import is_elastic
from horoclone.elastic.peers import OwnPart
from horoclone.elastic.replicas import is_provisional, reduce_with
from horoclone.elastic.state import ObjectState, root_of_sync
from horoclone.objects import broadcast_object
from horoclone.runtime import rank
from horoclone.torch.elastic.sampler import ElasticSampler
from horoclone.torch.functions import (
    assign_optimizer_state,
    broadcast_optimizer_state,
    broadcast_parameters,
    load_into_groups,
)
from horoclone.torch.operations.tensors import bytes_of
from horoclone.torch.optimizer.own_state import OwnState
from horoclone.torch.optimizer.resharding import boxed, unboxed

__all__ = [
    "LoaderStateHandler", "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler",
    "TorchState",
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

    def reset(self) -> None:
        """Fits the value to the ranks that there are now, before training goes on; sync() may follow or not."""

    def sync_saves(self) -> bool:
        """Returns whether sync() ends with the copy that save() would make, so that it need not be made twice."""
        return False

    def has_own(self) -> bool:
        """Returns whether a part of the value is this rank's only, so that sync() must not replace it; alike on all
        ranks."""
        return False

    def own(self) -> Any:
        """Returns the part that is this rank's only, as it is now. NumPy's arrays in it are copied at once."""
        raise NotImplementedError

    def set_own(self, values: Mapping[int, Any], mine: int | None, holders: Sequence[int]) -> None:
        """Sets that part to what own() gave on ranks of a commit, behind restore() or sync(). See OwnPart."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Puts another object in the value's place; its state is saved."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handles a torch.nn.Module by its state_dict()."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        if is_provisional():
            self._saved_model_state = model.state_dict()
        else:
            self.save()

    def save(self) -> None:
        """Copies the parameters and buffers, each to the device that it is on."""
        self._saved_model_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Copies the parameters and buffers back, in place; of extra state the module gets a copy to keep."""
        state = copy.copy(self._saved_model_state)
        state.update(copy.deepcopy(_beside_tensors(state)))
        self.value.load_state_dict(state)

    def sync(self) -> None:
        """Broadcasts the parameters and buffers, and what else the state_dict holds."""
        root = root_of_sync()
        state = self.value.state_dict()
        rest = _beside_tensors(state)
        broadcast_parameters({name: value for name, value in state.items() if name not in rest}, root)
        if rest:
            rest = broadcast_object(rest, root, "hvd.elastic.model")
            self.value.load_state_dict({**state, **rest})
        self.save()

    def sync_saves(self) -> bool:
        """Returns True unless a subclass has a sync() of its own."""
        return type(self).sync is ModelStateHandler.sync


def _beside_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's state what load_state_dict() gives a module as it is, instead of copying it: extra state, which may
    be a tensor, too."""
    return {
        name: value
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or name.split(".")[-1] == "_extra_state"
    }


class OptimizerStateHandler(StateHandler):
    """Handles a torch.optim.Optimizer, wrapped by DistributedOptimizer or not: its state_dict().

    In an elastic job state that is sharded over all ranks stays where it is: each rank commits its pieces, and a buddy
    keeps them too. Elsewhere nobody would, and the state is collected.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if hasattr(optimizer, "_agent"):
            raise ValueError(
                "hvd.elastic and DistributedOptimizer(quorum=...) do not go together: its rounds belong to one world. "
                "Leave quorum out of an elastic job."
            )
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """Copies the state and the options of the parameter groups; collects what is sharded and stays with nobody."""
        own = OwnState(self.value)
        self._saved_layout = own.layout() if self._stays_cut() else None
        if self._saved_layout is not None:
            self._saved_optimizer_state = {"param_groups": own.options()}
            return
        if self._is_sharded():
            self.value.consolidate_state_dict()
        self._saved_optimizer_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restores state and options; an optimizer that had no state then has none again. Reductions in flight are
        given up."""
        if self._saved_layout is not None:
            OwnState(self.value).set_options(self._saved_optimizer_state["param_groups"])
            return
        _load_optimizer(self.value, copy.deepcopy(self._saved_optimizer_state))

    def _is_sharded(self) -> bool:
        return getattr(self.value, "_sharding", None) is not None

    def _stays_cut(self) -> bool:
        return is_elastic() and OwnState(self.value).is_sharded

    def sync(self) -> None:
        """Broadcasts state and options; of sharded state the cut and the options only."""
        root, own = root_of_sync(), OwnState(self.value)
        if self._stays_cut():
            cut = own.layout(), own.options()
            self._saved_layout, options = broadcast_object(cut, root, "hvd.elastic.optimizer")
            if self._saved_layout is not None:
                own.set_options(options)
                self._saved_optimizer_state = {"param_groups": own.options()}
                return
        elif self._is_sharded():  # the pieces belong to a world that is over; the copy is whole
            load_into_groups(self.value, copy.deepcopy(self._saved_optimizer_state))
        broadcast_optimizer_state(self.value, root)
        self._saved_optimizer_state = copy.deepcopy(self.value.state_dict())

    def sync_saves(self) -> bool:
        """Returns False where the state is sharded, of which sync() gives the cut only."""
        return type(self).sync is OptimizerStateHandler.sync and not self._is_sharded()

    def has_own(self) -> bool:
        """Returns True where there are pieces of sharded state, local parameters or residuals of a compressor."""
        own = OwnState(self.value)
        return own.exists() and (is_elastic() or not own.is_sharded)

    def own(self) -> Any:
        """Returns this rank's pieces, and the rest of what it has alone."""
        return OwnState(self.value).read()

    def set_own(self, values: Mapping[int, Any], mine: int | None, holders: Sequence[int]) -> None:
        """Takes over what ranks of a commit had alone; the next step cuts it anew."""
        OwnState(self.value).write(values, mine, holders, self._saved_layout)

    def lose(self) -> None:
        """Drops what is left of sharded state, which is of no use without the rest: it begins anew, or with
        load_state_dict()."""
        OwnState(self.value).forget()
        self.save()

    def local_parameters(self) -> list[torch.Tensor]:
        """Returns the parameters that are this rank's own."""
        return OwnState(self.value).local_parameters


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    load_into_groups(optimizer, state)
    if getattr(optimizer, "_sharding", None) is None:
        assign_optimizer_state(optimizer, state)  # load_state_dict casts the state of 16-bit parameters


def _parts_of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Its groups and parameters. Not by the property, which completes reductions."""
    groups = vars(optimizer).get("param_groups", ())
    yield f"{name}.param_groups", groups
    for place, group in enumerate(groups):
        yield f"{name}.param_groups[{place}]", group
        for number, parameter in enumerate(group["params"]):
            yield f"{name}.param_groups[{place}].params[{number}]", parameter


keep_in_place(
    lambda value: isinstance(value, torch.optim.Optimizer),
    lambda optimizer: optimizer.state_dict(),
    _load_optimizer,
)


class LocalParameters:
    """Those parameters of a model that an optimizer of the same state leaves to each rank."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self._model, self._names = model, names

    def own(self) -> dict[str, Any]:
        found = dict(self._model.named_parameters())
        return {name: boxed(found[name]) for name in self._names}

    @torch.no_grad()
    def set_own(self, values: Mapping[int, Any], mine: int | None, holders: Sequence[int]) -> None:
        found = dict(self._model.named_parameters())
        for name, box in values[mine].items() if mine is not None else ():
            found[name].copy_(unboxed(box, found[name]))


class SamplerStateHandler(StateHandler):
    """Handles an ElasticSampler: which samples of the epoch are done."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """Keeps epoch and number of samples done."""
        self._saved_sampler_state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Sets epoch and number to the newest copy, and shares out what is left."""
        self.value.load_state_dict(self._saved_sampler_state)

    def reset(self) -> None:
        """Shares out what is left over the ranks that there are."""
        self.value.reset()

    def sync(self) -> None:
        """Broadcasts epoch and number, and shares out what is left over the ranks that there are."""
        self.value.load_state_dict(
            broadcast_object(self.value.state_dict(), root_of_sync(), "hvd.elastic.sampler")
        )
        self.save()


@runtime_checkable
class StatefulLoader(Protocol):
    """What is handled of torchdata's StatefulDataLoader; the package need not be there."""

    sampler: Any
    next_iter_state: Any  # what load_state_dict() was given last, until the next pass begins
    _iterator: Any  # of the newest pass; None before the first

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class LoaderStateHandler(StateHandler):
    """Handles such a loader over an ElasticSampler: which batches of the epoch it has given out.

    ValueError for another sampler, whose state does not fit another number of ranks.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        if not isinstance(loader.sampler, ElasticSampler):
            raise ValueError(
                f"the loader in this TorchState draws from {type(loader.sampler).__name__}, which cannot be shared out "
                f"anew when ranks come and go. Make it with sampler=hvd.elastic.ElasticSampler(dataset)."
            )
        self.save()

    def save(self) -> None:
        """Keeps the states of loader and sampler."""
        self._saved_loader_state = self._state()

    def _state(self) -> tuple[Any, Any]:
        # Asked before it has begun, a loader would start its workers on an order that set_epoch() may still change.
        has_begun = self.value._iterator is not None or self.value.next_iter_state is not None
        state = (self.value.next_iter_state or self.value.state_dict()) if has_begun else {}
        return copy.deepcopy((self.value.sampler.state_dict(), state))

    def _set(self, states: tuple[Any, Any]) -> None:
        sampler_state, loader_state = copy.deepcopy(states)
        self.value.sampler.load_state_dict(sampler_state)
        self.value.next_iter_state = None
        self.value.load_state_dict(loader_state)

    def restore(self) -> None:
        """Sets both to the newest copy: the next loop over the loader goes on there."""
        self._set(self._saved_loader_state)

    def reset(self) -> None:
        """Has the next loop go on where the loader stands, over the ranks that there are."""
        self._set(self._state())

    def sync(self) -> None:
        """Broadcasts both, and shares out what is left over the ranks that there are."""
        root = root_of_sync()
        mine = self._state() if rank() == root else None
        self._set(broadcast_object(mine, root, "hvd.elastic.loader"))
        self.save()


def _reduce(tensor: torch.Tensor) -> Any:
    """For spares: a tensor as its bytes in host memory, which are sent as they are."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return NotImplemented
    data = bytes_of(tensor.cpu()).numpy()
    return _from_bytes, (data, tensor.dtype, tuple(tensor.shape))


def _from_bytes(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


reduce_with(torch.Tensor, _reduce)

_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (StatefulLoader, LoaderStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Returns pairs (class, handler), of which the first whose class a value has handles it."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the pairs of class and handler, for states that are made from now on."""
    global _registry
    _registry = registry


def _form_of_model(name: str, state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (f"{name}.{key}", str(value.dtype), tuple(value.shape))
        if isinstance(value, torch.Tensor)
        else (f"{name}.{key}", type(value).__name__)
        for key, value in state.items()
    ]


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _forms_of(name: str, handler: StateHandler) -> list[tuple[Any, ...]]:
    """Names, dtypes and shapes of a model; the parameter groups of an optimizer; the kind of anything else."""
    if isinstance(handler, ModelStateHandler):
        return _form_of_model(name, handler.value.state_dict())
    if isinstance(handler, OptimizerStateHandler):
        return [(name, type(handler.value).__name__, "groups of", _group_sizes(handler.value.param_groups))]
    return [(name, type(handler.value).__name__)]


def _takes(handler: StateHandler, kept: Mapping[str, Any]) -> bool:
    """Whether what another rank's handler keeps has the form of this one's value."""
    if isinstance(handler, ModelStateHandler):
        state = handler._saved_model_state
        return _form_of_model("", kept["_saved_model_state"]) == _form_of_model("", state)
    if isinstance(handler, OptimizerStateHandler):
        states = kept["_saved_optimizer_state"], handler._saved_optimizer_state
        return _group_sizes(states[0]["param_groups"]) == _group_sizes(states[1]["param_groups"])
    return True


class TorchState(ObjectState):
    """Keeps a training for elastic.run: TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0,
    batch=0).

    Modules, optimizers and ElasticSamplers, under whatever name, go through handlers; everything else is kept as an
    attribute. Another object that is assigned to such a name takes the place of the old one, and is saved.
    """

    _handlers: Mapping[str, StateHandler] = MappingProxyType({})
    _is_just_saved = False  # by the sync() of the handlers

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        found = {
            name: next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
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

    def _fixed(self) -> Named:
        yield from super()._fixed()
        for name, handler in self._handlers.items():
            value = handler.value
            yield name, value
            if isinstance(value, torch.nn.Module):
                yield from parts_of_module(name, value)
            elif isinstance(value, torch.optim.Optimizer):
                yield from _parts_of_optimizer(name, value)

    def restore(self) -> None:
        """Sets the state to the newest copy."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Gives every rank what the rank with the newest commit has now, and saves it. A collective of all ranks.

        ValueError, on every rank, when models, optimizers or attributes differ in names, shapes or dtypes.
        """
        check_alike(self._forms(), root_of_sync(), "models, optimizers and attributes")
        for handler in self._handlers.values():
            handler.sync()
        self._is_just_saved = self._shards is None  # else parts of it are handed out in between
        try:
            super().sync()
        finally:
            self._is_just_saved = False

    def _forms(self) -> list[tuple[Any, ...]]:
        """What must be alike on all ranks: else one would wait for a broadcast that no other makes."""
        parts = [part for name, handler in self._handlers.items() for part in _forms_of(name, handler)]
        return [*parts, *(("attribute", name) for name in self._saved_state)]

    def reset(self) -> None:
        """Has samplers share out what is left among the ranks that there are now; optimizers give up what was on its
        way."""
        for handler in self._handlers.values():
            handler.reset()
        for value in [*(one.value for one in self._handlers.values()), *self._attributes().kept()]:
            give_up = getattr(value, "_give_up", None)
            if give_up is not None:
                give_up()
        super().reset()

    def _own_parts(self) -> dict[str, OwnPart]:
        parts = super()._own_parts()
        handlers = self._handlers.items()
        parts.update({name: handler for name, handler in handlers if handler.has_own()})
        local = {
            parameter
            for _, handler in handlers
            if isinstance(handler, OptimizerStateHandler)
            for parameter in handler.local_parameters()
        }
        for name, handler in handlers if local else ():
            if isinstance(handler.value, torch.nn.Module) and name not in parts:
                named = [key for key, one in handler.value.named_parameters() if one in local]
                if named:
                    parts[name] = LocalParameters(handler.value, named)
        return parts

    def _save(self) -> None:
        for handler in self._handlers.values():
            if not (self._is_just_saved and handler.sync_saves()):
                handler.save()
        super()._save()

    def _kept(self) -> dict[str, dict[str, Any]]:
        """What the handlers keep for restore()."""
        return {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in self._handlers.items()
        }

    def _on_disk(self) -> dict[str, Any]:
        return {**super()._on_disk(), "handlers": self._kept()}

    def _take_from_disk(self, found: dict[str, Any]) -> None:
        super()._take_from_disk(found)
        for name, handler in self._handlers.items():
            vars(handler).update(found["handlers"][name])

    def _content(self) -> Any:
        return super()._content(), self._kept()

    def _accepts(self, content: Any) -> bool:
        plain, kept = content
        if not super()._accepts(plain) or set(kept) != set(self._handlers):
            return False
        return all(_takes(handler, kept[name]) for name, handler in self._handlers.items())

    def _set_content(self, content: Any) -> None:
        plain, kept = content
        super()._set_content(plain)
        for name, handler in self._handlers.items():
            vars(handler).update(kept[name])
