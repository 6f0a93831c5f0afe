"""Settings that differ between ranks: each is either rank 0's for all, or each rank's own business, or refused by name."""

from __future__ import annotations

import json
import sys

import pytest

np = pytest.importorskip("numpy")
core = pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

# Part of who talks to whom, and how: (rank 0's, rank 1's).
REFUSED = {
    "SHARED_MEMORY": ("1", "0"),
    "CONTROL_FANOUT": ("8", "2"),
    "FABRIC": ("tcp", "shm"),
}
# What results and the course of operations depend on: rank 0's holds, or the ranks agree as they go.
MAY_DIFFER = {
    "FUSION_THRESHOLD": ("0", "1048576"),
    "DISABLE_GROUP_FUSION": ("0", "1"),
    "PARTITION_BYTES": ("4096", "0"),
    "CYCLE_TIME": ("0", "2"),
    "CACHE_CAPACITY": ("8192", "4"),
    "DYNAMIC_PROCESS_SETS": ("1", "0"),
    "ARENA_BYTES": ("68719476736", "1073741824"),
    "TOPOLOGY": ("", "off"),
    "SEGMENT_BYTES": ("262144", "4096"),
    "FLAT_BYTES": ("16384", "0"),
    "BYPASS": ("1", "0"),
    "BLOCK_BYTES": ("262144", "4096"),
    "RING_THRESHOLD_BYTES": ("65536", "0"),
    "HIERARCHICAL_ALLREDUCE": ("0", "1"),
    "CPU_OPERATIONS": ("auto", "host"),
    "SELECTION": ("", "fixed"),
    "ADASUM": ("ranks", "nodes"),
    "SIMD": ("auto", "scalar"),
    "SOCKET_BUFFER_BYTES": ("0", "65536"),
    "TCP_STREAMS": ("1", "3"),
    "PERSISTENT_BUCKETS": ("1", "0"),
    "AUTOTUNE": ("0", "1"),
}
# Where a rank is reached, how long it waits, what it tells, which files it loads; GPUs are compared when they are set up.
ITS_OWN = {
    "NODE", "NETWORK_INTERFACES", "KEEPALIVE_S", "START_TIMEOUT", "INIT_REPORT_S",
    "STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS",
    "DEADLOCK_TIME_SECONDS", "STALL_STACKS", "WHY", "LIVENESS_PROBE_S", "LIVENESS_WARN_S", "LIVENESS_ERROR_S", "SPIN_PAUSES", "YIELD_US",
    "THREAD_AFFINITY", "LOG_LEVEL", "LOG_HIDE_TIME", "TIMELINE", "TIMELINE_MARK_CYCLES",
    "TIMELINE_ALL_RANKS", "TIMELINE_OPERATION_NAMES", "RECORDER_DIR", "AUTOTUNE_LOG", "AUTOTUNE_WARMUP_SAMPLES",
    "AUTOTUNE_STEPS_PER_SAMPLE", "AUTOTUNE_MAX_SAMPLES", "AUTOTUNE_NOISE", "GPU_OPERATIONS", "GPU_PEER_BYTES",
    "GPU_REGISTER", "CUDA_LIBRARY", "NCCL_LIBRARY", "NCCL_FOLDERS", "GPU_KERNELS", "NVRTC_LIBRARY",
    "NVRTC_FOLDERS", "KERNEL_CACHE",
}  # fmt: skip

# argv: {name: [rank 0's, rank 1's]}. One life for each.
LIVES = """
import json, os, sys
import numpy as np
import horoclone as hvd
rank = int(os.environ["HOROVOD_RANK"])
for name, values in json.loads(sys.argv[1]).items():
    variable = f"HOROCLONE_{name}"
    os.environ[variable] = values[rank]
    try:
        hvd.init()
        for turn in range(5):
            assert hvd.allreduce(np.full(200_000, rank + 1, np.float32), op=hvd.Sum, name="big")[-1] == 3
            handles = [hvd.allreduce_async(np.full(3000, rank + 1.0), op=hvd.Sum, name=f"b{n}") for n in range(8)]
            assert all(hvd.synchronize(handle)[-1] == 3 for handle in handles)
            assert hvd.allgather(np.full(rank + 1, rank), name="g").tolist() == [0, 1, 1]
            same = hvd.allreduce(np.array([1.0, 2.0]), op=hvd.Adasum, name="a")
            assert np.array_equal(same, hvd.broadcast(same, 0, name="a0"))
        said = "fine"
    except hvd.HorovodInternalError as error:
        said = f"{type(error).__name__} {error}"
    hvd.shutdown()
    del os.environ[variable]
    os.write(1, ("\\n" + json.dumps(["said", rank, name, said]) + "\\n").encode())
"""
RUN = [sys.executable, "-m", "horoclone.launch", "-np", "2"]


def said(launch, settings, nodes=("", "")):
    """(setting, rank) -> fine, or the error."""
    node = f"os.environ['HOROCLONE_NODE'] = {nodes!r}[rank]\n"
    script = LIVES.replace("for name, values", node + "for name, values", 1)
    done = launch([*RUN, sys.executable, "-c", script, json.dumps(settings)], check=False)
    words = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if '["said"' in line]
    found = {(name, rank): text for _, rank, name, text in words}
    assert set(found) == {(name, rank) for name in settings for rank in (0, 1)}, done.output
    return found


def test_every_setting_of_the_core_is_in_one_of_the_lists():
    known = {
        one["name"].removeprefix("HOROCLONE_") for one in json.loads(core.knobs()) if one["read_by"] == "core"
    }
    assert sorted([*REFUSED, *MAY_DIFFER, *ITS_OWN]) == sorted(known)


def test_settings_that_must_agree_are_refused_on_every_rank_with_both_values(launch):
    for (name, _), text in said(launch, REFUSED).items():
        first, second = REFUSED[name]
        assert text == (
            f"Mismatch HOROCLONE_{name} differs between ranks: {first} on rank 0; {second} on rank 1. Set it alike on all "
            "ranks"
        )


@pytest.mark.parametrize("nodes", [("", ""), ("a", "b")], ids=["one machine", "two machines"])
def test_settings_that_may_differ_give_the_right_results(launch, nodes):
    found = said(launch, MAY_DIFFER, nodes)
    assert set(found.values()) == {"fine"}, found
