"""hvd.metrics()["bytes"]: every way that an operation can take is counted, once."""

from __future__ import annotations

import numpy as np
from world import ranks

import horoclone as hvd

TCP = {"HOROCLONE_SHARED_MEMORY": "0"}


def counted() -> int:
    return int(hvd.metrics()["bytes"])


def check_blocking_calls() -> None:
    for count in (1, 1000, 1 << 16):  # 4 B to 256 KiB
        tensor = np.ones(count, np.float32)
        for _ in range(5):
            hvd.allreduce_(tensor, op=hvd.Max, name="repeats")
        before = counted()
        # Small ones: in rounds that bypass the negotiation, most of them without the engine
        for _ in range(50):
            hvd.allreduce_(tensor, op=hvd.Max, name="repeats")
        assert counted() - before == 50 * 4 * count, count
        hvd.barrier()


@ranks(2)
def test_blocking_calls_that_repeat_are_counted() -> None:
    bypassed = hvd.metrics()["bypassed"]
    check_blocking_calls()
    assert hvd.metrics()["bypassed"] > bypassed, "no call took the bypass: nothing was tested"


@ranks(2, env=TCP)
def test_blocking_calls_over_tcp_are_counted_alike() -> None:
    check_blocking_calls()
