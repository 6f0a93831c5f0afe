"""A job of test_torchft.py, argv: "job", the backend, the step at which replica 1 is killed and started anew (-1: never).

It starts torchft's lighthouse and two replicas, which are this program with argv: number, step at which it kills itself,
backend. A replica trains with torchft's Manager and prints the sum of its weights after the last step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft

from horoclone.torch.torchft import ProcessGroupHoroclone

LIMIT = timedelta(seconds=10)
STEPS = 10


def job(backend: str, dies_at: int) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=1000
    )
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()

    def start(number: int, until: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, str(number), str(until), backend])

    replicas = [start(0, -1), start(1, dies_at)]
    try:
        if dies_at >= 0:
            if replicas[1].wait(60) != -signal.SIGKILL:
                raise RuntimeError("replica 1 has not been killed")
            replicas[1] = start(1, -1)
        codes = [replica.wait(60) for replica in replicas]
    finally:
        for replica in replicas:
            replica.kill()
    lighthouse.shutdown()
    if codes != [0, 0]:
        raise RuntimeError(f"the replicas ended with {codes}")


def train(number: int, dies_at: int, backend: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(number)  # replicas begin unequal: the Manager makes them equal
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def load(state: dict[str, dict[str, torch.Tensor]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    group = (ProcessGroupHoroclone if backend == "horoclone" else torchft.ProcessGroupGloo)(timeout=LIMIT)
    manager = torchft.Manager(
        pg=group, min_replica_size=2, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica{number}", store_addr="localhost", store_port=store.port, rank=0, world_size=1,
        timeout=LIMIT, quorum_timeout=timedelta(seconds=60), connect_timeout=LIMIT,
    )  # fmt: skip
    optimizer = torchft.Optimizer(manager, plain)
    spread = torchft.DistributedDataParallel(manager, model)
    while manager.current_step() < STEPS:
        if manager.current_step() == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        # Data by step and by the rank among the replicas: the same whoever it is.
        rank = manager.participating_rank() or 0
        data = torch.randn(
            16, 12, generator=torch.Generator().manual_seed(100 * manager.current_step() + rank)
        )
        torch.nn.functional.mse_loss(spread(data[:, :8]), data[:, 8:]).backward()
        optimizer.step()
    total = sum(p.double().sum().item() for p in model.parameters())
    # In one piece: print() writes the end of the line apart, and the other replica may come in between.
    os.write(1, f"replica {number} after {manager.current_step()} steps: {total:.10f}\n".encode())
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads do not end by themselves


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(sys.argv[2], int(sys.argv[3]))
    else:
        train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
