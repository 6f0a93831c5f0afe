"""Plain tensors through torch.distributed without blocking: one crossing into the core, ended in every way."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from world import distributed, ranks

from horoclone.torch.c10d.work import PlainWork


def polled(work: Any) -> None:
    until = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < until
    work.wait()


KINDS = (
    "all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "all_gather", "gather", "reduce_scatter",
    "exchange", "exchange_parts", "exchange_lists", "barrier", "messages",
)  # fmt: skip
ENDS = (
    lambda work: work.wait(),
    lambda work: work.wait(timedelta(seconds=60)),
    polled,
    lambda work: work.get_future().wait(),
    lambda work: (time.sleep(0.003), work.wait()),
)


@ranks(1, 3)
def test_every_operation_ended_in_every_way() -> None:
    with distributed() as (rank, size):
        same, own = random.Random(7), random.Random(rank)
        for step in range(120):
            n = same.choice((1, 4, 300, 20_000))
            parts = [torch.arange(n * size, dtype=torch.float64) + 1000 * r + step for r in range(size)]
            mine, total = parts[rank].clone(), torch.stack(parts).sum(0)
            chunk = slice(rank * n, (rank + 1) * n)
            kind = same.choice(KINDS)
            works, root = [], same.randrange(size)
            if kind == "all_reduce":
                works, got, wanted = [dist.all_reduce(mine, async_op=True)], mine, total
            elif kind == "broadcast":
                works, got, wanted = [dist.broadcast(mine, root, async_op=True)], mine, parts[root]
            elif kind == "reduce":
                works, got = [dist.reduce(mine, root, async_op=True)], mine
                wanted = total if rank == root else parts[rank]
            elif kind == "all_gather_into_tensor":
                got, wanted = torch.empty(n * size * size, dtype=torch.float64), torch.cat(parts)
                works = [dist.all_gather_into_tensor(got, mine, async_op=True)]
            elif kind in ("all_gather", "gather"):
                whole = torch.zeros(size, n * size + step % 2, dtype=torch.float64)  # with and without gaps
                outputs = list(whole[:, : n * size])
                if kind == "all_gather":
                    works, wanted = [dist.all_gather(outputs, mine, async_op=True)], torch.stack(parts)
                else:
                    outputs = outputs if rank == root else None
                    works = [dist.gather(mine, outputs, root, async_op=True)]
                    wanted = torch.stack(parts) if rank == root else torch.zeros(size, n * size)
                got = whole[:, : n * size]
            elif kind == "reduce_scatter":
                got, wanted = torch.empty(n, dtype=torch.float64), total[chunk]
                works = [dist.reduce_scatter_tensor(got, mine, async_op=True)]
            elif kind == "exchange":
                got, wanted = torch.empty_like(mine), torch.cat([part[chunk] for part in parts])
                works = [dist.all_to_all_single(got, mine, async_op=True)]
            elif kind in ("exchange_parts", "exchange_lists"):
                # Rank r gives rank d some of what it has, more to those behind it.
                cuts = [
                    [n * size // (2 * size + (r + 2 * d + step % 3) % 4) for d in range(size)]
                    for r in range(size)
                ]
                cut = [part[: sum(rows)].split(rows) for part, rows in zip(parts, cuts, strict=True)]
                wanted = torch.cat([of_rank[rank] for of_rank in cut])
                sent, awaited = cuts[rank], [rows[rank] for rows in cuts]
                got = torch.zeros_like(wanted)
                if kind == "exchange_parts":
                    works = [dist.all_to_all_single(got, mine[: sum(sent)], awaited, sent, async_op=True)]
                else:
                    works = [dist.all_to_all(list(got.split(awaited)), list(cut[rank]), async_op=True)]
            elif kind == "barrier":
                works, got, wanted = [dist.barrier(async_op=True)], mine, parts[rank]
            else:
                got, wanted = torch.empty_like(mine), parts[rank - 1]
                if size > 1:
                    works = [dist.irecv(got, (rank - 1) % size), dist.isend(mine, (rank + 1) % size)]
                else:
                    got = wanted
            own.shuffle(works)
            for work in works:
                own.choice(ENDS)(work)
                assert work.is_success() and work.exception() is None
            assert torch.equal(got, wanted), (kind, step)


@ranks(2)
def test_functional_collectives_take_the_same_way() -> None:
    with distributed() as (rank, _):
        x = torch.arange(4.0) + rank
        group = dist.group.WORLD
        for _ in range(20):
            summed = functional.all_reduce(x, "sum", group).wait()
            assert summed.tolist() == [1.0, 3.0, 5.0, 7.0]
            assert functional.all_gather_single(x, 0, group).wait().tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
            assert (
                functional.reduce_scatter_single(x, "sum", 0, group).wait().tolist()
                == summed[2 * rank : 2 * rank + 2].tolist()
            )
            for splits in (None, [2, 2]):
                exchanged = functional.all_to_all_single(x, splits, splits, group).wait()
                assert exchanged.tolist() == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 1, 2.0 * rank + 2]


@ranks(2)
def test_sizes_that_differ_are_told_when_the_work_is_waited_for() -> None:
    with distributed() as (rank, _):
        for waits in (True, False):
            n = 4 + 4 * rank
            out, mine, cuts = torch.zeros(2 * n), torch.ones(n), [n // 4, 3 * n // 4]
            calls = (
                (out, lambda **more: dist.all_gather_into_tensor(out, mine, **more)),  # noqa: B023
                (out, lambda **more: dist.all_gather(list(out.chunk(2)), mine, **more)),  # noqa: B023
                (out[:n], lambda **more: dist.all_to_all_single(out[:n], mine, **more)),  # noqa: B023
                (out[:n], lambda **more: dist.all_to_all_single(out[:n], mine, cuts, cuts, **more)),  # noqa: B023
                (out[:4], lambda **more: dist.all_to_all_single(out[:4], mine, [2, 2], cuts, **more)),  # noqa: B023
                (out, lambda **more: dist.all_to_all([out[:n], out[n:]], list(mine.chunk(2)), **more)),  # noqa: B023
            )
            for target, call in calls:
                with pytest.raises(ValueError, match="different sizes|ranks sent"):
                    call() if waits else call(async_op=True).wait()
                assert not target.any()
                x = torch.ones(3)
                dist.all_reduce(x)
                assert x.tolist() == [2.0, 2.0, 2.0]


@ranks(2)
def test_all_gather_fills_what_lies_in_one_memory_and_what_does_not() -> None:
    with distributed() as (rank, _):
        x = torch.arange(3.0) + 10 * rank
        wanted = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
        whole = torch.empty(9)
        forms = (
            list(torch.empty(6).chunk(2)),  # one behind the other
            list(torch.empty(2, 3)),
            [whole[:3], whole[4:7]],
            [whole[3:6], whole[:3]],
            [torch.empty(3), torch.empty(3)],
            list(torch.empty(3, 2).t()),
            list(torch.zeros(6, dtype=torch.complex64).conj().imag.view(2, 3)),
        )
        for outputs in forms:
            dist.all_gather(outputs, x)
            assert [o.tolist() for o in outputs] == wanted
            for o in outputs:
                o.zero_()
            work = dist.all_gather(outputs, x, async_op=True)
            work.wait()
            assert all(a is b for a, b in zip(work.result(), outputs, strict=True))
            assert [o.tolist() for o in outputs] == wanted
        row = torch.zeros(6)
        row[3 * rank : 3 * rank + 3] = x
        dist.all_gather(list(row.chunk(2)), row[3 * rank : 3 * rank + 3])  # in place
        assert row.view(2, 3).tolist() == wanted
        found: list[Any] = [None, None]
        for step in range(30):
            dist.all_gather_object(found, {"rank": rank, "text": "x" * (step * rank)})
            assert found == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * step}]
        uneven = [torch.empty(3 + r) for r in range(2)]
        dist.all_gather(uneven, torch.full((3 + rank,), float(rank)))
        assert [o.tolist() for o in uneven] == [[0.0] * 3, [1.0] * 4]
        with pytest.raises(ValueError, match="different sizes|elements"):
            dist.all_gather(list(torch.empty(2, 3 + rank)), torch.ones(3 + rank))
        dist.all_reduce(x)


@ranks(2)
def test_a_message_that_nobody_waits_for_arrives() -> None:
    with distributed() as (rank, _):
        for elements in (5, 5000, 15_000):
            x = torch.full((elements,), 1.0 + rank)
            dist.all_reduce(torch.ones(3))
            if rank == 0:
                work = dist.isend(x, 1)
                assert isinstance(work, PlainWork)
                time.sleep(0.2)
                dist.barrier()
                work.wait()
            else:
                dist.recv(x, 0)
                assert x.eq(1).all()
                dist.barrier()


@ranks(2)
def test_collectives_that_nobody_waits_for_are_over_after_a_barrier() -> None:
    with distributed() as (rank, size):
        for profiled in (False, True):
            total, apart = torch.full((300_000,), 1.0 + rank), [torch.zeros(2) for _ in range(size)]
            share, parts = torch.zeros(2), [torch.full((2,), 1.0 + r) for r in range(size)]
            for begin in (
                lambda t=total: dist.all_reduce(t, async_op=True),
                lambda a=apart: dist.all_gather(a, torch.full((2,), 1.0 + rank), async_op=True),
                lambda s=share, p=parts: dist.scatter(s, p if rank == 0 else None, async_op=True),
            ):
                begin()
            with torch.profiler.profile() if profiled else contextlib.nullcontext():
                dist.barrier()
            assert total.eq(3).all() and share.eq(1 + rank).all()
            assert torch.equal(torch.stack(apart), torch.stack(parts))


@ranks(2)
def test_a_wait_with_a_limit_may_be_repeated_and_needs_no_thread() -> None:
    with distributed(timeout=timedelta(seconds=60)) as (rank, _):
        x = torch.ones(3)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            with pytest.raises(Exception, match="wait\\(\\) may be called again"):
                work.wait(timedelta(seconds=0.2))
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(x)
        assert x.tolist() == [2.0, 2.0, 2.0]
        before = threading.active_count()
        for _ in range(5):
            dist.all_reduce(x, async_op=True).wait(timedelta(seconds=30))
        assert threading.active_count() == before
