"""The gradients of two models, as private tensors and in buckets: `python benchmarks/models.py`.

horoclone one by one, grouped, and in declared buckets that lie in shared memory (what its optimizer does); gloo one by
one and in DDP's buckets; MPI one by one, blocking, and packed. Exit codes: see session.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gradients import MODELS
from tensor_sets import main

if __name__ == "__main__":
    sys.exit(
        main(None, __doc__ or "", {name: make() for name, make in MODELS.items()}, "Gradients of models")
    )
