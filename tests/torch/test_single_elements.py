"""A single element cut out of a wider tensor is contiguous for torch whatever its stride, and its memory is not a row."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import torch
import torch.distributed as dist
from world import ranks

import horoclone.torch as hvd
from horoclone.torch.operations.tensors import bytes_of
from horoclone.torch.optimizer.resharding import boxed, unboxed


def element(value: float) -> torch.Tensor:
    wide = torch.zeros(3, 4)
    wide[0, 1] = value
    cut = wide[0:1].t()[1]  # stride 4
    assert cut.is_contiguous() and cut.stride() == (4,) and cut.tolist() == [value]
    return cut


def test_bytes_share_the_memory_of_what_lies_in_order() -> None:
    cut = element(1.0)
    bytes_of(cut).zero_()
    assert cut.tolist() == [0.0]
    assert bytes_of(torch.zeros(0, 3)).shape == (0,) and bytes_of(torch.tensor(2.0)).numel() == 4
    assert torch.equal(unboxed(boxed(element(5.0)), cut), torch.tensor([5.0]))


@ranks(2)
def test_every_operation_takes_one() -> None:
    """Of torch.distributed the others: test_c10d_layouts.py."""
    dist.init_process_group("horoclone")
    try:
        me = dist.get_rank()
        for _ in range(2):  # a blocking call of plain tensors is shorter from the second on
            flat = torch.zeros(2)
            dist.all_gather_into_tensor(flat, element(1.0 + me))
            assert flat.tolist() == [1.0, 2.0]
            one = element(0.0)
            dist.reduce_scatter_tensor(one, torch.tensor([1.0, 2.0]))
            assert one.tolist() == [2.0 + 2.0 * me]
            dist.reduce_scatter(one, [element(1.0), element(2.0)])
            assert one.tolist() == [2.0 + 2.0 * me]
    finally:
        dist.destroy_process_group()
    assert hvd.allreduce(element(1.0 + me), op=hvd.Sum).tolist() == [3.0]
    assert hvd.broadcast_(element(1.0 + me), 1).tolist() == [2.0]
    assert hvd.allgather(element(1.0 + me)).tolist() == [1.0, 2.0]
    state = {"one": element(1.0 + me)}
    hvd.broadcast_parameters(state, 1)
    assert state["one"].tolist() == [2.0]
    parameter = torch.nn.Parameter(element(1.0))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = element(1.0 + me)
    optimizer.step()
    optimizer.state[parameter]["momentum_buffer"] = element(3.0 + me)
    hvd.broadcast_optimizer_state(optimizer, 1)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [4.0]
