"""From a DataFrame to Parquet in a store, and what a dataset there is like. Runs in the driver, imports PySpark."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from horoclone.spark.common.store import FilesystemStore
from horoclone.spark.data.columns import ARRAY, NUMBERS, SCALAR, VECTOR, Column, check_present
from horoclone.spark.data.reading import open_dataset, row_groups, rows_of

FILES_PER_RANK = 2  # so that every rank has row groups of its own, and epochs can change their order


class Wanted(NamedTuple):
    """What an estimator asks for. validation: a part of the rows (0 to 1), or a column that says which; None: none."""

    features: Sequence[str]
    labels: Sequence[str]
    weight: str | None
    validation: float | str | None
    seed: int
    ranks: int
    compress: bool

    @property
    def columns(self) -> list[str]:
        """Those that are read, each once."""
        return list(dict.fromkeys([*self.features, *self.labels, *([self.weight] if self.weight else [])]))

    def check(self, present: Sequence[str], where: str) -> None:
        """ValueError that names the parameter, for columns that are not there."""
        needed: dict[str, Sequence[str]] = {"feature_cols": self.features, "label_cols": self.labels}
        if self.weight:
            needed["sample_weight_col"] = [self.weight]
        check_present(needed, present, where)


class Dataset(NamedTuple):
    """Training data in a store. val_path is None where there is no validation."""

    train_path: str
    val_path: str | None
    train_rows: int
    val_rows: int
    columns: dict[str, Column]


def check_validation(validation: Any) -> None:
    """ValueError for what is neither a part from 0 to 1 nor the name of a column."""
    if validation is None or (isinstance(validation, str) and validation):
        return
    if isinstance(validation, (int, float)) and not isinstance(validation, bool) and 0 <= validation < 1:
        return
    raise ValueError(
        f"validation={validation!r}: give the part of the rows that is kept for validation (0 <= part < 1), or the "
        "name of a column that is true for them"
    )


@contextlib.contextmanager
def written(frame: Any, store: FilesystemStore, wanted: Wanted) -> Iterator[Dataset]:
    """The DataFrame's columns in the store while training lasts; then they are removed."""
    wanted.check(frame.columns, "the DataFrame")
    validation = wanted.validation
    if isinstance(validation, str):
        check_present({"validation": [validation]}, frame.columns, "the DataFrame")
    columns = _columns_of(frame, wanted)
    token = secrets.token_hex(6)
    train_path, val_path = store.get_train_data_path(token), store.get_val_data_path(token)
    train, val = _split(frame, wanted)
    try:
        train_rows = _write(train, store, train_path, wanted, columns, "train")
        val_rows = 0 if val is None else _write(val, store, val_path, wanted, columns, "validation")
        yield Dataset(train_path, None if val is None else val_path, train_rows, val_rows, columns)
    finally:
        for path in (train_path, val_path):
            store.remove(path)


def found(store: FilesystemStore, wanted: Wanted) -> Dataset:
    """What lies in the store already, for fit_on_parquet(). ValueError where it is missing, empty or has other
    columns."""
    train_path, val_path = store.get_train_data_path(), store.get_val_data_path()
    train_rows, columns = _look(store, train_path, wanted, "train_path")
    val_rows = 0
    if wanted.validation:
        val_rows, _ = _look(store, val_path, wanted, "val_path")
    return Dataset(train_path, val_path if wanted.validation else None, train_rows, val_rows, columns)


def _look(store: FilesystemStore, path: str, wanted: Wanted, parameter: str) -> tuple[int, dict[str, Column]]:
    import pyarrow

    try:
        dataset = open_dataset(path, store.storage_options)
        names = list(dataset.schema.names)
        groups = row_groups(dataset)
    except FileNotFoundError:
        raise ValueError(
            f"store: there is no data at {path}; write Parquet there, or give the Store another {parameter}"
        ) from None
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ValueError(f"store: {path} is not a Parquet dataset: {error}") from None
    if not groups:
        raise ValueError(f"store: no rows in {path}, so there is nothing to train on")
    wanted.check(names, path)
    first = groups[0].head(1, columns=wanted.columns)
    columns = {
        name: _column_of_arrow(dataset.schema.field(name).type, first[name]) for name in wanted.columns
    }
    return sum(map(rows_of, groups)), columns


def _column_of_arrow(kind: Any, first: Any) -> Column:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return Column(ARRAY, _spark_type(kind.value_type), len(first[0].as_py() or ()))
    return Column(SCALAR, _spark_type(kind), 1)


def _spark_type(kind: Any) -> str:
    try:
        name = str(kind.to_pandas_dtype().__name__)
    except (NotImplementedError, AttributeError):
        return str(kind)
    names = {str(dtype): spark for spark, dtype in NUMBERS.items()} | {"bool": "boolean"}
    return names.get(name.rstrip("_"), "string" if name in ("str_", "object_") else name)


def _columns_of(frame: Any, wanted: Wanted) -> dict[str, Column]:
    """ValueError where the rows of a column have different sizes, or none can be told."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType

    kinds, sizes = {}, []
    for name in wanted.columns:
        kind = frame.schema[name].dataType
        if isinstance(kind, VectorUDT):
            kinds[name] = VECTOR, "double"
            size = functions.size(vector_to_array(functions.col(f"`{name}`")))
        elif isinstance(kind, ArrayType):
            kinds[name] = ARRAY, kind.elementType.simpleString()
            size = functions.size(functions.col(f"`{name}`"))
        else:
            kinds[name] = SCALAR, kind.simpleString()
            continue
        sizes += [functions.min(size).alias(f"min:{name}"), functions.max(size).alias(f"max:{name}")]
    row = frame.agg(*sizes).first() if sizes else {}
    columns = {}
    for name, (kind, of) in kinds.items():
        smallest, largest = (1, 1) if kind == SCALAR else (row[f"min:{name}"], row[f"max:{name}"])
        if smallest != largest:
            raise ValueError(
                f"column {name!r} does not have a uniform shape: its rows have from {smallest} to {largest} values"
            )
        columns[name] = Column(kind, of, max(0, largest or 0))
    return columns


def _split(frame: Any, wanted: Wanted) -> tuple[Any, Any]:
    from pyspark.sql.functions import col

    validation = wanted.validation
    if not validation:
        return frame, None
    if isinstance(validation, str):
        is_val = col(f"`{validation}`").cast("boolean")
        return frame.filter(~is_val), frame.filter(is_val)
    train, val = frame.randomSplit([1.0 - validation, validation], seed=wanted.seed)
    return train, val


def _write(
    frame: Any, store: FilesystemStore, path: str, wanted: Wanted, columns: dict[str, Column], what: str
) -> int:
    """Gives the number of rows. ValueError when there are none."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.functions import col

    chosen = [
        (vector_to_array(col(f"`{name}`")) if columns[name].kind == VECTOR else col(f"`{name}`")).alias(name)
        for name in wanted.columns
    ]
    parts = frame.select(*chosen).repartition(wanted.ranks * FILES_PER_RANK)
    parts.write.option("compression", "zstd" if wanted.compress else "snappy").parquet(path)
    rows = sum(map(rows_of, row_groups(open_dataset(path, store.storage_options))))
    if not rows:
        raise ValueError(f"the {what} part of the DataFrame has no rows (validation={wanted.validation!r})")
    return rows
