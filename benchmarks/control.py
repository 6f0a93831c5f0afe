"""What agreement costs: `python benchmarks/control.py`. Messages, bytes and processor time of a step, 2 to 16 ranks.

A step is 161 small tensors by name, as an optimizer without buckets would submit them, after the names are known; and
the same as declared buckets. Through shared memory, and through TCP as between machines. Counters, not times: they hold
on a busy machine, too. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from report import print_rows  # noqa: E402
from session import Failed, add_options, run  # noqa: E402

TENSORS = 161
FORMS = ("by name", "grouped", "declared")
WAYS = {"shared memory": {}, "TCP": {"HOROCLONE_SHARED_MEMORY": "0"}}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--np", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4, 8, 16],
                        help="ranks (2,4,8,16)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=30, help="counted steps (30)")
    parser.add_argument(
        "--costs", type=Path, help="only measure what a message costs, for `horoclone simulate`"
    )
    arguments = parser.parse_args(argv)
    if arguments.costs:
        arguments.costs.write_text(json.dumps(costs_of_messages(), indent=1) + "\n")
        return 0
    return run(arguments, lambda: measure(arguments), show, draw)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import horoclone
    from horoclone.launch.api import RunError

    rows = []
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        for size in arguments.np:
            for way, extra in WAYS.items():
                ranks = horoclone.run(
                    step_many, (FORMS, TENSORS, arguments.steps), np=size, env={**environment, **extra}
                )
                rows += [{"ranks": size, "way": way, "form": form, **summed([rank[form] for rank in ranks])}
                         for form in FORMS]  # fmt: skip
    except RunError as error:
        raise Failed(str(error)) from None
    return {"benchmark": f"agreement: {TENSORS} tensors a step, {arguments.steps} steps", "rows": rows}


def costs_of_messages() -> dict[str, dict[str, float]]:
    """Microseconds to send, to travel and to receive a control frame between two processes of this machine.

    There and back is a blocking barrier of two ranks: a ballot and a plan. TCP: what a call of send and of recv takes
    is measured on a socket of its own, the rest is latency. Shared memory: a quarter, a half and a quarter, by
    convention.
    """
    import horoclone

    one_way = {}
    for way, extra in WAYS.items():
        one_way[way] = min(horoclone.run(barrier_us, np=2, env={"OMP_NUM_THREADS": "1", **extra})) / 2
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


def summed(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Of rank 0, which decides, and the mean of the others, per step."""
    others = ranks[1:]
    found = {f"rank 0 {key}": value for key, value in ranks[0].items()}
    return found | {f"others {key}": statistics.mean(rank[key] for rank in others) for key in ranks[0]}


def show(result: dict[str, Any]) -> None:
    header = [
        "per step",
        "messages of rank 0",
        "of others",
        "bytes of rank 0",
        "of others",
        "CPU of rank 0",
        "of others",
    ]
    table = []
    for row in result["rows"]:
        cells = [f"{row['ranks']} ranks, {row['way']}, {row['form']}"]
        for key, form in (("messages", "{:.1f}"), ("bytes", "{:.0f}"), ("cpu_us", "{:.0f} us")):
            cells += [form.format(row[f"{who} {key}"]) for who in ("rank 0", "others")]
        table.append(cells)
    print_rows(header, table)
    print(
        "Messages and bytes: control frames sent. CPU: of the whole process, the reduction of the data included."
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Over the number of ranks: messages, bytes and CPU of rank 0."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    for axis, (key, title) in zip(
        axes, {"messages": "messages", "bytes": "bytes", "cpu_us": "CPU, us"}.items(), strict=True
    ):
        for way in WAYS:
            for form in FORMS:
                rows = [row for row in result["rows"] if (row["way"], row["form"]) == (way, form)]
                axis.plot([row["ranks"] for row in rows], [row[f"rank 0 {key}"] for row in rows],
                          "o-" if way == "TCP" else "s--", markersize=4, label=f"{form}, {way}")  # fmt: skip
        axis.set(title=f"rank 0: {title} per step", xlabel="ranks", xscale="log")
        axis.set_xticks([row["ranks"] for row in rows], [str(row["ranks"]) for row in rows])
        axis.minorticks_off()
        axis.grid(True, alpha=0.25)
    axes[0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# --- on the ranks --------------------------------------------------------------------------------------------------


def step_many(forms: tuple[str, ...], tensors: int, steps: int) -> dict[str, dict[str, float]]:
    """Control messages and bytes that this rank sends, and processor time, per step and form."""
    import json
    import resource

    import torch

    import horoclone.torch as hvd
    from horoclone.runtime import native
    from horoclone.torch.tensors import number_of

    torch.set_num_threads(1)
    hvd.init()
    area = torch.frombuffer(native().allocate(tensors * 64), dtype=torch.float32).fill_(1.0)
    parts = list(area.split(16))
    number = number_of(area, None)
    declared = native().declare(
        [f"bucket.{i}" for i in range(len(parts))], [part.data_ptr() for part in parts], [16] * len(parts),
        [number] * len(parts), hvd.Max,
    )  # fmt: skip

    def one_step(form: str) -> None:
        if form == "grouped":
            hvd.grouped_allreduce_(parts, name="group", op=hvd.Max)
        elif form == "declared":
            for handle in [native().submit_declared(0, declared, i) for i in range(len(parts))]:
                native().wait(handle)
                native().release(handle)
        else:
            for handle in [
                hvd.allreduce_async_(part, name=f"t.{i}", op=hvd.Max) for i, part in enumerate(parts)
            ]:
                hvd.synchronize(handle)

    def look() -> list[float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        counters = json.loads(native().counters())
        return [
            counters["control_frames_sent"],
            counters["control_bytes_sent"],
            1e6 * (used.ru_utime + used.ru_stime),
        ]

    found = {}
    for form in forms:
        for _ in range(5):
            one_step(form)
        hvd.barrier()
        before = look()
        for _ in range(steps):
            one_step(form)
        after = look()
        hvd.barrier()
        each = [(now - was) / steps for now, was in zip(after, before, strict=True)]
        found[form] = dict(zip(("messages", "bytes", "cpu_us"), each, strict=True))
    return found


if __name__ == "__main__":
    sys.exit(main())
