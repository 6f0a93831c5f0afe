"""Allreduce between two hosts with slow links: `python benchmarks/network.py`. Needs root, iproute2 and nothing else.

The hosts are network namespaces joined by a cable with tbf on both ends (hosts.py); plain sockets are measured first
and last, and every figure is given as a fraction of that and of the nominal rate. horoclone in one ring and in two
levels, with fp16 and block-int8 on the wire, and torch's gloo take turns in the same processes.
Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 no conclusion.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hosts import BURST_BYTES, CABLE, Hosts  # noqa: E402
from machine import Load  # noqa: E402
from meeting import ADDRESS, FOLDER  # noqa: E402
from report import analyse, print_rows, ratio_text, size_text, time_text  # noqa: E402
from session import Failed, add_options, run, say, words_of  # noqa: E402
from statistics_of import loads_against, ratio_of  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
MIN_BURSTS = 32  # smaller sizes live on the shaper's free credit
MAX_ON_LO = 1 << 20  # bytes: rendezvous and the control messages of ranks of one host
RAW_SLACK = 1.01  # repeated raw runs differ by so much; larger: the shaper was not understood


@dataclass(frozen=True)
class Case:
    """One pair of hosts and what runs on it. `gates`: least values of what the result holds under these names."""

    gbit: float
    mtu: int
    per_host: int
    sizes: tuple[int, ...]
    contestants: tuple[str, ...]
    gates: dict[str, float]


COMPRESSED = ("horoclone", "fp16", "int8", "gloo")
LEVELS = ("horoclone", "flat", "gloo")
CASES = {
    "1g": Case(1, 1500, 1, (4 * MIB, 25 * MIB), COMPRESSED,
               {"of line": 0.95, "horoclone fp16 vs horoclone": 1.85, "horoclone int8 vs horoclone": 3.3}),
    "10g": Case(10, 9000, 1, (25 * MIB, 100 * MIB), COMPRESSED, {"of line": 0.90, "horoclone vs gloo": 1.15}),
    "1g-2x2": Case(1, 1500, 2, (25 * MIB,), LEVELS, {"of line": 0.90, "horoclone vs gloo": 1.45}),
    "1g-2x4": Case(1, 1500, 4, (25 * MIB,), LEVELS, {"of line": 0.90, "horoclone vs gloo": 1.65}),
    "10g-2x2": Case(10, 9000, 2, (25 * MIB,), LEVELS, {"horoclone vs gloo": 1.45}),
}  # fmt: skip
SHORT = ("1g", "10g", "1g-2x2", "1g-2x4")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = parse(argv)
    if os.geteuid() != 0:
        say("network namespaces need root")
        return 2
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=words_of(CASES, "case"), default=list(SHORT), help=",".join(CASES))
    parser.add_argument(
        "--sizes", type=lambda text: [int(word) for word in text.split(",")], help="bytes, of all cases"
    )
    parser.add_argument("--raw-s", type=float, default=1.5, help="seconds of each run of plain sockets (1.5)")
    parser.add_argument("--rounds", type=int, default=7, help="below 7 the intervals say little (7)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (1)")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds after which the ranks of a case are killed"
    )
    add_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


# --- running -------------------------------------------------------------------------------------------------------


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case from the making of its hosts to its result."""
    with Hosts(case.gbit, case.mtu) as hosts:
        raws = [hosts.raw_gbit(streams, arguments.raw_s) for streams in (1, 2)]
        loops = [hosts.sent(host, "lo") for host in (0, 1)]
        cable = hosts.sent(0, CABLE)
        load = Load()
        raw = run_ranks(case, hosts, arguments)
        others = load.others()
        cable = hosts.sent(0, CABLE) - cable
        loops = [hosts.sent(host, "lo") - was for host, was in zip((0, 1), loops, strict=True)]
        raws += [hosts.raw_gbit(streams, arguments.raw_s) for streams in (1, 2)]
    settings = {"ranks": 2 * case.per_host, "rounds": arguments.rounds, "seed": arguments.seed}
    result = analyse(raw, settings)
    result["case"] = {
        **dataclasses.asdict(case),
        "burst": BURST_BYTES,
        "cable_bytes": cable,
        "lo_bytes": loops,
    }
    result["raw_gbit"] = {"streams": [1, 2, 1, 2], "rates": raws, "best": max(raws)}
    for one in result["sizes"]:
        one["found"] = found(case, one, max(raws), arguments.seed)
    result["noise"]["others_during"] = others
    result["noise"]["reasons"] += [*loads_against(0.0, others), *doubts(result)]
    return result


def run_ranks(case: Case, hosts: Hosts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks on both hosts; their raw times. RuntimeError when one failed."""
    from horoclone.bootstrap.rendezvous import Server

    plan = {"sizes": list(case.sizes), "rounds": arguments.rounds, "contestants": list(case.contestants),
            "memory": "private", "seed": arguments.seed, "extras": False}  # fmt: skip
    size, secret, job = 2 * case.per_host, secrets.token_hex(16), f"network-{secrets.token_hex(4)}"
    server = hosts.inside(0, lambda: Server(secret.encode(), job, size, [f"{hosts.addresses[0]}:0"]))
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "raw.json"
        try:
            for rank in range(size):
                words = [sys.executable, str(HERE / "measure.py"), json.dumps(plan), str(out)]
                environment = {
                    **os.environ,
                    **place(case, rank),
                    "HOROCLONE_RENDEZVOUS": ",".join(server.addresses),
                    "HOROCLONE_SECRET": secret,
                    "HOROCLONE_JOB": job,
                    ADDRESS: hosts.addresses[0],
                    FOLDER: folder,
                }
                words = hosts.command(rank // case.per_host, words)
                ranks.append(subprocess.Popen(words, env=environment, start_new_session=True))
            wait(ranks, arguments.limit)
        finally:
            for one in ranks:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
            server.close()
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


def place(case: Case, rank: int) -> dict[str, str]:
    """Of a rank, as a launcher would say it."""
    numbers = {
        "RANK": rank,
        "SIZE": 2 * case.per_host,
        "LOCAL_RANK": rank % case.per_host,
        "LOCAL_SIZE": case.per_host,
        "CROSS_RANK": rank // case.per_host,
        "CROSS_SIZE": 2,
    }
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE}
    return {f"HOROCLONE_{name}": str(number) for name, number in numbers.items()} | threads


def wait(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until all have ended well; RuntimeError at the first that has not, and at the limit."""
    deadline = time.monotonic() + limit_s
    while any(one.poll() is None for one in ranks):
        failed = [f"rank {rank} ended with {one.poll()}" for rank, one in enumerate(ranks) if one.poll()]
        if failed or time.monotonic() > deadline:
            raise RuntimeError(
                "; ".join(failed) or f"the ranks were not done after {limit_s:.0f} s (--limit)"
            )
        time.sleep(0.1)
    if any(one.poll() for one in ranks):
        raise RuntimeError(f"the ranks ended with {[one.poll() for one in ranks]}; what they wrote is above")


# --- what comes out ------------------------------------------------------------------------------------------------


def link_bytes(label: str, nbytes: int, per_host: int) -> float:
    """float32 payload that must cross the cable in each direction: between two hosts 2(H-1)/H of the buffer in two
    levels, 2(N-1)/N in one ring whose neighbours sit side by side."""
    ranks = 2 * per_host
    ring = label in ("gloo", "horoclone flat")
    return nbytes * (2 * (ranks - 1) / ranks if ring else 1.0)


def found(case: Case, size: dict[str, Any], raw_gbit: float, seed: int) -> dict[str, dict[str, Any]]:
    """Fractions of the line (horoclone's and each peer's) and the ratios, each with its 95 % interval."""
    summaries = size["contestants"]
    rounds = {label: one["rounds_us"] for label, one in summaries.items()}
    values = {}
    for label in rounds:
        if label not in ("horoclone fp16", "horoclone int8"):
            ideal_us = link_bytes(label, size["bytes"], case.per_host) * 8 / case.gbit / 1e3
            line = dataclasses.asdict(ratio_of(rounds[label], [ideal_us] * len(rounds[label]), seed))
            values["of line" if label == "horoclone" else f"{label} of line"] = line
            share = case.gbit / raw_gbit
            values[f"{label} of raw"] = {
                **line,
                **{key: line[key] * share for key in ("ratio", "low", "high")},
            }
    for label in rounds:
        if label.startswith("horoclone ") and label != "horoclone flat":
            values[f"{label} vs horoclone"] = dataclasses.asdict(
                ratio_of(rounds[label], rounds["horoclone"], seed)
            )
    for peer in ("gloo", "horoclone flat"):
        if peer in rounds:
            values[f"horoclone vs {peer}"] = dataclasses.asdict(
                ratio_of(rounds["horoclone"], rounds[peer], seed)
            )
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


def verdict(value: dict[str, Any], least: float) -> str:
    """A gate counts as met or missed when the whole interval lies on one side."""
    if value["low"] >= least:
        return "met"
    return "missed" if value["high"] < least else "undecided"


def print_result(whole: dict[str, Any]) -> None:
    """A table for each case, and its gates."""
    for name, result in whole["cases"].items():
        case = result["case"]
        rates = ", ".join(f"{rate:.3f}" for rate in result["raw_gbit"]["rates"])
        print(
            f"{name}: {case['gbit']:g} Gbit/s, MTU {case['mtu']}, 2 hosts x {case['per_host']}; "
            f"plain sockets, 1, 2, 1, 2 streams, both ways at once: {rates} Gbit/s"
        )
        print_rows(*rows_of(result))
        one = result["sizes"][-1]
        for what, least in case["gates"].items():
            value = one["found"][what]
            judged = verdict(value, least)
            print(f"  {what} >= {least:g}: {ratio_text(value)} at {size_text(one['bytes'])}, {judged}")
        print()


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
