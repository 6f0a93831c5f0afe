"""Torch tensors as the core sees them: an address, a shape, a number for the dtype; and core-owned results as tensors.

Refuses what the core cannot take, with the reason. Knows nothing of operations or handles. Thread: any.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

from horoclone import ops
from horoclone.arguments import given
from horoclone.errors import NotATensor, Unsupported
from horoclone.requests import ON_GPU as ON_GPU
from horoclone.requests import overlap

if TYPE_CHECKING:
    from horoclone._core import Result

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
NUMBER_OF: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, number in ops.MOVABLE.items() if hasattr(torch, name)
}

DTYPE_OF = {number: dtype for dtype, number in NUMBER_OF.items()}

# An empty tensor has address 0, which means "the core owns the result" in a submission; it gets this address instead.
_nowhere = torch.empty(16, dtype=torch.uint8, device="cpu")
NOWHERE = _nowhere.data_ptr()


# True only while torch.compile traces: its tracer takes it for a constant.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)


# What compiles the frames that this thread enters; None: nothing.
_compiler_of_frames: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True
)


def uncompiled(function: F) -> F:
    """A decorator for what must run as it is where a whole training step is compiled: Dynamo follows the calls of
    backward's hooks and of step(), and would make programs of the operations in them."""
    apart: Any = torch._disable_dynamo(function)  # imports Dynamo when it is called first, not now

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or _compiler_of_frames() is not None:
            return apart(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


def never_compiled(kind: type[T]) -> type[T]:
    """A decorator for classes whose methods C++ calls while frames are compiled, as DDP's does under torch.compile:
    Dynamo would make programs of them. As uncompiled(), at no cost for a call."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # not before torch 2.7
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType):
                frames.set_code_exec_strategy(method.__code__, skip)
    return kind


def number_of(tensor: torch.Tensor, name: str | None, gpu: bool = False) -> int:
    """The core's number for the dtype of a tensor that it can read where it lies: dense, contiguous, in host memory.

    gpu: the caller also takes tensors on CUDA devices, whose numbers have ON_GPU added (see gpu.py). Raises ValueError
    for other layouts and dtypes, Unsupported for other devices, NotATensor for what is no tensor, NotImplementedError
    where derivatives are carried forward with it.
    """
    try:
        number = NUMBER_OF.get(tensor.dtype)
    except AttributeError:
        raise not_a_tensor(tensor, name) from None
    if forward_ad._current_level >= 0:
        _refuse_tangent(tensor, name)
    if (
        number is None
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return _number_elsewhere(tensor, name, gpu)
    return number


def _number_elsewhere(tensor: torch.Tensor, name: str | None, gpu: bool) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(tensor, name)
    number = NUMBER_OF.get(tensor.dtype)
    readable = (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )
    if number is None or not gpu or not tensor.is_cuda or not readable:
        raise _refusal(tensor, name, gpu)
    return number + ON_GPU


def _refusal(tensor: torch.Tensor, name: str | None, gpu: bool) -> Exception:
    if tensor.is_nested:
        label = f"tensor {name!r}" if name else "unnamed tensor"
        return ValueError(
            f"{label} is nested, and has no shape: pass tensor.values(), or what tensor.unbind() gives."
        )
    label = f"tensor {name!r}" if name else f"unnamed tensor of shape {list(tensor.shape)}"
    if not (tensor.is_cpu or (gpu and tensor.is_cuda)):
        moved = "host memory and memory of NVIDIA's GPUs" if gpu else "host memory only in this function"
        return Unsupported(
            f"{label} is on device {tensor.device}: this version moves {moved}. Pass tensor.cpu(), or keep the model "
            "on the CPU."
        )
    if tensor.layout is not torch.strided:
        return ValueError(
            f"{label} has layout {tensor.layout}: only dense tensors can be passed here. Use "
            "hvd.sparse_allreduce_async for sparse ones, or tensor.to_dense()."
        )
    if tensor.dtype not in NUMBER_OF:
        return ValueError(
            f"Tensor type {tensor.type()} is not supported. The {label} is {tensor.dtype}: convert it, or, where it is "
            "only moved, pass what it is made of, as int_repr() of a quantized tensor."
        )
    if tensor.is_contiguous():
        return ValueError(
            f"{label} is conjugated or negated when it is read, and its memory is not: pass "
            "tensor.resolve_conj().resolve_neg()."
        )
    return ValueError("Tensor is required to be contiguous.")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of its elements as uint8[bytes]: its own, or a copy's where they do not lie in order without gaps."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1), which keeps the stride of a single element.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def not_a_tensor(value: object, name: str | None = None) -> NotATensor:
    """What to raise where a tensor was expected."""
    label = f"tensor {name!r}" if name else "the tensor"
    return NotATensor(
        f"{label} is {given(value)}: the operations of horoclone.torch take a torch.Tensor. Pass "
        "torch.as_tensor(value); for NumPy arrays there is horoclone itself."
    )


def learns(tensors: Iterable[torch.Tensor], name: str | None) -> bool:
    """Whether an operation on them has a gradient here, and not in a compiled function's graph. NotATensor for what is
    no tensor."""
    if is_compiling():
        return False
    needed = False
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(tensor, name)
        needed = needed or tensor.requires_grad
    return needed and torch.is_grad_enabled()


def _version_counter() -> Callable[[Sequence[torch.Tensor]], Any]:
    """What torch.autograd.graph.increment_version calls, which takes three times as long."""
    count: Any = torch._C._increment_version
    try:
        count(())
    except TypeError:  # an older torch takes one tensor
        return lambda tensors: [count(tensor) for tensor in tensors]
    return cast("Callable[[Sequence[torch.Tensor]], Any]", count)


count_versions = _version_counter()


def are_written_to(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd of an operation in place, as torch's own do: a backward that needs what was there raises."""
    if not is_compiling():
        count_versions(tensors)


def _refuse_tangent(tensor: torch.Tensor, name: str | None) -> None:
    """torch.no_grad() does not end forward mode, so autograd's own refusal is not enough."""
    if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
        label = f"tensor {name!r}" if name else f"unnamed tensor of shape {list(tensor.shape)}"
        raise NotImplementedError(
            f"{label} has a tangent: operations of horoclone have no derivative in forward mode. Pass what "
            "torch.autograd.forward_ad.unpack_dual(tensor).primal gives, and the tangent by an operation of its own."
        )


def share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some of these contiguous tensors have memory in common."""
    return overlap((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)


def refuse_scalar(tensors: Sequence[torch.Tensor]) -> None:
    """ValueError when a tensor has no first dimension to cut."""
    learns(tensors, None)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter needs tensors of at least one dimension: it cuts the first one")


def address_of(tensor: torch.Tensor) -> int:
    """Where its elements begin; never 0. Unsupported for a tensor that only stands for others, as a DTensor does."""
    return tensor.data_ptr() or _address_of_nothing(tensor)


def _address_of_nothing(tensor: torch.Tensor) -> int:
    if tensor.numel():
        raise Unsupported(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no memory of its own: pass the tensor "
            "that it stands for: to_local() or full_tensor() of a DTensor, wait() of a functional collective's."
        )
    return NOWHERE


def from_result(result: Result, row: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A core-owned result as a tensor of shape [first_dimension, *row] over the same memory, which it keeps alive."""
    if not result.nbytes:
        return torch.empty((result.first_dimension, *row), dtype=dtype, device="cpu")
    flat = torch.frombuffer(result, dtype=dtype)
    return flat.view(result.first_dimension, *row) if row else flat


def received_counts(rows_from: Sequence[int]) -> torch.Tensor:
    """How many rows of an alltoall came from each rank."""
    return torch.tensor(rows_from, dtype=getattr(torch, ops.counts_dtype(rows_from)), device="cpu")


def dtype_of(result: Result) -> torch.dtype:
    """The dtype of a tensor that another rank sent."""
    dtype = DTYPE_OF.get(result.dtype)
    if dtype is None:
        raise Unsupported(
            f"what arrived is {list(ops.MOVABLE)[result.dtype]}, which torch {torch.__version__} lacks: let the sender "
            "convert it, or pass its bits as uint8"
        )
    return dtype


def received(result: Result) -> torch.Tensor:
    """What another rank sent, in its dtype and shape, over the core's memory, which the tensor keeps alive."""
    dtype = dtype_of(result)
    if result.nbytes == 0:
        return torch.empty(result.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(result, dtype=dtype).view(result.shape)
