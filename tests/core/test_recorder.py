"""The flight recorder, what it leaves behind when something fails, and `horoclone debug`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from worker_pool import say
from world import ranks

import horoclone as hvd
from horoclone.launch import debug, doctor, tool
from horoclone.launch.usage import LaunchError


@ranks(2)
def test_a_record_tells_what_was_called_in_order():
    before = hvd.flight_record()["submitted"]
    hvd.allreduce(np.ones((3, 4), np.float32), name="w", op=hvd.Sum)
    hvd.allreduce(np.ones((3, 4), np.float32), name="w", op=hvd.Sum)
    hvd.allgather(np.ones(7, np.int32))
    hvd.grouped_allreduce([np.ones(2), np.ones(3)], name="g")
    hvd.barrier()
    record = hvd.flight_record()
    assert (record["rank"], record["size"], record["version"]) == (hvd.rank(), 2, 1)
    assert record["process_sets"] == {"0": [0, 1]}
    w1, w2, gather, group, barrier = record["operations"][before:]
    assert (w1["op"], w1["name"], w1["dtype"], w1["shape"]) == ("allreduce", "w", "float32", [3, 4])
    assert (w1["use"], w2["use"], w2["call"] - w1["call"]) == (0, 1, 1)
    assert (gather["name"], gather["shape"], gather["dtype"]) == (None, [7], "int32")
    assert (group["tensors"], group["elements"]) == (2, 5)
    assert barrier["op"] == "barrier" and "dtype" not in barrier
    for op in (w1, w2, gather, group, barrier):
        assert op["state"] == "ok"
        assert op["submitted_ago"] >= op["done_ago"] - 1e-3 and op["agreed_ago"] >= op["done_ago"]


@ranks(2)
def test_a_thousand_operations_are_kept_and_a_long_name_keeps_its_ends():
    for i in range(1200):
        hvd.allreduce(np.ones(1), name=f"n{i % 7}")
    name = "début." + "layer." * 40 + "größe"
    hvd.allreduce(np.ones(1), name=name)
    operations = hvd.flight_record()["operations"]
    assert len(operations) == 1000
    assert [op["number"] for op in operations] == list(
        range(operations[-1]["number"] - 999, operations[-1]["number"] + 1)
    )
    short = operations[-1]["name"]
    assert (
        short.startswith("début.")
        and short.endswith("größe")
        and "..." in short
        and len(short.encode()) <= 96
    )
    assert operations[-1]["name_hash"] and "name_hash" not in operations[0]


@ranks(2)
def test_flight_record_can_be_written_to_a_file():
    path = f"/tmp/horoclone-test-{os.getpid()}.json"
    try:
        record = hvd.flight_record(path)
        assert json.loads(Path(path).read_text())["operations"] == record["operations"]
    finally:
        os.unlink(path)


def lose_a_rank(folder):
    hvd.init()
    for i in range(5):
        hvd.allreduce(np.ones(4), name=f"step{i}")
    if hvd.rank() == 1:
        # Else there is no "last" in their records.
        while len(list(Path(folder).parent.glob("submitted-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    last = hvd.allreduce_async(np.ones(4), name="last")
    Path(folder).parent.joinpath(f"submitted-{hvd.rank()}").touch()
    try:
        hvd.synchronize(last)
    except hvd.PeerLost:
        say(lost=True)


def test_a_lost_peer_leaves_the_survivors_records(worker_pool, tmp_path):
    folder = tmp_path / "records"
    team = worker_pool(lose_a_rank, 3, env={"HOROCLONE_RECORDER_DIR": str(folder)}, folder=str(folder))
    team.wait()
    assert sorted(p.name for p in folder.iterdir()) == ["horoclone-rank0.json", "horoclone-rank2.json"]
    records = debug.read([folder])
    assert [r.rank for r in records] == [0, 2] and "rank 1" in records[0].reason
    last = records[0].operations[-1]
    assert (last["name"], last["state"]) == ("last", "peer lost")
    text = debug.report(records)
    assert "No record of rank 1" in text and "do not diverge" in text and "allreduce 'last'" in text


def mismatch_once(folder):
    hvd.init()
    hvd.allreduce(np.ones(4), name="same")
    with pytest.raises(hvd.Mismatch):
        hvd.allreduce(np.ones(4 if hvd.rank() else 5, np.float32), name="bad")
    hvd.allreduce(np.ones(4), name="after")


def test_a_mismatch_leaves_records_and_debug_names_the_call(worlds, tmp_path, capsys):
    folder = str(tmp_path)
    worlds.run(2, mismatch_once, init=False, env={"HOROCLONE_RECORDER_DIR": folder}, folder=folder)
    assert tool.main(["debug", folder]) == 1
    text = capsys.readouterr().out
    assert (
        "First divergent call: allreduce 'bad' float32[5]" in text and "shape differ from rank 0's" in text
    ), text


def stall(kind, members):
    hvd.init(process_sets="dynamic")
    subset = hvd.add_process_set(members) if len(members) < hvd.size() else hvd.global_process_set
    if hvd.rank() not in members:
        return
    for i in range(3):
        hvd.allreduce(np.ones(4), name=f"step{i}", process_set=subset)
    late = hvd.rank() == members[-1]
    try:
        if kind == "missing" and not late:
            hvd.allreduce(np.ones(4), name="extra", process_set=subset)
        if kind == "unnamed":
            hvd.allgather(np.ones(2), process_set=subset)
            if not late:
                hvd.allgather(np.ones(3), process_set=subset)
        hvd.allreduce(
            np.ones(4), name="other" if kind == "different" and late else "next", process_set=subset
        )
        say(completed=True)
    except hvd.HorovodInternalError:
        say(failed=True)


@pytest.mark.parametrize(
    ("kind", "members", "expected"),
    [
        ("missing", [0, 1, 2], "allreduce 'extra' float64[4] Average"),
        ("different", [0, 2], "allreduce 'next' float64[4] Average"),
        ("unnamed", [0, 1, 2], "allgather no. 1 (unnamed) float64[3]"),
    ],
)
def test_debug_names_the_first_divergent_call(worker_pool, tmp_path, kind, expected, members):
    env = {
        "HOROCLONE_RECORDER_DIR": str(tmp_path),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1",
        "HOROCLONE_STALL_STACKS": "0",
    }
    team = worker_pool(stall, 3, env=env, kind=kind, members=members)
    assert team.wait(30) == [0, 0, 0], team.outputs()
    records = [r for r in debug.read([tmp_path]) if r.rank in members]
    assert len(records) == len(members)
    first = debug.divergences(records)[0]
    text = debug.report(records)
    assert debug.call_text(first.made[min(first.made)]) == expected, text
    assert first.missing == members[-1:] and sorted(first.made) == members[:-1], text
    where = " in process set 1" if len(members) < 3 else ""
    made_by = "ranks 0-1" if len(members) == 3 else "rank 0"
    assert f"First divergent call: {expected}{where}: made by {made_by}, never by rank 2" in text, text


# --- the comparison itself, on records made by hand


def call(number, name, state="ok", process_set=0, **more):
    return {
        "number": number, "call": number, "op": "allreduce", "name": name, "use": 0, "process_set": process_set,
        "dtype": "float32", "shape": [4], "tensors": 1, "elements": 4, "reduce": "Sum", "state": state, **more,
    }  # fmt: skip


def record(rank, operations, size=2, submitted=None):
    count = len(operations) if submitted is None else submitted
    return debug.Record(rank, size, "node", "stall", count, {0: list(range(size))}, operations)


def test_what_a_record_no_longer_holds_is_not_called_missing():
    waiting = record(0, [call(5, "a", "pending")])
    assert debug.divergences([waiting, record(1, [call(9000, "b")], submitted=9000)]) == []
    assert debug.divergences([waiting, record(1, [call(4, "b"), call(9, "c")], submitted=9)])[0].missing == [
        1
    ]
    assert debug.divergences([waiting]) == []  # nobody knows about rank 1


def test_an_earlier_divergence_comes_first_and_completed_calls_are_none():
    first = record(0, [call(1, "a"), call(2, "x", "pending"), call(3, "z", "pending")])
    second = record(1, [call(1, "y", "pending", dtype="int32"), call(2, "x", "pending", dtype="int32")])
    found = debug.divergences([first, second])
    assert [one.key[2] for one in found] == ["y", "x", "z"]
    assert (found[0].missing, found[1].different, found[2].missing) == ([0], {1: ["dtype"]}, [1])


def test_rows_of_an_allgather_may_differ():
    one, two = (call(1, "a", "pending", op="allgather", shape=[n, 3], elements=3 * n) for n in (1, 2))
    assert debug.divergences([record(0, [one]), record(1, [two])]) == []
    two["shape"] = [2, 4]
    assert debug.divergences([record(0, [one]), record(1, [two])])[0].different == {1: ["shape"]}


def test_messages_between_two_ranks_are_not_compared():
    message = call(7, "t", "pending", op="send") | {"call": 0}
    ranks_of_three = [record(0, [message], 3), record(1, [], 3), record(2, [], 3)]
    assert debug.divergences(ranks_of_three) == []
    assert "send 't'" in debug.report(ranks_of_three)  # still told, as not completed
    found = debug.divergences(
        [record(0, [message, call(8, "a", "pending")]), record(1, [message | {"op": "recv"}])]
    )
    assert [(one.key[2], one.missing) for one in found] == [("a", [1])]


def test_files_that_are_no_records_are_named(tmp_path, capfd, monkeypatch):
    with pytest.raises(LaunchError, match="HOROCLONE_RECORDER_DIR"):
        debug.read([tmp_path])
    bad = tmp_path / "horoclone-rank0.json"
    bad.write_text("[]")
    assert tool.main(["debug", str(bad)]) == 2
    assert "not a flight record" in capfd.readouterr().err
    monkeypatch.setenv("HOROCLONE_RECORDER_DIR", str(tmp_path))
    assert any(f.topic == "flight records" and "not a flight record" in f.text for f in doctor.examine())
