"""metrics() as one flat dictionary of numbers, which trackers of experiments take as it is. Thread: any."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from horoclone.runtime.observe import metrics

# What the strictest tracker (MLflow) allows in a name; the others allow more.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")


def flat_metrics(prefix: str = "horoclone/") -> dict[str, float]:
    """Returns `hvd.metrics()` of this rank as {name: number}, for TensorBoard, W&B, MLflow or print.

    The names are `prefix` and the path to the number, joined by slashes: "horoclone/operations",
    "horoclone/last_ready/0/rank1/seconds". Numbers are int or float, truth is 1 or 0; texts and None are left out.
    NotInitialized before init.

        wandb.log(hvd.flat_metrics(), step=step)
        mlflow.log_metrics(hvd.flat_metrics(), step=step)
    """
    return flattened(metrics(), prefix)


def flattened(nested: Any, prefix: str = "") -> dict[str, float]:
    """The numbers in dictionaries, lists and tuples of any depth, by their paths.

    What is in a list is named by its place in it; a dictionary that says a rank by "rank1", so that a name means the
    same rank at all times; what is in a named tuple by its field.
    """
    return {_NOT_IN_NAMES.sub("_", prefix + "/".join(path)): value for path, value in _numbers(nested, ())}


def _numbers(nested: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(nested, Real):
        value: Any = nested  # also a bool, or a scalar of NumPy's
        yield path, value.item() if hasattr(value, "item") else value + 0
        return
    if hasattr(nested, "_asdict"):
        nested = nested._asdict()
    if isinstance(nested, Mapping):
        parts = [(str(key), value) for key, value in nested.items()]
    elif isinstance(nested, (list, tuple)):
        parts = [_part(place, value) for place, value in enumerate(nested)]
    else:
        return
    for name, value in parts:
        yield from _numbers(value, (*path, name))


def _part(place: int, value: Any) -> tuple[str, Any]:
    if isinstance(value, Mapping) and "rank" in value:
        return f"rank{value['rank']}", {key: one for key, one in value.items() if key != "rank"}
    return str(place), value
