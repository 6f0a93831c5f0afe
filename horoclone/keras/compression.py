"""The compressors for Keras 3, on the tensors of any backend; horoclone/compression.py does the casting.

With their own backend, the compressors of horoclone.tensorflow and horoclone.torch work as well.
"""

from __future__ import annotations

from typing import Any

from horoclone.compression import CastCompressor, NoneCompressor
from horoclone.compression import Compressor as Compressor  # users' compressors derive from it
from horoclone.keras.flavor import keras


class _CastCompressor(CastCompressor):
    @staticmethod
    def is_floating(dtype: Any) -> bool:
        return "float" in keras.backend.standardize_dtype(dtype)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        name = keras.backend.standardize_dtype(dtype)
        return (
            tensor if name == keras.backend.standardize_dtype(tensor.dtype) else keras.ops.cast(tensor, name)
        )


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
