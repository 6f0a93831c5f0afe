"""Every operation on torch tensors, for every dtype, against what one process computes from all ranks' inputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from world import ranks

import horoclone.torch as hvd
from horoclone.torch.operations import grouped
from horoclone.torch.operations.tensors import bytes_of, number_of
from horoclone.torch.optimizer.resharding import boxed, unboxed

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64]
EVERY_DTYPE = [torch.bool, *INTEGERS, *FLOATS]
SHAPES = [(), (0,), (1,), (17,), (3, 5), (2, 0, 3), (4, 3, 2, 5)]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: exact in every dtype, sums of four included. The same for the same arguments."""
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    low = 0 if dtype in (torch.bool, torch.uint8, torch.uint16) else -3
    return torch.randint(low, 2 if dtype is torch.bool else 4, shape, generator=chance).to(dtype)


def everybody(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [values(r, shape, dtype, seed) for r in range(hvd.size())]


def reduced(parts: list[torch.Tensor], op: int) -> torch.Tensor:
    """The reduction in int64 or float64, cast back."""
    dtype = parts[0].dtype
    wide = torch.stack([p.to(torch.float64 if dtype.is_floating_point else torch.int64) for p in parts])
    if dtype is torch.bool:
        return (wide.amax(0) if op in (hvd.Sum, hvd.Max) else wide.amin(0)).bool()
    if op == hvd.Average:
        total = wide.sum(0)
        return torch.div(total, len(parts), rounding_mode=None if dtype.is_floating_point else "trunc").to(
            dtype
        )
    done = {hvd.Sum: wide.sum, hvd.Min: wide.amin, hvd.Max: wide.amax, hvd.Product: wide.prod}[op](0)
    return done.to(dtype)


@ranks(1, 3)
def test_allreduce_of_every_dtype_shape_and_reduction_in_every_form() -> None:
    for dtype in EVERY_DTYPE:
        for shape in SHAPES:
            mine, parts = values(hvd.rank(), shape, dtype), everybody(shape, dtype)
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                if dtype is torch.bool and op == hvd.Average:
                    continue
                expected = reduced(parts, op)
                if op == hvd.Average and dtype.is_floating_point:  # thirds: sum * (1/N) may round otherwise
                    wide = torch.stack([p.double() for p in parts]).sum(0) / hvd.size()
                    got = hvd.allreduce(mine, op=op).double()
                    assert torch.allclose(got, wide, rtol=2 * torch.finfo(dtype).eps, atol=0), (dtype, shape)
                    expected = hvd.allreduce(mine, op=op)
                before = mine.clone()
                out = hvd.allreduce(mine, op=op)
                assert out.dtype == dtype and out.shape == torch.Size(shape)
                assert torch.equal(out, expected), (dtype, shape, op)
                assert torch.equal(mine, before)
                assert torch.equal(hvd.synchronize(hvd.allreduce_async(mine, op=op)), expected)
                place = mine.clone()
                assert hvd.allreduce_(place, op=op) is place and torch.equal(place, expected)
                place = mine.clone()
                assert hvd.synchronize(hvd.allreduce_async_(place, op=op)) is place
                assert torch.equal(place, expected)


@ranks(3)
def test_bits_are_reduced_and_those_of_no_float() -> None:
    """Of every dtype and size: csrc/tests/engine/test_bits.cc, and test_c10d.py."""
    mine = torch.tensor([1 << hvd.rank(), 7], dtype=torch.uint8)
    expected = {hvd.And: [0, 7], hvd.Or: [7, 7], hvd.Xor: [7, 7]}
    assert {op: hvd.allreduce(mine, op=op).tolist() for op in expected} == expected
    with pytest.raises(
        ValueError, match=rf"rank {hvd.rank()}: .*'mask': And works on the bits .* not on bfloat16; use "
    ):
        hvd.allreduce(torch.ones(3, dtype=torch.bfloat16), op=hvd.And, name="mask")


@ranks(3)
def test_grouped_allreduce_of_mixed_dtypes_in_every_form() -> None:
    forms = [((3, 2), torch.float32), ((), torch.int64), ((5,), torch.bfloat16), ((0,), torch.float32)]
    mine = [values(hvd.rank(), shape, dtype, i) for i, (shape, dtype) in enumerate(forms)]
    expected = [reduced(everybody(shape, dtype, i), hvd.Sum) for i, (shape, dtype) in enumerate(forms)]

    def same(outputs: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))

    assert same(hvd.grouped_allreduce(mine, op=hvd.Sum))
    assert same(hvd.grouped_allreduce(mine, op=hvd.Sum, name="named"))
    assert same(hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)))
    place = [t.clone() for t in mine]
    outputs = hvd.grouped_allreduce_(place, op=hvd.Sum)
    assert same(outputs) and all(a is b for a, b in zip(outputs, place, strict=True))
    place = [t.clone() for t in mine]
    assert same(hvd.synchronize(hvd.grouped_allreduce_async_(place, op=hvd.Sum))) and same(place)
    assert hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Average)[1].tolist() == [1, 1, 1]


@ranks(3)
def test_what_is_in_a_group_twice_is_reduced_once() -> None:
    twice = torch.full((300_000,), hvd.rank() + 1.0)  # more than is reduced at once
    group = [twice, twice.view(3, -1), twice[:7]]  # as tied weights in a state_dict() are
    results = hvd.grouped_allreduce_(group, op=hvd.Sum)
    assert all(result is given for result, given in zip(results, group, strict=True))
    assert twice.unique().tolist() == [6.0]
    shifted = torch.full((400_000,), hvd.rank() + 1.0)
    hvd.grouped_allreduce_([shifted[100_000:], torch.empty(0), shifted[:300_000], torch.empty(0)], op=hvd.Sum)
    assert shifted.unique().tolist() == [6.0]


def test_tensors_without_elements_share_no_memory() -> None:
    """They all have the address 0."""
    one = torch.ones(4)
    assert not grouped._are_tied([torch.empty(0), one[:2], torch.empty(0), one[2:]])
    assert grouped._are_tied([one[:3], torch.empty(0), one[2:]])


@ranks(2)
def test_autograd_hears_of_operations_in_place_and_refuses_tangents() -> None:
    for write in (
        lambda x: hvd.allreduce_(x),
        lambda x: hvd.synchronize(hvd.allreduce_async_(x)),
        lambda x: hvd.grouped_allreduce_([x]),
        lambda x: hvd.broadcast_(x, 0),
        lambda x: hvd.synchronize(hvd.broadcast_async_(x, 0)),
        lambda x: hvd.reduce_(x, 0),
        lambda x: hvd.broadcast_parameters([("x", x)], 0),
    ):
        hidden = torch.ones(3, requires_grad=True) * 2
        loss = hidden.square().sum()  # its gradient needs what `hidden` is now
        write(hidden)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        plain, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        loss = (plain * weight).sum()
        write(plain)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2))
        for call in (
            hvd.allreduce,
            hvd.allreduce_,
            hvd.allreduce_async,
            hvd.allgather,
            hvd.alltoall,
            hvd.reducescatter,
            lambda x: hvd.broadcast(x, 0),
            lambda x: hvd.broadcast_(x, 0),
            lambda x: hvd.reduce(x, 0),
            lambda x: hvd.gather(x, 0),
            lambda x: hvd.scatter(x, hvd.rank()),
            lambda x: hvd.grouped_allreduce([x]),
            lambda x: hvd.grouped_allreduce_([x]),
            lambda x: hvd.grouped_allgather([x]),
            lambda x: hvd.allreduce(x, weight=1.0),
        ):
            for without_backward in (False, True):  # which does not end forward mode
                with (
                    torch.set_grad_enabled(not without_backward),
                    pytest.raises(NotImplementedError, match="forward mode"),
                ):
                    call(dual)
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


@ranks(2)
def test_an_alltoall_of_more_rows_than_an_int32_says() -> None:
    many = (1 << 31) + 5  # rows of no width: they take no memory
    _, received = hvd.alltoall(torch.empty(many, 0), splits=[many, 0])
    assert received.tolist() == ([many] * 2 if hvd.rank() == 0 else [0, 0])


@ranks(2)
def test_compression_of_single_operations() -> None:
    exact = torch.tensor([0.5, 1.0, 2.0])
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.float32, torch.float64):
            out = hvd.allreduce(exact.to(dtype), compression=compression)
            assert out.dtype == dtype and out.tolist() == exact.tolist()
        assert hvd.allreduce(torch.tensor([7]), compression=compression, op=hvd.Sum).item() == 7 * hvd.size()
        assert hvd.grouped_allreduce([exact, exact], compression=compression)[1].tolist() == exact.tolist()
        share = hvd.reducescatter(torch.ones(hvd.size()), compression=compression)
        assert share.tolist() == [1.0] and share.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name() -> None:
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        for gpu in (False, True):
            with pytest.raises(ValueError, match=r"^tensor 'words' is nested, .* tensor\.values\(\)"):
                number_of(nested, "words", gpu)


@ranks(2)
def test_a_sparse_sum_has_no_entries_outside_of_its_shape() -> None:
    rows = 3 + 1000 * hvd.rank()
    mine = torch.sparse_coo_tensor([[0, rows - 1]], torch.ones(2, 2), (rows, 2))
    handle = hvd.sparse_allreduce_async(mine, "words", hvd.Sum)
    if hvd.rank() == 0:
        with pytest.raises(
            hvd.Mismatch, match=r"'words': .* up to \[1002\], outside of the shape \[3, 2\] of rank 0"
        ):
            hvd.synchronize(handle)
    else:
        assert hvd.synchronize(handle).to_dense().sum() == 8
    whole = hvd.synchronize(hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "words", hvd.Sum))
    assert whole.to_dense().trace() == 6


@ranks(2)
def test_handles_are_asynchronous_and_unknown_ones_give_none() -> None:
    if hvd.rank() != 0:
        hvd.recv(src=0)  # rank 0 has looked
    handles = [hvd.allreduce_async(torch.full((50_000,), float(i)), op=hvd.Sum) for i in range(100)]
    if hvd.rank() == 0:
        assert not any(hvd.poll(handle) for handle in handles), (
            "an operation was over before all had begun it"
        )
        hvd.send(torch.ones(1), 1)
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle)[0].item() == i * hvd.size()
    assert hvd.synchronize(handles[0]) is None


@ranks(3)
def test_rows_that_alltoall_sends_to_nobody_have_no_gradient() -> None:
    n, me = hvd.size(), hvd.rank()
    x = torch.ones(n * (n - 1) // 2 + 2, requires_grad=True)  # two rows more than are sent
    out, _ = hvd.alltoall(x, splits=list(range(n)))
    (out * (me + 1)).sum().backward()
    assert x.grad.tolist() == [s + 1.0 for s in range(n) for _ in range(s)] + [0.0, 0.0]


# mypy: disable-error-code="no-untyped-call"


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
