"""Compressors that replace a bucket's allreduce: exactness, error feedback, bytes, convergence, odd values, own ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from world import ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone._core import dequantize, quantize
from horoclone.runtime import native
from horoclone.torch.compressor import GradientCompressor
from horoclone.torch.compressors.blocks import decode, encode

OVER_TCP = {"HOROCLONE_SHARED_MEMORY": "0"}
MAKERS: dict[str, Callable[[], Any]] = {
    "int8": hvd.Compression.int8,
    "powersgd": lambda: hvd.Compression.powersgd(rank=4, start_step=2),
    "topk": lambda: hvd.Compression.topk(ratio=0.05),
}


def network(width: int = 64) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))


wrapped = functools.partial(wrapped_sgd, momentum=0.9)


def same_on_every_rank(tensors: Any) -> bool:
    rows = hvd.allgather(torch.cat([t.detach().flatten().double() for t in tensors]).unsqueeze(0))
    return all(torch.equal(row.nan_to_num(), rows[0].nan_to_num()) for row in rows)


def gradients_of(step: int, model: torch.nn.Module, rank: int) -> list[torch.Tensor]:
    """What a rank's gradients are in a step: a common part and a part of its own."""
    common, own = torch.Generator().manual_seed(step), torch.Generator().manual_seed(1000 * step + rank + 1)
    return [
        torch.randn(p.shape, generator=common) + 0.5 * torch.randn(p.shape, generator=own)
        for p in model.parameters()
    ]


def reduce_once(optimizer: Any, model: torch.nn.Module, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.synchronize()
    reduced = [p.grad.clone() for p in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    return reduced


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """|a - b| / |b|"""
    whole_a, whole_b = (torch.cat([t.flatten() for t in ts]) for ts in (a, b))
    return float((whole_a - whole_b).norm() / whole_b.norm())


def mean_of(step: int, model: torch.nn.Module) -> list[torch.Tensor]:
    everybody = [gradients_of(step, model, rank) for rank in range(hvd.size())]
    return [torch.stack(each).mean(0) for each in zip(*everybody, strict=True)]


@pytest.mark.parametrize("which", sorted(MAKERS))
@ranks(1, 3)
def test_error_feedback_makes_up_for_what_was_lost(which: str) -> None:
    """The sum of what was applied comes ever closer to the sum of the gradients; without feedback it does not."""
    errors = {}
    for feedback in (True, False):
        model = network()
        compression = MAKERS[which]()
        compression = compression() if isinstance(compression, type) else compression
        compression.error_feedback = feedback
        optimizer = wrapped(model, rate=0.0, compression=compression)
        applied = wanted = None
        for step in range(40):
            # A slowly turning gradient, as in training: the common part is the same for all steps.
            mine = [
                g + 0.1 * e
                for g, e in zip(
                    gradients_of(0, model, hvd.rank()), gradients_of(step, model, hvd.rank()), strict=True
                )
            ]
            exact = [hvd.allreduce(g) for g in mine]
            got = reduce_once(optimizer, model, mine)
            assert same_on_every_rank(got), (which, step)
            if step >= 3:  # the first steps are sent whole
                applied = got if applied is None else [a + g for a, g in zip(applied, got, strict=True)]
                wanted = exact if wanted is None else [w + e for w, e in zip(wanted, exact, strict=True)]
        errors[feedback] = distance(applied, wanted)
    limits = {"int8": 1e-3, "powersgd": 0.25, "topk": 0.6}
    assert errors[True] < limits[which], errors
    if hvd.size() > 1:
        assert errors[True] < errors[False] / 1.3, errors
    else:
        assert errors == {True: 0.0, False: 0.0}  # one rank sends nothing and loses nothing


@ranks(3)
def test_int8_is_near_the_mean_and_sum_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for op in (hvd.Average, hvd.Sum):
            model = network().to(dtype)
            optimizer = wrapped(model, rate=0.0, compression=hvd.Compression.int8(block=64), op=op)
            for step in range(3):
                mine = [g.to(dtype) for g in gradients_of(step, model, hvd.rank())]
                got = reduce_once(optimizer, model, mine)
                assert all(g.dtype == dtype for g in got) and same_on_every_rank(got)
                factor = hvd.size() if op == hvd.Sum else 1
                error = distance([g.float() for g in got], [g * factor for g in mean_of(step, model)])
                assert error < 0.02, (dtype, op, step, error)


@ranks(2)
def test_a_low_rank_gradient_survives_powersgd() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 48, bias=True)
    optimizer = wrapped(model, rate=0.0, compression=hvd.Compression.powersgd(rank=2, start_step=0))
    u, v = torch.randn(48, 1), torch.randn(64, 1)
    for step in range(4):
        weight, bias = u @ v.t() * (hvd.rank() + 1), torch.full((48,), float(hvd.rank()))
        got = reduce_once(optimizer, model, [weight, bias])
        assert distance(got, [u @ v.t() * 1.5, torch.full((48,), 0.5)]) < 1e-4, step


@ranks(2)
def test_topk_of_everything_is_exact_and_of_some_takes_the_largest() -> None:
    model = torch.nn.Linear(8, 4, bias=False)
    whole = wrapped(model, rate=0.0, compression=hvd.Compression.topk(ratio=1.0))
    for step in range(3):
        got = reduce_once(whole, model, gradients_of(step, model, hvd.rank()))
        assert distance(got, mean_of(step, model)) < 1e-6
    some = wrapped(model, rate=0.0, compression=hvd.Compression.topk(ratio=1 / 32))
    for _ in range(3):
        gradient = torch.full((4, 8), 0.01)
        gradient[hvd.rank(), 5] = 4.0
        got = reduce_once(some, model, [gradient])[0]
    assert got[0, 5] == got[1, 5] and abs(float(got[0, 5]) - 2.0) < 0.02 and int((got != 0).sum()) == 2


# --- bytes ---------------------------------------------------------------------------------------------------------


def bytes_sent() -> int:
    return json.loads(native().counters())["mesh"]["bytes_sent"]


@ranks(2, 4, env=OVER_TCP)
def test_fewer_bytes_go_over_the_wire() -> None:
    model = network(1024)  # 76,810 elements, 307 kB
    sent: dict[str, float] = {}
    for which in ("none", "bf16", *sorted(MAKERS)):
        compression = MAKERS[which]() if which in MAKERS else getattr(hvd.Compression, which)
        optimizer = wrapped(model, rate=0.0, compression=compression)
        for step in range(6):
            if step == 4:
                hvd.barrier()
                before = bytes_sent()
            reduce_once(optimizer, model, gradients_of(step, model, hvd.rank()))
        sent[which] = hvd.allreduce(torch.tensor(float(bytes_sent() - before)), op=hvd.Max).item()
    share = {which: sent[which] / sent["none"] for which in sent}
    assert share["bf16"] < 0.52 and share["int8"] < 0.28 and share["powersgd"] < 0.2, share
    assert share["topk"] < 0.06 * hvd.size(), share


# --- odd values, other arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", sorted(MAKERS))
@ranks(2)
def test_infinities_arrive_and_are_forgotten(which: str) -> None:
    model = network()
    optimizer = wrapped(model, rate=0.0, compression=MAKERS[which]())
    for step in range(8):
        mine = gradients_of(step, model, hvd.rank())
        if step == 5 and hvd.rank() == 1:
            mine[0][3, 3] = float("inf")
        if step == 6 and hvd.rank() == 1:  # what a loss scale that is too large makes
            mine = [torch.full_like(g, float("inf")) for g in mine]
        got = reduce_once(optimizer, model, mine)
        finite = all(bool(g.isfinite().all()) for g in got)
        assert finite == (step not in (5, 6)), (which, step)
        assert same_on_every_rank(got)


@ranks(2)
def test_sparse_integer_local_and_unused_parameters_beside_a_compressor() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({
        "table": torch.nn.Embedding(50, 8, sparse=True), "body": torch.nn.Linear(8, 40), "own": torch.nn.Linear(40, 3),
        "idle": torch.nn.Linear(4, 4),
    })  # fmt: skip
    plain = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(
        plain, model.named_parameters(), compression=hvd.Compression.int8, local_parameters=model["own"],
        unused_as_none=True, backward_passes_per_step=2,
    )  # fmt: skip
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            words = torch.randint(
                50, (6,), generator=torch.Generator().manual_seed(10 * step + 2 * part + hvd.rank())
            )
            model["own"](model["body"](model["table"](words))).square().mean().backward()
        optimizer.step()
        assert model["idle"].weight.grad is None
    assert same_on_every_rank([*model["table"].parameters(), *model["body"].parameters()])
    assert not same_on_every_rank(model["own"].parameters())


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_a_compressor_in_a_process_set() -> None:
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        model = network()
        for make in MAKERS.values():
            optimizer = wrapped(model, rate=0.0, compression=make(), process_set=pair)
            for step in range(4):
                got = reduce_once(optimizer, model, gradients_of(step, model, hvd.rank()))
            digest = torch.cat([g.flatten() for g in got]).unsqueeze(0)
            rows = hvd.allgather(digest, process_set=pair)
            assert torch.equal(rows[0], rows[1])
    hvd.barrier()
    hvd.remove_process_set(pair)


class Majority(GradientCompressor):
    """Signs only, voted on, times the mean magnitude: a compressor as a user might write it."""

    def reduce(self, bucket: Any) -> Any:
        bucket.state["calls"] = bucket.state.get("calls", 0) + 1
        signs = bucket.flat.sign().to(torch.int8)
        magnitude = bucket.flat.abs().mean().view(1)
        handle = bucket.allreduce(magnitude, "magnitude")  # under way while the signs are gathered
        everybody = yield bucket.allgather(signs.view(1, -1), "signs")
        yield handle
        bucket.flat.copy_(everybody.sum(0, dtype=torch.int32).sign() * magnitude)


@ranks(3)
def test_a_compressor_of_the_users_own() -> None:
    model = network()
    optimizer = wrapped(model, rate=0.0, compression=Majority)
    for step in range(3):
        got = reduce_once(optimizer, model, gradients_of(step, model, hvd.rank()))
        if step:
            signs = [torch.stack([g.sign() for g in each]).sum(0).sign() for each in zip(*(gradients_of(step, model, r) for r in range(hvd.size())), strict=True)]  # fmt: skip
            assert all(torch.equal(g.sign(), s) for g, s in zip(got, signs, strict=True))
            assert same_on_every_rank(got)


@ranks(2)
def test_an_error_in_a_compressor_leaves_the_runtime_usable() -> None:
    class Wrong(GradientCompressor):
        def reduce(self, bucket: Any) -> Any:
            yield bucket.allreduce(torch.zeros(3 + hvd.rank()), "shapes differ")

    model = network()
    optimizer = wrapped(model, compression=Wrong())
    reduce_once(optimizer, model, gradients_of(0, model, 0))
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
            reduce_once(optimizer, model, gradients_of(1, model, 0))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@ranks(2)
def test_what_such_a_compressor_cannot_do_is_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"hvd\.Average and op=hvd\.Sum"):
        wrapped(model, compression=hvd.Compression.int8, op=hvd.Max)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        wrapped(model, compression=hvd.Compression.topk, gradient_predivide_factor=2.0)
    with pytest.raises(hvd.Unsupported, match="DistributedOptimizer"):
        hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8())
    for wrong in (
        lambda: hvd.Compression.int8(block=0),
        lambda: hvd.Compression.topk(ratio=0.0),
        lambda: hvd.Compression.powersgd(rank=0),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_blocks_by_torchs_operations_have_the_bits_of_those_in_host_memory() -> None:
    """On GPUs torch's operations quantise; here they run on the same numbers as the core's loops."""
    chance = torch.Generator().manual_seed(0)
    for block, blocks_in_row in ((1, 40), (16, 9), (256, 5)):
        share = block * blocks_in_row
        rows = torch.randn(3, share, generator=chance) * torch.logspace(-30, 30, share)
        rows[0, :block] = 0.0
        rows[1, 0], rows[2, share - 1] = float("inf"), float("nan")
        rows[1, block : 2 * block] = 1e-42  # below the smallest normal number
        messages, lost = encode(rows, block)
        for row, message, rest in zip(rows, messages, lost, strict=True):
            residual, expected = row.clone(), torch.empty_like(message)
            nothing = torch.zeros_like(row)
            quantize(block, share, share, nothing.data_ptr(), residual.data_ptr(), expected.data_ptr())
            assert torch.equal(message, expected) and torch.equal(rest, residual)
            out = torch.empty(share)
            dequantize(block, share, share, message.data_ptr(), out.data_ptr())
            again = decode(message.unsqueeze(0), share, block)[0]
            assert torch.equal(out.isnan(), again.isnan()) and torch.equal(
                out.nan_to_num(), again.nan_to_num()
            )
