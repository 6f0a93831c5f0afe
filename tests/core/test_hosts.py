"""Two hosts, as network namespaces that a virtual cable joins: collectives across them, and what cuts and resets do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from namespaces import Hosts, Switched, inside, set_deaf
from worker_pool import held, say
from world import until

import horoclone as hvd

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("needs_root")]


@pytest.fixture
def hosts(opened):
    return opened(Hosts())


@pytest.fixture
def team(worker_pool, hosts):
    """team(body, per_host=2, ...) forks ranks on both hosts, which meet at an address of the first one."""

    def start(body, per_host=2, **kwargs):
        places, where = hosts.places(per_host), [f"{hosts.addresses[0][0]}:0"]
        return worker_pool(body, 2 * per_host, namespaces=places, addresses=where, **kwargs)

    return start


LONGER_THAN_A_SILENT_RANK_IS_WAITED_FOR_S = 3.5

# Around what is reduced at once, by recursive doubling (to 64 KiB) and by a ring, with and without a rest.
SIZES = [1, 3, 1000, 16384, 16385, 65536 + 7, 300_001]


def compute():
    import ml_dtypes

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (rank % 2, 2)
    assert (hvd.cross_rank(), hvd.cross_size()) == (rank // 2, 2) and hvd.is_homogeneous()
    for count in SIZES:
        for dtype in (np.float32, np.int64, ml_dtypes.bfloat16):
            # Every sum is exact, in 8 bits of mantissa, too
            mine = (np.arange(count) % 50 + rank).astype(dtype)
            total = sum(((np.arange(count) % 50) + r for r in range(size)), np.zeros(count))
            assert np.array_equal(hvd.allreduce(mine, op=hvd.Sum).astype(np.float64), total), (count, dtype)
            average = hvd.allreduce(mine, op=hvd.Average).astype(np.float64)
            expected = np.trunc(total / size) if dtype is np.int64 else (total / size)
            exact = dtype is not ml_dtypes.bfloat16
            assert np.array_equal(average, expected) if exact else np.allclose(average, expected, rtol=0.01)
        gathered = hvd.allgather(np.full((rank + 1, 3), rank, np.float32))
        assert gathered.tolist() == [[float(r)] * 3 for r in range(size) for _ in range(r + 1)]
        for root in range(size):
            assert hvd.broadcast(np.full(count, rank), root).tolist() == [root] * count
    noise = np.random.default_rng(rank).standard_normal(100_003).astype(np.float32)
    say(digest=zlib.crc32(hvd.allreduce(noise, name="noise").tobytes()))
    assert hvd.alltoall(np.full(size, rank)).tolist() == list(range(size))
    assert hvd.reducescatter(np.ones((size, 3)), op=hvd.Sum).tolist() == [[size] * 3]
    hvd.barrier()


@pytest.mark.in_turn
@pytest.mark.parametrize("two_level", ["-1", "0", "1"])
def test_collectives_between_two_hosts_of_two_ranks(team, two_level):
    started = team(compute, env={"HOROCLONE_HIERARCHICAL_ALLREDUCE": two_level})
    assert started.wait(40) == [0] * 4, started.outputs()
    assert len({started.said(rank, "digest")[0]["digest"] for rank in range(4)}) == 1, started.outputs()


def reduce_much(count, turns):
    hvd.init()
    array = np.ones(count, np.float32)
    for _ in range(turns):
        assert hvd.allreduce(array, op=hvd.Sum, name="much")[-1] == 4


def bytes_of(hosts, host, interface):
    """Received and sent by this interface so far."""
    table = inside(hosts.names[host], "cat", "/proc/net/dev").stdout.splitlines()
    words = next(line for line in table if line.strip().startswith(f"{interface}:")).split()
    return int(words[1]) + int(words[9])


def test_data_crosses_the_cable_once_per_host_and_never_the_loopback(team, hosts):
    count, turns = 1 << 20, 10
    started = team(reduce_much, count=count, turns=turns)
    assert started.wait(40) == [0] * 4, started.outputs()
    cable, loops = bytes_of(hosts, 0, "cable0"), [bytes_of(hosts, host, "lo") for host in range(2)]
    # Two hosts exchange one copy each way, and a little: were every rank in one ring, it would be half as much again.
    assert 2 * 4 * count * turns < cable < 2.3 * 4 * count * turns, (cable, loops)
    assert max(loops) < 200_000, loops  # at most the rendezvous of the first host


def wait_idle():
    hvd.init()
    say(running=True)
    if hvd.rank() == 0:
        time.sleep(60)
    try:
        hvd.allreduce(np.ones(2), name="w.3")
    except hvd.HorovodInternalError as error:
        say(error=type(error).__name__, rank=getattr(error, "rank", None), text=str(error))
    os._exit(0)


def test_a_cut_cable_is_noticed_while_nothing_moves(team, hosts):
    started = team(wait_idle, env={"HOROCLONE_KEEPALIVE_S": "3"})
    for rank in range(4):
        started.wait_for(rank, "running")
    hosts.set_cable("down")
    cut = time.monotonic()
    for rank in (2, 3):
        heard = started.wait_for(rank, "error", 15)
        assert heard["error"] == "PeerLost" and heard["rank"] in (0, 1) and heard["at"] - cut < 14, heard


def reduce_and_count():
    hvd.init()
    array = np.ones(1 << 18, np.float32)
    say(running=True)
    done, told = 0, time.monotonic()
    try:
        while True:
            hvd.allreduce(array, name="w.3")
            done += 1
            if time.monotonic() - told > 0.2:
                told = time.monotonic()
                say(done=done)
    except hvd.HorovodInternalError as error:
        say(error=type(error).__name__, rank=getattr(error, "rank", None), text=str(error))
    os._exit(0)


def wait_for_more(started):
    """Until rank 0 has reduced more than it has by now; it has lost nobody meanwhile."""
    wanted = len(started.said(0, "done")) + 3
    until(lambda: len(started.said(0, "done")) >= wanted, said=started.outputs)
    assert not started.said(0, "error"), started.outputs()


def test_with_the_real_deadlines_a_cut_cable_is_a_loss_within_seconds(team, hosts):
    started = team(reduce_and_count)
    for rank in range(4):
        started.wait_for(rank, "done")
    hosts.set_cable("down")
    cut = time.monotonic()
    for rank in range(4):
        heard = started.wait_for(rank, "error", 30)
        assert heard["error"] == "PeerLost" and "allreduce 'w.3'" in heard["text"], heard
        assert heard["rank"] // 2 != rank // 2, "each side names the other"
        assert 1.9 < heard["at"] - cut < 12, heard
    assert started.wait() == [0] * 4


def test_a_break_between_two_hosts_of_whom_a_third_hears_both_is_no_loss(worker_pool, opened):
    hosts = opened(Switched())
    names, addresses = hosts.names, hosts.addresses
    started = worker_pool(reduce_and_count, 3, namespaces=names, addresses=[f"{addresses[0]}:0"])
    for rank in range(3):
        started.wait_for(rank, "done")
    ends = ((0, 2), (2, 0))
    for here, there in ends:
        set_deaf(names[here], addresses[there])
    time.sleep(LONGER_THAN_A_SILENT_RANK_IS_WAITED_FOR_S)
    assert not any(started.said(rank, "error") for rank in range(3)), started.outputs()
    for here, there in ends:
        set_deaf(names[here], addresses[there], deaf=False)
    wait_for_more(started)


def test_a_rank_that_another_one_on_its_host_sees_running_is_waited_for(team):
    started = team(reduce_and_count)
    for rank in range(4):
        started.wait_for(rank, "done")
    with held(started.pids[3]):
        time.sleep(LONGER_THAN_A_SILENT_RANK_IS_WAITED_FOR_S)
    wait_for_more(started)
    assert "has not responded for 1 s" in started.output(0)


SOAK_S = float(os.environ.get("HC_SOAK_S", "60"))
BUSY = """
import time
while True:
    memory = bytearray(1 << 30)
    memory[::4096] = b"x" * (1 << 18)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        pass
"""


def reduce_until_there_is(path):
    hvd.init()
    values, ranks = np.arange(50_000, dtype=np.float32), sum(range(hvd.size()))
    steps, longest, is_over = 0, 0.0, False
    while not is_over:
        step_began = time.monotonic()
        result = hvd.allreduce(values + hvd.rank(), op=hvd.Sum, name="w")
        assert (result == hvd.size() * values + ranks).all()
        over = np.array([os.path.exists(path)], np.int32)
        is_over = bool(hvd.allreduce(over, op=hvd.Max, name="over")[0])
        longest = max(longest, time.monotonic() - step_began)
        steps += 1
    say(steps=steps, longest=longest)
    hvd.shutdown()


@pytest.mark.long(90)
@pytest.mark.timeout(SOAK_S + 240)
def test_nobody_is_lost_who_lives(worker_pool, opened, tmp_path):
    """Eight ranks of three hosts and four busy programs that ask for memory share the processors; now and then a rank
    is stopped for a second. HC_SOAK_S says for how long."""
    hosts = opened(Switched())
    places = [hosts.names[host] for host in (0, 0, 0, 1, 1, 1, 2, 2)]
    end = tmp_path / "end"
    team = worker_pool(
        reduce_until_there_is, 8, namespaces=places, addresses=[f"{hosts.addresses[0]}:0"], path=str(end)
    )
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(4)]
    try:
        chance, stops, until = random.Random(3), 0, time.monotonic() + SOAK_S
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.5, 3))
            rank = chance.randrange(8)
            team.send(rank, signal.SIGSTOP)
            time.sleep(1)
            team.send(rank, signal.SIGCONT)
            stops += 1
    finally:
        end.touch()
        for one in busy:
            one.kill()
        for one in busy:
            one.wait(60)
    assert team.wait(120) == [0] * 8, team.outputs()
    print(f"{team.said(0, 'steps')[0]}, {stops} stops in {SOAK_S:g} s")
