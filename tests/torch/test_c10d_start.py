"""A member of a process group that never comes is named, and the others do not wait without an end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worker_pool import say
from world import free_port, raised, ranks

import horoclone.torch as hvd

PROGRAM = """
import sys, torch.distributed as dist
import horoclone.torch
url, rank = sys.argv[1], int(sys.argv[2])
more = {"rank": rank, "world_size": 3} if url != "env://" else {}
try:
    dist.init_process_group("horoclone", init_method=url, **more)
except Exception as error:
    print(f"ended: {type(error).__name__}: {error}", flush=True)
"""


def outputs(url: str, env: dict[str, str], present: tuple[int, ...]) -> list[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("HOROCLONE_", "HOROVOD_"))}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, str(rank)],
            env={**base, **env, "RANK": str(rank), "WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in present
    ]
    try:
        return [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.long(20)
@pytest.mark.parametrize("how", ["env", "agent", "tcp", "file"])
def test_ranks_that_do_not_come_are_named_and_the_wait_ends(how: str, tmp_path: Path) -> None:
    env, url, port = {"HOROCLONE_START_TIMEOUT": "12"}, "env://", free_port()
    store = None
    if how == "agent":
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        port = store.port
    if how in ("env", "agent"):
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if how == "tcp":
        url = f"tcp://127.0.0.1:{port}"
    if how == "file":
        url = f"file://{tmp_path}/store"
    texts = outputs(url, env, (0, 2))
    del store
    waited = re.compile(
        r"ended: Timeout.* 1\d s for all 3 ranks; not there: rank 1\. .*HOROCLONE_START_TIMEOUT"
    )
    assert waited.search(texts[0]), texts
    # Rank 0 has torch's store but for a file or an agent: its end is the store's.
    assert waited.search(texts[1]) or (how in ("env", "tcp") and "store has ended" in texts[1]), texts
    assert re.search(r"has waited 10 s for all 3 ranks; not there: rank 1; this ends in [0-2] s", texts[0]), (
        texts
    )
    assert "has waited 10 s" not in texts[1], texts


def comes_alone(port: int) -> None:
    for name in [name for name in os.environ if name.startswith("HOROCLONE_")]:
        del os.environ[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="3")
    say(text=str(raised(lambda: dist.init_process_group("horoclone", timeout=timedelta(seconds=2)))))


def test_a_shorter_timeout_of_the_call_holds(torch_worker_pool: Any) -> None:
    team = torch_worker_pool(comes_alone, 1, port=free_port())
    assert team.wait(150) == [0], team.outputs()
    assert "s for all 3 ranks; not there: ranks 1, 2" in team.said(0, "text")[0]["text"]


@ranks(3)
def test_members_of_a_later_group_may_come_late() -> None:
    dist.init_process_group("horoclone")
    rank = dist.get_rank()
    os.environ["HOROCLONE_START_TIMEOUT"] = "1"
    if rank == 2:
        time.sleep(2)
    pair = dist.new_group([0, 2])
    if rank != 1:
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=pair)
        assert x.item() == 4
    dist.barrier()
    dist.destroy_process_group()
    del os.environ["HOROCLONE_START_TIMEOUT"]
    dist.init_process_group("horoclone")
    dist.barrier()
    dist.destroy_process_group()
    assert hvd.size() == 3
