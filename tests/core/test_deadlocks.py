"""Ranks that wait for one another: named within seconds with their lines, ended with an error, and all can go on."""

from __future__ import annotations

import re
import sys
import tempfile
import time

import numpy as np
import pytest
from worker_pool import say

import horoclone as hvd

SOON = {"HOROCLONE_DEADLOCK_TIME_SECONDS": "1", "HOROCLONE_LOG_HIDE_TIME": "1"}


def ends(call):
    try:
        call()
    except hvd.Mismatch as error:
        say(text=str(error))
    for turn in range(40):
        assert hvd.allreduce(np.ones(2), name="after", op=hvd.Sum)[0] == hvd.size(), turn


def in_branch():
    hvd.init()
    for _ in range(40):  # the bypass is open
        hvd.allreduce(np.ones(2), name="step")
    if hvd.rank() == 0:
        ends(lambda: hvd.allreduce(np.ones(2), name="loss"))  # LINE OF RANK 0
    else:
        ends(lambda: hvd.allreduce(np.ones(2), name="step"))  # LINE OF THE OTHERS


def line_of(words):
    with open(__file__) as file:
        return next(n for n, text in enumerate(file, 1) if text.rstrip().endswith("# " + words))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("size", "shared"),
    [(2, "0"), (3, "1"), (2, "1"), (3, "0")],
)
def test_a_call_in_a_branch_of_rank_0_is_named_with_both_lines_and_ends(worker_pool, size, shared):
    team = worker_pool(in_branch, size, env={**SOON, "HOROCLONE_SHARED_MEMORY": shared})
    assert team.wait() == [0] * size, team.outputs()
    others = "rank 1" if size == 2 else "ranks 1,2"
    where = "tests/core/test_deadlocks.py:"
    said = (
        f"rank 0 stands in allreduce 'loss' at {where}{line_of('LINE OF RANK 0')}, {others} in "
        f"allreduce 'step' at {where}{line_of('LINE OF THE OTHERS')}: "
    )
    for rank in range(size):
        text = team.said(rank, "text")[0]["text"]
        assert said in text and "inside `if hvd.rank() == 0`?" in text, text
    assert team.output(0).count("warning: ") == 1, team.outputs()
    assert all("warning: " not in team.output(rank) for rank in range(1, size)), team.outputs()


def waits_by_polling(handle):
    while not hvd.poll(handle):
        time.sleep(0.02)
    hvd.synchronize(handle)


def polling():
    hvd.init()
    ends(lambda: waits_by_polling(hvd.allreduce_async(np.ones(2), name="ab"[hvd.rank()])))


def test_a_loop_that_polls_is_a_wait_that_ends_after_ten_times_the_limit(worker_pool):
    team = worker_pool(polling, 2, env={**SOON, "HOROCLONE_DEADLOCK_TIME_SECONDS": "0.3"})
    assert team.wait() == [0, 0], team.outputs()
    for rank in range(2):
        text = team.said(rank, "text")[0]["text"]
        assert "rank 0 stands in allreduce 'a' at " in text and "rank 1 in allreduce 'b' at " in text, text


def polling_at_work():
    """Rank 0 looks now and then at an operation that rank 1 comes to late."""
    hvd.init()
    if hvd.rank() == 1:
        hvd.allreduce(np.ones(2), name="first")
    handle = None if hvd.rank() else hvd.allreduce_async(np.ones(2), name="last")
    for _ in range(12):
        time.sleep(0.2)
        if handle is not None:
            assert not hvd.poll(handle)
    if hvd.rank() == 0:
        hvd.allreduce(np.ones(2), name="first")
    hvd.synchronize(handle) if hvd.rank() == 0 else hvd.allreduce(np.ones(2), name="last")


def test_a_program_that_polls_beside_its_work_ends_when_the_others_come(worker_pool):
    """It comes more than two seconds late, which is more than the limit for calls that only wait."""
    team = worker_pool(polling_at_work, 2, env=SOON)
    assert team.wait() == [0, 0], team.outputs()


def alone_in_a_save():
    hvd.init()
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises((hvd.checkpoint.CheckpointError, hvd.Mismatch), match="stands in"):
                hvd.checkpoint.save(folder, {"a": np.ones(3)}, async_=False)
        ends(lambda: None)
    else:
        ends(lambda: hvd.allreduce(np.ones(3), name="step"))


def test_a_save_on_one_rank_ends_on_all(worker_pool):
    team = worker_pool(alone_in_a_save, 2, env=SOON)
    assert team.wait() == [0, 0], team.outputs()


CALLS = {
    "join": hvd.join,
    "barrier": hvd.barrier,
    "recv": lambda: hvd.recv(src=1),
    "send": lambda: hvd.send(np.ones(100_000), 1),
    "broadcast_object": lambda: hvd.broadcast_object({"a": 1}, root_rank=0),
    "unnamed": lambda: hvd.allreduce(np.ones(3)),
    "async": lambda: hvd.synchronize(hvd.allgather_async(np.ones(3))),
    "process set": lambda: hvd.add_process_set([0]),
}


def each_alone():
    hvd.init()
    for call in CALLS.values():
        ends(call if hvd.rank() == 0 else lambda: hvd.recv(src=0, tag=99))
    one = hvd.add_process_set([1])
    assert one.process_set_id == 1


def test_every_kind_of_call_ends_and_can_be_repeated(worker_pool):
    env = {**SOON, "HOROCLONE_DEADLOCK_TIME_SECONDS": "0.3", "HOROCLONE_DYNAMIC_PROCESS_SETS": "1"}
    team = worker_pool(each_alone, 2, env=env)
    assert team.wait() == [0, 0], team.outputs()
    for rank in range(2):
        assert len(team.said(rank, "text")) == len(CALLS), team.outputs()


def compute():
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(2.5)
    assert hvd.allreduce(np.ones(2), name="late", op=hvd.Sum)[0] == 2


def test_a_rank_that_does_something_else_is_waited_for(worker_pool):
    team = worker_pool(compute, 2, env=SOON)
    assert team.wait() == [0, 0], team.outputs()
    assert "stands in" not in team.output(0)


def threads():
    """Rank 0's main thread waits for long, and another of its threads goes on calling; so it is with rank 1."""
    from threading import Thread

    hvd.init()

    def call_again_and_again():
        for _ in range(25):
            hvd.allreduce(np.ones(2), name="other")
            time.sleep(0.1)
        hvd.allreduce(np.ones(2), name="ab"[1 - hvd.rank()])

    other = Thread(target=call_again_and_again)
    other.start()
    hvd.allreduce(np.ones(2), name="ab"[hvd.rank()])
    other.join()


def test_a_rank_whose_other_thread_goes_on_is_waited_for(worker_pool):
    team = worker_pool(threads, 2, env=SOON)
    assert team.wait() == [0, 0], team.outputs()
    assert "stands in" not in team.output(0)


TORCH = """
import torch, horoclone.torch as hvd
hvd.init()
m = torch.nn.Linear(4, 2)
o = hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=.1), m.named_parameters())
for i in range(6 {more}):
    o.zero_grad()
    m(torch.randn(8, 4)).sum().backward()
    o.step()
    {branch}
{end}
"""
WITHOUT_GRADIENT = """
import torch, horoclone.torch as hvd
hvd.init()
x = torch.ones(4, requires_grad=True)
with torch.set_grad_enabled(hvd.rank() == 1):
    y = hvd.allgather(x, name="loss")
if hvd.rank() == 1:
    y.sum().backward()
hvd.allreduce(torch.ones(1), name="after")
"""


def test_a_rank_without_a_gradient_is_named(launch, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_GRADIENT)
    command = [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, str(script)]
    done = launch(command, env=SOON, check=False)
    assert done.returncode != 0
    assert "Has rank 0 called 'loss' without a gradient (no_grad(), detach()" in done.output, done.output


SCRIPTS = {
    "branch": {"more": "", "branch": 'hvd.rank() or hvd.allreduce(torch.ones(1), name="loss")', "end": ""},
    "uneven": {"more": "+ hvd.rank()", "branch": "", "end": 'hvd.allreduce(torch.ones(1), name="metric")'},
}


@pytest.mark.in_turn
@pytest.mark.parametrize("case", ["branch", "uneven"])
def test_scripts_of_torch_are_told_where_their_ranks_stand(launch, tmp_path, case):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(TORCH.format(**SCRIPTS[case]))
    began = time.monotonic()
    command = [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, str(script)]
    done = launch(command, env=SOON, check=False)
    assert done.returncode != 0 and time.monotonic() - began < 120, done.output
    first = "loss" if case == "branch" else "metric"
    text = rf"rank 0 stands in allreduce '{first}' at \S*train\.py:1[0-1], rank 1 in allreduce '[^']*bias[^']* [(]gradients[^']*' at \S*train\.py:\d"
    assert re.search(text, done.output), done.output
    assert "Has rank 1 more batches than rank 0? (hvd.join() evens them out.)" in done.output


BINDINGS = {
    "tensorflow": """
import tensorflow as tf, horoclone.tensorflow as hvd
hvd.init()
call = tf.function(lambda: hvd.allreduce(tf.ones(2), name="ab"[hvd.rank()]))
try:
    call()  # here
except tf.errors.OpError as error:
    print("raised", error)
assert hvd.allreduce(tf.ones(2), name="after", op=hvd.Sum)[0] == 2
""",
    "jax": """
import jax, jax.numpy as jnp, horoclone.jax as hvd
hvd.init()
call = jax.jit(lambda x: hvd.allreduce(x, name="ab"[hvd.rank()]))
try:
    call(jnp.ones(2)).block_until_ready()  # here
except Exception as error:
    print("raised", error)
assert hvd.allreduce(jnp.ones(2), name="after", op=hvd.Sum)[0] == 2
""",
    "torch": """
import torch, torch.distributed as dist, horoclone.torch
dist.init_process_group("horoclone")
x = torch.ones(2)
try:
    dist.recv(x, 1) if dist.get_rank() == 0 else dist.all_reduce(x)  # here
except Exception as error:
    print("raised", error)
x = torch.ones(2)
dist.all_reduce(x)
assert x[0] == 2
dist.destroy_process_group()
""",
}


@pytest.mark.parametrize(
    "framework",
    [
        "torch",
        pytest.param("jax", marks=pytest.mark.long(15)),
        pytest.param("tensorflow", marks=pytest.mark.long(30)),
    ],
)
def test_blocked_programs_of_frameworks_end(launch, tmp_path, framework):
    pytest.importorskip(framework)
    script = tmp_path / "program.py"
    script.write_text(BINDINGS[framework])
    line = next(n for n, text in enumerate(BINDINGS[framework].splitlines(), 1) if text.endswith("# here"))
    command = [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, str(script)]
    done = launch(command, env=SOON)
    places = re.findall(
        r"rank 0 stands in .* at \S*program\.py:(\d+), rank 1 in .* at \S*program\.py:(\d+)", done.output
    )
    assert len(places) >= 3 and set(places) == {(str(line), str(line))}, (
        done.output
    )  # said once, raised on both
