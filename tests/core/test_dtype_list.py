"""The list of element types (csrc/include/horoclone_dtypes.h), against those who name them outside of C++."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from horoclone import ops

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LIST = (CSRC / "include" / "horoclone_dtypes.h").read_text()
REDUCED = re.findall(r'X\((\w+), +k(\w+), +"(\w+)", +(\d+), .*, +(\d), "([\w?]*)"\)', LIST)
MOVED = re.findall(r'X\((\w+), "(\w+)", (\d+)\)', LIST)


def test_the_numbers_of_python_are_the_positions_in_the_list() -> None:
    assert {name: number for number, (_, _, name, *_) in enumerate(REDUCED)} == ops.DTYPES
    assert tuple(name for _, name, _ in MOVED) == ops.MOVED
    assert [c.lower() for c, _, name, *_ in REDUCED] == list(ops.DTYPES)
    assert [c.lower() for c, *_ in MOVED] == list(ops.MOVED)


def test_sizes_and_formats_are_those_of_numpy() -> None:
    for _, _, name, size, _, formats in REDUCED:
        if formats:
            dtype = np.dtype(name)
            assert int(size) == dtype.itemsize
            assert memoryview(np.zeros(1, dtype)).format in formats
    for _, name, size in MOVED:
        if hasattr(np, name):
            assert int(size) == np.dtype(name).itemsize


def test_what_is_reduced_has_a_kernel_on_gpus() -> None:
    kernels = re.findall(r"HC_KERNEL\(hc_reduce_(\w+),", (CSRC / "device/kernels/kernels.cu").read_text())
    assert sorted(kernels) == sorted(short.lower() for _, short, *_ in REDUCED)
