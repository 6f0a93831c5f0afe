"""One rank of test_torchcomms.py: every operation of a communicator, ended at once and later, beside what it must be."""

import sys
import types
from datetime import timedelta
from typing import Any

import pytest
import torch
import torchcomms
from torchcomms import RedOpType, ReduceOp

import horoclone.torch as hvd
import horoclone.torch.torchcomms as ours


def part(rank: int, n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 100 * rank + 1


def check_operations(comm: Any) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    parts = [part(r, 4 * size) for r in range(size)]
    total, mine = torch.stack(parts).sum(0), slice(4 * rank, 4 * rank + 4)
    reductions = {
        ReduceOp.SUM: total, ReduceOp.AVG: total / size, ReduceOp.MIN: parts[0], ReduceOp.MAX: parts[-1],
        ReduceOp.PRODUCT: torch.stack(parts).prod(0), ReduceOp.PREMUL_SUM(0.5): total / 2,
    }  # fmt: skip
    for async_op in (False, True):

        def run(call: Any, *args: Any, async_op: bool = async_op) -> None:
            call(*args, async_op).wait()

        for op, wanted in reductions.items():
            x = parts[rank].clone()
            run(comm.all_reduce, x, op)
            assert torch.allclose(x, wanted), op.type
            x = parts[rank].clone()
            run(comm.reduce, x, size - 1, op)
            assert torch.allclose(x, wanted if rank == size - 1 else parts[rank]), op.type
        bits = torch.full((3,), 1 << rank)
        run(comm.all_reduce, bits, ReduceOp.BOR)
        assert bits.tolist() == [(1 << size) - 1] * 3
        x = parts[rank].clone()
        run(comm.broadcast, x, size - 1)
        assert torch.equal(x, parts[-1])
        outputs = [torch.empty(4 * size) for _ in parts]
        run(comm.all_gather, outputs, parts[rank])
        assert all(torch.equal(a, b) for a, b in zip(outputs, parts, strict=True))
        uneven = [torch.empty(r + 1) for r in range(size)]
        run(comm.all_gather_v, uneven, part(rank, rank + 1))
        assert all(torch.equal(o, part(r, r + 1)) for r, o in enumerate(uneven))
        out = torch.empty(4 * size * size)
        run(comm.all_gather_single, out, parts[rank])
        assert torch.equal(out, torch.cat(parts))
        out = torch.empty(4)
        run(comm.reduce_scatter, out, list(parts[rank].chunk(size)), ReduceOp.SUM)
        assert torch.equal(out, total[mine])
        out = torch.empty(4)
        run(comm.reduce_scatter_single, out, parts[rank], ReduceOp.SUM)
        assert torch.equal(out, total[mine])
        out = torch.empty(rank + 1)
        run(comm.reduce_scatter_v, out, [part(rank, r + 1) for r in range(size)], ReduceOp.SUM)
        assert torch.equal(out, sum(part(r, rank + 1) for r in range(size)))
        exchanged = torch.cat([p[mine] for p in parts])
        out = torch.empty(4 * size)
        run(comm.all_to_all_single, out, parts[rank])
        assert torch.equal(out, exchanged)
        outputs = [torch.empty(4) for _ in parts]
        run(comm.all_to_all, outputs, list(parts[rank].chunk(size)))
        assert torch.equal(torch.cat(outputs), exchanged)
        rows = [r + 1 for r in range(size)]
        out = torch.empty(size * (rank + 1))
        source = part(rank, sum(rows))
        run(comm.all_to_all_v_single, out, source, [rank + 1] * size, rows)
        at = sum(rows[:rank])
        assert torch.equal(out, torch.cat([part(r, sum(rows))[at : at + rank + 1] for r in range(size)]))
        out = torch.empty(4)
        run(comm.scatter, out, list(parts[0].chunk(size)) if rank == 0 else [], 0)
        assert torch.equal(out, parts[0][mine])
        outputs = [torch.empty(4 * size) for _ in parts] if rank == 0 else []
        run(comm.gather, outputs, parts[rank], 0)
        assert all(torch.equal(a, b) for a, b in zip(outputs, parts, strict=False))
        comm.barrier(async_op).wait()
        if size > 1:
            got = torch.empty(4 * size)
            batch = comm.batch_op_create()
            batch.recv(got, (rank - 1) % size)
            batch.send(parts[rank], (rank + 1) % size)
            batch.issue(async_op).wait()
            assert torch.equal(got, parts[rank - 1])
            if rank == 0:
                comm.send(parts[0], 1, async_op).wait()
            elif rank == 1:
                comm.recv(got, 0, async_op).wait()
                assert torch.equal(got, parts[0])


def main() -> None:
    comm = torchcomms.new_comm("horoclone", torch.device("cpu"), name="all", timeout=timedelta(seconds=60))
    rank, size = comm.get_rank(), comm.get_size()
    assert comm.get_backend() == comm.get_backend_name() == "horoclone" and comm.get_comm_name() == "all"
    check_operations(comm)
    if size > 1:
        # Errors leave it usable.
        x = torch.ones(3 + rank)
        with pytest.raises(hvd.Mismatch):
            comm.all_reduce(x, ReduceOp.SUM, False)
        y = torch.ones(3, dtype=torch.float32 if rank == 0 else torch.int32)
        with pytest.raises(hvd.Mismatch, match="int32"):
            comm.all_reduce(y, ReduceOp.SUM, True).wait()
        unknown = types.SimpleNamespace(type=RedOpType.PREMUL_SUM)
        with pytest.raises(hvd.Unsupported, match="does not tell"):
            comm.all_reduce(y, unknown, False)
        with pytest.raises(ValueError, match="different ranks"):
            comm.split([rank, rank], "twice")
        with pytest.raises(ValueError, match="bitwise"):
            comm.all_reduce(x, ReduceOp(RedOpType.BAND), False)
        others = list(range(1, size))
        child = comm.split([0] if rank == 0 else others, "part")
        assert child.get_size() == (1 if rank == 0 else size - 1) and child.get_rank() == max(0, rank - 1)
        check_operations(child)
        assert (comm.split([0] if rank == 0 else [], "alone") is None) == (rank != 0)
        child.finalize()
        check_operations(comm)
        late = comm.split(list(range(size)), "late")
        late.set_timeout(timedelta(seconds=1))
        if rank == 0:
            with pytest.raises(hvd.Timeout, match="1"):
                late.all_reduce(x, ReduceOp.SUM, False)
        comm.barrier(False).wait()
        late.finalize()
        # Others, in another order; and one fewer.
        mine = comm.get_init_handle()
        handles = hvd_handles(comm, mine)
        comm.reconfigure(7, handles[::-1], timedelta(seconds=60)).wait()
        assert (comm.get_rank(), comm.get_size()) == (size - 1 - rank, size)
        check_operations(comm)
        with pytest.raises(ValueError, match="this process's"):
            comm.reconfigure(8, [h for h in handles if h != mine], timedelta(seconds=60))
        if rank < size - 1:
            comm.reconfigure(9, set(handles[:-1]), timedelta(seconds=60)).wait()
            assert comm.get_size() == size - 1
            check_operations(comm)
    comm.finalize()
    comm.finalize()
    assert comm.get_rank() == -1
    with pytest.raises(hvd.Unsupported):
        comm.barrier(False)
    assert isinstance(ours.TorchCommHoroclone(), ours.TorchCommBackend)
    sys.stdout.write(f"rank {rank} of {size} is content\n")


def hvd_handles(comm: Any, mine: str) -> list[str]:
    """Everybody's, in the order of the ranks."""
    bytes_ = torch.tensor(list(mine.encode()), dtype=torch.uint8)
    size = comm.get_size()
    outputs = [torch.empty_like(bytes_) for _ in range(size)]
    comm.all_gather(outputs, bytes_, False)
    return [bytes(o.tolist()).decode() for o in outputs]


main()
