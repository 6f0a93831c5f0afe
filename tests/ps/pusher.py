"""A worker that pushes ones and writes down each step that was acknowledged, so that nothing is forgotten by kill -9.

python pusher.py HOST:PORT RANK WORKERS SEED LOG ROWS
"""

from __future__ import annotations

import os
import sys

import numpy as np

from horoclone.ps import Servers, Sum, Table

WIDTH, IDS = 8, 300


def ids_of(seed: int, step: int, rows: int) -> np.ndarray:
    """The same in the test that counts."""
    return np.unique(np.random.default_rng((seed, step)).integers(0, rows, IDS))


def main() -> None:
    store, rank, workers, seed, log, rows = sys.argv[1:]
    servers = Servers("test", store, rank=int(rank), workers=int(workers), timeout_s=60, silence_s=3)
    table = Table(servers, "counted", WIDTH, Sum())
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 0
    while not os.path.exists(f"{log}.stop"):
        ids = ids_of(int(seed), step, int(rows))
        table.push(ids, np.ones((len(ids), WIDTH)))
        os.write(descriptor, b"+")  # acknowledged
        step += 1
    servers.close()


if __name__ == "__main__":
    main()
