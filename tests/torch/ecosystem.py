"""What torch's own tools compute on the backend `horoclone`, beside one process: the rows of docs/torch_ecosystem.md.

A row is a function that runs on every rank, inside a process group, and returns how far it is from what one process
computes. `table()` prints them; test_ecosystem.py runs them.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import socket
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import horoclone.torch  # noqa: F401 - registers the backend

STEPS = 6


@dataclass(frozen=True)
class Row:
    """One promise. `at_most`: the largest difference between any two numbers of the two results."""

    tool: str
    what: str
    ranks: tuple[int, ...]
    at_most: float
    run: Callable[[], float]
    package: str = ""  # what it needs beside torch, in an environment of its own


ROWS: dict[str, Row] = {}


def row(
    tool: str, what: str, ranks: tuple[int, ...] = (2, 4), at_most: float = 1e-5, package: str = ""
) -> Callable[[Callable[[], float]], Callable[[], float]]:
    def add(run: Callable[[], float]) -> Callable[[], float]:
        ROWS[run.__name__] = Row(tool, what, ranks, at_most, run, package)
        return run

    return add


def listed() -> str:
    """The rows as items of a list; those that are alike but for what is compared share one."""
    items: dict[tuple[str, str, str], list[str]] = {}
    for one in ROWS.values():
        apart = f"{one.at_most:.0e}".replace("e-0", "e-") if one.at_most else "0"
        items.setdefault((one.tool, ", ".join(map(str, one.ranks)), apart), []).append(one.what)
    return "\n".join(
        f"- **{tool}** ({ranks}; {apart}): {'; '.join(what)}" for (tool, ranks, apart), what in items.items()
    )


def run_row(name: str) -> float:
    """On every rank: the largest difference that any rank has seen."""
    torch.set_num_threads(1)
    dist.init_process_group("horoclone")
    try:
        return seen_by_any(ROWS[name].run)
    finally:
        dist.destroy_process_group()


def seen_by_any(run: Callable[[], float]) -> float:
    torch.manual_seed(0)
    apart = torch.tensor([run()], dtype=torch.float64)
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return apart.item()


def spawned(rank: int, size: int, port: int, names: Sequence[str]) -> None:
    """A rank that torch.multiprocessing.spawn has started: all rows in one process group. Rank 0 prints JSON."""
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("horoclone", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    for name in names:
        apart = seen_by_any(ROWS[name].run)
        if rank == 0:
            print(json.dumps([name, apart]), flush=True)
    dist.destroy_process_group()


# --- what the rows share -----------------------------------------------------------------------------------


def largest(values: Iterable[float]) -> float:
    """Unlike max(): where one is not a number, neither is the result."""
    found = torch.tensor(list(values), dtype=torch.float64)
    return float("inf") if found.isnan().any() else found.max().item()


def difference(ours: Any, theirs: Any) -> float:
    pairs = zip(ours, theirs, strict=True)
    return largest((whole(a).detach().double() - b.detach().double()).abs().max().item() for a, b in pairs)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apart(ours: nn.Module, theirs: nn.Module) -> float:
    return difference(ours.parameters(), theirs.parameters())


def blocks(count: int = 3, width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(count))
    )


def rows_for(size: int, width: int = 16) -> torch.Tensor:
    return torch.randn(8 * size, width, generator=torch.Generator().manual_seed(3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, steps: int = STEPS) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def alone(data: torch.Tensor, steps: int = STEPS) -> nn.Module:
    model = blocks()
    train(model, adam(model), data, steps)
    return model


def mesh_of(*shape: int, names: tuple[str, ...] = ("data",)) -> Any:
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


# --- pipelines ---------------------------------------------------------------------------------------------


def pipeline(schedule: str, per_rank: int = 1, is_v: bool = False) -> float:
    """Two steps of `schedule`; a V gives the first and the last layer to rank 0. Compares losses and gradients."""
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    count, width = size * per_rank, 8
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    plain = nn.Sequential(*copy.deepcopy(layers))
    data, target = torch.randn(2, 16, width, generator=torch.Generator().manual_seed(5))
    mine = [rank, 2 * size - 1 - rank] if is_v else [rank + size * i for i in range(per_rank)]
    stages = [pipelining.PipelineStage(layers[i], i, count, torch.device("cpu")) for i in mine]
    made = getattr(pipelining, schedule)(stages[0] if per_rank == 1 else stages, 8, loss_fn=nn.MSELoss())
    losses: list[torch.Tensor] = []
    for _ in range(2):
        losses.clear()
        for layer in layers:
            layer.zero_grad()
        what = {"target": target, "losses": losses} if count - 1 in mine else {}
        made.step(*([data] if 0 in mine else []), **what)
    loss = nn.MSELoss()(plain(data), target)
    loss.backward()
    found = [
        difference((p.grad for p in layers[i].parameters()), (p.grad for p in plain[i].parameters()))
        for i in mine
    ]
    if losses:
        found.append(abs(torch.stack(losses).mean().item() - loss.item()))
    return largest(found)


SCHEDULES = {  # of torch -> what is compared, stages of a rank, whether rank 0 has the first and the last
    "GPipe": ("GPipe: gradients, losses", 1, False),
    "1F1B": ("1F1B", 1, False),
    "Interleaved1F1B": ("interleaved 1F1B, two stages a rank", 2, False),
    "LoopedBFS": ("looped breadth first", 2, False),
    "InterleavedZeroBubble": ("interleaved zero bubble", 2, False),
    "ZBVZeroBubble": ("zero bubble V", 2, True),
    "DualPipeV": ("DualPipeV", 2, True),
}
for _name, (_what, *_form) in SCHEDULES.items():
    ROWS[_name] = Row("pipelining", _what, (2, 4), 1e-5, partial(pipeline, f"Schedule{_name}", *_form))


# --- tensor parallel ---------------------------------------------------------------------------------------


def cut_by_columns_and_rows(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@row("DTensor, tensor parallel", "columns and rows: parameters after training")
def tensor_parallel() -> float:
    size = dist.get_world_size()
    model = blocks()
    cut_by_columns_and_rows(model, mesh_of(size))
    train(model, adam(model), rows_for(size))
    return apart(model, alone(rows_for(size)))


@row("DTensor, tensor parallel", "sequence parallel layer norm: output, gradients")
def sequence_parallel() -> float:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor import parallel as tp

    size = dist.get_world_size()
    mesh = mesh_of(size)
    plain = nn.Sequential(OrderedDict(norm=nn.LayerNorm(16), up=nn.Linear(16, 32), down=nn.Linear(32, 16)))
    cut = copy.deepcopy(plain)
    tp.parallelize_module(cut, mesh, {
        "norm": tp.SequenceParallel(),
        "up": tp.ColwiseParallel(input_layouts=Shard(1)),
        "down": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    })  # fmt: skip
    data = torch.randn(2, 4 * size, 16)
    ours: DTensor = cut(distribute_tensor(data, mesh, [Shard(1)]))
    theirs = plain(data)
    whole_output = ours.redistribute(mesh, [Replicate()])
    whole_output.to_local().pow(2).mean().backward()
    theirs.pow(2).mean().backward()
    grads = [[p.grad for p in m.parameters()] for m in (cut, plain)]
    return largest([difference([whole_output], [theirs]), difference(*grads)])


@row("DTensor, tensor parallel", "`loss_parallel`, a classifier cut by classes: loss, gradient")
def loss_parallel() -> float:
    from torch.distributed.tensor import parallel as tp

    size = dist.get_world_size()
    plain = nn.Linear(16, 8 * size)
    cut = tp.parallelize_module(
        copy.deepcopy(plain), mesh_of(size), tp.ColwiseParallel(use_local_output=False)
    )
    data, target = torch.randn(8, 16), torch.randint(0, 8 * size, (8,))
    with tp.loss_parallel():
        ours = nn.functional.cross_entropy(cut(data), target)
        ours.backward()
    theirs = nn.functional.cross_entropy(plain(data), target)
    theirs.backward()
    return difference([ours, cut.weight.grad], [theirs, plain.weight.grad])


@row("DTensor, tensor parallel", "`nn.Embedding` cut by rows: output, gradient")
def embedding_by_rows() -> float:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import parallel as tp

    size = dist.get_world_size()
    plain = nn.Embedding(16 * size, 8)
    style = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    cut = tp.parallelize_module(copy.deepcopy(plain), mesh_of(size), style)
    wanted = torch.randint(0, 16 * size, (10,))
    ours, theirs = whole(cut(wanted)), plain(wanted)
    ours.pow(2).sum().backward()
    theirs.pow(2).sum().backward()
    return difference([ours, cut.weight.grad], [theirs, plain.weight.grad])


@row("DTensor", "`redistribute` between rows, columns and copies", at_most=0)
def redistribute() -> float:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh, data = mesh_of(size), torch.arange(16.0 * size * size).view(4 * size, 4 * size)
    ways = itertools.permutations((Shard(0), Shard(1), Replicate()), 2)
    return max(
        difference([distribute_tensor(data, mesh, [a]).redistribute(mesh, [b])], [data]) for a, b in ways
    )


# --- sharded data parallel ---------------------------------------------------------------------------------


def fully_sharded(model: nn.Module, mesh: Any, **more: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def sharded_training(shape: tuple[int, ...], **more: Any) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fully_sharded(blocks(), mesh_of(*shape, names=("copies", "data")[-len(shape) :]), **more)
    train(model, adam(model), rows_for(size).chunk(size)[rank])
    return apart(model, alone(rows_for(size)))


@row("FSDP2", "`fully_shard`: parameters after training")
def fsdp() -> float:
    return sharded_training((dist.get_world_size(),))


@row("FSDP2", "`CPUOffloadPolicy`")
def fsdp_offload() -> float:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded_training((dist.get_world_size(),), offload_policy=CPUOffloadPolicy(pin_memory=False))


@row("HSDP", "2 copies of 2 shards", (4,))
def hsdp() -> float:
    return sharded_training((2, 2))


@row("FSDP2 x tensor parallel", "2 x 2: parameters after training", (4,))
def fsdp_and_tensor_parallel() -> float:
    mesh, model = mesh_of(2, 2, names=("data", "tensor")), blocks()
    cut_by_columns_and_rows(model, mesh["tensor"])
    fully_sharded(model, mesh["data"])
    data = rows_for(4)
    train(model, adam(model), data.chunk(2)[mesh["data"].get_local_rank()])
    return apart(model, alone(data))


@row("FSDP2 x tensor parallel x pipelining", "2 x 2 x 2: parameters after training", (8,))
def three_ways() -> float:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = mesh_of(2, 2, 2, names=("stage", "data", "tensor"))
    model, plain, width = blocks(4), blocks(4), 16
    number = mesh["stage"].get_local_rank()
    mine = model[2 * number : 2 * number + 2]
    cut_by_columns_and_rows(mine, mesh["tensor"])
    fully_sharded(mine, mesh["data"])
    stage = PipelineStage(mine, number, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    data, target = torch.randn(2, 32, width, generator=torch.Generator().manual_seed(5))
    part = mesh["data"].get_local_rank()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (mine, plain))
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        if number == 0:
            schedule.step(data.chunk(2)[part])
        else:
            schedule.step(target=target.chunk(2)[part])
        nn.MSELoss()(plain(data), target).backward()
        ours.step()
        theirs.step()
    return apart(mine, plain[2 * number : 2 * number + 2])


@row("distributed checkpoint", "save, `async_save`, load, resumed training, full state")
def checkpoint() -> float:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    rank, size = dist.get_rank(), dist.get_world_size()
    data, mesh = rows_for(size), mesh_of(size)
    mine = data.chunk(size)[rank]
    folder: list[Any] = [tempfile.TemporaryDirectory() if rank == 0 else None]
    names = [folder[0].name if rank == 0 else None]
    dist.broadcast_object_list(names, 0)
    place = Path(str(names[0]))
    first = fully_sharded(blocks(), mesh)
    optimizer = adam(first)
    train(first, optimizer, mine)
    found = []
    for how in (dcp.save, lambda state, **more: dcp.async_save(state, **more).result()):
        saved = dict(zip(("model", "optimizer"), states.get_state_dict(first, optimizer), strict=True))
        how(saved, checkpoint_id=place / str(len(found)))
        second = fully_sharded(blocks(), mesh)
        other = adam(second)
        train(second, other, torch.ones_like(mine), 1)
        state = dict(zip(("model", "optimizer"), states.get_state_dict(second, other), strict=True))
        dcp.load(state, checkpoint_id=place / str(len(found)))
        states.set_state_dict(
            second, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        train(second, other, mine)
        found.append(apart(second, alone(data, 2 * STEPS)))
    full = states.get_model_state_dict(second, options=states.StateDictOptions(full_state_dict=True))
    found.append(
        difference(full.values(), alone(data, 2 * STEPS).state_dict().values()) if rank == 0 else 0.0
    )
    dist.barrier()
    if rank == 0:
        folder[0].cleanup()
    return largest(found)


# --- DDP: one process simulates all copies of the model -----------------------------------------------------

Sets = Sequence[Sequence[int]]


def copy_of_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_at(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    data = torch.randn(32, 12, generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.mse_loss(model(data[:, :8]), data[:, 8:])


def averaged(tensors: Sequence[Sequence[torch.Tensor]], sets: Sets, parts: int = 0) -> None:
    with torch.no_grad():
        for members in sets:
            for of_all in zip(*(tensors[r] for r in members), strict=True):
                total = torch.stack([t.double() for t in of_all]).sum(0) / (parts or len(members))
                for tensor in of_all:
                    tensor.copy_(total)


def simulated(
    size: int, steps: int, together: Callable[[int], bool], sets: Callable[[int], Sets] = lambda step: ()
) -> list[nn.Module]:
    """together(step): gradients are averaged. sets(step): among whom the parameters are averaged afterwards."""
    models = [copy_of_model() for _ in range(size)]
    optimizers = [sgd(model) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_at(model, step, rank).backward()
        if together(step):
            averaged([[p.grad for p in m.parameters()] for m in models], [range(size)])  # type: ignore[misc]
        for optimizer in optimizers:
            optimizer.step()
        averaged([list(m.parameters()) for m in models], sets(step))
    return models


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_at(model, step, dist.get_rank()).backward()
        optimizer.step()


def with_hook(hook: Any, state: Any, **options: Any) -> float:
    model = nn.parallel.DistributedDataParallel(copy_of_model(), **options)
    model.register_comm_hook(state, hook)
    trained(model, sgd(model), STEPS)
    return apart(model, simulated(dist.get_world_size(), STEPS, lambda step: True)[0])


@row("DDP", "parameters after training")
def ddp() -> float:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return with_hook(allreduce_hook, dist.group.WORLD)


@row("DDP", "`fp16_compress_hook`", at_most=1e-3)
def ddp_half() -> float:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return with_hook(fp16_compress_hook, dist.group.WORLD)


@row("DDP", "`powerSGD_hook` at full rank", at_most=1e-4)
def ddp_power() -> float:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=3, min_compression_rate=0
    )
    dist.group.WORLD.set_timeout(timedelta(seconds=60))  # callbacks wait within it
    # Its callbacks start collectives while DDP starts those of other buckets, and one of its own for what is unused.
    return with_hook(power.powerSGD_hook, state, bucket_cap_mb=1e-4, find_unused_parameters=True)


@row("DDP", "`PostLocalSGDOptimizer` with its hook")
def ddp_post_local() -> float:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    rank, size, warm, period = dist.get_rank(), dist.get_world_size(), 4, 3
    own = [dist.new_group([r]) for r in range(size)]
    model = nn.parallel.DistributedDataParallel(copy_of_model())
    model.register_comm_hook(local.PostLocalSGDState(None, own[rank], warm), local.post_localSGD_hook)
    trained(model, PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period, warm)), 12)
    due = lambda step: [range(size)] if step >= warm and (step - warm) % period == 0 else []  # noqa: E731
    return apart(model, simulated(size, 12, lambda step: step < warm, due)[rank])


@row("model averaging", "`HierarchicalModelAverager`: pairs every 2 steps, all every 4", (4,))
def hierarchical_averaging() -> float:
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
        HierarchicalModelAverager,
    )

    model, averager = copy_of_model(), HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))
    optimizer = sgd(model)
    for step in range(8):
        optimizer.zero_grad()
        loss_at(model, step, dist.get_rank()).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    due = lambda step: [range(4)] if step % 4 == 0 else [(0, 1), (2, 3)] if step % 2 == 0 else []  # noqa: E731
    return apart(model, simulated(4, 8, lambda step: False, due)[dist.get_rank()])


@row("DDP", "`ZeroRedundancyOptimizer`, its whole state as well")
def zero_redundancy() -> float:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(copy_of_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    trained(model, optimizer, STEPS)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0 and len(optimizer.state_dict()["state"]) != 4:
        raise AssertionError(f"the state of {len(optimizer.state_dict()['state'])} parameters of 4")
    return apart(model, simulated(dist.get_world_size(), STEPS, lambda step: True)[0])


@row("DDP", "`join()`: every rank has another number of batches")
def ddp_join() -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, plain = nn.parallel.DistributedDataParallel(copy_of_model()), copy_of_model()
    mine, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    with model.join():
        trained(model, mine, 3 + 2 * rank)
    for step in range(3 + 2 * (size - 1)):
        other.zero_grad()
        for r in range(size):
            if step < 3 + 2 * r:
                (loss_at(plain, step, r) / size).backward()
        other.step()
    return apart(model, plain)


@row("expert parallel", "`all_to_all_single_autograd`, uneven: outputs, gradients of experts and data")
def experts() -> float:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    rank, size, width = dist.get_rank(), dist.get_world_size(), 8
    torch.manual_seed(1)
    plain = [nn.Linear(width, width) for _ in range(size)]
    mine = copy.deepcopy(plain[rank])
    data = [torch.randn(12, width, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    chosen = [
        torch.randint(0, size, (12,), generator=torch.Generator().manual_seed(50 + r)) for r in range(size)
    ]
    order = chosen[rank].argsort(stable=True)
    sent = [int((chosen[rank] == e).sum()) for e in range(size)]
    got = [int((chosen[r] == rank).sum()) for r in range(size)]
    source = data[rank].clone().requires_grad_()
    there = all_to_all_single_autograd(source[order], got, sent, dist.group.WORLD)
    back = all_to_all_single_autograd(mine(there), sent, got, dist.group.WORLD)
    ours = torch.empty_like(back).index_copy(0, order, back)
    ours.pow(2).sum().backward()
    inputs = [d.clone().requires_grad_() for d in data]
    outputs = [
        torch.stack([plain[int(e)](x) for x, e in zip(inputs[r], chosen[r], strict=True)])
        for r in range(size)
    ]
    sum(o.pow(2).sum() for o in outputs).backward()  # type: ignore[union-attr]
    theirs = [outputs[rank], inputs[rank].grad, *(p.grad for p in plain[rank].parameters())]
    return difference([ours, source.grad, *(p.grad for p in mine.parameters())], theirs)


# --- packages in an environment of their own ----------------------------------------------------------------


@row(
    "Accelerate",
    "`prepare`, `backward`, `gather_for_metrics`: parameters, what is gathered",
    package="accelerate",
)
def accelerated() -> float:
    import accelerate

    size = dist.get_world_size()
    run = accelerate.Accelerator(cpu=True)
    data = rows_for(size)
    model = blocks()
    model, optimizer, loader = run.prepare(
        model, adam(model), torch.utils.data.DataLoader(data, batch_size=8)
    )
    gathered = []
    for _ in range(STEPS):
        for mine in loader:
            optimizer.zero_grad()
            run.backward(model(mine).pow(2).mean())
            optimizer.step()
            gathered.append(run.gather_for_metrics(mine))
    return largest([apart(model, alone(data)), difference(gathered, [data] * STEPS)])


def deepspeed_training(stage: int) -> float:
    import deepspeed

    rank, size = dist.get_rank(), dist.get_world_size()
    data, model = rows_for(size), blocks()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config={
        "train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    })  # fmt: skip
    for _ in range(STEPS):
        engine.backward(engine(data.chunk(size)[rank]).pow(2).mean())
        engine.step()
    found = []
    for ours, theirs in zip(model.parameters(), alone(data).parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([ours], enabled=stage == 3):
            found.append(difference([ours], [theirs]))
    return largest(found)


for _stage in range(4):
    _what = f"ZeRO stage {_stage}" if _stage else "data parallel: parameters after training"
    ROWS[f"deepspeed_{_stage}"] = Row(
        "DeepSpeed, on CPUs", _what, (2, 4), 1e-5, partial(deepspeed_training, _stage), "deepspeed"
    )


TABLE_ROWS, EMBEDDING = 100, 16


class Recommender(nn.Module):
    def __init__(self) -> None:
        import torchrec

        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=EMBEDDING, num_embeddings=TABLE_ROWS, feature_names=[f"f{i}"]
            )
            for i in range(2)
        ]
        self.bags = torchrec.EmbeddingBagCollection(device=torch.device("cpu"), tables=tables)
        self.over = nn.Linear(2 * EMBEDDING, 1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.over(self.bags(features).values())  # type: ignore[no-any-return]


def features_of(seed: int, count: int = 32) -> Any:
    import torchrec

    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * count,), generator=chance)
    values = torch.randint(0, TABLE_ROWS, (int(lengths.sum()),), generator=chance)
    return torchrec.KeyedJaggedTensor.from_lengths_sync(keys=["f0", "f1"], values=values, lengths=lengths)


def row_wise_adagrad(
    weight: torch.Tensor, grad: torch.Tensor, state: torch.Tensor, rate: float, eps: float
) -> None:
    """In one process what the tables do: one number of state for each row that a batch has touched."""
    touched = grad.abs().sum(1) > 0
    state[touched] += grad[touched].pow(2).mean(1)
    weight[touched] -= rate * grad[touched] / (state[touched].sqrt() + eps)[:, None]


def embeddings_by(way: str) -> float:
    """The tables cut in this way and fused with row-wise Adagrad; compares all shards with one process."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    rank, size, rate, eps = dist.get_rank(), dist.get_world_size(), 0.1, 1e-8
    ways = {
        "row": lambda: plans.row_wise(compute_kernel="fused"),
        "table": lambda: plans.table_wise(rank=1, compute_kernel="fused"),
        "column": lambda: plans.column_wise(ranks=[0, size - 1], compute_kernel="fused"),
    }
    model = Recommender()
    plain = copy.deepcopy(model)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": rate, "eps": eps}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = plans.construct_module_sharding_plan(
        model.bags, {f"t{i}": ways[way]() for i in range(2)}, sharder=sharder, world_size=size, local_size=size,
        device_type="cpu",
    )  # fmt: skip
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"bags": plan}), sharders=[sharder],
        env=ShardingEnv.from_process_group(dist.group.WORLD),
    )  # fmt: skip

    def parts() -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's parts of the sharded model, each beside the same part of the plain one."""
        found = []
        for name, value in sharded.state_dict().items():
            beside = plain.state_dict()[name]
            if not isinstance(value, ShardedTensor):
                found.append((value, beside))
                continue
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                found.append((shard.tensor, beside[row : row + rows, column : column + columns]))
        return found

    with torch.no_grad():
        for mine, beside in parts():
            mine.copy_(beside)
    halves = 2 if way == "column" else 1  # each with a state of its own
    states = [torch.zeros(halves, TABLE_ROWS) for _ in plain.bags.parameters()]
    ours = torch.optim.SGD([p for name, p in sharded.named_parameters() if "over" in name], lr=rate)
    theirs = torch.optim.SGD(plain.over.parameters(), lr=rate)
    for step in range(STEPS):
        batches = [features_of(1000 * step + r) for r in range(size)]
        ours.zero_grad()
        sharded(batches[rank]).pow(2).mean().backward()
        ours.step()
        plain.zero_grad()
        for batch in batches:
            (plain(batch).pow(2).mean() / size).backward()
        theirs.step()
        with torch.no_grad():
            for weight, state in zip(plain.bags.parameters(), states, strict=True):
                assert weight.grad is not None
                for half in zip(weight.chunk(halves, 1), weight.grad.chunk(halves, 1), state, strict=True):
                    row_wise_adagrad(*half, rate, eps)
    return largest(difference([a], [b]) for a, b in parts() if a.numel()) if parts() else 0.0


@row("TorchRec", "tables cut by rows, fused row-wise Adagrad: all shards", at_most=1e-4, package="torchrec")
def torchrec_by_rows() -> float:
    return embeddings_by("row")


@row("TorchRec", "whole tables on a rank", at_most=1e-4, package="torchrec")
def torchrec_by_tables() -> float:
    return embeddings_by("table")


@row("TorchRec", "tables cut by columns", at_most=1e-4, package="torchrec")
def torchrec_by_columns() -> float:
    return embeddings_by("column")


if __name__ == "__main__":  # ecosystem.py SIZE NAME...: started by mp.spawn
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen_port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        spawned, args=(int(sys.argv[1]), chosen_port, sys.argv[2:]), nprocs=int(sys.argv[1])
    )
