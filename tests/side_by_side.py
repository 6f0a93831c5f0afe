"""Which file of tests runs where, when several run at a time (pytest-xdist): it asks `Files` for each worker's next one.

The last worker of three or more takes files that mostly wait, for deadlines, signals and processes, beside the others, which
compute. A computing worker stays in a folder while it can: its warm worlds have that folder's framework imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from xdist.scheduler import LoadFileScheduling

# Folders and files whose tests mostly wait for deadlines, signals, sockets and the end of processes.
WAITING = (
    "tests/bootstrap/",
    "tests/elastic/test_faults.py",
    "tests/elastic/test_kills.py",
    "tests/elastic/test_leaving.py",
    "tests/elastic/test_recovery.py",
    "tests/elastic/test_spares.py",
    "tests/elastic/test_survival.py",
    "tests/elastic/test_two_hosts.py",
    "tests/deploy/",
    "tests/launch/",
    "tests/live/",
    "tests/ray/",
    "tests/house/test_world.py",
    "tests/core/test_fault_table.py",
    "tests/core/test_faults.py",
    "tests/core/test_hosts.py",
    "tests/core/test_limits.py",
    "tests/core/test_process_model.py",
    "tests/core/test_stalls.py",
    "tests/core/test_starting_and_leaving.py",
    "tests/torch/test_c10d_failures.py",
)


def folder_of(file: str) -> str:
    return str(PurePosixPath(file).parent)


def next_file(queue: Iterable[str], waits: bool, mine: str | None, others: set[str]) -> str | None:
    """waits: the worker takes waiting files only. mine: the folder it worked in; others: those of the other workers."""
    files = list(queue)
    waiting = [file for file in files if file.startswith(WAITING)]
    if waits:
        return waiting[0] if waiting else None
    computing = [file for file in files if not file.startswith(WAITING)] or waiting
    same = [file for file in computing if folder_of(file) == mine]
    free = [file for file in computing if folder_of(file) not in others]
    return next(iter([*same, *free, *computing]), None)


class Files(LoadFileScheduling):  # type: ignore[misc]
    """Hands out whole files."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        self._folders: dict[Any, str] = {}

    def _assign_work_unit(self, node: Any) -> None:
        waits = self.numnodes >= 3 and node.gateway.id == f"gw{self.numnodes - 1}"
        others = {folder for other, folder in self._folders.items() if other is not node}
        file = next_file(self.workqueue, waits, self._folders.get(node), others)
        if file is None:
            node.shutdown()  # no more to wait for: one worker for each processor is enough for the rest
            return
        if not waits:
            self._folders[node] = folder_of(file)
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)
