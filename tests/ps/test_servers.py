"""Two servers as processes, workers as threads of this one: what is computed, who is waited for, what is refused."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ps_cluster import Cluster

from horoclone import errors
from horoclone.ps import Servers, Table
from horoclone.ps import torch as ps
from horoclone.ps.register import open_register
from horoclone.ps.server import Server

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def servers(cluster: Cluster) -> Servers:
    made = cluster.worker()
    cluster.wait_for_copies(made)
    return made


def in_threads(cluster: Cluster, workers: int, body: Callable[[int, Servers], Any]) -> list[Any]:
    """body(rank, servers) of each worker; raises what one of them raised."""
    results: list[Any] = [None] * workers
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        mine = cluster.worker(rank, workers)
        try:
            results[rank] = body(rank, mine)
        except BaseException as error:
            failures.append(error)
        finally:
            mine.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def batch(step: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids in bags of two, offsets, targets)"""
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50, (2 * count,), generator=chance)
    return ids, torch.arange(0, 2 * count, 2), torch.randn(count, 8, generator=chance)


def trained(bag: torch.nn.Module, steps: int, rank: int = 0, workers: int = 1, optimizer: Any = None) -> None:
    for step in range(steps):
        ids, offsets, target = batch(step)
        mine = slice(rank * len(target) // workers, (rank + 1) * len(target) // workers)
        some = ids[2 * mine.start : 2 * mine.stop]
        ((bag(some, offsets[: len(target[mine])]) - target[mine]) ** 2).mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def of_torch(start: torch.Tensor, steps: int) -> torch.Tensor:
    bag = torch.nn.EmbeddingBag(50, 8, mode="sum", sparse=True, _weight=start.clone())
    trained(bag, steps, optimizer=torch.optim.Adagrad(bag.parameters(), lr=0.1))
    return bag.weight.detach()


EVERY = np.arange(50)


def test_one_worker_in_rounds_is_torchs_embedding_bag(servers: Servers) -> None:
    bag = ps.EmbeddingBag(
        "one", 50, 8, servers, mode="sum", optimizer=ps.Adagrad(lr=0.1), staleness=0, spread=0.1
    )
    start = torch.from_numpy(bag.table.pull(EVERY))
    trained(bag, 20)
    torch.testing.assert_close(
        torch.from_numpy(bag.table.pull(EVERY)), of_torch(start, 20), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(IndexError, match="id 50"):
        bag(torch.tensor([[50]]))
    bag.eval()
    steps = bag.table.steps
    bag(torch.tensor([[1, 2]])).sum()
    assert bag.table.steps == steps and not list(bag.parameters())


def test_four_workers_in_rounds_are_one_process(cluster: Cluster) -> None:
    def work(rank: int, mine: Servers) -> Any:
        bag = ps.EmbeddingBag(
            "four", None, 8, mine, mode="sum", optimizer=ps.Adagrad(lr=0.1), staleness=0, spread=0.1
        )
        start = bag.table.pull(EVERY)
        trained(bag, 20, rank, 4)
        return start, bag.table.pull(EVERY)

    found = in_threads(cluster, 4, work)
    for _, rows in found:
        np.testing.assert_array_equal(rows, found[0][1])
    expected = of_torch(torch.from_numpy(found[0][0]), 20)
    torch.testing.assert_close(torch.from_numpy(found[0][1]), expected, rtol=1e-5, atol=1e-6)


def test_nobody_is_further_ahead_than_staleness_allows(cluster: Cluster) -> None:
    done = [0, 0]
    leads = []
    two_ahead = threading.Event()

    def work(rank: int, mine: Servers) -> None:
        table = Table(mine, "slow", 2, ps.Sum(), staleness=2)
        for step in range(15):
            table.pull([1])
            leads.append(done[rank] - min(done))
            if leads[-1] == 2:
                two_ahead.set()
            if rank == 1:
                assert two_ahead.wait(60), "the other may be two steps ahead"
            table.push([1], np.ones((1, 2)))
            done[rank] = step + 1

    in_threads(cluster, 2, work)
    # One is taken and not yet counted while the other looks.
    assert 2 <= max(leads) <= 3, leads


def test_keys_are_summed_or_optimized(cluster: Cluster, servers: Servers) -> None:
    def work(rank: int, mine: Servers) -> torch.Tensor:
        store = ps.KVStore(mine)
        value = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
        store.init("w", value + rank)
        store.push("w", torch.full_like(value, rank + 1.0))
        done.wait()
        return store.pull("w", torch.empty_like(value)) - value

    done = threading.Barrier(2)
    for difference in in_threads(cluster, 2, work):
        assert torch.equal(difference, torch.full((600, 1000), 3.0))
    weight = torch.nn.Parameter(torch.randn(7, 3))
    adam, store = torch.optim.Adam([weight], lr=0.01), ps.KVStore(servers, optimizer=ps.Adam(lr=0.01))
    store.init("adam", weight)
    for step in range(5):
        weight.grad = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))
        adam.step()
        store.push("adam", weight.grad)
    torch.testing.assert_close(store.pull("adam", torch.empty(7, 3)), weight.detach(), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="'none' is unknown"):
        store.push("none", weight)
    with pytest.raises(ValueError, match="20 elements"):
        store.push("adam", torch.ones(20))


# The last one is a prime: pieces with a rest
@pytest.mark.parametrize("elements", [1, 12, (1 << 18) + 6, 300_007])
def test_keys_of_any_size_from_any_memory(servers: Servers, elements: int) -> None:
    store, name = ps.KVStore(servers), f"size {elements}"
    value = torch.arange(elements, dtype=torch.float32) % 1000
    store.init(name, value)
    store.push(name, value.double())
    store.push(name, torch.stack([value, value], 1)[:, 1])
    store.push(name, value.clone().requires_grad_())
    store.push(name, torch._neg_view(-value))  # its memory has the other sign
    store.push(name, -value)
    negative = torch._neg_view(torch.zeros(elements))
    for out in (
        torch.zeros(elements),
        torch.zeros(elements).double(),
        torch.zeros(elements, 2)[:, 1],
        negative,
    ):
        before = out._version
        assert store.pull(name, out) is out and torch.equal(out.float(), 4 * value)
        assert out._version > before, "autograd would take it for what it was"
    weight = torch.nn.Parameter(torch.zeros(elements))
    store.pull(name, weight)
    assert torch.equal(weight.detach(), 4 * value)


def test_rows_can_be_pulled_ahead(servers: Servers) -> None:
    bag = ps.EmbeddingBag("ahead", None, 4, servers, mode="sum", optimizer=ps.SGD(lr=1.0), staleness=3)
    ids = torch.tensor([[1, 2], [3, 3]])
    bag.prefetch(ids)
    first = bag(ids)
    first.sum().backward()
    torch.testing.assert_close(bag(ids).detach(), first.detach() - torch.tensor([[2.0], [4.0]]))
    rounds = ps.EmbeddingBag("no", None, 4, servers, optimizer=ps.SGD(lr=1.0), staleness=0)
    with pytest.raises(ValueError, match="staleness is 0"):
        rounds.prefetch(ids)


def test_gradients_lose_the_factor_of_a_scaler(servers: Servers) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ids = torch.tensor([[1, 2]])
    bag = ps.EmbeddingBag("scaled", 50, 8, servers, mode="sum", optimizer=ps.SGD(lr=1.0), initial="zeros")
    with pytest.raises(RuntimeError, match=r"table 'scaled': a GradScaler is enabled.*scaler=scaler"):
        scaler.scale(bag(ids).sum()).backward()
    bag.scaler = scaler
    scaler.scale(bag(ids).sum()).backward()
    np.testing.assert_array_equal(bag.table.pull([1, 2]), np.full((2, 8), -1))
    scaler.scale(bag(ids).sum() * 1e38).backward()
    np.testing.assert_array_equal(bag.table.pull([1, 2]), np.full((2, 8), -1))
    assert bag.table.steps == 2
    bag.scaler = torch.amp.GradScaler(enabled=False)
    bag(ids).sum().backward()
    np.testing.assert_array_equal(bag.table.pull([1, 2]), np.full((2, 8), -2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_are_float32_whatever_torchs_default_is(servers: Servers, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        bag = ps.EmbeddingBag(
            f"rows {dtype}", 50, 8, servers, mode="sum", optimizer=ps.SGD(lr=1.0), initial="zeros"
        )
        bag(torch.tensor([[1]])).sum().backward()
        assert bag(torch.tensor([[1]])).tolist() == [[-1.0] * 8]
        store = ps.KVStore(servers)
        store.init(f"key {dtype}", torch.ones(5))
        store.push(f"key {dtype}", torch.ones(5))
        assert store.pull(f"key {dtype}", torch.zeros(5)).tolist() == [2.0] * 5
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_save_is_loaded_with_the_optimizers_state(servers: Servers, tmp_path: Path) -> None:
    table = Table(servers, "saved", 4, ps.Adam(lr=0.1), initial="normal", spread=1.0)
    ids = np.arange(-500, 500) * 7919
    for step in range(3):
        table.push(ids, np.random.default_rng(step).normal(size=(1000, 4)))
    assert table.save(str(tmp_path)) == 1000
    before = table.pull(ids)
    table.push(ids, np.ones((1000, 4)))
    after = table.pull(ids)
    assert not np.array_equal(before, after)
    assert table.load(str(tmp_path)) == 1000
    np.testing.assert_array_equal(table.pull(ids), before)
    table.push(ids, np.ones((1000, 4)))  # the state and the number of steps came back, too
    np.testing.assert_array_equal(table.pull(ids), after)
    (tmp_path / "taken").write_text("a file where a folder should be")
    with pytest.raises(errors.HorovodInternalError, match="cannot be written"):
        table.save(str(tmp_path / "taken"))
    with pytest.raises(errors.HorovodInternalError, match="cannot be read"):
        table.load(str(tmp_path / "elsewhere"))


def test_who_never_comes_is_named(cluster: Cluster) -> None:
    alone = cluster.worker(0, 3, timeout_s=1.0)
    table = Table(alone, "lonely", 2, ps.Sum(), staleness=0)
    table.push([1], np.ones((1, 2)))
    with pytest.raises(errors.Timeout, match=r"'lonely'.*rank 1 never came, rank 2 never came"):
        table.pull([1])
    with pytest.raises(errors.Mismatch, match="staleness 0, not 1"):
        Table(alone, "lonely", 2, ps.Sum(), staleness=1)
    with pytest.raises(ValueError, match="staleness=-1"):
        Table(alone, "lonely", 2, ps.Sum(), staleness=-1)
    alone.close()


def test_a_server_without_memory_says_so_and_goes_on(tmp_path: Path) -> None:
    one = Cluster(tmp_path, 1, memory="16m")
    try:
        mine = one.worker()
        table = Table(mine, "large", 1 << 20, ps.Sum())
        with pytest.raises(errors.HorovodInternalError, match=r"'large' needs room.*--memory"):
            for start in range(0, 64, 2):
                table.push(np.arange(start, start + 2), np.zeros((2, 1 << 20)))
        small = Table(mine, "small", 2, ps.Sum())
        small.push([1], np.ones((1, 2)))
        np.testing.assert_array_equal(small.pull([1]), np.ones((1, 2)))
        (facts,) = mine.describe()
        assert facts["memory_used"] <= facts["memory"] == 16 << 20
        mine.close()
    finally:
        one.close()


def test_a_server_that_is_started_differently_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Also where nobody has begun: servers that start together propose the same to each other."""
    alone = Cluster(tmp_path, 2, memory="64m", start=[0])
    try:
        for one in (cluster, alone):
            register = open_register("test", one.address, None, one.environ)
            register.wait("server/0", bool, time.monotonic() + 60, "server 0")
            for servers, replicas in ((3, 2), (2, 1)):
                with pytest.raises(
                    errors.Mismatch, match=r"with \{'replicas': 2, 'servers': 2\}.*start it alike"
                ):
                    Server(register, 1, servers, replicas=replicas)
    finally:
        alone.close()


def test_a_stranger_is_refused(cluster: Cluster) -> None:
    stranger = {**cluster.environ, "HOROCLONE_SECRET": "another secret, long enough"}
    with pytest.raises(errors.HorovodInternalError, match="not signed with this secret"):
        Servers("test", cluster.address, environ=stranger)
    without = {key: value for key, value in cluster.environ.items() if key != "HOROCLONE_SECRET"}
    with pytest.raises(errors.Unsupported, match="--secret-file"):
        Servers("test", cluster.address, environ=without)
    with pytest.raises(errors.Timeout, match="python -m horoclone.ps --name nobody"):
        Servers("nobody", cluster.address, environ=cluster.environ, timeout_s=0.5)


def test_every_acknowledged_push_is_there_after_servers_were_killed(cluster: Cluster) -> None:
    """Both servers one after the other, while two workers push; counted row by row."""
    rows, over = 2000, threading.Event()

    def work(rank: int, mine: Servers) -> np.ndarray[Any, Any]:
        table = Table(mine, "counted", 8, ps.Sum())
        chance, acknowledged = np.random.default_rng(rank), np.zeros(rows)
        while not over.is_set():
            ids = np.unique(chance.integers(0, rows, 300))
            table.push(ids, np.ones((len(ids), 8)))
            acknowledged[ids] += 1
            time.sleep(0.002)  # the kernel is asked for other processes, too
        return acknowledged

    def kill_both() -> None:
        watcher = cluster.worker(0, 1)
        for index in random.sample((0, 1), 2):
            time.sleep(0.5)
            cluster.kill(index)
            time.sleep(0.5)
            cluster.start(index)
            cluster.wait_for_copies(watcher)
        time.sleep(0.3)
        over.set()

    killer = threading.Thread(target=kill_both)
    killer.start()
    try:
        acknowledged = sum(in_threads(cluster, 2, work))
    finally:
        over.set()
        killer.join()
    table = Table(cluster.worker(0, 2), "counted", 8, ps.Sum())
    found = table.pull(np.arange(rows))
    assert acknowledged.sum() > 1000
    np.testing.assert_array_equal(found, np.repeat(acknowledged[:, None], 8, 1))


def test_when_all_copies_are_dead_it_is_said_and_the_save_is_named(cluster: Cluster, tmp_path: Path) -> None:
    mine = cluster.worker()
    table = Table(mine, "gone", 2, ps.Sum())
    table.push([1, 2, 3], np.ones((3, 2)))
    table.save(str(tmp_path))
    for index in (0, 1):
        cluster.kill(index)
    for index in (0, 1):
        cluster.start(index)
    with pytest.raises(errors.StateLost, match=f"'gone': {tmp_path}"):
        while True:
            table.push([1, 2, 3], np.ones((3, 2)))
    mine.close()
    again = cluster.worker()
    with pytest.raises(errors.StateLost):
        Table(again, "gone", 2, ps.Sum())
    again.accept_loss()
    table = Table(again, "gone", 2, ps.Sum())
    table.load(str(tmp_path))
    np.testing.assert_array_equal(table.pull([1, 2, 3]), np.ones((3, 2)))


def test_a_worker_that_comes_before_the_loss_is_known_can_accept_it(cluster: Cluster) -> None:
    first = cluster.worker()
    cluster.wait_for_copies(first)
    first.close()
    for index in (0, 1):
        cluster.kill(index)
    made: list[Servers] = []
    coming = threading.Thread(target=lambda: made.append(cluster.worker()))
    coming.start()
    time.sleep(0.5)  # it has read where the partitions were, and waits for servers
    for index in (0, 1):
        cluster.start(index)
    coming.join(60)
    [mine] = made
    with pytest.raises(errors.StateLost, match="accept_loss"):
        Table(mine, "come early", 2, ps.Sum())
    mine.accept_loss()
    table = Table(mine, "come early", 2, ps.Sum())
    table.push([1], np.ones((1, 2)))
    np.testing.assert_array_equal(table.pull([1]), np.ones((1, 2)))
    mine.close()


def test_an_event_that_comes_while_a_server_stops_ends_it_as_planned() -> None:
    one = object.__new__(Server)
    one._stopping, one._refused, one._pool = threading.Event(), None, ThreadPoolExecutor(1)

    def next_event(limit_s: float) -> tuple[int, int, int, str]:
        one.stop()
        return 1, 0, 0, "{}"

    one._native = SimpleNamespace(next_event=next_event, stop=lambda: None)
    one._watch = lambda *_: None  # type: ignore[method-assign]
    one.run()
