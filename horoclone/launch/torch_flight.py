"""`horoclone debug DIR --torch OUT`: flight records in the form of torch's own flight recorder, for `torchfrtrace OUT`.

torch matches the calls of the ranks by a number, which it takes from their order; ours are matched by operation and
name, and ranks may make them in any order. So the numbers are given here, where all records are at hand. Reads and
writes files only; needs neither torch nor anything native.
"""

from __future__ import annotations

import math
import pickle
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horoclone.launch.debug import ROWS_MAY_DIFFER, Key, Operation, Record, call_text, goes_back, key_of, read
from horoclone.launch.usage import LaunchError

VERSION = "2.10"  # of the format; torch 2.13 writes and reads it
BACKEND = "gloo"  # torchfrtrace knows torch's backends only
UNKNOWN = -1  # a dimension in which the ranks may differ, and do

# Our name of a call, and torch's for one tensor and for a group. join() and messages have no place among torch's
# collectives.
NAMES = {
    "allreduce": ("all_reduce", "allreduce_coalesced"),
    "allgather": ("all_gather", "ALLGATHER_coalesced"),
    "broadcast": ("broadcast", "broadcast"),
    "alltoall": ("all_to_all", "all_to_all"),
    "reducescatter": ("reduce_scatter", "REDUCE_SCATTER_coalesced"),
    "barrier": ("barrier", "barrier"),
    "reduce": ("reduce", "reduce"),
    "gather": ("gather", "gather"),
    "scatter": ("scatter", "scatter"),
}
DTYPES = {
    "uint8": "Byte", "int8": "Char", "uint16": "UInt16", "int16": "Short", "int32": "Int", "int64": "Long",
    "float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "bool": "Bool",
    "uint32": "UInt32", "uint64": "UInt64", "complex32": "ComplexHalf", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "float8_e4m3fn": "Float8_e4m3fn", "float8_e4m3fnuz": "Float8_e4m3fnuz",
    "float8_e5m2": "Float8_e5m2", "float8_e5m2fnuz": "Float8_e5m2fnuz", "float8_e8m0fnu": "Float8_e8m0fnu",
    "float4_e2m1fn_x2": "Float4_e2m1fn_x2",
}  # fmt: skip

Call = dict[int, Operation]  # what one call was on each rank that made it


class Form(NamedTuple):
    """What torchfrtrace compares between the ranks."""

    name: str
    inputs: list[list[int]]
    outputs: list[list[int]]


def main(paths: Sequence[str], out: str) -> None:
    """Writes the records in these files or folders into the folder `out` and prints what to do with it."""
    records = read(paths)
    write(records, out)
    partial = "" if len(records) == records[0].size else " --allow-incomplete-ranks"
    print(f"\nFor torch's analyser: torchfrtrace {shlex.quote(out)}{partial}")


def write(records: Sequence[Record], out: str | Path) -> list[Path]:
    """Writes one file for each record into the folder `out`, which is made or empty. Returns the files.

    LaunchError where the folder has files (torchfrtrace reads all that are there) or cannot be written.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LaunchError(
                f"debug: {out} is not empty, and torchfrtrace would read all of it: name a new folder"
            )
        files = []
        for record, dump in zip(records, dumps(records), strict=True):
            files.append(folder / f"horoclone-rank{record.rank}")
            files[-1].write_bytes(pickle.dumps(dump))
    except OSError as error:
        raise LaunchError(f"debug: {error.filename or out} cannot be written: {error.strerror}") from None
    return files


def dumps(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What torch's flight recorder of each rank would have written."""
    calls = _calls_of(records)
    numbers = _numbers_of(calls)
    return [_dump_of(record, calls, numbers) for record in records]


def _calls_of(records: Sequence[Record]) -> dict[Key, Call]:
    """The calls that can be compared. Left out is what the record of a rank that made it may have forgotten: a call
    that succeeded was made by all, and one that is older than a record is not known to be missing there."""
    calls: dict[Key, Call] = {}
    for record in records:
        for op in record.operations:
            if op["call"] and op["op"] in NAMES:
                calls.setdefault(key_of(op), {})[record.rank] = op
    return {key: call for key, call in calls.items() if _is_comparable(key, call, records)}


def _is_comparable(key: Key, call: Call, records: Sequence[Record]) -> bool:
    earliest = min(op["call"] for op in call.values())
    for record in records:
        if record.rank in call or record.rank not in record.process_sets.get(key[0], ()):
            continue
        if any(op["state"] == "ok" for op in call.values()) or not goes_back(record, key[0], earliest):
            return False
    return True


def _numbers_of(calls: dict[Key, Call]) -> dict[Key, int]:
    """A number for each call, counted in each process set: first what all ranks have completed, as torchfrtrace
    compares nothing behind the first difference."""

    def turn(key: Key) -> tuple[bool, int, int, Key]:
        earliest = min((op["call"], rank) for rank, op in calls[key].items())
        return any(op["state"] != "ok" for op in calls[key].values()), *earliest, key

    numbers: dict[Key, int] = {}
    counts: dict[int, int] = {}
    for key in sorted(calls, key=turn):
        if key in numbers:
            continue
        counts[key[0]] = numbers[key] = counts.get(key[0], 0) + 1
        if (twin := _twin_of(key, calls, numbers)) is not None:
            numbers[twin] = numbers[key]
    return numbers


def _twin_of(key: Key, calls: dict[Key, Call], numbers: dict[Key, int]) -> Key | None:
    """Another operation under the same name (or unnamed, too) that the other ranks made instead: one call, of which
    torchfrtrace then says that its types differ."""
    if all(op["state"] == "ok" for op in calls[key].values()):
        return None
    for other, call in calls.items():
        same = (other[0], other[2]) == (key[0], key[2]) and other[1] != key[1] and other not in numbers
        if same and not set(call) & set(calls[key]) and all(op["state"] != "ok" for op in call.values()):
            return other
    return None


def _dump_of(record: Record, calls: dict[Key, Call], numbers: dict[Key, int]) -> dict[str, Any]:
    own = [key for key, call in calls.items() if record.rank in call]
    own.sort(key=lambda key: (calls[key][record.rank]["state"] != "ok", calls[key][record.rank]["number"]))
    members = {str(number): ranks for number, ranks in record.process_sets.items() if record.rank in ranks}
    return {
        "version": VERSION,
        "comm_lib_version": "horoclone",
        "host_name": record.host,
        "pg_config": {
            name: {"name": name, "desc": _description(name), "ranks": str(ranks)}
            for name, ranks in members.items()
        },
        "pg_status": {},
        "entries": [
            _entry(place, record, calls[key], numbers[key], members[str(key[0])])
            for place, key in enumerate(own)
        ],
    }


def _description(process_set: str) -> str:
    return "all ranks" if process_set == "0" else f"process set {process_set}"


def _entry(place: int, record: Record, call: Call, number: int, members: Sequence[int]) -> dict[str, Any]:
    op = call[record.rank]
    form = _form_of(op, call.values(), len(members))
    dtypes = [DTYPES.get(op["dtype"], op["dtype"])] if "dtype" in op else []

    def moment(ago: str) -> int | None:  # nanoseconds since 1970
        return None if op[ago] is None else round((record.time - op[ago]) * 1e9)

    return {
        "record_id": place,  # torchfrtrace drops what lies before the other ranks' first one
        "pg_id": op["process_set"],
        "process_group": (str(op["process_set"]), _description(str(op["process_set"]))),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": op["number"],
        "is_p2p": False,
        "profiling_name": f"{BACKEND}:{form.name}",
        "input_sizes": form.inputs,
        "output_sizes": form.outputs,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": _state_of(op),
        "retired": op["state"] == "ok",
        "timeout_ms": 0,
        "time_created_ns": moment("submitted_ago"),
        "time_discovered_started_ns": moment("agreed_ago"),
        "time_discovered_completed_ns": moment("done_ago") if op["state"] == "ok" else None,
        # The only place in which torchfrtrace shows a text of ours.
        "frames": [
            {"name": f"{call_text(op)}, {op['state']}", "filename": f"call of rank {record.rank}", "line": op["call"]}
        ],
    }  # fmt: skip


def _state_of(op: Operation) -> str:
    if op["state"] == "ok":
        return "completed"
    return "scheduled" if op["agreed_ago"] is None else "started"


def _form_of(op: Operation, everybody: Iterable[Operation], members: int) -> Form:
    """The call's name among torch's, and the sizes of what goes in and comes out. Where ranks may give a first
    dimension of their own and do, it is UNKNOWN."""
    single, grouped = NAMES[op["op"]]
    kind, shape = op["op"], list(op.get("shape", []))
    if op.get("tensors", 0) > 1:  # the record has the first one's shape, and how many elements all have
        sizes = [shape, [op["elements"] - math.prod(shape)]]
        return Form(grouped, sizes, sizes)
    if kind == "scatter":  # what comes is known to the root alone
        return Form(single, [shape], [[]])
    if kind in ROWS_MAY_DIFFER and shape and kind != "alltoall":
        shapes = [one.get("shape", []) for one in everybody]
        if any(other != shape for other in shapes) and all(other[1:] == shape[1:] for other in shapes):
            sizes = [[UNKNOWN, *shape[1:]]]
            return Form(single if kind == "gather" else f"{single}_v", sizes, sizes)
    if kind == "allgather" and shape:
        return Form(single, [shape], [[shape[0] * members, *shape[1:]]])
    if kind == "reducescatter" and shape:
        even = shape[0] % members == 0
        share = [shape[0] // members if even else UNKNOWN, *shape[1:]]
        return Form(single if even else f"{single}_v", [shape], [share])
    return Form(single, [shape], [shape])
