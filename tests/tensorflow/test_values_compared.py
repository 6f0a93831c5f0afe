"""DistributedGradientTape compares the ranks' variables, eagerly and in functions."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, load, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


compared = load(Path(__file__).parents[1] / "told.py", "told")
told = compared.told


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

    def broadcast(self) -> None:
        hvd.broadcast_variables(self.variables, 0)

    def flip(self) -> None:
        value = self.variables[2].numpy()
        value.reshape(-1).view(np.uint8)[1] ^= 8
        self.variables[2].assign(value)


@ranks(2)
def test_a_forgotten_broadcast_is_found_and_one_after_the_first_step_is_none() -> None:
    error = "and not yet after step 3, the ranks do not have the same values"
    compared.finds_a_forgotten_broadcast(Training, hvd.rank(), "hvd.broadcast_variables", error)


@ranks(2)
def test_several_steps_before_the_broadcast_are_no_fault_and_more_are() -> None:
    compared.finds_one_forgotten_after_the_tenth_step(Training, hvd.rank())


@ranks(3)
def test_a_flipped_bit_is_found_at_the_next_check_and_mended() -> None:
    every: list[Any] = [{}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}, {"weight": 3.0}]
    for graph, some in ((False, every), (True, [every[0], every[3]])):
        for options in some:
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
    from horoclone.runtime import steps

    with told("error"):
        training = Training(True)
        training.steps(3)
        steps.restart()  # as elastic states do, when they give all ranks the same
        training.steps(3)
        variables = Training(True).variables
        state = hvd.elastic.TensorFlowState(variables)
        state.sync()
        training.steps(3)


@ranks(3)
def test_ranks_that_have_joined_are_no_hindrance_and_count_anew_with_all() -> None:
    for graph in (False, True):
        for action, end in (
            ("warn", "HOROCLONE_COMPARE"),
            ("repair", "cannot be repaired while a rank has joined"),
        ):
            with told(action) as lines:
                training = Training(graph)
                training.steps(2)
                if hvd.rank():  # rank 0 has joined: the next one tells
                    if hvd.rank() == 1:
                        training.flip()
                    training.steps(1)
                    assert len(lines) == (hvd.rank() == 1), lines
                    assert all("differs between rank 1 and rank 2" in line and end in line for line in lines)
                last = int(hvd.join())
                hvd.broadcast_variables(training.variables, last)
                del lines[:]
                training.steps(4)
                assert not lines
                if hvd.rank() == 2:
                    training.flip()
                training.steps(1)
                assert len(lines) == (hvd.rank() == 0), lines


@ranks(2)
def test_an_error_of_the_comparison_on_one_rank_leaves_no_group_unsent() -> None:
    from horoclone.arrays.compared import VariableComparison

    look = VariableComparison.look

    def fails(*_: Any) -> None:
        raise ValueError("of this rank alone")

    with told("warn"):
        training = Training(False)
        training._options["groups"] = [training.variables[:2]]
        training.steps(1)
        if hvd.rank():
            VariableComparison.look = fails
            with pytest.raises(ValueError, match="of this rank alone"):
                training.steps(1)
            VariableComparison.look = look
        else:
            training.steps(1)
        assert hvd.allreduce(tf.constant([1.0]), op=hvd.Sum).numpy().tolist() == [2.0]


@ranks(2, init=False)
def test_functions_count_their_steps_anew_in_a_new_world() -> None:
    with told("error", 3):
        hvd.init()
        training, is_new = Training(True), hvd.rank() == 1
        training.steps(2)
        hvd.shutdown()
        hvd.init()
        if is_new:
            training = Training(True)
        training.broadcast()
        training.steps(6)
        hvd.shutdown()


@ranks(2)
def test_a_check_reads_its_share_alone() -> None:
    from horoclone.tensorflow import compared as module

    sizes: list[int] = []
    read = module.bytes_of
    module.bytes_of = lambda array: (sizes.append(read(array).nbytes), read(array))[1]
    try:
        for graph in (False, True):
            with told("error", 3):
                variables = [tf.Variable(tf.ones(100_000)) for _ in range(3)]

                def step(mine: Any = variables) -> None:
                    with tf.GradientTape() as tape:
                        loss = tf.add_n([tf.reduce_sum(one) for one in mine])
                    hvd.DistributedGradientTape(tape).gradient(loss, mine)

                run = tf.function(step) if graph else step
                counts = []
                for _ in range(12):
                    sizes.clear()
                    run()
                    counts.append(len(sizes))
                assert counts == [0, 0, *[1] * 8, 3, 1], (graph, counts)
    finally:
        module.bytes_of = read


def test_what_a_tape_compares_is_kept_for_the_last_few_and_holds_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from horoclone.tensorflow.gradient_reduction import KEPT, GradientReduction

    first, reduction = tf.Variable([1.0]), GradientReduction()
    for _ in range(KEPT + 3):
        other = tf.Variable([2.0])
        watch, _ = reduction._watch_of([first, other], "tape")
        assert reduction._watch_of([first, other], "tape")[0] is watch
    assert 1 < len(first._horoclone_watches) <= KEPT  # a new variable may have the address of a dead one
    gone = weakref.ref(other)
    del other, watch, _
    gc.collect()
    assert gone() is None
    monkeypatch.setenv("HOROCLONE_COMPARE", "maybe")
    with pytest.raises(ValueError, match="HOROCLONE_COMPARE"):
        GradientReduction()
