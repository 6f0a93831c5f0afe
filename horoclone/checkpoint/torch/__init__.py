"""Registers PyTorch's tensors with `hvd.checkpoint`. See docs/checkpoints.md."""

from __future__ import annotations

from typing import Any

import torch

from horoclone.checkpoint.leaves import Bytes, Form, register

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64",
}  # fmt: skip
for _ours, _theirs in (
    ("uint16", "U16"), ("uint32", "U32"), ("uint64", "U64"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"),
):  # fmt: skip
    if hasattr(torch, _ours):
        _NAMES[getattr(torch, _ours)] = _theirs
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class _Tensors:
    """Tensors, or parameters, that require a gradient or not."""

    def __init__(self, name: str, cls: type[torch.Tensor], requires_grad: bool) -> None:
        self.name, self._class, self._requires_grad = name, cls, requires_grad

    def owns(self, value: Any) -> bool:
        return type(value) is self._class and value.requires_grad == self._requires_grad

    def form(self, value: torch.Tensor) -> Form:
        if value.layout is not torch.strided or value.is_nested or value.dtype not in _NAMES or value.is_meta:
            raise TypeError(
                f"tensors of {value.dtype}, {value.layout} on {value.device} cannot be saved; convert it"
            )
        return Form(_NAMES[value.dtype], tuple(value.shape))

    def copy(self, value: torch.Tensor, into: Bytes) -> None:
        if into.nbytes:  # torch views no empty array as another dtype
            torch.from_numpy(into).view(value.dtype).reshape(value.shape).copy_(value.detach())

    def made(self, form: Form, data: Bytes, like: Any | None) -> torch.Tensor:
        tensor = torch.empty(form.shape, dtype=_DTYPES[form.dtype], device="cpu")
        if form.nbytes:  # torch views no empty array as another dtype
            tensor = torch.from_numpy(data).view(tensor.dtype).reshape(form.shape)
        tensor = tensor if like is None else tensor.to(like.device)
        if self._class is torch.nn.Parameter:
            return torch.nn.Parameter(tensor, self._requires_grad)
        return tensor.requires_grad_(self._requires_grad)


class _Others(_Tensors):
    """Tensors of other classes: what they add would be lost."""

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def form(self, value: torch.Tensor) -> Form:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"a tensor of the class {kind} cannot be saved; pass value.full_tensor() of a DTensor, its shard in Owned, "
            "or value.as_subclass(torch.Tensor)"
        )


register(_Others("torch subclass", torch.Tensor, False))
for _class, _word in ((torch.nn.Parameter, "parameter"), (torch.Tensor, "")):
    register(_Tensors(f"torch {_word} with gradient".replace("  ", " "), _class, True))
    register(_Tensors(f"torch {_word}".strip(), _class, False))
