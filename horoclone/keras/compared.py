"""What of a Keras optimizer is compared between the ranks: the variables that it updates, and what it keeps for each.

A backend's module reads, sends and looks (on_torch.py, on_tensorflow.py, on_jax.py). Not compared are local variables,
the sums of backward_passes_per_step, and what a model has beside its trainable variables: statistics of normalisation
follow each rank's own batches, and seeds are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from horoclone.comparison import Policy, policy


@dataclass
class Watched:
    """What one reduction compares. name: of its operations."""

    name: str
    own: Policy
    values: Callable[[], list[tuple[str, Any]]]  # variables, with what they are called
    kept: dict[str, Any]  # by name: what a backend has made for it
    number: Callable[[], Any]  # of the updates that the optimizer has made


@dataclass
class Watch:
    """Of one optimizer."""

    own: Policy = field(default_factory=policy)
    kept: dict[str, Any] = field(default_factory=dict)

    def watched(self, name: str, optimizer: Any, variables: Sequence[Any]) -> Watched:
        """Of the gradients of these variables."""

        def values() -> list[tuple[str, Any]]:
            found = [(f"the weight {name_of(variable)!r}", variable) for variable in variables]
            for variable, slots in zip(variables, slots_of(optimizer, variables), strict=True):
                found += [(f"the optimizer's state of {name_of(variable)!r}", slot) for slot in slots]
            return found

        def number() -> Any:
            return native_of(getattr(optimizer, "inner_optimizer", optimizer).iterations)

        return Watched(name, self.own, values, self.kept, number)


def native_of(variable: Any) -> Any:
    """The backend's variable that stands behind one of Keras."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def slots_of(optimizer: Any, variables: Sequence[Any]) -> list[list[Any]]:
    """What the optimizer keeps for each of these variables, momenta for example."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    # MultiOptimizer: each has some of them
    if isinstance(several := getattr(optimizer, "optimizers", None), list):
        of_each = zip(*(slots_of(one, variables) for one in several), strict=True)
        return [[slot for slots in one for slot in slots] for one in of_each]
    slots = getattr(optimizer, "_slots", None)
    if slots is not None:  # tf_keras.optimizers.legacy
        return [list(slots.get(getattr(v, "_unique_id", None), {}).values()) for v in variables]
    indices = getattr(optimizer, "_trainable_variables_indices", None) or getattr(
        optimizer, "_index_dict", {}
    )
    lists = [v for key, v in vars(optimizer).items() if key != "_variables" and isinstance(v, (list, tuple))]
    # None: there is nothing of the kind for that variable.
    lists = [
        one
        for one in lists
        if len(one) == len(indices) and all(v is None or hasattr(v, "dtype") for v in one)
    ]
    found = []
    for variable in variables:
        place = indices.get(optimizer._var_key(variable)) if indices else None
        kept = [] if place is None else [one[place] for one in lists if one[place] is not None]
        found.append([one for one in kept if native_of(one) is not native_of(variable)])
    return found


def names_of(variables: Sequence[Any], places: Sequence[int]) -> list[str]:
    """Those of the variables at these places."""
    return [name_of(variables[place]) for place in places]


def name_of(variable: Any) -> str:
    """Keras's path of a variable, which may be another one on another rank."""
    return str(getattr(variable, "path", None) or variable.name)
