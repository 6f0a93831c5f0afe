"""`horoclone simulate`: what agreement costs, and how long a step takes, at any number of ranks, in one process.

The agreement is not modelled: the real coordinator, request aggregators, plan cache and bytes run on a virtual clock
(csrc/tools/simulation.h), from the announcement of a step's tensors on all ranks to the plan on the last one. What a
message costs is a constant: `benchmarks/control.py --costs FILE` measures it on a machine, DEFAULT_COSTS are those of
docs/performance.md. The time of a step comes from a replay of its buckets, see step_ms().
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horoclone import replay
from horoclone.arguments import whole_numbers

# Microseconds to send, to travel, to receive: TCP over the loopback, and shared memory (docs/performance.md).
DEFAULT_COSTS: dict[str, dict[str, float]] = {
    "local": {"send": 0.39, "latency": 0.79, "receive": 0.39},
    "network": {"send": 0.61, "latency": 10.88, "receive": 0.44},
}
# Shares of the parameters and of the computing, in the order of forward: ResNet-50 by stages and its last layer;
# convolutions of VGG-16 per block, then its three large layers.
LAYERS: dict[str, tuple[tuple[float, float], ...]] = {
    "resnet50": (
        (0.01, 0.1), (0.01, 0.08), (0.02, 0.1), (0.03, 0.1), (0.05, 0.12), (0.1, 0.14), (0.14, 0.12), (0.17, 0.12),
        (0.19, 0.06), (0.2, 0.05), (0.08, 0.01),
    ),
    "vgg16": (
        (0.001, 0.13), (0.002, 0.18), (0.011, 0.27), (0.043, 0.25), (0.051, 0.09), (0.743, 0.06), (0.121, 0.015),
        (0.03, 0.005),
    ),
    "even": ((1.0, 1.0),) * 50,
}  # fmt: skip
SIZES = (8, 64, 512, 4096, 32768)
COLUMNS = {
    "latency_us": "latency, us",
    "root_messages": "messages at the root",
    "root_bytes": "bytes at the root",
    "node_messages": "messages of a node",
    "node_bytes": "bytes of a node",
    "busiest_cpu_us": "CPU of the busiest rank, us",
}


def agreement(
    ranks: int,
    *,
    ranks_per_node: int = 1,
    fanout: int = 8,
    tensors: int = 161,
    steps: int = 5,
    costs: dict[str, dict[str, float]] | None = None,
    processing: bool = True,
) -> dict[str, float]:
    """One simulated step: latency_us, root_messages, root_bytes, node_messages, node_bytes (to and from other nodes),
    root_cpu_us, busiest_cpu_us, rank_cpu_us, depth.

    fanout 0: a star. processing=False: only messages take time, and the result is the same every time. Raises
    ValueError for numbers out of range.
    """
    from horoclone.runtime.native_module import core

    numbers = {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "fanout": fanout,
        "tensors": tensors,
        "steps": steps,
        "processing": int(processing),
    }
    local, network = (
        (cost["send"], cost["latency"], cost["receive"])
        for cost in ((costs or DEFAULT_COSTS)["local"], (costs or DEFAULT_COSTS)["network"])
    )
    found: dict[str, float] = json.loads(core().simulate(numbers, local, network))
    return found


def step_ms(
    ranks: int,
    *,
    ranks_per_node: int,
    gradient_mb: float,
    compute_ms: float,
    link_gbit: float,
    local_gb_s: float,
    latency_us: float,
    agreement_us: float,
    two_level: bool = True,
    layers: Sequence[tuple[float, float]] = LAYERS["resnet50"],
    cross_barrier: bool = False,
) -> float:
    """Milliseconds of a training step: the replay of its buckets (horoclone/replay.py), of which each one's time comes
    from constants.

    layers: (share of the parameters, share of the computing), in the order of forward; a third of the computing is
    forward. A ring allreduce of S bytes over n members takes 2 (n-1)/n S / B + 2 (n-1) a, with B bytes/s of the link
    and a of latency per message (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69, 2009). Flat: n is all ranks, with the messages of replay.rounds().
    Two levels: reduce-scatter and allgather within the node, each (l-1)/l S / local rate, around a ring over the nodes,
    in which the l local ranks share the link, each with its own slice (Cho et al., "BlueConnect", MLSys 2019).
    """
    nodes = max(1, -(-ranks // ranks_per_node))
    local = min(ranks, ranks_per_node)
    link = link_gbit * 1e9 / 8

    def cost(size: float) -> list[tuple[str, float]]:
        inside = (local - 1) / local * size / (local_gb_s * 1e9)
        if nodes == 1:
            return [("node", 2 * inside)]
        members = nodes if two_level else ranks
        messages = 2 * (members - 1) if two_level else replay.rounds(members, size)
        across = 2 * (members - 1) / members * size / link + messages * latency_us * 1e-6
        return (
            [("node", inside), ("network", across), ("node", inside)] if two_level else [("network", across)]
        )

    step = replay.of_layers(layers, gradient_mb * 1e6, compute_ms * 1e-3)
    if cross_barrier:
        program = replay.without_barrier(step, cost, replay.buckets_of(step, replay.URGENT_BUCKET_BYTES))
    else:
        program = replay.ordinary(step, cost, replay.buckets_of(step))
    return 1e3 * replay.replay(program).step_s + agreement_us * 1e-3


def layers_of(name: str) -> tuple[tuple[float, float], ...]:
    """LAYERS by name, or of a JSON file: a list of pairs, or an object that has one under "layers", as `horoclone plan
    --json` writes it. ValueError for anything else, OSError where the file cannot be read."""
    if name in LAYERS:
        return LAYERS[name]
    if not Path(name).exists():
        raise ValueError(f"--layers {name}: neither {', '.join(LAYERS)} nor a file")
    try:
        read = json.loads(Path(name).read_text())
        pairs = tuple(
            (float(size), float(time)) for size, time in (read["layers"] if isinstance(read, dict) else read)
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--layers {name}: expected [[share of the parameters, share of the computing], ...]: {error}"
        ) from None
    if not pairs or min(min(pair) for pair in pairs) < 0 or not all(map(sum, zip(*pairs, strict=True))):
        raise ValueError(f"--layers {name}: shares must not be negative, and not all 0")
    return pairs


# fmt: off
EXAMPLES = (
    ("a table of five sizes", "horoclone simulate"),
    ("one size, another model and network", "horoclone simulate --ranks 256 --layers vgg16 --link-gbit 25"),
    ("a plot and the figures", "horoclone simulate --plot sizes.png --json sizes.json"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks").add_argument
    add("--ranks", type=whole_numbers, default=list(SIZES), metavar="N,...",
        help=f"numbers of ranks (default {','.join(map(str, SIZES))})")
    add("--ranks-per-node", type=int, default=8, metavar="N", help="ranks on a node (default %(default)s)")
    add("--fanout", type=int, default=8, metavar="N", help="of the tree of request lists (default %(default)s)")
    add = parser.add_argument_group("model").add_argument
    add("--layers", default="resnet50", metavar="NAME|FILE",
        help=f"{', '.join(LAYERS)}, or a file of horoclone plan --json (default %(default)s)")
    add("--tensors", type=int, default=161, metavar="N", help="announced in a step (default %(default)s)")
    add("--gradient-mb", type=float, default=102.0, metavar="MB",
        help="gradients of a step, in MB (default %(default)g: ResNet-50)")
    add("--compute-ms", type=float, default=120.0, metavar="MS",
        help="forward and backward pass, in ms (default %(default)g)")
    add("--cross-barrier", action="store_true", help="steps that do not wait (docs/priority.md)")
    add = parser.add_argument_group("network").add_argument
    add("--link-gbit", type=float, default=100.0, metavar="GBIT",
        help="of a node, each way, in Gbit/s (default %(default)g)")
    add("--local-gb-s", type=float, default=8.0, metavar="GB",
        help="a node's own reduction, in GB/s (default %(default)g)")
    add("--costs", metavar="FILE", help="what messages cost: JSON of benchmarks/control.py --costs (default: TCP over "
        "the loopback, and shared memory)")
    add = parser.add_argument_group("run and output").add_argument
    add("--steps", type=int, default=5, metavar="N", help="counted steps (default %(default)s)")
    add("--json", metavar="FILE", help="write the result there, - for stdout")
    add("--plot", metavar="FILE", help="write a plot there (.png, .svg, .pdf)")
# fmt: on


def show_sizes(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    file = None if arguments.json in (None, "-") else Path(arguments.json)
    made = file if file is not None and not file.exists() else None
    try:
        if arguments.plot:
            _check_plot(Path(arguments.plot))
        if file is not None:
            file.open("a").close()  # that it can be written, before the work
        result = run(arguments)
        made = None
    except (ValueError, KeyError, ImportError) as error:
        print(f"horoclone simulate: {error}", file=sys.stderr)
        return 2
    finally:
        if made is not None:
            made.unlink(missing_ok=True)
    text = json.dumps(result, indent=1)
    if arguments.json == "-":
        print(text)
    else:
        show(result)
        if file is not None:
            file.write_text(text + "\n")
    if arguments.plot:
        draw(result, Path(arguments.plot))
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows of the table: tree and star at each size."""
    costs = json.loads(Path(arguments.costs).read_text()) if arguments.costs else DEFAULT_COSTS
    network = costs["network"]
    one_way_us = network["send"] + network["latency"] + network["receive"]
    layers = layers_of(arguments.layers)
    rows = []
    for ranks in arguments.ranks:
        for shape, fanout in (("tree", arguments.fanout), ("star", 0)):
            _say(f"{ranks:,} ranks, {shape} ...")
            steps = arguments.steps if fanout or ranks <= 4096 else 1
            row = agreement(
                ranks,
                ranks_per_node=arguments.ranks_per_node,
                fanout=fanout,
                tensors=arguments.tensors,
                steps=steps,
                costs=costs,
            )
            for levels in (True, False):
                row["two_level_step_ms" if levels else "ring_step_ms"] = step_ms(
                    ranks,
                    ranks_per_node=arguments.ranks_per_node,
                    gradient_mb=arguments.gradient_mb,
                    compute_ms=arguments.compute_ms,
                    link_gbit=arguments.link_gbit,
                    local_gb_s=arguments.local_gb_s,
                    latency_us=one_way_us,
                    agreement_us=row["latency_us"],
                    two_level=levels,
                    layers=layers,
                    cross_barrier=arguments.cross_barrier,
                )
            rows.append({"ranks": ranks, "shape": shape, **row})
    _say("")
    given = {k: v for k, v in vars(arguments).items() if k not in ("json", "plot", "costs", "ranks", "does")}
    return {"given": given, "costs_us": costs, "rows": rows}


def _say(text: str) -> None:
    """What is being worked on, in the terminal's last line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Of the largest size."""
    ranks = max(row["ranks"] for row in rows)
    tree, star = (
        next(row for row in rows if (row["ranks"], row["shape"]) == (ranks, shape))
        for shape in ("tree", "star")
    )
    ways = {"two levels": tree["two_level_step_ms"], "a flat ring": tree["ring_step_ms"]}
    best = min(ways, key=ways.__getitem__)
    return (
        f"{ranks:,} ranks agree in {tree['latency_us']:,.0f} us by a tree, {star['latency_us']:,.0f} us by a star; "
        f"with the tree, the shortest step takes {ways[best]:,.1f} ms ({best})"
    )


def show(result: dict[str, Any]) -> None:
    """The table and what follows from it, on stdout."""
    header = ["ranks", "", *COLUMNS.values(), "step, ms", "flat ring"]
    lines = [header]
    for row in result["rows"]:
        cells = [f"{row[key]:,.0f}" for key in COLUMNS]
        steps = [f"{row[key]:,.1f}" for key in ("two_level_step_ms", "ring_step_ms")]
        lines.append([f"{row['ranks']:,}", row["shape"], *cells, *steps])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"\n{_conclusion(result['rows'])}")


def _check_plot(path: Path) -> None:
    """Before anything is computed: ValueError and ImportError for what draw() would end with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Latency, and messages and bytes at the root, over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    for axis, key in zip(axes, ("latency_us", "root_messages", "root_bytes"), strict=True):
        for shape, style in (("star", "s--"), ("tree", "o-")):
            rows = [row for row in result["rows"] if row["shape"] == shape]
            axis.plot([row["ranks"] for row in rows], [row[key] for row in rows], style, label=shape)
        axis.set(title=COLUMNS[key] + " per step", xlabel="ranks", xscale="log", yscale="log")
        axis.grid(True, alpha=0.25)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
