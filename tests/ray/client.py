"""A program on a Ray Client: `client.py ray://HOST:PORT` runs a job of a fixed size and an elastic one on the cluster."""

from __future__ import annotations

import sys

import ray


def work(start: int) -> tuple[int, int, float]:
    import numpy as np
    from horovod.ray import ray_logger

    import horoclone as hvd

    hvd.init()
    total = float(hvd.allreduce(np.float64(start + hvd.rank()), op=hvd.Sum, name="total"))
    ray_logger.log({"total": total})
    return hvd.rank(), hvd.size(), total


def fail() -> None:
    raise ValueError("a mistake of the function")


def connect(address: str) -> None:
    """Twice: now and then Ray's proxy does not get the client's part of the cluster started (Ray 2.60)."""
    try:
        ray.init(address)
    except ConnectionAbortedError as error:
        print(f"once more, after {error}", file=sys.stderr)
        ray.init(address)


def main() -> None:
    from horovod.ray import ElasticRayExecutor, RayExecutor

    connect(sys.argv[1])
    heard: list[object] = []
    settings = RayExecutor.create_settings(timeout_s=60)
    executor = RayExecutor(settings, num_workers=2)
    executor.start()
    print("static", executor.run(work, [1], callbacks=[heard.append]), heard)
    print("remote", ray.get(executor.run_remote(work, [2])))
    try:
        executor.run(fail)
    except ValueError as error:
        print("raised", "a mistake of the function" in str(error))
    executor.shutdown()
    executor = RayExecutor(settings, min_workers=2, max_workers=2)
    executor.start()
    print("elastic", executor.run(work, [3]))
    executor.shutdown()
    older = ElasticRayExecutor(ElasticRayExecutor.create_settings(2, 2, timeout_s=60))
    older.start()
    print("older", older.run(lambda: work(4), callbacks=[heard.append]), heard)
    older.shutdown()


if __name__ == "__main__":
    main()
