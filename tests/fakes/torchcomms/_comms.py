"""A stand-in of torchcomms' interface for backends in Python, whose package is not on PyPI: written to its public
repository, meta-pytorch/torchcomms (PyTorchCommBackend.hpp and nccl4py/backend.py of 4b337fe0 and cf7d81f8, _comms.pyi of
055320c1 and 00d23f16), where C++ does what is done here. More than there: batches, reconfigure() and the factor of a
PREMUL_SUM reach the backend."""

from __future__ import annotations

import enum
import importlib.metadata
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work  # torch.distributed imports this module first

RedOpType = enum.Enum("RedOpType", "SUM PRODUCT MIN MAX BAND BOR BXOR PREMUL_SUM AVG")
P2POpType = enum.Enum("P2POpType", "SEND RECV")
_backends: dict[str, type] = {}


class ReduceOp:
    def __init__(self, kind: RedOpType, factor: Any = None) -> None:
        self.type, self.factor = kind, factor

    @staticmethod
    def PREMUL_SUM(factor: Any) -> ReduceOp:
        return ReduceOp(RedOpType.PREMUL_SUM, factor)


for _kind in RedOpType:
    if _kind is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _kind.name, ReduceOp(_kind))


class CommOptions:
    def __init__(self) -> None:
        self.abort_process_on_timeout_or_error = True
        self.timeout = timedelta(seconds=600)
        self.store: Any = None
        self.enable_reconfigure = False
        self.hints: dict[str, str] = {}


class ReconfigureOptions:
    def __init__(self, uuid: int, handles: Any, timeout: timedelta | None = None) -> None:
        self.uuid, self.init_handles, self.timeout, self.hints = uuid, handles, timeout, {}


class P2POp:
    def __init__(self, type: P2POpType, tensor: torch.Tensor, peer: int) -> None:
        self.type, self.tensor, self.peer = type, tensor, peer


class TorchCommBackend:
    def _set_device_and_options(self, device: torch.device, options: Any) -> None:
        self._told = (device, options)


class TorchWork:
    """None from a backend: it is done."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def is_completed(self) -> bool:
        return self._inner is None

    def wait(self) -> None:
        if self._inner is not None:
            self._inner.wait()
            self._inner = None


class BatchSendRecv:
    def __init__(self, impl: Any) -> None:
        self._impl, self.ops = impl, []

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.ops.append(P2POp(P2POpType.SEND, tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self.ops.append(P2POp(P2POpType.RECV, tensor, src))

    def issue(self, async_op: bool) -> TorchWork:
        return TorchWork(self._impl.batch_op_issue(self.ops, async_op))


class TorchComm:
    def __init__(self, backend: str, impl: Any) -> None:
        self._backend, self._impl = backend, impl

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._impl, name)
        return call if name.startswith(("get_", "finalize", "abort", "set_")) else self._wrapped(call)

    def _wrapped(self, call: Any) -> Any:
        def wrapped(*args: Any, hints: Any = None, timeout: Any = None, **more: Any) -> TorchWork:
            # C++ passes them by place, and neither of these two
            return TorchWork(call(*args, *more.values()))

        return wrapped

    def get_backend(self) -> str:
        return self._backend

    def batch_op_create(self) -> BatchSendRecv:
        return BatchSendRecv(self._impl)

    def split(self, ranks: list[int], name: str) -> TorchComm | None:
        child = self._impl.split(ranks, name, CommOptions())
        return None if child is None else TorchComm(self._backend, child)

    def reconfigure(self, uuid: int, handles: Any, timeout: timedelta) -> TorchWork:
        return TorchWork(self._impl.reconfigure(ReconfigureOptions(uuid, handles, timeout)))


def register_backend(name: str, kind: type) -> None:
    _backends[name] = kind


def new_comm(
    backend: str, device: torch.device, *, timeout: timedelta | None = None, store: Any = None,
    name: str = "comm", hints: dict[str, str] | None = None, enable_reconfigure: bool = False,
) -> TorchComm:  # fmt: skip
    if backend not in _backends:
        (found,) = importlib.metadata.entry_points(group="torchcomms.backends", name=backend)
        found.load()
    options = CommOptions()
    options.timeout, options.store, options.hints = timeout or options.timeout, store, hints or {}
    options.enable_reconfigure = enable_reconfigure
    impl = _backends[backend]()
    impl.init(device, name, options)
    return TorchComm(backend, impl)


class _Done(Work):
    def __init__(self, work: TorchWork) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True


class _BackendWrapper(ProcessGroup):
    """torch.distributed on a communicator; torchcomms' own is a Backend in C++."""

    def __init__(self, comm: TorchComm) -> None:
        super().__init__(comm.get_rank(), comm.get_size())
        self._comm, self._name, self._desc = comm, "", ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def getBackendName(self) -> str:
        return "torchcomms"

    def allreduce(self, tensors: Any, opts: Any) -> _Done:
        op = getattr(ReduceOp, opts.reduceOp.op.name)
        return _Done(self._comm.all_reduce(tensors[0], op, True))

    def broadcast(self, tensors: Any, opts: Any) -> _Done:
        return _Done(self._comm.broadcast(tensors[0], opts.rootRank, True))

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> _Done:
        return _Done(self._comm.all_gather_single(output, source, True))

    all_gather_single = _allgather_base

    def allgather(self, outputs: Any, sources: Any, opts: Any) -> _Done:
        return _Done(self._comm.all_gather(outputs[0], sources[0], True))

    def barrier(self, opts: Any) -> _Done:
        return _Done(self._comm.barrier(True))

    def shutdown(self) -> None:
        self._comm.finalize()
