"""Makes ranks start alike: copies parameters, optimizer state and Python objects from one rank to all.

Optimizer state travels as nested containers with tensors in them, so any optimizer works, and no step is made to create
it. Thread: the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from horoclone.arguments import given, wrong_type
from horoclone.objects import allgather_object, broadcast_object
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import rank
from horoclone.torch import operations
from horoclone.torch.operations.gpu import HOST, memory_beside, place_of
from horoclone.torch.operations.tensors import bytes_of

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites parameters with rank root_rank's, in place.

    params: model.state_dict(), or pairs (name, tensor) as from model.named_parameters(); the same names, shapes and
    dtypes on all ranks. Entries that are not tensors are left alone. ValueError for anything else than a dict or pairs.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, (list, tuple)) or hasattr(params, "__next__"):
        pairs = list(params)
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}: broadcast_parameters: params={given(params)} cannot be used; "
            "params takes model.state_dict(), or pairs (name, tensor) as from model.named_parameters()."
        )
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("params must be a dict or a sequence of pairs (name, tensor)")
    started = []
    for name, tensor in pairs:
        if isinstance(tensor, torch.Tensor):
            tensor = _without_repetition(tensor.detach())
            whole = tensor if tensor.is_contiguous() else tensor.contiguous()
            whole = whole.resolve_conj().resolve_neg()
            started.append((tensor, operations.broadcast_async_(whole, root_rank, name, process_set)))
    for tensor, handle in started:
        received = operations.synchronize(handle)
        if received.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(received)


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that has memory of its own: torch writes to no others."""
    if tensor.layout is torch.strided:
        for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the optimizer state and the options of the parameter groups of rank root_rank.

    Works for any optimizer, also while some or all ranks have no state yet; parameters do not change. Where this rank
    had no state, the gradients of all parameters become zeros, as in Horovod. `model` is accepted and not needed.
    ValueError when the ranks' parameter groups differ in number or size, or in the order of parameters with state.
    """
    if not hasattr(optimizer, "state_dict"):
        raise wrong_type("broadcast_optimizer_state", "optimizer", optimizer, "an optimizer of torch")
    is_root, had_state = rank() == root_rank, bool(getattr(optimizer, "state", True))
    tensors: list[torch.Tensor] = []
    skeleton = _without_tensors(optimizer.state_dict(), tensors, {}) if is_root else None
    forms = [(tuple(t.shape), t.dtype, place_of(t) is not HOST) for t in tensors]
    skeleton, forms, listed = broadcast_object(
        (skeleton, forms, _listed(optimizer)), root_rank, process_set=process_set
    )
    if not is_root:
        beside = _on_a_gpu(optimizer)
        tensors = [_memory(beside if on_gpu else None, shape, dtype) for shape, dtype, on_gpu in forms]
    wires = [bytes_of(t) for t in tensors]
    handles = [
        operations.broadcast_async_(wire, root_rank, f"optimizer_state.{i}", process_set)
        for i, wire in enumerate(wires)
    ]
    for handle in handles:
        operations.synchronize(handle)
    state = _with_tensors(skeleton, tensors)
    _check_groups(optimizer, state, listed, root_rank)
    if hasattr(optimizer, "_become_whole"):  # sharded state: everybody cuts it anew
        optimizer._become_whole(received=not is_root)
    if not is_root:
        assign_optimizer_state(optimizer, state)
    if not had_state:
        _zero_gradients(optimizer)


def _zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """As the step leaves them that Horovod makes here. No step is made: it would count, and decay weights.

    Not where gradients that nobody computes are to be None.
    """
    reducer = getattr(optimizer, "_reducer", None)
    if reducer is not None and reducer.leaves_none:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                zeros = torch.zeros_like(parameter, requires_grad=False)
                parameter.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros


def _on_a_gpu(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """A parameter of the optimizer that lies on this rank's GPU; None if none does."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.detach() for p in parameters if place_of(p) is not HOST), None)


def _memory(beside: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Where the root has it: its step counters are in host memory, the rest is where the parameters are."""
    return (
        torch.empty(shape, dtype=dtype, device="cpu")
        if beside is None
        else memory_beside(beside, shape, dtype)
    )


class _Place:
    """Stands for the i-th tensor of a state."""

    def __init__(self, index: int) -> None:
        self.index = index


def _without_tensors(value: Any, tensors: list[torch.Tensor], seen: dict[int, int]) -> Any:
    """The same containers with a _Place for each tensor; a tensor that appears twice is listed once."""
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen[id(value)] = len(tensors)
            tensors.append(value.detach())
        return _Place(seen[id(value)])
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, tensors, seen) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, tensors, seen) for item in value)
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value


def _listed(optimizer: torch.optim.Optimizer) -> list[tuple[str, tuple[int, ...]]]:
    """Names, where they are known, and shapes of the parameters, in the order in which a state_dict() numbers them."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for group in getattr(optimizer, "param_groups", ()):
        names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        name_of = getattr(optimizer, "_name_of", lambda one, names=names: names.get(one, ""))
        found += [(name_of(one), () if is_lazy(one) else tuple(one.shape)) for one in group["params"]]
    return found


def _check_groups(
    optimizer: torch.optim.Optimizer, state: Any, listed: Sequence[Any], root_rank: int
) -> None:
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if groups is None:
        return
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in groups]
    if here != there:
        raise ValueError(
            f"broadcast_optimizer_state: the parameter groups here (rank {rank()}) have {here} parameters, those of "
            f"rank {root_rank} have {there}. Build the optimizer from the same model on every rank."
        )
    held = state.get("state") or ()
    mine = _listed(optimizer)
    # Other names alone say nothing: a checkpoint brings its own, as those of a wrapped model.
    names_tell = sorted(name for name, _ in mine) == sorted(name for name, _ in listed)
    for at, (own, other) in enumerate(zip(mine, listed, strict=True)):
        if at in held and (own[1] != other[1] or (names_tell and own[0] != other[0])):
            raise ValueError(
                f"broadcast_optimizer_state: parameter {at} of the optimizer is {own[0]!r} of shape {list(own[1])} "
                f"here (rank {rank()}), and {other[0]!r} of shape {list(other[1])} on rank {root_rank}, whose state it "
                "would get. List the parameters in one order on every rank; a set has none."
            )


def load_into_groups(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """optimizer.load_state_dict(state), but the parameter groups stay the same objects: whoever holds them, as the
    optimizer that was wrapped and its scheduler do, goes on setting the rates of this one."""
    with same_groups(optimizer):
        optimizer.load_state_dict(state)


@contextmanager
def same_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it a state is loaded; see load_into_groups."""
    groups = vars(optimizer).get("param_groups")
    kept = list(groups or ())
    yield
    fresh = vars(optimizer).get("param_groups")
    if groups is None or fresh is groups or len(fresh or ()) != len(kept):
        return
    for group, loaded in zip(kept, fresh or (), strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    groups[:] = kept
    vars(optimizer)["param_groups"] = groups


def assign_optimizer_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Makes `state`, in the form of optimizer.state_dict(), the optimizer's own: its tensors are taken, not copied."""
    base = torch.optim.Optimizer
    own = getattr(type(optimizer), "_wrapped_class", type(optimizer))
    loads_as_usual = issubclass(own, base) and own.load_state_dict is base.load_state_dict
    if not loads_as_usual or own.state_dict is not base.state_dict:
        load_into_groups(optimizer, state)
        return
    # Not load_state_dict, which would cast float32 state of 16-bit parameters to 16 bits.
    parameters: dict[int, torch.Tensor] = {}
    for group, received in zip(optimizer.param_groups, state["param_groups"], strict=True):
        parameters.update(zip(received["params"], group["params"], strict=True))
        for key in group.keys() - received.keys() - {"params"}:
            del group[key]
        group.update({key: value for key, value in received.items() if key != "params"})
    optimizer.state.clear()
    for key, value in state["state"].items():
        optimizer.state[parameters.get(key, key)] = value
