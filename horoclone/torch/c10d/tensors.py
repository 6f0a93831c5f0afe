"""Translates what torch.distributed passes for the core: reductions, and tensors as bytes. Used by group.py."""

# mypy: disable-error-code="misc, no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from horoclone import ops
from horoclone.torch.operations.tensors import NUMBER_OF, ON_GPU, bytes_of, number_of

Tensors = Sequence[torch.Tensor]
Finish = Callable[[Any, int], None]  # puts the core's result where the caller wants it
_RedOp: Any = dist.ReduceOp.RedOpType

REDUCTIONS = {
    _RedOp.SUM: ops.Sum,
    _RedOp.AVG: ops.Average,
    _RedOp.PRODUCT: ops.Product,
    _RedOp.MIN: ops.Min,
    _RedOp.MAX: ops.Max,
    _RedOp.PREMUL_SUM: ops.Sum,
    _RedOp.BAND: ops.And,
    _RedOp.BOR: ops.Or,
    _RedOp.BXOR: ops.Xor,
}
BITWISE = (ops.And, ops.Or, ops.Xor)


_NAMES = {
    ops.ALLREDUCE: "allreduce", ops.ALLGATHER: "allgather", ops.BROADCAST: "broadcast", ops.ALLTOALL: "alltoall",
    ops.REDUCESCATTER: "reducescatter", ops.BARRIER: "barrier", ops.REDUCE: "reduce", ops.GATHER: "gather",
    ops.SCATTER: "scatter",
}  # fmt: skip


def ops_name(op: int) -> str:
    return _NAMES.get(op, "operation")


def listed(tensors: Any) -> list[torch.Tensor]:
    return [there(t) for t in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]


def there(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for what a functional collective has promised. Backends in C++ get it from torch's dispatcher."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "trigger_wait"):
        return tensor
    return tensor.trigger_wait()  # type: ignore[no-any-return]


def reduction(opts: Any) -> tuple[Any, int, float]:
    """(torch's reduction, ours, factor before it) of options or of an operation; SUM without any.

    ValueError for what is not one of torch's reductions.
    """
    wish = getattr(opts, "reduceOp", opts)
    if wish is None:
        wish = _RedOp.SUM
    kind = wish if type(wish) is _RedOp else wish.op
    ours = REDUCTIONS.get(kind)
    if ours is None:
        raise ValueError(f"{wish!r} is no reduction; use one of {', '.join(k.name for k in REDUCTIONS)}")
    return kind, ours, _factor_of(wish) if ours == ops.Sum and kind == _RedOp.PREMUL_SUM else 1.0


def _factor_of(wish: Any) -> float:
    """Of a PREMUL_SUM. An older torch shows it only to pickle."""
    return float(wish.factor if hasattr(wish, "factor") else wish.__getstate__()[1])


def reducible(tensor: torch.Tensor, reduce: int) -> torch.Tensor:
    """What the core reduces for `tensor`: itself, or its bytes where these are reduced and the core lacks the dtype.

    ValueError for the bits of floating-point and complex numbers.
    """
    if reduce not in BITWISE:
        return tensor
    if tensor.dtype.is_floating_point or tensor.is_complex():
        raise ValueError(f"bitwise reductions need whole numbers or bool, not {tensor.dtype}")
    return tensor if NUMBER_OF.get(tensor.dtype, ops.FIRST_MOVED) < ops.FIRST_MOVED else as_bytes(tensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in order and without gaps: itself, or a copy. Refuses what is not in host memory or a GPU's."""
    tensor = there(tensor).detach()
    if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        number_of(tensor, None, True)  # raises
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As whole(), as uint8[bytes]."""
    return bytes_of(whole(tensor))


def as_row(tensor: torch.Tensor) -> torch.Tensor:
    """As whole(), in one dimension; as bytes where the core does not know the dtype. Ranks whose dtypes differ are told
    so by the core."""
    return whole(tensor).view(-1) if tensor.dtype in NUMBER_OF else as_bytes(tensor)


def as_rows(tensors: Tensors) -> list[torch.Tensor]:
    """as_row() of each; bytes where their dtypes differ, so that one operation can move them together."""
    form = as_row if len({tensor.dtype for tensor in tensors}) == 1 else as_bytes
    return [form(tensor) for tensor in tensors]


def check_dtypes(call: str, output: torch.Tensor, source: torch.Tensor) -> None:
    """ValueError where they differ: the output would get the input's bits as numbers of another kind."""
    if output.dtype is not source.dtype:
        raise ValueError(
            f"{call}: the output is {output.dtype}, the input {source.dtype}; they must be of one dtype"
        )


def put_back(targets: Tensors, results: Tensors) -> Finish | None:
    """What moves results to targets of which whole() made copies; None where it made none."""
    pairs = [(t, r) for t, r in zip(targets, results, strict=True) if t.data_ptr() != r.data_ptr()]
    if not any(target.numel() for target, _ in pairs):
        return None

    def finish(runtime: Any, handle: int) -> None:
        for target, result in pairs:
            target.detach().copy_(result.view(target.dtype).view(target.shape))

    return finish


def number_at(tensor: torch.Tensor) -> int:
    """The core's number of the dtype, wherever the tensor lies."""
    return number_of(tensor, None, True) % ON_GPU


def joined(tensors: Tensors) -> torch.Tensor | None:
    """One tensor over those that lie one behind the other in one memory, dense, alike; None where they do not."""
    first = tensors[0]
    step, n = first.nbytes, first.numel()
    at = first.data_ptr() if type(first) is torch.Tensor and n else 0
    for i, tensor in enumerate(tensors):
        if (
            type(tensor) is not torch.Tensor
            or tensor.data_ptr() != at + i * step
            or tensor.numel() != n
            or tensor.dtype is not first.dtype
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return None
    storage = first.untyped_storage()
    begin = first.storage_offset()
    if not at or storage.nbytes() < (begin + n * len(tensors)) * first.element_size():
        return None
    return first.detach().as_strided((n * len(tensors),), (1,), begin)


def room_for(outputs: Tensors) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A row for all elements of the outputs: where they lie in one memory, that, else new memory, and what copies it
    into them."""
    row = joined(outputs)
    if row is not None:
        return row, None
    row = torch.empty(sum(output.numel() for output in outputs), dtype=outputs[0].dtype, device="cpu")
    return row, partial(copy_apart, row, outputs)


def elements_of_parts(tensor: torch.Tensor, splits: Any, size: int, what: str, elements: int) -> list[int]:
    """How many of its elements each rank gives or gets. splits: rows for each rank; none: equal parts. ValueError where
    they are not the tensor's."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all_single: {rows} {what} rows for {size} ranks")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"all_to_all_single: {what} splits {list(splits)} for {rows} rows")
    return [int(count) * (elements // rows if rows else 0) for count in splits]


def copy_apart(flat: torch.Tensor, outputs: Tensors) -> None:
    """Cuts `flat` (of the outputs' dtype, or bytes) into the outputs. ValueError when it does not fit."""
    flat = flat.reshape(-1)
    copies = [whole(o) for o in outputs]
    targets = [as_bytes(o) if flat.dtype is torch.uint8 else o.view(-1) for o in copies]
    if wrong := [o.dtype for o in targets if o.dtype is not flat.dtype]:
        raise ValueError(f"the ranks sent {flat.dtype}, and an output is {wrong[0]}")
    if sum(t.numel() for t in targets) != flat.numel():
        raise ValueError(
            f"the ranks sent {flat.numel()} elements, the outputs have {[math.prod(o.shape) for o in outputs]}"
        )
    for target, part in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
        target.copy_(part)
    if finish := put_back(outputs, copies):
        finish(None, 0)


def check_exchanged(result: Any, expected: Sequence[int]) -> None:
    """After an alltoall: ValueError where another number of elements came from a rank than the output has for it."""
    if list(result.rows_from) != list(expected):
        raise ValueError(
            f"all_to_all: the ranks sent {list(result.rows_from)} elements, the outputs have {list(expected)}"
        )


def check_filled(result: Any, source: torch.Tensor, target: torch.Tensor, outputs: Tensors) -> None:
    """After a gather or allgather into `target`: the core leaves it alone where a rank gave another number of
    elements."""
    if not result.nbytes and result.device < 0 and result.first_dimension == target.numel():
        return
    if len(outputs) != 1:
        raise ValueError(
            f"the ranks sent {result.first_dimension} elements, the outputs have {[list(o.shape) for o in outputs]}"
        )
    raise ValueError(
        "all_gather_into_tensor: the ranks' inputs have different sizes, "
        f"{result.first_dimension} elements together; this rank's has {source.numel()}. Use all_gather where "
        "sizes differ."
    )
