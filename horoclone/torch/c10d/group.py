"""torch.distributed on horoclone: `init_process_group("horoclone")`, after `import horoclone.torch` (registration.py).

Each process group has a runtime of its own (rendezvous.py), whose world is the group: groups never wait for each
other, nor for hvd's operations. Works and futures are in work.py. Thread: the caller's submits.
"""

# mypy: disable-error-code="misc, no-untyped-call, override, assignment"
from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from horoclone import ops
from horoclone.errors import HorovodInternalError, PeerLost
from horoclone.torch.c10d.group_properties import GroupProperties
from horoclone.torch.c10d.lost import in_words_of_the_job, look_for
from horoclone.torch.c10d.monitored import monitored_barrier
from horoclone.torch.c10d.plain_calls import PlainCalls
from horoclone.torch.c10d.rendezvous import connect, of_this_life, start_limit_s
from horoclone.torch.c10d.sparse import sparse_among, start_sparse_sum
from horoclone.torch.c10d.tensors import (
    as_bytes,
    as_row,
    as_rows,
    check_dtypes,
    check_exchanged,
    check_filled,
    copy_apart,
    elements_of_parts,
    listed,
    number_at,
    ops_name,
    put_back,
    reducible,
    reduction,
    room_for,
    there,
    whole,
)
from horoclone.torch.c10d.work import Finish, Finished, InFlight, PlainWork, Together, Work
from horoclone.torch.operations import requests
from horoclone.torch.operations.gpu import HOST, Place, arrived, place_of, place_of_all, rows_of
from horoclone.torch.operations.tensors import NUMBER_OF, never_compiled, share_memory

if TYPE_CHECKING:
    from horoclone._core import Runtime

DEFAULT_TIMEOUT_S = 1800.0  # torch's: nobody asked for it, so a rank that is alive and late is waited for
EXIT_S = 5.0

Tensors = Sequence[torch.Tensor]

open_groups: weakref.WeakSet[HorocloneGroup] = weakref.WeakSet()


@never_compiled
class HorocloneGroup(GroupProperties):
    """A process group of torch.distributed. Ranks in its arguments are ranks of the group.

    Tensors are in host memory or on a GPU (gpu.py); what has gaps or another order of its dimensions is copied.
    Reductions take the dtypes of hvd.allreduce; operations
    that only move data take every dtype. Errors come from wait(): Mismatch, PeerLost, Aborted, Timeout; ValueError and
    Unsupported at once.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, members: Sequence[int] = ()
    ) -> None:
        """members: the ranks of the job that it consists of; empty: all."""
        super().__init__(rank, size)
        self._members = list(members) or list(range(size))
        seconds = timeout.total_seconds()
        self._limit_s = None if seconds == DEFAULT_TIMEOUT_S or seconds <= 0 else seconds
        look = look_for(self._members, open_groups)
        # The first group starts the job; members of later ones are known to live, and may come late.
        starts = not any(group._runtime is not None for group in open_groups)
        limit_s = start_limit_s(self._limit_s) if starts else self._limit_s or DEFAULT_TIMEOUT_S
        self._store = of_this_life(store, rank, size, limit_s, look)
        self._runtime: Runtime | None = connect(self._store, rank, size, limit_s, look)
        self._plain = PlainCalls(self._runtime, self._limit_s)
        self._flight = InFlight(self._runtime, rank, self._members, self._plain.end)
        self._monitored = 0  # monitored barriers so far
        # DDP.join() gives its work, of one number, to C++ alone, which asks for the future in the backward pass: what
        # is Python's of a work would have ended with the last reference of Python.
        self._of_one_number: deque[Work | None] = deque(maxlen=16)
        open_groups.add(self)

    # --- life ---

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of operations that start from now on."""
        self._limit_s = timeout.total_seconds() or None
        self._plain.set_limit(self._limit_s)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Finishes what every rank has started, and closes. Called by destroy_process_group and at exit."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        try:
            runtime.shutdown(EXIT_S)
        except HorovodInternalError:
            pass  # the works have the error
        self._flight.close()

    def abort(self) -> None:
        """Fails every pending operation on all ranks."""
        if self._runtime is not None:
            self._runtime.abort(f"rank {self._rank} of the process group called abort()")

    # --- submission ---

    def _native(self) -> Runtime:
        if self._runtime is None:
            raise HorovodInternalError(
                "this process group has been destroyed; call init_process_group again."
            )
        return self._runtime

    def _enqueue(self, build: Callable[..., int], op: int, **request: Any) -> int:
        """build: requests.submit or one like it."""
        try:
            return build(self._native(), op, **request)
        except PeerLost as error:
            raise in_words_of_the_job(error, self._members) from None

    def _submit(
        self, op: int, source: torch.Tensor | None, target: torch.Tensor | None, *, reduce: int = ops.Sum,
        prescale: float = 1.0, root: int = 0, splits: Sequence[int] | None = None, outputs: Tensors = (),
        kept: Any = None, finish: Finish | None = None, place: Place | None = None,
    ) -> Work:  # fmt: skip
        """source None: scatter, not on the root; place says where this rank takes its share. target None: the core owns
        the result, and `finish` copies it."""
        number = 0 if source is None else number_at(source)  # it refuses what has no address
        if place is None or source is not None:
            place = HOST if source is None else place_of(source)
        handle = self._enqueue(
            requests.submit, op, source=source, target=target, dtype=number, reduce=reduce, prescale=prescale,
            root=root, splits=splits, place=place,
        )  # fmt: skip
        return self._work(handle, outputs, (source, target, kept), finish, ops_name(op), place=place)

    def _work(
        self, handle: int, outputs: Tensors, kept: Any, finish: Finish | None, what: str, **more: Any
    ) -> Work:
        more |= {"what": what, "group": self._name, "limit_s": self._limit_s}
        return Work(self._flight, handle, outputs, kept, finish, **more)

    def _begin(
        self, opts: Any, op: int, source: Any, target: Any, *cuts: Any, reduces: bool = False, root: int = 0,
        outputs: Tensors | None = None, after: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        """Of a plain call (plain_calls.py) its work, None where torch waits and it has succeeded; NotImplemented of any
        other. Raises what the work would raise where torch waits. cuts: of an alltoall, how source and target are cut.
        outputs: what the work gives, unless the target; after: is called at the end."""
        if outputs is None:
            outputs = () if target is None else (target,)
        waits, begun = self._plain.begin(opts, op, source, target, *cuts, reduces=reduces, root=root)
        if begun is None:
            return NotImplemented
        if begun is True:
            if after is not None:
                after()
            return None if waits else Finished(outputs)
        finish = None
        if op in (ops.ALLGATHER, ops.GATHER) and target is not None:
            finish = lambda runtime, handle: check_filled(runtime.result(handle), source, target, outputs)  # noqa: E731
        elif op == ops.ALLTOALL:
            expected = elements_of_parts(target, cuts[1], self._size, "output", target.numel())
            finish = lambda runtime, handle: check_exchanged(runtime.result(handle), expected)  # noqa: E731
        work = PlainWork(
            self._flight, begun, outputs, (source, target), finish, what=ops_name(op), group=self._name,
            limit_s=self._limit_s, after=after,
        )  # fmt: skip
        if not waits:
            return work
        work.wait_no_longer()
        return None

    # --- reductions ---

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work | None:
        """Reduces one tensor, or several of one call, in place. One tensor may be sparse (sparse.py)."""
        if type(tensors) is list and len(tensors) == 1:
            tensor = tensors[0]
            work = self._begin(opts, ops.ALLREDUCE, tensor, tensor, reduces=True)
            if work is NotImplemented:
                work = self._allreduce(tensors, opts)
            if tensor.numel() == 1:
                self._of_one_number.append(work)
            return work  # type: ignore[no-any-return]
        return self._allreduce(tensors, opts)

    def _allreduce(self, tensors: Any, opts: Any) -> Work:
        tensors = listed(tensors)
        if (sparse := sparse_among(tensors)) is not None:
            submit_group = partial(self._enqueue, requests.submit_group)
            handle, kept, finish = start_sparse_sum(submit_group, self._size, sparse, opts)
            return self._work(handle, tensors, kept, finish, "sparse allreduce", place=place_of(sparse))
        _, reduce, factor = reduction(opts)
        data = [reducible(whole(t), reduce) for t in tensors]
        finish = put_back(tensors, data)
        if len(data) == 1:
            return self._submit(
                ops.ALLREDUCE, data[0], data[0], reduce=reduce, prescale=factor, outputs=tensors, kept=tensors,
                finish=finish,
            )  # fmt: skip
        numbers, place = [number_at(t) for t in data], place_of_all(data)
        handle = self._enqueue(
            requests.submit_group, ops.ALLREDUCE, sources=data, targets=data, dtypes=numbers, reduce=reduce,
            prescale=factor, place=place,
        )  # fmt: skip
        return self._work(handle, tensors, (tensors, data), finish, "allreduce_coalesced", place=place)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Work | None:
        """Reduces into the tensor of rank opts.rootRank; the others' tensors stay as they are."""
        (tensor,) = listed(tensors)
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts)
        if op is None and hasattr(opts, "reduceOp"):
            target = tensor if self._rank == root else None
            begun = self._begin(opts, ops.REDUCE, tensor, target, reduces=True, root=root, outputs=[tensor])
            if begun is not NotImplemented:
                return begun  # type: ignore[no-any-return]
        _, reduce, factor = reduction(op if op is not None else opts)
        data = reducible(whole(tensor), reduce)
        target = data if self._rank == root else None
        return self._submit(
            ops.REDUCE, data, target, reduce=reduce, prescale=factor, root=root, outputs=[tensor], kept=tensor,
            finish=put_back([tensor], [data]) if self._rank == root else None,
        )  # fmt: skip

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Work | None:
        """output gets this rank's chunk of the sum: source has size times its elements."""
        begun = self._begin(opts, ops.REDUCESCATTER, source, output, reduces=True)
        if begun is not NotImplemented:
            return begun  # type: ignore[no-any-return]
        if source.numel() != self._size * output.numel():
            raise ValueError(
                f"reduce_scatter: the input has {source.numel()} elements, not {self._size} times the output's "
                f"{output.numel()}"
            )
        return self._reduce_parts([there(output)], [there(source)], opts)

    reduce_scatter_single = _reduce_scatter_base

    def _reduce_parts(self, outputs: Tensors, sources: Tensors, opts: Any) -> Work:
        """Pairs (output, source of size chunks); several pairs are laid out so that one operation does them all."""
        _, reduce, factor = reduction(opts)
        for output, source in zip(outputs, sources, strict=True):
            check_dtypes("reduce_scatter", output, source)
            number_at(reducible(whole(output), reduce))
        rows = [whole(source).view(self._size, -1) for source in sources]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        if reduce not in (ops.Sum, ops.Average):
            reduced = flat.clone()
            work = self._allreduce([reduced], opts)
            inner = work._finish

            def cut(runtime: Runtime, handle: int) -> None:
                if inner is not None:
                    inner(runtime, handle)
                copy_apart(reduced[self._rank], outputs)

            work._outputs, work._finish = list(outputs), cut
            return work

        direct = (
            len(outputs) == 1
            and outputs[0].dtype is flat.dtype
            and whole(outputs[0]).data_ptr() == outputs[0].data_ptr()
            and not share_memory((flat, outputs[0]))
        )

        def finish(runtime: Runtime, handle: int) -> None:
            if not direct:
                copy_apart(rows_of(runtime, handle, 0, flat, place_of(flat)), outputs)

        return self._submit(
            ops.REDUCESCATTER, flat, outputs[0] if direct else None, reduce=reduce, prescale=factor, outputs=outputs,
            kept=sources, finish=finish,
        )  # fmt: skip

    def reduce_scatter(self, outputs: Any, sources: Any, opts: Any = None) -> Work | None:
        """Reduces and scatters. outputs: one tensor; sources: a list of one tensor per rank, each of the size of that
        rank's output."""
        (output,), parts = listed(outputs), sources[0] if isinstance(sources[0], (list, tuple)) else sources
        if all(part.numel() == output.numel() for part in parts):
            return self._reduce_scatter_base(output, torch.cat([part.reshape(-1) for part in parts]), opts)
        reduced = torch.cat([part.reshape(-1) for part in parts])
        start = sum(part.numel() for part in parts[: self._rank])
        work = self._allreduce([reduced], opts)
        inner = work._finish

        def cut(runtime: Runtime, handle: int) -> None:
            if inner is not None:
                inner(runtime, handle)
            output.detach().copy_(reduced[start : start + output.numel()].view(output.shape))

        work._outputs, work._finish = [output], cut
        return work

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, sources: Tensors, opts: Any = None
    ) -> Work | None:
        """Does several reduce_scatter_tensor as one operation."""
        if len(outputs) == len(sources) == 1:  # as functional collectives ask for one
            return self._reduce_scatter_base(outputs[0], sources[0], opts)
        if len({s.dtype for s in sources}) > 1:
            raise ValueError("coalesced reduce_scatter needs tensors of one dtype")
        return self._reduce_parts(outputs, sources, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- movement ---

    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None) -> Work | None:
        """Overwrites the tensor with that of rank opts.rootRank."""
        (tensor,) = listed(tensors)
        if root is None:
            root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        begun = self._begin(opts, ops.BROADCAST, tensor, tensor, root=root)
        if begun is not NotImplemented:
            return begun  # type: ignore[no-any-return]
        data = as_row(tensor)
        finish = put_back([tensor], [data])
        return self._submit(
            ops.BROADCAST, data, data, root=root, outputs=[tensor], kept=tensor, finish=finish
        )

    def allgather(self, outputs: Any, sources: Any, opts: Any = None) -> Work | None:
        """Gathers a tensor of every rank. outputs: a list of one tensor per rank, of that rank's size (sizes may
        differ)."""
        parts = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        (source,) = listed(sources)
        if len(parts) != self._size:
            raise ValueError(f"all_gather: {len(parts)} outputs for {self._size} ranks")
        begun = self._begin_gather(opts, ops.ALLGATHER, source, parts)
        if begun is not NotImplemented:
            return begun  # type: ignore[no-any-return]
        return self._gather_apart(as_row(source), list(parts), source)

    def _begin_gather(self, opts: Any, op: int, source: torch.Tensor, parts: Tensors, root: int = 0) -> Any:
        """_begin() where all parts have the source's size. No parts: this rank only gives."""
        n = source.numel()
        if not source.is_cpu or any(part.numel() != n for part in parts):
            return NotImplemented
        target, after = room_for(parts) if parts else (None, None)
        return self._begin(opts, op, source, target, root=root, outputs=parts, after=after)

    def _gather_apart(self, data: torch.Tensor, outputs: Tensors, kept: Any) -> Work:
        for output in outputs:
            as_row(output)

        def finish(runtime: Runtime, handle: int) -> None:
            copy_apart(rows_of(runtime, handle, 0, data, place_of(data)), outputs)

        return self._submit(ops.ALLGATHER, data, None, outputs=outputs, kept=kept, finish=finish)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work | None:
        """output gets everybody's source, one after the other; the core writes there."""
        begun = self._begin(opts, ops.ALLGATHER, source, output)
        if begun is not NotImplemented:
            return begun  # type: ignore[no-any-return]
        if output.numel() != self._size * source.numel():
            raise ValueError(
                f"all_gather_into_tensor: the output has {output.numel()} elements, not {self._size} times the input's "
                f"{source.numel()}"
            )
        check_dtypes("all_gather_into_tensor", output, source)
        data, target = as_row(source), as_row(output)
        back = put_back([output], [target])
        own = target.chunk(self._size)[self._rank] if target.numel() else target
        if share_memory((data, target)) and data.data_ptr() != own.data_ptr():
            return self._gather_apart(data, [output], source)

        def finish(runtime: Runtime, handle: int) -> None:
            check_filled(runtime.result(handle), data, target, [output])
            if back is not None:
                back(runtime, handle)

        return self._submit(ops.ALLGATHER, data, target, outputs=[output], kept=source, finish=finish)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(
        self, outputs: Tensors, sources: Tensors, opts: Any = None
    ) -> Work | None:
        """Does several all_gather_into_tensor as one operation."""
        if len(outputs) == len(sources) == 1:  # as functional collectives ask for one
            return self._allgather_base(outputs[0], sources[0], opts)
        parts = as_rows(sources)
        data = torch.cat(parts)

        def finish(runtime: Runtime, handle: int) -> None:
            rows = rows_of(runtime, handle, 0, data, place_of(data)).view(self._size, -1)
            pieces = rows.split([part.numel() for part in parts], 1)
            for output, piece in zip(outputs, pieces, strict=True):
                copy_apart(piece.contiguous(), [output])

        return self._submit(ops.ALLGATHER, data, None, outputs=outputs, finish=finish)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, sources: Tensors, opts: Any = None) -> Work:
        """Does several all_gather as one operation. output_lists: for each rank a list of one tensor per source."""
        if len(output_lists) != self._size:
            raise ValueError(
                f"all_gather_coalesced: {len(output_lists)} lists of outputs for {self._size} ranks"
            )
        outputs = [output for of_rank in output_lists for output in of_rank]
        return self._gather_apart(torch.cat(as_rows(sources)), outputs, sources)

    def gather(self, outputs: Any, sources: Any, opts: Any = None) -> Work | None:
        """Collects everybody's tensor on rank opts.rootRank in its list of outputs; sizes may differ."""
        (source,) = listed(sources)
        data, parts = as_row(source), []
        if self._rank == opts.rootRank:
            parts = list(outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs)
            if len(parts) != self._size:
                raise ValueError(f"gather: {len(parts)} outputs for {self._size} ranks")
            for part in parts:
                as_row(part)
        begun = self._begin_gather(opts, ops.GATHER, source, parts, opts.rootRank)
        if begun is not NotImplemented:
            return begun  # type: ignore[no-any-return]

        def finish(runtime: Runtime, handle: int) -> None:
            if parts:
                copy_apart(rows_of(runtime, handle, 0, data, place_of(data)), parts)

        return self._submit(
            ops.GATHER, data, None, root=opts.rootRank, outputs=parts, kept=source, finish=finish
        )

    def scatter(self, outputs: Any, sources: Any, opts: Any = None) -> Work:
        """Gives each rank its entry of the list that rank opts.rootRank has; sizes may differ."""
        (output,) = listed(outputs)
        data, splits, wanted = None, None, as_row(output).numel()
        if self._rank == opts.rootRank:
            parts = as_rows(sources[0] if isinstance(sources[0], (list, tuple)) else sources)
            if len(parts) != self._size or parts[self._rank].numel() != wanted:
                raise ValueError(
                    f"scatter: needs {self._size} tensors, that of rank {self._rank} with {output.numel()} elements"
                )
            data, splits = torch.cat(parts), [part.numel() for part in parts]

        def finish(runtime: Runtime, handle: int) -> None:
            copy_apart(arrived(runtime, handle), [output])

        return self._submit(
            ops.SCATTER, data, None, root=opts.rootRank, splits=splits, outputs=[output], finish=finish,
            place=place_of(output),
        )  # fmt: skip

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work | None:  # fmt: skip
        """Cuts source along its first dimension (input_splits rows for each rank, or equal parts)."""
        begun = self._begin(opts, ops.ALLTOALL, source, output, input_splits, output_splits)
        if begun is not NotImplemented:
            return begun  # type: ignore[no-any-return]
        data, target = as_row(source), as_row(output)
        given = elements_of_parts(source, input_splits, self._size, "input", data.numel())
        expected = elements_of_parts(output, output_splits, self._size, "output", target.numel())
        return self._exchange(data, given, [output], expected, source)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, sources: Tensors, opts: Any = None) -> Work | None:
        """Sets outputs[r] to what rank r has in sources[this rank]."""
        if len(outputs) != self._size or len(sources) != self._size:
            raise ValueError(f"all_to_all: needs {self._size} inputs and as many outputs")
        given, expected = [[part.numel() for part in as_rows(parts)] for parts in (sources, outputs)]
        data = torch.cat(as_rows(sources))
        if data.is_cpu:
            target, after = room_for(outputs)
            begun = self._begin(
                opts, ops.ALLTOALL, data, target, given, expected, outputs=outputs, after=after
            )
            if begun is not NotImplemented:
                return begun  # type: ignore[no-any-return]
        return self._exchange(data, given, outputs, expected)

    def _exchange(
        self, data: torch.Tensor, splits: Sequence[int], outputs: Tensors,
        expected: Sequence[int] | None = None, kept: Any = None,
    ) -> Work:  # fmt: skip
        for output in outputs:
            as_row(output)

        def finish(runtime: Runtime, handle: int) -> None:
            # It takes the result, but not the counts
            rows = rows_of(runtime, handle, 0, data, place_of(data))
            if expected is not None:
                check_exchanged(runtime.result(handle), expected)
            copy_apart(rows, outputs)

        return self._submit(
            ops.ALLTOALL, data, None, splits=list(splits), outputs=outputs, kept=kept, finish=finish
        )

    # --- barriers ---

    def barrier(self, opts: Any = None) -> Work | None:
        """Starts a barrier, complete when every rank has called it. Where torch waits for it, so are collectives that
        were started before, as with torch's own backends."""
        work = self._begin(opts, ops.BARRIER, None, None)
        if work is NotImplemented:
            work = self._work(self._enqueue(requests.submit, ops.BARRIER), [], None, None, "barrier")
            if not getattr(opts, "asyncOp", True):
                work.wait()
                work = None
        if work is None:
            self._flight.finish_collectives()
        return work  # type: ignore[no-any-return]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits at a barrier whose rank 0 names the ranks that did not come in time (the first one, or all with
        wait_all_ranks).

        torch.distributed.monitored_barrier itself takes gloo only: call it on the group. Raises Timeout, with gloo's
        words, on every rank that has come. timeout None: the group's; 0: rank 0 does not wait, so it raises.
        """
        self._monitored += 1
        limit_s = (self._limit_s or DEFAULT_TIMEOUT_S) if timeout is None else timeout.total_seconds()
        prefix = f"monitored/{self._monitored}"
        look = look_for(self._members, [self])
        monitored_barrier(self._store, prefix, self._rank, self._size, limit_s, wait_all_ranks, look)

    # --- point to point ---

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Work:
        """Sends a tensor; complete when the receiver has taken it. Its tensor must have as many elements, of the same
        dtype."""
        return self._message(ops.SEND, tensors, destination, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        """Overwrites the tensor with what that rank sends with this tag."""
        return self._message(ops.RECEIVE, tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Overwrites the tensor with what comes first; the work's source_rank() says from whom."""
        return self._message(ops.RECEIVE, tensors, -1, tag)

    def _message(self, op: int, tensors: Any, peer: int, tag: int) -> Work:
        (tensor,) = listed(tensors)
        sends = op == ops.SEND
        what = f"{'send to' if sends else 'recv from'} {'any rank' if peer < 0 else f'rank {peer}'}"
        begun = self._plain.begin_message(op, tensor if sends else None, None if sends else tensor, peer, tag)
        if begun is not None:
            return PlainWork(
                self._flight, begun, (tensor,), tensor, None, what=what, group=self._name, limit_s=self._limit_s,
                is_ordered=False, source=peer,
            )  # fmt: skip
        data = whole(tensor) if tensor.dtype in NUMBER_OF else as_bytes(tensor)
        number, place = number_at(data), place_of(data)
        back = None if sends else put_back([tensor], [data])
        handle = self._enqueue(
            requests.submit, op, source=data if sends else None, target=None if sends else data, dtype=number,
            root=peer, tag=tag, place=place,
        )  # fmt: skip

        def finish(runtime: Runtime, handle: int) -> None:
            if peer < 0:
                work._source = runtime.result(handle).source
            if back is not None:
                back(runtime, handle)

        work = self._work(
            handle,
            [tensor],
            (tensor, data),
            finish if peer < 0 or back is not None else None,
            what,
            is_ordered=False,
            source=peer,
            place=place,
        )
        return work

    # --- coalescing: operations between the two calls are works of their own ---

    def _start_coalescing(self, device: Any) -> None:
        self._flight.coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        """The only work that torch keeps of them: it drops theirs."""
        works, self._flight.coalesced = self._flight.coalesced or [], None
        return Together(works)
