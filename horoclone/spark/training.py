"""What the ranks of an estimator are told, and what all of them do alike: rows, epochs, metrics. Needs no PySpark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horoclone.spark.data.columns import Column
from horoclone.spark.data.reading import Batch, Rows, Transformation

if TYPE_CHECKING:
    from horoclone.spark.common.store import FilesystemStore
    from horoclone.spark.data.preparing import Dataset


@dataclass(frozen=True)
class Plan:
    """How to train, as the estimator's parameters say. checkpoint_path: None where nothing is kept.

    steps, val_steps: batches of an epoch; None: all rows once. seed: alike on all ranks; is_seeded: the caller gave it.
    """

    data: Dataset
    store: FilesystemStore
    run_id: str
    checkpoint_path: str | None
    features: Sequence[str]
    labels: Sequence[str]
    weight: str | None
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None
    val_steps: int | None
    seed: int
    is_seeded: bool
    shuffle: bool
    cache: bool
    transformation: Transformation
    label_shapes: Sequence[Sequence[int]] | None
    use_gpu: bool
    verbose: int

    def columns(self) -> Mapping[str, Column]:
        return self.data.columns

    def train_rows(self, rank: int, size: int) -> Rows:
        """This rank's rows for training."""
        seed = self.seed if self.shuffle else None
        return Rows(
            self.data.train_path, self.store.storage_options, self.data.columns, rank, size, seed, self.cache,
            self.transformation,
        )  # fmt: skip

    def val_rows(self, rank: int, size: int) -> Rows | None:
        """This rank's rows for validation; None where there is none."""
        if self.data.val_path is None:
            return None
        return Rows(
            self.data.val_path, self.store.storage_options, self.data.columns, rank, size, None, self.cache,
            self.transformation,
        )  # fmt: skip


class Epochs:
    """Batches of one epoch after another: all rows once, or so many batches of an endless stream."""

    def __init__(self, rows: Rows, batch_size: int, steps: int | None) -> None:
        self._rows, self._batch_size = rows, batch_size
        self._stream = rows.batches(batch_size) if steps is not None else None
        self.steps = rows.steps(batch_size) if steps is None else steps

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Exactly `steps` of them."""
        if self._stream is None:
            yield from self._rows.epoch(epoch, self._batch_size)
        else:
            for _ in range(self.steps):
                yield next(self._stream)
