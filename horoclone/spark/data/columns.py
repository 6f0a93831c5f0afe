"""What is known of the columns that a model is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

VECTOR, ARRAY, SCALAR = "vector", "array", "scalar"
# Spark's names of scalar types -> what a value is to NumPy; others have no numbers in them.
NUMBERS = {
    "boolean": np.dtype("bool"),
    "tinyint": np.dtype("int8"),
    "smallint": np.dtype("int16"),
    "int": np.dtype("int32"),
    "bigint": np.dtype("int64"),
    "float": np.dtype("float32"),
    "double": np.dtype("float64"),
}


class Column(NamedTuple):
    """kind: VECTOR (of pyspark.ml), ARRAY or SCALAR. type: of a value, in Spark's words. size: values in a row; 0: it
    is not known."""

    kind: str
    type: str
    size: int


def check_present(needed: Mapping[str, Sequence[str]], present: Sequence[str], where: str) -> None:
    """needed: parameter -> columns. ValueError that names the parameter and the columns that are not there."""
    for parameter, names in needed.items():
        missing = [name for name in names if name not in present]
        if missing:
            raise ValueError(
                f"{parameter}: {', '.join(map(repr, missing))} is not among the columns of {where}: "
                f"{', '.join(present) or 'there are none'}"
            )


def check_shapes(
    parameter: str,
    names: Sequence[str],
    shapes: Sequence[Sequence[int]] | None,
    columns: Mapping[str, Column],
) -> None:
    """shapes: of the model's inputs or outputs for these columns, -1 for the batch. ValueError where sizes differ."""
    if shapes is None:
        return
    if len(shapes) != len(names):
        raise ValueError(
            f"{parameter}: {len(shapes)} shapes for {len(names)} columns ({', '.join(names)}); give one for each"
        )
    for name, shape in zip(names, shapes, strict=True):
        size, wanted = columns[name].size, abs(int(np.prod([one or -1 for one in shape])))
        if size and size != wanted:
            raise ValueError(
                f"{parameter}: column {name!r} has {size} values in a row, the shape {list(shape)} has {wanted}"
            )
