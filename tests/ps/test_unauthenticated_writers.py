"""Unauthenticated writers at the register, which the whole network may write to: they harm nobody's rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ps_cluster import Cluster
from pusher import WIDTH
from world import until

from horoclone import errors
from horoclone.ps import Sum, Table
from horoclone.ps.register import Register, serve_store

pytestmark = [pytest.mark.timeout(240), pytest.mark.long(60)]

ROWS = 500
EVERY = np.arange(ROWS)


class Stranger:
    """Writes to the store behind the register's back."""

    def __init__(self, cluster: Cluster) -> None:
        from torch.distributed import TCPStore

        host, port = cluster.address.split(":")
        self.store: Any = TCPStore(host, int(port), None, False, timedelta(seconds=5), wait_for_workers=False)
        self._prefix = "horoclone-ps/test/"
        names = [f"{what}/{n}" for what in ("view", "server") for n in range(cluster.servers)]
        self.keys = [self._prefix + name for name in (*names, "layout")]

    def all(self) -> dict[str, bytes]:
        return {key: bytes(self.store.get(key)) for key in self.keys if self.store.check([key])}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, 2, memory="64m", silence_s=2)
    yield made
    made.close()


def filled(cluster: Cluster) -> Table:
    """Ones in every row, in two copies."""
    table = Table(cluster.worker(), "counted", WIDTH, Sum())
    cluster.wait_for_copies(table.servers)
    table.push(EVERY, np.ones((ROWS, WIDTH)))
    return table


@pytest.mark.parametrize("garbage", [b"\xff\xfe\0" * 40, None], ids=["bytes", "deleted"])
def test_garbage_and_the_death_of_a_server_lose_nothing(cluster: Cluster, garbage: bytes | None) -> None:
    table, stranger = filled(cluster), Stranger(cluster)
    for key in stranger.keys:
        if garbage is None:
            stranger.store.delete_key(key)
        else:
            stranger.store.set(key, garbage)
    cluster.kill(0)
    table.push(EVERY, np.ones((ROWS, WIDTH)))
    assert (table.pull(EVERY) == 2).all(), cluster.said()
    cluster.start(0)
    newcomer = cluster.worker()
    assert (Table(newcomer, "counted", WIDTH, Sum()).pull(EVERY) == 2).all(), cluster.said()
    cluster.wait_for_copies(newcomer)
    assert all(entry != garbage for entry in stranger.all().values())


def test_an_old_value_that_is_written_again_keeps_no_newcomer_waiting(cluster: Cluster) -> None:
    """Signed as it was, so that nothing but its age tells it from the newest."""
    table, stranger = filled(cluster), Stranger(cluster)
    old = stranger.all()
    cluster.kill(0)
    table.push(EVERY, np.ones((ROWS, WIDTH)))
    cluster.start(0)
    cluster.wait_for_copies(table.servers)
    epoch = table.servers.register.get("view/0")["epoch"]
    for key, value in old.items():
        stranger.store.set(key, value)
    newcomer = cluster.worker(timeout_s=20)
    again = Table(newcomer, "counted", WIDTH, Sum())
    again.push(EVERY, np.ones((ROWS, WIDTH)))
    assert (again.pull(EVERY) == 3).all() and (table.pull(EVERY) == 3).all()
    until(lambda: stranger.all()[stranger.keys[0]] != old[stranger.keys[0]], 10, cluster.said)
    assert newcomer.register.get("view/0")["epoch"] >= epoch, "an epoch goes back"
    for key, value in old.items():  # and so it is while the server dies that the newest view names
        stranger.store.set(key, value)
    cluster.kill(1)
    again.push(EVERY, np.ones((ROWS, WIDTH)))
    assert (again.pull(EVERY) == 4).all(), cluster.said()


def test_a_generation_of_a_server_is_larger_than_the_one_before(cluster: Cluster) -> None:
    table = filled(cluster)
    before = table.servers.register.get("server/0")["generation"]
    cluster.kill(0)
    cluster.start(0)
    place = table.servers.register.wait(
        "server/0", lambda place: place["generation"] != before, time.monotonic() + 30, "server 0"
    )
    assert place["generation"] > before


def test_an_invalid_value_counts_as_forgotten_for_those_who_have_seen_their_own() -> None:
    store = serve_store(0, new_s=0)
    address = ("127.0.0.1", store.port)
    ours, theirs = (Register("r", address, secret * 16) for secret in (b"a", b"b"))
    store.set("horoclone-ps/r/x", b"\xff" * 80)
    with pytest.raises(
        errors.HorovodInternalError, match="'horoclone-ps/r/x' was not signed with this secret"
    ):
        ours.get("x")
    assert ours.compare_set("x", None, 1) and ours.get("x") == 1
    with pytest.raises(errors.HorovodInternalError, match="different secrets"):
        theirs.get("x")
    assert not ours.compare_set("x", None, 2) and ours.get("x") == 1
    for garbage in (b"\xff" * 80, b"", b"1", bytes(store.get("horoclone-ps/r/x")).replace(b"1", b"2")):
        store.set("horoclone-ps/r/x", garbage)
        assert ours.get("x") is None
        assert not ours.compare_set("x", 1, 3) and ours.compare_set("x", None, 4) and ours.get("x") == 4
    signed = bytes(store.get("horoclone-ps/r/x"))
    store.set("horoclone-ps/r/y", signed)
    assert ours.get("y") is None, "what was signed for one key counts for another"
