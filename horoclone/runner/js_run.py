"""Under Horovod's name: LSF's jsrun, which starts ranks itself; they find each other through its MPI."""

from __future__ import annotations

import shutil

from horoclone.stand_ins import stand_in

js_run = stand_in(
    "horovod.runner.js_run.js_run", "LSF's own launcher starts the ranks: jsrun -n N python train.py."
)


def is_jsrun_installed() -> bool:
    """Whether jsrun is on PATH."""
    return shutil.which("jsrun") is not None
