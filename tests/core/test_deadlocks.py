"""Ranks that wait for one another: named within seconds with their lines, ended with an error, and all can go on."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time

import numpy as np
import pytest
from worker_pool import say, teams_of

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


@pytest.mark.parametrize("size", [2, 3])
def test_a_call_in_a_branch_of_rank_0_is_named_with_both_lines_and_ends(teams, size):
    team = ended(teams, f"in_branch of {size}")
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


def test_a_loop_that_polls_is_a_wait_that_ends_after_ten_times_the_limit(teams):
    team = ended(teams, "polling")
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


def test_a_program_that_polls_beside_its_work_ends_when_the_others_come(teams):
    """It comes more than two seconds late, which is more than the limit for calls that only wait."""
    ended(teams, "polling_at_work")


def alone_in_a_save():
    hvd.init()
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises((hvd.checkpoint.CheckpointError, hvd.Mismatch), match="stands in"):
                hvd.checkpoint.save(folder, {"a": np.ones(3)}, async_=False)
        ends(lambda: None)
    else:
        ends(lambda: hvd.allreduce(np.ones(3), name="step"))


def test_a_save_on_one_rank_ends_on_all(teams):
    ended(teams, "alone_in_a_save")


# Join, barrier, receive and unnamed calls alone: csrc/tests/engine/test_deadlock.cc.
CALLS = {
    "send": lambda: hvd.send(np.ones(100_000), 1),
    "broadcast_object": lambda: hvd.broadcast_object({"a": 1}, root_rank=0),
    "async": lambda: hvd.synchronize(hvd.allgather_async(np.ones(3))),
    "process set": lambda: hvd.add_process_set([0]),
}


def each_alone():
    hvd.init()
    for call in CALLS.values():
        ends(call if hvd.rank() == 0 else lambda: hvd.recv(src=0, tag=99))
    one = hvd.add_process_set([1])
    assert one.process_set_id == 1


def test_every_kind_of_call_ends_and_can_be_repeated(teams):
    team = ended(teams, "each_alone")
    for rank in range(2):
        assert len(team.said(rank, "text")) == len(CALLS), team.outputs()


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


def test_a_rank_whose_other_thread_goes_on_is_waited_for(teams):
    assert "stands in" not in ended(teams, "threads").output(0)


@pytest.fixture(scope="module")
def teams(warm_worker_pool):
    """A team for each program, all at once: they do little but wait."""
    quick = {"HOROCLONE_DEADLOCK_TIME_SECONDS": "0.3", "HOROCLONE_DYNAMIC_PROCESS_SETS": "1"}
    programs = {
        f"in_branch of {size}": (in_branch, size, {**SOON, "HOROCLONE_SHARED_MEMORY": shared})
        for size, shared in ((2, "0"), (3, "1"))
    }
    for body in (polling_at_work, alone_in_a_save, threads, polling, each_alone):
        env = {**SOON, **(quick if body in (polling, each_alone) else {})}
        programs[body.__name__] = (body, 2, env)
    with contextlib.contextmanager(teams_of)(warm_worker_pool) as start:
        yield {name: start(body, size, env=env) for name, (body, size, env) in programs.items()}


def ended(teams, program):
    """The team of a program, all of whose ranks have ended well."""
    team = teams[program]
    assert set(team.wait(60)) == {0}, team.outputs()
    return team


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
}


@pytest.mark.parametrize(
    "framework",
    [pytest.param("jax", marks=pytest.mark.long(15)), pytest.param("tensorflow", marks=pytest.mark.long(30))],
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
    # Said once, raised on both
    assert len(places) >= 3 and set(places) == {(str(line), str(line))}, done.output
