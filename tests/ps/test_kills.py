"""Fifty times the end of primary, backup, both in turn (by kill -9 and by SIGTERM) and worker (kill -9) while two workers
push: counted row by row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ps_cluster import Cluster
from pusher import WIDTH, ids_of
from world import until

from horoclone.ps import Servers, Sum, Table

ROWS = 2000
KILLS = int(os.environ.get("HOROCLONE_TEST_PS_KILLS", "50"))


class Pusher:
    """One life of a worker, and what was acknowledged in it."""

    def __init__(self, cluster: Cluster, folder: Path, rank: int, seed: int) -> None:
        self.rank, self.seed, self.log = rank, seed, folder / f"pusher-{seed}"
        program = Path(__file__).with_name("pusher.py")
        command = [sys.executable, program, cluster.address, rank, 2, seed, self.log, ROWS]
        self.process = subprocess.Popen([str(part) for part in command], env=cluster.environ)

    def acknowledged(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def wait_for(self, steps: int) -> None:
        until(lambda: self.acknowledged() >= steps, 120, "no push is acknowledged any more")

    def end(self) -> None:
        Path(f"{self.log}.stop").touch()
        assert self.process.wait(90) == 0


def copies_of(servers: Servers, partition: int) -> tuple[int, int]:
    view = servers.register.get(f"view/{partition}")
    return view["primary"][0], view["backup"][0]


@pytest.mark.long(400)
@pytest.mark.timeout(3600)
def test_every_acknowledged_update_is_there_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    lives: list[Pusher] = []
    in_flight = np.zeros(ROWS)
    try:
        watcher = cluster.worker()
        cluster.wait_for_copies(watcher)
        current = [Pusher(cluster, tmp_path, rank, rank) for rank in (0, 1)]
        lives += current
        killed = 0
        for round_ in range(KILLS):
            for pusher in current:
                pusher.wait_for(pusher.acknowledged() + 5)
            what = ("primary", "backup", "worker", "both")[round_ % 4]
            if what == "worker":
                victim = current[round_ // 4 % 2]
                victim.process.kill()
                victim.process.wait(10)
                in_flight[ids_of(victim.seed, victim.acknowledged(), ROWS)] += 1
                current[victim.rank] = Pusher(cluster, tmp_path, victim.rank, 100 + round_)
                lives.append(current[victim.rank])
                killed += 1
                continue
            primary, backup = copies_of(watcher, round_ % 2)
            for server in {"primary": [primary], "backup": [backup], "both": [primary, backup]}[what]:
                (cluster.terminate if round_ // 4 % 2 else cluster.kill)(server)
                for pusher in current:
                    pusher.wait_for(pusher.acknowledged() + 3)
                cluster.start(server)
                cluster.wait_for_copies(watcher)
                killed += 1
        for pusher in current:
            pusher.end()
        expected = np.zeros(ROWS)
        for life in lives:
            for step in range(life.acknowledged()):
                expected[ids_of(life.seed, step, ROWS)] += 1
        found = Table(cluster.worker(0, 2), "counted", WIDTH, Sum()).pull(np.arange(ROWS))
        print(
            f"{killed} ends, {expected.sum():.0f} acknowledged updates of rows, {found[:, 0].sum():.0f} in the tables"
        )
        assert (found == found[:, :1]).all()
        # What a killed worker had under way may be in it or not, in each partition.
        extra = found[:, 0] - expected
        assert ((extra >= 0) & (extra <= in_flight)).all(), (extra.min(), (extra - in_flight).max())
    finally:
        for life in lives:
            life.process.kill()
        cluster.close()
