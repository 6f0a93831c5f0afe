"""torch.distributed on the backend `horoclone`: collectives, futures, groups, errors, and what is built on them."""

from __future__ import annotations

import functools
import queue
import sys
import threading
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import distributed, raised, ranks

import horoclone.torch as hvd
from horoclone.torch.c10d.tensors import reduction
from horoclone.torch.c10d.work import InFlight


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    chance = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, shape, generator=chance).to(dtype)


@ranks(1, 3)
def test_every_reduction() -> None:
    with distributed() as (rank, size):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            parts = torch.stack([values(r, 3, 4, dtype=dtype) for r in range(size)])
            expected = {
                dist.ReduceOp.SUM: parts.sum(0).to(dtype),
                dist.ReduceOp.PRODUCT: parts.prod(0).to(dtype),
                dist.ReduceOp.MIN: parts.amin(0),
                dist.ReduceOp.MAX: parts.amax(0),
            }
            if dtype is torch.float32:
                expected[dist.ReduceOp.AVG] = parts.mean(0)
                expected[dist._make_nccl_premul_sum(0.5)] = parts.sum(0) * 0.5
            for op, wanted in expected.items():
                mine = parts[rank].clone()
                dist.all_reduce(mine, op)
                assert torch.allclose(mine, wanted), (dtype, op, mine, wanted)
                for root in range(size):
                    mine = parts[rank].clone()
                    dist.reduce(mine, root, op)
                    assert torch.allclose(mine, wanted if rank == root else parts[rank])
                wide = parts[rank].repeat(size, 1)
                chunk = torch.empty(3, 4, dtype=dtype)
                dist.reduce_scatter_tensor(chunk, wide, op)
                assert torch.allclose(chunk, wanted), (dtype, op)


BITS = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
OF_GLOO = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
NOT_OF_GLOO = (
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)  # the last two only in bitwise ones here


def some_bits(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=chance).bool()
    width = torch.empty(0, dtype=dtype).element_size()
    bytes_ = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), generator=chance).to(torch.uint8)
    return bytes_.view(dtype)


@ranks(3)
def test_bits_are_reduced_as_gloo_and_torch_reduce_them() -> None:
    with distributed() as (rank, size):
        gloo = dist.new_group(backend="gloo")
        for dtype in OF_GLOO + NOT_OF_GLOO:
            parts = [some_bits(r, dtype, 5, 7) for r in range(size)]
            for op, fold in BITS.items():
                wanted = functools.reduce(fold, parts)
                if dtype in OF_GLOO:
                    dist.all_reduce(theirs := parts[rank].clone(), op, group=gloo)
                    assert torch.equal(theirs, wanted), (dtype, op)
                dist.all_reduce(mine := parts[rank].clone(), op)
                assert mine.dtype is dtype and torch.equal(mine, wanted), (dtype, op, mine, wanted)
                work = dist.all_reduce(mine := parts[rank].clone(), op, async_op=True)
                assert torch.equal(work.get_future().wait()[0], wanted) and torch.equal(mine, wanted)
                root = size - 1
                dist.reduce(mine := parts[rank].clone(), root, op)
                assert torch.equal(mine, wanted if rank == root else parts[rank]), (dtype, op)
                chunk = torch.empty(5, 7, dtype=dtype)
                dist.reduce_scatter_tensor(chunk, parts[rank].repeat(size, 1), op)
                assert torch.equal(chunk, wanted), (dtype, op)
                dist.all_reduce(none := torch.empty(0, 3, dtype=dtype), op)
                assert none.shape == (0, 3)


@ranks(2)
def test_bits_of_several_tensors_are_one_operation() -> None:
    with distributed() as (rank, size):
        for dtype in (torch.bool, torch.int32, torch.uint32):
            each = [[some_bits(r, dtype, count) for count in (3, 1, 70)] for r in range(size)]
            for op, fold in BITS.items():
                mine = [part.clone() for part in each[rank]]
                dist.all_reduce_coalesced(mine, op)
                assert all(map(torch.equal, mine, map(fold, *each))), (dtype, op, mine)


@ranks(2)
def test_numbers_that_have_no_bits_to_reduce_are_refused() -> None:
    with distributed() as (rank, size):
        for op in BITS:
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
                ones = torch.ones(2, dtype=dtype)
                calls = (
                    functools.partial(dist.all_reduce, ones, op),
                    functools.partial(dist.reduce, ones, 0, op),
                    functools.partial(dist.reduce_scatter_tensor, ones, ones.repeat(size), op),
                )
                for call in calls:
                    error = raised(call)
                    assert isinstance(error, ValueError), (op, dtype, error)
        with pytest.raises(hvd.HorovodInternalError, match="int16") as told:
            dist.all_reduce(torch.ones(2, dtype=torch.int16 if rank else torch.int8), dist.ReduceOp.BXOR)
        assert isinstance(told.value, hvd.Mismatch)
        dist.all_reduce(mine := torch.tensor([1 << rank]), dist.ReduceOp.BOR)
        assert mine.tolist() == [3]


def test_a_reduction_that_torch_may_add_is_refused_and_never_a_sum() -> None:
    with pytest.raises(ValueError, match="'MEDIAN'.* use one of SUM, AVG"):
        reduction(types.SimpleNamespace(reduceOp=types.SimpleNamespace(op="MEDIAN")))


@ranks(3)
def test_send_and_receive() -> None:
    with distributed() as (rank, size):
        right, left = (rank + 1) % size, (rank - 1) % size
        for count in (3, 50_000):
            got, wanted = torch.empty(count), values(left, count)
            sending = dist.isend(values(rank, count), right, tag=5)
            assert dist.recv(got, left, tag=5) == left
            assert sending.wait() and torch.equal(got, wanted)
        first, second = torch.zeros(4), torch.zeros(4)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((4,), float(rank)), right, tag=1),
                dist.P2POp(dist.isend, torch.full((4,), 10.0 + rank), right, tag=2),
                dist.P2POp(dist.irecv, second, left, tag=2),
                dist.P2POp(dist.irecv, first, left, tag=1),
            ]
        )
        for work in works:
            work.wait()
        assert first.tolist() == [float(left)] * 4 and second.tolist() == [10.0 + left] * 4
        if rank:
            dist.send(torch.tensor([rank]), 0)
        else:
            found = {}
            for _ in range(size - 1):
                place = torch.zeros(1, dtype=torch.int64)
                source = dist.recv(place)
                found[source] = place.item()
            assert found == {r: r for r in range(1, size)}
        dist.barrier()  # from any source: nothing else of a fast rank may come before a slow one's
        if rank:
            dist.send_object_list([{"from": rank}], 0)
        else:
            for source in range(1, size):
                box: list[Any] = [None]
                dist.recv_object_list(box, source)
                assert box == [{"from": source}]
        future = (
            (dist.isend if rank == 0 else dist.irecv)(torch.ones(2), 1 - min(rank, 1)) if rank < 2 else None
        )
        if future is not None:
            assert future.get_future().wait()[0].tolist() == [1.0, 1.0]
        if rank < 2:
            place = torch.ones(3) if rank == 0 else torch.ones(3, dtype=torch.int32)
            call = dist.send if rank == 0 else dist.recv
            assert "rank 0 sent float32[3]" in str(raised(lambda: call(place, 1 - rank)))
        dist.barrier()


@ranks(3)
def test_uneven_gather_and_scatter() -> None:
    with distributed() as (rank, size):
        mine = torch.full((rank + 1,), float(rank))
        outputs = [torch.empty(r + 1) for r in range(size)]
        dist.gather(mine, outputs if rank == 2 else None, 2)
        assert rank != 2 or [t.tolist() for t in outputs] == [[float(r)] * (r + 1) for r in range(size)]
        got = torch.empty(rank + 1)
        dist.group.WORLD.scatter([got], [outputs] if rank == 2 else [[]], scatter_from(2)).wait()
        assert got.tolist() == mine.tolist()
        wrong = torch.empty(rank + 2 if rank == 0 else rank + 1)
        work = dist.group.WORLD.scatter([wrong], [outputs] if rank == 2 else [[]], scatter_from(2))
        if rank == 0:
            assert isinstance(raised(work.wait), ValueError)
        else:
            work.wait()
        output, inputs = torch.empty(rank + 1), [torch.ones(r + 1) * (rank + 1) for r in range(size)]
        dist.reduce_scatter(output, inputs)
        assert output.tolist() == [6.0] * (rank + 1)
        dist.barrier()


def scatter_from(root: int) -> Any:
    options = dist.ScatterOptions()
    options.rootRank = root
    return options


@ranks(2)
def test_objects_coalescing_and_functional_collectives() -> None:
    import torch.distributed._functional_collectives as functional

    with distributed() as (rank, size):
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank})
        assert everything == [{"rank": r, "text": "x" * r} for r in range(size)]
        box = [("from", rank)]
        dist.broadcast_object_list(box, 1)
        assert box == [("from", 1)]
        tensors = [torch.full((n,), float(rank + n)) for n in (1, 5, 3)]
        with dist.distributed_c10d._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert [t.tolist() for t in tensors] == [[2 * n + 1.0] * n for n in (1, 5, 3)]
        gathered = [torch.empty(2 * n) for n in (1, 4)]
        scattered = [torch.empty(n) for n in (1, 4)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for n, output in zip((1, 4), gathered, strict=True):
                dist.all_gather_into_tensor(output, torch.full((n,), float(rank)))
        manager.wait()
        with dist.distributed_c10d._coalescing_manager():
            for n, output in zip((1, 4), scattered, strict=True):
                dist.reduce_scatter_tensor(output, torch.arange(2.0 * n) + rank)
        assert [g.tolist() for g in gathered] == [[0.0] * n + [1.0] * n for n in (1, 4)]
        assert [s.tolist() for s in scattered] == [
            [2.0 * (rank * n + i) + 1 for i in range(n)] for n in (1, 4)
        ]
        for waits in (dist.Work.wait, lambda work: work.get_future().wait(), None):
            tensors = [torch.full((n,), float(rank + n)) for n in (1, 200_000)]
            with dist.distributed_c10d._coalescing_manager(
                device=torch.device("cpu"), async_ops=waits is not None
            ) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            if waits is not None:
                (work,) = manager.works
                waits(work)
                assert work.is_completed() and work.is_success()
            assert [t.unique().tolist() for t in tensors] == [[3.0], [400_001.0]]
        whole = functional.all_gather_tensor(torch.full((2, 2), float(rank)), 0, dist.group.WORLD)
        assert torch.equal(whole, torch.arange(2.0).repeat_interleave(4).view(4, 2))
        assert functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).tolist() == [2.0] * 3


@ranks(2)
def test_works_are_asynchronous_and_futures_complete() -> None:
    with distributed() as (rank, _size):
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future().then(lambda f: f.value()[0] * 10)
        assert future.wait().tolist() == [20.0] * 3 and work.is_completed() and work.is_success()
        assert work.result()[0] is x and work.exception() is None
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["late"], timedelta(seconds=30))
        y = torch.ones(3)
        work = dist.all_reduce(y, async_op=True)
        if rank == 0:  # rank 1 starts it only after this
            assert not work.is_completed()
            error = raised(lambda: work.wait(timedelta(seconds=0.05)))
            assert isinstance(error, hvd.Timeout) and "allreduce" in str(error), error
            dist.distributed_c10d._get_default_store().set("late", "now")
        assert work.wait() and y.tolist() == [2.0] * 3
        for _ in range(8):  # long enough that a thread waits for the future
            work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
            future = work.get_future()
            assert work.wait() and future.done() and future.value()[0][-1] == 2.0
        for _ in range(20):
            for _ in range(100):
                dist.all_reduce(torch.ones(2), async_op=True)
            dist.barrier()
        assert len(dist.group.WORLD._flight._works) <= 500  # those that nobody waits for end by themselves
        dist.all_reduce(torch.ones(1))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.wait(["asked"], timedelta(seconds=30))
            dist.send(torch.ones(1), 1)
        else:
            future = dist.irecv(torch.ones(1), 0).get_future()
            # It has not come in half a millisecond, so a thread waits for it.
            assert any(thread.name.startswith("hc-c10d") for thread in threading.enumerate())
            store.set("asked", "now")
            future.wait()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hc-c10d")]


@ranks(2)
def test_a_callback_may_wait_for_operations() -> None:
    with distributed() as (rank, _):
        first, second = torch.ones(2), torch.ones(2)
        works = [dist.all_reduce(x, async_op=True) for x in (first, second)]
        futures = [work.get_future() for work in works]

        def then(done: Any) -> float:
            futures[1].wait()  # of an operation behind this one
            third = dist.all_reduce(torch.full((2,), rank + 1.0), async_op=True)
            inner = third.get_future().then(lambda f: works[0].get_future().wait() and f.value()[0].sum())
            return float(inner.wait() + works[1].result()[0].sum() + done.value()[0].sum())

        assert futures[0].then(then).wait() == 6.0 + 4.0 + 4.0


@ranks(2)
def test_blocking_collectives_of_plain_tensors_need_no_work() -> None:
    with distributed() as (rank, size):
        group: Any = dist.group.WORLD
        works, group._work = [], lambda *args, **more: works.append(args)
        for factor in (1.0, 2.0, 3.0):  # the calls repeat: the second and third take the core's own short way
            summed, mean = torch.full((3, 2), rank + factor), torch.full((300_000,), rank + factor)
            dist.all_reduce(summed)
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            dist.broadcast(copied := torch.full((5,), rank * factor, dtype=torch.bfloat16), 1)
            dist.all_gather_into_tensor(gathered := torch.empty(size, 4), torch.full((4,), rank + factor))
            dist.reduce_scatter_tensor(share := torch.empty(2), torch.arange(2.0 * size) * factor)
            dist.barrier()
            assert summed.eq(1 + 2 * factor).all() and mean.eq(0.5 + factor).all()
            assert copied.eq(factor).all() and gathered[:, 0].tolist() == [factor, 1 + factor]
            assert share.tolist() == [4 * factor * rank, (4 * rank + 2) * factor]
        assert not works, "a work was made"
        del group._work
        strided = torch.full((3, 2), rank + 1.0).t()
        dist.all_reduce(strided)  # is copied
        assert strided.eq(3).all()
        failed = raised(lambda: dist.all_reduce(torch.ones(2 + rank)))
        assert isinstance(failed, hvd.Mismatch), failed
        dist.all_reduce(after := torch.ones(2))
        assert after.tolist() == [2, 2]


@ranks(3)
def test_groups_are_independent() -> None:
    with distributed() as (rank, _):
        low, high = dist.new_group([0, 1]), dist.new_group([1, 2])
        alone = dist.new_group([2], use_local_synchronization=True) if rank == 2 else None
        twin = dist.new_group([0, 1])
        x = torch.tensor([float(rank)])
        if rank == 1:  # the same ranks in another order: nothing waits for the other group
            second = dist.all_reduce(x.clone(), group=high, async_op=True)
            first = dist.all_reduce(x.clone(), group=low, async_op=True)
            third = dist.all_reduce(x.clone(), group=twin, async_op=True)
            assert [w.result()[0].item() for w in (first, second, third)] == [1.0, 3.0, 1.0]
        if rank == 0:
            third = dist.all_reduce(x.clone(), group=twin, async_op=True)
            first = dist.all_reduce(x.clone(), group=low, async_op=True)
            assert first.result()[0].item() == 1.0 and third.result()[0].item() == 1.0
        if rank == 2:
            assert dist.all_reduce(x.clone(), group=high, async_op=True).result()[0].item() == 3.0
            y = torch.ones(1)
            dist.all_reduce(y, group=alone)
            assert y.item() == 1.0
        got = torch.full((1,), float(rank))
        if rank < 2:
            dist.broadcast(got, 1, group=low)
            assert got.item() == 1.0
        before = hvd.allreduce(torch.ones(1), op=hvd.Sum)  # hvd's own world is another one
        assert before.item() == 3.0


@ranks(2)
def test_a_mismatch_is_raised_from_wait_and_the_group_goes_on() -> None:
    with distributed() as (rank, _):
        work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
        assert isinstance(raised(work.wait), hvd.Mismatch)
        assert isinstance(raised(work.get_future().wait), Exception)
        future = dist.all_reduce(torch.ones(3 + rank), async_op=True).get_future()
        assert "torch.float32" in str(raised(future.wait)) or "float32[" in str(raised(future.wait))
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2.0, 2.0]
        meta = torch.ones(2, device="meta")
        assert isinstance(raised(lambda: dist.all_reduce(meta)), hvd.Unsupported)


@ranks(2)
def test_a_time_limit_that_was_asked_for_is_kept() -> None:
    with distributed(timeout=timedelta(seconds=2)) as (rank, _):
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            error = raised(lambda: dist.all_reduce(torch.ones(2)))
            assert isinstance(error, hvd.Timeout) and "2 s" in str(error), error
            store.set("over", "yes")
        else:
            store.wait(["over"], timedelta(seconds=30))
            assert isinstance(raised(lambda: dist.all_reduce(torch.ones(2))), hvd.HorovodInternalError)


@ranks(3)
def test_a_monitored_barrier_speaks_gloos_words_on_every_rank_that_came() -> None:
    with distributed() as (rank, _):
        group = dist.new_group()
        group.monitored_barrier(timedelta(seconds=30))
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["said/0", "said/2"], timedelta(seconds=50))
            return
        error = raised(lambda: group.monitored_barrier(timedelta(seconds=2)))
        wanted = {
            0: "Rank 1 failed to pass monitoredBarrier",
            2: "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0",
        }
        assert isinstance(error, hvd.Timeout) and wanted[rank] in str(error), error
        store.set(f"said/{rank}", "yes")
        store.wait(["said/0", "said/2"], timedelta(seconds=50))


@ranks(2)
def test_a_monitored_barrier_without_time_does_not_wait() -> None:
    """It took a time limit of 0 for none and waited for torch's 30 minutes."""
    with distributed() as (rank, _):
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            error = raised(lambda: dist.group.WORLD.monitored_barrier(timedelta(0)))
            assert isinstance(error, hvd.Timeout), error
            assert "Rank 0 timed out in monitoredBarrier after 0 ms" in str(error)
            store.set("said", "yes")
        store.wait(["said"], timedelta(seconds=30))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64)
        self.second = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


# Freeing a DDP with its gloo group can deadlock with gloo's threads, in torch 2.13
never_freed: list[Any] = []


def ddp_gradients(backend: str, hook: Any = None, **more: Any) -> list[torch.Tensor]:
    with distributed(backend) as (rank, _):
        torch.manual_seed(rank)  # DDP gives everybody rank 0's parameters
        model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.001, **more)
        never_freed.append(dist.group.WORLD if backend == "gloo" else None)
        if hook is not None:
            model._register_builtin_comm_hook(hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            chance = torch.Generator().manual_seed(10 * step + rank)
            (model(torch.randn(8, 20, generator=chance)) ** 2).mean().backward()
            optimizer.step()
        return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


@ranks(2)
def test_ddp_computes_the_gradients_that_gloo_computes() -> None:
    half = {"hook": dist.BuiltinCommHookType.FP16_COMPRESS}
    for more in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, half):
        for ours, gloos in zip(
            ddp_gradients("horoclone", **more), ddp_gradients("gloo", **more), strict=True
        ):
            assert torch.equal(ours, gloos), (more, ours - gloos)


@ranks(2)
def test_ddps_join_can_divide_by_the_ranks_that_have_batches_left() -> None:
    with distributed() as (rank, _):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        gradients = []
        with model.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                model.zero_grad()
                model(torch.full((1, 1), 1.0 + rank)).sum().backward()
                gradients.append(model.module.weight.grad.item())
        assert gradients == [1.5, 2.0][: 1 + rank]


PROGRAM = """
import sys
import torch, torch.distributed as dist
import horoclone.torch as hvd
if "hvd" in sys.argv:
    hvd.init()
dist.init_process_group("horoclone")
x = torch.full((2,), dist.get_rank() + 1.0)
dist.all_reduce(x)
size = dist.get_world_size()
assert x.tolist() == [size * (size + 1) / 2] * 2 and dist.get_backend() == "horoclone"
if "hvd" in sys.argv:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
if "leave" not in sys.argv:
    dist.destroy_process_group()
sys.stdout.write(f"rank {dist.get_rank() if 'leave' in sys.argv else ''} of {size} is content\\n")
"""


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["horoclonerun", "mpirun", "alone", "torchrun"])
def test_under_every_launcher(how: str, launch: Any, tmp_path: Path, request: Any) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env: dict[str, str] = {}
    if how == "mpirun":
        mpi = request.getfixturevalue("open_mpi")
        command, env = [*mpi.command(2), sys.executable, script, "hvd"], mpi.env
    elif how == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, "hvd"]
    elif how == "horoclonerun":
        command = [sys.executable, "-m", "horoclone.launch.cli", "-np", "2", sys.executable, script, "leave"]
    else:
        command = [sys.executable, script]
    done = launch(command, env=env, timeout_s=120)
    assert done.stdout.count("is content") == (1 if how == "alone" else 2), done.output


@ranks(3)
def test_results_of_one_size_are_written_where_the_caller_wants_them() -> None:
    from horoclone.torch.c10d import group as module

    def copied(*_: Any) -> torch.Tensor:
        raise AssertionError("the core owned the result")

    with distributed() as (rank, size):
        before, module.rows_of = module.rows_of, copied
        try:
            for count in (3, 100_000):
                whole, mine = torch.empty(size * count), torch.full((count,), rank + 1.0)
                dist.all_gather_into_tensor(whole, mine)
                assert torch.equal(whole.view(size, count)[:, 0], torch.arange(1.0, size + 1))
                whole.chunk(size)[rank].fill_(rank + 5.0)
                dist.all_gather_into_tensor(whole, whole.chunk(size)[rank])  # in place
                assert torch.equal(whole.view(size, count)[:, -1], torch.arange(5.0, size + 5))
                dist.reduce_scatter_tensor(mine, whole)
                assert mine.eq(size * (rank + 5.0)).all()
        finally:
            module.rows_of = before
        dist.reduce_scatter_tensor(whole[: whole.numel() // size], whole)  # in the input's own memory
        assert whole[: whole.numel() // size].eq(size * (rank + 5.0)).all()
        error = raised(
            lambda: dist.all_gather_into_tensor(torch.empty(size * (3 + rank)), torch.ones(3 + rank))
        )
        assert isinstance(error, ValueError) and "different sizes" in str(error), error


@ranks(2)
def test_what_a_functional_collective_has_promised_is_waited_for() -> None:
    from torch.distributed import _functional_collectives as functional

    with distributed() as (rank, size):

        def promised() -> torch.Tensor:
            found = functional.all_reduce(torch.full((40_000,), rank + 1.0), "sum", dist.group.WORLD)
            assert isinstance(found, functional.AsyncCollectiveTensor)
            return found

        target = torch.empty(40_000)
        sent = promised()
        (dist.isend(sent, 1) if rank == 0 else dist.irecv(target, 0)).wait()  # type: ignore[union-attr]
        assert rank == 0 or target.eq(3).all()
        whole, half = torch.empty(size, 40_000), torch.empty(20_000)
        dist.all_gather_into_tensor(whole, promised())
        dist.reduce_scatter_tensor(half, promised())
        assert whole.eq(3).all() and half.eq(6).all()
        dist.all_reduce(again := promised())
        assert (again + 0).eq(6).all()
        dist.all_to_all_single(target, promised())
        assert target.eq(3).all()


@ranks(2)
def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    with distributed() as (_, size):
        tensor = distribute_tensor(torch.ones(8, 8), dist.init_device_mesh("cpu", (size,)), [Shard(0)])
        for call in (
            lambda: dist.all_reduce(tensor),
            lambda: hvd.allreduce(tensor),
            lambda: hvd.broadcast_(tensor, 0),
        ):
            error = raised(call)
            assert "DTensor" in str(error) and "to_local" in str(error), error


def test_a_time_limit_that_was_shortened_does_not_wait_for_older_ones() -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work(name: str) -> Any:
        return types.SimpleNamespace(is_done=lambda: False, expire=lambda: expired.put(name))

    flight = InFlight(None, 0, [0])  # type: ignore[arg-type]
    for name, limit_s in (("first", 60.0), ("second", 0.05), ("third", 30.0)):
        flight.limit(work(name), limit_s)
    assert expired.get(timeout=20) == "second"
    flight.close()
