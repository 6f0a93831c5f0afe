"""Pull and push of rows of 64 float32: our parameter server beside torch.distributed.rpc and PS-Lite.

    python benchmarks/parameter_server.py [--steps 100] [--pslite FOLDER] [--json FILE]
    python benchmarks/parameter_server.py --dense 100 [--steps 10]

Two servers and two workers as processes on this machine. A worker pulls and pushes 4,096 of 100,000 ids in each step;
servers add what is pushed. All contestants run in turn, `--repeats` times; the medians of all workers' steps are
printed. FOLDER: sources of PS-Lite (`pip download --no-deps --no-binary :all: byteps`, 3rdparty/ps-lite), which are
built with g++ and libzmq3-dev.

--dense MB: instead of rows, each worker pushes a dense gradient of so many MB and pulls the weights (ps.KVStore; with
rpc each server keeps a half).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

TABLE, BATCH, WIDTH, SERVERS, WORKERS = 100_000, 4096, 64, 2, 2
LIMIT_S = 120


def ids_of(rank: int, step: int) -> np.ndarray[Any, Any]:
    """Sorted, each once."""
    return np.sort(np.random.default_rng((rank, step)).choice(TABLE, BATCH, replace=False))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# --- ours ---


def our_worker(store: str, rank: int, steps: int, dense: int) -> list[float]:
    """Seconds of each step. dense: the number of elements; 0: rows of a table."""
    from horoclone.ps import Servers, Sum, Table

    servers = Servers("bench", store, rank=rank, workers=WORKERS)
    if dense:
        return our_dense_steps(servers, steps, dense)
    table = Table(servers, "rows", WIDTH, Sum())
    ones, times = np.ones((BATCH, WIDTH), np.float32), []
    for step in range(steps):
        ids = ids_of(rank, step)
        start = time.perf_counter()
        table.pull(ids)
        table.push(ids, ones)
        times.append(time.perf_counter() - start)
    servers.close()
    return times


def our_dense_steps(servers: Any, steps: int, dense: int) -> list[float]:
    import torch

    from horoclone.ps.torch import KVStore

    torch.set_num_threads(1)
    store = KVStore(servers)
    store.init("weights", torch.zeros(dense))
    ones, weights, times = torch.ones(dense), torch.zeros(dense), []
    for step in range(steps):
        start = time.perf_counter()
        store.push("weights", ones)
        store.pull("weights", weights)
        times.append(time.perf_counter() - start)
        check_dense(weights, step)
    servers.close()
    return times


def check_dense(weights: Any, step: int) -> None:
    """What this worker has pushed is in every element."""
    assert weights.min() > step, (step, weights.min())


def ours(steps: int, replicas: int, dense: int) -> list[float]:
    from horoclone.ps.register import serve_store

    store = serve_store(0, new_s=0)
    address = f"127.0.0.1:{store.port}"
    environ = {**os.environ, "HOROCLONE_SECRET": secrets.token_hex(16)}
    command = [
        sys.executable, "-m", "horoclone.ps", "--name", "bench", "--store", address, "--servers", str(SERVERS),
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [*command, "--index", str(index), "--replicas", str(replicas)],
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for index in range(SERVERS)
    ]  # fmt: skip
    try:
        if replicas == 2:
            wait_for_copies(address, environ)
        return workers("ours", [address], steps, dense, environ)
    finally:
        for process in processes:
            process.terminate()
            process.wait(20)


def wait_for_copies(address: str, environ: dict[str, str]) -> None:
    from horoclone.ps.register import open_register

    register = open_register("bench", address, None, environ)
    for partition in range(SERVERS):
        register.wait(
            f"view/{partition}", lambda view: view and view["backup"], time.monotonic() + 60, "no second copy"
        )


# --- torch.distributed.rpc: a server keeps its half of the rows; calls run on its threads ---

rows: Any = None


def rpc_pull(ids: Any) -> Any:
    return rows[ids]


def rpc_push(ids: Any, gradients: Any) -> None:
    rows.index_add_(0, ids, gradients)


def rpc_pull_dense() -> Any:
    return rows


def rpc_push_dense(gradient: Any) -> None:
    rows.add_(gradient)


def rpc_process(port: str, number: int, steps: int, dense: int) -> list[float]:
    """Processes 0 and 1 are servers."""
    global rows
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    rows = torch.zeros(dense // SERVERS) if dense else torch.zeros(TABLE // SERVERS, WIDTH)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    rpc.init_rpc(f"process{number}", rank=number, world_size=SERVERS + WORKERS)
    times: list[float] = []
    if number >= SERVERS:
        times = rpc_dense_steps(steps, dense) if dense else rpc_steps(number, steps)
    rpc.shutdown()
    return times


def rpc_steps(number: int, steps: int) -> list[float]:
    import torch
    from torch.distributed import rpc

    ones, times = torch.ones(BATCH, WIDTH), []
    for step in range(steps):
        ids = torch.from_numpy(ids_of(number, step))
        start = time.perf_counter()
        mine = [(ids % SERVERS == server).nonzero()[:, 0] for server in range(SERVERS)]
        local = [ids[places] // SERVERS for places in mine]
        out = torch.empty(BATCH, WIDTH)
        answers = [rpc.rpc_async(f"process{s}", rpc_pull, (local[s],)) for s in range(SERVERS)]
        for places, answer in zip(mine, answers, strict=True):
            out[places] = answer.wait()
        pushes = [rpc.rpc_async(f"process{s}", rpc_push, (local[s], ones[mine[s]])) for s in range(SERVERS)]
        for push in pushes:
            push.wait()
        times.append(time.perf_counter() - start)
    return times


def rpc_dense_steps(steps: int, dense: int) -> list[float]:
    import torch
    from torch.distributed import rpc

    gradients = [torch.ones(dense // SERVERS) for _ in range(SERVERS)]
    weights, times = torch.zeros(dense), []
    for step in range(steps):
        start = time.perf_counter()
        pushes = [rpc.rpc_async(f"process{s}", rpc_push_dense, (gradients[s],)) for s in range(SERVERS)]
        for push in pushes:
            push.wait()
        answers = [rpc.rpc_async(f"process{s}", rpc_pull_dense) for s in range(SERVERS)]
        for part, answer in zip(weights.chunk(SERVERS), answers, strict=True):
            part.copy_(answer.wait())
        times.append(time.perf_counter() - start)
        check_dense(weights, step)
    return times


def torch_rpc(steps: int, dense: int) -> list[float]:
    return workers("rpc", [free_port()], steps, dense, dict(os.environ), SERVERS + WORKERS)


# --- PS-Lite ---


SPINS = """          std::lock_guard<std::mutex> lk(mu_);
          // the zmq_msg_recv should be non-blocking, otherwise deadlock will happen"""
LOCKS = "          std::unique_lock<std::mutex> lk(mu_);"
AGAIN = """{ // ZMQ_DONTWAIT
            continue;"""
NAPS = """{
            lk.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            continue;"""


def build_pslite(folder: Path, into: Path, *, nap: bool) -> Path:
    """The program of pslite.cc. nap: BytePS' copy of PS-Lite receives in a loop that never sleeps and holds the lock
    that senders need, which takes more cores than there are here; with it the loop sleeps 20 us."""
    copy = into / f"sources-{nap}"
    shutil.copytree(folder, copy)
    if nap:
        van = copy / "src" / "zmq_van.h"
        text = van.read_text()
        assert SPINS in text and AGAIN in text
        van.write_text(text.replace(SPINS, LOCKS).replace(AGAIN, NAPS))
    sources = [copy / "src" / name for name in ("customer.cc", "postoffice.cc", "van.cc")]
    program = into / f"pslite-{nap}"
    command = ["g++", "-std=c++14", "-msse2", "-O3", "-w", f"-I{copy}/src", f"-I{copy}/include"]
    main = Path(__file__).with_name("pslite.cc")
    subprocess.run([*command, main, *sources, "-o", program, "-lzmq", "-pthread", "-lrt"], check=True)
    return program


def pslite(program: Path, steps: int) -> list[float]:
    environ = {
        **os.environ, "DMLC_NUM_WORKER": str(WORKERS), "DMLC_NUM_SERVER": str(SERVERS),
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": free_port(), "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_ENABLE_RDMA": "0",
    }  # fmt: skip
    command = [str(program), str(BATCH), str(TABLE), str(steps)]
    roles = ["scheduler", *["server"] * SERVERS, *["worker"] * WORKERS]
    said = outputs([(command, {**environ, "DMLC_ROLE": role}) for role in roles])
    return [
        float(line.split()[1]) for text in said for line in text.splitlines() if line.startswith("median")
    ]


def outputs(commands: list[tuple[list[str], dict[str, str]]]) -> list[str]:
    """What the processes print, which run at once."""
    processes = [subprocess.Popen(c, env=e, stdout=subprocess.PIPE, text=True) for c, e in commands]
    try:
        return [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


# --- all of them ---


def workers(
    kind: str, more: list[str], steps: int, dense: int, environ: dict[str, str], count: int = WORKERS
) -> list[float]:
    """Times of all processes of a kind, which are this file again."""
    command = [sys.executable, str(Path(__file__).resolve()), "--as", kind, "--steps", str(steps)]
    command += ["--elements", str(dense), *more]
    said = outputs([([*command, str(number)], environ) for number in range(count)])
    return [statistics.median(times) for text in said if (times := json.loads(text.splitlines()[-1]))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pslite", type=Path, help="folder with PS-Lite's sources")
    parser.add_argument("--json", type=Path, help="where the figures go as well")
    parser.add_argument(
        "--dense", type=float, default=0, metavar="MB", help="push and pull a dense tensor of this size"
    )
    parser.add_argument("--elements", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="kind", choices=("ours", "rpc"), help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    wish = parser.parse_args()
    if wish.kind:
        place, number = wish.more
        run = our_worker if wish.kind == "ours" else rpc_process
        print(json.dumps(run(place, int(number), wish.steps, wish.elements)))
        return
    if wish.dense and wish.pslite:
        parser.error("--pslite: its program pulls and pushes rows only")
    dense = SERVERS * round(wish.dense * 1e6 / 4 / SERVERS)
    contestants: dict[str, Any] = {
        "horoclone, one copy": lambda: ours(wish.steps, 1, dense),
        "horoclone, two copies": lambda: ours(wish.steps, 2, dense),
        "torch.distributed.rpc": lambda: torch_rpc(wish.steps, dense),
    }
    with tempfile.TemporaryDirectory() as folder:
        if wish.pslite:
            as_it_is = build_pslite(wish.pslite, Path(folder), nap=False)
            napping = build_pslite(wish.pslite, Path(folder), nap=True)
            contestants["PS-Lite (BytePS)"] = lambda: pslite(as_it_is, wish.steps)
            contestants["PS-Lite, with naps"] = lambda: pslite(napping, wish.steps)
        found: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(wish.repeats):
            for name, run in contestants.items():
                found[name] += run()
    base = statistics.median(found["horoclone, one copy"])
    for name, times in found.items():
        middle = statistics.median(times)
        rate = f"{8 * dense / middle / 1e9:7.2f} GB/s" if dense else f"{BATCH / middle / 1e3:7.0f} k rows/s"
        print(
            f"{name:24} {1e3 * middle:8.2f} ms a step ({1e3 * min(times):.2f} to {1e3 * max(times):.2f}), "
            f"{rate} a worker, {middle / base:5.2f} of one copy"
        )
    if wish.json:
        wish.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
