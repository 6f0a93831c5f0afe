"""The optimizers of tables against torch's own, on random steps; one table in this process, no server."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from horoclone import ps  # noqa: E402
from horoclone.ps.optimizers import Optimizer  # noqa: E402
from horoclone.runtime import native_module  # noqa: E402

ROWS, DIM, STEPS = 40, 16, 30


def spec_of(optimizer: Optimizer, *, dense: bool = False) -> dict[str, Any]:
    return {
        "name": "t", "dim": DIM, **optimizer.native(), "dense": dense, "initial": 0, "spread": 0.0, "seed": 0,
        "workers": 1, "staleness": -1, "average": True,
    }  # fmt: skip


def ours(optimizer: Optimizer, start: torch.Tensor, steps: list[Any], *, dense: bool = False) -> torch.Tensor:
    table = native_module.core().Table(spec_of(optimizer, dense=dense), 1 << 26)
    every = torch.arange(ROWS)
    table.assign(every.data_ptr(), ROWS, start.data_ptr())
    for ids, gradients in steps:
        table.push(ids.data_ptr(), len(ids), gradients.data_ptr())
    out = torch.empty(ROWS, DIM)
    table.pull(every.data_ptr(), ROWS, out.data_ptr())
    return out


def steps_of(*, dense: bool = False) -> list[Any]:
    """Random ids, some of them twice in a step."""
    chance = torch.Generator().manual_seed(3)
    made = []
    for _ in range(STEPS):
        ids = torch.arange(ROWS) if dense else torch.randint(0, ROWS, (25,), generator=chance)
        made.append((ids, torch.randn(len(ids), DIM, generator=chance)))
    return made


def torchs(make: Any, start: torch.Tensor, steps: list[Any], *, sparse: bool = True) -> torch.Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = make([weight])
    for ids, gradients in steps:
        gradient = torch.sparse_coo_tensor(ids[None], gradients, (ROWS, DIM))
        weight.grad = gradient.coalesce() if sparse else gradient.to_dense()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (ps.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (ps.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (
            ps.Adagrad(lr=0.1, eps=1e-6, initial_accumulator_value=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, initial_accumulator_value=0.5),
        ),
        (ps.Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
        (
            ps.Adam(lr=0.01, betas=(0.8, 0.95)),
            lambda p: torch.optim.SparseAdam(p, lr=0.01, betas=(0.8, 0.95)),
        ),
    ],
    ids=lambda value: str(value) if hasattr(value, "lr") else "torch",
)
def test_sparse_steps_are_torchs(optimizer: Optimizer, make: Any) -> None:
    start, steps = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)), steps_of()
    torch.testing.assert_close(
        ours(optimizer, start, steps), torchs(make, start, steps), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (ps.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (ps.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    ],
    ids=lambda value: str(value) if hasattr(value, "lr") else "torch",
)
def test_dense_steps_are_torchs(optimizer: Optimizer, make: Any) -> None:
    start, steps = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)), steps_of(dense=True)
    expected = torchs(make, start, steps, sparse=False)
    torch.testing.assert_close(ours(optimizer, start, steps, dense=True), expected, rtol=1e-6, atol=1e-6)


def test_row_wise_adagrad_is_its_formula() -> None:
    """torch has none; this is fbgemm's EXACT_ROWWISE_ADAGRAD, in double precision."""
    start, steps = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)), steps_of()
    weight, squares = start.double(), torch.zeros(ROWS, dtype=torch.float64)
    for ids, gradients in steps:
        gradient = torch.zeros(ROWS, DIM, dtype=torch.float64).index_add_(0, ids, gradients.double())
        squares += gradient.pow(2).mean(1)
        weight -= 0.05 * gradient / (squares.sqrt() + 1e-8)[:, None] * (gradient != 0).any(1)[:, None]
    found = ours(ps.RowWiseAdagrad(lr=0.05), start, steps)
    torch.testing.assert_close(found.double(), weight, rtol=1e-6, atol=1e-6)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="lr=-1"):
        ps.SGD(lr=-1).native()
    with pytest.raises(ValueError, match="1048576"):
        native_module.core().Table({**spec_of(ps.SGD(lr=1)), "dim": 1 << 21}, 1 << 20)
