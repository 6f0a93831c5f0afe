"""The compressors of JAX's arrays; horoclone/compression.py casts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from horoclone.compression import CastCompressor, NoneCompressor
from horoclone.compression import Compressor as Compressor  # users' compressors derive from it


class _CastCompressor(CastCompressor):
    @staticmethod
    def is_floating(dtype: Any) -> bool:
        return bool(jnp.issubdtype(dtype, jnp.floating))

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: 11 significant bits, range up to 65504. Sums are accumulated in float32 within a host."""

    wire_dtype = jnp.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: 8 significant bits, the range of float32."""

    wire_dtype = jnp.bfloat16


class Compression:
    """Holds the compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
