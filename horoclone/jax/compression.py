"""Gradient compression on the wire: fewer bytes per element. Applied before a reduction, undone after it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Compressor:
    """Base class of user-defined compressors: two static methods that can be traced, no state."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        """Returns what goes over the wire, and whatever `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(array: Any, kept: Any) -> Any:
        """Returns the array in its original form. `kept` comes from `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends arrays as they are."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, None]:
        return array, None

    @staticmethod
    def decompress(array: Any, kept: None) -> Any:
        return array


class _CastCompressor(Compressor):
    """Sends floating-point arrays in a 16-bit dtype; other arrays as they are."""

    wire_dtype: Any

    @classmethod
    def compress(cls, array: Any) -> tuple[Any, Any]:  # type: ignore[override]
        wide = jnp.issubdtype(array.dtype, jnp.floating)
        return (array.astype(cls.wire_dtype) if wide else array), array.dtype

    @classmethod
    def decompress(cls, array: Any, kept: Any) -> Any:  # type: ignore[override]
        return array.astype(kept)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: 11 significant bits, range up to 65504. Sums are accumulated in float32 within a host."""

    wire_dtype = jnp.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: 8 significant bits, the range of float32."""

    wire_dtype = jnp.bfloat16


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
