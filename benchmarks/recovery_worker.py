"""A rank of recovery.py: the same training under horoclone, under torchrun with gloo, and under torchft.

Every rank has the same model, a row of parameters whose gradients are known: base * (rank + 1) * factor(step). So the
average over n ranks is base * factor(step) * (n + 1) / 2, and the weights are start - RATE * base * sum, where the sum
is a number that NumPy follows beside. Each step is compared with both: a sum over ranks that were not there, or were
counted twice, ends the process with code 3.

A file of the folder, one for each process, says in which phase it is; the parent writes there where it shall die.
Printed are `generation number rank size pid step sum t`, `step number t`, `lost number t`, `updated number mean t`;
t is CLOCK_MONOTONIC in seconds, mean the seconds that a step of the generation took.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PARTS = 8  # parameters
RATE = 2.0**-10
WRONG = 3  # exit code
ALL_UP_TO = 1 << 20  # elements; of larger models every 97th is compared
PAGE_BYTES = 4096
_NAME, _WHEN, _AIM, _DELAY = slice(0, 40), slice(40, 48), slice(48, 88), slice(88, 96)


class Page:
    """The file of one process: its phase and the time of its death from the worker, an aim from the parent."""

    def __init__(self, folder: Path, pid: int) -> None:
        with (folder / f"{pid}").open("a+b") as file:
            file.truncate(PAGE_BYTES)
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES)

    def enter(self, phase: str) -> None:
        """This process is in this phase now, and dies in it when the parent says so."""
        self._map[_NAME] = phase.encode().ljust(40, b"\0")
        if self._map[_AIM.start] and self._map[_AIM].rstrip(b"\0").decode() == phase:
            (delay_s,) = struct.unpack("<d", self._map[_DELAY])
            if delay_s:
                threading.Timer(delay_s, self._die).start()
            else:
                self._die()

    def _die(self) -> None:
        self._map[_WHEN] = struct.pack("<d", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    def aim(self, phase: str, delay_s: float) -> None:
        self._map[_DELAY] = struct.pack("<d", delay_s)
        self._map[_AIM] = phase.encode().ljust(40, b"\0")

    def phase(self) -> str:
        return bytes(self._map[_NAME]).rstrip(b"\0").decode()

    def died_s(self) -> float:
        """0: not by its own hand."""
        return float(struct.unpack("<d", self._map[_WHEN])[0])


def bases(elements: int) -> list[Any]:
    """The row of parameters: what each gradient is a multiple of."""
    sizes = [elements // PARTS + (part < elements % PARTS) for part in range(PARTS)]
    return [((np.arange(size) % 13 + 1) / 16).astype(np.float32) for size in sizes]


def torch_model(elements: int) -> Any:
    """Of which model(scale).backward() gives these gradients, scale times."""
    import torch

    torch.set_num_threads(1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._bases = [torch.from_numpy(base) for base in bases(elements)]
            self.parts = torch.nn.ParameterList(torch.zeros(len(base)) for base in self._bases)

        def forward(self, scale: float) -> torch.Tensor:
            pairs = zip(self.parts, self._bases, strict=True)
            return torch.stack([(part * (base * scale)).sum() for part, base in pairs]).sum()

    return Model()


def factor(step: int) -> int:
    """Of the gradients of this step; its sign changes, so that weights stay small and their sums exact."""
    return (step % 5 + 1) * (1 if step % 2 else -1)


class Check:
    """The NumPy model of the training: what gradients and weights must be."""

    def __init__(self, elements: int) -> None:
        self._cut = slice(None, None, 1 if elements <= ALL_UP_TO else 97)
        self._bases = [base[self._cut] for base in bases(elements)]

    def step(self, step: int, size: int, total: float, gradients: list[Any], weights: list[Any]) -> None:
        """After a step with this many ranks; total: the sum of factor * (size + 1) / 2 over all steps."""
        for part, base in enumerate(self._bases):
            wanted = base * np.float32(factor(step) * (size + 1) / 2)
            self._compare(f"gradient {part} of step {step}", gradients[part][self._cut], wanted)
            wanted = base * np.float32(-RATE * total)
            self._compare(f"weights {part} after step {step}", weights[part][self._cut], wanted)

    def torch_step(self, step: int, size: int, total: float, model: Any) -> None:
        parameters = list(model.parameters())
        gradients = [one.grad.numpy() for one in parameters]
        self.step(step, size, total, gradients, [one.detach().numpy() for one in parameters])

    @staticmethod
    def _compare(what: str, found: Any, wanted: Any) -> None:
        if not np.allclose(found, wanted, rtol=1e-5, atol=1e-6):
            worst = int(np.abs(found - wanted).argmax())
            print(
                f"WRONG {what}: {found[worst]} and not {wanted[worst]} (pid {os.getpid()})",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(WRONG)


def say(*words: object) -> bool:
    """Prints the words and the time, in one write, as the ranks of torchrun share a pipe; False."""
    os.write(1, " ".join(map(str, (*words, f"{time.monotonic():.6f}\n"))).encode())
    return False


def watch_failpoints(page: Page) -> None:
    """Where something is lost or comes, the phases are the failpoints of horoclone."""
    from horoclone import failpoints

    for name in failpoints.POINTS:
        if not name.startswith(("membership.notice", "launcher.", "discovery.", "checkpoint.")):
            failpoints.on(name, functools.partial(page.enter, name))


def telling(train: Callable[[Any, Any], None]) -> Callable[[Any], None]:
    """train(state, generation), which says when a generation begins and how it ends."""
    from horoclone import errors
    from horoclone.elastic.generation import generation

    def told(state: Any) -> None:
        now = generation()
        say("generation", now.number, now.rank, now.size, os.getpid(), state.step, state.total)
        began_s, step = time.monotonic(), state.step
        try:
            train(state, now)
        except errors.HorovodInternalError:
            say("lost", now.number)
            raise
        except errors.HostsUpdatedInterrupt:
            say("updated", now.number, (time.monotonic() - began_s) / max(1, state.step - step))
            raise

    return told


def on_numpy(page: Page, arguments: argparse.Namespace) -> None:
    import horoclone as hvd
    from horoclone.elastic.run import run
    from horoclone.elastic.state import ObjectState
    from horoclone.objects import broadcast_object

    watch_failpoints(page)
    page.enter("start")
    parts, check = bases(arguments.elements), Check(arguments.elements)
    hvd.init()
    state = ObjectState(
        broadcast_object, hvd.rank, step=0, total=0.0, weights=[np.zeros_like(base) for base in parts]
    )

    def train(state: Any, now: Any) -> None:
        first = True
        while True:
            page.enter("forward")
            loss = sum(float(weights @ base) for weights, base in zip(state.weights, parts, strict=True))
            page.enter("backward")
            scale = np.float32((now.rank + 1) * factor(state.step) + 0.0 * loss)
            gradients = [base * scale for base in parts]
            page.enter("collective")
            handles = [hvd.allreduce_async(one, name=f"gradient.{i}") for i, one in enumerate(gradients)]
            gradients = [hvd.synchronize(handle) for handle in handles]
            page.enter("step")
            for weights, gradient in zip(state.weights, gradients, strict=True):
                weights -= np.float32(RATE) * gradient
            first = first and say("step", now.number)
            state.total += factor(state.step) * (now.size + 1) / 2
            check.step(state.step, now.size, state.total, gradients, state.weights)
            state.step += 1
            state.commit()
            page.enter("pause")
            time.sleep(arguments.step_ms / 1000)

    run(telling(train))(state)


class TorchLoop:
    """The steps of a rank in PyTorch; who runs them says what reduces the gradients."""

    def __init__(self, page: Page, arguments: argparse.Namespace) -> None:
        import torch

        page.enter("start")
        self.page, self._pause_s = page, arguments.step_ms / 1000
        self.model, self._check = torch_model(arguments.elements), Check(arguments.elements)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._told = -1  # the generation of which the first step was told

    def step(
        self, kept: Any, number: int, rank: int, size: int, forward: Callable[[int], Any],
        reduce: Callable[[], bool] = lambda: True, begins: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """kept: has step and total. False where reduce() says that it counts for nothing."""
        self.optimizer.zero_grad()
        self.page.enter("forward")
        loss = forward((rank + 1) * factor(kept.step))
        self.page.enter("backward")
        loss.backward()
        if not reduce():
            return False
        self.page.enter("step")
        self.optimizer.step()
        if self._told != number:
            self._told = number
            begins()
            say("step", number)
        kept.total += factor(kept.step) * (size + 1) / 2
        self._check.torch_step(kept.step, size, kept.total, self.model)
        kept.step += 1
        return True

    def pause(self) -> None:
        self.page.enter("pause")
        time.sleep(self._pause_s)


def on_torch(page: Page, arguments: argparse.Namespace) -> None:
    import horoclone.torch as hvd

    watch_failpoints(page)
    loop = TorchLoop(page, arguments)
    hvd.init()
    optimizer = loop.optimizer = hvd.DistributedOptimizer(loop.optimizer, loop.model.named_parameters())
    state = hvd.elastic.TorchState(model=loop.model, optimizer=optimizer, step=0, total=0.0)

    def reduce() -> bool:
        page.enter("collective")
        optimizer.synchronize()  # type: ignore[attr-defined]
        return True

    def train(state: Any, now: Any) -> None:
        while True:
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                loop.step(state, now.number, now.rank, now.size, loop.model, reduce)
            state.commit()
            loop.pause()

    hvd.elastic.run(telling(train))(state)


def on_torchrun(page: Page, arguments: argparse.Namespace) -> None:
    """All ranks are started anew after a loss, and go on from the file that rank 0 has written last."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    loop = TorchLoop(page, arguments)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    parallel = DistributedDataParallel(loop.model)  # reduces in backward
    file = arguments.folder / "torchrun.pt"
    kept = argparse.Namespace(step=0, total=0.0)
    if file.exists():
        saved = torch.load(file)
        kept.step, kept.total = saved["step"], saved["total"]
        loop.model.load_state_dict(saved["model"])
    say("generation", number, rank, size, os.getpid(), kept.step, kept.total)
    while True:
        loop.step(kept, number, rank, size, parallel)
        page.enter("commit")
        if rank == 0 and kept.step % arguments.save_every == 0:
            torch.save({**vars(kept), "model": loop.model.state_dict()}, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)
        loop.pause()


def on_torchft(page: Page, arguments: argparse.Namespace) -> None:
    """Each process is a replica group of its own; the lighthouse says who takes part in a step."""
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    loop = TorchLoop(page, arguments)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = argparse.Namespace(step=0, total=0.0)

    def load(saved: dict[str, Any]) -> None:
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["optimizer"])
        vars(kept).update(saved["kept"])

    def saved() -> dict[str, Any]:
        both = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
        return {**both, "kept": dict(vars(kept))}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=load, state_dict=saved,
        min_replica_size=1, use_async_quorum=False, timeout=timedelta(seconds=10), rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=arguments.lighthouse,
        replica_id=f"recovery_{os.getpid()}", hostname="127.0.0.1",
    )  # fmt: skip

    def reduce() -> bool:
        # the DistributedDataParallel of torchft 0.2.0 fails in its hook when a peer is lost
        page.enter("collective")
        for work in [manager.allreduce(one.grad) for one in loop.model.parameters()]:
            work.wait()
        page.enter("commit")
        if not manager.should_commit():
            say("lost", manager._quorum_id)
            return False
        return True

    while True:
        page.enter("quorum")
        manager.start_quorum()
        number, rank, size = manager._quorum_id, manager.participating_rank() or 0, manager.num_participants()
        begins = functools.partial(_begins, number, rank, size, kept)
        if loop.step(kept, number, rank, size, loop.model, reduce, begins):
            loop.pause()


def _begins(number: int, rank: int, size: int, kept: argparse.Namespace) -> None:
    say("generation", number, rank, size, os.getpid(), kept.step, kept.total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", choices=("numpy", "torch", "torchrun", "torchft"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument("--lighthouse", default="")
    arguments = parser.parse_args()
    run = {"numpy": on_numpy, "torch": on_torch, "torchrun": on_torchrun, "torchft": on_torchft}[
        arguments.contestant
    ]
    run(Page(arguments.folder, os.getpid()), arguments)


if __name__ == "__main__":
    main()
