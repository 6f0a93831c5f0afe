"""Draws docs/elastic.svg: the loss of a real elastic job over time, with two ranks that are killed and two that join.

    python docs/make_elastic_picture.py [--seconds 9]

horoclonerun starts three ranks on this machine, which train a small network on NumPy. Ranks 2 and 1 are killed, one
after the other, and the slot of each gets a new worker, which joins. Rank 0 prints a line for each step.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve()
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 360, 60, 20, 40, 90


def worker(seconds: float) -> None:
    import numpy as np

    import horoclone as hvd
    from horoclone.elastic.recovery import last_recovery
    from horoclone.elastic.run import run
    from horoclone.elastic.state import ObjectState

    hvd.init()
    chance = np.random.default_rng(1)
    points = chance.normal(size=(1024, 2))
    inside = (np.square(points).sum(1, keepdims=True) < 1.4).astype(float)
    weights = [chance.normal(size=(2, 16)), np.zeros(16), 0.1 * chance.normal(size=(16, 1)), np.zeros(1)]
    state = ObjectState(hvd.broadcast_object, hvd.rank, weights=weights, step=0, elapsed=0.0)

    @run
    def train(state: ObjectState) -> None:
        first, before = True, time.monotonic()
        while state.elapsed < seconds:
            batch = np.random.default_rng([state.step, hvd.rank()]).choice(1024, 64)
            x, y = points[batch], inside[batch]
            w, b, v, c = state.weights
            hidden = np.tanh(x @ w + b)
            guess = 1 / (1 + np.exp(-(hidden @ v + c)))
            slope = (guess - y) / len(x)
            into = slope @ v.T * (1 - hidden**2)
            loss = -np.mean(y * np.log(guess + 1e-9) + (1 - y) * np.log(1 - guess + 1e-9))
            mine = [x.T @ into, into.sum(0), hidden.T @ slope, slope.sum(0), np.array([loss])]
            *slopes, loss = hvd.grouped_allreduce(mine, name="slopes")
            state.weights = [one - 0.7 * other for one, other in zip(state.weights, slopes, strict=True)]
            time.sleep(0.015)
            state.step, state.elapsed = state.step + 1, state.elapsed + time.monotonic() - before
            before = time.monotonic()
            state.commit()
            if hvd.rank() == 0:
                print(f"point {time.monotonic():.4f} {hvd.size()} {state.step} {loss[0]:.5f}", flush=True)
            if first and hvd.rank() == 0:
                record = last_recovery()
                print(f"recovery {record.generation} {record.source} {1000 * record.total_s:.0f}", flush=True)
            first = False

    train(state)


def process_of_rank(job: subprocess.Popen[str], rank: int) -> int:
    """The worker of this job that has started as that rank."""
    needle = f"HOROVOD_RANK={rank}".encode()
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    queue = [int(pid) for pid in children]
    while queue:
        pid = queue.pop()
        queue += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise SystemExit(f"no process of rank {rank} was found")


def drawn(points: list[tuple[float, int, int, float]], kills: list[float]) -> str:
    """An SVG of the points (seconds, ranks, step, loss) with lines where ranks were killed and where one joined."""
    end = points[-1][0]
    most = max(loss for *_, loss in points)
    joins = [now[0] for before, now in pairwise(points) if now[1] > before[1]]

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * t / end

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / most)

    def text(px: float, py: float, what: str, more: str = "") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" {more}>{what}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(int(end) + 1):
        out.append(f'<path d="M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        out.append(text(x(tick), HEIGHT - BOTTOM + 17, f"{tick} s", 'text-anchor="middle" fill="#555"'))
    for part in range(5):
        loss = most * part / 4
        out.append(text(LEFT - 8, y(loss) + 4, f"{loss:.2f}", 'text-anchor="end" fill="#555"'))
    line = " ".join(f"{x(t):.1f},{y(loss):.1f}" for t, _, _, loss in points)
    out.append(f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="1.3"/>')
    for t, colour, what, high in (
        *((t, "#c02020", "kill -9", TOP - 12) for t in kills),
        *((t, "#1c7c34", "a new rank joins", TOP + 6) for t in joins),
    ):
        out.append(
            f'<path d="M{x(t):.1f} {TOP - 8}V{HEIGHT - BOTTOM}" stroke="{colour}" stroke-width="1.5"/>'
        )
        out.append(text(x(t) + 5, high, what, f'fill="{colour}"'))
    base = HEIGHT - 18
    for before, now in pairwise(points):
        width = x(now[0]) - x(before[0])
        high = 9 * now[1]
        place = f'x="{x(before[0]):.2f}" y="{base - high}" width="{width + 0.3:.2f}" height="{high}"'
        out.append(f'<rect {place} fill="#b9cde6"/>')
    out.append(text(LEFT - 8, base - 8, "ranks", 'text-anchor="end" fill="#555"'))
    out.append(text(LEFT, 18, "loss of each step", 'fill="#1f5fa8"'))
    return "\n".join([*out, "</svg>", ""])


def main(seconds: float) -> None:
    command = [sys.executable, "-m", "horoclone.launch", "-np", "3", "--min-np", "1", "-H", "localhost:3"]
    command += [sys.executable, str(HERE), "--worker", "--seconds", str(seconds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        points, kills = followed(job, seconds)
    finally:
        if job.poll() is None:
            job.kill()
    HERE.with_name("elastic.svg").write_text(drawn(points, kills))
    gaps = [now[0] - before[0] for before, now in pairwise(points)]
    print(
        f"{len(points)} steps; the longest times between two: {[round(gap, 3) for gap in sorted(gaps)[-3:]]} s"
    )


def followed(
    job: subprocess.Popen[str], seconds: float
) -> tuple[list[tuple[float, int, int, float]], list[float]]:
    """The points that the job prints, and when its ranks were killed, in seconds from the first point."""
    points: list[tuple[float, int, int, float]] = []
    kills: list[float] = []
    began = 0.0
    plan = [(0.2 * seconds, 2), (0.6 * seconds, 1)]  # when, and which rank
    assert job.stdout is not None
    for line in job.stdout:
        words = line.removeprefix("[0] ").split()
        if words[0] == "recovery":
            print(line.rstrip())
        if words[0] != "point":
            continue
        at, size, step = float(words[1]), int(words[2]), int(words[3])
        began = began or at
        points.append((at - began, size, step, float(words[4])))
        if plan and at - began >= plan[0][0] and size == 3:
            os.kill(process_of_rank(job, plan.pop(0)[1]), signal.SIGKILL)
            kills.append(time.monotonic() - began)
    if job.wait(60) != 0 or plan:
        raise SystemExit(f"the job ended with {job.returncode}, and {len(plan)} ranks were not killed")
    return points, kills


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=9.0)
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    worker(args.seconds) if args.worker else main(args.seconds)
