"""A program of JAX's that was dispatched runs to its end, whichever rank comes first to the end of its script."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jax")

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


@pytest.fixture
def two(launch: Any) -> Callable[..., Any]:
    def run(body: str, check: bool = True) -> Any:
        command = [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, "-c", BEGIN + body]
        return launch(command, timeout_s=90, check=check)

    return run


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
    done = two(body[1])
    assert "got 1.0" in done.stdout, done.output
    assert "Aborted" not in done.output and "shut down" not in done.output, done.output


def test_what_was_dispatched_before_shutdown_is_there_after_it(two: Any) -> None:
    done = two(
        """
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
    assert done.stdout.count("well") == 2, done.output


@pytest.mark.parametrize("end", ["raise ValueError('bad batch 17')", "sys.exit(3)"])
def test_an_end_with_work_in_flight_ends_both_ranks(two: Any, end: str) -> None:
    done = two(
        f"train(40)\nif me == 1:\n    {end}\ntrain(40)\nprint('went on', float(step(jnp.zeros((9, 9)))[0, 0]))\n",
        False,
    )
    assert done.returncode != 0 and done.seconds < 40 and "went on" not in done.stdout, done.output
    assert "rank 1" in done.output and ("exit code 3" in done.output or "bad batch 17" in done.output), (
        done.output
    )


def test_programs_that_the_other_rank_does_not_run_end_with_the_reason(two: Any) -> None:
    done = two(
        "import horoclone.jax.finishing as f; f.IN_VAIN_S = 2.0\n(step if me else other)(jnp.zeros((9, 9)))\n",
        False,
    )
    assert done.seconds < 40, done.output
    assert "do all ranks call the same programs" in done.output, done.output


def test_a_rank_that_has_dispatched_less_tells_the_other_that_it_has_gone(two: Any) -> None:
    done = two("train(20 + 20 * me, read=1)", False)
    assert done.returncode != 0 and done.seconds < 40, done.output
    assert re.search(r"rank 0 .* has shut down", done.output), done.output
