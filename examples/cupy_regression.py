"""CuPy arrays, one GPU for each rank: least squares by gradient descent, each rank on rows of its own.

horoclonerun -np 2 python examples/cupy_regression.py    (needs CuPy and GPUs; says so where they are missing)
"""

import argparse
import sys

import numpy as np

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:
    print(f"SKIPPED cupy_regression.py: it needs CuPy and a GPU: {error}")
    sys.exit()

import horoclone.cupy as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="of each rank")
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    hvd.init()
    cupy.cuda.Device(hvd.local_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    random = np.random.default_rng(hvd.rank())
    truth = np.linspace(-1.0, 1.0, arguments.columns)
    rows = random.standard_normal((arguments.rows, arguments.columns))
    noise = 0.1 * random.standard_normal(arguments.rows)
    inputs, targets = cupy.asarray(rows), cupy.asarray(rows @ truth + noise)
    weights = cupy.asarray(random.standard_normal(arguments.columns))
    hvd.broadcast_(weights, root_rank=0)

    for _ in range(arguments.steps):
        wrong = inputs @ weights - targets
        gradient = inputs.T @ wrong / arguments.rows
        # The mean over the ranks; CuPy's stream waits, not the host
        hvd.allreduce_(gradient, name="gradient")
        weights = weights - 0.3 * gradient

    errors = hvd.allgather(cupy.asarray([float(cupy.abs(weights - cupy.asarray(truth)).max())]))
    if hvd.rank() == 0:
        worst = ", ".join(f"{error:.5f}" for error in errors.get())
        print(f"{hvd.size()} ranks; largest error of a weight, on each rank: {worst}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
