"""From the ranks' raw times to the result: a dictionary for JSON and a table in plain text."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from statistics_of import Summary, ratio_of, reasons_against, slowest_rank, summarise

OWN = ("horoclone", "horoclone async", "horoclone bucket")
MEMCPY = "memcpy"
SHOWN = ("horoclone", "torch", "mpi", "mpi4py", "python")  # of the versions
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def size_text(nbytes: int) -> str:
    """4 -> "4 B", 65536 -> "64 KiB"."""
    for unit, name in UNITS:
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def time_text(us: float) -> str:
    """Three digits, in us or ms."""
    return f"{us / 1000:.3g} ms" if us >= 10_000 else f"{us:.0f} us" if us >= 100 else f"{us:.3g} us"


def analyse(raw: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """`raw` is what measure.py wrote. session.py adds the machine, and to "noise" what others used of it."""
    ranks = raw["ranks"]
    memcpy = [
        summarise([slowest_rank([rank["calibration"][at] for rank in ranks])]).median_us for at in (0, 1)
    ]
    parts = {part: _part(part, ranks) for part in ranks[0]["times"]}
    return {
        "settings": settings,
        "versions": raw["versions"],
        "noise": {
            "memcpy_16MiB_us": memcpy,
            "reasons": reasons_against((memcpy[0], memcpy[1]), settings["rounds"]),
        },
        "sizes": [
            {"bytes": int(name.split(".")[1]), **part}
            for name, part in parts.items()
            if name.startswith("size.")
        ],
        "sets": {name[4:]: part["contestants"] for name, part in parts.items() if name.startswith("set.")},
        "loop_4_bytes": parts.get("loop"),
    }


def _part(part: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """All contestants at one size: figures of each, and the ratios of both our ways to every peer."""
    summaries: dict[str, Summary] = {}
    for label in ranks[0]["times"][part]:
        rounds = zip(*(rank["times"][part][label] for rank in ranks), strict=True)
        summaries[label] = summarise([slowest_rank(per_rank) for per_rank in rounds])
    ratios = {
        own: {
            peer: dataclasses.asdict(ratio_of(summaries[own].rounds_us, theirs.rounds_us))
            for peer, theirs in summaries.items()
            if peer not in OWN
        }
        for own in OWN
        if own in summaries
    }
    return {
        "contestants": {label: dataclasses.asdict(one) for label, one in summaries.items()},
        "ratios": ratios,
    }


def head_lines(result: dict[str, Any]) -> list[str]:
    """What was measured, where, and whether it may be believed."""
    machine, noise = result["machine"], result["noise"]
    virtual = "virtual machine, " if machine["virtual machine"] else ""
    lines = [
        result["benchmark"],
        f"{machine['processor']}, {machine['cores']} cores, {machine['kernel']}, {virtual}"
        f"huge pages {machine['huge pages']}",
    ]
    if versions := result.get("versions"):
        lines.append(", ".join(f"{name} {value}" for name, value in versions.items() if name in SHOWN))
    lines.append(
        f"others used {_cores(noise['others_before'])} cores before and {_cores(noise['others_during'])} during"
    )
    if "memcpy_16MiB_us" in noise:
        first, last = noise["memcpy_16MiB_us"]
        lines[-1] += f"; memcpy of 16 MiB took {time_text(first)} first, {time_text(last)} last"
    if noise["reasons"]:
        lines.append("TOO NOISY, NO CONCLUSION: " + "; ".join(noise["reasons"]))
    return lines


def _cores(cores: float | None) -> str:
    return "an unknown number of" if cores is None else f"{cores:.2f}"


# --- the table -----------------------------------------------------------------------------------------------------


def benchmark_of(settings: dict[str, Any]) -> str:
    """What was measured, in a line."""
    bound = "not bound" if settings["bind"] == "none" else "bound to " + settings["bind"]
    return (
        f"allreduce, float32, sum, in place; {settings['ranks']} ranks, "
        f"{settings['rounds']} rounds, one thread each, {settings['memory']} memory, {bound}"
    )


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows. Times: median of the rounds' medians, and the 99th percentile after the slash."""
    rows = [(size_text(one["bytes"]), one) for one in result["sizes"]]
    if result["loop_4_bytes"]:
        rows.append(("4 B in a loop", result["loop_4_bytes"]))
    labels = list(
        dict.fromkeys(label for _, part in rows for label in sorted(part["contestants"], key=_order))
    )
    own = next((label for label in OWN if label in labels), None)
    peers = [label for label in labels if label not in OWN] if own else []
    header = ["size", *labels, *(f"vs {peer}" for peer in peers)]
    return header, [[name, *_times(part, labels), *_ratios(part, own, peers)] for name, part in rows]


def _order(label: str) -> tuple[int, str]:
    return (0, label) if label in OWN else (2, label) if label == MEMCPY else (1, label)


def _times(part: dict[str, Any], labels: list[str]) -> list[str]:
    cells = []
    for label in labels:
        one = part["contestants"].get(label)
        cells.append(f"{time_text(one['median_us'])} / {time_text(one['p99_us'])}" if one else "-")
    return cells


def _ratios(part: dict[str, Any], own: str | None, peers: list[str]) -> list[str]:
    if own is None:
        return []
    found = [part["ratios"][own].get(peer) for peer in peers]
    return [ratio_text(one) if one else "-" for one in found]


def ratio_text(one: dict[str, Any]) -> str:
    """ "1.52x (1.47-1.58)"; a question mark where the interval holds 1."""
    mark = "?" if one["verdict"] == "undecided" else ""
    return f"{one['ratio']:.3g}x ({one['low']:.3g}-{one['high']:.3g}){mark}"


LEGEND = (
    "Time of a call: the largest over the ranks. Cells: median of the rounds' medians / 99th percentile of all calls.",
    "vs: the peer's time over that of horoclone's blocking call, with its bootstrap 95 % interval; above 1 horoclone",
    "is faster, ? undecided. vs memcpy: the fraction of the speed at which all ranks copy the buffer at once.",
    "Inputs are written anew by their owner before each call, so small ones start in its cache; results were checked.",
    "In a loop: calls back to back, no barrier.",
)


def print_tables(result: dict[str, Any]) -> None:
    """Everything a reader needs, on the standard output."""
    print_rows(*table(result))
    print("\n".join(LEGEND))


def print_rows(header: list[str], rows: list[list[str]]) -> None:
    """A table: with rich on a terminal, else in plain text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            grid = Table(*header)
            for row in rows:
                grid.add_row(*row)
            Console().print(grid)
            return
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]
    for row in [header, *rows]:
        print(
            "  ".join(
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
    print()
