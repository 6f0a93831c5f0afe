"""A callback for Lightning that logs horoclone's own numbers. Thread: the one that trains."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.callbacks import Callback

from horoclone.tracking import Log, MetricsLog


class MetricsCallback(Callback):
    """Logs hvd.metrics() of rank 0 to the trainer's loggers: bytes, operations, waiting, who is late, ...

    every: batches between two times; None: the trainer's log_every_n_steps. to: a folder for TensorBoard's event files
    or a function of a dictionary of numbers and a step, instead of the loggers. all_ranks: every rank logs there, which
    loggers do not (Lightning gives them to rank 0 only). The step is the one of self.log(). Names: see
    hvd.flat_metrics(). ValueError at the start of fit() without a logger and without `to`.
    """

    def __init__(
        self,
        every: int | None = None,
        to: str | os.PathLike[str] | Log | None = None,
        all_ranks: bool = False,
    ) -> None:
        super().__init__()
        if to is None and all_ranks:
            raise ValueError("all_ranks=True needs `to`: Lightning's loggers write on rank 0 only")
        self._every = every
        self._to = to
        self._all_ranks = all_ranks
        self._log: MetricsLog | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finds the loggers to write to."""
        if stage != "fit":
            return
        if self._to is None and not trainer.loggers:
            raise ValueError(
                "MetricsCallback has nowhere to log: the trainer has logger=False, and `to` was not given. Give the "
                "trainer a logger, or pass to='FOLDER' or a function like wandb.log"
            )
        every = (trainer.log_every_n_steps or 1) if self._every is None else self._every
        self._log = MetricsLog(self._to or _loggers_of(trainer), every, self._all_ranks)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the metrics if it is due."""
        if self._log is not None:
            self._log.at(_step_of(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs what came since the last time."""
        if self._log is not None:
            self._log.now(_step_of(trainer))


def _step_of(trainer: Any) -> int:
    """The number that Lightning gives to what self.log() logs: optimizer steps, counted once for all optimizers."""
    loop = trainer.fit_loop.epoch_loop
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))


def _loggers_of(trainer: Any) -> Log:
    def log(numbers: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    return log
