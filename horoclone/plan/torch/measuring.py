"""One rank's step, measured: when each parameter is read, when its gradient is ready, what arithmetic and copies take.

Hooks on modules and parameters note times during whole steps, without any communication. Times are medians.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch

from horoclone.plan.profile import Block, Profile
from horoclone.plan.torch.subject import Subject
from horoclone.replay import Gradient
from horoclone.torch.optimizer.cross_barrier import _PER_PARAMETER

WARM_STEPS, STEPS = 2, 5
SAMPLE_BYTES = 16 << 20  # of a copy that is timed


class _Notes:
    """What the hooks of one step have seen, in seconds since its start."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._begun_s = 0.0
        self.called: dict[torch.nn.Module, tuple[float, float]] = {}
        self.ready: dict[torch.Tensor, float] = {}
        self.outputs: dict[torch.nn.Module, float] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> _Notes:
        for module in self._subject.model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._before))
            self._hooks.append(module.register_forward_hook(self._after))
        for parameter in self._subject.parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._came))
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        self._begun_s = self._subject.now_s()

    def since(self) -> float:
        return self._subject.now_s() - self._begun_s

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        self.called.setdefault(module, (self.since(), 0.0))

    def _after(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        self.called[module] = (self.called[module][0], self.since())
        if isinstance(output, torch.Tensor):
            self.outputs[module] = output.nbytes

    def _came(self, parameter: torch.Tensor) -> None:
        self.ready[parameter] = self.since()


def profile(subject: Subject, barrier: Callable[[], Any]) -> Profile:
    """Measures one rank. barrier: before each step, so that all ranks compute at the same time."""
    optimizer = subject.make_optimizer()
    seen: list[tuple[_Notes, float, float, float]] = []
    for number in range(WARM_STEPS + STEPS):
        optimizer.zero_grad()
        barrier()
        with _Notes(subject) as notes:
            loss = subject.loss()
            forward_s = notes.since()
            loss.backward()
            backward_s = notes.since()
        begun_s = subject.now_s()
        optimizer.step()
        update_s = subject.now_s() - begun_s
        if number >= WARM_STEPS:
            seen.append((notes, forward_s, backward_s - forward_s, update_s))
    forward_s, backward_s, update_s = map(statistics.median, zip(*(one[1:] for one in seen), strict=True))
    reading = _reading(subject.model)
    gradients = []
    for parameter in subject.parameters:
        times = [
            (_first_read(one, reading.get(parameter)), one.ready.get(parameter, f + b) - f)
            for one, f, b, _ in seen
        ]
        needed_s, ready_s = (statistics.median(pair) for pair in zip(*times, strict=True))
        gradients.append(
            Gradient(parameter.nbytes, min(needed_s, forward_s), min(max(0.0, ready_s), backward_s))
        )
    names = {parameter: name for name, parameter in subject.model.named_parameters()}
    state = _state_bytes(optimizer)
    activations, memory_by = _activations(subject, optimizer, state)
    blocks, is_chain = _blocks(
        subject, [one[0] for one in seen], dict(zip(subject.parameters, gradients, strict=True))
    )
    copy_s, half_s = _copies(subject)
    return Profile(
        gradients=tuple(gradients),
        names=tuple(names[parameter] for parameter in subject.parameters),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        copy_s=copy_s,
        half_s=half_s,
        per_bucket_s=_of_a_small_step(subject),
        outer_s=_outer(subject),
        parameters=float(sum(parameter.nbytes for parameter in subject.parameters)),
        state=state,
        activations=activations,
        memory_by=memory_by,
        blocks=blocks,
        is_chain=is_chain,
        optimizer=type(optimizer).__name__,
        is_per_parameter=type(optimizer) in _PER_PARAMETER,
        assumed=("the optimizer: AdamW (build() returned none)",) if subject.is_assumed else (),
    )


# --- forward -------------------------------------------------------------------------------------------------------


def _reading(model: torch.nn.Module) -> dict[torch.Tensor, list[torch.nn.Module]]:
    """For each parameter the module that holds it, then those around it, from the inside."""
    found: dict[torch.Tensor, list[torch.nn.Module]] = {}

    def visit(module: torch.nn.Module, around: list[torch.nn.Module]) -> None:
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, [module, *around])
        for child in module.children():
            visit(child, [module, *around])

    visit(model, [])
    return found


def _first_read(notes: _Notes, modules: list[torch.nn.Module] | None) -> float:
    """When the nearest module that was called began."""
    return next((notes.called[module][0] for module in modules or () if module in notes.called), 0.0)


def _blocks(
    subject: Subject, seen: list[_Notes], gradients: dict[torch.Tensor, Gradient]
) -> tuple[tuple[Block, ...], bool]:
    """The model's children in the order of forward, and whether they are a chain (a Sequential)."""
    model, last = subject.model, seen[-1]
    children = [(name, child) for name, child in model.named_children() if child in last.called]
    children.sort(key=lambda pair: last.called[pair[1]][0])
    blocks, begun_s = [], 0.0
    backward: list[float] = []
    for _, child in reversed(children):  # backward goes from the last one to the first
        done_s = max((gradients[p].ready_s for p in child.parameters() if p in gradients), default=begun_s)
        backward.append(max(0.0, done_s - begun_s))
        begun_s = max(begun_s, done_s)
    for (name, child), backward_s in zip(children, reversed(backward), strict=True):
        took = [one.called[child][1] - one.called[child][0] for one in seen if child in one.called]
        size = sum(p.nbytes for p in child.parameters() if p in gradients)
        blocks.append(Block(name, statistics.median(took), backward_s, size, last.outputs.get(child, 0.0)))
    is_chain = isinstance(model, torch.nn.Sequential) and len(blocks) == len(model)
    return tuple(blocks), is_chain


# --- memory --------------------------------------------------------------------------------------------------------


def _state_bytes(optimizer: torch.optim.Optimizer) -> float:
    return float(
        sum(
            value.nbytes
            for entry in optimizer.state.values()
            if isinstance(entry, dict)
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )
    )


def _activations(subject: Subject, optimizer: torch.optim.Optimizer, state: float) -> tuple[float, str]:
    """(bytes at the peak of a step beside parameters, gradients and state, what told them)."""
    with contextlib.suppress(Exception):  # torch's tracker is not meant for everything that a model may do
        from torch.distributed._tools.mem_tracker import MemTracker

        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(subject.model, optimizer)
        with tracker:
            subject.loss().backward()
        peak = sum(one["Total"] for one in tracker.get_tracker_snapshot("peak").values())
        held = 2 * sum(parameter.nbytes for parameter in subject.parameters) + state
        optimizer.zero_grad()
        return max(0.0, float(peak - held)), "torch's MemTracker"
    saved: dict[int, float] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = float(storage.nbytes())
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in subject.parameters}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        subject.loss()
    return sum(size for place, size in saved.items() if place not in own), "what autograd saves for backward"


# --- arithmetic and copies -----------------------------------------------------------------------------------------


def _repeated(subject: Subject, call: Callable[[], Any], times: int = 5) -> float:
    """Median seconds of a call, behind a first one that does not count."""
    call()
    took = []
    for _ in range(times):
        begun_s = subject.now_s()
        call()
        took.append(subject.now_s() - begun_s)
    return statistics.median(took)


def _copies(subject: Subject) -> tuple[float, float]:
    """Seconds per byte of a float32 gradient: into memory of its own, and into 16-bit floats."""
    source = torch.ones(SAMPLE_BYTES // 4, device=subject.device)
    same, half = torch.empty_like(source), torch.empty_like(source, dtype=torch.bfloat16)
    whole = _repeated(subject, lambda: same.copy_(source)) / source.nbytes
    return whole, _repeated(subject, lambda: half.copy_(source)) / source.nbytes


def _of_a_small_step(subject: Subject) -> float:
    """What a step of the optimizer costs that updates almost nothing."""
    small = torch.nn.Parameter(torch.zeros(8, device=subject.device))
    try:
        optimizer = subject.optimizer_of([small])
    except Exception:
        return 0.0  # one that takes the model's own parameters only
    small.grad = torch.zeros_like(small)
    return _repeated(subject, optimizer.step)


@torch.no_grad()
def _outer(subject: Subject) -> float:
    """What DiLoCo computes around an exchange, on copies of up to SAMPLE_BYTES, scaled to all parameters."""
    whole, size = sum(p.nbytes for p in subject.parameters), 0
    chosen: list[torch.Tensor] = []
    for parameter in subject.parameters:
        if not chosen or size + parameter.nbytes <= SAMPLE_BYTES:
            chosen.append(parameter)
            size += parameter.nbytes
    ours = [torch.nn.Parameter(parameter.detach().clone()) for parameter in chosen]
    before, movement = [p.detach().clone() for p in ours], [torch.zeros_like(p) for p in ours]
    outer = torch.optim.SGD(ours, lr=1e-9, momentum=0.9, nesterov=True)

    def exchange() -> None:
        for original, parameter, view in zip(before, ours, movement, strict=True):
            torch.sub(original, parameter, out=view)
            parameter.copy_(original)
            parameter.grad = view
        outer.step()
        for original, parameter in zip(before, ours, strict=True):
            original.copy_(parameter)

    return _repeated(subject, exchange, 3) * whole / size
