"""horoclone as a backend of torchcomms: `torchcomms.new_comm("horoclone", torch.device("cpu"))`, and with
TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 what `init_process_group("horoclone")` makes. Needs the package torchcomms, which
loads this module by its entry point.

A communicator is a process group of the c10d backend (c10d/group.py): its operations, errors and limits. Written to
torchcomms' interface for backends in Python (TorchCommBackend, register_backend). Thread: the caller's.
"""

# mypy: disable-error-code="misc, import-not-found, no-untyped-call"
from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torchcomms._comms import TorchCommBackend, register_backend

from horoclone.errors import Unsupported
from horoclone.runtime import current, lifecycle
from horoclone.torch.c10d.group import HorocloneGroup
from horoclone.torch.c10d.group_properties import BACKEND
from horoclone.torch.c10d.rendezvous import job_store

__all__ = ["TorchCommHoroclone"]

DEFAULT_TIMEOUT = timedelta(seconds=600)  # torchcomms'
# Where a launcher says which process this is; torchcomms' own first.
_RANKS = (("TORCHCOMM_RANK", "TORCHCOMM_SIZE"), ("RANK", "WORLD_SIZE"))


class _All:
    """The works of a batch as one."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _options(kind: type, async_op: bool, **more: Any) -> Any:
    options = kind()
    options.asyncOp = async_op
    for name, value in more.items():
        setattr(options, name, value)
    return options


def _reduction(op: Any) -> Any:
    """torch's reduction for torchcomms'. ValueError for one that torch does not have; Unsupported for a PREMUL_SUM of
    which torchcomms does not tell the factor."""
    name = op.type.name
    if name == "PREMUL_SUM":
        if not hasattr(op, "factor"):
            raise Unsupported(
                "PREMUL_SUM: this torchcomms does not tell its backends in Python the factor; multiply the tensor by "
                "it and use SUM"
            )
        return dist._make_nccl_premul_sum(op.factor)  # type: ignore[attr-defined]
    kind = getattr(dist.ReduceOp, name, None)
    if kind is None:
        raise ValueError(f"{op!r} is no reduction of torch.distributed")
    return dist.ReduceOp(kind)


class TorchCommHoroclone(TorchCommBackend):
    """A communicator of torchcomms. Ranks are ranks of the communicator.

    Sizes may differ between ranks in all_gather_v, reduce_scatter_v, all_to_all_v_single, all_to_all, scatter, gather.
    Errors are horoclone's: Mismatch, PeerLost, Timeout, Aborted, ValueError; they come from the call or, with async_op,
    from wait() of its work. Nothing aborts the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._group: HorocloneGroup | None = None
        self._name = ""
        self._store: Any = None
        self._device = torch.device("cpu")
        self._timeout = DEFAULT_TIMEOUT
        self._members: list[int] = []  # as ranks of the job
        self._handle = ""

    # --- life ---

    def init(self, device: torch.device, name: str, options: Any) -> None:
        """Connects with everybody of the job. Ranks come from TORCHCOMM_RANK and _SIZE, RANK and WORLD_SIZE, or else
        from the launcher, as of hvd.init(); the store from the options, MASTER_ADDR and _PORT, or else from the job.

        With enable_reconfigure, an option or a hint, it waits for reconfigure(). Raises what init_process_group raises.
        """
        if self._group is not None:
            raise ValueError(f"the communicator {name!r} has been initialised already")
        self._name, self._device = name, device
        self._timeout = getattr(options, "timeout", None) or DEFAULT_TIMEOUT
        hints = dict(getattr(options, "hints", None) or {})
        waits = getattr(options, "enable_reconfigure", False)
        waits = waits or hints.get("enable_reconfigure", "").lower() in ("1", "true", "on")
        rank, size = _place()
        self._handle = f"{BACKEND}:{rank}:{secrets.token_hex(8)}"
        self._store = getattr(options, "store", None) or job_store(rank, size, self._timeout)
        if not waits:
            self._join(dist.PrefixStore(f"torchcomms/{name}", self._store), rank, list(range(size)))

    def _join(self, store: Any, rank: int, members: list[int]) -> None:
        self._members = members
        self._group = HorocloneGroup(store, rank, len(members), self._timeout, members)
        self._group.setGroupName(self._name)

    def finalize(self) -> None:
        """Finishes what every rank has started, and closes. More calls do nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def abort(self) -> None:
        """Fails every pending operation on all ranks; reconfigure() may follow."""
        if self._group is not None:
            self._group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of operations that start from now on."""
        self._timeout = timeout
        if self._group is not None:
            self._group.set_timeout(timeout)

    def get_rank(self) -> int:
        """This process's rank in the communicator; -1 before it has one."""
        return self._group.getRank() if self._group is not None else -1

    def get_size(self) -> int:
        """How many ranks the communicator has; -1 before it has any."""
        return self._group.getSize() if self._group is not None else -1

    def get_backend_name(self) -> str:
        """horoclone."""
        return BACKEND

    def get_comm_name(self) -> str:
        """What new_comm() or split() was given."""
        return self._name

    def split(self, ranks: Sequence[int], name: str, options: Any) -> TorchCommHoroclone | None:
        """A communicator of these ranks, in their order. Every one of them calls it; [] on ranks that are none: None.

        Raises ValueError where this rank is not among them, or one is named twice or does not exist.
        """
        group, chosen = self._open(), list(ranks)
        if not chosen:
            return None
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(group.getSize())):
            raise ValueError(f"split: {chosen} are not different ranks of 0 to {group.getSize() - 1}")
        if group.getRank() not in chosen:
            raise ValueError(f"split: this is rank {group.getRank()}, not one of {chosen}; pass [] there")
        child = TorchCommHoroclone()
        child._name, child._store, child._device = name, self._store, self._device
        child._timeout = getattr(options, "timeout", None) or self._timeout
        among = "-".join(map(str, chosen))
        store = dist.PrefixStore(f"torchcomms/{self._name}/{name}/{among}", self._store)
        child._join(store, chosen.index(group.getRank()), [self._members[rank] for rank in chosen])
        if hasattr(child, "_set_device_and_options"):  # init() does it else
            child._set_device_and_options(self._device, options)
        return child

    # --- fault tolerance ---

    def supports_reconfigure(self) -> bool:
        """It does."""
        return True

    def get_init_handle(self) -> str:
        """What names this process in reconfigure(), on every rank."""
        return self._handle

    def reconfigure(self, options: Any) -> _All:
        """Makes it a communicator of the processes with these handles: a list gives the ranks their order, a set leaves
        it to us. The one before ends as by finalize(). uuid: a number that was not used before; the same on every
        member. Each is a generation as of an elastic job: who is lost is left out by the next call.

        Raises ValueError for handles without this process's, Timeout naming who is missing.
        """
        handles = options.init_handles
        ordered = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
        if self._handle not in ordered or len(set(ordered)) != len(ordered):
            raise ValueError(
                f"reconfigure: the {len(ordered)} handles must be different and hold this process's, {self._handle!r}"
            )
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()
        self._timeout = getattr(options, "timeout", None) or self._timeout
        store = dist.PrefixStore(f"torchcomms/{self._name}/reconfigure/{options.uuid}", self._store)
        self._join(store, ordered.index(self._handle), [int(handle.split(":")[1]) for handle in ordered])
        return _All(())

    # --- operations: torch.distributed's of the same name, see HorocloneGroup ---

    def _open(self) -> HorocloneGroup:
        if self._group is None:
            raise Unsupported(
                f"the communicator {self._name!r} is not initialised, or has ended; call new_comm() or reconfigure()"
            )
        return self._group

    def _end(self, work: Any, async_op: bool) -> Any:
        if work is None or async_op:
            return work
        work.wait()
        return None

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool) -> Any:
        """Sends to a rank."""
        return self._end(self._open().send([tensor], dst), async_op)

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool) -> Any:
        """Overwrites the tensor with what that rank sends."""
        return self._end(self._open().recv([tensor], src), async_op)

    def batch_op_issue(self, ops: Sequence[Any], async_op: bool) -> Any:
        """Starts all messages of a batch, in any order of sends and receives."""
        calls = {"SEND": self._open().send, "RECV": self._open().recv}
        return self._end(_All([calls[op.type.name]([op.tensor], op.peer) for op in ops]), async_op)

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
        """Overwrites the tensor with the root's."""
        options = _options(dist.BroadcastOptions, async_op, rootRank=root)
        return self._end(self._open().broadcast([tensor], options), async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Any:
        """Reduces in place."""
        options = _options(dist.AllreduceOptions, async_op, reduceOp=_reduction(op))
        return self._end(self._open().allreduce([tensor], options), async_op)

    def reduce(self, tensor: torch.Tensor, root: int, op: Any, async_op: bool) -> Any:
        """Reduces into the root's tensor."""
        options = _options(dist.ReduceOptions, async_op, rootRank=root, reduceOp=_reduction(op))
        return self._end(self._open().reduce([tensor], options), async_op)

    def all_gather(self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Any:
        """Sets tensor_list[r] to rank r's tensor; sizes may differ."""
        options = _options(AllgatherOptions, async_op)
        return self._end(self._open().allgather([list(tensor_list)], [tensor], options), async_op)

    all_gather_v = all_gather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:
        """Output gets everybody's input, one behind the other."""
        options = _options(AllgatherOptions, async_op)
        return self._end(self._open()._allgather_base(output, input, options), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: Sequence[torch.Tensor], op: Any, async_op: bool
    ) -> Any:
        """Output gets the reduced input_list[this rank]; sizes may differ."""
        options = _options(dist.ReduceScatterOptions, async_op, reduceOp=_reduction(op))
        return self._end(self._open().reduce_scatter([output], [list(input_list)], options), async_op)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: Any, async_op: bool
    ) -> Any:
        """Output gets this rank's part of the reduced input."""
        options = _options(dist.ReduceScatterOptions, async_op, reduceOp=_reduction(op))
        return self._end(self._open()._reduce_scatter_base(output, input, options), async_op)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:
        """Exchanges equal parts."""
        return self.all_to_all_v_single(output.view(-1), input.view(-1), [], [], async_op)

    def all_to_all_v_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int], async_op: bool,
    ) -> Any:  # fmt: skip
        """Exchanges parts of so many rows."""
        options = _options(dist.AllToAllOptions, async_op)
        splits = list(output_split_sizes), list(input_split_sizes)
        return self._end(self._open().alltoall_base(output, input, *splits, options), async_op)

    def all_to_all(
        self, output_tensor_list: Sequence[torch.Tensor], input_tensor_list: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Any:  # fmt: skip
        """Sets output_tensor_list[r] to what rank r has for this rank."""
        options = _options(dist.AllToAllOptions, async_op)
        lists = list(output_tensor_list), list(input_tensor_list)
        return self._end(self._open().alltoall(*lists, options), async_op)

    def barrier(self, async_op: bool) -> Any:
        """Complete when every rank has called it."""
        return self._end(self._open().barrier(_options(dist.BarrierOptions, async_op)), async_op)

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor_list: Sequence[torch.Tensor],
        root: int,
        async_op: bool,
    ) -> Any:
        """Gives each rank its entry of the root's list."""
        options = _options(dist.ScatterOptions, async_op, rootRank=root)
        inputs = [list(input_tensor_list)] if self.get_rank() == root else []
        return self._end(self._open().scatter([output_tensor], inputs, options), async_op)

    def gather(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor: torch.Tensor,
        root: int,
        async_op: bool,
    ) -> Any:
        """Fills the root's list with everybody's tensor."""
        options = _options(dist.GatherOptions, async_op, rootRank=root)
        outputs = [list(output_tensor_list)] if self.get_rank() == root else []
        return self._end(self._open().gather(outputs, [input_tensor], options), async_op)


def _place() -> tuple[int, int]:
    """(rank, size) of this process in its job."""
    for rank, size in _RANKS:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    lifecycle.init()
    native = current.native()
    return native.rank, native.size


register_backend(BACKEND, TorchCommHoroclone)
