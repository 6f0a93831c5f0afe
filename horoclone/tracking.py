"""Where metrics() can go: event files of TensorBoard, or any function that takes a dictionary of numbers and a step.

Thread: the one that trains.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from horoclone import runtime
from horoclone.runtime.flat_metrics import flat_metrics

# What wandb.log, mlflow.log_metrics, to_tensorboard(folder) and print are.
Log = Callable[[dict[str, float], int], Any]

_numbers = itertools.count()  # of this process's event files


def to_tensorboard(folder: str | os.PathLike[str]) -> Log:
    """A function log(numbers, step) that writes them as scalars into an event file in `folder`, which is made.

    numbers: {name: int or float}; step: int. What it has written is on disk when it returns, so that a view is up to
    date and a killed job loses nothing. ImportError with what to install where the package tensorboard is missing.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ImportError(
            f"writing event files needs TensorBoard (pip install tensorboard). The import said: {error}"
        ) from error
    # The file is opened here, because tensorboard's own writer of files would load TensorFlow where it is installed.
    os.makedirs(folder, exist_ok=True)
    name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
    file = open(os.path.join(folder, name), "wb")  # noqa: SIM115 - closed with `log`, by whoever holds that
    records = RecordWriter(file)

    def write(**event: Any) -> None:
        records.write(Event(wall_time=time.time(), **event).SerializeToString())
        file.flush()

    write(file_version="brain.Event:2", source_metadata=SourceMetadata(writer="horoclone"))

    def log(numbers: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        write(step=step, summary=Summary(value=values))

    return log


class MetricsLog:
    """Hands this rank's metrics to a tracker every so many steps; the callbacks for Keras and Lightning are made of it.

    to: a folder for TensorBoard's event files, or a function that takes (numbers, step). every: steps between two
    times, at least 1. all_ranks: every rank logs, with a folder of its own (FOLDER/rank3) or names of its own
    (horoclone/rank3/...); otherwise rank 0 alone does. TypeError and ValueError for other arguments.
    """

    def __init__(self, to: str | os.PathLike[str] | Log, every: int = 100, all_ranks: bool = False) -> None:
        if not callable(to) and not isinstance(to, (str, os.PathLike)):
            raise TypeError(
                f"to={to!r} ({type(to).__name__}); accepted: a folder for TensorBoard's event files, or a function "
                "that takes a dictionary of numbers and a step, like wandb.log and mlflow.log_metrics"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}; accepted: a number of steps, at least 1")
        self._to = to
        self.every = every
        self.all_ranks = all_ranks
        self._logs: dict[str, Log] = {}  # by folder: in an elastic job a process may get another rank
        self._seen = 0  # the step of the last call
        self._logged: int | None = None  # the last step that was logged

    def at(self, step: int) -> None:
        """Logs if a multiple of `every` steps has been reached since the last call."""
        due = step // self.every > self._seen // self.every
        self._seen = step
        if due:
            self.now(step)

    def now(self, step: int) -> None:
        """Logs, unless this step has been logged already."""
        rank = runtime.rank()
        if step == self._logged or (rank != 0 and not self.all_ranks):
            return
        self._logged = step
        if callable(self._to):
            self._to(flat_metrics(f"horoclone/rank{rank}/" if self.all_ranks else "horoclone/"), step)
            return
        folder = os.path.join(self._to, f"rank{rank}") if self.all_ranks else os.fspath(self._to)
        if folder not in self._logs:
            self._logs[folder] = to_tensorboard(folder)
        self._logs[folder](flat_metrics(), step)
