"""How process groups of the backend `horoclone` meet: stores that outlive processes."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import ranks

import horoclone.torch as hvd

RESTARTED = """
import os, signal, time
import torch, torch.distributed as dist
import horoclone.torch
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if life and os.environ["RANK"] == "0":
    time.sleep(0.3)  # so that the other rank looks into the store before this one has written there
dist.init_process_group("horoclone")
x = torch.ones(2)
dist.all_reduce(x)
dist.group.WORLD.monitored_barrier()
group = dist.new_group([0, 1])
dist.all_reduce(x, group=group)
if life < 2 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while life < 2:
    dist.all_reduce(x)
print("life", life, "ends with", x.tolist(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("where", ["standalone", "port"])
def test_a_life_after_a_restart_does_not_read_what_the_dead_one_wrote(
    where: str, launch: Any, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = "--standalone" if where == "standalone" else f"--master-port={port}"
    script = tmp_path / "program.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", place, "--nproc-per-node", "2"]
    done = launch([*command, "--max-restarts", "2", "--monitor-interval", "0.1", script], timeout_s=120)
    assert done.stdout.count("life 2 ends with [4.0, 4.0]") == 2, done.output


@ranks(2)
def test_groups_can_be_made_again_in_the_same_store(tmp_path: Path) -> None:
    store, rank = dist.FileStore(str(tmp_path / "store"), 2), hvd.rank()
    for life in range(3):
        dist.init_process_group("horoclone", store=store, rank=rank, world_size=2)
        x = torch.full((2,), life + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [2 * life + 2.0] * 2
        dist.destroy_process_group()


ENDING = """
import os, signal, sys
import torch, torch.distributed as dist
import horoclone.torch
dist.init_process_group("horoclone")
dist.all_reduce(torch.ones(3))
how, rank = sys.argv[1], dist.get_rank()
dist.barrier()
if how == "os._exit":
    os._exit(0)
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
while True:
    dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("how", ["kill", "term", "os._exit"])
def test_no_file_is_left_however_the_processes_end(how: str, launch: Any, tmp_path: Path) -> None:
    script, folder = tmp_path / "program.py", tmp_path / "temporary"
    script.write_text(ENDING)
    folder.mkdir()
    command = [sys.executable, "-m", "horoclone.launch.cli", "-np", "2", sys.executable, script, how]
    done = launch(command, env={"TMPDIR": str(folder)}, timeout_s=120, check=False)
    assert (done.returncode == 0) == (how == "os._exit"), done.output
    assert not list(folder.rglob("*")), (list(folder.rglob("*")), done.output)


@ranks(3)
def test_the_store_in_memory_serves_many_lives() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for life in range(8):
        dist.init_process_group("horoclone")
        x = torch.full((2,), life + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [3 * life + 3.0] * 2
        dist.group.WORLD.monitored_barrier()
        dist.new_group([0, 1])
        dist.destroy_process_group()
        if life == 2:
            before = descriptors()
    assert descriptors() <= before + 1, (before, descriptors())
