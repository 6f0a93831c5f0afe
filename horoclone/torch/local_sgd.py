"""Training that communicates rarely: LocalSGD averages parameters, DiLoCo gives their movement to an outer optimizer.

Names and arguments are torchft's, so that scripts can move over; there is no manager, and in an elastic job each
generation begins a new period. Transfers are ordinary operations of low priority, which the core moves while the next
steps compute. Thread: the one that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from horoclone.ops import Average
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import native
from horoclone.torch import operations
from horoclone.torch.compression import Compression, checked_compression
from horoclone.torch.compressor import GradientCompressor
from horoclone.torch.optimizer.gradient_bucket import OptimizerBucket
from horoclone.torch.optimizer.wrapping import WrappedOptimizer

BEHIND_GRADIENTS = -1  # priority: what steps wait for goes first


class _Sum:
    """Tensors of one dtype that are averaged together, in memory of their own."""

    def __init__(
        self, like: Sequence[torch.Tensor], name: str, compression: Any, members: ProcessSet
    ) -> None:
        self.name, self._compression, self._set = name, compression, members
        self.flat = torch.zeros(sum(t.numel() for t in like), dtype=like[0].dtype, device=like[0].device)
        parts = self.flat.split([t.numel() for t in like])
        self.views = [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
        named = {f"{name}.{i}": view for i, view in enumerate(self.views)}
        self._bucket = OptimizerBucket(self.flat, named, 0, name, Average, members)
        self._work: Iterator[None] | None = None

    @property
    def kept(self) -> dict[Any, Any]:
        """What a compressor remembers from one reduction to the next."""
        return self._bucket.state

    def start(self) -> None:
        self._work = self._reduce()
        next(self._work)

    def finish(self) -> None:
        """Waits; the views then have the averages."""
        work, self._work = self._work, None
        for _ in work or ():
            pass

    def forget(self) -> None:
        """What was sent has failed with its ranks."""
        self._work = None

    def _reduce(self) -> Iterator[None]:
        """Starts the reduction, yields once, and ends it."""
        if isinstance(self._compression, GradientCompressor):
            stages = self._compression.reduce(self._bucket)
            try:
                handle = next(stages)
                yield
                while True:
                    handle = stages.send(None if handle is None else operations.synchronize(handle))
            except StopIteration:
                return
        wire, context = self._compression.compress(self.flat)
        handle = operations.allreduce_async_(
            wire, None, self.name, Average, 1.0, 1.0, self._set, priority=BEHIND_GRADIENTS
        )
        yield
        reduced = self._compression.decompress(operations.synchronize(handle), context)
        if reduced is not self.flat:
            self.flat.copy_(reduced)


def _sums_of(
    parameters: Sequence[torch.Tensor], name: str, compression: Any, members: ProcessSet
) -> list[_Sum]:
    """One for each dtype, with the views in the order of `parameters` within it."""
    dtypes = list(dict.fromkeys(p.dtype for p in parameters))
    return [
        _Sum([p.detach() for p in parameters if p.dtype is dtype], f"{name}.{i}", compression, members)
        for i, dtype in enumerate(dtypes)
    ]


def _ordered(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those that are trained, dtype by dtype: as the views of _sums_of follow each other."""
    trained = [p for p in parameters if p.requires_grad]
    dtypes = list(dict.fromkeys(p.dtype for p in trained))
    return [p for dtype in dtypes for p in trained if p.dtype is dtype]


class _Periodic:
    """What both have in common: they count the steps of an optimizer and begin with the parameters of the set's first
    rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, sync_every: int, members: ProcessSet) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every} must be at least 1")
        self._optimizer, self._set, self._steps = optimizer, members, 0
        self._hook: Any = None
        self._begun_in: Any = (
            None  # the life of the runtime in which the ranks have the same parameters to start from
        )
        self._refuse_averaged_gradients(type(self).__name__)

    def _refuse_averaged_gradients(self, who: str) -> None:
        if not isinstance(self._optimizer, WrappedOptimizer):
            return
        if getattr(self._optimizer, "_barrier", None) is not None:
            raise ValueError(
                f"{who} and DistributedOptimizer(cross_barrier=True) do not go together: there is no moment between "
                "two steps at which the parameters are whole. Leave cross_barrier out."
            )
        theirs = getattr(self._optimizer, "_process_set", global_process_set)
        both = set(theirs.ranks or ()) & set(self._set.ranks or ())
        if len(both) > 1:
            raise ValueError(
                f"{who} and DistributedOptimizer do not go together over the same ranks ({sorted(both)[:8]}): the "
                f"optimizer averages gradients there in every step. Pass {who} the plain optimizer, or give each a "
                "process set of its own (docs/local_sgd.md: hosts)."
            )

    def __enter__(self) -> Any:
        if self._begun_in is not native():
            self._forget()  # of a generation of an elastic job that is over
            self._begin()
            self._begun_in = native()
        self._hook = self._optimizer.register_step_post_hook(lambda *_: self._after_step())
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        if error[0] is None:
            self._settle()

    def _after_step(self) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        """The next step is the first of a period, and nothing is under way."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Waits for what is under way."""


@torch.no_grad()
def _equal_at_first(parameters: Sequence[torch.Tensor], sums: Sequence[_Sum], members: ProcessSet) -> None:
    views = [view for one in sums for view in one.views]
    for parameter, view in zip(parameters, views, strict=True):
        view.copy_(parameter)
    for one in sums:
        operations.broadcast_(one.flat, min(members.ranks or [0]), f"{one.name}.begin", members)
    for parameter, view in zip(parameters, views, strict=True):
        parameter.copy_(view)


class LocalSGD(_Periodic):
    """Averages the parameters of `model` over the ranks after every `sync_every` steps of `optimizer`.

        with hvd.LocalSGD(model, optimizer, sync_every=8): train as on one rank

    Its state lasts for one period: save and load `state_dict()` beside the model's and the optimizer's, on every rank.
    ValueError for an optimizer that averages gradients over the same ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(optimizer, sync_every, process_set)
        self._every, self._model = sync_every, model
        self._parameters: list[torch.nn.Parameter] = []
        self._sums: list[_Sum] = []

    def _lay_out(self) -> None:
        """For the parameters that are trained now: some may have been unfrozen."""
        parameters = _ordered(self._model.parameters())
        if [id(one) for one in parameters] != [id(one) for one in self._parameters]:
            self._parameters = parameters
            self._sums = _sums_of(parameters, "local_sgd", Compression.none, self._set)

    def _begin(self) -> None:
        self._lay_out()
        _equal_at_first(self._parameters, self._sums, self._set)

    def _forget(self) -> None:
        self._steps = 0

    @torch.no_grad()
    def _after_step(self) -> None:
        self._steps += 1
        if self._steps < self._every:
            return
        self._steps = 0
        self._lay_out()
        views = [view for one in self._sums for view in one.views]
        for parameter, view in zip(self._parameters, views, strict=True):
            view.copy_(parameter)
        for one in self._sums:
            one.start()
        for one in self._sums:
            one.finish()
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.copy_(view)

    def state_dict(self) -> dict[str, Any]:
        """Returns how far this period has come."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from such a state. The parameters are what was loaded into the model: nothing is broadcast."""
        self._steps, self._begun_in = state["steps"], native()


class _Fragment:
    """Parameters whose movement is averaged in one piece."""

    def __init__(
        self, module: Any, number: int, outer: torch.optim.Optimizer, compression: Any, members: ProcessSet
    ):
        self.parameters = _ordered(module.parameters())
        if not self.parameters:
            raise ValueError(f"fragment {number} has no parameters to train")
        self.outer = outer
        self.originals = [p.detach().clone() for p in self.parameters]  # the global parameters
        self.sums = _sums_of(self.parameters, f"diloco.{number}", compression, members)
        self.under_way = False
        self._views = [view for one in self.sums for view in one.views]

    @torch.no_grad()
    def start(self) -> None:
        for original, parameter, view in zip(self.originals, self.parameters, self._views, strict=True):
            torch.sub(original, parameter, out=view)
        for one in self.sums:
            one.start()
        self.under_way = True

    def settle(self) -> None:
        for one in self.sums:
            one.finish()

    def forget(self) -> None:
        self.under_way = False
        for one in self.sums:
            one.forget()

    @torch.no_grad()
    def finish(self, alpha: float) -> None:
        """The outer optimizer's step on the global parameters; the local ones become a mixture of both."""
        self.settle()
        self.under_way = False
        local = [p.detach().clone() for p in self.parameters] if alpha else []
        others = [p for group in self.outer.param_groups for p in group["params"]]
        before = [(p, p.grad) for p in {id(p): p for p in (*others, *self.parameters)}.values()]
        for parameter, _ in before:
            parameter.grad = None
        for original, parameter, view in zip(self.originals, self.parameters, self._views, strict=True):
            parameter.copy_(original)
            parameter.grad = view
        self.outer.step()
        for parameter, grad in before:
            parameter.grad = grad
        for original, parameter in zip(self.originals, self.parameters, strict=True):
            original.copy_(parameter)
        for parameter, mine in zip(self.parameters, local, strict=False):
            parameter.lerp_(mine, alpha)


class DiLoCo(_Periodic):
    """Has every rank train alone; once in `sync_every` steps of `inner_optimizer` the movement of each fragment is
    averaged over the ranks, and `outer_optimizer` takes the average for the gradient of the global parameters.

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with hvd.DiLoCo([model], inner, outer, sync_every=100): train as on one rank

    model_fragments: modules; they take turns, sync_every / their number steps apart, each with its own outer optimizer
    or all with one. fragment_sync_delay: so many steps before its turn a fragment's movement is sent, and the steps go
    on meanwhile. fragment_update_alpha: how much of a rank's own parameters stays (0: they become the global ones).
    compression: as in DistributedOptimizer. All arguments must be the same on all ranks.
    """

    def __init__(
        self,
        model_fragments: Sequence[torch.nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        *,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        compression: Any = Compression.none,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(inner_optimizer, sync_every, process_set)
        count = len(model_fragments)
        if not count or sync_every % count:
            raise ValueError(
                f"sync_every={sync_every} must be a multiple of the number of fragments, {count}"
            )
        self._every, self._delay = sync_every // count, fragment_sync_delay
        self._alpha = fragment_update_alpha
        if not 0 <= fragment_sync_delay < self._every:
            raise ValueError(
                f"fragment_sync_delay={fragment_sync_delay} must be less than the {self._every} steps between two "
                f"fragments (sync_every={sync_every}, {count} fragments)"
            )
        if not 0.0 <= fragment_update_alpha <= 1.0:
            raise ValueError(f"fragment_update_alpha={fragment_update_alpha} must be between 0 and 1")
        outers = (
            [outer_optimizer] * count
            if isinstance(outer_optimizer, torch.optim.Optimizer)
            else outer_optimizer
        )
        if len(outers) != count:
            raise ValueError(
                f"{len(outers)} outer optimizers for {count} fragments: pass one, or one for each"
            )
        self._outers = list({id(outer): outer for outer in outers}.values())
        compression = checked_compression(compression, Average, 1.0)
        self._fragments = [
            _Fragment(module, number, outer, compression, process_set)
            for number, (module, outer) in enumerate(zip(model_fragments, outers, strict=True))
        ]
        self._check_parameters()
        self._turn = 0

    def _check_parameters(self) -> None:
        ours = [id(p) for fragment in self._fragments for p in fragment.parameters]
        inner = {id(p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad}
        if len(set(ours)) < len(ours):
            raise ValueError("a parameter belongs to two fragments")
        if inner - set(ours):
            raise ValueError(
                f"{len(inner - set(ours))} parameters of the inner optimizer are in no fragment: they would never be "
                "averaged. Add their module to model_fragments; after unfreezing, make DiLoCo anew."
            )
        for number, fragment in enumerate(self._fragments):
            theirs = {id(p) for group in fragment.outer.param_groups for p in group["params"]}
            if any(id(p) not in theirs for p in fragment.parameters):
                raise ValueError(f"the outer optimizer of fragment {number} lacks some of its parameters")

    def _begin(self) -> None:
        for fragment in self._fragments:
            _equal_at_first(fragment.parameters, fragment.sums, self._set)
            for original, parameter in zip(fragment.originals, fragment.parameters, strict=True):
                original.copy_(parameter.detach())

    def _forget(self) -> None:
        self._steps = self._turn = 0
        for fragment in self._fragments:
            fragment.forget()

    def _after_step(self) -> None:
        self._steps += 1
        fragment = self._fragments[self._turn]
        if self._steps == self._every - self._delay:
            self._check_parameters()  # some may have been unfrozen
            fragment.start()
        if self._steps == self._every:
            fragment.finish(self._alpha)
            self._turn, self._steps = (self._turn + 1) % len(self._fragments), 0

    def _settle(self) -> None:
        for fragment in self._fragments:
            fragment.settle()

    def state_dict(self) -> dict[str, Any]:
        """Returns the global parameters, the outer optimizers, and what is under way, for which it waits: call it on
        all ranks after the same step. Each rank saves its own, beside its model's and its inner optimizer's."""
        self._settle()
        return {
            "steps": self._steps,
            "turn": self._turn,
            "outer": [outer.state_dict() for outer in self._outers],
            "fragments": [
                {
                    "originals": [original.clone() for original in fragment.originals],
                    "arrived": [one.flat.clone() for one in fragment.sums] if fragment.under_way else None,
                    "kept": [
                        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in one.kept.items()}
                        for one in fragment.sums
                    ],
                }
                for fragment in self._fragments
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly from such a state, once the model and the inner optimizer have been loaded as well."""
        if len(state["fragments"]) != len(self._fragments):
            raise ValueError(f"the state has {len(state['fragments'])} fragments, not {len(self._fragments)}")
        self._steps, self._turn, self._begun_in = state["steps"], state["turn"], native()
        for outer, theirs in zip(self._outers, state["outer"], strict=True):
            outer.load_state_dict(theirs)
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            for original, value in zip(fragment.originals, saved["originals"], strict=True):
                original.copy_(value)
            fragment.under_way = saved["arrived"] is not None
            for one, flat in zip(fragment.sums, saved["arrived"] or (), strict=False):
                one.flat.copy_(flat)
            for one, kept in zip(fragment.sums, saved["kept"], strict=True):
                one.kept.clear()
                one.kept.update(kept)
