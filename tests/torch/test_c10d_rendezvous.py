"""How process groups of the backend `horoclone` find each other, also in stores that outlive processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worker_pool import say
from world import ranks

import horoclone.torch as hvd
from horoclone.torch import c10d
from horoclone.torch.c10d import rendezvous

RESTARTED = """
import os, signal, sys, time
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
last = int(sys.argv[1])
if life < last and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while life < last:
    dist.all_reduce(x)
os.write(1, f"life {life} ends with {x.tolist()}\\n".encode())  # one piece: both ranks write into one pipe
dist.destroy_process_group()
"""


def free_port() -> int:
    """One that no program gets by asking for any: between two lives torchrun does not hold it."""
    for port in random.sample(range(15000, 30000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    raise AssertionError("no port is free")


def one_life(life: int, port: int) -> None:
    """A rank as torchrun starts it, whose agent keeps the store: without what the team has of a launcher."""
    rank = os.environ["HOROCLONE_RANK"]
    for name in [name for name in os.environ if name.startswith("HOROCLONE_")]:
        del os.environ[name]
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=str(life), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    if life and rank == "0":
        time.sleep(0.3)  # so that the other rank looks into the store before this one has written there
    dist.init_process_group("horoclone")
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.group.WORLD.monitored_barrier()
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group)
    assert x.tolist() == [4.0, 4.0]
    if life == 0:
        say(done=True)
        signal.pause()  # to be killed: by its own hand it would go while the other one still needs it
    dist.destroy_process_group()


def test_a_second_life_does_not_read_what_the_first_one_wrote(torch_worker_pool: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    for life, code in enumerate((-signal.SIGKILL, 0)):
        team = torch_worker_pool(one_life, 2, life=life, port=store.port)
        if life == 0:
            for rank in (0, 1):
                team.wait_for(rank, "done", 60)
            for rank in (0, 1):
                team.send(rank, signal.SIGKILL)
        assert team.wait(60) == [code] * 2, team.outputs()


@pytest.mark.long(30)
@pytest.mark.parametrize(("where", "restarts"), [("standalone", "1"), ("port", "2")])
def test_a_life_after_a_restart_does_not_read_what_the_dead_one_wrote(
    where: str, restarts: str, launch: Any, tmp_path: Path
) -> None:
    port = free_port()
    place = "--standalone" if where == "standalone" else f"--master-port={port}"
    script = tmp_path / "program.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", place, "--nproc-per-node", "2"]
    flags = ["--max-restarts", restarts, "--monitor-interval", "0.1"]
    done = launch([*command, *flags, script, restarts], timeout_s=120)
    assert done.stdout.count(f"life {restarts} ends with [4.0, 4.0]") == 2, done.output


@ranks(2)
def test_groups_can_be_made_again_in_the_same_store(tmp_path: Path) -> None:
    store, rank = dist.FileStore(str(tmp_path / "store"), 2), hvd.rank()
    for life in range(3):
        dist.init_process_group("horoclone", store=store, rank=rank, world_size=2)
        x = torch.full((2,), life + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [2 * life + 2.0] * 2
        dist.destroy_process_group()


def ending(how: str) -> None:
    dist.init_process_group("horoclone")
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if how == "os._exit":
        os._exit(0)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    while True:
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(("how", "codes"), [("term", [-signal.SIGTERM, 1]), ("os._exit", [0, 0])])
def test_no_file_is_left_however_the_processes_end(
    how: str, codes: list[int], torch_worker_pool: Any, tmp_path: Path
) -> None:
    """That none is left after SIGKILL is shown by test_c10d_failures.py."""
    team = torch_worker_pool(ending, 2, env={"TMPDIR": str(tmp_path)}, how=how)
    assert team.wait(60) == codes, team.outputs()
    assert not list(tmp_path.rglob("*")), (list(tmp_path.rglob("*")), team.outputs())


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


def outsiders_write(port: int, what: str) -> None:
    from worker_pool import say  # the warm worlds, which import this file as well, have none

    rank = int(os.environ["HOROCLONE_RANK"])
    rendezvous._host = lambda: f"host {rank}"  # as on two hosts, where the kernel cannot vouch
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    lies = {
        "garbage": {"host/0": b"x\nx"},
        "unsigned": {"host/0": b"-" * 32 + b"host 1\n0123"},
        "own value": {"host/1": b"evil\n-"},
    }
    if rank == 1:
        store.wait(["horoclone/0/host/0"], timedelta(seconds=60))
        for key, value in lies.get(what, {}).items():
            store.set(f"horoclone/0/{key}", value)
        if what == "own value":  # before rank 1 writes its true one
            store.wait(["horoclone/0/host-read/0"], timedelta(seconds=60))
    began = time.monotonic()
    try:
        group = c10d.HorocloneGroup(store, rank, 2, timedelta(minutes=30))
        x = torch.full((3,), rank + 1.0)
        group.allreduce([x]).wait()
        say(text=f"sum {x.tolist()}")
        group.shutdown()
    except hvd.HorovodInternalError as error:
        say(text=str(error), kind=type(error).__name__, seconds=time.monotonic() - began)
    if rank == 1:
        store.set("end", "")
    else:  # it has the server
        store.wait(["end"], timedelta(seconds=60))


@pytest.mark.parametrize("what", ["nothing", "garbage", "unsigned", "own value", "no secret"])
def test_what_strangers_write_into_the_store_is_refused(what: str, torch_worker_pool: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"HOROCLONE_SECRET": ""} if what == "no secret" else {}
    team = torch_worker_pool(outsiders_write, 2, env=env, port=port, what=what)
    assert team.wait(60) == [0, 0], team.outputs()
    for rank in range(2):
        (fact,) = team.said(rank, "text")
        if what == "nothing":
            assert fact["text"] == "sum [3.0, 3.0, 3.0]", team.outputs()
        else:
            assert "not from this job" in fact["text"] and fact["seconds"] < 30, team.outputs()
        if what == "no secret":
            assert fact["kind"] == "Unsupported" and "share no secret" in fact["text"], team.outputs()


def test_torch_is_told_that_the_backend_keeps_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch 2.15 looks for a backend in C++ in every new group, and init_process_group fails."""
    recording = {"gloo"}
    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", recording, raising=False)
    monkeypatch.delattr(dist.Backend, "HOROCLONE")
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *_, **__: None)
    c10d.register()
    assert recording == {"gloo", "horoclone"}
