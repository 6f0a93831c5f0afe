"""Horovod's executors on a Ray cluster, RayExecutor (of a fixed size, or elastic) and ElasticRayExecutor, and
ParameterServers.

The only package that imports Ray. The names of its modules are those that scripts import from `horovod.ray`.
"""

from __future__ import annotations

from horoclone.ray import installed  # first: it says what to do where Ray is missing or too old
from horoclone.ray.elastic import ElasticRayExecutor
from horoclone.ray.parameter_servers import ParameterServers
from horoclone.ray.runner import RayExecutor
from horoclone.ray.secrets import share_secret
from horoclone.ray.worker import BaseHorovodWorker

__all__ = [
    "BaseHorovodWorker", "ElasticRayExecutor", "ParameterServers", "RayExecutor", "installed", "share_secret"
]  # fmt: skip
