"""The step time of one model: with horoclone, without communication, and with what the framework has of its own.

`python benchmarks/step.py` compares in Keras (with MultiWorkerMirroredStrategy), `--framework torch` in PyTorch (with
DistributedDataParallel over gloo, as it is and with gradients as views of its buckets). Every contestant has its own
processes, which take turns in random order; while one trains, the others sleep. Overhead is what a step takes longer
than the same number of processes that do not communicate.
Exit codes: see session.py; 1 also where the contestants' models differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from session import Failed, options, run
from statistics_of import MIN_ROUNDS, ratio_of
from step_worker import Plan

HERE = Path(__file__).resolve().parent
CONTESTANTS = {
    "tf_keras one rank": ("single", "legacy"),
    "tf_keras alone": ("alone", "legacy"),
    "tf_keras horoclone": ("horoclone", "legacy"),
    "tf_keras MultiWorkerMirrored": ("multiworker", "legacy"),
    "torch one rank": ("single", "plain"),
    "torch one rank, initialised": ("single-init", "plain"),
    "torch alone": ("alone", "plain"),
    "torch horoclone": ("horoclone", "plain"),
    "torch DDP": ("ddp", "plain"),
    "torch DDP-view": ("ddp-view", "plain"),
}
RIVALS = {  # whose overhead is compared with whose
    "tf_keras MultiWorkerMirrored": "tf_keras horoclone",
    "torch DDP": "torch horoclone",
    "torch DDP-view": "torch horoclone",
}
BY_FRAMEWORK = {"keras": list(CONTESTANTS)[:4], "torch": list(CONTESTANTS)[-6:]}
NEED_PORTS = ("multiworker", "ddp", "ddp-view")
START_S = 900.0  # a contestant imports its framework


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = parse(argv)
    return run(arguments, lambda: measure_all(arguments), show)


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """From the start of all contestants' processes to their end."""
    with tempfile.TemporaryDirectory() as folder:
        worker_pools: dict[str, WorkerPool] = {}
        try:
            for name in arguments.contestants:
                worker_pools[name] = WorkerPool(name, arguments, Path(folder))
            for worker_pool in worker_pools.values():
                worker_pool.join()
            times, outcomes = measure(worker_pools, arguments)
        except (EOFError, OSError) as error:
            raise Failed(f"a rank failed ({error!r}); what it wrote is above") from None
        finally:
            for worker_pool in worker_pools.values():
                worker_pool.end()
    if different := disagreements(outcomes):
        raise Failed(f"the models differ: {different}")
    return {
        "benchmark": f"steps of {arguments.model}, {arguments.rounds} rounds of {arguments.steps}",
        "settings": {name: value for name, value in vars(arguments).items() if name != "json"},
        "versions": versions(),
        "outcomes": outcomes,
        "times": times,
    }


def show(result: dict[str, Any]) -> None:
    print_tables(result["times"], result["outcomes"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    arguments = options(
        __doc__, argv, ("--np", 2, "ranks"),
        ("--model", "dense", "dense has 100 MB, small (torch only) 200 tensors of up to 16 KiB",
         ("dense", "small", "tiny")),
        ("--framework", "keras", "whose contestants", BY_FRAMEWORK),
        ("--batch", 32, "rows per rank"), ("--rounds", 9, "rounds"),
        ("--steps", 5, "timed steps of a contestant in a round"), ("--seed", 1, "of the order"),
        ("--contestants", [""], "instead of the framework's, or all", ("", "all", *CONTESTANTS)),
    )  # fmt: skip
    if arguments.contestants == ["all"]:
        arguments.contestants = list(CONTESTANTS)
    elif arguments.contestants == [""]:
        arguments.contestants = BY_FRAMEWORK[arguments.framework]
    return arguments


class WorkerPool:
    """The processes of one contestant. They start together with the others'; join() waits until they are ready."""

    def __init__(self, name: str, arguments: argparse.Namespace, folder: Path) -> None:
        kind, backend = CONTESTANTS[name]
        ports = [f"127.0.0.1:{port}" for port in free_ports(arguments.np)] if kind in NEED_PORTS else []
        address = str(folder / name.replace(" ", "-"))
        self.name = name
        self.size = 1 if kind.startswith("single") else arguments.np
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ranks: list[Connection[Any, Any]] = []
        self.listener = Listener(address, family="AF_UNIX", backlog=arguments.np)
        for rank in range(1 if kind == "horoclone" else self.size):
            own = -1 if kind == "horoclone" else rank
            plan = Plan(name, kind, backend, arguments.model, arguments.batch, own, arguments.np, ports)
            command = [sys.executable, str(HERE / "step_worker.py"), address, json.dumps(asdict(plan))]
            if kind == "horoclone":
                launcher = [sys.executable, "-m", "horoclone.launch.cli", "-np", str(arguments.np)]
                command = launcher + command
            self.processes.append(subprocess.Popen(command, start_new_session=True))

    def join(self) -> None:
        """Waits for the ranks; OSError (a timeout is one) when one ends, or when they do not come within START_S."""
        joined: dict[int, Connection[Any, Any]] = {}
        self.listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_S
        while len(joined) < self.size:
            try:
                connection = self.listener.accept()
            except TimeoutError:
                ended = [process.returncode for process in self.processes if process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise OSError(
                        f"{self.name}: a rank ended with {ended}" if ended else f"{self.name}: not ready"
                    ) from None
                continue
            joined[connection.recv()[1]] = connection
        self.ranks = [joined[rank] for rank in sorted(joined)]

    def ask(self, command: Any) -> list[dict[str, Any]]:
        """The ranks' answers; EOFError when one has died."""
        for rank in self.ranks:
            rank.send(command)
        return [rank.recv() for rank in self.ranks]

    def end(self) -> None:
        """Tells the ranks to leave, and kills those that do not."""
        self.listener.close()
        for rank in self.ranks:
            try:
                rank.send(None)
            except OSError:
                pass  # it is gone
        for process in self.processes:
            try:
                process.wait(20 if self.ranks else 0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


Times = dict[str, dict[str, list[float]]]


def measure(
    worker_pools: dict[str, WorkerPool], arguments: argparse.Namespace
) -> tuple[Times, dict[str, Any]]:
    """Per contestant and round: wall time of a step (of the slowest rank) and processor time (mean), milliseconds."""
    times: Times = {name: {"wall": [], "cpu": []} for name in worker_pools}
    losses: dict[str, list[float]] = {}
    for worker_pool in worker_pools.values():
        worker_pool.ask(2)  # compiles
    for number in range(arguments.rounds):
        order = random.Random(f"{arguments.seed}.{number}").sample(list(worker_pools), len(worker_pools))
        for name in order:
            answers = worker_pools[name].ask(arguments.steps)
            times[name]["wall"].append(1e3 * max(answer["wall"] for answer in answers))
            times[name]["cpu"].append(1e3 * float(np.mean([answer["cpu"] for answer in answers])))
            losses[name] = [answer["loss"] for answer in answers]
    outcomes = {
        name: {"ranks": worker_pool.ask("outcome"), "mean loss": float(np.mean(losses[name]))}
        for name, worker_pool in worker_pools.items()
    }
    return times, outcomes


def disagreements(outcomes: dict[str, Any]) -> list[str]:
    """Who has other weights on another rank, or (the losses of all ranks together) has learnt something else."""
    found = []
    together = {n: o for n, o in outcomes.items() if CONTESTANTS[n][0] != "alone"}
    for name, outcome in together.items():
        if len({rank["digest"] for rank in outcome["ranks"]}) != 1:
            found.append(f"the ranks of {name}: {outcome['ranks']}")
    for backend in ("legacy", "plain"):
        alike = {n: o for n, o in together.items() if CONTESTANTS[n][1] == backend and len(o["ranks"]) > 1}
        digests = {n: o["ranks"][0]["digest"] for n, o in alike.items()}
        if digests and max(digests.values()) - min(digests.values()) > 1e-4 * max(digests.values()):
            found.append(f"the sums of weights {digests}")
    return found


def versions() -> dict[str, str]:
    found = {}
    for package in (
        "horoclone", "tensorflow", "tensorflow-cpu", "tf_keras", "keras", "jax", "torch", "numpy"
    ):  # fmt: skip
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def overheads(times: Times) -> dict[str, dict[str, Any]]:
    """Per contestant that has one "alone" beside it: what each round took longer than that one's, milliseconds."""
    over: dict[str, dict[str, Any]] = {}
    for name, of in times.items():
        alone = name.rpartition(" ")[0] + " alone"
        if alone in times and alone != name:
            over[name] = {what: np.subtract(of[what], times[alone][what]) for what in ("wall", "cpu")}
    return over


def print_tables(times: Times, outcomes: dict[str, Any]) -> None:
    """Medians of the rounds with their range, the overhead over "alone", and what the others' overhead is of ours."""
    ranks = max((outcome["ranks"] for outcome in outcomes.values()), key=len)
    size = f"{4e-6 * ranks[0]['parameters']:.1f} MB in {ranks[0]['tensors']} tensors"
    print(f"{len(ranks)} ranks, {size}")
    print(f"{'':30} {'step, ms':>22} {'overhead, ms':>22} {'CPU, ms':>9} {'CPU overhead':>13}")
    over = overheads(times)
    for name, of in times.items():
        row = f"{name:30} {spread(of['wall']):>22}"
        if name in over:
            row += f" {spread(over[name]['wall']):>22} {np.median(of['cpu']):9.1f} {np.median(over[name]['cpu']):13.1f}"
        else:
            row += f" {'':22} {np.median(of['cpu']):9.1f}"
        print(row)
    plain, initialised = (times.get(f"torch one rank{more}") for more in ("", ", initialised"))
    if plain and initialised:
        ratio = ratio_of(plain["wall"], initialised["wall"])
        print(f"hvd.init() makes one process's step {ratio.ratio:.3f} times as long, 95 % interval {ratio.low:.3f} "
              f"to {ratio.high:.3f}")  # fmt: skip
    for theirs, ours in RIVALS.items():
        for what, word in (
            (("wall", "time"), ("cpu", "processor time")) if {ours, theirs} <= set(over) else ()
        ):
            ratio = ratio_of(list(over[ours][what]), list(over[theirs][what]))
            few = "" if len(over[ours][what]) >= MIN_ROUNDS else f" (too few rounds: {len(over[ours][what])})"
            print(f"{theirs.partition(' ')[2]}'s overhead in {word} is {ratio.ratio:.1f} times horoclone's, "
                  f"95 % interval {ratio.low:.1f} to {ratio.high:.1f}{few}")  # fmt: skip


def spread(values: Any) -> str:
    return f"{np.median(values):.1f} ({min(values):.0f}-{max(values):.0f})"


if __name__ == "__main__":
    sys.exit(main())
