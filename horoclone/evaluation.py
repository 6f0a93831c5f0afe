"""Evaluation that counts each sample once, for any number of ranks, in every binding."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, overload

import numpy as np

from horoclone.objects import allgather_object
from horoclone.process_sets import ProcessSet, global_process_set

__all__ = ["EvaluationSampler", "metric_mean", "metric_sum"]


class EvaluationSampler(Sequence[int]):
    """The indices of this rank's part of `dataset`: each sample is on one rank, and none is repeated.

    dataset: anything with a length. The parts lie one behind the other in the order of the ranks, so that
    hvd.allgather() of what was computed for each sample is in the order of the data set. They differ in length by at
    most one sample, and are empty on some ranks where there are fewer samples than ranks: ranks may make different
    numbers of batches, so nothing in the loop may wait for other ranks. metric_mean() and metric_sum() after it do.
    Give it to a DataLoader as its sampler, or index arrays with `sampler[:]`. Needs hvd.init() first; in an elastic
    job it follows the number of ranks.
    """

    def __init__(self, dataset: Sized, process_set: ProcessSet = global_process_set) -> None:
        self.dataset = dataset
        self.process_set = process_set

    def _part(self) -> range:
        rank, size = self.process_set.rank(), self.process_set.size()
        if rank is None or size is None:
            raise ValueError(
                f"this rank is not in {self.process_set}, over which EvaluationSampler shares the data"
            )
        n = len(self.dataset)
        return range(-(-rank * n // size), -(-(rank + 1) * n // size))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Any: ...

    def __getitem__(self, index: int | slice) -> Any:
        found = self._part()[index]
        # An array of indices, since JAX takes no range for one.
        return found if isinstance(found, int) else np.array(found, np.int64)

    def __iter__(self) -> Iterator[int]:
        return iter(self._part())

    def __len__(self) -> int:
        return len(self._part())


def metric_sum(values: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the sum over the ranks of a number, an array or a tensor, or of each entry of a dictionary of those.

    Integers are added as integers and anything else in float64. Numbers and tensors of one element come back as
    Python's numbers, arrays as NumPy's. On every rank ValueError where names or shapes differ, and OverflowError where
    64 bits do not hold the sum of an array of integers.
    """
    told = _gathered("metric_sum", lambda: _on_host(values), name, process_set)
    return _each(told, "metric_sum", lambda parts: _added(parts, [1] * len(parts)))


def metric_mean(
    values: Any, count: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the mean over all samples of a number, an array or a tensor, or of each entry of a dictionary of those.

    values: the mean over this rank's samples. count: how many those are (or their weight); where it is 0 the values
    are not looked at. Computed in float64; numbers come back as Python's, arrays as NumPy's. ValueError on every rank
    where names or shapes differ, where a count is negative or not finite, and where all are 0.
    """

    def mine() -> Any:
        number = _on_host(count)
        return None if np.all(number == 0) else _on_host(values), number

    told = _gathered("metric_mean", mine, name, process_set)
    counts = [weight for _, weight in told.values()]
    for rank, (_, weight) in told.items():
        if not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(
                f"metric_mean: the count of rank {rank} is {weight!r}; it must be a finite number, 0 or more"
            )
    whole = math.fsum(counts)
    if whole == 0:
        raise ValueError(
            "metric_mean: the counts of all ranks are 0, so there is no mean. Was the data set empty?"
        )
    used = {rank: part for rank, (part, _) in told.items()}
    return _each(used, "metric_mean", lambda parts: _added(parts, [float(one) for one in counts]) / whole)


def _gathered(
    call: str, mine: Callable[[], Any], name: str | None, process_set: ProcessSet
) -> dict[int, Any]:
    """What each rank says; an error of one is raised on all, since the others would wait for it."""
    try:
        said = mine()
    except Exception as error:
        said = error
    told = allgather_object(said, name or f"hvd.{call}", process_set)
    by_rank = dict(zip(getattr(process_set, "ranks", None) or range(len(told)), told, strict=True))
    for rank, value in by_rank.items():
        if isinstance(value, Exception):
            raise ValueError(f"{call}: rank {rank} gave a value that is not a number: {value}") from value
    return by_rank


def _on_host(value: Any) -> Any:
    """Any framework's value as numbers and arrays of NumPy, of int64, uint64 or float64."""
    if isinstance(value, Mapping):
        return {key: _on_host(entry) for key, entry in value.items()}
    if hasattr(value, "detach"):  # torch's
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    elif hasattr(value, "numpy"):  # TensorFlow's
        value = value.numpy()
    elif type(value).__module__.startswith("cupy"):
        value = sys.modules["cupy"].asnumpy(value)
    array = np.asarray(value)
    if array.dtype.kind not in "buifV":  # V: bfloat16 and the like
        raise TypeError(f"{type(value).__name__} of dtype {array.dtype}; give real numbers")
    if array.dtype.kind in "bui":
        array = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
    else:
        array = array.astype(np.float64)
    return array.item() if array.size == 1 else array


def _each(told: Mapping[int, Any], call: str, combine: Callable[[Sequence[Any]], Any]) -> Any:
    """Combines the ranks' values, or those of each entry. None: a rank that has nothing to say."""
    forms = {rank: _form(value) for rank, value in told.items() if value is not None}
    first = next(iter(forms))
    if any(form != forms[first] for form in forms.values()):
        raise ValueError(f"{call}: the ranks have different names or shapes: {forms}. Give the same on all.")
    return _combined(list(told.values()), told[first], combine)


def _combined(parts: Sequence[Any], first: Any, combine: Callable[[Sequence[Any]], Any]) -> Any:
    if not isinstance(first, Mapping):
        return combine(parts)
    return {key: _combined([part and part[key] for part in parts], first[key], combine) for key in first}


def _form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _form(value[key]) for key in sorted(value, key=str)}
    return np.shape(value)


def _added(parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """The sum of the products, in the order of the ranks; of numbers, rounded once."""
    terms = [part * weight for part, weight in zip(parts, weights, strict=True) if part is not None]
    if all(isinstance(term, int) for term in terms):
        return sum(terms)
    if all(np.ndim(term) == 0 for term in terms):
        return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)
    total = np.sum(terms, axis=0)
    if not np.allclose(total, np.sum(terms, axis=0, dtype=np.float64), equal_nan=True):
        raise OverflowError(f"a sum of arrays of integers is too large for {total.dtype}; give float64")
    return total
