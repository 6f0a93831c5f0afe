"""Small synthetic data for Horovod's examples, where their loaders look for it, and stand-ins for what downloads.

Each maker writes into the folder in which an example runs; run.py puts `<folder>/modules` in front of PYTHONPATH.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

STAND_INS = Path(__file__).resolve().parent / "modules"


def digits(count: int, side: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [count, side, side], labels uint8 [count]): a bright block whose place is the label, and noise."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count, dtype=np.uint8)
    images = random.integers(0, 60, (count, side, side), dtype=np.uint8)
    step = side // 5
    for image, label in zip(images, labels, strict=True):
        row, column = (1 + 2 * (label // 5)) * step, (label % 5) * step
        image[row : row + step, column : column + step] = 255
    return images, labels


def mnist_files(folder: Path) -> None:
    """MNIST's own files for torchvision's loader (it looks whether they are there): 768 and 256 images of 28 x 28."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count, seed in (("train", 768, 1), ("t10k", 256, 2)):
        images, labels = digits(count, 28, seed)
        parts = {
            f"{name}-images-idx3-ubyte": struct.pack(">IIII", 0x803, *images.shape) + images.tobytes(),
            f"{name}-labels-idx1-ubyte": struct.pack(">II", 0x801, len(labels)) + labels.tobytes(),
        }
        for file, content in parts.items():
            (raw / file).write_bytes(content)
            (raw / f"{file}.gz").write_bytes(gzip.compress(content, 1))


def keras_mnist(folder: Path) -> None:
    """What keras.datasets.mnist.load_data() returns in the example: 1,024 and 256 images of 8 x 8, which the examples'
    models take as well; their thousands of steps are then quick."""
    train, test = digits(1024, 8, 3), digits(256, 8, 4)
    np.savez(folder / "mnist.npz", x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])


def vision_models(folder: Path) -> None:
    """Nothing: the examples make their images themselves."""
