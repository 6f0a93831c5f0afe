"""torch.distributed: dtypes that differ are an error by name, among ranks and between input and output, never other numbers."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import distributed, ranks

import horoclone.torch as hvd

PAIRS = [
    (torch.int32, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.bool, torch.uint8),
]  # of one size


def moves(dtype: torch.dtype) -> list[Callable[[], Any]]:
    """What only moves data, with tensors of that dtype on this rank."""

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, dtype=dtype)

    me = dist.get_rank()
    return [
        lambda: dist.broadcast(ones(2), 0),
        lambda: dist.all_gather([ones(1), ones(1)], ones(1)),
        lambda: dist.all_gather_into_tensor(ones(2), ones(1)),
        lambda: dist.all_to_all_single(ones(2), ones(2)),
        lambda: dist.all_to_all_single(ones(2), ones(2), [1, 1], [1, 1]),
        lambda: dist.all_to_all([ones(1), ones(1)], [ones(1), ones(1)]),
        lambda: dist.gather(ones(1), [ones(1), ones(1)] if me else None, 1),
        lambda: dist.broadcast(ones(2), 0, async_op=True).wait(),
        lambda: dist.all_gather_into_tensor(ones(2), ones(1), async_op=True).wait(),
    ]


@ranks(2)
def test_of_ranks() -> None:
    with distributed():
        for _ in range(2):  # a blocking call of plain tensors is shorter from the second on
            for pair in PAIRS:
                names = [str(dtype).removeprefix("torch.") for dtype in pair]
                for call in moves(pair[dist.get_rank()]):
                    with pytest.raises(
                        hvd.Mismatch, match=rf"rank 1 announced {names[1]}.*rank 0 announced {names[0]}"
                    ):
                        call()
                for call in moves(pair[0]):
                    call()
        output = torch.ones(2, dtype=PAIRS[0][dist.get_rank()])
        if dist.get_rank():  # the root is right: only who gets the wrong kind can see it
            dist.scatter(output, [output, output], 1)
        else:
            with pytest.raises(ValueError, match=r"sent torch\.float32, and an output is torch\.int32"):
                dist.scatter(output, None, 1)
        dist.barrier()


@ranks(2)
def test_of_input_and_output() -> None:
    with distributed():
        for _ in range(2):
            for one, other in PAIRS:
                with pytest.raises(ValueError, match=f"the output is {one}, the input {other}"):
                    dist.all_gather_into_tensor(torch.ones(2, dtype=one), torch.ones(1, dtype=other))
                with pytest.raises(ValueError, match=f"the output is {one}, the input {other}"):
                    dist.reduce_scatter_tensor(torch.ones(1, dtype=one), torch.ones(2, dtype=other))
            total = torch.ones(2)
            dist.all_reduce(total)
            assert total.tolist() == [2.0, 2.0]


@ranks(2)
def test_several_dtypes_in_one_operation() -> None:
    """Coalesced operations move tensors of several dtypes together, as bytes."""
    with distributed():
        me = dist.get_rank()
        sources = [torch.tensor([1.5 + me]), torch.tensor([7 + me, 8], dtype=torch.int64)]
        outputs = [torch.zeros(2), torch.zeros(4, dtype=torch.int64)]
        dist.distributed_c10d._get_default_group().allgather_into_tensor_coalesced(outputs, sources).wait()
        assert outputs[0].tolist() == [1.5, 2.5] and outputs[1].tolist() == [7, 8, 8, 8]
