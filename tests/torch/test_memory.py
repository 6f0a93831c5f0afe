"""Memory under ever new names and tags: what comes once, or a few times, leaves nothing behind, whatever
size its result has. What a forked child writes stays its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world import ranks, run_python

import horoclone
import horoclone.torch as hvd

ELEMENTS = 1 << 18  # 1 MiB of float32: memory that the allocator keeps once it has been freed
CALLS = 100  # a leak of one result in each would be 100 MiB
LONG_CALLS = int(os.environ.get("HOROCLONE_TEST_MEMORY_CALLS", "20000"))
NOISE_MIB = 24

OPERATIONS = [
    "allreduce", "grouped_allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "gather", "tags", "objects"
]  # fmt: skip


def cases(**operations: list[str]) -> list[Any]:
    """By framework; those of one that is not installed are skipped."""
    return [
        pytest.param(kind, o, marks=pytest.mark.skipif(find_spec(kind) is None, reason=f"needs {kind}"))
        for kind, names in operations.items()
        for o in names
    ]


CASES = cases(numpy=["allgather", "tags"], torch=["allreduce_", "uneven_allgather", "alltoall_splits"])
OTHERS = cases(numpy=["allreduce"], torch=OPERATIONS)
LONG = cases(
    torch=["allreduce", "tags", "uneven_allgather", "reducescatter", "broadcast", "sparse", "process_sets"],
    numpy=["allreduce", "tags", "process_sets"],
    tensorflow=["allreduce", "uneven_allgather"],
)


def resident_mib() -> float:
    gc.collect()
    # Of it what is no shared memory, whose pages come when used first
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")) / 1024


def call(kind: str, operation: str, elements: int) -> Callable[[int], Any]:
    """One call, by its number, which is in its name or tag."""
    hvd: Any = horoclone
    x: Any = np.ones(elements, np.float32)
    splits: Any = np.array([1, elements - 1])
    if kind == "torch":
        import horoclone.torch as hvd

        x, splits = torch.ones(elements), torch.tensor([1, elements - 1], dtype=torch.int32)
    elif kind == "tensorflow":
        import tensorflow as tf

        import horoclone.tensorflow as hvd

        x = tf.ones(elements)
    other = 1 - hvd.rank()

    def tags(number: int) -> None:
        handle = hvd.isend(x, dst=other, tag=number)
        hvd.recv(src=other, tag=number)
        hvd.synchronize(handle)

    def sparse(number: int) -> None:
        rows = x[: elements - elements % 64].reshape(-1, 64)
        tensor = torch.sparse_coo_tensor(torch.arange(len(rows))[None], rows, check_invariants=True)
        hvd.sparse_allreduce_async(tensor, name=f"m{number}", op=hvd.Sum)()

    def process_sets(number: int) -> None:
        members = hvd.add_process_set([number % 2])
        if members.included():
            hvd.allreduce(x, name=f"m{number}", process_set=members)
        hvd.remove_process_set(members)

    calls: dict[str, Callable[[int], Any]] = {
        "allreduce": lambda number: hvd.allreduce(x, name=f"m{number}"),
        "allreduce_": lambda number: hvd.allreduce_(x, name=f"m{number}"),
        "grouped_allreduce": lambda number: hvd.grouped_allreduce([x, x], name=f"m{number}"),
        "allgather": lambda number: hvd.allgather(x, name=f"m{number}"),
        "uneven_allgather": lambda number: hvd.allgather(
            x[: elements - number % 7 * (hvd.rank() + 1)], name=f"m{number}"
        ),
        "broadcast": lambda number: hvd.broadcast(x, 0, name=f"m{number}"),
        "reducescatter": lambda number: hvd.reducescatter(x, name=f"m{number}"),
        "alltoall": lambda number: hvd.alltoall(x, name=f"m{number}"),
        "alltoall_splits": lambda number: hvd.alltoall(x, splits=splits, name=f"m{number}"),
        "gather": lambda number: hvd.gather(x, 0, name=f"m{number}"),
        "tags": tags,
        "objects": lambda number: hvd.broadcast_object(bytes(4 * elements), name=f"m{number}"),
        "sparse": sparse,
        "process_sets": process_sets,
    }
    return calls[operation]


def growth_mib(kind: str, operation: str, calls: int, elements: int) -> list[float]:
    """MiB more than before, after so many calls under names that come once, and after as many whose names come thrice."""
    once = call(kind, operation, elements)
    for number in range(30):
        once(number)
    before = resident_mib()
    grown = []
    for times in (1, 3):  # a name that comes again is remembered
        for number in range(times * calls, (times + 1) * calls):
            once(100 + number // times)
        grown.append(resident_mib() - before)
    return grown


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("kind", "operation"),
    CASES + OTHERS,
)
@ranks(2)
def test_results_under_ever_new_names_leave_no_memory_behind(kind: str, operation: str) -> None:
    assert max(growth_mib(kind, operation, CALLS, ELEMENTS)) < NOISE_MIB


@pytest.mark.long(900)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "operation"), LONG)
def test_memory_is_flat_over_many_calls(worlds, tmp_path, kind, operation) -> None:
    """HOROCLONE_TEST_MEMORY_CALLS of them, 20,000. One that kept its result would leave 2.5 GiB."""
    env = {"HOROCLONE_DYNAMIC_PROCESS_SETS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if operation == "broadcast":
        env["HOROCLONE_TIMELINE"] = str(tmp_path / "timeline.json")
    job = {"kind": kind, "operation": operation, "calls": LONG_CALLS // 2, "elements": ELEMENTS // 8}
    grown = worlds.run(2, growth_mib, limit_s=1800, env=env, **job)
    print(kind, operation, "MiB more than before, by rank:", grown)
    assert np.max(grown) < NOISE_MIB, grown


@ranks(2)
def test_many_new_names_at_once_are_all_held_until_they_are_done() -> None:
    for _ in range(2):
        if horoclone.rank() == 1:
            horoclone.recv(src=0)  # those of rank 0 are pending until then
        handles = [
            horoclone.allreduce_async(np.full(3, number, np.float32), name=f"n{number}", op=horoclone.Sum)
            for number in range(200)
        ]
        if horoclone.rank() == 0:
            for number in (0, 199):
                with pytest.raises(ValueError, match="already pending"):
                    horoclone.allreduce_async(np.ones(3, np.float32), name=f"n{number}")
            horoclone.send(np.ones(1), 1)
        got = [horoclone.synchronize(handle).tolist() for handle in handles]
        assert got == [[2.0 * number] * 3 for number in range(200)]


def jemalloc() -> str | None:
    found = sorted(Path("/usr/lib").glob("*/libjemalloc.so.2"))
    return str(found[0]) if found else None


@pytest.mark.skipif(jemalloc() is None, reason="needs jemalloc (Debian: libjemalloc2)")
def test_another_allocator_gets_the_sizes_that_it_was_asked_for() -> None:
    """jemalloc believes the size that operator delete tells it: a wrong one ends the process sooner or later."""
    program = (
        "import numpy as np, horoclone as hvd; hvd.init()\n"
        "for n in range(2000): hvd.allreduce(np.ones(9), name=f'metric {n}')\n"
        "hvd.shutdown(); print('done')"
    )
    env = {**os.environ, "LD_PRELOAD": str(jemalloc())}
    done = run_python(program, env=env)
    assert done.stdout == "done\n" and done.returncode == 0, done.stderr


def equal_weights(values):
    assert values[0] == values[1]


@ranks(2, check=equal_weights)
def test_data_loaders_and_forks_leave_shared_gradients_alone():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    data = torch.utils.data.TensorDataset(torch.arange(256.0).reshape(4, 64))
    for epoch in range(3):
        loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)  # forked anew in every epoch
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch / 256 + hvd.rank()).square().sum().backward()
            optimizer.step()
        before = model.weight.grad.clone()
        pid = os.fork()
        if pid == 0:
            same = torch.equal(model.weight.grad, before)
            model.weight.grad.fill_(1e9)
            os._exit(0 if same else 1)
        assert os.waitpid(pid, 0)[1] == 0, f"the child of epoch {epoch} saw other gradients"
        assert torch.equal(model.weight.grad, before), f"the child of epoch {epoch} wrote into ours"
    return model.weight.detach().flatten().tolist()
