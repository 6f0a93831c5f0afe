"""Weights, optimizer state and reduced gradients of the ranks are compared while they train."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from world import load, ranks

import horoclone.torch as hvd
from horoclone.errors import Mismatch
from horoclone.torch.optimizer.compared import Comparison

told = load(Path(__file__).parents[1] / "told.py", "told").told


def _model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).to(dtype)


def _optimizer(model: torch.nn.Module, kind: Any = torch.optim.Adam, **options: Any) -> Any:
    plain = kind(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def _step(model: torch.nn.Module, optimizer: Any, between: Callable[[], None] | None = None) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.randn(4, 5, dtype=dtype)).square().mean().backward()
    if between is not None:
        between()
    optimizer.step()


def _flip(tensor: torch.Tensor, bit: int) -> None:
    """Of its memory, which the tensor's dtype says nothing about."""
    memory = tensor.detach().view(-1).view(torch.uint8)
    memory[bit // 8] ^= 1 << bit % 8


def _everywhere_alike(model: torch.nn.Module, optimizer: Any) -> bool:
    tensors = [p.detach() for p in model.parameters()]
    tensors += [t for p in model.parameters() for t in optimizer.state[p].values() if torch.is_tensor(t)]
    flat = torch.cat([t.reshape(-1) for t in tensors])
    rows = hvd.allgather(flat.view(torch.int32).view(1, -1), name="alike")  # bits: also of NaNs
    return all(torch.equal(row, rows[0]) for row in rows)


@ranks(2)
def test_ranks_may_list_their_parameters_in_other_orders() -> None:
    for op in (hvd.Average, hvd.Adasum):
        with told("error"):
            model = _model()
            named = list(model.named_parameters())[:: -1 if hvd.rank() else 1]
            optimizer = hvd.DistributedOptimizer(torch.optim.Adam([p for _, p in named]), named, op=op)
            for _ in range(3):
                _step(model, optimizer)


@ranks(2, 3)
def test_a_forgotten_broadcast_is_found_at_the_first_step() -> None:
    with told("error"):
        model = _model(seed=hvd.rank())
        optimizer = _optimizer(model)
        with pytest.raises(
            Mismatch, match=r"before the first step .* the weight '.*' differs .* hvd\.broadcast_parameters"
        ):
            _step(model, optimizer)
    with told("warn") as lines:
        model = _model(seed=hvd.rank())
        optimizer = _optimizer(model)
        for _ in range(3):
            _step(model, optimizer)
        assert len(lines) == (hvd.rank() == 0), lines
        assert all("hvd.broadcast_parameters" in line and "no majority" in line for line in lines)
    with told("warn") as lines:
        model = _model(seed=hvd.rank())
        optimizer = _optimizer(model)
        hvd.broadcast_parameters(model.state_dict(), 0)
        for _ in range(3):
            _step(model, optimizer)
        assert not lines


def flips(rounds: int, seed: int = 0) -> None:
    """One flipped bit in a weight, in optimizer state, in a reduced bucket: found at the next check, by name and rank,
    and mended."""
    choice = random.Random(seed)
    for number in range(rounds):
        what = ("weight", "state", "gradient")[number % 3]
        culprit, bit = choice.randrange(hvd.size()), choice.randrange(32)
        torch.manual_seed(number)
        with told("repair") as lines:
            model = _model(number)
            optimizer = _optimizer(model)
            torch.manual_seed(100 * number + hvd.rank())
            for _ in range(3):
                _step(model, optimizer)
            assert not lines
            name, parameter = choice.choice(list(model.named_parameters()))
            mine = hvd.rank() == culprit

            if what == "gradient":
                plain = Comparison.note

                def note(self: Any, bucket: Any, plain: Any = plain, bit: int = bit) -> None:
                    if bucket.index == 0:
                        _flip(bucket.gradients[:1], bit)
                    plain(self, bucket)

                if mine:
                    Comparison.note = note  # type: ignore[method-assign]
                try:
                    _step(model, optimizer)
                finally:
                    Comparison.note = plain  # type: ignore[method-assign]
                assert not lines
            else:
                target = parameter if what == "weight" else optimizer.state[parameter]["exp_avg"]
                if mine:
                    _flip(target, bit)
            _step(model, optimizer)
            said = lines[0] if lines else ""
            if hvd.rank() == 0:
                assert len(lines) == 1, (what, number, lines)
                wanted = {
                    "weight": f"the weight {name!r} differs",
                    "state": f"the optimizer's state of {name!r} differs",
                    "gradient": "the reduced gradient of",
                }[what]
                who = "no majority" if hvd.size() == 2 else f"differs on rank {culprit} (against"
                assert wanted in said and who in said, (what, culprit, said)
            assert _everywhere_alike(model, optimizer), (what, number)
            _step(model, optimizer)
            assert len(lines) == (hvd.rank() == 0)


@ranks(2, 3)
def test_a_flipped_bit_is_found_at_the_next_check_and_mended() -> None:
    flips(6)


@ranks(2, 3)
def test_a_flipped_bit_of_a_weight_is_found_where_its_state_is_not_everybody_s() -> None:
    for options in ({"op": hvd.Adasum}, {"shard_optimizer_state": True}):
        with told("repair") as lines:
            model = _model()
            optimizer = _optimizer(model, torch.optim.SGD, **options)
            _train(model, optimizer)
            assert not lines
            if hvd.rank() == 1:
                _flip(model[2].bias, 5)
            _train(model, optimizer, 2)
            assert len(lines) == (hvd.rank() == 0), (options, lines)
            assert all("the weight '2.bias'" in line for line in lines)
            assert _everywhere_alike(model, optimizer), options
    with told("error"):
        model = _model(hvd.rank())
        with pytest.raises(Mismatch, match="before the first step the ranks do not have the same values"):
            _train(model, _optimizer(model, torch.optim.SGD, op=hvd.Adasum))


@pytest.mark.long(60)
@ranks(2, 3, 4, limit_s=600)
def test_a_hundred_flipped_bits_are_found_at_the_next_check() -> None:
    flips(300, seed=1)


def _train(model: torch.nn.Module, optimizer: Any, steps: int = 4) -> None:
    torch.manual_seed(hvd.rank())
    for _ in range(steps):
        _step(model, optimizer)


class Odd(torch.nn.Module):
    """Parameters that are no plain matrices of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _model()
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.turned = torch.nn.Parameter(torch.ones(3, 4).t())
        self.gaps = torch.nn.Parameter(torch.ones(4, 6)[:, ::2])
        self.short = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (
            self.body(x) + self.turned.sum() + self.gaps.sum() + self.empty.sum() + self.short.sum()
        )
        return found


@ranks(3)
def test_what_may_differ_is_no_difference() -> None:
    with told("error"):
        _train(model := _model(), _optimizer(model, backward_passes_per_step=1, shard_optimizer_state=True))
        _train(model := _model(), _optimizer(model, shard_optimizer_state="parameters"))
        _train(model := _model(), _optimizer(model, compression=hvd.Compression.fp16))
        _train(model := _model(), _optimizer(model, compression=hvd.Compression.int8))
        _train(model := _model(), _optimizer(model, op=hvd.Sum))
        _train(model := _model(), _optimizer(model, gradient_predivide_factor=2.0))
        _train(model := _model(), optimizer := _optimizer(model, cross_barrier=model))
        optimizer.synchronize()
        _train(model := _model(), _optimizer(model, op=hvd.Adasum, kind=torch.optim.SGD))
        _train(model := _model(dtype=torch.bfloat16), _optimizer(model))
        _train(odd := Odd(), _optimizer(odd))

        model = _model()
        with torch.no_grad():
            model[2].weight.add_(hvd.rank())
        optimizer = _optimizer(model)
        optimizer.register_local(model[2].weight)
        _train(model, optimizer)

        norms = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
        hvd.broadcast_parameters(norms.state_dict(), 0)
        _train(norms, _optimizer(norms))

        model = _model()
        optimizer = _optimizer(model, backward_passes_per_step=2)
        torch.manual_seed(hvd.rank())
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()

        model = _model()
        optimizer = _optimizer(model, torch.optim.SGD)
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
        _train(model, optimizer)

        model = _model()
        _train(model, _optimizer(model), 4 + 2 * hvd.rank())
        hvd.join()


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_a_process_set_compares_inside_of_itself() -> None:
    pair = hvd.add_process_set([0, 2])
    with told("repair") as lines:
        model = _model(seed=hvd.rank())
        if pair.included():
            hvd.broadcast_parameters(model.state_dict(), 2, process_set=pair)
            optimizer = _optimizer(model, process_set=pair)
            _train(model, optimizer)
            if hvd.rank() == 2:
                _flip(model[0].weight, 3)
            _train(model, optimizer)
            assert len(lines) == (hvd.rank() == 0)
            assert all("between rank 0 and rank 2" in line and "'0.weight'" in line for line in lines), lines


@ranks(2)
def test_a_compressor_s_marks_carry_the_check() -> None:
    with told("repair") as lines:
        model = _model()
        optimizer = _optimizer(model, compression=hvd.Compression.int8)
        _train(model, optimizer)
        if hvd.rank() == 1:
            _flip(model[2].bias, 3)
        _train(model, optimizer, 2)
        assert len(lines) == (hvd.rank() == 0)
        assert all("'2.bias'" in line for line in lines), lines


@ranks(2)
def test_ranks_with_other_settings_do_as_the_strictest_and_off_is_off_for_all() -> None:
    with told(("warn", "error")[hvd.rank()]):
        optimizer = _optimizer(model := _model(hvd.rank()))
        with pytest.raises(Mismatch):
            _train(model, optimizer)
    with told(("off", "error")[hvd.rank()]) as lines:
        optimizer = _optimizer(model := _model(hvd.rank()))
        _train(model, optimizer)
        assert not lines
    with (
        told("loud"),
        pytest.raises(ValueError, match="HOROCLONE_COMPARE='loud' must be one of warn, repair"),
    ):
        _optimizer(_model())
    with told("warn", -1), pytest.raises(ValueError, match="HOROCLONE_COMPARE_STEPS='-1'"):
        _optimizer(_model())


@ranks(2)
def test_a_share_is_compared_at_a_time() -> None:
    def trained(steps: int, optimizer: Any, model: torch.nn.Module, lines: list[str]) -> int:
        """The steps until something is said, on the first rank."""
        first = 0
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model.weight.sum().backward()  # type: ignore[operator, union-attr]
            model.bias.sum().backward()  # type: ignore[operator, union-attr]
            optimizer.step()
            first = first or (step if lines else 0)
        return first

    with told("repair", 100) as lines:
        model = torch.nn.Linear(1000, 1000)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = _optimizer(model, torch.optim.SGD)
        assert trained(101, optimizer, model, lines) == 0
        if hvd.rank() == 1:
            _flip(model.weight, 7)
        found = trained(110, optimizer, model, lines)
        assert (0 < found <= 100) is (hvd.rank() == 0), found
    with told("repair", 0) as lines:
        model = _model()
        optimizer = _optimizer(model)
        _train(model, optimizer)
        if hvd.rank() == 1:
            _flip(model[0].weight, 7)
        _train(model, optimizer, 20)
        assert not lines


class _Momentum(torch.optim.Optimizer):
    """Keeps a tensor as the state of a parameter, where torch's own keep a dictionary."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter not in self.state:
                self.state[parameter] = torch.zeros_like(parameter)
            parameter -= 0.1 * self.state[parameter].mul_(0.9).add_(parameter.grad)


class _Around:
    """Has an optimizer, and is none; its state is a property, or it has none to show."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class _Showing(_Around):
    @property
    def state(self) -> Any:
        return self.inner.state


@ranks(2)
def test_state_may_have_any_form() -> None:
    for around in (None, _Around, _Showing):
        with told("repair") as lines:
            model = _model()
            plain: Any = _Momentum(model.parameters())
            plain = plain if around is None else around(plain)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            for _ in range(3):
                _step(model, optimizer)
            held = plain.state if around is None else plain.inner.state
            if hvd.rank() == 1:
                _flip(held[model[0].weight], 30)
            _step(model, optimizer)
            said = any("the optimizer's state of '0.weight'" in line for line in lines)
            assert said == (hvd.rank() == 0 and around is not _Around), lines
            flat = torch.cat([held[p].reshape(-1) for p in model.parameters()])
            rows = hvd.allgather(flat.view(1, -1), name="held")
            assert torch.equal(rows[0], rows[1]) == (around is not _Around)


@ranks(2)
def test_state_that_one_rank_alone_has_is_repaired_on_the_others() -> None:
    for owner in range(2):
        with told("repair") as lines:
            model = _model()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if hvd.rank() == owner:
                for parameter in model.parameters():
                    plain.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            for _ in range(3):
                _step(model, optimizer)
                assert len(lines) == (hvd.rank() == 0)
            assert _everywhere_alike(model, optimizer)


@ranks(3)
def test_while_a_rank_has_joined_a_difference_is_told_and_not_repaired() -> None:
    with told("repair") as lines:
        model = _model()
        optimizer = _optimizer(model)
        _train(model, optimizer)
        if hvd.rank():
            if hvd.rank() == 1:
                _flip(model[0].weight, 3)
            _train(model, optimizer)
            assert lines if hvd.rank() == 1 else not lines
            assert all("between rank 1 and rank 2" in line for line in lines), lines
            assert all("cannot be repaired while a rank has joined" in line for line in lines), lines
        hvd.join()


@ranks(2)
def test_ranks_that_come_back_from_join_are_told_to_take_the_last_ones_weights() -> None:
    with told("warn") as lines:
        model = _model()
        optimizer = _optimizer(model)
        for _ in range(2):
            for _ in range(3 + hvd.rank()):
                _step(model, optimizer)
            last = hvd.join()
        assert last == 1
        said = [
            line for line in lines if "hvd.broadcast_parameters(model.state_dict(), root_rank=last)" in line
        ]
        assert len(said) == len(lines) == (hvd.rank() == 0)
        for _ in range(2):
            hvd.broadcast_parameters(model.state_dict(), last)
            hvd.broadcast_optimizer_state(optimizer, last)
            for _ in range(3 + hvd.rank()):
                _step(model, optimizer)
            last = hvd.join()
        assert len(lines) == (hvd.rank() == 0)
