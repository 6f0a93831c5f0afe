"""Many small tensors at once, one by one and grouped: `python benchmarks/many_small.py`. Exit codes: see session.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tensor_sets import main

SETS = {
    "100 x 64 B": [16] * 100,
    "1000 x 64 B": [16] * 1000,
    "1000 x 1 KiB": [256] * 1000,
    "1000 x 16 KiB": [4096] * 1000,
}

if __name__ == "__main__":
    sys.exit(main(None, __doc__ or "", SETS, "Many small tensors"))
