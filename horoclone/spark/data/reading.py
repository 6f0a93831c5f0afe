"""A rank's batches: its rows of a Parquet dataset, in an order that seed and epoch decide.

The rows of all row groups, in the epoch's order, are cut into one range for each rank (shards.py); a rank reads its row
groups a chunk at a time and mixes the rows of a chunk. Every rank has the same number of batches.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horoclone.spark.data.columns import SCALAR, Column
from horoclone.spark.data.shards import Range, chunks, order_of, rows_per_rank, shard

CHUNK_ROWS = 1 << 16
CHUNK_BYTES = 128 << 20

Batch = dict[str, Any]  # column -> array [rows, ...]
Edit = tuple[str, Any, Sequence[int] | None, bool]  # name, dtype, shape, whether it may be null


class Transformation(NamedTuple):
    """function: a row (column -> value) in, a row out. edited: columns that it makes; removed: that it drops."""

    function: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    edited: Sequence[Edit] = ()
    removed: Sequence[str] = ()


def open_dataset(path: str, storage_options: Mapping[str, Any]) -> Any:
    """FileNotFoundError that names the path, where this process does not find it."""
    import fsspec
    import pyarrow.dataset

    fs, place = fsspec.core.url_to_fs(path, **storage_options)
    if not fs.exists(place):
        raise FileNotFoundError(
            f"{path} is not there on {socket.gethostname()}; the store must be a place that all nodes reach"
        )
    return pyarrow.dataset.dataset(place, filesystem=fs, format="parquet")


def row_groups(dataset: Any) -> list[Any]:
    """One fragment of pyarrow for each row group, in an order that is alike everywhere."""
    fragments = sorted(dataset.get_fragments(), key=lambda one: str(one.path))
    return [group for one in fragments for group in one.split_by_row_group() if rows_of(group)]


def rows_of(group: Any) -> int:
    return int(group.row_groups[0].num_rows)


class Rows:
    """The rows of one rank. columns: what a batch has. seed None: rows as they are stored, every time.

    cache: keeps this rank's rows in memory; each epoch then mixes the same ones.
    """

    def __init__(
        self,
        path: str,
        storage_options: Mapping[str, Any],
        columns: Mapping[str, Column],
        rank: int,
        size: int,
        seed: int | None,
        cache: bool = False,
        transformation: Transformation | None = None,
    ) -> None:
        self._groups = row_groups(open_dataset(path, storage_options))
        self._counts = [rows_of(one) for one in self._groups]
        if not self._counts:
            raise ValueError(f"{path}: no rows to train on")
        self._path, self._columns, self._rank, self._size = path, columns, rank, size
        self._seed, self._cache = seed, cache
        self._transformation = transformation or Transformation()
        self._kept: Batch | None = None
        self.count = rows_per_rank(sum(self._counts), size)  # of an epoch

    def steps(self, batch_size: int) -> int:
        """Batches of an epoch."""
        return -(-self.count // batch_size)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Without end: epoch after epoch, the last batch of each may be smaller."""
        epoch = 0
        while True:
            yield from self.epoch(epoch, batch_size)
            epoch += 1

    def epoch(self, epoch: int, batch_size: int) -> Iterator[Batch]:
        """One epoch's batches."""
        left, rest, first = self.count, None, None
        for part in self._parts(epoch):
            first = first if first is not None else {name: value[:1].copy() for name, value in part.items()}
            rest = part if rest is None else _joined([rest, part])
            have = len(next(iter(rest.values())))
            while have >= batch_size and left > 0:
                yield self._transformed({name: value[:batch_size] for name, value in rest.items()})
                rest = {name: value[batch_size:] for name, value in rest.items()}
                have -= batch_size
                left -= batch_size
        if left > 0 and rest is not None and first is not None:
            have = len(next(iter(rest.values())))
            if have < left:  # the ranks' parts differ by a row: this one's first comes again
                rest = _joined([rest, first])
            yield self._transformed(rest)

    def _parts(self, epoch: int) -> Iterator[Batch]:
        if self._cache:
            if self._kept is None:
                self._kept = _joined(list(self._read(0)))
            yield self._mixed(self._kept, epoch, 0)
            return
        for number, part in enumerate(self._read(epoch)):
            yield self._mixed(part, epoch, number)

    def _read(self, epoch: int) -> Iterator[Batch]:
        order = order_of(len(self._groups), self._seed, epoch)
        for ranges in chunks(shard(self._counts, order, self._rank, self._size), self._most_rows()):
            yield _joined([self._range(one) for one in ranges])

    def _most_rows(self) -> int:
        metadata = self._groups[0].row_groups[0]
        row_bytes = max(1, int(metadata.total_byte_size) // max(1, int(metadata.num_rows)))
        return max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes))

    def _range(self, one: Range) -> Batch:
        table = self._groups[one.group].to_table(columns=list(self._columns))
        table = table.slice(one.start, one.stop - one.start)
        return {
            name: array_of(table[name], name, column, self._path) for name, column in self._columns.items()
        }

    def _mixed(self, part: Batch, epoch: int, number: int) -> Batch:
        if self._seed is None:
            return part
        count = len(next(iter(part.values())))
        order = np.random.default_rng([self._seed, epoch, self._rank, number]).permutation(count)
        return {name: value[order] for name, value in part.items()}

    def _transformed(self, batch: Batch) -> Batch:
        return transform(batch, self._transformation)


def transform(batch: Batch, how: Transformation) -> Batch:
    """Row by row. KeyError of the user's function goes through."""
    if how.function is None and not how.edited and not how.removed:
        return batch
    count = len(next(iter(batch.values())))
    function = how.function or (lambda row: row)
    rows = [function({name: value[index] for name, value in batch.items()}) for index in range(count)]
    made = {
        name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0] if name not in how.removed
    }
    for name, dtype, shape, _ in how.edited:
        if name in made:
            made[name] = made[name].astype(dtype)
            if shape and None not in shape:
                made[name] = made[name].reshape(count, *shape)
    return made


def _joined(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def array_of(values: Any, name: str, column: Column, where: str) -> Any:
    """A column of pyarrow as an array [rows] or [rows, size]. ValueError for nulls and for rows of different sizes."""
    if values.null_count:
        raise ValueError(f"{where}: column {name!r} has {values.null_count} nulls; fill or drop them first")
    if column.kind == SCALAR:
        return np.asarray(values.to_numpy())
    rows, whole = len(values), values.combine_chunks()
    flat = whole.flatten()
    if flat.null_count:
        raise ValueError(f"{where}: column {name!r} has nulls inside its arrays; fill them first")
    lengths = np.unique(np.asarray(whole.value_lengths().to_numpy(zero_copy_only=False)))
    if len(lengths) > 1 or (column.size and rows and lengths[0] != column.size):
        wanted = column.size or "the same number"
        found = ", ".join(map(str, lengths))
        raise ValueError(f"{where}: column {name!r} has rows of {found} values; all need {wanted}")
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(rows, -1)
