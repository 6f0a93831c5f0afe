"""Connections between living ranks that break are made again: resets and cut cables under every operation."""

from __future__ import annotations

import functools
import random
import time
from pathlib import Path

import numpy as np
import pytest
from namespaces import Hosts, inside
from worker_pool import say
from world import until

import horoclone as hvd

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("needs_root")]


PORT = 29_517


@pytest.fixture
def team(worker_pool, opened):
    def start(body, cables=1, per_host=1, **kwargs):
        hosts = opened(Hosts(cables))
        places, where = hosts.places(per_host), [f"{hosts.addresses[0][0]}:{PORT}"]
        return hosts, worker_pool(body, 2 * per_host, namespaces=places, addresses=where, **kwargs)

    return start


COUNTS = [1, 100, 5_000, 40_000, 300_000, 1_500_000]


@functools.cache
def drawn(rank):
    return np.random.default_rng(rank).integers(-1000, 1000, COUNTS[-1]).astype(np.float32)


def values(turn, rank, count):
    """Whole numbers, of which every sum is exact. Cheap, so that what takes long is the operation."""
    return drawn(rank)[:count] + np.float32(turn % 1000)


def one_turn(turn, rank, size):
    """One operation that the number of the turn names, held against NumPy's result. Returns when it began and the
    seconds that it took."""
    choice = random.Random(turn)
    what = choice.choice(
        ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "message"]
    )
    count = choice.choice(COUNTS) // size * size or size
    root = choice.randrange(size)
    mine, name = values(turn, rank, count), f"{what}.{count}"

    def message():
        sent = hvd.isend(mine, (rank + 1) % size)
        result = hvd.recv(np.empty_like(mine), (rank - 1) % size)
        hvd.synchronize(sent)
        return result

    # Of each: the call, and what it gives where the ranks have given `parts`.
    call, expected = {
        "allreduce": (lambda: hvd.allreduce(mine, op=hvd.Sum, name=name), sum),
        "allgather": (lambda: hvd.allgather(mine, name=name), np.concatenate),
        "broadcast": (lambda: hvd.broadcast(mine, root, name=name), lambda parts: parts[root]),
        "alltoall": (
            lambda: hvd.alltoall(mine, name=name),
            lambda parts: np.concatenate([one.reshape(size, -1)[rank] for one in parts]),
        ),
        "reducescatter": (
            lambda: hvd.reducescatter(mine, op=hvd.Sum, name=name),
            lambda parts: sum(parts).reshape(size, -1)[rank],
        ),
        "barrier": (lambda: hvd.barrier(), lambda parts: None),
        "message": (message, lambda parts: parts[(rank - 1) % size]),
    }[what]
    began = time.monotonic()
    result = call()
    took = time.monotonic() - began
    assert np.array_equal(result, expected([values(turn, r, count) for r in range(size)]))
    return began, took


def compute(stop):
    """Every operation in turn, until the file is there. Says what took long, and how many turns there were."""
    hvd.init()
    rank, size, turn, told = hvd.rank(), hvd.size(), 0, 0.0
    over = False
    while not over:
        began, took = one_turn(turn, rank, size)
        asked = time.monotonic()
        over = hvd.broadcast(np.array([rank == 0 and Path(stop).exists()]), 0)[0]
        turn += 1
        ended = time.monotonic()
        for since, seconds in ((began, took), (asked, ended - asked)):
            if seconds > 0.1:
                say(began=since, slow=seconds, turn=turn)
        if ended - told > 0.1:
            told = ended
            say(turns=turn)
    say(turns=turn, remade=hvd.metrics()["mesh"]["connections_remade"])
    hvd.shutdown()


class Trial:
    def __init__(self, team, tmp_path, **kwargs):
        self.stop = tmp_path / "stop"
        self.hosts, self.started = team(compute, stop=str(self.stop), **kwargs)
        self.size = len(self.started.pids)
        for rank in range(self.size):
            self.started.wait_for(rank, "turns")
        self.goes_on()

    def turns(self, rank):
        return self.started.said(rank, "turns")[-1]["turns"]

    def goes_on(self, turns=3, limit_s=30):
        """Until every rank has done so many turns more."""
        wanted = [self.turns(rank) + turns for rank in range(self.size)]
        until(
            lambda: all(self.turns(rank) >= wanted[rank] for rank in range(self.size)),
            limit_s, self.started.outputs,
        )  # fmt: skip

    def finish(self):
        self.stop.touch()
        assert self.started.wait(60) == [0] * self.size, self.started.outputs()
        told = [self.started.said(rank, "remade")[-1]["remade"] for rank in range(self.size)]
        for rank in range(self.size):
            assert ("made again over 10." in self.started.output(rank)) == (told[rank] > 0), told
        return min(told)

    def stall(self, since, until):
        """The longest operation of any rank that was under way between these times."""
        return max(
            (one["slow"] for rank in range(self.size) for one in self.started.said(rank, "slow")
             if one["began"] < until and one["began"] + one["slow"] > since),
            default=0.0,
        )  # fmt: skip


# What the machine itself may add, where every core has other work.
SLACK_S = 5.0
# Waits longer for a silent rank than a cable is down here.
PATIENT = {"HOROCLONE_LIVENESS_ERROR_S": "10"}


@pytest.mark.in_turn
@pytest.mark.parametrize("per_host", [2, 1])
def test_resets_in_the_middle_of_every_operation_lose_nothing(team, tmp_path, per_host):
    trial = Trial(team, tmp_path, per_host=per_host)
    chance = random.Random(per_host)
    for turn in range(6):
        began = time.monotonic()
        trial.hosts.reset(turn % 2, PORT)
        trial.goes_on()
        time.sleep(chance.random() * 0.1)
        assert trial.stall(began, time.monotonic()) < SLACK_S, trial.started.outputs()
    assert trial.finish() >= 6


def test_with_another_cable_a_cut_one_is_replaced_while_it_is_down(team, tmp_path):
    trial = Trial(team, tmp_path, cables=2)
    # The second time from the cable that replaced the first, so much later that the break is told as well.
    for number, again_s in ((0, 5.5), (1, 0.2)):
        trial.hosts.set_cable("down", number, host=number)
        trial.goes_on()
        trial.hosts.set_cable("up", number, host=number)
        time.sleep(again_s)
    assert trial.finish() >= 1
    said = "".join(map(trial.started.output, (0, 1)))
    assert "network interface of its connection is down" in said
    assert "no answer comes" not in said  # nobody has to wait for what the kernel tells


@pytest.mark.in_turn
@pytest.mark.parametrize("down_s", [2.5, 6])
def test_without_another_cable_it_goes_on_when_the_cable_is_back(team, tmp_path, down_s):
    """Longer than a silent rank is waited for unless somebody says so, and than TCP needs to wait for a minute."""
    trial = Trial(team, tmp_path, env=PATIENT)
    cut = time.monotonic()
    trial.hosts.set_cable("down")
    time.sleep(down_s)
    trial.hosts.set_cable("up")
    trial.goes_on()
    assert down_s - 0.5 < trial.stall(cut, cut + down_s + 1) < down_s + SLACK_S, trial.started.outputs()
    trial.finish()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("cables", "host"),
    [(1, 0), (2, 1), (1, 1), (2, 0)],
)
def test_a_cut_in_one_direction_is_one_in_both(team, tmp_path, cables, host):
    trial = Trial(team, tmp_path, cables=cables, env=PATIENT)
    cut = time.monotonic()
    trial.hosts.set_deaf(host)
    down_s = 0.0
    if cables == 1:
        down_s = 2.5
        time.sleep(down_s)
        trial.hosts.set_deaf(host, deaf=False)
    trial.goes_on()
    assert down_s - 0.3 <= trial.stall(cut, time.monotonic()) < down_s + SLACK_S
    assert trial.finish() >= (cables == 2)


def slow_down(hosts, number, host, rate):
    shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
    done = inside(hosts.names[host], "tc", "qdisc", "replace", "dev", hosts.cables[number], *shape)
    if done.returncode:
        pytest.skip(f"tc: {done.stderr}")


def test_a_slow_cable_that_breaks_loses_nothing(team, tmp_path):
    trial = Trial(team, tmp_path, cables=2, env=PATIENT)
    # The way there by it, and the way back, which is not slow, by the other.
    slow_down(trial.hosts, 0, 0, "40mbit")
    for turn in range(4):
        trial.hosts.reset(turn % 2, PORT)
        if turn == 2:
            trial.hosts.set_cable("down", number=1)
        time.sleep(0.4)
    trial.hosts.set_cable("up", number=1)
    trial.goes_on(limit_s=60)
    assert trial.finish() >= 4


@pytest.mark.in_turn
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_killed_while_connections_break_is_named_by_all(team, tmp_path, victim):
    trial = Trial(team, tmp_path, per_host=2)
    trial.hosts.reset(1, PORT)
    trial.started.send(victim, 9)
    trial.hosts.reset(0, PORT)
    codes = trial.started.wait(20)
    assert codes[victim] == -9, codes
    assert all(code not in (0, -9) for rank, code in enumerate(codes) if rank != victim), codes
    for rank in set(range(4)) - {victim}:
        assert f"rank {victim} (" in trial.started.output(rank), trial.started.outputs()


@pytest.mark.long(330)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("cables", "faults"), [(2, 140), (1, 60)])
def test_two_hundred_breaks_at_random_moments(team, tmp_path, cables, faults):
    trial = Trial(team, tmp_path, cables=cables, per_host=2, env=PATIENT)
    time.sleep(5)
    usual = trial.stall(0.0, time.monotonic())
    chance, stalls = random.Random(cables), []
    for _ in range(faults):
        what, host = chance.choice(["reset", "flap", "cut"]), chance.randrange(2)
        down_s = {"reset": 0.0, "flap": 0.2, "cut": 3.0}[what]
        began = time.monotonic()
        if what == "reset":
            trial.hosts.reset(host, PORT)
        else:
            number = chance.randrange(cables)
            trial.hosts.set_cable("down", number, host)
            time.sleep(down_s)
            trial.hosts.set_cable("up", number, host)
        trial.goes_on()
        stalls.append((what, trial.stall(began, time.monotonic()) - (down_s if cables == 1 else 0)))
        time.sleep(chance.random() * 0.3)
    trial.finish()
    for kind in ("reset", "flap", "cut"):
        of_kind = sorted(stall for what, stall in stalls if what == kind)
        print(f"{cables} cables, {len(of_kind)} x {kind}: operations stood still for up to {of_kind[-1]:.2f} s",
              f"beyond the break, half of them {of_kind[len(of_kind) // 2]:.2f} s, without one {usual:.2f} s")  # fmt: skip
    assert max(stall for _, stall in stalls) < SLACK_S
