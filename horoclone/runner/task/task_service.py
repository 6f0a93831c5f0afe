"""Under Horovod's name: the task of one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horoclone.runner.common.service import task_service


class HorovodRunTaskService(task_service.BasicTaskService):
    """Task `index` of a launcher."""

    NAME_FORMAT = "horovod task service #%d"

    def __init__(self, index: int, key: bytes, nics: Sequence[str] | None) -> None:
        super().__init__(self.NAME_FORMAT % index, index, key, nics)


class HorovodRunTaskClient(task_service.BasicTaskClient):
    """Speaks to such a task."""

    def __init__(
        self,
        index: int,
        task_addresses: Any,
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        attempts: int = 3,
    ) -> None:
        name = HorovodRunTaskService.NAME_FORMAT % index
        super().__init__(name, task_addresses, key, verbose, match_intf=match_intf, attempts=attempts)
