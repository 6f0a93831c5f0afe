"""Gradient compression for Keras 3, on the tensors of whatever backend it runs: 16 bits on the wire.

The compressors of horoclone.tensorflow and horoclone.torch work as well with their own backend.
"""

from __future__ import annotations

from typing import Any

from horoclone.keras.flavor import keras


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
    wire_dtype: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str | None]:  # type: ignore[override]
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "float" not in dtype or dtype == cls.wire_dtype:
            return tensor, None
        return keras.ops.cast(tensor, cls.wire_dtype), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: str | None) -> Any:  # type: ignore[override]
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: 11 significant bits, range up to 65504. Sums are accumulated in float32 within a host."""

    wire_dtype = "float16"


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: 8 significant bits, the range of float32."""

    wire_dtype = "bfloat16"


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
