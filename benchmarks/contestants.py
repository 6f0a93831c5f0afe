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
from gradients import buckets
from oneccl import OneCcl

import horoclone.torch as hvd
from horoclone.runtime import native
from horoclone.torch.operations.tensors import number_of

Call = Callable[[], object]


class Horoclone:
    """Blocking `allreduce_` through the public torch API."""

    label = "horoclone"

    def __init__(self, comm: Any) -> None:
        if not hvd.is_initialized():
            hvd.init()
        if (hvd.rank(), hvd.size()) != (comm.rank, comm.size):
            raise RuntimeError(
                f"horoclone sees rank {hvd.rank()} of {hvd.size()}, the starter {comm.rank} of {comm.size}"
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

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Where the optimizer keeps gradients: in memory that the node's ranks share."""
        return torch.frombuffer(native().allocate(nbytes), dtype=torch.float32)

    def bucket_many(self, area: torch.Tensor, counts: list[int], name: str) -> Call:
        """Declared buckets, reduced where they lie. Their runtime ends before they need to be withdrawn."""
        parts = [area[first:last] for first, last in buckets(counts)]
        runtime, number = native(), number_of(area, name)
        declared = runtime.declare(
            [f"{name}.{index}" for index in range(len(parts))], [part.data_ptr() for part in parts],
            [part.numel() for part in parts], [number] * len(parts), hvd.Sum,
        )  # fmt: skip
        start, wait, release = runtime.submit_declared, runtime.wait, runtime.release
        numbers = range(len(parts))

        def run() -> None:
            for handle in [start(0, declared, index) for index in numbers]:
                wait(handle)
                release(handle)

        return run


class HorocloneFlat(Horoclone):
    """The same with no second level: one ring over all ranks. It begins each turn with a runtime of its own."""

    label = "horoclone flat"

    def begin(self) -> None:
        self._restart({"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"})

    def end(self) -> None:
        self._restart({})

    @staticmethod
    def _restart(settings: dict[str, str]) -> None:
        hvd.shutdown()
        os.environ.update(settings)
        hvd.init()
        for name in settings:
            del os.environ[name]


class HorocloneFp16(Horoclone):
    """float16 on the wire: cast, `allreduce_async_`, cast back, in parts, one of which is cast while others are on
    their way: as the gradients of an optimizer with Compression.fp16, which come one after the other."""

    label = "horoclone fp16"
    tolerance = 2e-3  # of the largest number
    part_elements = 1 << 20  # as int8's

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Call:
        start, wait, total = hvd.allreduce_async_, hvd.synchronize, hvd.Sum
        wires = torch.empty_like(tensor, dtype=torch.float16).split(self.part_elements)
        parts = [
            (part, wire, f"{name}.{index}")
            for index, (part, wire) in enumerate(zip(tensor.split(self.part_elements), wires, strict=True))
        ]

        def run() -> None:
            handles = [start(wire.copy_(part), None, label, total) for part, wire, label in parts]
            for handle, (part, wire, _) in zip(handles, parts, strict=True):
                wait(handle)
                part.copy_(wire)

        return run


class HorocloneInt8(Horoclone):
    """Block-int8 compression of a whole bucket, without error feedback, as an optimizer runs it."""

    label = "horoclone int8"
    tolerance = 2e-2

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Call:
        from horoclone.process_sets import global_process_set
        from horoclone.torch.optimizer.gradient_bucket import OptimizerBucket

        compressor = hvd.Compression.int8(error_feedback=False)
        bucket = OptimizerBucket(tensor, {name: tensor}, 0, name, hvd.Sum, global_process_set)

        def run() -> None:
            work = compressor.reduce(bucket)
            handle = next(work, None)
            while handle is not None:
                try:
                    handle = work.send(hvd.synchronize(handle))
                except StopIteration:
                    return

        return run


class Gloo:
    """torch.distributed with the gloo backend, over the loopback interface or GLOO_SOCKET_IFNAME."""

    label = "gloo"

    def __init__(self, comm: Any) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # torch warns at every coalesced call that it will go away; the warning would be timed as well.
        warnings.filterwarnings("ignore", message=".*coalesced.*")
        host = getattr(comm, "address", "127.0.0.1")
        store = dist.TCPStore(host, 0, comm.size, True, wait_for_workers=False) if comm.rank == 0 else None
        port = comm.bcast(store.port if store else None)
        store = store or dist.TCPStore(host, port, comm.size, False)
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

    def bucket_many(self, area: torch.Tensor, counts: list[int], name: str) -> Call:
        """DDP's buckets, of which the gradients are views: nothing is packed."""
        return self.start_many([area[first:last] for first, last in buckets(counts)], name)

    def close(self) -> None:
        dist.destroy_process_group()


class Mpi:
    """`Allreduce(MPI.IN_PLACE)` of mpi4py on the tensor's memory."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm, self.MPI = comm, MPI

    @property
    def label(self) -> str:
        return library_name()

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Call:
        reduce, here, buffer = self.comm.Allreduce, self.MPI.IN_PLACE, [tensor.numpy(), self.MPI.FLOAT]
        return lambda: reduce(here, buffer)

    def start_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        start, here, wait = self.comm.Iallreduce, self.MPI.IN_PLACE, self.MPI.Request.Waitall
        buffers = [[tensor.numpy(), self.MPI.FLOAT] for tensor in tensors]
        return lambda: wait([start(here, buffer) for buffer in buffers])

    def block_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        """One blocking call after the other."""
        calls = [self.prepare(tensor, tensor, name) for tensor in tensors]

        def run() -> None:
            for call in calls:
                call()

        return run

    def group_many(self, tensors: list[torch.Tensor], name: str) -> Call:
        """MPI has no grouped call: packed by torch.cat, reduced flat, and unpacked by one call of torch."""
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
        parts = list(flat.split([tensor.numel() for tensor in tensors]))
        reduce, here, buffer = self.comm.Allreduce, self.MPI.IN_PLACE, [flat.numpy(), self.MPI.FLOAT]

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

    def __init__(self, comm: Any) -> None:
        pass

    def prepare(self, tensor: torch.Tensor, target: torch.Tensor, name: str) -> Call:
        move, to, source, nbytes = ctypes.memmove, target.data_ptr(), tensor.data_ptr(), tensor.nbytes
        return lambda: move(to, source, nbytes)

    def close(self) -> None:
        pass


def library_name() -> str:
    """The MPI library that mpi4py loaded, for example "Open MPI 5.0.11" or "MPICH 5.0.2"."""
    from mpi4py import MPI

    first = MPI.Get_library_version().splitlines()[0].replace("\0", "")
    if first.startswith("Open MPI"):
        return first.split(",")[0].replace(" v", " ")
    words = first.replace("Version:", " ").split()
    return " ".join(words[:2]) if words else "MPI"


# The names that the command line takes; the labels are what the tables show.
KINDS: dict[str, Any] = {
    "horoclone": Horoclone, "async": HorocloneAsync, "flat": HorocloneFlat, "fp16": HorocloneFp16,
    "int8": HorocloneInt8, "gloo": Gloo, "mpi": Mpi, "oneccl": OneCcl, "memcpy": Memcpy,
}  # fmt: skip
