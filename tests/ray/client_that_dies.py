"""A Ray Client that is killed or stopped: `client_that_dies.py ray://HOST:PORT`.

It runs a job of a fixed size and an elastic one at once, waits for room for a third, and prints the pids of the four workers
while they work, and how the jobs end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import ray
from client import connect


def work(told: object) -> None:
    import numpy as np
    from horovod.ray import ray_logger

    import horoclone as hvd

    hvd.init()
    ray_logger.log({"has": "begun"})
    ray.get(told.say.remote(os.getpid()))  # type: ignore[attr-defined]
    while True:
        hvd.allreduce(np.ones(10), name="step")
        time.sleep(0.02)


@ray.remote(num_cpus=0)
class Told:
    def __init__(self) -> None:
        self.pids: list[int] = []

    def say(self, pid: int) -> None:
        self.pids.append(pid)

    def all(self) -> list[int]:
        return self.pids


def main() -> None:
    from horoclone.ray import ElasticRayExecutor, RayExecutor

    connect(sys.argv[1])
    told = Told.remote()
    static = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    static.start()
    elastic = ElasticRayExecutor(ElasticRayExecutor.create_settings(2, 2, timeout_s=60))
    elastic.start()

    def run(name: str, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:
            print(f"{name} raised {type(error).__name__}: {error}", flush=True)

    jobs = {
        "static": lambda: static.run(work, [told], callbacks=[lambda value: None]),
        "elastic": lambda: elastic.run(lambda: work(told), callbacks=[lambda value: None]),
    }
    larger = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=300), num_workers=9)
    jobs["larger"] = larger.start
    for each in jobs.items():
        threading.Thread(target=run, args=each, daemon=True).start()
    pids: list[int] = []
    while len(pids) < 4:
        time.sleep(0.2)
        pids = ray.get(told.all.remote())
    print("PIDS", *pids, "and no more", flush=True)
    while sys.stdin.readline():
        static.shutdown()
        elastic.shutdown()
        print("shut down", flush=True)


if __name__ == "__main__":
    main()
