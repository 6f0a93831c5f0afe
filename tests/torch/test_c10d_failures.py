"""torch.distributed on the backend `horoclone` when ranks die or never call: an error that names them, never a hang.

The ranks are forked from a process that has imported torch (worker_pool.py) and killed with SIGKILL. What a survivor raises
goes through the interpreter, as in a program that catches nothing: its exit code is 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker_pool import say
from world import raised

from horoclone.errors import Mismatch, PeerLost
from horoclone.torch.c10d.lost import in_words_of_the_job

LIMIT_S = 120.0  # of one case; they take about a second, and a killed process has taken 40 s to end


def test_an_error_of_a_process_group_also_has_the_numbers_in_the_job() -> None:
    error = in_words_of_the_job(
        Mismatch("x: rank 1 announced a and rank 0 announced b. Does rank 2?"), [0, 2, 3]
    )
    assert str(error).endswith("Does rank 2? (rank 1 of the process group is rank 2 of the job)")
    lost = in_words_of_the_job(PeerLost("rank 0 has ended", 0), [1, 2])
    assert isinstance(lost, PeerLost) and lost.rank == 0 and "is rank 1 of the job" in str(lost)
    assert str(in_words_of_the_job(PeerLost("rank 0 has ended", 0), [0, 2])) == "rank 0 has ended"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_with(team: Any, victim: int, ready: int = 0) -> None:
    """SIGKILL for one rank once another one has said that it is about to wait for it."""
    team.wait_for(ready, "waits", LIMIT_S)
    time.sleep(0.05)
    team.send(victim, signal.SIGKILL)


def told(error: Exception, **more: Any) -> None:
    """Says what was raised, for the test."""
    kind = "PeerLost" if "PeerLost" in f"{type(error).__name__} {error}" else type(error).__name__
    say(kind=kind, text=str(error), rank=getattr(error, "rank", None), **more)


def wait_to_be_killed() -> None:
    while True:  # a report of a stall asks for this stack by a signal
        signal.pause()


# --- every operation -------------------------------------------------------------------------------------

Group = Any
T = torch.ones


def rows(group: Group) -> list[torch.Tensor]:
    return [T(3) for _ in range(group.size())]


def if_root(value: Any, group: Group) -> Any:
    return value if group.rank() == 0 else None


def coalesced(group: Group, *calls: Callable[[], Any]) -> None:
    with dist.distributed_c10d._coalescing_manager(group=group):
        for call in calls:
            call()


def messages(group: Group) -> list[Any]:
    other = 1 - group.rank()
    sending = dist.P2POp(dist.isend, T(70_000), other, group)
    receiving = dist.P2POp(dist.irecv, T(70_000), other, group)
    return [work.wait() for work in dist.batch_isend_irecv([sending, receiving])]


def one_way(group: Group, sender: int) -> Any:
    call = dist.send if group.rank() == sender else dist.recv
    return call(T(70_000), 1 - group.rank(), group=group)


# Each is called by both ranks with a group of both; the root is rank 0, the survivor, except where root 1 is meant.
OPERATIONS: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda g: dist.all_reduce(T(3), group=g),
    "all_reduce_large": lambda g: dist.all_reduce(T(1_000_000), group=g),
    "all_reduce_bits": lambda g: dist.all_reduce(T(3, dtype=torch.int32), dist.ReduceOp.BAND, group=g),
    "reduce": lambda g: dist.reduce(T(3), 0, group=g),
    "reduce_to_lost": lambda g: dist.reduce(T(1_000_000), 1, group=g),
    "broadcast": lambda g: dist.broadcast(T(3), 1, group=g),
    "broadcast_to_lost": lambda g: dist.broadcast(T(1_000_000), 0, group=g),
    "all_gather": lambda g: dist.all_gather(rows(g), T(3), group=g),
    "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(T(6), T(3), group=g),
    "gather": lambda g: dist.gather(T(3), if_root(rows(g), g), 0, group=g),
    "scatter": lambda g: dist.scatter(T(3), None if g.rank() == 0 else rows(g), 1, group=g),
    "reduce_scatter": lambda g: dist.reduce_scatter(T(3), rows(g), group=g),
    "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(T(3), T(6), group=g),
    "all_to_all": lambda g: dist.all_to_all(rows(g), rows(g), group=g),
    "all_to_all_single": lambda g: dist.all_to_all_single(T(6), T(6), group=g),
    "barrier": lambda g: dist.barrier(group=g),
    "recv": lambda g: one_way(g, 1),
    "send": lambda g: one_way(g, 0),
    "recv_from_any": lambda g: dist.recv(T(3), group=g) if g.rank() == 0 else dist.send(T(3), 0, group=g),
    "batch_isend_irecv": messages,
    "all_gather_object": lambda g: dist.all_gather_object([None, None], {"a": 1}, group=g),
    "broadcast_object_list": lambda g: dist.broadcast_object_list([("a", 1)], 1, group=g),
    "gather_object": lambda g: dist.gather_object({"a": 1}, if_root([None, None], g), 0, group=g),
    "scatter_object_list": lambda g: dist.scatter_object_list([None], [1, 2], 1, group=g),
    "monitored_barrier": lambda g: g.monitored_barrier(),
    "coalesced_all_reduce": lambda g: coalesced(
        g, lambda: dist.all_reduce(T(3), group=g), lambda: dist.all_reduce(T(4), group=g)
    ),
    "coalesced_all_gather": lambda g: coalesced(
        g,
        lambda: dist.all_gather_into_tensor(T(6), T(3), group=g),
        lambda: dist.all_gather_into_tensor(T(8), T(4), group=g),
    ),
    "coalesced_reduce_scatter": lambda g: coalesced(
        g,
        lambda: dist.reduce_scatter_tensor(T(3), T(6), group=g),
        lambda: dist.reduce_scatter_tensor(T(4), T(8), group=g),
    ),
}


def peer_is_lost_in(operation: str) -> None:
    dist.init_process_group("horoclone")
    call, other, third = OPERATIONS[operation], dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (dist.group.WORLD, other, third):
        call(group)
    if dist.get_rank() == 1:
        wait_to_be_killed()
    work = dist.all_reduce(T(3), group=third, async_op=True)
    future = dist.all_reduce(T(3), group=third, async_op=True).get_future()
    heard: list[str] = []
    future.add_done_callback(lambda done: heard.append("callback"))
    say(waits=True)
    error = raised(lambda: call(dist.group.WORLD))
    told(error, case="while this rank waits")
    told(raised(lambda: call(dist.group.WORLD)), case="once more")
    told(raised(lambda: call(other)), case="after the death")
    told(raised(work.wait), case="asynchronous")
    told(raised(future.wait), case="future")
    assert work.is_completed() and not work.is_success() and "rank 1" in str(work.exception())
    dist.destroy_process_group()
    say(destroyed=heard)
    raise error


def peer_is_lost_in_all() -> None:
    """Each operation waits in a group and a thread of its own."""
    dist.init_process_group("horoclone")
    groups = {name: dist.new_group([0, 1]) for name in OPERATIONS}
    for name, group in groups.items():
        OPERATIONS[name](group)
    if dist.get_rank() == 1:
        wait_to_be_killed()

    def wait_in(name: str) -> None:
        told(raised(lambda: OPERATIONS[name](groups[name])), case=name)

    threads = [threading.Thread(target=wait_in, args=(name,)) for name in OPERATIONS]
    for thread in threads:
        thread.start()
    say(waits=True)
    for thread in threads:
        thread.join()
    dist.destroy_process_group()


def expect_peer_lost(team: Any, traces: Sequence[Any], folder: Path, rank: int = 0, lost: int = 1) -> None:
    said = team.said(rank, "kind")
    for fact in said:
        assert fact["kind"] == "PeerLost" and f"rank {lost}" in fact["text"], (fact, team.outputs())
    assert said, team.outputs()
    left = sys.modules["worker_pool"].left_over(traces)
    assert not left and not list(folder.iterdir()), (left, list(folder.iterdir()))


@pytest.fixture(scope="module")
def waiting(warm_torch_worker_pool: Any, tmp_path_factory: Any) -> Any:
    """Teams that do little but wait, all at once, each with a folder of its own for temporary files."""
    started = {}
    with contextlib.ExitStack() as stack:
        for body, size, more in (
            (peer_is_lost_in_all, 2, {}),
            (a_member_is_lost, 3, {}),
            (rank_zero_is_lost, 2, {}),
            (some_ranks_never_call, 4, {"late": [1, 2]}),
        ):
            folder = tmp_path_factory.mktemp(body.__name__)
            team = warm_torch_worker_pool.start(body, size, env={"TMPDIR": str(folder)}, **more)
            stack.callback(team.close)
            started[body.__name__] = team, folder
        yield started


def test_a_lost_peer_is_named_by_every_operation(waiting: Any) -> None:
    team, folder = waiting["peer_is_lost_in_all"]
    killed_with(team, 1)
    assert team.wait(LIMIT_S) == [0, -signal.SIGKILL], team.outputs()
    assert {fact["case"] for fact in team.said(0, "case")} == set(OPERATIONS), team.outputs()
    expect_peer_lost(team, [], folder)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "operation",
    OPERATIONS,
)
def test_a_lost_peer_is_named_by(operation: str, torch_worker_pool: Any, tmp_path: Path) -> None:
    team = torch_worker_pool(peer_is_lost_in, 2, env={"TMPDIR": str(tmp_path)}, operation=operation)
    killed_with(team, 1)
    assert team.wait(LIMIT_S) == [1, -signal.SIGKILL], team.outputs()
    assert team.said(0, "destroyed")[0]["destroyed"] == ["callback"], team.outputs()
    assert len(team.said(0, "kind")) == 5
    expect_peer_lost(team, [], tmp_path)


# --- training --------------------------------------------------------------------------------------------


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def breaking_hook(state, bucket):  # without annotations, which torch compares with its own classes
    if state["left"] == 0:
        raise ZeroDivisionError("the hook of rank 0 broke")
    state["left"] -= 1
    return default_hooks.allreduce_hook(None, bucket)


def hook_with_a_callback(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def trained_until_death(how: str) -> None:
    dist.init_process_group("horoclone")
    rank = dist.get_rank()
    torch.manual_seed(0)
    options = {
        "unused": "find_unused_parameters",
        "static": "static_graph",
        "view": "gradient_as_bucket_view",
    }
    model = (
        TwoLayers() if how == "unused" else torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    )
    more = {options[how]: True} if how in options else {}
    model = DistributedDataParallel(model, bucket_cap_mb=0.0001, **more)
    if how == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if how == "hook":
        model.register_comm_hook({"left": 5 if rank == 0 else -1}, breaking_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1000):
        optimizer.zero_grad()
        model(torch.full((4, 8), float(step))).pow(2).mean().backward()
        optimizer.step()
        if step == 5 and rank == 1 and how != "hook":
            die()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "how",
    [
        "plain",
        "fp16",
        "view",
        "unused",
        "static",
    ],
)
def test_a_lost_peer_under_ddp_is_an_error(how: str, torch_worker_pool: Any, tmp_path: Path) -> None:
    team = torch_worker_pool(trained_until_death, 2, env={"TMPDIR": str(tmp_path)}, how=how)
    assert team.wait(LIMIT_S) == [1, -signal.SIGKILL], team.outputs()
    assert "PeerLost" in team.output(0), team.output(0)
    assert "rank 1" in team.output(0).rpartition("PeerLost")[2], team.output(0)
    assert not list(tmp_path.iterdir())


def test_an_exception_in_a_hook_ends_that_rank_and_the_others_name_it(torch_worker_pool: Any) -> None:
    team = torch_worker_pool(trained_until_death, 2, how="hook")
    assert team.wait(LIMIT_S) == [1, 1], team.outputs()
    assert "ZeroDivisionError" in team.output(0) and "the hook of rank 0 broke" in team.output(0)
    assert "rank 0" in team.output(1) and "Error" in team.output(1), team.outputs()


def sharded_until_death(where: str) -> None:
    dist.init_process_group("horoclone")
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(1000):
        last = rank == 1 and step == 3
        if last and where == "forward":
            model[1].register_forward_hook(lambda *_: die())
        loss = (model(torch.ones(6, 12)) ** 2).mean()
        if last and where == "backward":
            model[0].register_full_backward_hook(lambda *_: die())
        loss.backward()
        if last and where == "optimizer":
            die()
        if where == "optimizer":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "where",
    ["backward", "forward", "optimizer"],
)
def test_a_lost_peer_under_fsdp_is_an_error(where: str, torch_worker_pool: Any, tmp_path: Path) -> None:
    team = torch_worker_pool(sharded_until_death, 2, env={"TMPDIR": str(tmp_path)}, where=where)
    assert team.wait(LIMIT_S) == [1, -signal.SIGKILL], team.outputs()
    assert "PeerLost" in team.output(0), team.output(0)
    assert "rank 1" in team.output(0).rpartition("PeerLost")[2], team.output(0)
    assert not list(tmp_path.iterdir())


# --- groups ---------------------------------------------------------------------------------------------


def a_member_is_lost() -> None:
    dist.init_process_group("horoclone")
    rank = dist.get_rank()
    living, mixed = dist.new_group([0, 2]), dist.new_group([1, 2])
    if rank == 1:
        wait_to_be_killed()
    say(waits=True, traces=sys.modules["worker_pool"].traces())
    told(raised(dist.barrier), case="world")
    if rank == 2:
        told(raised(lambda: dist.all_reduce(T(1), group=mixed)), case="subgroup")
    began = time.monotonic()
    told(raised(lambda: dist.new_group([0, 1, 2])), case="new group")
    assert time.monotonic() - began < 20  # and not the default limit of 30 minutes
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=living)  # goes on, and so does a new one without the lost rank
    again = dist.new_group([0, 2])
    dist.all_reduce(x, group=again)
    assert x.tolist() == [4.0] * 3
    dist.destroy_process_group(again)
    dist.destroy_process_group()
    say(destroyed=True)


def test_groups_without_the_lost_rank_go_on(waiting: Any) -> None:
    team, folder = waiting["a_member_is_lost"]
    team.wait_for(2, "waits", LIMIT_S)
    killed_with(team, 1)
    assert team.wait(LIMIT_S) == [0, -signal.SIGKILL, 0], team.outputs()
    for rank in (0, 2):
        assert [fact["case"] for fact in team.said(rank, "case")][-1] == "new group"
        expect_peer_lost(team, [team.said(rank, "traces")[0]["traces"]], folder, rank)


def rank_zero_is_lost() -> None:
    dist.init_process_group("horoclone")
    if dist.get_rank() == 0:
        wait_to_be_killed()
    say(waits=True, traces=sys.modules["worker_pool"].traces())
    told(raised(dist.barrier), case="world")
    told(raised(dist.group.WORLD.monitored_barrier), case="monitored barrier")
    told(raised(lambda: dist.new_group([0, 1])), case="new group")
    dist.destroy_process_group()


def test_the_rank_that_made_the_store_is_lost(waiting: Any) -> None:
    team, folder = waiting["rank_zero_is_lost"]
    killed_with(team, 0, ready=1)
    assert team.wait(LIMIT_S) == [-signal.SIGKILL, 0], team.outputs()
    assert len(team.said(1, "kind")) == 3
    expect_peer_lost(team, [team.said(1, "traces")[0]["traces"]], folder, rank=1, lost=0)


# --- ranks that never call ------------------------------------------------------------------------------


LIMITED = ("all_reduce", "broadcast_to_lost", "future", "monitored_barrier", "ddp", "ddp, hook", "per call")


def error_at_the_limit(through: str, group: Group) -> Exception:
    if through == "future":
        return raised(dist.all_reduce(T(3), group=group, async_op=True).get_future().wait)
    if through == "per call":
        work = dist.all_reduce(T(3), group=group, async_op=True)
        error = raised(lambda: work.wait(timedelta(seconds=0.5)))
        assert "may be called again" in str(error) and not work.is_completed()
        return error
    if through == "monitored_barrier":
        return raised(lambda: group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True))
    if through.startswith("ddp"):
        model = DistributedDataParallel(torch.nn.Linear(3, 3), init_sync=False, process_group=group)
        if through == "ddp, hook":
            model.register_comm_hook(group, hook_with_a_callback)
        return raised(lambda: model(T(2, 3)).sum().backward())
    return raised(lambda: OPERATIONS[through](group))


def some_ranks_never_call(late: list[int]) -> None:
    """They wait in one group after another. At the end nobody leaves: who is later is to find living ranks."""
    dist.init_process_group("horoclone")
    groups = {through: dist.new_group() for through in LIMITED}
    dist.barrier()
    if dist.get_rank() in late:
        wait_to_be_killed()
    for through, group in groups.items():
        group.set_timeout(timedelta(seconds=1))  # now: a start may take longer on a busy machine
        error = error_at_the_limit(through, group)
        say(through=through, text=f"{type(error).__name__}: {error}")
        if through != "per call":  # where something is still under way
            dist.destroy_process_group(group)
    say(over=True)
    wait_to_be_killed()


def test_a_time_limit_says_which_ranks_have_not_called(waiting: Any) -> None:
    team, _ = waiting["some_ranks_never_call"]
    for rank in (0, 3):
        team.wait_for(rank, "over", LIMIT_S)
        facts = team.said(rank, "through")
        assert [fact["through"] for fact in facts] == list(LIMITED), team.outputs()
        for fact in facts:
            if fact["through"] == "per call" and rank:
                continue  # the others do not know it
            assert "Timeout" in fact["text"] or "time limit" in fact["text"], fact
            assert "1, 2" in fact["text"].lower(), team.outputs()
