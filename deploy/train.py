"""What the manifests and scripts in deploy/ start: logistic regression on points in a plane, with NumPy alone.

It is elastic where the job is, and else a job of a fixed size; a process alone works as well. Your own script stands in
its place: docs/elastic.md has one in PyTorch. TRAIN_EPOCHS: how many (8). TRAIN_PAUSE_S: seconds that a step takes at
least. TRAIN_SAVES: a folder that all processes share, for checkpoints; without it there are none.
"""

from __future__ import annotations

import os
import socket
import time

import numpy as np

import horoclone as hvd
from horoclone.elastic.generation import generation
from horoclone.elastic.run import run
from horoclone.elastic.sampler import ElasticSampler
from horoclone.elastic.state import ObjectState
from horoclone.objects import broadcast_object

EPOCHS, BATCH, RATE = int(os.environ.get("TRAIN_EPOCHS", "8")), 16, 0.5
PAUSE_S = float(os.environ.get("TRAIN_PAUSE_S", "0"))
HOST = os.environ.get("HOROCLONE_HOSTNAME") or socket.gethostname()


def data() -> tuple[np.ndarray, np.ndarray]:
    """1,024 points, and on which side of a line they lie."""
    points = np.random.default_rng(1).standard_normal((1024, 2))
    return points, (points @ [1.0, -2.0] > 0.3).astype(float)


def say(*words: object) -> None:
    line = " ".join(map(str, (HOST, *words)))
    print(line + "\n", end="", flush=True)  # in one piece: all ranks write into one pipe


def begins() -> None:
    now = generation()
    say(f"generation {now.number}: rank {now.rank} of {now.size}")


hvd.init()
points, sides = data()
sampler = ElasticSampler(points, seed=3)
state = ObjectState(broadcast_object, hvd.rank, weights=np.zeros(3), epoch=0, sampler=sampler)
if os.environ.get("TRAIN_SAVES"):
    state.checkpoint(os.environ["TRAIN_SAVES"], every=20, keep=2)
state.register_reset_callbacks([begins])


def gradient(weights: np.ndarray, chosen: list[int]) -> np.ndarray:
    inputs = np.column_stack([points[chosen], np.ones(len(chosen))])
    guesses = 1 / (1 + np.exp(-inputs @ weights))
    return inputs.T @ (guesses - sides[chosen]) / len(chosen)


@run
def train(state: ObjectState) -> None:
    while state.epoch < EPOCHS:
        mine = list(sampler)
        for index, begin in enumerate(range(0, len(mine), BATCH)):
            chosen = mine[begin : begin + BATCH]
            average = hvd.allreduce(gradient(state.weights, chosen), op=hvd.Average, name="gradient")
            state.weights = state.weights - RATE * average
            sampler.record_batch(index, len(chosen))
            time.sleep(PAUSE_S)
            state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()
        if hvd.rank() == 0:
            say(f"epoch {state.epoch} with {hvd.size()} ranks")


begins()
train(state)
right = ((np.column_stack([points, np.ones(len(points))]) @ state.weights > 0) == (sides > 0)).mean()
say(f"done: {right:.1%} of the points are on the right side")
assert right > 0.95
