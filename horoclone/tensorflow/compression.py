"""Gradient compression on the wire: fewer bytes per element. Applied before a reduction, undone after it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Base class of user-defined compressors: two static methods, no state."""

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


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a 16-bit dtype; other tensors as they are."""

    wire_dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        return (tf.cast(tensor, cls.wire_dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:  # type: ignore[override]
        return tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: 11 significant bits, range up to 65504. Sums are accumulated in float32 within a host."""

    wire_dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: 8 significant bits, the range of float32."""

    wire_dtype = tf.bfloat16


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
