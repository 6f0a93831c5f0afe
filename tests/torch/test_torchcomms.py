"""horoclone as a backend of torchcomms, on a stand-in of its interface (tests/fakes/torchcomms): its package is not on
PyPI."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
from world import free_port

import horoclone.torch as hvd

HERE = Path(__file__).parent
FAKES = HERE.parent / "fakes"
HOROCLONERUN = [sys.executable, "-m", "horoclone.launch.cli", "-np"]
OF_TORCH = """
import os
import socket
import subprocess
import sys
import torch
import torch.distributed as dist
import torch.distributed.config
import horoclone.torch.torchcomms
from torchcomms._comms import _BackendWrapper
dist.init_process_group("horoclone")
rank, size = dist.get_rank(), dist.get_world_size()
assert torch.distributed.config.use_torchcomms and isinstance(dist.group.WORLD, _BackendWrapper)
for async_op in (False, True):
    x = torch.full((5,), rank + 1.0)
    work = dist.all_reduce(x, async_op=async_op)
    if async_op:
        work.wait()
    assert x.tolist() == [size * (size + 1) / 2] * 5
whole = torch.empty(5 * size)
dist.all_gather_into_tensor(whole, torch.full((5,), float(rank)))
assert whole.view(size, 5)[:, 0].tolist() == list(range(size))
dist.broadcast(x, 1)
dist.barrier()
dist.destroy_process_group()
sys.stdout.write(f"rank {rank} of {size} is content\\n")
"""


def loses_one(port: int) -> None:
    """Without what the team has of a launcher: as programs that somebody started by hand."""
    place = os.environ["HOROCLONE_RANK"]
    for name in [name for name in os.environ if name.startswith("HOROCLONE_")]:
        del os.environ[name]
    os.environ.update(RANK=place, WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path.insert(0, str(FAKES))
    import torchcomms
    from worker_pool import say

    import horoclone.torch.torchcomms  # noqa: F401 - registers the backend

    limit = timedelta(seconds=60)
    comm = torchcomms.new_comm(
        "horoclone", torch.device("cpu"), name="all", timeout=limit, enable_reconfigure=True
    )
    store = comm._impl._store
    assert comm.get_rank() == -1
    store.set(f"handle/{place}", comm.get_init_handle())
    handles = [store.get(f"handle/{r}").decode() for r in range(3)]
    comm.reconfigure(1, handles, limit).wait()
    comm.all_reduce(x := torch.ones(2), torchcomms.ReduceOp.SUM, False)
    assert x.tolist() == [3.0, 3.0]
    store.set(f"has the sum/{place}", "")  # what is complete on one rank may still be under way on others
    if place == "1":
        store.wait(["has the sum/0", "has the sum/2"], limit)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.PeerLost) as caught:
        comm.all_reduce(x, torchcomms.ReduceOp.SUM, True).wait()
    assert caught.value.rank == 1
    comm.reconfigure(2, [handles[2], handles[0]], limit).wait()
    assert (comm.get_rank(), comm.get_size()) == (0 if place == "2" else 1, 2)
    comm.all_reduce(x := torch.ones(2), torchcomms.ReduceOp.SUM, False)
    assert x.tolist() == [2.0, 2.0]
    comm.finalize()
    say(content=True)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["horoclonerun 3", "alone", "torchrun 2"])
def test_every_operation_of_a_communicator(how: str, launch: Any) -> None:
    launcher, _, count = how.partition(" ")
    commands = {
        "torchrun": [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count, HERE / "torchcomms_ranks.py",
        ],
        "horoclonerun": [*HOROCLONERUN, count, sys.executable, HERE / "torchcomms_ranks.py"],
        "alone": [sys.executable, HERE / "torchcomms_ranks.py"],
    }  # fmt: skip
    done = launch(commands[launcher], env=with_fakes(), timeout_s=180)
    assert done.stdout.count("is content") == int(count or 1), done.output


def test_torch_distributed_asks_torchcomms_for_it(launch: Any, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(OF_TORCH)
    env = {**with_fakes(), "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    done = launch([*HOROCLONERUN, "2", sys.executable, script], env=env, timeout_s=120)
    assert done.stdout.count("is content") == 2, done.output


def test_who_is_left_goes_on_after_a_loss(torch_worker_pool: Any) -> None:
    port = free_port()
    team = torch_worker_pool(loses_one, 3, port=port)
    assert team.wait(120) == [0, -signal.SIGKILL, 0], team.outputs()
    assert all(team.said(rank, "content") for rank in (0, 2)), team.outputs()


def test_torchcomms_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torchcomms.backends"] == {"horoclone": "horoclone.torch.torchcomms"}


def with_fakes() -> dict[str, str]:
    return {"PYTHONPATH": f"{FAKES}:{HERE.parents[1]}"}
