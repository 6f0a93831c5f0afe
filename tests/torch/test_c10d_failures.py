"""torch.distributed on the backend `horoclone` when ranks die or never call: an error that names them, never a hang.

The ranks are forked from a process that has imported torch (crew.py) and killed with SIGKILL. What a survivor raises
goes through the interpreter, as in a program that catches nothing: its exit code is 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LIMIT_S = 60.0  # of one case; they take about a second


@pytest.fixture(scope="module")
def torch_crew() -> Iterator[Any]:
    """The process from which the ranks are forked: torch and the backend are imported there, once."""
    made = sys.modules["crew"].Crew(
        {**os.environ, "OMP_NUM_THREADS": "1"}, "torch._dynamo", "torch.distributed.fsdp", "horoclone.torch"
    )
    yield made
    made.close()


@pytest.fixture
def torch_ranks(torch_crew: Any) -> Iterator[Any]:
    """torch_ranks(body, size, ...) starts ranks that may die; none lives when the test is over."""
    yield from sys.modules["crew"].teams_of(torch_crew)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trained_until_death(**options: Any) -> None:
    dist.init_process_group("horoclone")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1000):
        optimizer.zero_grad()
        model(torch.full((4, 8), float(step))).pow(2).mean().backward()
        optimizer.step()
        if step == 5 and dist.get_rank() == 1:
            die()


@pytest.mark.parametrize("view", [False, True])
def test_a_lost_peer_under_ddp_is_an_error(torch_ranks: Any, view: bool) -> None:
    team = torch_ranks(trained_until_death, 2, gradient_as_bucket_view=view)
    assert team.wait(LIMIT_S) == [1, -signal.SIGKILL], team.outputs()
    assert "RuntimeError" in team.output(0) and "PeerLost" in team.output(0), team.output(0)
    assert "rank 1" in team.output(0).rpartition("PeerLost")[2], team.output(0)
