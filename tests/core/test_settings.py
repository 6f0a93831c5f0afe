"""Horovod's environment variables do what they say, seen from outside; one that changes nothing is mentioned."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from world import ranks, until

import horoclone as hvd
from horoclone import settings

KNOBS = [
    {
        "name": "HOROCLONE_CYCLE_TIME",
        "horovod": "HOROVOD_CYCLE_TIME",
        "default": "0",
        "help": "Batching delay.",
    },
    {"name": "HOROCLONE_RANK", "horovod": "HOROVOD_RANK", "default": "", "help": "The rank."},
]


@pytest.mark.parametrize("environ, said", [
    ({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_RANK": "0", "PATH": "/bin"}, []),
    ({"HOROVOD_TORUS_ALLREDUCE": "1"}, ["HOROVOD_TORUS_ALLREDUCE=1 has no effect, nothing reads it: HOROVOD_HIER"]),
    ({"HOROVOD_TORUS_ALLREDUCE": "0", "HOROVOD_NUM_NCCL_STREAMS": "1", "HOROVOD_CONTROLLER": ""}, []),
    ({"HOROVOD_CONTROLLER": "gloo"}, []),
    ({"HOROVOD_CONTROLLER": "mpi"}, ["HOROVOD_CONTROLLER=mpi has no effect"]),
    ({"HOROCLONE_DETERMINISTIC": "1"}, ["HOROCLONE_DETERMINISTIC=1 has no effect, nothing reads it: Equal bits on"]),
    ({"HOROCLONE_SHUTDOWN_TIMEOUT_S": "9"}, ["HOROCLONE_SHUTDOWN_TIMEOUT_S=9 has no effect, nothing reads it: shut"]),
    ({"HOROCLONE_DOORBELL_US": "9"}, ["HOROCLONE_DOORBELL_US=9 has no effect, nothing reads it: HOROCLONE_YIELD_US"]),
    ({"HOROCLONE_SHUTDOWN_TIMEOUT_S": "5", "HOROVOD_GPU_OPERATIONS": "NCCL", "NCCL_IB_DISABLE": "1", "HOROVOD_VERSION": "x"}, []),
    ({"HOROCLONE_CYCLE_TIMES": "1"}, ["HOROCLONE_CYCLE_TIMES is not a setting; did you mean HOROCLONE_CYCLE_TIME?"]),
    ({"HOROVOD_CYCL_TIME": "1"}, ["HOROVOD_CYCL_TIME is not a setting; did you mean HOROVOD_CYCLE_TIME?"]),
    ({"HOROCLONE_FROBNICATE": "1"}, ["HOROCLONE_FROBNICATE is not a setting; docs/environment.md"]),
    ({"HOROVOD_TORUS_ALLREDUCE": "1", "HOROVOD_LOG_LEVEL": "ERROR"}, []),
])  # fmt: skip
def test_what_changes_nothing_is_mentioned_and_nothing_else(environ, said):
    lines = settings.remarks(environ, KNOBS)
    assert len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith(text)


@ranks(1, init=False)
def test_init_refuses_wrong_values_of_what_the_core_does_not_read() -> None:
    for name, value in (
        ("HOROCLONE_COMPARE", "maybe"), ("HOROCLONE_COMPARE_STEPS", "-1"), ("HOROCLONE_NOTICE_SIGNAL", "HUP"),
        ("HOROCLONE_NOTICE", "soon"),
    ):  # fmt: skip
        os.environ[name] = value
        with pytest.raises(ValueError, match=f"{name}='{value}' "):
            hvd.init()
        del os.environ[name]
    hvd.init()
    hvd.shutdown()


def test_every_variable_of_the_table_is_silent_at_its_default():
    core = pytest.importorskip("horoclone._core", reason="the native module is not built")
    knobs = json.loads(core.knobs())
    environ = {knob["horovod"] or knob["name"]: knob["default"] for knob in knobs}
    environ |= {one.name: one.default or "" for one in settings.UNREAD}
    assert settings.remarks(environ, knobs) == []


def test_rank_0_mentions_them_once(launch):
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    body = "import horoclone as hvd\nfor _ in range(2):\n    hvd.init(); hvd.shutdown()"
    command = [
        sys.executable, "-m", "horoclone.launch", "-np", "2", "--torus-allreduce", sys.executable, "-c", body
    ]  # fmt: skip
    done = launch(command, timeout_s=60)
    lines = [line for line in done.stderr.splitlines() if "HOROVOD_TORUS_ALLREDUCE" in line]
    assert len(lines) == 1 and lines[0].startswith("[0] ") and "HOROVOD_HIERARCHICAL_ALLREDUCE" in lines[0], (
        done.output
    )


# --- fusion: with a batching delay everything that is submitted at once meets in one decision


def batches() -> int:
    from horoclone import runtime

    return json.loads(runtime.native().counters())["batches"]


def of_burst() -> int:
    """Batches that six tensors of 4 KiB took: two of them by themselves, two groups of two."""
    hvd.barrier()
    before = batches()
    handles = [
        hvd.allreduce_async(np.full(1024, 1.0, np.float32), name=f"single{i}", op=hvd.Sum) for i in range(2)
    ]
    for group in range(2):
        arrays = [np.full(1024, 1.0, np.float32)] * 2
        handles.append(hvd.grouped_allreduce_async(arrays, name=f"group{group}", op=hvd.Sum))
    outcomes = [hvd.synchronize(handle) for handle in handles]
    assert all((np.asarray(outcome) == hvd.size()).all() for outcome in outcomes)
    return batches() - before


WINDOW = {"HOROVOD_CYCLE_TIME": "800"}  # far more than a burst takes


@ranks(2, env=WINDOW)
def test_cycle_time_is_a_window_in_which_operations_gather():
    began = time.monotonic()
    assert of_burst() == 1
    assert time.monotonic() - began > 0.7


@ranks(2, env={**WINDOW, "HOROVOD_DISABLE_GROUP_FUSION": "1"})
def test_disable_group_fusion_keeps_every_group_by_itself():
    assert of_burst() == 3


@ranks(2, env={**WINDOW, "HOROVOD_FUSION_THRESHOLD": "0"})
def test_a_fusion_threshold_of_zero_fuses_nothing_but_groups():
    assert of_burst() == 4


@ranks(2, env={**WINDOW, "HOROVOD_FUSION_THRESHOLD": str(3 * 4096)})
def test_the_fusion_threshold_limits_a_batch():
    assert of_burst() == 3  # 4 + 4 KiB, then a group of 8 each


@ranks(2, env={"HOROVOD_CYCLE_TIME": "60"})
def test_a_window_holds_back_neither_a_blocking_call_for_ever_nor_the_end():
    for number in range(3):
        assert hvd.allreduce(np.array([number]), op=hvd.Sum).tolist() == [2 * number]
    handle = hvd.allreduce_async(np.ones(4), op=hvd.Sum, name="nobody waits")
    until(lambda: hvd.poll(handle), 20)
    assert hvd.synchronize(handle).tolist() == [2.0] * 4


def control_bytes(name: str) -> int:
    from horoclone import runtime

    def sent() -> int:
        return json.loads(runtime.native().counters())["control_bytes_sent"]

    hvd.allreduce(np.ones(1), name=name)
    before = sent()
    for _ in range(20):
        hvd.allreduce(np.ones(1), name=name)
    return sent() - before


@ranks(2, init=False)
def test_cache_capacity_zero_announces_everything_in_full_every_time():
    name, sent = "n" * 300, {}
    for capacity in ("1024", "0"):
        os.environ["HOROVOD_CACHE_CAPACITY"] = capacity
        hvd.init()
        sent[capacity] = control_bytes(name)
        hvd.shutdown()
    assert sent["1024"] < 20 * 300 <= sent["0"], sent


@ranks(2)
def test_by_default_a_step_of_some_thousand_names_is_announced_by_numbers():
    from horoclone import runtime

    def step() -> int:
        before = json.loads(runtime.native().counters())["control_bytes_sent"]
        for handle in [hvd.allreduce_async(np.ones(1), name=f"layer.{i}.weight") for i in range(3000)]:
            hvd.synchronize(handle)
        hvd.barrier()
        return json.loads(runtime.native().counters())["control_bytes_sent"] - before

    first, second, third = step(), step(), step()  # a name that comes a second time gets a number
    assert third < 3000 * len("layer.0") < first, (first, second, third)


# --- threads, network, log


def threads_named(name: str) -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
        except OSError:
            pass
    return found


@ranks(2, init=False)
def test_thread_affinity_places_the_engines_thread_and_no_other():
    mine = os.sched_getaffinity(0)
    cores = [sorted(mine)[0], sorted(mine)[-1]]
    os.environ["HOROVOD_THREAD_AFFINITY"] = f"{cores[0]},{cores[1]}"
    hvd.init()
    until(
        lambda: (
            [os.sched_getaffinity(thread) for thread in threads_named("hc-engine")]
            == [{cores[hvd.local_rank()]}]
        ),
        20,
        lambda: threads_named("hc-engine"),
    )
    assert os.sched_getaffinity(0) == mine
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]


ALONE = "import horoclone as hvd, numpy as np, time; hvd.init(); hvd.allreduce(np.ones(1)); time.sleep(0.2)"


@pytest.mark.parametrize("env, expected", [
    ({}, r"[20"),
    ({"HOROVOD_LOG_HIDE_TIME": "1"}, "[horoclone]"),
    ({"HOROVOD_LOG_LEVEL": "error"}, None),
    ({"HOROVOD_LOG_LEVEL": "FATAL"}, None),
])  # fmt: skip
def test_log_level_and_hidden_time(launch, env, expected):
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    done = launch(
        [sys.executable, "-c", ALONE], env={"HOROVOD_THREAD_AFFINITY": "nonsense", **env}, timeout_s=60
    )
    warnings = [line for line in done.stderr.splitlines() if "warning: HOROCLONE_THREAD_AFFINITY" in line]
    assert len(warnings) == (expected is not None), done.output
    assert all(line.startswith(expected) for line in warnings), warnings


def listening() -> set[str]:
    """Addresses (hexadecimal, as in /proc/net/tcp) on which this process listens."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix("socket:[").rstrip("]"))
        except OSError:
            pass
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@ranks(2, init=False)
def test_gloo_iface_chooses_where_a_rank_can_be_reached():
    os.environ.update(HOROCLONE_SHARED_MEMORY="0", HOROVOD_GLOO_IFACE="lo")
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]
    assert listening() <= {"0100007F"}, "only 127.0.0.1"
    hvd.shutdown()
    os.environ["HOROVOD_GLOO_IFACE"] = "nosuch0"
    with pytest.raises((ValueError, hvd.HorovodInternalError), match="nosuch0.* HOROVOD_GLOO_IFACE"):
        hvd.init()


@ranks(2, dies=[1], env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "2", "HOROCLONE_LIVENESS_PROBE_S": "0.2"})
def test_gloo_timeout_is_the_silence_after_which_a_rank_is_lost():
    pids = hvd.allgather(np.array([os.getpid()]))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    began = time.monotonic()
    with pytest.raises(
        hvd.PeerLost, match=r"has not responded for [2-9] s.*HOROVOD_GLOO_TIMEOUT_SECONDS"
    ) as caught:
        hvd.allreduce(np.ones(1), name="late")
    os.kill(int(pids[1]), signal.SIGKILL)
    assert caught.value.rank == 1 and time.monotonic() - began < 12  # the default is 15


@ranks(2, init=False)
def test_horovods_placement_variables_start_a_world_without_any_launcher():
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = [os.environ[f"HOROCLONE_{name}"] for name in names]
    for name in [name for name in os.environ if name.startswith("HOROCLONE_")]:
        del os.environ[name]
    os.environ.update({f"HOROVOD_{name}": value for name, value in zip(names, values, strict=True)})
    hvd.init()
    assert [str(fact()) for fact in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size)] == values
    assert hvd.cross_rank() == 0 and hvd.cross_size() == 1
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]
