"""Numbers of elements of models' parameters, in the order in which backward completes their gradients."""

from __future__ import annotations

from itertools import pairwise

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, as torch's DDP cuts them


def resnet50() -> list[int]:
    """161 tensors, 25,557,032 elements: the architecture of He et al. (2016) with 1,000 classes."""
    sizes = [3 * 64 * 49, 64, 64]  # first convolution; weight and bias of its batch norm
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for into, out, area in ((inputs, width, 1), (width, width, 9), (width, 4 * width, 1)):
                sizes += [into * out * area, out, out]
            if block == 0:
                sizes += [inputs * 4 * width, 4 * width, 4 * width]
            inputs = 4 * width
    return [*sizes, 2048 * 1000, 1000][::-1]


def gpt(layers: int = 6, width: int = 512, words: int = 16384, positions: int = 1024) -> list[int]:
    """A small decoder with tied embeddings: 27.8 million elements in 76 tensors."""
    sizes = [words * width, positions * width]
    for _ in range(layers):
        sizes += [width, width, 3 * width * width, 3 * width, width * width, width]
        sizes += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    return [*sizes, width, width][::-1]


def buckets(counts: list[int], item: int = 4) -> list[tuple[int, int]]:
    """Ranges of elements, each closed by the tensor that fills it: FIRST_BUCKET bytes, then BUCKET bytes."""
    cuts, size, limit, at = [0], 0, FIRST_BUCKET, 0
    for count in counts:
        at += count
        size += count * item
        if size >= limit:
            cuts.append(at)
            size, limit = 0, BUCKET
    return list(pairwise(cuts if cuts[-1] == at else [*cuts, at]))


MODELS = {"ResNet-50": resnet50, "GPT": gpt}
SMALL = {
    "100 x 64 B": [16] * 100,
    "1000 x 64 B": [16] * 1000,
    "1000 x 1 KiB": [256] * 1000,
    "1000 x 16 KiB": [4096] * 1000,
}
