"""Allreduce between two hosts with slow links: `python benchmarks/network.py`. Needs root, iproute2 and nothing else.

The hosts are network namespaces joined by a cable with tbf on both ends (hosts.py); plain sockets are measured first
and last, and every figure is given as a fraction of that and of the nominal rate. horoclone in one ring and in two
levels, with fp16 and block-int8 on the wire, and torch's gloo take turns in the same processes. A long way (80ms,
150ms) is a wire in user space; it is measured with 16 connections for the data of two ranks, and with one. 1g-fabric
and 10g-fabric go through libfabric's provider tcp, which must be installed.
Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 no conclusion.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from hosts import BURST_BYTES, CABLE, Hosts, needs_root
from machine import Load
from report import analyse, print_rows, size_text, time_text
from session import Failed, options, run
from statistics_of import loads_against, ratio_of

KIB, MIB = 1 << 10, 1 << 20
MIN_BURSTS = 32  # smaller sizes live on the shaper's free credit
MAX_ON_LO = 1 << 20  # bytes: rendezvous and the control messages of ranks of one host
RAW_ROUND_TRIPS = 60  # of a run of plain sockets on a long way, until their windows have grown
RAW_SLACK = 1.01  # repeated raw runs differ by so much; larger: the shaper was not understood


@dataclass(frozen=True)
class Case:
    """One pair of hosts and what runs on it."""

    gbit: float
    mtu: int
    per_host: int
    sizes: tuple[int, ...]
    contestants: tuple[str, ...]
    round_trip_ms: float = 0
    lost: float = 0  # of packets
    streams: int = 1  # HOROCLONE_TCP_STREAMS
    raw_streams: tuple[int, int] = (1, 2)
    fabric: str = ""  # HOROCLONE_FABRIC


COMPRESSED = ("horoclone", "fp16", "int8", "gloo")
LEVELS = ("horoclone", "flat", "gloo")
CASES = {
    "1g": Case(1, 1500, 1, (4 * MIB, 25 * MIB), COMPRESSED),
    "10g": Case(10, 9000, 1, (25 * MIB, 100 * MIB), COMPRESSED),
    "1g-fabric": Case(1, 1500, 1, (4 * MIB, 25 * MIB), ("horoclone",), fabric="tcp"),
    "10g-fabric": Case(10, 9000, 1, (25 * MIB, 100 * MIB), ("horoclone",), fabric="tcp"),
    "1g-2x2": Case(1, 1500, 2, (25 * MIB,), LEVELS),
    "1g-2x4": Case(1, 1500, 4, (25 * MIB,), LEVELS),
    "10g-2x2": Case(10, 9000, 2, (25 * MIB,), LEVELS),
    "80ms": Case(0.2, 1500, 1, (8 * MIB,), ("horoclone",), 80, 0.001, 16, (1, 16)),
    "80ms-one": Case(0.2, 1500, 1, (8 * MIB,), ("horoclone",), 80, 0.001, 1, (1, 16)),
    "150ms": Case(0.5, 1500, 1, (25 * MIB,), ("horoclone",), 150, 0, 16, (1, 16)),
    "150ms-one": Case(0.5, 1500, 1, (25 * MIB,), ("horoclone",), 150, 0, 1, (1, 16)),
}
SHORT = ("1g", "10g", "1g-2x2", "1g-2x4")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--cases", list(SHORT), "pairs of hosts", CASES), ("--sizes", [], "bytes, of all cases"),
        ("--raw-s", 1.5, "seconds of each run of plain sockets"), ("--rounds", 7, "below 7 the intervals say little"),
        ("--seed", 1, "of the order"), ("--limit", 600.0, "seconds after which the ranks of a case are killed"),
    )  # fmt: skip
    needs_root()
    return run(arguments, lambda: measure_all(arguments), print_result)


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name in arguments.cases:
        case = CASES[name]
        if arguments.sizes:
            case = dataclasses.replace(case, sizes=tuple(arguments.sizes))
        try:
            cases[name] = measure(case, arguments)
        except RuntimeError as error:
            raise Failed(f"{name}: {error}") from None
    return {
        "benchmark": "allreduce, float32, sum, in place, between two hosts (namespaces, tbf); "
        f"{arguments.rounds} rounds, one thread each",
        "versions": next(iter(cases.values()))["versions"],
        "noise": {
            "reasons": [f"{name}: {why}" for name, one in cases.items() for why in one["noise"]["reasons"]]
        },
        "cases": cases,
    }


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case from the making of its hosts to its result."""
    raw_s = arguments.raw_s + RAW_ROUND_TRIPS * case.round_trip_ms / 1e3
    with Hosts(case.gbit, case.mtu, case.round_trip_ms, case.lost) as hosts:
        raws = [hosts.raw_gbit(streams, raw_s) for streams in case.raw_streams]
        loops = [hosts.sent(host, "lo") for host in (0, 1)]
        cable = hosts.sent(0, CABLE)
        load = Load()
        plan = {"sizes": list(case.sizes), "rounds": arguments.rounds, "contestants": list(case.contestants),
                "memory": "private", "seed": arguments.seed, "extras": False}  # fmt: skip
        more = {"HOROCLONE_TCP_STREAMS": str(case.streams), "HOROCLONE_FABRIC": case.fabric}
        raw = hosts.run_ranks("measure.py", plan, case.per_host, arguments.limit, more)
        others = load.others()
        cable = hosts.sent(0, CABLE) - cable
        loops = [hosts.sent(host, "lo") - was for host, was in zip((0, 1), loops, strict=True)]
        raws += [hosts.raw_gbit(streams, raw_s) for streams in case.raw_streams]
    settings = {"ranks": 2 * case.per_host, "rounds": arguments.rounds, "seed": arguments.seed}
    result = analyse(raw, settings)
    counted = {"burst": BURST_BYTES, "cable_bytes": cable, "lo_bytes": loops}
    result["case"] = {**dataclasses.asdict(case), **counted}
    result["raw_gbit"] = {"streams": [*case.raw_streams] * 2, "rates": raws, "best": max(raws)}
    for one in result["sizes"]:
        one["found"] = found(case, one, max(raws), arguments.seed)
    result["noise"]["others_during"] = others
    result["noise"]["reasons"] += [*loads_against(0.0, others), *doubts(result)]
    return result


# --- what comes out ------------------------------------------------------------------------------------------------


def link_bytes(label: str, nbytes: int, per_host: int) -> float:
    """float32 payload that must cross the cable in each direction: between two hosts 2(H-1)/H of the buffer in two
    levels, 2(N-1)/N in one ring whose neighbours sit side by side."""
    ranks = 2 * per_host
    ring = label in ("gloo", "horoclone flat")
    return nbytes * (2 * (ranks - 1) / ranks if ring else 1.0)


def found(case: Case, size: dict[str, Any], raw_gbit: float, seed: int) -> dict[str, dict[str, Any]]:
    """Fractions of the line (horoclone's and each peer's) and the ratios, each with its 95 % interval."""
    rounds = {label: one["rounds_us"] for label, one in size["contestants"].items()}
    values: dict[str, dict[str, Any]] = {}

    def ratio(label: str, peer_us: list[float]) -> dict[str, Any]:
        return dataclasses.asdict(ratio_of(rounds[label], peer_us, seed))

    for label, times in rounds.items():
        if label not in ("horoclone fp16", "horoclone int8"):
            ideal_us = link_bytes(label, size["bytes"], case.per_host) * 8 / case.gbit / 1e3
            line = values["of line" if label == "horoclone" else f"{label} of line"] = ratio(
                label, [ideal_us] * len(times)
            )
            shares = {key: line[key] * case.gbit / raw_gbit for key in ("ratio", "low", "high")}
            values[f"{label} of raw"] = {**line, **shares}
        if label.startswith("horoclone ") and label != "horoclone flat":
            values[f"{label} vs horoclone"] = ratio(label, rounds["horoclone"])
        if label in ("gloo", "horoclone flat"):
            values[f"horoclone vs {label}"] = ratio("horoclone", times)
    return values


def doubts(result: dict[str, Any]) -> list[str]:
    """Why the network itself allows no conclusion."""
    case, reasons = result["case"], []
    # A ring in one level may connect ranks of one host over the loopback.
    if case["per_host"] == 1 and max(case["lo_bytes"]) > MAX_ON_LO:
        reasons.append(f"{max(case['lo_bytes'])} bytes went over the loopback")
    for one in result["sizes"]:
        if one["bytes"] < MIN_BURSTS * BURST_BYTES:
            reasons.append(f"{size_text(one['bytes'])} is less than {MIN_BURSTS} times the shaper's burst")
        for name, value in one["found"].items():
            limit = 1.0 if name.endswith("of line") else RAW_SLACK
            if name.endswith(("of line", "of raw")) and value["ratio"] > limit:
                reasons.append(
                    f"{name} at {size_text(one['bytes'])} is {value['ratio']:.3f}, more than there can be"
                )
    return reasons


def print_result(whole: dict[str, Any]) -> None:
    """A table for each case."""
    for name, result in whole["cases"].items():
        case = result["case"]
        rates = ", ".join(f"{rate:.3f}" for rate in result["raw_gbit"]["rates"])
        streams = ", ".join(map(str, result["raw_gbit"]["streams"]))
        way = f", {case['round_trip_ms']:g} ms, {case['lost']:.1%} lost" if case["round_trip_ms"] else ""
        print(
            f"{name}: {case['gbit']:g} Gbit/s, MTU {case['mtu']}{way}, 2 hosts x {case['per_host']}; "
            f"plain sockets, {streams} streams, both ways at once: {rates} Gbit/s"
        )
        print_rows(*rows_of(result))


def rows_of(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["size, contestant", "time / p99", "of line", "of raw", "vs horoclone", "vs gloo"]
    rows = []
    for one in result["sizes"]:
        gloo, own = (one["contestants"].get(label) for label in ("gloo", "horoclone"))
        for label, summary in one["contestants"].items():
            values = one["found"]
            line = values.get("of line" if label == "horoclone" else f"{label} of line")
            raw = values.get(f"{label} of raw")
            rows.append([
                f"{size_text(one['bytes'])} {label}",
                f"{time_text(summary['median_us'])} / {time_text(summary['p99_us'])}",
                f"{line['ratio']:.3f}" if line else "-",
                f"{raw['ratio']:.3f}" if raw else "-",
                f"{own['median_us'] / summary['median_us']:.2f}x" if own else "-",
                f"{gloo['median_us'] / summary['median_us']:.2f}x" if gloo else "-",
            ])  # fmt: skip
    return header, rows


if __name__ == "__main__":
    sys.exit(main())
