"""A device between two hosts changes one bit and makes TCP's sum right again: an error on both, never a wrong number."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from worker_pool import say

import horoclone as hvd

pytestmark = pytest.mark.netns
PORT = 29_518


def reduce_until_it_fails(count):
    hvd.init()
    rank, values = hvd.rank(), np.arange(count, dtype=np.float32)
    say(running=True)
    for step in range(10_000):
        try:
            result = hvd.allreduce(values + rank, op=hvd.Sum, name="weights")
        except hvd.HorovodInternalError as error:
            say(error=str(error))
            break
        wrong = int(np.count_nonzero(result != 2 * values + 1))
        if wrong:
            say(wrong=wrong, step=step)
            break
    hvd.shutdown()


@pytest.mark.in_turn("seed")
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("what", "smallest", "largest"), [("data", 1000, 70_000), ("control", 1, 300)])
def test_a_changed_bit_is_an_error_that_names_the_hosts(
    worker_pool, changing_device, what, smallest, largest, seed
):
    chance = random.Random(f"{what} {seed}")
    changing_device.left_alone = PORT
    where = [f"{changing_device.addresses[0]}:{PORT}"]
    started = worker_pool(
        reduce_until_it_fails, 2, namespaces=changing_device.names[:2], addresses=where, count=100_000
    )
    for rank in (0, 1):
        started.wait_for(rank, "running")
    time.sleep(0.2)
    changing_device.change(smallest, largest, chance.randrange(20), chance.randrange(1 << 20))
    heard = [started.wait_for(rank, "error", 20) for rank in (0, 1)]
    assert not any(started.said(rank, "wrong") for rank in (0, 1)), (
        changing_device.changed,
        started.outputs(),
    )
    assert len(changing_device.changed) == 1
    texts = [one["error"] for one in heard]
    assert any("changed on its way" in text or "sent a damaged " in text for text in texts), (
        changing_device.changed,
        texts,
    )
    assert all(f"rank {1 - rank} (" in texts[rank] for rank in (0, 1)), texts
