"""What agreement costs: `python benchmarks/control.py`. Messages, bytes and processor time of a step, 2 to 64 ranks.

A step is 161 small arrays by name, as an optimizer without buckets would submit them, after the names are known; the
same as a group; and, on one node, as declared buckets, whose plan is persistent there. On one node through shared
memory, through TCP with each rank a node of its own, and mixed: nodes of --per-node ranks. Messages and bytes are
counters, which hold on a busy machine, and are checked against limits. Exit codes: see session.py; 1 also when one is
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import print_rows, time_text
from session import on_ranks, options, run

TENSORS = 161
FORMS = ("by name", "grouped", "declared")
WAYS: dict[str, dict[str, str]] = {"shared memory": {}, "TCP": {"HOROCLONE_SHARED_MEMORY": "0"}, "mixed": {}}
MAX_BYTES = 512  # of a node and step, to and from other nodes


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--np", [2, 4, 8, 16], "ranks"), ("--steps", 30, "counted steps"),
        ("--ways", list(WAYS), "layouts", WAYS), ("--per-node", 4, "ranks of a node, mixed"),
        ("--fanouts", [8], "of the tree, between nodes"),
        ("--costs", "", "a file: only measure what a message costs, for `horoclone simulate`"),
    )  # fmt: skip
    if arguments.costs:
        Path(arguments.costs).write_text(json.dumps(costs_of_messages(), indent=1) + "\n")
        return 0
    found: list[dict[str, Any]] = []
    code = run(arguments, lambda: measure(arguments, found), show)
    return code or (1 if any(row["broken"] for row in found) else 0)


def measure(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    for size in arguments.np:
        for way in arguments.ways:
            per_node = {"shared memory": size, "TCP": 1, "mixed": arguments.per_node}[way]
            if way == "mixed" and not 1 < per_node < size:
                continue
            for fanout in arguments.fanouts if way != "shared memory" else arguments.fanouts[:1]:
                forms = FORMS if way == "shared memory" else FORMS[:2]
                extra = {**WAYS[way], "HOROCLONE_CONTROL_FANOUT": str(fanout)}
                ranks = on_ranks(step_many, forms, TENSORS, arguments.steps, per_node, np=size, **extra)
                for form in forms:
                    row = {"ranks": size, "way": way, "form": form, "per_node": per_node, "fanout": fanout}
                    row |= summed([rank[form] for rank in ranks], per_node, fanout, cores)
                    rows.append({**row, "broken": broken_limits(row)})
    return {"benchmark": f"agreement: {TENSORS} tensors a step, {arguments.steps} steps", "rows": rows}


def broken_limits(row: dict[str, Any]) -> list[str]:
    """Of the node whose traffic with others is largest; and that a persistent plan needs no message on one node.

    In the best step: a rank that loses its core while it submits sends what it has, so with more ranks than cores there
    are steps with more messages.
    """
    broken = []
    most = 2 * (row["fanout"] + 1)
    if row["form"] == "declared" and row["way"] == "shared memory":
        if row["mean messages of all"] > 0:
            broken.append(f"{row['mean messages of all']:.2f} messages with a persistent plan")
    elif row["way"] != "shared memory":
        for key, limit in (("messages", most), ("bytes", MAX_BYTES)):
            least = row[f"least {key} of a node"]
            if least > limit:
                broken.append(f"{least:.0f} {key} of a node, {limit} are allowed")
    return broken


def costs_of_messages() -> dict[str, dict[str, float]]:
    """Microseconds to send, to travel and to receive a control frame between two processes of this machine.

    There and back is a blocking barrier of two ranks: a request list and a plan. TCP: what a call of send and of
    recv takes is measured on a socket of its own, the rest is latency. Shared memory: a quarter, a half and a quarter,
    by convention.
    """
    one_way = {way: min(on_ranks(barrier_us, np=2, **extra)) / 2 for way, extra in WAYS.items()}
    send, receive = calls_us()
    tcp, shared = one_way["TCP"], one_way["shared memory"]
    found = {
        "local": {"send": shared / 4, "latency": shared / 2, "receive": shared / 4},
        "network": {"send": send, "latency": max(0.0, tcp - send - receive), "receive": receive},
    }
    print(json.dumps(found, indent=1))
    return {place: {key: round(us, 2) for key, us in cost.items()} for place, cost in found.items()}


def barrier_us() -> float:
    import horoclone as hvd

    hvd.init()
    times = []
    for _ in range(3000):
        start = time.perf_counter()
        hvd.barrier()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def calls_us(calls: int = 400, rounds: int = 20) -> tuple[float, float]:
    """Of one send and one recv of 32 bytes over the loopback, neither of which waits."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        two, _ = server.accept()
        with two:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            message, room = bytes(32), bytearray(32)
            sends, receives = [], []
            for _ in range(rounds):
                start = time.perf_counter()
                for _ in range(calls):
                    one.send(message)
                middle = time.perf_counter()
                for _ in range(calls):
                    two.recv_into(room, 32)
                sends.append(1e6 * (middle - start) / calls)
                receives.append(1e6 * (time.perf_counter() - middle) / calls)
    return statistics.median(sends), statistics.median(receives)


def roles_of(nodes: int, fanout: int) -> list[str]:
    """Of each node, numbered by its lowest rank: the node with the root, inner ones of the tree, leaves."""
    inner = nodes > fanout + 1
    return ["root", *("inner" if inner and fanout * node + 1 < nodes else "leaf" for node in range(1, nodes))]


def summed(ranks: list[dict[str, Any]], per_node: int, fanout: int, cores: int) -> dict[str, Any]:
    """Per step: of rank 0, which decides, the mean of the others, nodes by their place in the tree, all of them.

    Messages and bytes: the middle of all steps, of each rank and node.
    """
    counted = ("messages", "bytes", "messages between nodes", "bytes between nodes")
    middle = [
        {key: statistics.median(of) if key in counted else of for key, of in rank.items()} for rank in ranks
    ]
    found: dict[str, Any] = {f"rank 0 {key}": value for key, value in middle[0].items()}
    found |= {f"others {key}": statistics.mean(rank[key] for rank in middle[1:]) for key in middle[0]}
    nodes = [ranks[at : at + per_node] for at in range(0, len(ranks), per_node)]
    for key in ("messages", "bytes"):
        steps = [
            [sum(step) for step in zip(*(rank[f"{key} between nodes"] for rank in node), strict=True)]
            for node in nodes
        ]
        across = [statistics.median(node) for node in steps]
        found[f"node {key}"] = max(across)
        found[f"least {key} of a node"] = max(min(node) for node in steps)
        roles = roles_of(len(nodes), fanout)
        found[f"{key} by role"] = {
            role: max(n for n, of in zip(across, roles, strict=True) if of == role)
            for role in dict.fromkeys(roles)
        }
    found["mean messages of all"] = sum(rank["mean messages"] for rank in ranks)
    found["cpu_us"] = statistics.mean(rank["cpu_us"] for rank in ranks)
    found["wall_us"] = ranks[0]["wall_us"]
    found["wall / busy"] = found["wall_us"] * min(cores, len(ranks)) / (found["cpu_us"] * len(ranks))
    return found


def show(result: dict[str, Any]) -> None:
    header = ["per step", "messages of rank 0", "of others", "bytes of rank 0", "of others",
              "node: messages root/inner/leaf", "bytes", "CPU of a rank", "time", "x cores / CPU of all"]  # fmt: skip
    table = []
    for row in result["rows"]:
        layout = f", nodes of {row['per_node']}" if row["way"] == "mixed" else ""
        tree = f", fan-out {row['fanout']}" if row["way"] != "shared memory" else ""
        cells = [f"{row['ranks']} ranks, {row['way']}{layout}{tree}, {row['form']}"]
        for key, form in (("messages", "{:.1f}"), ("bytes", "{:.0f}")):
            cells += [form.format(row[f"{who} {key}"]) for who in ("rank 0", "others")]
        for key, form in (("messages", "{:.1f}"), ("bytes", "{:.0f}")):
            by_role = row[f"{key} by role"]
            cells.append(
                "/".join(form.format(by_role[r]) if r in by_role else "-" for r in ("root", "inner", "leaf"))
            )
        cells += [time_text(row["cpu_us"]), time_text(row["wall_us"]), f"{row['wall / busy']:.2f}"]
        table.append(cells)
    print_rows(header, table)
    print(
        "Messages and bytes, the middle of all steps: of a rank: control frames sent; of a node: to and from others,\n"
        "the largest of each place in the tree. CPU: of a whole process, Python and the reduction of data included,\n"
        "which grow with the ranks on one node: how agreeing alone grows is what `horoclone simulate` shows."
    )
    broken = [f"{row['ranks']} ranks, {row['way']}, {row['form']}: {why}" for row in result["rows"]
              for why in row["broken"]]  # fmt: skip
    limits = f"at most 2 (fan-out + 1) messages and {MAX_BYTES} bytes of a node, none with a persistent plan"
    print(f"Limits, of the best step ({limits}): {'; '.join(broken) or 'all hold'}.")


# --- on the ranks --------------------------------------------------------------------------------------------------


def step_many(forms: tuple[str, ...], tensors: int, steps: int, per_node: int) -> dict[str, dict[str, Any]]:
    """By form, of this rank: processor time, switches and time, mean per step; messages and bytes of each step."""
    import functools
    import itertools
    import json
    import os
    import resource
    import time

    if per_node < int(os.environ["HOROCLONE_SIZE"]):
        os.environ["HOROCLONE_NODE"] = str(int(os.environ["HOROCLONE_RANK"]) // per_node)
    import numpy as np

    import horoclone as hvd
    from horoclone.arrays.host_memory import dtype_of
    from horoclone.runtime import native

    hvd.init()
    area: Any = np.frombuffer(native().allocate(tensors * 64), dtype=np.float32)  # type: ignore[call-overload]
    area[:] = 1.0
    parts = np.split(area, tensors)
    number = dtype_of(parts[0])
    declared = native().declare(
        [f"bucket.{i}" for i in range(tensors)], [part.ctypes.data for part in parts], [16] * tensors,
        [number] * tensors, hvd.Max,
    )  # fmt: skip

    def one_step(form: str) -> None:
        if form == "grouped":
            hvd.grouped_allreduce_(parts, name="group", op=hvd.Max)
        elif form == "declared":
            for handle in [native().submit_declared(0, declared, i) for i in range(tensors)]:
                native().wait(handle)
                native().release(handle)
        else:
            handles = [hvd.allreduce_async_(part, name=f"t.{i}", op=hvd.Max) for i, part in enumerate(parts)]
            for handle in handles:
                hvd.synchronize(handle)

    def look() -> dict[str, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        counters = json.loads(native().counters())
        return {
            "cpu_us": 1e6 * time.process_time(),
            "wall_us": 1e6 * time.perf_counter(),
            "mean messages": counters["control_frames_sent"],
            "sleeps": counters["sleeps"],
            "turns": counters["steps"],
            "wake-ups of others": counters["mesh"]["wakes"],
            "voluntary switches": used.ru_nvcsw,
            "involuntary switches": used.ru_nivcsw,
        }

    names = {
        "messages": "control_frames_sent",
        "bytes": "control_bytes_sent",
        "messages between nodes": "between_nodes_frames",
        "bytes between nodes": "between_nodes_bytes",
    }

    def by_window(step: Callable[[], None]) -> dict[str, list[float]]:
        """What was counted in each step, looked at between two naps, in which no rank sends anything, and a barrier."""
        seen = []
        for _ in range(steps + 1):
            step()
            hvd.barrier()
            time.sleep(nap_s)
            seen.append(json.loads(native().counters()))
            time.sleep(nap_s)
        return {
            key: [now[name] - was[name] for was, now in itertools.pairwise(seen)]
            for key, name in names.items()
        }

    nap_s = 0.004 + 0.001 * hvd.size()  # longer than ranks are apart
    alone = by_window(lambda: None)  # the barrier
    found: dict[str, dict[str, Any]] = {}
    for form in forms:
        for _ in range(5):
            one_step(form)
        hvd.barrier()
        before = look()
        for _ in range(steps):
            one_step(form)
        after = look()
        hvd.barrier()
        found[form] = {key: (after[key] - before[key]) / steps for key in after}
        for key, counts in by_window(functools.partial(one_step, form)).items():
            found[form][key] = [count - min(alone[key]) for count in counts]
    return found


if __name__ == "__main__":
    sys.exit(main())
