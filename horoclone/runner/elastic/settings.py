"""Under Horovod's name: how an elastic job is to be started."""

from __future__ import annotations

import warnings
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
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"elastic": True, **kwargs})
        self.discovery = discovery
        for name, value in (("min_np", min_np), ("max_np", max_np)):
            if value is not None:
                new = name.replace("np", "num_proc")
                warnings.warn(f"{name} is deprecated, use {new} instead", DeprecationWarning, stacklevel=2)
        self.min_num_proc = min_num_proc if min_np is None else min_np
        self.max_num_proc = max_num_proc if max_np is None else max_np
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range

    def __getstate__(self) -> dict[str, Any]:
        """What a worker is sent: without the discovery, which belongs to the driver."""
        return {**vars(self), "discovery": None}
