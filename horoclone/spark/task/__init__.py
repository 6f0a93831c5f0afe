"""Under Horovod's name: what Spark has given to the task that a rank runs in."""

from __future__ import annotations

import os

GPUS = "HOROCLONE_SPARK_GPUS"  # addresses, comma-separated; set for ranks whose task has GPUs


def get_available_devices() -> list[str]:
    """Addresses of the GPUs that Spark has assigned to this rank's task; empty where it has assigned none."""
    return [one for one in os.environ.get(GPUS, "").split(",") if one]
