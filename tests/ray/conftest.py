"""The fixture `ray_cluster`: a Ray cluster for the tests of one file; bodies.py beside them has what runs there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cluster

LAUNCHERS = ("HOROCLONE_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "RAY_")
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in PLACES
    }
    # The warm worlds of other tests fill the memory, and Ray would end workers for it.
    return {**own, "RAY_memory_monitor_refresh_ms": "0"}


@pytest.fixture(scope="module")
def ray_cluster(engines: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """ray_cluster(body, **arguments) runs a function of the file that the test file names BODIES (a name in this folder).

    HAS_CLIENT = True in the test file: a Ray Client may connect, to the port of the variable CLUSTER_CLIENT_PORT.
    """
    bodies = Path(__file__).with_name(request.module.BODIES)
    remote = cluster.Remote(engines, bodies, environment(), getattr(request.module, "HAS_CLIENT", False))
    yield remote
    remote.close()
