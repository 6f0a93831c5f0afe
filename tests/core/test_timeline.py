"""The timeline: its format, its phases, starting and stopping it, and what is left of it after a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from worker_pool import say
from world import ranks

import horoclone as hvd
from horoclone.launch import timelines, tool
from horoclone.launch.usage import LaunchError

# What the Trace Event Format (JSON array form) asks of each kind of event, as Perfetto reads it: the keys beside "ph"
# and "pid", and their types.
NUMBER = (int, float)
FIELDS = {
    "M": {"name": str, "args": dict},
    "B": {"name": str, "ts": NUMBER, "tid": int},
    "E": {"ts": NUMBER, "tid": int},
    "X": {"name": str, "ts": NUMBER, "tid": int, "dur": NUMBER},
    "i": {"name": str, "ts": NUMBER, "tid": int, "s": str},
    "s": {"name": str, "cat": str, "id": int, "ts": NUMBER, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": NUMBER, "tid": int, "bp": str},
}
METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def check_fields(event):
    """Perfetto drops what breaks these rules, mostly in silence."""
    fields = FIELDS[event["ph"]]
    optional = {"B": {"args"}, "E": {"args", "name"}, "M": {"tid"}, "i": {"args"}}.get(event["ph"], set())
    assert set(fields) <= event.keys() <= {"ph", "pid", *fields, *optional}, event
    for key, kind in [("pid", int), *fields.items()]:
        assert isinstance(event[key], kind) and not isinstance(event[key], bool), event
    assert isinstance(event.get("args", {}), dict) and event.get("dur", 0) >= 0, event
    assert event.get("s", "t") in ("g", "p", "t"), event  # the scope of an instant
    if event["name"] in METADATA:
        key, kind = METADATA[event["name"]]
        assert event["ph"] == "M" and isinstance(event["args"].get(key), kind), event


def check_schema(events):
    """Every event is well formed, begins and ends nest on every row, and a row's time never goes back."""
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
    named = {e["pid"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    open_spans: dict = {}
    last: dict = {}
    for event in events:
        check_fields(event)
        if event["ph"] == "M":
            continue
        row = (event["pid"], event["tid"])
        assert event["pid"] in named, event
        if event["ph"] in "isf":
            continue
        assert row in rows, event
        assert event["ts"] >= last.get(row, 0), event
        last[row] = event["ts"]
        if event["ph"] == "B":
            open_spans.setdefault(row, []).append(event["name"])
        elif event["ph"] == "E":
            assert open_spans.get(row), f"an end without a beginning: {event}"
            open_spans[row].pop()
    assert not any(open_spans.values()), open_spans
    check_arrows(events)


def check_arrows(events):
    """Each arrow has one beginning and one end, which is not before it, and each lies in a span that is open there."""
    spans: dict = {}
    begun: dict = {}
    for event in events:
        row = (event["pid"], event.get("tid"))
        if event["ph"] == "B":
            begun.setdefault(row, []).append(event["ts"])
        elif event["ph"] == "E":
            spans.setdefault(row, []).append((begun[row].pop(), event["ts"]))
    pairs: dict = {}
    for event in events:
        if event["ph"] in "sf":
            assert any(b <= event["ts"] <= e for b, e in spans[event["pid"], event["tid"]]), event
            pairs.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    for first, second in pairs.values():
        assert (first["ph"], second["ph"], second["bp"]) == ("s", "f", "e") and first["ts"] <= second["ts"]
        assert first["pid"] != second["pid"]


def events_of(path):
    events = json.loads(Path(path).read_text())
    for event in events:
        event.setdefault("name", "")
    check_schema(events)
    return events


def process_of(events, name):
    """The events of one tensor."""
    pids = {e["pid"] for e in events if e["name"] == "process_name" and e["args"].get("name") == name}
    assert len(pids) == 1, (name, pids)
    return [e for e in events if e["pid"] in pids and e["ph"] != "M"]


def track_of(events, rank, name):
    """The events of one row of one tensor in a merged timeline."""
    rows = {
        e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == rank and e["args"]["name"] == name
    }
    assert len(rows) == 1, (rank, name, rows)
    return [e for e in events if e["pid"] == rank and e.get("tid") in rows and e["ph"] != "M"]


def mark_of(events, rank, name):
    """When a rank was ready for the operations of one tensor, by its own file."""
    return [e["ts"] for e in track_of(events, rank, name) if e["ph"] == "X" and e["name"] == str(rank)]


def work(rounds=2):
    for _ in range(rounds):
        handles = [hvd.allreduce_async(np.ones((3, 4), np.float32), name=f"t{i}") for i in range(3)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allreduce(np.ones(1 << 16, np.float64), name="big")
        hvd.allgather(np.ones(5, np.int32))


def use_all_forms(path):
    hvd.init()
    work()
    hvd.shutdown()


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared", "tcp"])
def test_rank_0_writes_every_phase_of_every_tensor(worlds, tmp_path, shared):
    path = tmp_path / "timeline.json"
    env = {
        "HOROVOD_TIMELINE": str(path),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROCLONE_SHARED_MEMORY": shared,
    }
    worlds.run(2, use_all_forms, init=False, env=env, path=str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.json"]
    events = events_of(path)
    small, big, unnamed = (process_of(events, name) for name in ("t0", "big", "allgather (unnamed)"))
    assert [e["name"] for e in small if e["ph"] == "B" and e["tid"] == 0] == ["NEGOTIATE_ALLREDUCE"] * 2
    assert sorted(e["name"] for e in small if e["ph"] == "X") == ["0", "0", "1", "1"]  # each rank, each time
    how = ("SHM_FLAT", "SHM_BLOCKS") if shared == "1" else ("RECURSIVE_DOUBLING", "RING")
    for tensor, algorithm in zip((small, big), how, strict=True):
        names = [e["name"] for e in tensor if e["ph"] == "B" and e["tid"] == 1]
        assert names == ["ALLREDUCE", "QUEUE", f"{algorithm}_ALLREDUCE"] * 2
    ends = [e["args"] for e in small if e["ph"] == "E" and "args" in e]
    assert ends == [{"dtype": "float32", "shape": "[3, 4]"}] * 2
    assert sum(e["name"] == "ALLGATHER" for e in unnamed) == 2
    assert any(e["name"] == "CYCLE_START" and e["ph"] == "i" for e in events)
    assert [e["args"] for e in events if e["name"] == "dropped_events"] == [{"count": 0}]


def start_and_stop(folder):
    with pytest.raises(ValueError):
        hvd.start_timeline(f"{folder}/early.json")
    hvd.init()
    for turn in range(3):
        hvd.start_timeline(f"{folder}/{turn}.json", mark_cycles=turn == 1)
        hvd.allreduce(np.ones(4), name=f"turn{turn}")
        hvd.stop_timeline()
        hvd.allreduce(np.ones(4), name="outside")
    hvd.stop_timeline()  # none is being written
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="cannot be written"):
            hvd.start_timeline(f"{folder}/no such folder/x.json")
        with pytest.raises(ValueError, match="empty"):
            hvd.start_timeline("")
    hvd.allreduce(np.ones(4), name="after")


def test_start_and_stop_as_often_as_wanted(worlds, tmp_path):
    worlds.run(
        2,
        start_and_stop,
        init=False,
        env={"HOROVOD_TIMELINE": "DYNAMIC"},
        folder=str(tmp_path),
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.json", "1.json", "2.json"]
    for turn in range(3):
        events = events_of(tmp_path / f"{turn}.json")
        assert process_of(events, f"turn{turn}")
        # (Rank 1 may announce what comes after the stop before rank 0 has stopped.)
        assert sum(e["name"] == "ALLREDUCE" for e in events) == 1
        assert any(e["name"] == "CYCLE_START" for e in events) == (turn == 1)


@ranks(2)
def test_without_the_variable_it_is_a_value_error():
    for call in (lambda: hvd.start_timeline("/tmp/never.json"), hvd.stop_timeline):
        with pytest.raises(ValueError, match="HOROVOD_TIMELINE"):
            call()
    assert hvd.allreduce(np.ones(2), name="usable")[0] == 1


@pytest.mark.parametrize("shared", ["1", "0"], ids=["one clock", "measured clock"])
def test_the_files_of_all_ranks_merge_on_one_clock(worlds, tmp_path, capsys, shared):
    env = {
        "HOROVOD_TIMELINE": str(tmp_path / "t.json"),
        "HOROCLONE_TIMELINE_ALL_RANKS": "1",
        "HOROCLONE_SHARED_MEMORY": shared,
    }
    worlds.run(2, use_all_forms, init=False, env=env, path="")
    files = [tmp_path / "t.json", tmp_path / "t.rank1.json"]
    heads = [events_of(file)[0]["args"] for file in files]
    assert [head["rank"] for head in heads] == [0, 1]
    assert heads[1]["clock_error_micros"] < 1e6 and (shared == "0" or heads[1]["clock_error_micros"] == 0)
    assert tool.main(["timeline", str(tmp_path / "all.json"), *map(str, files)]) == 0
    assert "2 ranks" in capsys.readouterr().out
    events = events_of(tmp_path / "all.json")
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "rank 0"), (1, "rank 1")], "a process is a rank"
    assert {e["pid"] for e in events} == {0, 1}
    assert track_of(events, 0, "t0: negotiation") and track_of(events, 1, "allgather (unnamed): operation")
    # An allreduce ends on no rank before it has begun on every rank: true only on a common clock.
    spans = []
    for rank in range(2):
        mine = track_of(events, rank, "big: operation")
        begins = [e["ts"] for e in mine if e["name"] == "ALLREDUCE"]
        ends = [e["ts"] for e in mine if e["ph"] == "E" and "args" in e]
        spans.append(list(zip(begins, ends, strict=True)))
    slack = 2 * heads[1]["clock_error_micros"] + 1
    for (begin0, end0), (begin1, end1) in zip(*spans, strict=True):
        assert end0 > begin1 - slack and end1 > begin0 - slack
    # Each of the 10 operations has one arrow, from the rank that was ready last, unless the clocks contradict it.
    arrows = sum(e["ph"] == "s" for e in events)
    assert arrows == sum(e["ph"] == "f" for e in events) and 0 < arrows <= 10
    assert arrows == 10 or shared == "0"
    ready = [mark_of(events, rank, "big: negotiation") for rank in range(2)]
    for number, times in enumerate(zip(*ready, strict=True)):
        late = times.index(max(times))
        begin, end = spans[1 - late][number]
        at = max(begin, max(times))
        found = [e["ts"] for e in events if e["ph"] == "f" and e["ts"] == at and e["pid"] == 1 - late]
        assert found == ([at] if at <= end else [])
    with pytest.raises(LaunchError, match="one file per rank"):
        timelines.merge([files[0], files[0]])


def file_of(rank, *operations):
    """The events of a rank's file: (tensor, sequence or None, ready, begin, end) of each of its allreduces."""
    pid = (rank + 1) * 100
    head = {
        "clock_origin_micros": 0.0,
        "clock_error_micros": 0.0,
        "start_time_since_epoch_in_micros": 5,
        "rank": rank,
    }
    events = [{"name": "process_name", "ph": "M", "pid": pid, "args": {**head, "name": "steps"}}]
    names = sorted({tensor for tensor, *_ in operations})
    for place, name in enumerate(names, 1):
        events.append(
            {"name": "process_name", "ph": "M", "pid": pid + place, "args": {"name": f"rank {rank}: {name}"}}
        )
    for number, (tensor, sequence, ready, begin, end) in enumerate(operations):
        rows = [{"pid": pid + 1 + names.index(tensor), "tid": 2 * number + kind} for kind in range(2)]
        args = {} if sequence is None else {"args": {"sequence": sequence}}
        for row, kind in zip(rows, ("negotiation", "operation"), strict=True):
            events.append({"name": "thread_name", "ph": "M", **row, "args": {"name": kind}})
        events += [
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": ready, **rows[0], **args},
            {"ph": "X", "name": str(rank), "ts": ready, "dur": 0, **rows[0]},
            {"ph": "E", "ts": begin, **rows[0]},
            {"ph": "B", "name": "ALLREDUCE", "ts": begin, **rows[1], **args},
            {"ph": "E", "ts": end, **rows[1]},
        ]
    return events


def arrows_of(tmp_path, *files):
    paths = [tmp_path / f"{number}.json" for number in range(len(files))]
    for path, events in zip(paths, files, strict=True):
        path.write_text(json.dumps(events))
    events = timelines.merge(paths)
    check_arrows(events)
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = [e for e in events if e["ph"] == "f"]
    return sorted((begins[e["id"]]["pid"], begins[e["id"]]["ts"], e["pid"], e["ts"]) for e in ends)


def test_an_arrow_leads_from_the_last_rank_to_each_that_waited(tmp_path):
    found = arrows_of(
        tmp_path,
        file_of(0, ("w", None, 10, 31, 40), ("w", None, 50, 61, 70)),
        file_of(1, ("w", None, 30, 32, 40), ("w", None, 51, 62, 70)),
        file_of(2, ("w", None, 20, 33, 40), ("w", None, 60, 63, 70)),
    )
    assert found == [(1, 30, 0, 31), (1, 30, 2, 33), (2, 60, 0, 61), (2, 60, 1, 62)]


def test_an_arrow_stays_in_its_spans_where_clocks_differ(tmp_path):
    """Rank 0 seems to begin before rank 1 is ready; seems to end before it, too, and then there is no arrow."""
    seems_late = file_of(1, ("w", None, 33, 34, 41))
    assert arrows_of(tmp_path, file_of(0, ("w", None, 10, 31, 40)), seems_late) == [(1, 33, 0, 33)]
    assert arrows_of(tmp_path, file_of(0, ("w", None, 10, 31, 32)), seems_late) == []


def test_unnamed_operations_are_told_apart_by_their_number(tmp_path):
    found = arrows_of(
        tmp_path,
        file_of(0, ("allreduce (unnamed)", 0, 10, 31, 40), ("allreduce (unnamed)", 1, 11, 21, 70)),
        file_of(1, ("allreduce (unnamed)", 1, 20, 22, 70), ("allreduce (unnamed)", 0, 30, 32, 40)),
    )
    assert found == [(1, 20, 0, 21), (1, 30, 0, 31)]


def test_a_rank_whose_file_lacks_an_operation_gets_no_arrow_of_another(tmp_path):
    """Rank 1's timeline began later; a broadcast's root may end before others begin."""
    late = file_of(1, ("w", None, 51, 60, 61))
    assert arrows_of(tmp_path, file_of(0, ("w", None, 10, 20, 50)), late) == []
    early_root = file_of(0, ("w", None, 10, 21, 22)), file_of(1, ("w", None, 20, 30, 40))
    assert arrows_of(tmp_path, *early_root) == [(1, 20, 0, 21)]


def trace_until_killed():
    hvd.init()
    while True:
        work(1)
        say(running=True)


def test_after_kill_9_the_file_can_be_read(worker_pool, tmp_path):
    path = tmp_path / "t.json"
    team = worker_pool(trace_until_killed, 2, env={"HOROVOD_TIMELINE": str(path)})
    team.wait_for(1, "running")
    while not path.exists() or path.stat().st_size < 20_000:
        team.wait_for(0, "running")
    for rank in range(2):
        team.send(rank, signal.SIGKILL)
    team.wait()
    with pytest.raises(ValueError):
        json.loads(path.read_text())  # no closing bracket: the format allows that
    assert process_of([{"name": "", **e} for e in timelines.read(path)], "t0")
    cut = tmp_path / "cut.json"
    cut.write_bytes(path.read_bytes()[:-7])
    assert len(timelines.read(cut)) > 50
    cut.write_text("{}")
    with pytest.raises(LaunchError, match="not a timeline"):
        timelines.read(cut)


def write_to_a_full_disk():
    hvd.init()
    work(3)
    say(right=os.path.exists("/dev/full"))


def test_a_full_disk_ends_the_timeline_and_not_the_job(worker_pool):
    team = worker_pool(write_to_a_full_disk, 2, env={"HOROVOD_TIMELINE": "/dev/full"})
    assert team.wait() == [0, 0], team.outputs()
    assert "the timeline ends here" in team.output(0) and team.said(0, "right"), team.outputs()
