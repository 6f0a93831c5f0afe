"""DistributedGradientTape compares the ranks' variables, eagerly and in functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import load, ranks

tf = pytest.importorskip("tensorflow")

import horoclone.tensorflow as hvd  # noqa: E402

told = load(Path(__file__).parents[1] / "told.py", "told").told


class Training:
    """A small model, and its step as a function or not."""

    def __init__(self, graph: bool, seed: int = 0, **options: Any) -> None:
        chance = np.random.default_rng(seed)
        self.variables = [
            tf.Variable(chance.normal(size=shape).astype(np.float32)) for shape in [(4, 3), (3,), (3, 2)]
        ]
        self._options = options
        self._run = tf.function(self._step) if graph else self._step

    def _step(self, x: Any) -> None:
        w, b, out = self.variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ w + b) @ out))
        gradients = hvd.DistributedGradientTape(tape, **self._options).gradient(loss, self.variables)
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._run(tf.constant(np.random.normal(size=(5, 4)).astype(np.float32)))

    def flip(self) -> None:
        value = self.variables[2].numpy()
        value.reshape(-1).view(np.uint8)[1] ^= 8
        self.variables[2].assign(value)


@ranks(2)
def test_a_forgotten_broadcast_is_found_at_the_second_step_and_one_after_the_first_is_none() -> None:
    for graph in (False, True):
        with told("warn") as lines:
            training = Training(graph, hvd.rank())
            training.steps(1)
            assert not lines
            training.steps(3)
            assert len(lines) == (hvd.rank() == 0), lines
            assert all(
                "after step 1 the ranks" in line and "hvd.broadcast_variables" in line for line in lines
            )
        with told("error"):
            training = Training(graph, hvd.rank())
            training.steps(1)
            hvd.broadcast_variables(training.variables, 0)
            training.steps(3)
            if hvd.rank() == 1:
                training.flip()
            with pytest.raises(
                Exception, match="and not yet after step 3, the ranks do not have the same values"
            ):
                training.steps(1)


@ranks(3)
def test_a_flipped_bit_is_found_at_the_next_check_and_mended() -> None:
    for graph in (False, True):
        for options in ({}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}, {"weight": 3.0}):
            with told("repair") as lines:
                training = Training(graph, **options)
                training.steps(4)
                assert not lines
                if hvd.rank() == 1:
                    training.flip()
                training.steps(1)
                assert len(lines) == (hvd.rank() == 0), (options, lines)
                assert all("the weight" in line and "differs on rank 1 (against" in line for line in lines)
                training.steps(2)
                assert len(lines) == (hvd.rank() == 0)
                everybody = hvd.allgather_object([v.numpy().tobytes() for v in training.variables])
                assert all(one == everybody[0] for one in everybody)


@ranks(2)
def test_a_rank_that_counts_its_steps_from_elsewhere_is_no_fault_of_weights() -> None:
    from horoclone.elastic.variables import comparison

    with told("error"):
        training = Training(True)
        training.steps(3)
        comparison.restart()  # as elastic states do, when they give all ranks the same
        training.steps(3)
        variables = Training(True).variables
        state = hvd.elastic.TensorFlowState(variables)
        state.sync()
        training.steps(3)
