"""`horoclone timeline`: merges the ranks' timelines into one file on rank 0's clock.

With HOROCLONE_TIMELINE_ALL_RANKS=1 each rank writes its own file, whose first event says where its time 0 lies on rank
0's monotonic clock. Files that a kill cut short are read as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise LaunchError(f"timeline: {path} is not a timeline of horoclone: {error!r}") from None
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
    for events in files:
        shift = events[0]["args"]["clock_origin_micros"] - first
        for event in events:
            if "ts" in event:
                event["ts"] = round(event["ts"] + shift, 3)
            merged.append(event)
    earliest = min(range(len(files)), key=lambda index: heads[index]["args"]["clock_origin_micros"])
    merged.remove(heads[earliest])
    return [heads[earliest], *merged]


def main(out: str, paths: Sequence[str]) -> int:
    """Writes the merged timeline to `out`. Returns the exit code."""
    events = merge(paths)
    try:
        Path(out).write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n")
    except OSError as error:
        raise LaunchError(f"timeline: {out} cannot be written: {error.strerror}") from None
    print(f"{out}: {len(events)} events of {len(paths)} ranks; open it in https://ui.perfetto.dev")
    return 0
