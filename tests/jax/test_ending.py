"""A program of JAX's that was dispatched runs to its end, whichever rank comes first to the end of its script."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import worker_pool
from world import later

later("jax")


BEGIN = """
import sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import horoclone.jax as hvd
hvd.init()
me = hvd.rank()

def work(x):
    return jnp.tanh(jnp.linalg.matrix_power(x, 8))

@jax.jit
def step(x):
    return hvd.allreduce(work(x) + me, op=hvd.Sum)

@jax.jit
def other(x):
    return hvd.allreduce(work(x) + 1, op=hvd.Sum, name="other")

def train(steps=60, read=None, x=None):
    x = jnp.zeros((100, 100)) if x is None else x
    for _ in range(steps):
        x = step(x * 0)
    if me == read:
        print("got", float(x[0, 0]), flush=True)
"""


def script(program: str) -> None:
    exec(BEGIN + program, {"__name__": "__main__"})


@pytest.fixture
def two() -> Iterator[Callable[..., Any]]:
    """two(program=...) starts two ranks, each a program that ends as programs do."""
    (warm, _) = worker_pool.warm_processes("jax", {**os.environ, "OMP_NUM_THREADS": "1"})
    for start in worker_pool.teams_of(warm):
        yield functools.partial(start, script, 2)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "body",
    {
        "the reader": "train(read=0)",
        "slow": "train(20)\nif me == 0: time.sleep(2)\ntrain(20, read=0)",
        "threads": "t = threading.Thread(target=train, kwargs={'read': 0}); t.start(); t.join()",
        "shutdown": "train(read=0)\nhvd.shutdown()",
        "never read": "for _ in range(40): step(jnp.zeros((100, 100)))\ntrain(5, read=0)",
        "donated": "step = jax.jit(step, donate_argnums=0)\ntrain(read=0)",
        "one program": "train(1, read=0, x=jnp.zeros((900, 900)))",
        "shard_map": """
mesh = jax.make_mesh((1,), ("i",))
P = jax.sharding.PartitionSpec
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
train(read=0)
""",
    }.items(),
    ids=lambda pair: pair[0].replace(" ", "_"),
)
def test_only_one_rank_reads_a_result(two: Any, body: tuple[str, str]) -> None:
    team = two(program=body[1])
    assert team.wait(90) == [0, 0], team.outputs()
    assert "got 1.0" in team.output(0), team.outputs()
    assert "Aborted" not in team.outputs() and "shut down" not in team.outputs(), team.outputs()


def test_what_was_dispatched_before_shutdown_is_there_after_it(two: Any) -> None:
    team = two(
        program="""
for turn in range(3):
    x = jnp.zeros((100, 100))
    for _ in range(30): x = step(x * 0)
    hvd.shutdown()
    assert float(x[0, 0]) == 1, x
    hvd.init()
    assert float(step(jnp.zeros((9, 9)))[0, 0]) == 1
print("well", flush=True)
"""
    )
    assert team.wait(90) == [0, 0], team.outputs()
    assert team.outputs().count("well") == 2, team.outputs()


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("raise ValueError('bad batch 17')", 1, "bad batch 17"), ("sys.exit(3)", 3, "rank 1")],
    ids=["raise", "exit"],
)
def test_an_end_with_work_in_flight_ends_both_ranks(two: Any, end: str, code: int, said: str) -> None:
    team = two(
        program=f"train(40)\nif me == 1:\n    {end}\ntrain(40)\nprint('went on', float(step(jnp.zeros((9, 9)))[0, 0]))\n"
    )
    assert team.wait(40) == [1, code], team.outputs()
    assert "went on" not in team.outputs(), team.outputs()
    assert "rank 1" in team.output(0) and said in team.output(0), team.outputs()


def test_programs_that_the_other_rank_does_not_run_end_with_the_reason(two: Any) -> None:
    team = two(
        program="import horoclone.jax.finishing as f; f.IN_VAIN_S = 2.0\n(step if me else other)(jnp.zeros((9, 9)))\n"
    )
    team.wait(40)
    assert "do all ranks call the same programs" in team.outputs(), team.outputs()


def test_a_rank_that_has_dispatched_less_tells_the_other_that_it_has_gone(two: Any) -> None:
    team = two(program="train(20 + 20 * me, read=1)")
    assert team.wait(40)[1] != 0, team.outputs()
    assert re.search(r"rank 0 .* has shut down", team.output(1)), team.outputs()
