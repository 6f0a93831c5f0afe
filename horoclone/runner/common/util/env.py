"""Under Horovod's name: which variables travel to other hosts, and which rank this process is by its variables."""

from __future__ import annotations

import os
import re

from horoclone.runner.common.util import secret

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]

# Scripts add to it; is_exportable() reads it at every call.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", secret.HOROVOD_SECRET_KEY}

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Whether variable `v` may be given to ranks of other hosts: none of IGNORE_REGEXES matches its beginning."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """(rank, size) before init(): by the variables of horovodrun, Open MPI and Hydra as in Horovod, else by those of
    torchrun and srun, as init() will read them; (0, 1) when nobody has started this process as a rank.

    RuntimeError when only one of two variables that belong together is set.
    """
    for rank_name, size_name in _PAIRS:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"Could not determine process rank and size: only one of {rank_name} and {size_name} found in "
                "environment"
            )
    from horoclone.bootstrap import detect

    found = detect.detect(os.environ)
    return found.rank, found.size
