"""The compressors of TensorFlow's tensors, under Horovod's name; horoclone/compression.py does the casting."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horoclone.compression import CastCompressor, NoneCompressor
from horoclone.compression import Compressor as Compressor  # users' compressors derive from it


class _CastCompressor(CastCompressor):
    @staticmethod
    def is_floating(dtype: Any) -> bool:
        return bool(dtype.is_floating)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: 11 significant bits, range up to 65504. Sums are accumulated in float32 within a host."""

    wire_dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: 8 significant bits, the range of float32."""

    wire_dtype = tf.bfloat16


class Compression:
    """Holds the compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
