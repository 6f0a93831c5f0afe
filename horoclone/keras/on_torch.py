"""Gradients of Keras on the torch backend: all groups are submitted, then waited for.

Which gradients exist may differ between ranks and steps (a branch that a batch did not take). So every rank sends all
of them, with zeros for those it lacks, and flags that say which ranks had one.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from horoclone.arrays.compared import NOTHING, Bytes, VariableComparison
from horoclone.errors import HorovodInternalError
from horoclone.keras.compared import names_of
from horoclone.ops import Max
from horoclone.torch import operations

if TYPE_CHECKING:
    from horoclone.keras.compared import Watched
    from horoclone.keras.reduction import Part, Reduction
    from horoclone.process_sets import ProcessSet


def divided(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """The gradient divided by the size, as a new tensor."""
    return gradient / (process_set.size() or 1)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Sparse gradients as dense ones."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def value_of(variable: Any) -> torch.Tensor:
    """The torch parameter of a Keras variable."""
    value = variable.value if hasattr(variable, "value") else variable
    return value() if callable(value) else value


def _size(variable: Any) -> int | None:
    value = value_of(variable)
    return value.nbytes if value.device.type == "cpu" else None


def _read(variable: Any) -> Bytes:
    return value_of(variable).detach().contiguous().reshape(-1).view(torch.uint8).numpy()


@torch.no_grad()
def _write(variable: Any, content: Bytes) -> None:
    value = value_of(variable)
    value.copy_(torch.from_numpy(content).view(value.dtype).reshape(value.shape))


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def reduce(
    parts: Sequence[Part],
    grads: Sequence[Any],
    variables: Sequence[Any],
    settings: Reduction,
    watched: Watched | None,
) -> dict[int, Any]:
    """Place in the list -> reduced gradient; None where no rank had one. The tensors given stay as they are."""
    if not parts:
        return {}
    places = [place for part in parts for place in part.places]
    checks, compared = NOTHING, None
    if watched is not None:
        compared = watched.kept.get(watched.name)
        if compared is None:
            compared = VariableComparison(
                watched.own, watched.name, settings.process_set, _size, _read, _write
            )
            watched.kept[watched.name] = compared
        checks = compared.fill(watched.values)
    had = torch.tensor(
        [*(grads[place] is not None for place in places), *checks], dtype=torch.uint8, device="cpu"
    )
    someone = operations.allreduce_async(
        had, name=f"{parts[0].name}.present", op=Max, process_set=settings.process_set
    )
    running = [_submit(part, grads, variables, settings) for part in parts]
    *reduced, had_anywhere = _outcomes([*(handle for handle, _ in running), someone], parts, variables)
    result: dict[int, Any] = {}
    for part, (_, contexts), outputs in zip(parts, running, reduced, strict=True):
        if part.compression is not None:
            outputs = [part.compression.decompress(o, c) for o, c in zip(outputs, contexts, strict=True)]
        result.update(zip(part.places, outputs, strict=True))
    flags = had_anywhere.tolist()
    if watched is not None and compared is not None:
        compared.look(flags[len(places) :], watched.values)
    for place, present in zip(places, flags, strict=False):
        if not present:
            result[place] = None
    return result


def _outcomes(handles: Sequence[int], parts: Sequence[Part], variables: Sequence[Any]) -> list[Any]:
    """What each gives. Where one has failed its error is raised when all have ended, so that a next step may use their
    names. parts: of which all handles but the last are."""
    outcomes, failed = [], None
    for handle, part in zip_longest(handles, parts):
        try:
            outcomes.append(operations.synchronize(handle))
        except Exception as error:
            if part is not None and isinstance(error, HorovodInternalError):
                error.name_tensors(names_of(variables, part.places))
            failed = failed or error
    if failed is not None:
        raise failed
    return outcomes


def _submit(
    part: Part, grads: Sequence[Any], variables: Sequence[Any], settings: Reduction
) -> tuple[int, list[Any]]:
    """The handle of one group, and what decompression needs."""
    wires, contexts = [], []
    for place in part.places:
        gradient = grads[place]
        if gradient is None:
            gradient = torch.zeros_like(value_of(variables[place]), requires_grad=False)
        wire, context = dense(gradient).detach(), None
        if part.compression is not None:
            wire, context = part.compression.compress(wire)
        wires.append(wire.contiguous())
        contexts.append(context)
    handle = operations.grouped_allreduce_async(
        wires,
        name=part.name,
        op=part.op,
        prescale_factor=part.prescale,
        postscale_factor=part.postscale,
        process_set=settings.process_set,
        weight=part.weight,
    )
    return handle, contexts


@torch.no_grad()
def add_in_place(variable: Any, gradient: torch.Tensor) -> None:
    """variable += gradient."""
    value_of(variable).add_(dense(gradient))


@torch.no_grad()
def clear(variable: Any) -> None:
    """Sets a variable to zero."""
    value_of(variable).zero_()
