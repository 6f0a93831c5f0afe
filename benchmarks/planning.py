"""What `horoclone plan` predicts beside what it measures: between two hosts with a slow link, and in shared memory.

`python benchmarks/planning.py` runs `horoclone plan benchmarks/planned_layers.py:build --validate` with five
strategies, in two network namespaces joined by a cable (priority.py's; needs root) and on one host, and prints both
times of each strategy, and how far the strategy that is chosen without running any is behind the best one. Exit codes:
0, 1 a rank failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hosts import Hosts  # noqa: E402
from network import Case, place, wait  # noqa: E402
from report import print_rows  # noqa: E402

STRATEGIES = ("data parallel", "cross_barrier", "ZeRO-1", "int8", "DiLoCo, 20")
EXACT = STRATEGIES[:3]
PLACES = {"cable of 1 Gbit/s": 1.0, "shared memory": 0.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="each measures and runs everything anew (3)")
    parser.add_argument("--places", default=";".join(PLACES), help="; between them: " + "; ".join(PLACES))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a round")
    parser.add_argument("--json", help="write the result here")
    wish = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for name in wish.places.split(";"):
        if name not in PLACES:
            parser.error(f"no place {name!r}")
        try:
            for _ in range(wish.rounds):
                found.setdefault(name, []).append(run(PLACES[name], wish.limit))
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        show(name, found[name])
    if wish.json:
        Path(wish.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def run(gbit: float, limit_s: float) -> dict[str, Any]:
    """One plan, as its --json has it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        words = [
            sys.executable, "-m", "horoclone.launch.tool", "plan", f"{HERE / 'planned_layers.py'}:build",
            "--approximate", "--validate", str(len(STRATEGIES)), "--only", ";".join(STRATEGIES), "--json", str(out),
        ]  # fmt: skip
        if gbit:
            with Hosts(gbit, 1500) as hosts:
                _on_hosts(hosts, gbit, words, limit_s)
        else:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            alone = subprocess.Popen([*words, "-np", "2"], env=environment, start_new_session=True)
            _finish([alone], limit_s)
        plan: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return plan


def _on_hosts(hosts: Hosts, gbit: float, words: list[str], limit_s: float) -> None:
    from horoclone.bootstrap.rendezvous import Server

    secret, job = secrets.token_hex(16), f"planning-{secrets.token_hex(4)}"
    server = hosts.inside(0, lambda: Server(secret.encode(), job, 2, [f"{hosts.addresses[0]}:0"]))
    try:
        ranks = []
        for rank in range(2):
            environment = {
                **os.environ,
                **place(Case(gbit, 1500, 1, (), (), {}), rank),
                "HOROCLONE_RENDEZVOUS": ",".join(server.addresses),
                "HOROCLONE_SECRET": secret,
                "HOROCLONE_JOB": job,
            }
            ranks.append(
                subprocess.Popen(hosts.command(rank, words), env=environment, start_new_session=True)
            )
        _finish(ranks, limit_s)
    finally:
        server.close()


def _finish(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    try:
        wait(ranks, limit_s)
    finally:
        for one in ranks:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def show(name: str, plans: list[dict[str, Any]]) -> None:
    """Medians of the rounds."""
    rows, median = [], {}
    for strategy in STRATEGIES:
        pairs = [
            (1e3 * one["step_s"], 1e3 * one["measured_s"])
            for plan in plans
            for one in plan["strategies"]
            if one["name"] == strategy and isinstance(one["measured_s"], float)
        ]
        if not pairs:
            rows.append([strategy, "-", "-", "could not run"])
            continue
        predicted, measured = (statistics.median(one) for one in zip(*pairs, strict=True))
        apart = statistics.median(100 * (a / b - 1) for a, b in pairs)
        median[strategy] = (predicted, measured)
        spread = f"{min(b for _, b in pairs):.1f} .. {max(b for _, b in pairs):.1f}"
        rows.append([strategy, f"{predicted:.1f}", f"{measured:.1f} ({spread})", f"{apart:+.1f} %"])
    print(f"{name}: compute {1e3 * statistics.median(p['rates']['compute_s'][0] for p in plans):.1f} ms")
    print_rows(["strategy", "predicted, ms", "measured, ms (rounds)", "apart"], rows)
    for text, strategies in (("of all", STRATEGIES), ("of those that learn the same", EXACT)):
        seen = {strategy: median[strategy] for strategy in strategies if strategy in median}
        chosen = min(seen, key=lambda strategy: seen[strategy][0])
        best = min(seen.values(), key=lambda pair: pair[1])[1]
        print(
            f"  {text}, {chosen} is predicted to be the fastest: {seen[chosen][1] / best:.3f} of the best one"
        )
    print()


if __name__ == "__main__":
    sys.exit(main())
