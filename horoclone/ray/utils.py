"""Under Horovod's name: calls of all workers, and interfaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """The values of the references that fn gives for each of these."""
    return list(ray.get([fn(one) for one in collection]))


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """The variables by which ranks use these interfaces only; none for none."""
    listed = sorted(nics) if isinstance(nics, (set, frozenset)) else list(nics)
    if not listed:
        return {}
    return {"HOROVOD_GLOO_IFACE": ",".join(listed), "NCCL_SOCKET_IFNAME": ",".join(listed)}


def detect_nics(
    settings: Any, all_host_names: Sequence[str] = (), node_workers: Sequence[Any] | None = None
) -> list[str]:
    """Those of the settings. Without any, ranks find addresses that lead to each other by themselves: an empty list."""
    nics = getattr(settings, "nics", None) or ()
    return [nics] if isinstance(nics, str) else sorted(nics)
