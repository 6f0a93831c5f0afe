"""Sharded optimizer state (ZeRO-1) against whole state: `python benchmarks/zero.py`. Memory per rank, time of a step.

Every way runs in processes of its own, in turn, several times; all ranks are on this machine and meet in shared memory,
or, with --tcp, through sockets. Exit codes: 0, 1 a rank failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import Load, facts, only_one  # noqa: E402

WAYS = {"whole": False, "elements": "elements", "parameters": "parameters"}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    import horoclone
    from horoclone.launch.api import RunError

    arguments = parse(argv)
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if arguments.tcp:
        environment["HOROCLONE_SHARED_MEMORY"] = "0"
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with only_one():
        load = Load()
        for _ in range(arguments.rounds):
            for way in WAYS:
                plan = (WAYS[way], arguments.layers, arguments.width, arguments.steps)
                try:
                    ranks = horoclone.run(train, plan, np=arguments.np, env=environment)
                except RunError as error:
                    print(f"zero.py: {error}", file=sys.stderr)
                    return 1
                taken[way].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
        others = load.others()
    rows = {
        way: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for way, rounds in taken.items()
    }
    result = {
        "settings": {**vars(arguments), "json": None}, "machine": facts(), "others": others, "rows": rows,
        "rounds": taken,
    }  # fmt: skip
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(result)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--layers", type=int, default=16, help="linear layers (16)")
    parser.add_argument("--width", type=int, default=1024, help="of a layer (1024)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each round (20)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each way (5)")
    parser.add_argument("--tcp", action="store_true", help="no shared memory between the ranks")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args(argv)
    if min(arguments.np, arguments.layers, arguments.width, arguments.steps, arguments.rounds) < 1:
        parser.error("numbers must be at least 1")
    return arguments


def print_table(result: dict[str, Any]) -> None:
    """In Markdown; the largest over the ranks, the median over the rounds."""
    settings, machine, rows = result["settings"], result["machine"], result["rows"]
    busy = "unknown" if result["others"] is None else f"{result['others']:.2f}"
    way = "TCP" if settings["tcp"] else "shared memory"
    print(
        f"{settings['np']} ranks, {way}; {machine['cores']} cores, {machine['processor']}; others used {busy} cores"
    )
    print(f"{rows['whole']['parameters'] / 1e6:.1f} million parameters, float32, AdamW\n")
    print(
        "| optimizer state | state, MB | private memory, MB | resident memory, MB | sent per step, MB | step, ms |"
    )
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        cells = (f"{row[key] / 1e6:.1f}" for key in ("state", "private", "resident", "sent"))
        print(f"| {name} | {' | '.join(cells)} | {row['step_ms']:.1f} |")


# --- on the ranks --------------------------------------------------------------------------------------------------


def train(shard: bool | str, layers: int, width: int, steps: int) -> dict[str, float]:
    """Bytes of state, private and resident memory after the last step; median time of a step."""
    import time

    import torch

    import horoclone.torch as hvd
    from horoclone.runtime import native

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4), model.named_parameters(), shard_optimizer_state=shard
    )
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(hvd.rank()))
    times, before = [], 0
    for step in range(steps + 3):
        if step == 3:  # buckets are formed, state is there
            hvd.barrier()
            before = json.loads(native().counters())["mesh"]["bytes_sent"]
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    sent = json.loads(native().counters())["mesh"]["bytes_sent"] - before
    tensors = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    memory = dict.fromkeys(("Rss", "Private_Clean", "Private_Dirty"), 0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name = line.split(":")[0]
        if name in memory:
            memory[name] = int(line.split()[1]) * 1024
    hvd.barrier()
    return {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "state": float(sum(t.nbytes for t in tensors)),
        "private": float(memory["Private_Clean"] + memory["Private_Dirty"]),
        "resident": float(memory["Rss"]),
        "sent": sent / steps,
        "step_ms": 1000 * statistics.median(times[3:]),
    }


if __name__ == "__main__":
    sys.exit(main())
