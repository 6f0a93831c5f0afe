"""Ranks of torch that wait for one another are told where they stand, and end with an error.

Also in a circle through several worlds of one process, hvd's and process groups of torch.distributed: it is said with
both lines within seconds; made anew, all worlds work.
"""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import torch
import torch.distributed as dist
from worker_pool import say

import horoclone.torch as hvd

SOON = {"HOROCLONE_DEADLOCK_TIME_SECONDS": "1", "HOROCLONE_LOG_HIDE_TIME": "1"}


def ends(call):
    try:
        call()
    except hvd.Mismatch as error:
        say(text=str(error))


def goes_on(*groups):
    for turn in range(20):
        for group in groups:
            dist.all_reduce(x := torch.ones(2), group=group)
            assert x[0] == group.size(), turn
        if hvd.is_initialized():
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == hvd.size(), turn


def here():
    return torch.ones(2)


def leaves():
    dist.destroy_process_group()
    if hvd.is_initialized():
        hvd.shutdown()


def hvd_against_c10d():
    for odd in (0, 1):
        hvd.init()
        dist.init_process_group("horoclone")
        goes_on(dist.group.WORLD)
        if hvd.rank() == odd:
            ends(lambda: hvd.allreduce(here(), name="loss"))
        else:
            ends(lambda: dist.all_reduce(here()))
        leaves()


def c10d_before_hvd():
    dist.init_process_group("horoclone")
    hvd.init()
    ends((lambda: hvd.allreduce(here())) if dist.get_rank() else dist.barrier)
    leaves()
    hvd.init()
    goes_on()


def two_groups():
    dist.init_process_group("horoclone")
    other = dist.new_group(list(range(dist.get_world_size())))
    ends((lambda: dist.all_reduce(here(), group=other)) if dist.get_rank() else dist.barrier)
    leaves()
    dist.init_process_group("horoclone")
    goes_on(dist.group.WORLD)
    dist.destroy_process_group()


def a_group_of_some():
    """Ranks 1 and 2 have a group of their own, in which rank 1 waits; rank 2 waits for all, as rank 0 does."""
    hvd.init()
    dist.init_process_group("horoclone")
    some = dist.new_group([1, 2])
    ends((lambda: dist.all_reduce(here(), group=some)) if hvd.rank() == 1 else lambda: hvd.allreduce(here()))
    leaves()
    hvd.init()
    goes_on()


# Program -> how many circles it makes, one after another.
CIRCLES = {"hvd_against_c10d": 2, "c10d_before_hvd": 1, "two_groups": 1, "a_group_of_some": 1}


def a_third_computes():
    hvd.init()
    dist.init_process_group("horoclone")
    if hvd.rank() == 0:
        hvd.allreduce(here(), name="loss")
        dist.all_reduce(here())
        return
    if hvd.rank() == 2:
        end = time.monotonic() + 4
        work = dist.all_reduce(here(), async_op=True)
        while time.monotonic() < end:
            sum(range(1000))
        hvd.allreduce(here(), name="loss")
        work.wait()
        return
    work = hvd.allreduce_async(here(), name="loss")
    dist.all_reduce(here())
    hvd.synchronize(work)


def both_by_threads():
    """The main threads stand in different worlds, and the other threads come to both later."""
    from threading import Thread

    hvd.init()
    dist.init_process_group("horoclone")
    calls = [lambda: hvd.allreduce(here(), name="loss"), lambda: dist.all_reduce(here())]
    if hvd.rank():
        calls.reverse()

    def later():
        time.sleep(5)
        calls[1]()

    other = Thread(target=later)
    other.start()
    calls[0]()
    other.join()


# --- within one world ---


def trains(steps, after_a_step=lambda: None):
    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()  # LINE OF THE GRADIENTS
        optimizer.step()
        after_a_step()


def call_in_a_branch():
    trains(6, lambda: hvd.rank() or hvd.allreduce(torch.ones(1), name="loss"))  # LINE OF THE LOSS


def uneven_steps():
    hvd.init()
    trains(6 + hvd.rank())
    hvd.allreduce(torch.ones(1), name="metric")  # LINE OF THE METRIC


def without_a_gradient():
    hvd.init()
    x = torch.ones(4, requires_grad=True)
    with torch.set_grad_enabled(hvd.rank() == 1):
        y = hvd.allgather(x, name="loss")
    if hvd.rank() == 1:
        y.sum().backward()
    hvd.allreduce(torch.ones(1), name="after")


def receive_against_reduction():
    dist.init_process_group("horoclone")
    x = torch.ones(2)
    try:
        dist.recv(x, 1) if dist.get_rank() == 0 else dist.all_reduce(x)  # LINE OF BOTH
    except Exception as error:
        say(text=str(error))
    goes_on(dist.group.WORLD)
    dist.destroy_process_group()


WITHIN_ONE = (call_in_a_branch, uneven_steps, without_a_gradient, receive_against_reduction)


def line_of(words):
    with open(__file__) as file:
        return next(n for n, text in enumerate(file, 1) if text.rstrip().endswith("# " + words))


def size_of(program):
    return 3 if program in ("a_group_of_some", "a_third_computes") else 2


@pytest.fixture(scope="module")
def teams(warm_torch_worker_pool):
    """A team for each program, all at once: they do little but wait."""
    limits = {"both_by_threads": {"HOROCLONE_DEADLOCK_TIME_SECONDS": "20"}}
    circles = [globals()[name] for name in CIRCLES]
    started = {}
    with contextlib.ExitStack() as stack:
        for program in (*circles, a_third_computes, both_by_threads, *WITHIN_ONE):
            name = program.__name__
            team = warm_torch_worker_pool.start(program, size_of(name), env={**SOON, **limits.get(name, {})})
            stack.callback(team.close)
            started[name] = team
        yield started


@pytest.mark.parametrize("program", CIRCLES)
def test_a_circle_through_two_worlds_is_said_once_and_ends_on_every_rank(teams, program):
    team, size = teams[program], size_of(program)
    assert team.wait() == [0] * size, team.outputs()
    output = "".join(team.output(rank) for rank in range(size))
    said = re.findall(r"warning: .* stands? in .* at \S*test_c10d_deadlocks\.py:\d+.*", output)
    assert len(said) == CIRCLES[program] == output.count("warning: "), output
    for rank in range(size):
        errors = team.said(rank, "text")
        assert len(errors) == CIRCLES[program], team.outputs()
        for error in errors:
            assert len(re.findall(r" at \S*test_c10d_deadlocks\.py:\d+", error["text"])) >= 2, error
            assert "of another process group of ranks" in error["text"], error
            assert "A call of one process group is not answered by one of another" in error["text"], error


def test_a_rank_that_computes_is_waited_for_in_two_worlds(teams):
    team = teams["a_third_computes"]
    assert team.wait() == [0, 0, 0], team.outputs()
    assert "stands in" not in team.outputs() and "stand in" not in team.outputs(), team.outputs()


def test_threads_that_come_later_find_the_calls_that_were_waited_for(teams):
    team = teams["both_by_threads"]
    assert team.wait() == [0, 0], team.outputs()
    assert not team.said(0, "text"), team.outputs()


@pytest.mark.parametrize(("program", "name"), [("call_in_a_branch", "loss"), ("uneven_steps", "metric")])
def test_programs_that_train_are_told_where_their_ranks_stand(teams, program, name):
    team = teams[program]
    assert 0 not in team.wait(), team.outputs()
    at = r"at \S*test_c10d_deadlocks\.py:"
    ours, others = line_of(f"LINE OF THE {name.upper()}"), line_of("LINE OF THE GRADIENTS")
    gradients = r"'[^']*bias[^']* [(]gradients[^']*'"
    text = rf"rank 0 stands in allreduce '{name}' {at}{ours}, rank 1 in allreduce {gradients} {at}{others}\b"
    assert re.search(text, team.outputs()), team.outputs()
    assert "Has rank 1 more batches than rank 0? (hvd.join() evens them out.)" in team.outputs()


def test_a_rank_without_a_gradient_is_named(teams):
    team = teams["without_a_gradient"]
    assert 0 not in team.wait(), team.outputs()
    assert "Has rank 0 called 'loss' without a gradient (no_grad(), detach()" in team.outputs(), (
        team.outputs()
    )


def test_a_receive_that_meets_a_reduction_is_said_once_and_raised_on_both(teams):
    team = teams["receive_against_reduction"]
    assert team.wait() == [0, 0], team.outputs()
    stand = r"rank 0 stands in .* at \S*test_c10d_deadlocks\.py:(\d+), rank 1 in .* at \S*\.py:(\d+)"
    said = re.findall(stand, team.outputs())
    assert said == [(str(line_of("LINE OF BOTH")),) * 2] * 3, team.outputs()
