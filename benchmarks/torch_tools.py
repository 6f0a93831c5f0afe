"""Steps of torch's FSDP2, tensor parallel, pipelining and DDP, and two calls, on horoclone and on gloo.

python benchmarks/torch_tools.py [--np 2] [--width 64] [--steps 60] [--rounds 7] [--tools fsdp,barrier]: in each round a
job of torchrun for each backend in turn, since DTensor takes the backend that it has seen first for all equal meshes.
Prints the median of the rounds' medians of the slowest rank, their spread, the ratio to gloo with its interval, and how
much of gloo's time on top of torch's backend `fake`, which moves nothing, is left.
--calls 400: instead, the processor time of so many single calls, threads of the backend included, in us a call on rank
0. Tensors have 8 KiB where no size is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from statistics_of import ratio_of, slowest_rank, summarise

BACKENDS = ("horoclone", "gloo", "fake")
WARM_STEPS = 6
ROUND_S = 300
Step = Callable[[], Any]


def layers(count: int, width: int) -> Any:
    """count blocks of two linear layers of 4 * width**2 parameters together."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )
    )


def trained(model: Any, width: int, batch: int = 16) -> Step:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.ones(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()

    return step


def fsdp(mesh: Any, width: int, *, keeps: bool = False) -> Step:
    """FSDP2 of four blocks; keeps: parameters stay whole between forward and backward, as in ZeRO-2."""
    from torch.distributed.fsdp import fully_shard

    model = layers(4, width)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keeps)
    return trained(model, width)


def zero3(mesh: Any, width: int) -> Step:
    """FSDP2 of a model of 100 MiB."""
    return fsdp(mesh, 1280)


def zero2(mesh: Any, width: int) -> Step:
    """The same, parameters kept."""
    return fsdp(mesh, 1280, keeps=True)


def tensor_parallel(mesh: Any, width: int) -> Step:
    """Four blocks, the first layer of each cut by columns and the second by rows."""
    from torch.distributed.tensor import parallel

    model = layers(4, width)
    for block in model:
        parallel.parallelize_module(
            block, mesh, {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        )
    return trained(model, width)


def pipeline(mesh: Any, width: int) -> Step:
    """1F1B with 8 microbatches, one block a rank."""
    import torch
    from torch import nn
    from torch.distributed import pipelining

    rank, size = mesh.get_local_rank(), mesh.size()
    mine = layers(size, width)[rank]
    optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3)
    stage = pipelining.PipelineStage(mine, rank, size, torch.device("cpu"), group=mesh.get_group())
    schedule = pipelining.Schedule1F1B(stage, 8, loss_fn=nn.MSELoss())
    data = torch.ones(64, width)

    def step() -> None:
        optimizer.zero_grad()
        inputs = [data] if rank == 0 else []
        schedule.step(*inputs, target=data if rank == size - 1 else None)
        optimizer.step()

    return step


def ddp(mesh: Any, width: int) -> Step:
    """DDP with gradients of 1.5 MiB; on `fake`, whose futures it does not take, the model alone."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = layers(6, 128)
    return trained(model if dist.get_backend() == "fake" else DistributedDataParallel(model), 128)


def all_gather_object(mesh: Any, width: int) -> Step:
    """Of a small dict."""
    import torch.distributed as dist

    found: list[Any] = [None] * mesh.size()
    return lambda: dist.all_gather_object(found, {"rank": dist.get_rank(), "loss": 0.5})


def barrier(mesh: Any, width: int) -> Step:
    """dist.barrier()."""
    import torch.distributed as dist

    return dist.barrier


TOOLS: dict[str, Callable[[Any, int], Step]] = {
    tool.__name__: tool
    for tool in (fsdp, tensor_parallel, pipeline, ddp, zero3, zero2, all_gather_object, barrier)
}
NOT_OF_FAKE = ("pipeline", "all_gather_object", "barrier")  # they need what others send, or do nothing else


def single_calls(size: int, rank: int) -> dict[str, Step]:
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    x, out, whole = torch.ones(2048), torch.ones(2048), torch.ones(2048 * size)
    one, many, group = torch.ones(1), torch.ones(32768), dist.distributed_c10d._get_default_group()

    # As the experts of a model get tokens: the last rank the most.
    goes = [2048 // size - 8 * (size - 1 - 2 * r) for r in range(size)]
    comes = [goes[rank]] * size
    routed, apart = torch.ones(sum(comes)), [torch.ones(2048) for _ in range(size)]

    def messages() -> None:
        if rank % 2:
            dist.recv(out, rank - 1)
            dist.send(x, rank - 1)
        elif rank + 1 < size:
            dist.send(x, rank + 1)
            dist.recv(out, rank + 1)

    def gather(waits: bool = False) -> Any:
        return dist.all_gather_into_tensor(whole, out, async_op=waits)

    found: dict[str, Step] = {
        "all_reduce 4 B": lambda: dist.all_reduce(one),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce 128 KiB": lambda: dist.all_reduce(many),
        "all_reduce async, wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_gather_into_tensor": gather,
        "all_gather_into_tensor async, wait": lambda: gather(waits=True).wait(),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(out, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x),
        "all_to_all_single of unequal parts": lambda: dist.all_to_all_single(routed, x, comes, goes),
        "all_to_all": lambda: dist.all_to_all(list(out.chunk(size)), list(x.chunk(size))),
        "all_gather": lambda: dist.all_gather(apart, out),
        "gather": lambda: dist.gather(x, apart if rank == 0 else None),
        "reduce": lambda: dist.reduce(x, 0),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": dist.barrier,
        "functional all_reduce": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group)),
    }
    return found if dist.get_backend() == "fake" else {**found, "send and recv": messages}


def time_calls(calls: dict[str, Step], wish: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of processor time of a call, in each round."""
    found: dict[str, list[float]] = {}
    for name, call in calls.items():
        for turn in range(wish.rounds + 1):  # the first one warms
            began = time.process_time()
            for _ in range(wish.calls):
                call()
            if turn:
                used = (time.process_time() - began) / wish.calls * 1e6
                found.setdefault(name, []).append(used)
    return found


def run_rank(backend: str, wish: argparse.Namespace) -> None:
    """One rank: prints on rank 0 JSON for each tool or call, in us: by rank of its steps, or of its rounds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if backend == "horoclone":
        import horoclone.torch  # noqa: F401 - registers the backend
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    else:
        dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (size,))
    if wish.calls:
        for name, used in time_calls(single_calls(size, rank), wish).items():
            if rank == 0:
                print(json.dumps({"tool": name, "times_us": [used]}), flush=True)
        wish.tools = []
    for name in wish.tools:
        if backend == "fake" and name in NOT_OF_FAKE:
            continue
        step = TOOLS[name](mesh, wish.width)
        times = []
        for number in range(WARM_STEPS + wish.steps):
            dist.barrier()
            began = time.perf_counter()
            step()
            if number >= WARM_STEPS:
                times.append((time.perf_counter() - began) * 1e6)
        by_rank: list[Any] = [times] * size
        if backend != "fake":
            dist.all_gather_object(by_rank, times)
        if rank == 0:
            print(json.dumps({"tool": name, "times_us": by_rank}), flush=True)
    if backend != "fake":
        dist.destroy_process_group()


def run_job(backend: str, wish: argparse.Namespace) -> dict[str, list[float]]:
    """A job of one backend: for each tool the steps of the slowest rank, in us."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={wish.np}", __file__]
    command += ["--rank-of", backend, "--tools", ",".join(wish.tools), "--width", str(wish.width)]
    command += ["--steps", str(wish.steps), "--calls", str(wish.calls), "--rounds", str(wish.rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROUND_S, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    missing = {
        name for name in ([] if wish.calls else wish.tools) if backend != "fake" or name not in NOT_OF_FAKE
    }
    missing -= {one["tool"] for one in found}
    # gloo's threads end a process with SIGABRT now and then, after everything was measured.
    if missing or (done.returncode and backend != "gloo"):
        raise SystemExit(f"{backend}: exit code {done.returncode}, missing {sorted(missing)}\n{done.stderr}")
    return {one["tool"]: slowest_rank(one["times_us"]) for one in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tools", type=lambda text: text.split(","), default=list(TOOLS))
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--rank-of", choices=BACKENDS, help=argparse.SUPPRESS)
    wish = parser.parse_args()
    if unknown := [name for name in wish.tools if name not in TOOLS]:
        parser.error(f"no tool {unknown[0]!r}; there are {', '.join(TOOLS)}")
    if wish.rank_of:
        return run_rank(wish.rank_of, wish)
    if wish.calls:
        used = {backend: run_job(backend, wish) for backend in BACKENDS}
        for name in used["horoclone"]:
            cells = [
                f"{b} {min(of[name]):8.1f} {np.median(of[name]):8.1f}" for b, of in used.items() if name in of
            ]
            print(f"{name:36} us, least and median of rounds: {'  '.join(cells)}")
        return None
    rounds: dict[str, list[dict[str, list[float]]]] = {backend: [] for backend in BACKENDS}
    for number in range(wish.rounds):
        for backend in BACKENDS if number % 2 else reversed(BACKENDS):
            rounds[backend].append(run_job(backend, wish))
    print(
        f"{wish.np} ranks, width {wish.width}, {wish.rounds} rounds of {wish.steps} steps; ms (spread of rounds)"
    )
    for name in wish.tools:
        seen = {b: summarise([one[name] for one in rounds[b]]) for b in BACKENDS if name in rounds[b][0]}
        cells = [
            f"{b} {s.median_us / 1e3:8.3f} ({s.low_us / 1e3:.3f}-{s.high_us / 1e3:.3f})"
            for b, s in seen.items()
        ]
        against = ratio_of(seen["gloo"].rounds_us, seen["horoclone"].rounds_us)  # ours over gloo's
        line = (
            f"{name:17} {'  '.join(cells)}  ratio {against.ratio:.2f} ({against.low:.2f}-{against.high:.2f})"
        )
        if "fake" in seen:
            bare = np.asarray(seen["fake"].rounds_us)
            ours, theirs = (np.asarray(seen[b].rounds_us) - bare for b in ("horoclone", "gloo"))
            line += f"  on top of fake {np.median(ours) / np.median(theirs):.2f}"
        print(line, flush=True)
    return None


if __name__ == "__main__":
    main()
