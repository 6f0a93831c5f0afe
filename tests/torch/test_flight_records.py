"""Flight records in the form of torch's own recorder, as torch's analyser `torchfrtrace` reads them."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horoclone as hvd
from horoclone.launch import debug, tool, torch_flight
from horoclone.launch.usage import LaunchError

fr_trace = pytest.importorskip(
    "torch.distributed.flight_recorder.fr_trace", reason="torch is not installed or too old"
)


def analysed(folder: Path, caplog: pytest.LogCaptureFixture, *options: str) -> tuple[str, Any]:
    """What torchfrtrace says, and the collectives that it found."""
    caplog.clear()
    database = folder.parent / f"{folder.name}.database"
    with caplog.at_level(logging.INFO, "Flight Recorder"):
        fr_trace.main([str(folder), "-o", str(database), *options])
    return caplog.text, pickle.loads(database.read_bytes())[1].collectives


# --- real jobs -------------------------------------------------------------------------------------------------------


def differ(folder: str) -> None:
    """Both orders of the named calls, rows of an allgather that may differ, a subset, and one mismatch."""
    hvd.init(process_sets="dynamic")
    alone = hvd.add_process_set([1])
    names = ["a", "b", "c"][:: 1 if hvd.rank() == 0 else -1]
    for handle in [hvd.allreduce_async(np.ones(4, np.float32), name=name) for name in names]:
        hvd.synchronize(handle)
    hvd.allgather(np.ones((hvd.rank() + 1, 3)), name="rows")
    hvd.alltoall(np.ones(3), splits=[2, 1], name="parts")
    hvd.reducescatter(np.ones(3), name="share")
    hvd.grouped_allreduce([np.ones(2), np.ones((2, 2))], name="group")
    hvd.broadcast(np.ones(2), 1, name="from_1")
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.allreduce(np.ones(5), name="own", process_set=alone)
    with pytest.raises(hvd.Mismatch):
        hvd.allreduce(np.ones((2, 3 + hvd.rank()), np.float32), name="bad")
    hvd.allreduce(np.ones(4), name="after")


def test_a_mismatch_is_found_by_torchs_analyser(
    worlds: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    records, out = tmp_path / "records", tmp_path / "for_torch"
    worlds.run(2, differ, init=False, env={"HOROCLONE_RECORDER_DIR": str(records)}, folder=str(records))
    assert tool.main(["debug", str(records), "--torch", str(out)]) == 1
    said = capsys.readouterr().out
    assert "First divergent call: allreduce 'bad'" in said and f"torchfrtrace {out}" in said
    text, collectives = analysed(out, caplog)
    # ("after" is there where a rank called it before its record was written; torchfrtrace compares it, too.)
    failed = [one for one in collectives if not one.pass_check]
    names = sorted(one.collective_frames[0]["name"] for one in failed)
    assert names[-1].startswith("allreduce 'bad' float32[2,"), text
    assert all("'after'" in name for name in names[:-1]), text
    passed = {one.collective_frames[0]["name"].split()[1]: one for one in collectives if one.pass_check}
    kinds = {
        name.strip("'"): one.collective_name
        for name, one in passed.items()
        if not name.startswith("'horoclone.")
    }
    kinds.pop("after", None)
    assert kinds == {
        "a": "gloo:all_reduce", "b": "gloo:all_reduce", "c": "gloo:all_reduce", "rows": "gloo:all_gather_v",
        "parts": "gloo:all_to_all", "share": "gloo:reduce_scatter_v", "group": "gloo:allreduce_coalesced",
        "from_1": "gloo:broadcast", "own": "gloo:all_reduce", "no.": "gloo:barrier",
    }, text  # fmt: skip
    assert {one.collective_state for one in passed.values()} <= {"completed", "scheduled"}
    # Which of the two it takes for the culprit depends on the order in which it finds the files.
    assert text.count("Error type: SIZE_OR_SYNTAX_MISMATCH") == 1, text
    assert "[[2, 3]]" in text and "[[2, 4]]" in text and ", mismatch at call of rank " in text


def hang(folder: str) -> None:
    hvd.init()
    for i in range(3):
        hvd.allreduce(np.ones(4), name=f"step{i}")
    try:
        if hvd.rank() == 0:
            hvd.allreduce(np.ones(7, np.float32), name="only here")
        hvd.allreduce(np.ones(4), name="next")
    except hvd.HorovodInternalError:
        pass


def test_a_hang_is_found_by_torchs_analyser(
    torch_worker_pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records, out = tmp_path / "records", tmp_path / "out"
    env = {
        "HOROCLONE_RECORDER_DIR": str(records),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2",
        "HOROCLONE_STALL_STACKS": "0",
    }
    team = torch_worker_pool(hang, 2, env=env, folder=str(records))
    assert team.wait(30) == [0, 0], team.outputs()
    torch_flight.write(debug.read([records]), out)
    text, collectives = analysed(out, caplog)
    assert [one.pass_check for one in collectives[:3]] == [True] * 3
    said = [part for part in text.split("Not all ranks joining collective") if "'only here'" in part]
    assert len(said) == 1 and "missing ranks: {1}" in said[0] and "float32[7] Average, aborted" in said[0], (
        text
    )


# --- the conversion itself, on records made by hand ------------------------------------------------------------------


def call(
    number: int, name: str | None, op: str = "allreduce", state: str = "ok", **more: Any
) -> dict[str, Any]:
    return {
        "number": number, "call": number, "op": op, "name": name, "use": 0, "process_set": 0, "dtype": "float32",
        "shape": [4], "tensors": 1, "elements": 4, "reduce": "Sum", "state": state, "submitted_ago": 9.0,
        "agreed_ago": None if state == "pending" else 8.0, "done_ago": 7.0 if state == "ok" else None, **more,
    }  # fmt: skip


def record(
    rank: int, operations: list[dict[str, Any]], size: int = 2, submitted: int | None = None
) -> debug.Record:
    count = len(operations) if submitted is None else submitted
    return debug.Record(rank, size, "node", "stall", count, {0: list(range(size))}, operations, 100.0)


def numbers(dumps: list[dict[str, Any]]) -> list[list[int]]:
    return [[entry["collective_seq_id"] for entry in dump["entries"]] for dump in dumps]


def test_numbers_follow_names_and_not_the_order_of_each_rank() -> None:
    waiting = call(1, "late", state="pending")
    dumps = torch_flight.dumps([
        record(0, [waiting, call(2, "a"), call(3, "b")]),
        record(1, [call(1, "b"), call(2, "a"), call(3, "late", state="running")]),
    ])  # fmt: skip
    assert numbers(dumps) == [[1, 2, 3], [2, 1, 3]] or numbers(dumps) == [[2, 1, 3], [1, 2, 3]]
    (state0, state1) = (dump["entries"][-1]["state"] for dump in dumps)
    assert (state0, state1) == ("scheduled", "started")
    entry = dumps[0]["entries"][0]
    assert (entry["time_created_ns"], entry["time_discovered_completed_ns"]) == (91 * 10**9, 93 * 10**9)


def test_what_a_record_has_forgotten_is_not_called_missing() -> None:
    gone = torch_flight.dumps(
        [record(0, [call(1, "a"), call(9, "b")]), record(1, [call(9, "b")], submitted=9)]
    )
    assert [len(dump["entries"]) for dump in gone] == [1, 1]
    messages = [call(0, "m", "send"), call(1, None, "join")]
    assert torch_flight.dumps([record(0, messages), record(1, [])])[0]["entries"] == []


def test_two_operations_under_one_name_are_a_difference_of_types(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [record(0, [call(1, "x", state="pending")]), record(1, [call(1, "x", "allgather", "pending")])]
    torch_flight.write(ranks, tmp_path / "out")
    text, (one,) = analysed(tmp_path / "out", caplog)
    assert not one.pass_check and "COLLECTIVE_TYPE_MISMATCH" in text and "'all_gather'" in text


def test_a_rank_without_a_record_is_told_to_torchfrtrace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch_flight.write([record(0, [call(1, "x", state="running")])], tmp_path / "out")
    with pytest.raises(AssertionError, match="Missing dump files from ranks {1}"):
        analysed(tmp_path / "out", caplog)
    text, _ = analysed(tmp_path / "out", caplog, "--allow-incomplete-ranks")
    assert "missed FR dumps from ranks ({1})" in text
    with pytest.raises(LaunchError, match="is not empty"):
        torch_flight.write([record(0, [])], tmp_path / "out")
    with pytest.raises(LaunchError, match="cannot be written"):
        torch_flight.write([record(0, [])], "/proc/no such folder")


def torchs_own_dump(path: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=0, world_size=1)
    dist.all_reduce(torch.ones(3, 4))
    Path(path).write_bytes(torch._C._distributed_c10d._dump_fr_trace(True, True, False))


def test_the_form_is_the_one_that_torch_writes(torch_worker_pool: Any, tmp_path: Path) -> None:
    """Against a dump of torch's own recorder: the same keys, and values of the same types."""
    path = tmp_path / "dump"
    team = torch_worker_pool(torchs_own_dump, 1, env={"TORCH_FR_BUFFER_SIZE": "100"}, path=str(path))
    assert team.wait(60) == [0], team.outputs()
    torchs = pickle.loads(path.read_bytes())
    ours = torch_flight.dumps([record(0, [call(1, "x", shape=[3, 4], elements=12)], size=1)])[0]
    assert ours["version"] == torchs["version"] and set(torchs) - set(ours) <= {"nccl_version"}
    (theirs,), (mine,) = torchs["entries"], ours["entries"]
    assert set(theirs) - set(mine) <= {"duration_ms", "thread_id", "thread_name", "nccl_version"}
    for key in ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "profiling_name", "is_p2p"):
        assert mine[key] == theirs[key], key
    (config,), (torchs_config,) = ours["pg_config"].values(), torchs["pg_config"].values()
    assert set(config) == set(torchs_config) and config["ranks"] == torchs_config["ranks"]
