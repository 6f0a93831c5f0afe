"""The contestants: each is handed the same tensor and returns a call that sums it over the ranks, in place.

Everything a contestant can prepare once per buffer (names, MPI buffer descriptions) is prepared outside the timed
call, for all of them alike. All live in the same processes, with one compute thread each.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import horoclone.torch as hvd

Call = Callable[[], object]


class Horoclone:
    """Blocking `allreduce_` through the public torch API."""

    label = "horoclone"

    def __init__(self, comm: MPI.Intracomm) -> None:
        if not hvd.is_initialized():
            hvd.init()
        if (hvd.rank(), hvd.size()) != (comm.rank, comm.size):
            raise RuntimeError(
                f"horoclone sees rank {hvd.rank()} of {hvd.size()}, MPI {comm.rank} of {comm.size}"
            )

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Call:
        reduce, total = hvd.allreduce_, hvd.Sum
        return lambda: reduce(tensor, None, name, total)

    def close(self) -> None:
        hvd.shutdown()


class HorocloneAsync(Horoclone):
    """`allreduce_async_` followed at once by `synchronize`."""

    label = "horoclone async"

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Call:
        start, wait, total = hvd.allreduce_async_, hvd.synchronize, hvd.Sum
        return lambda: wait(start(tensor, None, name, total))

    def start_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        """All tensors submitted one by one, then waited for one by one."""
        start, wait, total = hvd.allreduce_async_, hvd.synchronize, hvd.Sum
        named = [(tensor, f"{name}.{index}") for index, tensor in enumerate(tensors)]

        def run() -> None:
            for handle in [start(tensor, None, label, total) for tensor, label in named]:
                wait(handle)

        return run

    def group_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        """All tensors in one grouped call."""
        start, wait, total = hvd.grouped_allreduce_async_, hvd.synchronize, hvd.Sum
        return lambda: wait(start(tensors, None, name, total))


class Gloo:
    """torch.distributed with the gloo backend, over the loopback interface."""

    label = "gloo"

    def __init__(self, comm: MPI.Intracomm) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # torch warns at every coalesced call that it will go away; the warning would be timed as well.
        warnings.filterwarnings("ignore", message=".*coalesced.*")
        store = (
            dist.TCPStore("127.0.0.1", 0, comm.size, True, wait_for_workers=False) if comm.rank == 0 else None
        )
        port = comm.bcast(store.port if store else None)
        store = store or dist.TCPStore("127.0.0.1", port, comm.size, False)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Call:
        reduce = dist.all_reduce
        return lambda: reduce(tensor)

    def start_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        reduce, total = dist.all_reduce, dist.ReduceOp.SUM

        def run() -> None:
            for work in [reduce(tensor, total, None, True) for tensor in tensors]:
                work.wait()

        return run

    def group_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        """torch's own coalesced call, which packs."""
        reduce = dist.all_reduce_coalesced
        return lambda: reduce(tensors)

    def close(self) -> None:
        dist.destroy_process_group()


class Mpi:
    """`Allreduce(MPI.IN_PLACE)` of mpi4py on the tensor's memory."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    @property
    def label(self) -> str:
        return library_name()

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Call:
        reduce, here, buffer = self.comm.Allreduce, MPI.IN_PLACE, [tensor.numpy(), MPI.FLOAT]
        return lambda: reduce(here, buffer)

    def start_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        start, here, wait = self.comm.Iallreduce, MPI.IN_PLACE, MPI.Request.Waitall
        buffers = [[tensor.numpy(), MPI.FLOAT] for tensor in tensors]
        return lambda: wait([start(here, buffer) for buffer in buffers])

    def group_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        """MPI has no grouped call: packed by torch.cat, reduced flat, and unpacked by one call of torch."""
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
        parts = list(flat.split([tensor.numel() for tensor in tensors]))
        reduce, here, buffer = self.comm.Allreduce, MPI.IN_PLACE, [flat.numpy(), MPI.FLOAT]

        def run() -> None:
            torch.cat(tensors, out=flat)
            reduce(here, buffer)
            torch._foreach_copy_(tensors, parts)

        return run

    def close(self) -> None:
        pass  # mpi4py finalises MPI at exit


class Memcpy:
    """No reduction: every rank copies its tensor into another buffer, all at once. What the memory gives."""

    label = "memcpy"

    def __init__(self, comm: MPI.Intracomm) -> None:
        pass

    def prepare(self, tensor: torch.Tensor, target: torch.Tensor, name: str) -> Call:
        move, to, source, nbytes = ctypes.memmove, target.data_ptr(), tensor.data_ptr(), tensor.nbytes
        return lambda: move(to, source, nbytes)

    def close(self) -> None:
        pass


def library_name() -> str:
    """The MPI library that mpi4py loaded, for example "Open MPI 5.0.11" or "MPICH 5.0.2"."""
    first = MPI.Get_library_version().splitlines()[0].replace("\0", "")
    if first.startswith("Open MPI"):
        return first.split(",")[0].replace(" v", " ")
    words = first.replace("Version:", " ").split()
    return " ".join(words[:2]) if words else "MPI"


# The names that the command line takes; the labels are what the tables show.
KINDS: dict[str, Any] = {
    "horoclone": Horoclone,
    "async": HorocloneAsync,
    "gloo": Gloo,
    "mpi": Mpi,
    "memcpy": Memcpy,
}
