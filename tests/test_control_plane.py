"""What agreement costs: control frames and bytes of a step, counted."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from world import ranks

import horoclone as hvd

TENSORS = 161
BYTES_A_STEP = 512  # of one rank, whatever it sends


def step(tensors):
    handles = [
        hvd.allreduce_async(tensor, name=f"control.{i}", op=hvd.Sum) for i, tensor in enumerate(tensors)
    ]
    for handle in handles:
        hvd.synchronize(handle)


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_step_of_many_tensors_by_name_takes_few_bytes(worlds, shared_memory):
    sent = worlds.run(2, count_a_step, env={"HOROCLONE_SHARED_MEMORY": shared_memory})
    for frames, size in sent:
        assert size <= BYTES_A_STEP and frames <= TENSORS / 4, sent


def count_a_step():
    """(frames, bytes) that this rank sends in the middle one of some steps: a busy machine may cut one into pieces."""
    tensors = [np.ones(16, np.float32) for _ in range(TENSORS)]
    step(tensors)
    frames, sizes = [], []
    for _ in range(15):
        before = hvd.metrics()
        step(tensors)
        after = hvd.metrics()
        frames.append(after["control_frames_sent"] - before["control_frames_sent"])
        sizes.append(after["control_bytes_sent"] - before["control_bytes_sent"])
    return statistics.median(frames), statistics.median(sizes)


@ranks(2)
def test_operations_that_nobody_waits_for_end_all_the_same():
    for round_ in range(20):
        handles = [
            hvd.allreduce_async(np.full(4, i, np.float32), name=f"poll.{i}", op=hvd.Sum) for i in range(9)
        ]
        while not all(hvd.poll(handle) for handle in handles):
            pass
        for i, handle in enumerate(handles):
            assert hvd.synchronize(handle)[0] == i * hvd.size(), round_
