"""Gradient compression on the wire: fewer bytes per element. Applied before a reduction, undone after it."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Base class of user-defined compressors: two static methods, no state."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns what goes over the wire, and whatever `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor in its original form. `ctx` comes from `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a 16-bit dtype; other tensors as they are."""

    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:  # type: ignore[override]
        wire = tensor.to(cls.wire_dtype) if tensor.dtype.is_floating_point else tensor
        return wire, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: 11 significant bits, range up to 65504. Sums are accumulated in float32 within a host."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: 8 significant bits, the range of float32."""

    wire_dtype = torch.bfloat16


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
