"""One c10d operation in flight: wait(), futures and errors of the process group in group.py.

wait() makes progress on the caller's thread. Only where torch asks for a future (DDP does) or sets a deadline, the
threads `hc-c10d` of the group wait instead, in the order of submission. On a GPU an operation is complete when it has
been enqueued: results arrive on a stream of the group, and wait() makes the caller's current stream wait for it.
"""

# mypy: disable-error-code="misc, no-untyped-call, override, assignment"
from __future__ import annotations

import contextlib
import copy
import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from horoclone.errors import HorovodInternalError, Timeout
from horoclone.runtime.native_module import bytes_of
from horoclone.torch.c10d.lost import in_words_of_the_job, who_is_late
from horoclone.torch.operations import spans
from horoclone.torch.operations.gpu import (
    HOST,
    Place,
    devices_of,
    in_use_by,
    mark,
    on_stream,
    side_stream,
    stream_behind,
)
from horoclone.torch.operations.tensors import never_compiled

if TYPE_CHECKING:
    from horoclone._core import Runtime

Finish = Callable[["Runtime", int], None]  # puts the core's result where the caller wants it

SWEEP_AT = (
    64  # works in flight from which a new one first looks for those that ended and that nobody waited for
)
CLOSE_S = 5.0  # how long the end of a group waits for our threads, which may be in callbacks of the user's
# Callbacks of this module start no operation, so those of its hooks run beside the backward pass.
ONLY_CASTS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
GRACE_S = 2.0  # for rank 0 to say who is late; its time limit may have begun later


class InFlight:
    """The works of one group, alive until the core is done with their tensors; the thread that completes futures."""

    def __init__(
        self,
        runtime: Runtime,
        rank: int,
        members: Sequence[int],
        end_plain: Callable[[int], bool] | None = None,
    ) -> None:
        """end_plain: waits for a plain operation and releases it (FastPath.end_collective)."""
        self.runtime = runtime
        self.end_plain = end_plain
        self.rank = rank
        self.members = members  # the group's ranks, as ranks of the job
        self._works: dict[int, Work] = {}
        self._sweep_at = SWEEP_AT
        self.coalesced: list[Work] | None = None  # begun since _start_coalescing
        self._threads: list[threading.Thread] = []  # all that may be completing one
        turn = threading.Lock()  # guards what follows
        self._turn, self._clock = threading.Condition(turn), threading.Condition(turn)
        self._pending: deque[Work] = deque()  # ordered works that a thread is to complete
        self._taken = False  # whether a thread waits for the core now
        self._idle = 0  # threads that wait for their turn
        self._closed = False
        # a heap: deadlines of works whose futures were asked for, a number that tells equal ones apart, the works
        self._limited: list[tuple[float, int, Work]] = []
        self._limits = itertools.count()
        self._has_clock = False
        self._lock = threading.Lock()
        self._stream: Any = None  # of the GPU that the group works on

    def stream_for(self, place: Place) -> Any:
        """The group's stream there, on which results are moved; None for host memory."""
        if place[0] < 0:
            return None
        with self._lock:
            if self._stream is None:
                self._stream = side_stream(place)
            return self._stream

    def add(self, work: Work) -> None:
        if len(self._works) >= self._sweep_at:
            for other in list(self._works.values()):
                if self.runtime.poll(other.handle):
                    other.complete()
            self._sweep_at = max(SWEEP_AT, 2 * len(self._works))
        self._works[work.handle] = work
        if self.coalesced is not None:
            self.coalesced.append(work)

    def remove(self, work: Work) -> None:
        self._works.pop(work.handle, None)

    def finish_collectives(self) -> None:
        """After a barrier, before which every rank has started the same ones: nobody may have waited for them."""
        for work in list(self._works.values()):
            if work.is_ordered:
                with contextlib.suppress(Exception):  # it stays the work's
                    work.wait()

    def watch(self, work: Work) -> None:
        """Has `work` completed by a thread. Collectives of a group start in one order on all ranks, so that waiting for
        them in that order is never in vain; point-to-point operations get threads of their own."""
        if not work.is_ordered:
            self._start(work.complete, "hc-c10d-p2p")
            return
        with self._turn:
            self._pending.append(work)
            self._call_next()

    def _start(self, body: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=body, name=name, daemon=True)
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _call_next(self) -> None:
        """Called with _turn held: a thread waits for the core on behalf of the pending works."""
        if self._taken or not self._pending:
            return
        if self._idle:
            self._turn.notify()
        else:
            self._start(self._complete_in_turn, "hc-c10d")
            self._taken = True

    def _complete_in_turn(self) -> None:
        """One thread at a time waits for the core. It hands that on before it settles a future, whose callbacks may
        wait for operations behind this one, or for new ones, as torch's PowerSGD does."""
        with self._turn:
            work: Work | None = self._pending.popleft()  # whoever started this thread gave it the turn
        while work is not None:
            try:
                settle = work.take()
            finally:
                with self._turn:
                    self._taken = False
                    self._call_next()
            settle()
            work = self._next()

    def _next(self) -> Work | None:
        """What the calling thread is to complete; None: it is not needed any more."""
        with self._turn:
            if self._idle and not self._pending:
                return None  # one in reserve is enough
            self._idle += 1
            self._turn.wait_for(lambda: self._closed or (bool(self._pending) and not self._taken))
            self._idle -= 1
            if self._taken or not self._pending:
                return None
            self._taken = True
            return self._pending.popleft()

    def limit(self, work: Work, limit_s: float) -> None:
        """Has `work` expire in time. Nobody calls wait() on it, and a future knows no limit."""
        with self._turn:
            self._drop_done()
            heapq.heappush(self._limited, (time.monotonic() + limit_s, next(self._limits), work))
            if not self._has_clock:
                self._start(self._expire_in_time, "hc-c10d-limit")
                self._has_clock = True
            elif self._limited[0][2] is work:
                self._clock.notify()

    def _drop_done(self) -> None:
        while self._limited and self._limited[0][2].is_done():
            heapq.heappop(self._limited)

    def _expire_in_time(self) -> None:
        while True:
            with self._turn:
                self._drop_done()
                if self._closed:
                    return
                left_s = self._limited[0][0] - time.monotonic() if self._limited else None
                if left_s is None or left_s > 0:
                    self._clock.wait(left_s)
                    continue
                work = heapq.heappop(self._limited)[2]
            work.expire()

    def close(self) -> None:
        """After the runtime was shut down: every work that is left gets its error, and our threads end.

        torch settles a future without the GIL; a thread that wants the lock back when the interpreter is ending
        would end the process with SIGABRT.
        """
        for work in list(self._works.values()):
            work.complete()
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            self._clock.notify()
        deadline = time.monotonic() + CLOSE_S
        for thread in list(self._threads):
            if thread is not threading.current_thread():  # a callback of a future may destroy the group
                thread.join(max(0.0, deadline - time.monotonic()))


class _Failed(list[torch.Tensor]):
    """The value of a future of an operation that has failed. To C++ what Python sets is a value, whatever it is; DDP
    looks for the tensors in it by way of pickle, which raises the error.

    Only copies are raised: what C++ holds is never collected, nor what a traceback in it refers to.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = _copied(error)

    def fail(self) -> NoReturn:
        raise _copied(self._error)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.fail()


def _copied(error: BaseException) -> BaseException:
    try:
        return copy.copy(error)
    except Exception:  # a class of its own
        return HorovodInternalError(f"{type(error).__name__}: {error}")


@never_compiled
class Future(torch.futures.Future[list[torch.Tensor]]):
    """Of a work's outputs, or its error.

    What then() calls during a backward pass may start collectives, as the hooks of torch's PowerSGD do, and every rank
    must start them in the same order. So it is called at once, when the operation has been waited for, as with NCCL:
    called whenever the operation ends, it would start them before what DDP starts meanwhile on one rank, and behind it
    on another. Plain DDP sets no callback, so that its backward pass does not wait.
    """

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(devices=devices_of(place))
        self._work = weakref.ref(work)  # which has this future

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        """A future of what `callback` returns."""
        work = self._work()
        if (
            work is not None
            and work.is_ordered
            and getattr(callback, "__module__", "") != ONLY_CASTS
            and torch._C._current_graph_task_id() != -1
        ):
            work.wait_for_the_end()
        return super().then(callback)

    def settle(self, outputs: list[torch.Tensor], error: BaseException | None) -> None:
        """Calls the callbacks."""
        if error is None:
            self.set_result(outputs)
        else:
            self._set_unwrap_func(_Failed.fail)
            self.set_result(_Failed(error))


registered_builtin_hooks: set[dist.BuiltinCommHookType] = set()  # with DDP: those that need another future


@never_compiled
class Work(dist.Work):
    """What torch.distributed returns for async_op=True. Thread: any."""

    _behind: Any = None  # on a GPU: where the group's stream has the result
    _error: BaseException | None = None
    _future: Future | None = None
    _promise: Future | None = None  # the same, until it is settled
    _done = _watched = False
    is_ordered = True  # among the collectives of its group
    # Set when done; made for the first who waits for another thread.
    _wakeup: threading.Event | None = None

    def __init__(
        self,
        flight: InFlight,
        handle: int,
        outputs: Sequence[torch.Tensor],
        kept: Any,
        finish: Finish | None,
        *,
        what: str,
        group: str,
        limit_s: float | None,
        is_ordered: bool = True,
        source: int = -1,
        place: Place = HOST,
    ) -> None:
        dist.Work.__init__(self)
        self.handle = handle
        self.is_ordered = is_ordered
        self._flight = flight
        self._outputs = list(outputs)
        self._kept = kept  # the core reads or writes them until it is done
        self._finish = finish
        self._what, self._group = what, group
        self._limit_s = limit_s
        self._source = source
        self._place = place
        self._taking = threading.Lock()  # held by who waits for the core
        self._lock = threading.Lock()  # guards _future, _promise, _watched and _wakeup
        flight.add(self)

    def __del__(self) -> None:
        kept = getattr(self, "_kept", None)  # not so where __init__ has failed
        if kept is not None and self._place[0] >= 0:  # nobody has called wait()
            in_use_by(self._flight.stream_for(self._place), [kept, self._outputs])

    # --- what torch calls ---

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns True when the outputs are there. Raises the operation's error; Timeout after `timeout`, if given."""
        if not self._done:
            limit_s = timeout.total_seconds()
            if limit_s > 0 or self._limit_s is not None or self._watched:
                self._wait_within(limit_s if limit_s > 0 else self._limit_s, limit_s <= 0)
            else:
                self.complete()
        if self._future is not None:
            self._settle_now(self._future)
        if self._error is not None:
            raise self._error
        stream_behind(self._behind)
        self._kept = None  # what the caller's stream is given from now on may overwrite it
        return True

    def is_completed(self) -> bool:
        """Whether wait() would return or raise at once."""
        if not self._done and not self._watched and self._flight.runtime.poll(self.handle):
            self.complete()
        return self._done

    def is_done(self) -> bool:
        """Whether it is complete, without looking."""
        return self._done

    def is_success(self) -> bool:
        """True when it is complete and without error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error that wait() raises, None while there is none."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The outputs; waits for them."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Whom a recv() received from, as a rank of the group."""
        return self._source

    _source_rank = source_rank  # torch.distributed.recv asks by this name

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the list of outputs, or with the error."""
        if (
            self._place is HOST
            and self._outputs
            and registered_builtin_hooks
            and self._outputs[0].dtype is torch.float16
            and torch._C._current_graph_task_id() != -1
        ):
            # DDP's built-in hook FP16_COMPRESS takes only futures that C++ has made; what Python can get of those has a
            # result from the beginning.
            self.wait()
            return torch._C.fork(lambda: self._outputs)  # type: ignore[return-value]
        if not self._done and self._place is HOST and self._flight.runtime.advance(self.handle):
            self.complete()
        with self._lock:
            if self._future is None:
                self._future = self._promise = Future(self, self._place)
                if not self._done:
                    self._watch()
                    if self._limit_s is not None:
                        self._flight.limit(self, self._limit_s)
                    return self._future
        if self._done:
            self._settle()
        return self._future

    getFuture = get_future

    # --- completion ---

    def complete(self) -> None:
        """Waits for the core, keeps the error for wait(), settles the future. A signal's exception passes through."""
        self.take()()

    def take(self) -> Callable[[], None]:
        """complete() but for the future, which is settled by what is returned: its callbacks may take any time."""
        with self._taking:
            if not self._done:
                try:
                    self._take()
                except (HorovodInternalError, ValueError) as error:  # the core has let go of the tensors
                    self._error = in_words_of_the_job(error, self._flight.members)
                self._flight.remove(self)
                self._finish = None
                if self._place[0] < 0 or self._error is not None:
                    self._kept = None
                with self._lock:
                    self._done, wakeup = True, self._wakeup
                if wakeup is not None:
                    wakeup.set()
        return self._settle

    def _take(self) -> None:
        runtime, stream = self._flight.runtime, self._flight.stream_for(self._place)
        spans.wait(runtime, self.handle)
        try:
            with on_stream(stream):
                if stream is not None:
                    runtime.stream_wait(self.handle, stream.cuda_stream)
                if self._finish is not None:
                    self._finish(runtime, self.handle)
            self._behind = mark(stream)
        except Exception as error:  # of the copies: no memory, say. Whoever waits must hear of it
            self._error = error
        finally:
            runtime.release(self.handle)

    def _settle(self) -> None:
        """Once, and without the lock: callbacks may ask the work again."""
        with self._lock:
            promise, self._promise = self._promise, None
        if promise is None:
            return
        with on_stream(None if self._place is HOST else self._flight.stream_for(self._place)):
            promise.settle(self._outputs, self._error)

    def wait_for_the_end(self) -> None:
        """Until the future that was asked for has the outputs or the error. Its time limit is looked after already."""
        if not self._done:
            self._is_done_within(None)
        if self._future is not None:
            self._settle_now(self._future)

    def _settle_now(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        """As in torch's own backends, where a future is done when wait() returns."""
        self._settle()
        with contextlib.suppress(Exception):  # the operation's error
            future.wait()  # another thread is settling it

    def _is_done_within(self, limit_s: float | None) -> bool:
        """Waits for whoever completes it."""
        with self._lock:
            if self._done:
                return True
            if self._wakeup is None:
                self._wakeup = threading.Event()
        return self._wakeup.wait(limit_s)

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._flight.watch(self)

    def _wait_within(self, limit_s: float | None, give_up: bool) -> None:
        if not self._watched and limit_s is not None and self._place is HOST:
            if self._flight.runtime.is_done_within(self.handle, limit_s):
                return self.complete()
            limit_s, waited_s = 0.0, limit_s
        else:
            waited_s = limit_s or 0.0
        with self._lock:
            if not self._done:
                self._watch()
        if self._is_done_within(limit_s):
            return None
        raise (
            self._give_up(waited_s)
            if give_up
            else Timeout(f"{self._too_late(waited_s)}. It stays pending; wait() may be called again.")
        )

    def wait_no_longer(self) -> None:
        """wait() of what has failed, or whose time limit is over: raises its error."""
        if self._limit_s is not None and not self.is_completed():
            with self._lock:
                self._watch()
            raise self._give_up(self._limit_s)
        self.wait()

    def _named(self) -> str:
        return f"{self._what} in process group {self._group!r}"

    def _too_late(self, limit_s: float) -> str:
        late = who_is_late(self._flight.runtime, self._flight.rank, len(self._flight.members))
        text = f"{self._named()}: not complete after {limit_s:g} s, the time limit given to torch.distributed"
        return f"{text}: {late}" if late else text

    def expire(self) -> None:
        """The time limit of an operation whose future somebody waits for is over."""
        if not self._done:
            self._give_up(self._limit_s or 0.0)

    def _give_up(self, limit_s: float) -> Timeout:
        """Ends the group, so that no rank goes on with half of a result."""
        knows = self._flight.rank == 0 or len(self._flight.members) <= 2
        if not knows and self._is_done_within(min(limit_s, GRACE_S)):  # rank 0 came before us
            text = f"{self._named()}: not complete after {limit_s:g} s. {self._error}"
        else:
            text = f"{self._too_late(limit_s)}. The process group cannot be used any more."
            self._flight.runtime.abort(bytes_of(text))
            self._is_done_within(limit_s)
        error = Timeout(text)
        error.__cause__ = self._error
        return error


@never_compiled
class PlainWork(Work):
    """Of a plain operation, whose result lies where the caller wants it (plain_calls.py). `finish` is called only where
    the core owns the result, because the ranks' sizes differ, and raises; `after` where it has succeeded."""

    def __init__(self, *args: Any, after: Callable[[], None] | None = None, **kwargs: Any) -> None:
        self.after = after  # before other threads may complete this work
        super().__init__(*args, **kwargs)

    def _take(self) -> None:
        if not self._flight.end_plain(self.handle):  # type: ignore[misc]  # such works come from there
            return super()._take()
        try:
            if self.after is not None:
                self.after()
        except Exception as error:  # as above
            self._error = error
        return None


class Finished(Work):
    """A work that had nothing to do, has ended already, or failed before the core saw it."""

    def __init__(self, outputs: Sequence[torch.Tensor] = (), error: BaseException | None = None) -> None:
        dist.Work.__init__(self)
        self._outputs, self._error, self._source = list(outputs), error, -1
        self._place, self._kept = HOST, None
        self._lock = threading.Lock()
        self._done = True


class Together(Finished):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([output for work in works for output in work._outputs])
        self._works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns True when all outputs are there. Raises the first error, after all have ended."""
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:
                self._error = self._error or error
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether wait() would return or raise at once."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """True when all are complete and without error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the list of outputs, or with the error. Waits for them."""
        with contextlib.suppress(Exception):  # it is the future's
            self.wait()
        return super().get_future()
