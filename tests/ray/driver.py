"""A driver that is killed: `driver.py ADDRESS static|elastic` starts two workers, and prints their pids while they work."""

from __future__ import annotations

import os
import sys
import time

import ray


def work(told: object) -> None:
    import numpy as np

    import horoclone as hvd

    hvd.init()
    ray.get(told.say.remote(os.getpid()))  # type: ignore[attr-defined]
    while True:
        hvd.allreduce(np.ones(10), name="step")
        time.sleep(0.01)


@ray.remote(num_cpus=0)
class Told:
    def __init__(self) -> None:
        self.pids: list[int] = []

    def say(self, pid: int) -> None:
        self.pids.append(pid)
        if len(self.pids) == 2:
            print("PIDS", *self.pids, "and no more", flush=True)


def main() -> None:
    from horoclone.ray import RayExecutor

    ray.init(address=sys.argv[1])
    size = {"num_workers": 2} if sys.argv[2] == "static" else {"min_workers": 2, "max_workers": 2}
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), **size)
    executor.start()
    executor.run(work, [Told.remote()])


if __name__ == "__main__":
    main()
