"""Under Horovod's name: small things that scripts with estimators import."""

from __future__ import annotations

import os

from horoclone.runner.common.util.host_hash import host_hash
from horoclone.spark.data.preparing import check_validation

__all__ = ["check_validation", "host_hash", "is_databricks"]


def is_databricks() -> bool:
    """Whether this process runs on Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ
