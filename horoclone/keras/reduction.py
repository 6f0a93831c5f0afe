"""Reduces one optimizer's gradients over the ranks: which are reduced, in which groups, and what happens to the others.

The rules are here, once; on_tensorflow.py, on_jax.py and on_torch.py move the tensors of their backend. Thread: the one
that trains (on TensorFlow and JAX, the one that traces).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from horoclone.elastic.member import is_elastic
from horoclone.errors import Unsupported
from horoclone.gradient_names import Turn, named_by
from horoclone.keras.compared import Watch
from horoclone.keras.flavor import backend
from horoclone.ops import Adasum, Average, Max, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set

Grads = Sequence[Any]


_LOCAL = (
    "this is a copy of a DistributedOptimizer with local variables, for a model that does not have these. Wrap it "
    "again with this model's: hvd.PartialDistributedOptimizer(model.optimizer, local_layers=[...])."
)


@dataclass
class Part:
    """Gradients that go out as one operation: their places in the optimizer's list."""

    name: str
    places: list[int]
    op: int
    prescale: float
    postscale: float
    compression: Any
    divisible: bool = False  # nobody asked for just this group
    weight: Any = None  # how much this rank counts in their mean


@dataclass
class Reduction:
    """What DistributedOptimizer was told about gradients. `key_of` (the optimizer's) identifies variables."""

    op: int
    predivide: float
    compression: Any
    sparse_as_dense: bool
    groups: int | list[list[Any]]
    process_set: ProcessSet
    scale_local_gradients: bool
    passes: int
    average_passes: bool
    name: str
    named: bool  # by the user, so that the name is unlike others
    local_variables: list[Any] = field(default_factory=list)
    local_layers: list[Any] = field(default_factory=list)  # asked at use, as they may not be built yet
    # Perhaps for another model, with local variables of its own
    is_copy: bool = field(default=False, compare=False)
    refusal: str = ""  # why these options cannot be used
    turn: Turn = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        everybody = self.process_set is global_process_set
        self.turn = Turn((self.name, None if everybody else tuple(self.process_set.ranks or ())))

    def copied(self) -> Reduction:
        """The same options for a copy of the optimizer."""
        variables, layers = list(self.local_variables), list(self.local_layers)
        return replace(self, is_copy=True, local_variables=variables, local_layers=layers)

    def __getstate__(self) -> dict[str, Any]:
        """Variables and layers stay in their process."""
        groups = self.groups if isinstance(self.groups, int) else 0
        refusal = _LOCAL if self.local_variables or self.local_layers else self.refusal
        own = {"groups": groups, "local_variables": [], "local_layers": [], "refusal": refusal, "turn": None}
        everybody = self.process_set is global_process_set
        return {**self.__dict__, **own, "process_set": None if everybody else self.process_set}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_set = state["process_set"] or global_process_set
        self.__post_init__()

    def active(self) -> bool:
        """Whether there is anybody to reduce with. NotInitialized before init(), Unsupported for a copy of which
        options are missing."""
        if not self.process_set.included():
            return False
        # What one rank of an elastic job traces is run when others have come, too.
        if (self.process_set.size() or 1) <= 1 and not is_elastic():
            return False
        if self.refusal:
            raise Unsupported(self.refusal)
        return True

    def reduce(
        self,
        grads: Grads,
        variables: Sequence[Any],
        key_of: Callable[[Any], Hashable],
        numbers: Mapping[Hashable, int],
        weight: Any = None,
        watch: tuple[Watch, Any] | None = None,
    ) -> list[Any]:
        """The gradients to apply: reduced over the ranks, local ones divided by the size, None where there is none.

        grads: one per variable, dense or (TensorFlow) IndexedSlices, or None; what a tape has reduced stays as it is.
        numbers: of all the optimizer's variables, the same on every rank. In their order gradients meet, in whichever
        they are given. weight: how much this rank counts in the mean. watch: compares values, of this optimizer.
        Raises the errors of the operation.
        """
        if len(grads) != len(variables):
            raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables")
        if not self.active():
            return list(grads)
        known = [numbers.get(key_of(variable), len(numbers) + i) for i, variable in enumerate(variables)]
        order = sorted(range(len(known)), key=known.__getitem__)
        if order != list(range(len(known))):
            in_order = self.reduce(
                [grads[i] for i in order], [variables[i] for i in order], key_of, numbers, weight, watch
            )
            as_given = sorted(zip(order, in_order, strict=True), key=itemgetter(0))
            return [gradient for _, gradient in as_given]
        mover = importlib.import_module(f"horoclone.keras.on_{backend()}")
        done = self.reduced_before(grads, variables)
        todo = [i for i in range(len(variables)) if not done[i]]
        local = self._local_keys(key_of)
        if local and self.is_copy and local.isdisjoint(key_of(variable) for variable in variables):
            raise Unsupported(_LOCAL)
        if weight is not None and local:
            raise ValueError("set_weight() does not work together with local variables")
        shared = [i for i in todo if key_of(variables[i]) not in local]
        result = list(grads)
        for i in sorted(set(todo) - set(shared)):
            if self.scale_local_gradients and grads[i] is not None:
                result[i] = mover.divided(grads[i], self.process_set)
        sent = shared if backend() == "torch" else [i for i in shared if grads[i] is not None]
        parts = self._parts(shared, variables, key_of, named_by([known[i] for i in sent], len(numbers)))
        for part in parts:
            part.weight = weight if part.op != Max else None
        watched = None
        if watch is not None and parts:
            watched = watch[0].watched(parts[0].name, watch[1], [variables[i] for i in sent])
        for i, reduced in mover.reduce(parts, grads, variables, self, watched).items():
            result[i] = reduced
        return result

    def check_weighable(self) -> None:
        """ValueError where these options leave no plain mean of gradients."""
        if self.op != Average or self.predivide != 1.0 or self.passes > 1:
            raise ValueError(
                "set_weight() works with op=hvd.Average, and without gradient_predivide_factor and "
                "backward_passes_per_step"
            )

    def differs_when_repeated(self) -> bool:
        """Whether a reduction of what is reduced changes it. Where it does not, it is better than to take a gradient of
        another origin for reduced."""
        return self.op == Sum or bool(self.local_variables or self.local_layers)

    def reduced_before(self, grads: Grads, variables: Sequence[Any]) -> list[bool]:
        """For each gradient whether it is reduced already; only TensorFlow knows such ones."""
        if backend() != "tensorflow":
            return [False] * len(grads)
        return importlib.import_module("horoclone.keras.on_tensorflow").reduced_before(
            grads, variables, self.differs_when_repeated()
        )

    def all_reduced_before(self, grads: Grads, variables: Sequence[Any]) -> bool:
        """Whether every gradient that there is is reduced already."""
        done = self.reduced_before(grads, variables)
        return any(done) and all(one or gradient is None for one, gradient in zip(done, grads, strict=True))

    def _local_keys(self, key_of: Callable[[Any], Hashable]) -> set[Hashable]:
        weights = [weight for layer in self.local_layers for weight in layer.trainable_weights]
        return {key_of(variable) for variable in [*self.local_variables, *weights]}

    def _parts(
        self,
        shared: Sequence[int],
        variables: Sequence[Any],
        key_of: Callable[[Any], Hashable],
        which: str,
    ) -> list[Part]:
        """The groups of the user, then everything else; the float8 scales that Keras carries as gradients by Max.
        which: goes into the names, see named_by()."""
        scales = [i for i in shared if getattr(variables[i], "overwrite_with_gradient", False)]
        rest = [i for i in shared if i not in scales]
        lists: list[list[int]] = []
        if isinstance(self.groups, list):
            place_of = {key_of(variables[i]): i for i in rest}
            for group in self.groups:
                lists.append([place_of[key_of(v)] for v in group if key_of(v) in place_of])
            grouped = {i for places in lists for i in places}
            lists.append([i for i in rest if i not in grouped])
        elif self.groups > 0:
            count = min(self.groups, len(rest)) or 1
            cuts = [len(rest) * k // count for k in range(count + 1)]
            lists = [rest[a:b] for a, b in pairwise(cuts)]
        else:
            lists = [rest]
        name = f"{self.name}{self.turn.name()}"
        parts = [
            Part(
                f"{name}.{n}{which}",
                places,
                self.op,
                1.0 / self.predivide,
                self.predivide,
                self.compression,
                divisible=not self.groups,
            )
            for n, places in enumerate(lists)
            if places
        ]
        if scales:
            parts.append(Part(f"{name}.scales{which}", scales, Max, 1.0, 1.0, None))
        return parts


def default_reduction(name: str) -> Reduction:
    """What DistributedOptimizer(optimizer) without options means."""
    return Reduction(Average, 1.0, None, False, 0, global_process_set, True, 1, False, name, False)


def checked(
    op: int,
    predivide: float,
    passes: int,
    num_groups: int,
    groups: Any,
    process_set: ProcessSet,
) -> int | list[list[Any]]:
    """Checks arguments of DistributedOptimizer and gives `groups` in one form. ValueError says what is wrong, for a
    predivide factor of 0 ZeroDivisionError."""
    if resolve_reduce(None, op) not in (Average, Sum, Adasum):
        raise ValueError("DistributedOptimizer reduces gradients with op=hvd.Average, hvd.Sum or hvd.Adasum.")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if predivide != 1.0 and op != Average:
        warnings.warn("gradient_predivide_factor has no effect with op != Average", stacklevel=4)
    if predivide == 0:
        raise ZeroDivisionError("gradient_predivide_factor must not be 0")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes} must be at least 1")
    if num_groups:
        text = "Parameter `num_groups` has been replaced by `groups` and will be removed."
        warnings.warn(text, DeprecationWarning, stacklevel=4)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    if isinstance(groups, int) and groups >= 0:
        return groups
    if not isinstance(groups, list) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of list of variables.")
    members = [id(variable) for group in groups for variable in group]
    if len(set(members)) != len(members):
        raise ValueError("A variable can only appear once in groups.")
    return [list(group) for group in groups]


def layers_of(local_layers: Any) -> list[Any]:
    """local_layers of PartialDistributedOptimizer as a list: None, one layer, or several."""
    if local_layers is None:
        return []
    return list(local_layers) if isinstance(local_layers, Iterable) else [local_layers]
