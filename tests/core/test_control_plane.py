"""What agreement costs: control frames and bytes of a step, counted."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from worker_pool import say, wait_for_file
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
    """(frames, bytes) that this rank sends in the best of some steps: a busy machine cuts request lists into pieces."""
    tensors = [np.ones(16, np.float32) for _ in range(TENSORS)]
    step(tensors)
    frames, sizes = [], []
    for _ in range(15):
        before = hvd.metrics()
        step(tensors)
        after = hvd.metrics()
        frames.append(after["control_frames_sent"] - before["control_frames_sent"])
        sizes.append(after["control_bytes_sent"] - before["control_bytes_sent"])
    return min(frames), min(sizes)


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


# --- idle -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_an_idle_engine_sleeps_until_it_is_woken(worlds, tmp_path, shared_memory):
    env = {"HOROCLONE_SHARED_MEMORY": shared_memory, "HOROVOD_TIMELINE": "DYNAMIC"}
    found = worlds.run(2, count_wakeups, env=env, folder=str(tmp_path))
    for windows in found:
        assert any(not any(window.values()) for window in windows), found
        assert "hc-engine" in windows[0], found
    assert "hc-timeline" in found[0][0], found


def count_wakeups(folder):
    """Three windows without an operation: how often each thread of ours slept and woke, and the frames sent.

    Whatever looks after something every so often does so in each window.
    """
    for turn in range(3):
        hvd.allreduce(np.ones(1000, np.float32), name=f"idle.{turn}")
    hvd.start_timeline(f"{folder}/{hvd.rank()}.json")
    hvd.allreduce(np.ones(1000, np.float32), name="idle.last")
    windows = []
    for _ in range(3):
        before = own_switches()
        time.sleep(1.1)  # a timer of a second is seen
        after = own_switches()
        windows.append({name: after[name] - before[name] for name in after})
    hvd.stop_timeline()
    return windows


def own_switches():
    """Voluntary context switches by thread, and "frames"."""
    found = {"frames": hvd.metrics()["mesh"]["frames_sent"]}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("hc-") and name != "hc-test-state":
            (count,) = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M)
            found[name] = int(count)
    return found


# --- through a tree: each rank a machine of its own, one below the other -------------------------------------------

CHAIN = {"HOROCLONE_SHARED_MEMORY": "0", "HOROCLONE_CONTROL_FANOUT": "1"}


def two_come_late(reported):
    hvd.init()
    hvd.allreduce(np.ones(2, np.float32), name="known")
    if hvd.rank() in (1, 3):
        wait_for_file(reported)
    hvd.allreduce(np.ones(2, np.float32), name="known")
    say(sent=hvd.metrics()["request_lists_sent"])


def test_a_stall_report_names_who_is_missing_below_others(worker_pool, tmp_path):
    reported, env = tmp_path / "reported", {**CHAIN, "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.8"}
    team = worker_pool(two_come_late, 4, env=env, reported=str(reported))
    team.wait_for_output(0, r"allreduce.known \(\d+ s\): missing ranks 1,3; ready ranks 0,2")
    reported.touch()
    assert team.wait() == [0] * 4, team.outputs()


def some_steps():
    hvd.init()
    for _ in range(3):
        hvd.allreduce(np.ones(2, np.float32), name="t")
    hvd.shutdown()


def test_a_timeline_shows_every_rank_of_a_tree(worlds, tmp_path):
    path = tmp_path / "timeline.json"
    worlds.run(3, some_steps, init=False, env={**CHAIN, "HOROVOD_TIMELINE": str(path)})
    events = json.loads(path.read_text())
    (pid,) = (e["pid"] for e in events if e.get("name") == "process_name" and e["args"]["name"] == "t")
    assert sorted(e["name"] for e in events if e["pid"] == pid and e["ph"] == "X") == sorted("012" * 3)


@ranks(4, env=CHAIN)
def test_a_tree_agrees_errs_and_joins_like_a_star():
    handles = [
        hvd.allreduce_async(np.full(3, i, np.float32), name=f"tree.{i}", op=hvd.Sum) for i in range(50)
    ]
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle)[0] == 4 * i
    with pytest.raises(hvd.Mismatch, match="rank 3 announced float64") as error:
        hvd.allreduce(np.ones(3, np.float64 if hvd.rank() == 3 else np.float32), name="kind")
    assert "rank 0 announced float32" in str(error.value)
    gathered = hvd.allgather(np.full(hvd.rank() + 1, hvd.rank()), name="rows")
    assert gathered.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    for i in range(hvd.rank()):
        hvd.allreduce(np.ones(2, np.float32), name=f"uneven.{i}")
    assert hvd.join() in range(4)
    assert hvd.allreduce(np.ones(2, np.float32), name="after", op=hvd.Sum)[0] == 4
