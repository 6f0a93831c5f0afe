"""`horoclone timeline`: merges the ranks' timelines into one file on rank 0's clock, one process for each rank.

With HOROCLONE_TIMELINE_ALL_RANKS=1 each rank writes its own file, whose first event says where its time 0 lies on rank
0's monotonic clock, and in which a tensor is a process, as in Horovod's timelines. In the merged file a rank is one,
and a tensor a track in it; arrows lead from who was late to who waited. Files that a kill cut short are read as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horoclone.launch.flow_arrows import Rank, arrows
from horoclone.launch.usage import LaunchError

Event = dict[str, Any]


def read(path: str | Path) -> list[Event]:
    """The events of one file; the closing bracket, and the end of the last line, may be missing. LaunchError when it is
    not a timeline."""
    try:
        text = Path(path).read_text()
        try:
            events = json.loads(text)
        except ValueError:
            complete = text.rstrip().rstrip(",")
            try:
                events = json.loads(complete + "\n]")
            except ValueError:
                events = json.loads(complete[: complete.rindex(",\n")] + "\n]")
        events[0]["args"]["clock_origin_micros"]
    except OSError as error:
        raise LaunchError(f"timeline: {path}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise LaunchError(f"timeline: {path} is not a timeline of horoclone") from None
    return list(events)


def merge(paths: Sequence[str | Path]) -> list[Event]:
    """The events of all files with times since the earliest file's beginning. LaunchError for files whose processes
    would be mixed up: written without HOROCLONE_TIMELINE_ALL_RANKS=1, or the same rank twice."""
    files = [read(path) for path in paths]
    heads = [events[0] for events in files]
    ranks = [head["args"]["rank"] for head in heads]
    if len({head["pid"] for head in heads}) != len(files) or len(set(ranks)) != len(files):
        raise LaunchError(
            f"timeline: these files are of ranks {ranks}; one file per rank is needed, written with "
            "HOROCLONE_TIMELINE_ALL_RANKS=1"
        )
    first = min(head["args"]["clock_origin_micros"] for head in heads)
    merged: list[Event] = []
    seen = [Rank(rank) for rank in sorted(ranks)]
    for rank, events in zip(seen, sorted(files, key=lambda events: events[0]["args"]["rank"]), strict=True):
        merged += _as_one_process(rank, events, events[0]["args"]["clock_origin_micros"] - first)
    merged += arrows(seen, 2 * max(head["args"].get("clock_error_micros", 0.0) for head in heads))
    earliest = min(heads, key=lambda head: head["args"]["clock_origin_micros"])
    epoch = "start_time_since_epoch_in_micros"  # that of time 0
    merged[0]["args"] |= {"clock_origin_micros": first, epoch: earliest["args"][epoch]}
    return merged


def _as_one_process(seen: Rank, events: list[Event], shift: float) -> list[Event]:
    """A rank's events with its number as their process, and a track for each row of each tensor; `shift` is added to
    their times, in microseconds. `seen` is told of all that has a time."""
    rank = seen.rank
    own = events[0]["pid"]  # marks of steps, and recoveries
    tensors = {
        event["pid"]: str(event["args"]["name"]).removeprefix(f"rank {rank}: ")
        for event in events
        if event.get("name") == "process_name"
    }
    tracks: dict[tuple[int, int], int] = {}
    kinds: dict[tuple[int, int], str] = {}  # what a row shows
    placed: list[Event] = [
        {
            "name": "process_name",
            "ph": "M",
            "pid": rank,
            "args": {**events[0]["args"], "name": f"rank {rank}"},
        },
        {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
    ]
    for event in events:
        row = (event["pid"], event.get("tid", 0))
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                kind = kinds[row] = event["args"]["name"]
                name = kind if row[0] == own else f"{tensors[row[0]]}: {kind}"
                placed += _track(rank, tracks.setdefault(row, len(tracks)), name)
            elif event["name"] == "dropped_events":
                placed.append({**event, "pid": rank})
            continue
        if row not in tracks:
            placed += _track(rank, tracks.setdefault(row, len(tracks)), tensors.get(row[0], "steps"))
        moved = {**event, "pid": rank, "tid": tracks[row]}
        if "ts" in event:
            moved["ts"] = round(event["ts"] + shift, 3)
        placed.append(moved)
        if row[0] != own:
            seen.add(moved, tensors.get(row[0], ""), kinds.get(row, ""))
    return placed


def _track(rank: int, track: int, name: str) -> list[Event]:
    where = {"ph": "M", "pid": rank, "tid": track}
    return [
        {"name": "thread_name", **where, "args": {"name": name}},
        {"name": "thread_sort_index", **where, "args": {"sort_index": track}},
    ]


def main(out: str, paths: Sequence[str]) -> int:
    """Writes the merged timeline to `out`. Returns the exit code."""
    events = merge(paths)
    try:
        Path(out).write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n")
    except OSError as error:
        raise LaunchError(f"timeline: {out} cannot be written: {error.strerror}") from None
    print(f"{out}: {len(events)} events of {len(paths)} ranks; open it in https://ui.perfetto.dev")
    return 0
