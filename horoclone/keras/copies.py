"""Copies of distributed optimizers: they reduce as well, or say at their first step what to add.

Keras copies an optimizer through its configuration: in from_config(get_config()), in pickles, in saved models. A
configuration may hold nothing that the plain class does not know, as what was saved has to load without horoclone. So
the mark of a distributed optimizer stands in its name, which is free: "SGD.distributed", and with options other than
the defaults a word for them, "SGD.distributed.1f3a9c02". Where this module is loaded, an optimizer that is made with
such a name becomes a distributed one; elsewhere it is a name.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horoclone.errors import Unsupported
from horoclone.keras.flavor import assign, to_numpy
from horoclone.keras.reduction import Reduction, default_reduction
from horoclone.process_sets import global_process_set
from horoclone.stand_ins import shown_module

_MARK = re.compile(r"(.*)\.distributed(?:\.([0-9a-f]{8}))?")
OTHER_VARIABLES = (
    "this {kind} is a copy of one that has trained, and was built for other variables: its state is of {variables} "
    "values, and that of the original of {values}. Call copy.build(model.trainable_variables) before its first step, "
    "with the variables that the original was built for, in their order; or make a new optimizer, without state."
)
_known: dict[str, Reduction] = {}  # word -> options, of optimizers that this process has made or copied


def _names(values: list[Any]) -> list[Any]:
    return [(getattr(value, "path", None) or getattr(value, "name", ""), id(value)) for value in values]


def word_of(reduction: Reduction) -> str:
    """A word for options that are not the defaults, "" for those."""
    if reduction == default_reduction(reduction.name):
        return ""
    groups, compression, ranks = reduction.groups, reduction.compression, reduction.process_set.ranks
    parts = (
        reduction.op, reduction.predivide, getattr(compression, "__qualname__", repr(compression)),
        reduction.sparse_as_dense, groups if isinstance(groups, int) else [_names(group) for group in groups],
        None if reduction.process_set is global_process_set else ranks, reduction.scale_local_gradients,
        reduction.passes, reduction.average_passes, reduction.name, reduction.named, reduction.refusal,
        _names(reduction.local_variables), _names(reduction.local_layers),
    )  # fmt: skip
    word = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    _known[word] = reduction.copied()
    return word


def marked(config: dict[str, Any], reduction: Reduction) -> dict[str, Any]:
    """The configuration with the mark in its name."""
    word = word_of(reduction)
    return {**config, "name": f"{config['name']}.distributed{'.' if word else ''}{word}"}


def unmarked(name: Any) -> tuple[Any, str | None]:
    """The name without its mark, and the word in the mark: None where there is no mark."""
    found = _MARK.fullmatch(name) if isinstance(name, str) else None
    return (name, None) if found is None else (found[1], found[2] or "")


def reduction_of(word: str, kind: str) -> Reduction:
    """The options behind a mark; where they are not known, some that refuse to reduce."""
    if not word:
        return default_reduction(f"Distributed{kind}")
    if word in _known:
        return _known[word].copied()
    refused = default_reduction(f"Distributed{kind}")
    refused.refusal = (
        f"this {kind} is a copy of a DistributedOptimizer whose options (op, groups, compression, process_set, ...) "
        "were not saved with it. Wrap it with the same options: hvd.DistributedOptimizer(model.optimizer, ...), or "
        "load the model with hvd.load_model()."
    )
    return refused


def notice_marks(
    base: type, mixin: type, state: Callable[[Reduction], Any], distribute: Callable[..., Any]
) -> None:
    """From now on an optimizer whose constructor is given a marked name, as it stands in the configuration of a
    distributed one, is made distributed. mixin: the class of those that are already."""
    plain = base.__init__  # type: ignore[misc]

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        words = [unmarked(value)[1] for value in (*args, *kwargs.values())]
        plain(self, *(unmarked(a)[0] for a in args), **{key: unmarked(v)[0] for key, v in kwargs.items()})
        for word in words:
            if word is None:
                continue
            reduction = reduction_of(word, type(self).__name__)
            if isinstance(self, mixin):
                self.__dict__["_horoclone"] = state(reduction)
            else:
                distribute(self, reduction)._horoclone.implied = True

    base.__init__ = __init__  # type: ignore[misc]


def names_of(base: type) -> dict[str, Any]:
    """Attributes of a class derived from `base`. Reached as `horovod`, it says so as Horovod's does, because
    libraries ask a class's module whether its optimizer is wrapped."""
    names = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
    if (shown := shown_module("_keras")).startswith("horovod."):
        names["__module__"] = shown
    return names


class Copied:
    """How a distributed optimizer is copied and pickled, whichever Keras it is of."""

    _horoclone: Any
    _horoclone_reduction: Reduction  # of the class, which makes more of its kind, as Horovod's does
    _horoclone_base: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["_horoclone"] = cls._state(cls._horoclone_reduction.copied())
        return made

    @staticmethod
    def _state(reduction: Reduction) -> Any:
        raise NotImplementedError

    @staticmethod
    def _distribute(optimizer: Any, reduction: Reduction) -> Any:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """As the wrapped class, with a name by which copies are known."""
        config = super().get_config()  # type: ignore[misc]
        return marked(config, self._horoclone.reduction) if self._is_marked() else config

    def _is_marked(self) -> bool:
        return True

    def _own_variables(self) -> list[Any]:
        """The wrapped class's variables."""
        raise NotImplementedError

    def _to_build(self, variables: Sequence[Any]) -> list[Any]:
        """What to build for: of a copy whose first step has fewer variables than its original, all of the original's,
        in their order, or the state would not fit."""
        state, original = self._horoclone, self._horoclone.trained
        if original is None or not {id(v) for v in variables} <= {id(v) for v in original}:
            state.trained = list(variables)
        return list(state.trained)

    def _take_over(self) -> None:
        """Gives a copy the state of its original, once it has the variables for it. Unsupported, now and at each step,
        where these are others."""
        values, variables = self._horoclone.values, self._own_variables()
        if values is None:
            return
        self._horoclone.values = None
        shapes = [tuple(value.shape) for value in values]
        if shapes != [tuple(variable.shape) for variable in variables]:
            self._horoclone.reduction.refusal = OTHER_VARIABLES.format(
                kind=type(self).__name__, values=len(values), variables=len(variables)
            )
            raise Unsupported(self._horoclone.reduction.refusal)
        for variable, value in zip(variables, values, strict=True):
            assign(variable, value)

    def _values(self) -> list[Any] | None:
        """The state for a copy to take over; None: there is none yet."""
        if self._horoclone.values is not None or not self._has_state():
            return self._horoclone.values
        return [np.array(to_numpy(v)) for v in self._own_variables()]

    def _has_state(self) -> bool:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        config = super().get_config()  # type: ignore[misc]
        return _copy, (
            self._distribute,
            self._horoclone_base,
            config,
            self._horoclone.reduction,
            self._values(),
        )

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __copy__(self) -> Any:
        make, arguments = self.__reduce_ex__(2)
        made = make(*arguments)
        made._horoclone.trained = self._horoclone.trained
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.__copy__()
        return made


def _copy(
    distribute: Callable[[Any, Reduction], Any],
    base: Any,
    config: dict[str, Any],
    reduction: Reduction,
    values: list[Any] | None,
) -> Any:
    optimizer = distribute(base.from_config(dict(config)), reduction.copied())
    optimizer._horoclone.values = values
    if optimizer._has_state():
        optimizer._take_over()
    return optimizer
