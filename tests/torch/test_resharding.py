"""Sharded optimizer state from one cut to another: each element arrives once, where it belongs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import torch
from world import ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone.process_sets import global_process_set
from horoclone.torch.optimizer.resharding import Range, moves, own_tensor, reshard
from horoclone.torch.optimizer.sharding import Piece


def a_cut(chance: random.Random, sizes: list[int], owners: int) -> list[Range]:
    """Random pieces of parameters of these sizes, in no order, some of them empty."""
    cut = []
    for parameter, size in enumerate(sizes):
        places = sorted({0, size, *(chance.randint(0, size) for _ in range(chance.randint(0, 4)))})
        bounds = list(itertools.pairwise(places)) or [(0, 0)]
        cut += [Range(parameter, begin, end, chance.randrange(owners)) for begin, end in bounds]
    chance.shuffle(cut)
    return cut


def test_every_element_goes_once_to_where_it_belongs() -> None:
    chance = random.Random(3)
    for _ in range(3000):
        sizes = [chance.choice([0, 1, 2, 7, chance.randint(1, 60)]) for _ in range(chance.randint(1, 5))]
        old, new = (a_cut(chance, sizes, chance.randint(1, 9)) for _ in range(2))
        arrived: Counter[tuple[int, int]] = Counter()
        empty = 0
        for source, target, begin, end in moves(old, new):
            assert old[source].parameter == new[target].parameter
            for one in (old[source], new[target]):
                assert one.begin <= begin <= end <= one.end
            arrived.update((new[target].parameter, element) for element in range(begin, end))
            empty += begin == end
        assert arrived == {(number, i): 1 for number, size in enumerate(sizes) for i in range(size)}
        assert empty == sizes.count(0)


@ranks(1, 3, 4)
def test_state_is_resharded_between_random_cuts() -> None:
    chance = random.Random(4)
    shapes = [(5, 7), (1,), (), (0, 3), (64,), (3, 2, 4)]
    parameters = [torch.zeros(shape) for shape in shapes]
    parameters.append(torch.zeros(4, 6).t())  # not in row-major order
    truth = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(parameters)
    ]

    def pieces() -> list[Piece]:
        cut = a_cut(chance, [p.numel() for p in parameters], hvd.size())
        return [Piece(parameters[i], begin, end, owner) for i, begin, end, owner in cut]

    def entry(piece: Piece) -> dict[str, Any]:
        number = next(i for i, p in enumerate(parameters) if p is piece.parameter)
        laid_out = torch.empty_like(piece.parameter).copy_(truth[number])
        values = laid_out if piece.whole else piece.part_of(laid_out).clone()
        return {"m": values, "step": torch.tensor(float(number)), "count": number}

    old = pieces()
    state = {own_tensor(piece): entry(piece) for piece in old if piece.owner == hvd.rank()}
    for layout in range(12):
        new = pieces()
        reshard(old, new, state, hvd.rank(), global_process_set, layout)
        assert set(state) == {piece.tensor for piece in new if piece.owner == hvd.rank()}
        for piece in new:
            if piece.owner == hvd.rank():
                have, wanted = state[piece.tensor], entry(piece)
                assert have["count"] == wanted["count"] and torch.equal(have["step"], wanted["step"])
                assert torch.equal(have["m"], wanted["m"]) and have["m"].stride() == wanted["m"].stride()
        old = new


@ranks(1, 3)
def test_residuals_keep_their_sum_from_buckets_to_buckets() -> None:
    """Of every compressor: what was kept back goes with the gradients into new buckets, and nothing else changes."""
    for compression in (
        hvd.Compression.topk(ratio=0.1),
        hvd.Compression.int8(block=16),
        hvd.Compression.powersgd(rank=1, start_step=0),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
        optimizer = wrapped_sgd(model, 0.001, compression=compression)
        for step in range(4):
            optimizer.zero_grad()
            data = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            model(data).square().sum().backward()
            optimizer.step()
        reducer = optimizer._reducer
        before = {name: one.clone() for name, one in reducer.residuals.read(reducer.buckets).items()}
        if hvd.size() > 1:
            assert before and any(one.abs().sum() > 0 for one in before.values())
        reducer._forget_layout()
        assert not reducer.buckets and set(reducer.residuals.read([])) == set(before)
        reducer.outstanding = False
        optimizer.zero_grad()
        model(torch.zeros(4, 40)).sum().backward()  # a learning step: the buckets are formed anew
        optimizer.synchronize()
        after = reducer.residuals.read(reducer.buckets)
        assert set(after) == set(before)
        assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)
