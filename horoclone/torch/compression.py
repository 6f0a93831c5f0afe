"""The compressors of torch tensors, under Horovod's name; those with state are in compressors/."""

from __future__ import annotations

from typing import Any

import torch

from horoclone.compression import CastCompressor, NoneCompressor
from horoclone.ops import Average, Sum
from horoclone.torch.compressor import Compressor as Compressor
from horoclone.torch.compressor import GradientCompressor
from horoclone.torch.compressors.low_rank import PowerSGDCompressor
from horoclone.torch.compressors.quantized import Int8Compressor
from horoclone.torch.compressors.top_k import TopKCompressor


class _CastCompressor(CastCompressor):
    @staticmethod
    def is_floating(dtype: Any) -> bool:
        return bool(dtype.is_floating_point)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)


class FP16Compressor(_CastCompressor):
    """float16 on the wire: 11 significant bits, range up to 65504. Sums are accumulated in float32 within a host."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16 on the wire: 8 significant bits, the range of float32."""

    wire_dtype = torch.bfloat16


class Compression:
    """Holds the compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    # For DistributedOptimizer only; classes, or objects made with arguments: Compression.topk(ratio=0.001).
    int8 = Int8Compressor
    powersgd = PowerSGDCompressor
    topk = TopKCompressor


def checked_compression(compression: Any, op: int, predivide: float) -> Any:
    """The compressor that an optimizer uses: an own object for each optimizer where it keeps state.

    ValueError for reductions that a GradientCompressor cannot do.
    """
    if isinstance(compression, type) and issubclass(compression, GradientCompressor):
        compression = compression()
    if isinstance(compression, GradientCompressor) and (op not in (Average, Sum) or predivide != 1.0):
        raise ValueError(
            f"{type(compression).__name__} works with op=hvd.Average and op=hvd.Sum and without "
            "gradient_predivide_factor: it does not send the gradients themselves"
        )
    return compression
