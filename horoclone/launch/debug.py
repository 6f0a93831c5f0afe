"""`horoclone debug`: merges the ranks' flight records and names the first call on which they disagree.

A call is identified by operation, process set and name with its use, or by its number among the unnamed ones. A call
that succeeded was made by every rank, so only the others are compared. Messages between two ranks have call number 0
and are not compared. Reads files only; needs nothing native.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horoclone.launch.usage import LaunchError, ranks_text

Operation = dict[str, Any]
Key = tuple[int, str, str, int]

AROUND = 3  # calls shown before and after the divergent one
COMPARED = ("dtype", "shape", "tensors", "elements", "reduce", "name_hash")
# In these the ranks may contribute different first dimensions.
ROWS_MAY_DIFFER = ("allgather", "alltoall", "reducescatter", "gather")


class Record(NamedTuple):
    """One rank's file."""

    rank: int
    size: int
    host: str
    reason: str
    submitted: int
    process_sets: dict[int, list[int]]
    operations: list[Operation]
    time: float = 0.0  # when it was written, in seconds since 1970


class Divergence(NamedTuple):
    """A call that not every rank of its process set made alike."""

    key: Key
    made: dict[int, Operation]  # by rank
    missing: list[int]  # ranks whose record has no such call
    unknown: list[int]  # ranks without a record, or whose record no longer goes back so far
    different: dict[int, list[str]]  # rank -> what differs from the lowest rank that made it


def read(paths: Iterable[str | Path]) -> list[Record]:
    """The records in these files and folders, by rank. LaunchError names a file that is none, and a rank that is there
    twice with another size (two jobs in one folder)."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*rank*.json")) if path.is_dir() else [path]
    if not files:
        raise LaunchError(
            "debug: there are no records (horoclone-rank*.json); start the job with HOROCLONE_RECORDER_DIR=DIR, or "
            "call hvd.flight_record(path) on each rank"
        )
    records = sorted((_read_one(file) for file in files), key=lambda record: record.rank)
    ranks = [record.rank for record in records]
    if len(set(ranks)) != len(ranks) or len({record.size for record in records}) != 1:
        raise LaunchError(f"debug: records of several jobs are mixed: {', '.join(map(str, files))}")
    return records


def _read_one(path: Path) -> Record:
    try:
        data = json.loads(path.read_text())
        sets = {int(number): ranks for number, ranks in data["process_sets"].items()}
        operations = sorted(data["operations"], key=lambda op: op["number"])
        return Record(
            data["rank"], data["size"], data["host"], data["reason"], data["submitted"], sets, operations,
            data["time"],
        )  # fmt: skip
    except OSError as error:
        raise LaunchError(f"debug: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LaunchError(f"debug: {path} is not a flight record (horoclone-rank*.json)") from None


def key_of(op: Operation) -> Key:
    return (op["process_set"], op["op"], op["name"] or "", op["use"])


def divergences(records: Sequence[Record]) -> list[Divergence]:
    """All divergent calls, the earliest first: the one with the smallest call number in its process set."""
    calls = [{key_of(op): op for op in record.operations if op["call"]} for record in records]
    suspects: dict[Key, int] = {}
    for by_key in calls:
        for key, op in by_key.items():
            if op["state"] != "ok":
                suspects[key] = min(suspects.get(key, op["call"]), op["call"])
    found = [_examine(key, records, calls) for key in sorted(suspects, key=lambda key: (suspects[key], key))]
    return [one for one in found if one.missing or one.different]


def _examine(key: Key, records: Sequence[Record], calls: Sequence[dict[Key, Operation]]) -> Divergence:
    made = {record.rank: by_key[key] for record, by_key in zip(records, calls, strict=True) if key in by_key}
    members = next((r.process_sets[key[0]] for r in records if key[0] in r.process_sets), sorted(made))
    seen = {record.rank: record for record in records}
    missing: list[int] = []
    unknown: list[int] = []
    earliest = min(op["call"] for op in made.values())
    for rank in members:
        if rank in made:
            continue
        record = seen.get(rank)
        (missing if record and goes_back(record, key[0], earliest) else unknown).append(rank)
    reference = made[min(made)]
    differences = {rank: _differences(op, reference) for rank, op in made.items()}
    return Divergence(key, made, missing, unknown, {rank: what for rank, what in differences.items() if what})


def goes_back(record: Record, process_set: int, call: int) -> bool:
    """Whether the record still holds this rank's calls to the set from about that number on."""
    if record.submitted <= len(record.operations):
        return True
    kept = [op["call"] for op in record.operations if op["process_set"] == process_set and op["call"]]
    return bool(kept) and kept[0] <= call


def _differences(op: Operation, reference: Operation) -> list[str]:
    named = [field for field in COMPARED if op.get(field) != reference.get(field)]
    if op["op"] in ROWS_MAY_DIFFER and op.get("shape", [])[1:] == reference.get("shape", [])[1:]:
        named = [field for field in named if field not in ("shape", "elements")]
    if "shape" in named and "elements" in named:
        named.remove("elements")
    return named


def call_text(op: Operation) -> str:
    """`allreduce 'grad_7' float32[3,4] Sum`, `allgather no. 17 (unnamed) float32[8]`."""
    name = f"'{op['name']}'" if op["name"] else f"no. {op['use']} (unnamed)"
    text = f"{op['op']} {name}"
    if "dtype" in op:
        shape = ",".join(map(str, op["shape"]))
        text += f" {op['dtype']}[{shape}]" + (f" and {op['tensors'] - 1} more" if op["tensors"] > 1 else "")
    return text + (f" {op['reduce']}" if "reduce" in op else "")


def brief(record: Record) -> str:
    """Why the record was written, in one line."""
    text = record.reason.splitlines()[0] if record.reason else ""
    return text if len(text) <= 200 else text[:197] + "..."


def report(records: Sequence[Record]) -> str:
    """What `horoclone debug` prints."""
    size = records[0].size
    lines = [f"Records of {len(records)} of {size} ranks."]
    absent = sorted(set(range(size)) - {record.rank for record in records})
    if absent:
        lines.append(
            f"No record of {ranks_text(absent)}: killed before it could write one, or on another host?"
        )
    for record in records:
        lines.append(f"  rank {record.rank} ({record.host}): {record.submitted} calls; {brief(record)}")
    found = divergences(records)
    if not found:
        waiting = sorted({call_text(op) for r in records for op in r.operations if op["state"] != "ok"})
        lines.append("The records do not diverge: every rank made the same calls.")
        lines += [f"  not completed: {text}" for text in waiting[:10]]
        return "\n".join(lines)
    lines += ["", *_explain(found[0], records)]
    if len(found) > 1:
        lines.append(f"\nLater divergent calls ({len(found) - 1}), perhaps only a consequence:")
        lines += [f"  {_headline(one)}" for one in found[1:11]]
    return "\n".join(lines)


def _headline(one: Divergence) -> str:
    first = min(one.made)
    op = one.made[first]
    where = f" in process set {op['process_set']}" if op["process_set"] else ""
    text = f"{call_text(op)}{where}: made by {ranks_text(sorted(one.made))}"
    if one.missing:
        text += f", never by {ranks_text(one.missing)}"
    for rank, what in sorted(one.different.items()):
        text += f"; on rank {rank} it is {call_text(one.made[rank])} ({', '.join(what)} differ from rank {first}'s)"
    return text + (f"; not known of {ranks_text(one.unknown)}" if one.unknown else "")


def _explain(one: Divergence, records: Sequence[Record]) -> list[str]:
    process_set = one.key[0]
    numbers = ", ".join(f"call {op['call']} of rank {rank}" for rank, op in sorted(one.made.items()))
    lines = [f"First divergent call: {_headline(one)}.", f"It is {numbers}.", ""]
    middle = min(op["call"] for op in one.made.values())
    for record in records:
        own = [op for op in record.operations if op["process_set"] == process_set and op["call"]]
        if record.rank not in one.made and record.rank not in one.missing:
            continue
        at = one.made[record.rank]["call"] if record.rank in one.made else middle
        lines.append(f"rank {record.rank} called:")
        shown = [op for op in own if at - AROUND <= op["call"] <= at + AROUND] or own[-AROUND:]
        for op in shown:
            mark = ">" if key_of(op) == one.key else " "
            lines.append(f" {mark} {op['call']:>6}  {call_text(op)}  {op['state']}")
        if not any(op["call"] > at for op in own) and record.rank in one.missing:
            lines.append("          (nothing more)")
    return lines


def main(paths: Sequence[str]) -> int:
    """Prints the report on the records in these files or folders. Returns 1 when the ranks diverge, else 0."""
    records = read(paths)
    print(report(records))
    return 1 if divergences(records) else 0
