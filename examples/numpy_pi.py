"""Pi on several processes, without any framework: quadrature and Monte-Carlo.

horoclonerun -np 2 python examples/numpy_pi.py
mpirun -n 2 python examples/numpy_pi.py
"""

import argparse
import time

import numpy as np

import horoclone as hvd


def quadrature(points: int) -> float:
    """Midpoint rule for 4 / (1 + x^2) on [0, 1]; each rank takes every size-th point."""
    x = (np.arange(hvd.rank(), points, hvd.size()) + 0.5) / points
    share = np.array([np.sum(4.0 / (1.0 + x * x)) / points])
    return float(hvd.allreduce(share, op=hvd.Sum)[0])


def monte_carlo(samples: int, seed: int) -> tuple[float, np.ndarray]:
    """The share of random points in the unit square that fall into the circle, and each rank's own estimate."""
    random = np.random.default_rng([seed, hvd.rank()])
    x, y = random.random((2, samples))
    inside = np.count_nonzero(x * x + y * y <= 1.0)
    total = hvd.allreduce(np.array([inside, samples], np.int64), op=hvd.Sum)
    estimates = hvd.allgather(np.array([4.0 * inside / samples]))
    return 4.0 * float(total[0]) / float(total[1]), estimates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1_000_000, help="points of the quadrature, in all")
    parser.add_argument("--samples", type=int, default=1_000_000, help="random samples per rank")
    parser.add_argument("--seed", type=int, default=None, help="default: rank 0 picks one")
    arguments = parser.parse_args()

    hvd.init()
    started = time.perf_counter()

    # Rank 0 decides, everybody follows: ranks must agree on the seed, but not draw the same numbers.
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % 2**32
    seed = int(hvd.broadcast(np.array([seed], np.int64), root_rank=0)[0])

    exact = quadrature(arguments.points)
    guess, estimates = monte_carlo(arguments.samples, seed)
    hvd.barrier()

    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, seed {seed}, {time.perf_counter() - started:.3f} s")
        print(f"quadrature : {exact:.12f}  (error {abs(exact - np.pi):.1e})")
        print(f"Monte-Carlo: {guess:.6f}  (error {abs(guess - np.pi):.1e})")
        for rank, estimate in enumerate(estimates):
            print(f"  rank {rank} alone: {estimate:.6f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
