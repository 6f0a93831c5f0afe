"""DistributedOptimizer(quorum=...): a round of averaging goes ahead when enough ranks have gradients, and nobody waits
for the late ones unless they are `max_lag` rounds behind.

Every rank has a thread, the agent, that takes part in every round with what its rank has contributed until then, which
may be nothing. The agent of rank 0 also decides when a round begins. All ranks apply the same results in one order, so
that parameters are equal at equal rounds. Threads: the trainer calls the optimizer; `_lock` guards what both use.
"""

from __future__ import annotations

import math
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from horoclone.errors import HorovodInternalError, Mismatch
from horoclone.ops import Sum
from horoclone.process_sets import global_process_set
from horoclone.runtime import logs, native
from horoclone.torch import operations
from horoclone.torch.operations import messages
from horoclone.torch.operations.tensors import uncompiled
from horoclone.torch.optimizer.agreement import agree_on_parameters
from horoclone.torch.optimizer.buckets import GradState
from horoclone.torch.optimizer.wrapping import WrappedOptimizer

ARRIVALS, BEGINNINGS = 0, 1  # messages of a rank to rank 0, and of rank 0 to a rank
FIRST_TAG = 0x71_0000  # of the first optimizer's; each has two
READY, LATE, ENDED = range(3)  # has contributed; has come without a contribution; has no more data
WORD: Any = {"dtype": torch.float32, "device": "cpu"}  # of the numbers that ranks add up
OVER = -1  # instead of a round's number
ONE_CHANGED = (
    "quorum=: rank {rank} has changed dtypes, that of {name!r} first, and some other rank has not, so that their steps "
    "would round in different ways. Change them on every rank after the same round, or make the optimizer anew after "
    "join()"
)
LATE_ROUNDS = 100  # so many rounds in a row without a contribution, and rank 0 warns of the rank
WAIT_S = 1.0  # between two looks at whether the agent lives

log = logs.logger()


def checked_quorum(quorum: float | str, size: int) -> int:
    """How many ranks begin a round. ValueError for what is neither a share nor "majority" or "solo"."""
    if quorum == "majority":
        count = size // 2 + 1
    elif quorum == "solo":
        count = 1
    elif not isinstance(quorum, str) and 0 < quorum <= 1:
        count = max(1, math.ceil(round(quorum * size, 6)))
    else:
        raise ValueError(
            f'quorum={quorum!r} must be a share of the ranks (0 < quorum <= 1), "majority" or "solo"'
        )
    if 3 * count < 2 * size:
        warnings.warn(
            f"quorum={quorum!r}: rounds of {count} of {size} ranks, less than two thirds, average few gradients and "
            "may not converge as averages of all do",
            stacklevel=5,  # the call of DistributedOptimizer
        )
    return count


class _Tally:
    """Rank 0's count of the ranks that have come, which decides when a round begins. Thread: the agent of rank 0."""

    def __init__(self, size: int, quorum: int, max_lag: int) -> None:
        self.size, self.quorum, self.max_lag = size, quorum, max_lag
        self.rounds = 0
        self.ended: set[int] = set()
        self.given = [0] * size  # contributions that a rank has told of,
        self.used = [0] * size  # and those that rounds have had; a round may have one before it is told of
        self.came = [0] * size  # the round in which a rank was last heard of
        self.contributed = [0] * size  # the last round that had something of it

    def note(self, rank: int, what: int) -> None:
        self.came[rank] = self.rounds
        if what == ENDED:
            self.ended.add(rank)
        elif what == READY:
            self.given[rank] += 1

    def is_over(self) -> bool:
        return len(self.ended) == self.size

    def may_begin(self) -> bool:
        live = [rank for rank in range(self.size) if rank not in self.ended]
        ready = [rank for rank in live if self.given[rank] > self.used[rank]]
        fresh = all(rank in ready or self.rounds - self.came[rank] < self.max_lag for rank in live)
        return bool(ready) and len(ready) >= min(self.quorum, len(live)) and fresh

    def finish(self, counts: list[float]) -> None:
        """counts: of contributions that the round has had, by rank."""
        self.rounds += 1
        for rank, count in enumerate(counts):
            self.used[rank] += int(count)
            if count or rank in self.ended:
                self.contributed[rank] = self.rounds
            elif (self.rounds - self.contributed[rank]) % LATE_ROUNDS == 0:
                log.warning("rank %d was too late in each of the last %d rounds (quorum=)", rank, LATE_ROUNDS)


# Of a round: the averages, and which parameters some rank trains.
Result = tuple[list[torch.Tensor], list[bool]]
_made: tuple[Any, int] = (None, 0)  # in which life of the runtime, and how many


def _number_in(life: Any) -> int:
    """Of a new optimizer. What ranks have sent to one that has failed must not be taken for another's."""
    global _made
    number = _made[1] if _made[0] is life else 0
    _made = (life, number + 1)
    return number


class _Agent:
    """One rank's side of all rounds."""

    def __init__(self, parameters: list[tuple[str, torch.Tensor]], quorum: int, max_lag: int) -> None:
        """parameters: with their names, in an order that is the same on all ranks."""
        size, self._rank = global_process_set.size() or 1, global_process_set.rank() or 0
        number = _number_in(native())
        self._name, self._tags = (
            f"quorum.{number}",
            [FIRST_TAG + 2 * number + kind for kind in (ARRIVALS, BEGINNINGS)],
        )
        self._size = size
        self._tally = _Tally(size, quorum, max_lag) if self._rank == 0 else None
        # Contributions have the dtypes and layouts of this moment, whatever the model becomes.
        like = [torch.empty_like(p, requires_grad=False) for _, p in parameters]
        self._states = [GradState(p, name) for name, p in parameters]
        self._new: Callable[[], list[torch.Tensor]] = lambda: [torch.zeros_like(t) for t in like]
        self._lock = threading.Condition()
        self._given, self._count = self._new(), 0  # what the next round takes from here
        self._dtypes = self._dtypes_at_first = [p.dtype for _, p in parameters]  # at the last contribution
        self._trains = torch.ones(len(parameters), **WORD)  # which of them, at the last contribution
        self._results: deque[Result] = deque()
        self.rounds = 0  # finished, of which the trainer may not have applied all
        self._error: BaseException | None = None
        self._is_over = False
        self._sent: deque[int] = deque()  # handles
        self._thread = threading.Thread(target=self._run, name="hc-quorum", daemon=True)
        self._thread.start()

    # --- the trainer's thread ---

    def give(self, gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
        with self._lock:
            self._dtypes = [p.dtype for p in parameters]
            self._trains = torch.tensor([float(p.requires_grad) for p in parameters], **WORD)
            for mine, more in zip(self._given, gradients, strict=True):
                mine.add_(more)
            self._count += 1

    def say(self, what: int) -> None:
        """To rank 0, in order."""
        while self._sent and operations.poll(self._sent[0]):
            operations.synchronize(self._sent.popleft())
        self._sent.append(
            messages.isend(torch.tensor([self._rank, what], device="cpu"), 0, self._tags[ARRIVALS])
        )

    def take(self, wanted: int) -> list[Result]:
        """The results that there are, once round `wanted` is finished or all is over."""
        with self._lock:
            while self.rounds < wanted and not self._is_over:
                if self._error is not None:
                    raise self._error
                self._lock.wait(WAIT_S)
            found = list(self._results)
            self._results.clear()
            return found

    @property
    def is_over(self) -> bool:
        return self._is_over and not self._results

    # --- the agent's thread ---

    def _run(self) -> None:
        try:
            agree_on_parameters(self._states, global_process_set, operation=self._name)
            while (number := self._next()) != OVER:
                self._round(number)
        except (HorovodInternalError, ValueError) as error:
            self._error = error
        with self._lock:
            self._is_over = self._error is None
            self._lock.notify_all()

    def _next(self) -> int:
        if self._tally is None:
            return int(messages.recv(src=0, tag=self._tags[BEGINNINGS])[0])
        while not (self._tally.is_over() or self._tally.may_begin()):
            rank, what = messages.recv(tag=self._tags[ARRIVALS]).tolist()
            self._tally.note(rank, what)
        number = OVER if self._tally.is_over() else self._tally.rounds
        word = torch.tensor([number], device="cpu")
        for handle in [messages.isend(word, rank, self._tags[BEGINNINGS]) for rank in range(1, self._size)]:
            operations.synchronize(handle)
        return number

    def _round(self, number: int) -> None:
        with self._lock:
            given, said = self._given, torch.zeros(3, self._size, **WORD)
            said[:, self._rank] = torch.tensor([self._count, *self._change()], **WORD)
            trains = self._trains.clone()
            self._given, self._count = self._new(), 0
        handles = [
            operations.allreduce_async_(tensor, None, f"{self._name}.{i}", Sum)
            for i, tensor in enumerate((*given, said, trains))
        ]
        for handle in handles:
            operations.synchronize(handle)
        counts, dtypes, changed = said
        if len(dtypes.unique()) > 1:
            rank, at = int(changed.argmax()), int(changed.max()) - 1
            raise Mismatch(ONE_CHANGED.format(rank=rank, name=self._states[at].name))
        for tensor in given:
            tensor.div_(max(counts.sum().item(), 1.0))
        if self._tally is not None:
            self._tally.finish(counts.tolist())
        with self._lock:
            self._results.append((given, (trains > 0).tolist()))
            self.rounds = number + 1
            self._lock.notify_all()

    def _change(self) -> tuple[int, int]:
        """What its parameters' dtypes have become, as a number that float32 holds, and which is the first that is
        another one; 0 and 0 where none is."""
        pairs = zip(self._dtypes, self._dtypes_at_first, strict=True)
        first = next((i + 1 for i, (dtype, before) in enumerate(pairs) if dtype is not before), 0)
        return (zlib.crc32(repr(self._dtypes).encode()) % (1 << 24) if first else 0), first


class QuorumMixin(WrappedOptimizer):
    """See DistributedOptimizer."""

    _own_attributes = frozenset({"_agent", "_applied", "_late", "_trained", "_shapes"})
    _agent: _Agent
    _applied: int
    _late: str
    _trained: list[tuple[str, torch.Tensor]]  # by name; fixed when rounds begin
    _shapes: list[torch.Size]

    def _begin(self, quorum: float | str, late: str, max_lag: int) -> Any:
        if late not in ("drop", "carry"):
            raise ValueError(f'late={late!r} must be "drop" or "carry"')
        if max_lag < 1:
            raise ValueError(f"max_lag={max_lag} must be at least 1")
        count = checked_quorum(quorum, global_process_set.size() or 1)
        self._late, self._applied = late, 0
        trained = [p for p in self._parameters() if p.requires_grad]
        self._trained = sorted(((self._name_of(p), p) for p in trained), key=lambda named: named[0])
        self._shapes = [p.shape for _, p in self._trained]
        self._turn.withdraw()  # its names are its own
        self._agent = _Agent(self._trained, count, max_lag)
        return self

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.__dict__["param_groups"] for p in group["params"]]

    def _check_parameters(self) -> None:
        """ValueError for what has become of them since the beginning and no round can carry."""
        known = {p for _, p in self._trained}
        for parameter in self._parameters():
            if parameter.requires_grad and parameter not in known:
                raise ValueError(
                    f"quorum=: {self._name_of(parameter)!r} was not trained when the optimizer was made, so that no "
                    "round has its gradient. Make the optimizer anew, on every rank, after join()"
                )
        for (name, parameter), shape in zip(self._trained, self._shapes, strict=True):
            if parameter.shape != shape:
                raise ValueError(
                    f"quorum=: {name!r} has the shape {list(parameter.shape)}, and had {list(shape)} when the "
                    "optimizer was made. Make the optimizer anew, on every rank, after join()"
                )

    @property
    def rounds(self) -> int:
        """How many rounds this rank's parameters have in them: at equal rounds they are equal on all ranks."""
        return self._applied

    @uncompiled
    def step(self, closure: Any = None) -> Any:
        """Contributes the gradients, then applies every round that this rank has not applied yet.

        A rank that is not late waits for the round that it contributes to. Hooks of the step run for each round, with
        the averaged gradients: clip there.
        """
        if closure is not None:
            raise ValueError("quorum= and step(closure) do not go together: call step() after backward()")
        self._check_parameters()
        agent = self._agent
        late = agent.rounds > self._applied
        if late and self._late == "drop":
            agent.say(LATE)
            self._apply(agent.take(self._applied))
            return None
        agent.give([self._gradient_of(name, p) for name, p in self._trained], [p for _, p in self._trained])
        agent.say(READY)
        self._apply(agent.take(agent.rounds if late else self._applied + 1))
        return None

    step.hooked = True  # type: ignore[attr-defined]

    def join(self) -> None:
        """This rank has no more data: rounds of the others go on, and are applied here, until all have called it."""
        self._agent.say(ENDED)
        while not self._agent.is_over:
            self._apply(self._agent.take(self._applied + 1))

    def _gradient_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise ValueError(
                f"quorum= and sparse gradients do not go together, and that of {name!r} is one: use dense embeddings"
            )
        return parameter.grad.detach()

    def _apply(self, results: list[Result]) -> None:
        """A parameter that is frozen on some ranks only is updated on all, as long as one trains it."""
        for averages, trains in results:
            for (_, parameter), average, is_trained in zip(self._trained, averages, trains, strict=True):
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                parameter.grad = average.to(parameter.device, dtype) if is_trained else None
            self._applied += 1
            super().step()  # type: ignore[misc]


def refuse_beside_quorum(others: dict[str, Any]) -> None:
    """ValueError for the first of the other arguments that is set."""
    for name, is_set in others.items():
        if is_set:
            raise ValueError(
                f"quorum= and {name} do not go together in DistributedOptimizer: leave one of them out"
            )
