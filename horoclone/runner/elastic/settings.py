"""Under Horovod's name: how an elastic job is to be started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horoclone.runner.common.util.settings import BaseSettings


class ElasticSettings(BaseSettings):
    """BaseSettings and, by the names of horovodrun's flags, what an elastic job adds to them.

    discovery: a HostDiscovery. elastic_timeout: seconds. cooldown_range: two numbers, in seconds.
    """

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        elastic_timeout: float = 600,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"elastic": True, **kwargs})
        self.discovery = discovery
        self.min_num_proc = min_num_proc
        self.max_num_proc = max_num_proc
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range
