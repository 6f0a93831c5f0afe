"""What all classes that DistributedOptimizer makes share: how they derive from the user's class, names, pickling.

The class has the wrapped class's name and derives from it, with a mixin in front: distributed.py's, which reduces
gradients, or adasum.py's, which reduces what a step has changed. It says that it is of this package (of Horovod's where
scripts import that): by its module libraries see that an optimizer is wrapped already. Thread: the one that trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from horoclone.errors import NotInitialized, Unsupported
from horoclone.gradient_names import Turn
from horoclone.process_sets import global_process_set
from horoclone.runtime import is_initialized
from horoclone.stand_ins import shown_module
from horoclone.torch.functions import same_groups


class WrappedOptimizer:
    """Base of the mixins."""

    _wrapped_class: type
    _own_attributes: frozenset[str] = frozenset()  # the mixin's: not part of the wrapped optimizer's state
    _parameter_names: dict[torch.Tensor, str]
    _maker: Callable[..., Any]  # DistributedOptimizer, and its options: copies are made with them
    _options: dict[str, Any]
    backward_passes_per_step: int
    _turn: Turn  # among optimizers of parameters with the same names

    def _name_of(self, parameter: torch.Tensor) -> str:
        name = self._parameter_names.get(parameter)
        if name is None:
            name = self._parameter_names[parameter] = f"allreduce.noname.{len(self._parameter_names)}"
        return name

    def _name_last_group(self) -> None:
        """After add_param_group: takes over the names that came with the group."""
        group = self.__dict__["param_groups"][-1]
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False):
            self._parameter_names.setdefault(parameter, name)

    def _readable_state(self) -> AbstractContextManager[None]:
        """Within it self.state is of whole parameters."""
        return nullcontext()

    def set_weight(self, weight: Any) -> None:
        """ValueError: DistributedOptimizer(op=hvd.Average) without a quorum takes the mean of gradients."""
        raise ValueError("optimizer.set_weight() does not work together with op=hvd.Adasum and quorum=")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped class, but the parameter groups stay the objects that they are, which the optimizer that was
        wrapped shares, and a scheduler that was made with that one."""
        with same_groups(self):  # type: ignore[arg-type]
            super().load_state_dict(state_dict)  # type: ignore[misc]

    def _local_parameters(self) -> list[torch.Tensor]:
        """Those whose gradients stay on this rank."""
        return []

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles reduce, too: they are wrapped anew, with the same options. Unsupported where options are
        bound to this very optimizer."""
        for option in ("cross_barrier", "quorum"):
            if self._options[option] is not None:
                raise Unsupported(
                    f"an optimizer with {option}= cannot be copied or pickled. Make another one with "
                    "hvd.DistributedOptimizer(...) and give it this one's state_dict()"
                )
        plain = type(self)._wrapped_class
        own = self._own_attributes | _OWN_ATTRIBUTES
        state = {key: value for key, value in self.__dict__.items() if key not in own}
        if hasattr(plain, "__getstate__"):
            with self._readable_state():
                state = plain.__getstate__(self)  # type: ignore[attr-defined]
        groups = self.__dict__["param_groups"]
        names = [(self._name_of(p), p) for group in groups for p in group["params"]]
        passes, local = self.backward_passes_per_step, self._local_parameters()
        options = {**self._options, "backward_passes_per_step": passes, "local_parameters": local}
        return _copied, (self._maker, plain, state, names, options)


_OWN_ATTRIBUTES = frozenset({"_parameter_names", "_maker", "_options", "backward_passes_per_step", "_turn"})


class NotStarted(WrappedOptimizer):
    """A copy that was loaded where there is no runtime: to look at its state, and to be wrapped."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotInitialized: it would train alone."""
        raise NotInitialized(
            "this optimizer is a copy of a DistributedOptimizer, and was loaded before hvd.init(), so that it would "
            "train without the other ranks. Load it after hvd.init(), or wrap it: hvd.DistributedOptimizer(optimizer, "
            "named_parameters=model.named_parameters())"
        )


def _copied(
    make: Callable[..., Any], plain: type, state: Any, names: list[tuple[str, Any]], options: dict[str, Any]
) -> Any:
    optimizer: Any = object.__new__(plain)
    if hasattr(optimizer, "__setstate__"):
        optimizer.__setstate__(state)
    else:
        optimizer.__dict__.update(state)
    if is_initialized():
        copy = make(optimizer, names, **options)
    else:
        copy = wrap(optimizer, NotStarted, names, options["backward_passes_per_step"], make, options)
    copy._turn.withdraw()
    if "_reducer" in copy.__dict__:
        copy._reducer.step_back()
    return copy


def wrap(
    optimizer: Any,
    mixin: type,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    passes: int,
    make: Callable[..., Any],
    options: dict[str, Any],
) -> Any:
    """An instance of the derived class that shares everything with `optimizer`. The mixin's attributes are not set.

    make, options: DistributedOptimizer and what it was given. ValueError for names that are no names.
    """
    base = type(optimizer)._wrapped_class if isinstance(optimizer, NotStarted) else type(optimizer)
    attributes = {
        "__module__": shown_module("torch.optimizer"),
        "__doc__": base.__doc__,
        "_wrapped_class": base,
    }
    derived = type(base.__name__, (mixin, base), attributes)
    wrapped: Any = object.__new__(derived)
    # Not __init__, which would need the user's arguments again. A step patched in by a scheduler stays behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # its scheduler does not see our steps, and would warn of none
    wrapped._parameter_names = _named(optimizer.param_groups, named_parameters)
    wrapped.backward_passes_per_step = passes
    wrapped._maker, wrapped._options = make, options
    own = (wrapped._name_of(p) for group in optimizer.param_groups for p in group["params"])
    everybody, members = options["process_set"] is global_process_set, options["process_set"].ranks or ()
    wrapped._turn = Turn((tuple(sorted(own)), None if everybody else tuple(members)))
    wrapped._turn.announce()
    _wrapped[id(wrapped)] = wrapped
    return wrapped


# By id(): a class may define ==
_wrapped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def is_wrapped_for(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some optimizer that wrap() has made has one of these parameters."""
    optimizers = list(_wrapped.values())
    here = {id(one) for one in parameters} if optimizers else set()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return any(id(one) in here for group in groups for one in group["params"])


def parameters_of(things: Any) -> list[torch.Tensor]:
    """The parameters of a parameter, a module, or several of either. ValueError for anything else."""
    if isinstance(things, torch.Tensor):
        return [things]
    if isinstance(things, torch.nn.Module):
        return list(things.parameters())
    if isinstance(things, Iterable) and not isinstance(things, (str, bytes)):
        return [parameter for thing in things for parameter in parameters_of(thing)]
    raise ValueError(f"local parameters must be parameters or modules, not {type(things).__name__}")


def checked_passes(passes: int) -> int:
    """backward_passes_per_step. ValueError below 1."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes} must be at least 1")
    return passes


def _named(
    param_groups: Sequence[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Parameter -> name for everything that the optimizer has. ValueError for duplicates and gaps."""
    parameters = [p for group in param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}" for i, p in enumerate(parameters)}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    duplicates = (
        sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    )
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {parameter: name for name, parameter in pairs}
    unnamed = [p for p in parameters if p not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            + ", ".join(str(id(p)) for p in unnamed)
        )
    return known
