"""horoclone as a backend of torchcomms, on a stand-in of its interface (tests/fakes/torchcomms): its package is not on
PyPI."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

HERE = Path(__file__).parent
FAKES = HERE.parent / "fakes"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
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

LOSES_ONE = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torchcomms
import horoclone.torch as hvd
import horoclone.torch.torchcomms
limit = timedelta(seconds=60)
comm = torchcomms.new_comm("horoclone", torch.device("cpu"), name="all", timeout=limit,
                           enable_reconfigure=True)
store, place = comm._impl._store, os.environ["RANK"]
assert comm.get_rank() == -1
store.set(f"handle/{place}", comm.get_init_handle())
handles = [store.get(f"handle/{r}").decode() for r in range(3)]
comm.reconfigure(1, handles, limit).wait()
x = torch.ones(2)
comm.all_reduce(x, torchcomms.ReduceOp.SUM, False)
assert x.tolist() == [3.0, 3.0]
if place == "1":
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(x, torchcomms.ReduceOp.SUM, True).wait()
except hvd.PeerLost as error:
    assert error.rank == 1, error
else:
    raise AssertionError("nothing was raised")
comm.reconfigure(2, [handles[2], handles[0]], limit).wait()
assert (comm.get_rank(), comm.get_size()) == (0 if place == "2" else 1, 2)
x = torch.ones(2)
comm.all_reduce(x, torchcomms.ReduceOp.SUM, False)
assert x.tolist() == [2.0, 2.0]
comm.finalize()
sys.stdout.write(f"rank {place} is content\\n")
"""


@pytest.mark.parametrize(
    "how",
    [
        "torchrun 3",
        "alone",
        *(pytest.param(how, marks=pytest.mark.long(15)) for how in ("torchrun 2", "horoclonerun 2")),
    ],
)
def test_every_operation_of_a_communicator(how: str, launch: Any) -> None:
    launcher, _, count = how.partition(" ")
    commands = {
        "torchrun": [*TORCHRUN, count, HERE / "torchcomms_ranks.py"],
        "horoclonerun": [
            sys.executable, "-m", "horoclone.launch.cli", "-np", count, sys.executable, HERE / "torchcomms_ranks.py",
        ],
        "alone": [sys.executable, HERE / "torchcomms_ranks.py"],
    }  # fmt: skip
    done = launch(commands[launcher], env=with_fakes(), timeout_s=180)
    assert done.stdout.count("is content") == int(count or 1), done.output


def test_torch_distributed_asks_torchcomms_for_it(launch: Any, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(OF_TORCH)
    env = {**with_fakes(), "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    done = launch([*TORCHRUN, "2", script], env=env, timeout_s=120)
    assert done.stdout.count("is content") == 2, done.output


def test_who_is_left_goes_on_after_a_loss(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LOSES_ONE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(3):
        env = {
            **os.environ,
            **with_fakes(),
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, tmp_path / "program.py"],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [one.communicate(timeout=120)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert [one.returncode for one in ranks] == [0, -9, 0], outputs
    assert "rank 0 is content" in outputs[0] and "rank 2 is content" in outputs[2], outputs


def test_torchcomms_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torchcomms.backends"] == {"horoclone": "horoclone.torch.torchcomms"}


def with_fakes() -> dict[str, str]:
    return {"PYTHONPATH": f"{FAKES}:{HERE.parents[1]}"}
