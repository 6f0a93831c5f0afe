"""Gradient compression by casting, for every binding: fewer bytes per element on the wire.

It is applied before a reduction and undone after it. Only how to read a dtype and cast a tensor differs between
frameworks.
"""

from __future__ import annotations

from typing import Any


class Compressor:
    """Base class of stateless compressors, also users': two static methods around an allreduce.

    Under jit and in TensorFlow's functions they are traced.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what goes over the wire, and whatever `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor in its original form. `ctx` comes from `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a 16-bit dtype; other tensors as they are. A binding says how it casts."""

    wire_dtype: Any

    @staticmethod
    def is_floating(dtype: Any) -> bool:
        """Of a tensor's dtype."""
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """The tensor in that dtype; itself where it has it already."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        dtype = tensor.dtype
        return (cls.cast(tensor, cls.wire_dtype) if cls.is_floating(dtype) else tensor), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:  # type: ignore[override]
        return cls.cast(tensor, ctx)
